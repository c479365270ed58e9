"""All of GRPO on one screen: a GRU learns to put letters in order, in seconds, with torch alone."""

import copy

import torch

N, G, T, V = 16, 8, 6, 5  # prompts per step, samples per prompt (a group), tokens, letters
CLIP_RANGE, KL_COEF, ITERATIONS, STEPS = 0.2, 0.02, 2, 60


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = torch.nn.Embedding(V, 32), torch.nn.GRU(32, 32, batch_first=True)
        self.head = torch.nn.Linear(32, V)

    def forward(self, ids):  # (B, L) -> log-probs of each possible next letter, (B, L, V)
        return self.head(self.gru(self.embed(ids))[0]).log_softmax(-1)


def logprobs(model, ids):  # log-probs of the letters that were sampled, (B, 1+T) -> (B, T)
    return model(ids[:, :-1]).gather(-1, ids[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(model, ids):  # letter by letter, (B, 1) -> (B, 1+T); a prompt is the first letter
    for _ in range(T):
        ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].exp(), 1)], dim=1)
    return ids


def compute_grpo_loss(new_logprobs, old_logprobs, advantages, ref_logprobs):
    ratio = (new_logprobs - old_logprobs).exp()  # (B, T): the policy has moved since it sampled
    unclipped, clipped = (
        r * advantages for r in (ratio, ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE))
    )
    log_ref = ref_logprobs - new_logprobs
    k3 = log_ref.exp() - log_ref - 1  # estimates KL(policy || reference)
    loss = (-torch.min(unclipped, clipped) + KL_COEF * k3).mean()
    return loss, k3.mean().item(), (clipped < unclipped).float().mean().item()


torch.manual_seed(0)
policy = Policy()
reference = copy.deepcopy(policy)  # grpo.py: the model without its adapter, which takes no memory
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    prompts = torch.randint(V, (N, 1)).repeat_interleave(G, dim=0)
    ids = sample(policy, prompts)  # 1. a group of G samples for each prompt
    rewards = (ids[:, 1:] >= ids[:, :-1]).float().mean(1).view(N, G)  # 2. share of steps upwards
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).view(N * G, 1)  # 3. z-scores
    with torch.no_grad():  # 4. grpo.py keeps the first from sampling: one pass less
        old_logprobs, ref_logprobs = logprobs(policy, ids), logprobs(reference, ids)
    for _ in range(ITERATIONS):  # of the same samples; grpo.py: in micro-batches, for memory
        new_logprobs = logprobs(policy, ids)  # 4. with a gradient
        loss, kl, clipped = compute_grpo_loss(
            new_logprobs, old_logprobs, advantages, ref_logprobs
        )  # 5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # 6
    if step % 10 == 0 or step == 1:
        line = f"step {step}: reward {rewards.mean():.2f}, kl {kl:.3f}, {clipped:.0%} clipped, "
        line += f"{(centred == 0).all(1).float().mean():.0%} without spread: "
        print(line + " ".join("".join("abcde"[i] for i in row) for row in ids[: 3 * G : G]))
