"""Which losses have one gradient, with one optimiser step per batch.

A loss weighs the log-prob of each token. Where the weights of two losses are proportional, so are
their gradients, whatever the model. So no model is needed: log-probs are numbers here, and groups
are random.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import losses
from benchmarks.tables import markdown

NUM_GROUPS, GROUP_SIZE, LENGTH, STEPS = 16, 4, 11, 10
NAMES = ["GRPO", "GSPO", "DAPO's token mean", "DAPO's two clip ranges", "CISPO"]
NAMES += ["Dr. GRPO", "RLOO", "GPG", "REINFORCE++-baseline", "REINFORCE++", "RAFT", "REINFORCE"]
NAMES += ["No baseline"]


def draw(task, seed):
    """Rewards (N, G) and lengths (N, G) of a batch, from prompts that differ in difficulty.

    pictures: one length, graded rewards; texts: 2 to 11 tokens, rewards of 0 and 1.
    """
    torch.manual_seed(seed)
    prompts, samples = torch.rand(NUM_GROUPS, 1), torch.rand(NUM_GROUPS, GROUP_SIZE)
    if task == "pictures":
        return (prompts + samples) / 2, torch.full(samples.shape, LENGTH)
    return (samples < prompts).float(), torch.randint(2, LENGTH + 1, samples.shape)


def weights(grpo, rewards, lengths):
    """The gradient of the log-probs in an update by a module with a loss, (N * G * T,)."""
    model = torch.nn.Module()
    model.device = torch.device("cpu")
    model.logprobs = torch.nn.Parameter(torch.full((*rewards.shape, LENGTH), -1.0))
    found = []

    class Trainer(grpo.GRPO):
        def logprobs(self, group, rows):
            return model.logprobs[group.prompt_ids][rows]

        def step(self):
            found.append(model.logprobs.grad.flatten())
            return 1.0

    old, masks = model.logprobs.detach(), torch.arange(LENGTH) < lengths[..., None]
    groups = [grpo.Group(i, None, None, old[i], mask=mask.float()) for i, mask in enumerate(masks)]
    grpo.set_advantages(groups, rewards.flatten())
    settings = grpo.GRPOSettings(micro_batch_size=GROUP_SIZE)
    Trainer(model, torch.optim.SGD(model.parameters()), settings).update(groups)
    return found[0]


def cosines(task):
    """(K, K): of each two of the NAMES the mean over batches of the cosine of their gradients."""
    batches, modules = [draw(task, seed) for seed in range(STEPS)], map(losses.module, NAMES)
    found = [torch.stack([weights(each, *batch) for batch in batches]) for each in modules]
    found = torch.nn.functional.normalize(torch.stack(found), dim=-1)  # (K, STEPS, N*G*T)
    return torch.einsum("isn,jsn->ij", found, found) / STEPS


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    others = [NAMES.index(x) for x in ("GRPO", "DAPO's token mean", "Dr. GRPO")]
    found = torch.cat([cosines(task)[:, others] for task in ("pictures", "texts")], dim=1)
    lines = [[name, *(f"{x:.3f}" for x in row)] for name, row in zip(NAMES, found.tolist())]
    print(markdown(", ".join(["cosine with", *2 * [NAMES[i] for i in others]]), lines))


if __name__ == "__main__":
    main()
