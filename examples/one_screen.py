"""All of GRPO on one screen: a GRU learns to write letters in order. It takes torch and seconds."""

import torch

N, G, T, V = 16, 8, 6, 5  # prompts per step, samples per prompt (a group), tokens, letters
CLIP_RANGE, KL_COEF, ITERATIONS, STEPS = 0.2, 0.02, 2, 30


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = torch.nn.GRU(V, 32, batch_first=True), torch.nn.Linear(32, V)

    def forward(self, ids):  # (B, L) -> log-probs of the letter after each, (B, L, V)
        return self.head(self.gru(torch.eye(V)[ids])[0]).log_softmax(-1)


@torch.no_grad()
def sample(model, ids):  # letter after letter: (B, 1) -> (B, 1+T). A prompt is the first letter.
    for _ in range(T):
        ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].exp(), 1)], dim=1)
    return ids


def get_per_token_logprobs(model, input_ids):  # of the sampled letters, all at once: (B, T)
    return model(input_ids[:, :-1]).gather(-1, input_ids[:, 1:, None])[..., 0]


def compute_grpo_loss(new_logprobs, old_logprobs, advantages, ref_logprobs):
    ratio = (new_logprobs - old_logprobs).exp()  # (B, T): 1 until the policy has moved
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantages
    policy_terms = -torch.min(unclipped, clipped)
    log_ref_ratio = ref_logprobs - new_logprobs
    k3 = log_ref_ratio.exp() - log_ref_ratio - 1  # its mean is KL(policy || reference)
    return (policy_terms + KL_COEF * k3).mean(), k3.mean(), (clipped < unclipped).float().mean()


torch.set_num_threads(1)  # more threads slow matrices this small
torch.manual_seed(0)
policy, reference = Policy(), Policy()
reference.load_state_dict(policy.state_dict())  # grpo.py has no copy: a LoRA is switched off
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
for step in range(1, STEPS + 1):
    ids = sample(policy, torch.randint(V, (N, 1)).repeat_interleave(G, dim=0))  # 1. N groups of G
    rewards = (ids[:, 1:] >= ids[:, :-1]).float().mean(1).view(N, G).double()  # 2. share in order
    std, mean = torch.std_mean(rewards, 1, keepdim=True)  # in float64 equal rewards have std 0
    advantages = ((rewards - mean) / (std + 1e-6)).view(N * G, 1).float()  # 3. z-scores
    with torch.no_grad():  # 4. grpo.py keeps old_logprobs from sampling: one pass less
        old_logprobs, ref_logprobs = (get_per_token_logprobs(x, ids) for x in (policy, reference))
    for _ in range(ITERATIONS):  # grpo.py: in micro-batches, whose gradients add up, for memory
        new_logprobs = get_per_token_logprobs(policy, ids)  # 4. with a gradient
        given = new_logprobs, old_logprobs, advantages, ref_logprobs
        loss, kl, clip_fraction = compute_grpo_loss(*given)  # 5.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # 6.
    words = ["".join("abcde"[i] for i in row) for row in ids[: 3 * G : G]]
    line = f"step {step}: reward {rewards.mean():.2f}, kl {kl:.3f}, {clip_fraction:.1%} clipped"
    print(f"{line}, {(std == 0).float().mean():.0%} without spread:", *words)
