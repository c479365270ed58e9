"""GRPO in one file: group relative policy optimisation of an autoregressive model that writes image codes.

The policy pi writes T tokens o_1..o_T for a prompt q; a decoder paints them; a reward R scores the picture. GRPO
(Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1) raises the expected reward without a value network:
the baseline of a sample is the mean reward of its group, all G pictures of the same prompt. It minimises

    loss = -1/G sum_i 1/T sum_t [ min(r A, clip(r, 1 - c, 1 + c) A) - kl_coef * k3 ]

    r  = pi(o_t) / pi_old(o_t)                    ratio: how far the policy has moved since it sampled this token
    A  = (R_i - mean(R)) / (std(R) + eps)         advantage: the z-score of the reward in its group of G
    k3 = ref/pi - log(ref/pi) - 1                 an estimate of KL(pi || reference), never negative

averaged over the N prompts of a step. On fresh samples, which is all there is with one iteration, the ratio is 1,
nothing is clipped, and the gradient is the policy gradient: that of -A log pi(o_t), and of the KL term.

One training step, in the order of this file:

    1. generate_with_logprobs     sample G sequences of exactly T tokens per prompt, keep their log-probs (pi_old)
    2. paint and score            yours: tokens -> pictures -> one reward per picture; GLM-Image's are in train.py
    3. compute_advantages         rewards -> z-scores, per group
    4. get_per_token_logprobs     log-probs of those tokens in one forward pass: the reference's, then the policy's
    5. compute_grpo_loss          the formula above
    6. GRPO                       ties 1, 4 and 5 together; its update: micro-batches, gradient clipping, the optimiser

The reference is the model before training. It costs no memory: the policy is a frozen base plus a LoRA adapter, so the
base with its adapter disabled is the reference. Nothing here depends on GLM-Image: examples/text_model.py trains a text
model with this file alone. On a CPU, call torch.set_num_threads(1) for models as small as that one.

For another loss, edit:

    Dr. GRPO                      the division in compute_advantages, and `average` in compute_grpo_loss
    DAPO's two clip ranges        the clamp in compute_grpo_loss
    DAPO's dynamic sampling       a loop of your own around sampling and scoring
    GSPO                          the ratio in compute_grpo_loss
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers.generation.logits_process import TopPLogitsWarper

MAX_GRAD_NORM = 1.0  # one rare prompt must not undo a run; the norm before clipping is logged
LOSS_METRICS = ("loss", "policy_loss", "kl", "clip_fraction", "ratio_mean", "mean_logprob_gap", "max_logprob_gap")

# cuDNN's attention, which torch prefers on an H100 since 2.11, is left out: wrong tokens are reported with fewer than 8
# key-value heads (pytorch 193893; GLM-Image has 2), and gradients that are NaN under a mask (trl 7181, torch 2.13).
without_cudnn_attention = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

# ---- 1. sample ------------------------------------------------------------------------------------------------------


class NotFinite(ValueError):
    """Sampled log-probs are NaN or infinite; args[0]: the indices of the prompts concerned."""


@torch.no_grad()
@without_cudnn_attention
def generate_with_logprobs(
    model, prompts, num_new_tokens, *, num_samples=1, position_ids=None, allowed_ids=slice(0, None), temperature=1.0,
    top_p=1.0, generators=None, forward=None,
):  # fmt: skip
    """Sample `num_samples` (G) continuations of exactly `num_new_tokens` (T) tokens for each of N prompts.

    All N*G run side by side, because a token costs one read of all weights, for one sequence as for many. Not with
    transformers' generate(): it takes no generator per prompt, and to tell what top-p removed it keeps all scores.

    Args:
        prompts: N tensors (L_i,) int64. Shorter ones are padded on the left, and the padding is masked.
        position_ids: N tensors (3, L_i+T) int64, or None for a text model. A model with 3-D positions that is not given
            them falls back to text positions, silently.
        allowed_ids: which part of the vocabulary may be sampled, V ids. For image codes: no end tokens, no unused ids.
        temperature: divides the logits; must be above 0. top_p: must be in (0, 1]; 1 keeps every id. Else ValueError.
        generators: N torch.Generators on the model's device: a group's samples then do not depend on its neighbours.
            None: torch's own.
        forward: called instead of the model for every token but the first: on a GPU, a captured graph.

    Returns, on the CPU:
        tokens: (N*G, T) int64, prompt after prompt.
        logprobs: (N*G, T) float32, each under the very distribution its token was drawn from.
        nucleus: (N*G, T, ceil(V / 8)) uint8, a bit mask over the V ids: those that survived top-p. None if top_p is 1.
    """
    if temperature <= 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}")
    if generators is not None and len(generators) != len(prompts):
        raise ValueError(f"{len(generators)} generators for {len(prompts)} prompts: give one each")
    lengths = [len(ids) + num_new_tokens for ids in prompts]
    position_ids = position_ids or [torch.arange(length) for length in lengths]

    def side_by_side(tensors):  # N of (..., length), padded on the left -> (..., N*G, longest)
        longest = max(tensor.shape[-1] for tensor in tensors)
        rows = [pad(tensor, (longest - tensor.shape[-1], 0)) for tensor in tensors]
        return torch.stack(rows, dim=-2).repeat_interleave(num_samples, dim=-2).to(model.device)

    prompt_ids = side_by_side(prompts)  # (N*G, L)
    positions = side_by_side(position_ids)  # ([3,] N*G, L+T)
    not_padding = side_by_side([torch.ones(length, dtype=torch.bool) for length in lengths])[:, None, None]
    longest = prompt_ids.shape[1]  # L
    padded = not not_padding.all()
    shaping = allowed_ids, temperature, top_p, generators
    options = {"use_cache": True, "logits_to_keep": 1}

    # First the prompts, in one pass that fills the cache; then one token per pass. Masks have four dimensions, which
    # are taken as they are: with a 2-D mask transformers syncs with the GPU at every token.
    mask = _mask_padding(model.config.get_text_config(), not_padding[..., :longest]) if padded else None
    output = model(input_ids=prompt_ids, attention_mask=mask, position_ids=positions[..., :longest], **options)
    sampled = [_sample_token(output.logits[:, -1], *shaping)]
    for position in range(longest, longest + num_new_tokens - 1):
        output = (forward or model)(
            input_ids=sampled[-1][0],  # (N*G, 1)
            attention_mask=not_padding[..., : position + 1] if padded else None,
            position_ids=positions[..., position : position + 1],
            past_key_values=output.past_key_values,
            **options,
        )
        sampled.append(_sample_token(output.logits[:, -1], *shaping))

    tokens, logprobs, nuclei = zip(*sampled, strict=True)
    logprobs = torch.cat(logprobs, dim=1).cpu()
    if broken := [i for i, logp in enumerate(logprobs.split(num_samples)) if not logp.isfinite().all()]:
        raise NotFinite(broken)
    bits = None
    if top_p < 1:  # 2 KB per token for GLM-Image, instead of 16
        bits = torch.from_numpy(np.packbits(torch.stack([kept.cpu() for kept in nuclei], dim=1), axis=-1))
    return torch.cat(tokens, dim=1).cpu(), logprobs, bits


def _mask_padding(config, not_padding):
    """What each token of the prompts attends to: (N*G, 1, 1, L) bool -> (N*G, 1, L, L) bool.

    The real tokens up to itself, and itself: a padding token that attended to nothing might get NaN from attention, and
    0 x NaN is NaN in whatever reads it. ValueError for a model that would not apply this mask as it is.
    """
    layers = set(getattr(config, "layer_types", None) or ())
    kind = str(config._attn_implementation)
    if kind in ("eager", "flex_attention") or "flash" in kind:
        raise ValueError("prompts of several lengths need another attention: attn_implementation='sdpa'")
    if layers - {"full_attention"} or getattr(config, "sliding_window", None):
        raise ValueError("not all layers of this model take such a mask: sample prompts of one length together")
    itself = torch.eye(not_padding.shape[-1], dtype=torch.bool, device=not_padding.device)  # (L, L)
    return not_padding.expand(-1, -1, len(itself), -1).tril() | itself


def _sample_token(logits, allowed_ids, temperature, top_p, generators):
    """One id per row: logits (N*G, vocabulary) -> ids (N*G, 1), log-probs (N*G, 1), nucleus (N*G, V) bool or None."""
    logp = _log_distribution(logits, allowed_ids, temperature)  # (N*G, V)
    nucleus = None
    if top_p < 1:
        nucleus = TopPLogitsWarper(top_p)(None, logp).isfinite()  # the most likely ids that together hold top_p
        logp = _log_distribution(logits, allowed_ids, temperature, nucleus)
    # The Gumbel-max trick in its exponential form: with E = -log(uniform), argmax(p / E) is a draw from p.
    # torch.multinomial does the same, but checks p first, which would make the CPU wait for the GPU at every token.
    noise = torch.empty_like(logp)
    generators = generators or [None]
    for group, generator in zip(noise.chunk(len(generators)), generators, strict=True):
        group.exponential_(generator=generator)
    drawn = (logp.exp() / noise).argmax(-1, keepdim=True)  # (N*G, 1)
    return drawn + allowed_ids.start, logp.gather(-1, drawn), nucleus


def _log_distribution(logits, allowed_ids, temperature, nucleus=None):
    """Log-probabilities of the ids the sampler may choose: (..., vocabulary) -> (..., V) float32.

    Sampling and scoring both come through here, so that a ratio never compares two different distributions.
    """
    logits = logits[..., allowed_ids].float() / temperature  # softmax in bf16 would lose the tail
    if nucleus is not None:
        logits = logits.masked_fill(~nucleus, float("-inf"))
    return logits.log_softmax(-1)


# ---- 2. paint and score: see train.py -------------------------------------------------------------------------------
# ---- 3. advantages --------------------------------------------------------------------------------------------------


def compute_advantages(rewards, group_size, eps=1e-6):
    """The z-score of each reward within its group; a group of equal rewards gets exactly 0.

    Args:
        rewards: (N*G,) float, prompt after prompt: the first G are the group of the first prompt. NaN is a sample
            without a reward: it takes no part in mean and spread, and gets 0.
        eps: keeps the division finite, in units of the reward.

    Returns: (N*G,) float32. Raises ValueError for groups below 2 (a lone sample has no baseline) or an infinite reward.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not form groups of {group_size}; a group needs 2 or more")
    if rewards.isinf().any():
        i = rewards.isinf().nonzero()[0].item()
        raise ValueError(f"the reward of image {i} (prompt {i // group_size}, sample {i % group_size}) is {rewards[i]}")
    # Rounded to float32 first, so that equal rewards stay equal; in float64 their mean is then exact.
    groups = rewards.float().double().view(-1, group_size)  # (N, G)
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    count = (~groups.isnan()).sum(dim=1, keepdim=True)
    std = (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # unbiased
    return (centred / (std + eps)).nan_to_num(0).flatten().float()


# ---- 4. log-probs by teacher forcing --------------------------------------------------------------------------------


@without_cudnn_attention
def get_per_token_logprobs(
    model, input_ids, num_new_tokens, *, position_ids=None, allowed_ids=slice(0, None), temperature=1.0, nucleus=None
):
    """Log-probs of the last `num_new_tokens` (T) ids of each row under the sampler's own distribution, in one pass.

    Args:
        input_ids: (B, L+T) int64, prompt and sampled tokens.
        position_ids: (3, L+T), of this one prompt, or None. allowed_ids, temperature: as in sampling.
        nucleus: (B, T, ceil(V / 8)) as sampling returned it. New, old and reference policy renormalise over this same
            set: a ratio of probabilities over different sets would not be an importance weight.

    Returns: (B, T) float32, with gradient.
    """
    input_ids = input_ids.to(model.device)
    if position_ids is not None:
        position_ids = position_ids[:, None, :-1].expand(-1, len(input_ids), -1).to(model.device)  # (3, B, L+T-1)
    # The logits at one position predict the id at the next: the last id is only ever a target, and the last T logits
    # are all we need. Computing them in slices would not save memory: one layer's backward pass sets the peak.
    logits = model(
        input_ids=input_ids[:, :-1], position_ids=position_ids, use_cache=False, logits_to_keep=num_new_tokens
    ).logits  # (B, T, vocabulary)
    if nucleus is not None:
        bits = np.unpackbits(nucleus, axis=-1, count=logits[..., allowed_ids].shape[-1])
        nucleus = torch.from_numpy(bits).bool().to(model.device)  # (B, T, V)
    logp = _log_distribution(logits, allowed_ids, temperature, nucleus)
    drawn = input_ids[:, -num_new_tokens:] - allowed_ids.start  # (B, T)
    return logp.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


# ---- 5. loss --------------------------------------------------------------------------------------------------------


def compute_grpo_loss(
    new_logprobs, old_logprobs, advantages, ref_logprobs=None, mask=None, clip_range=0.2, kl_coef=0.0
):
    """The clipped surrogate with a KL penalty (DeepSeekMath, eq. 3-4), averaged over each sequence, then over them.

    Args:
        new_logprobs, old_logprobs, ref_logprobs: (B, T) float32; only the first carries a gradient.
        advantages: (B,) float32, one per sequence: every token of a picture shares its praise or blame.
        mask: (B, T), 1 for tokens that count; None: all.
        clip_range: a ratio beyond 1 +- this, in the direction the advantage pushes, gets no further gradient.
        kl_coef: weight of k3; above 0 it needs `ref_logprobs`, else ValueError.

    Returns: the loss, a scalar, and metrics as floats: loss, policy_loss, kl (nats per token; NaN without a reference),
    clip_fraction (share of tokens whose gradient was cut), ratio_mean, and mean and largest |new - old|, the gap: on
    fresh samples it is rounding, between sampling with a cache and scoring in one pass.
    """
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError("kl_coef above 0 needs ref_logprobs")
    mask = torch.ones_like(new_logprobs) if mask is None else mask.to(new_logprobs.dtype)

    def average(x):
        return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()

    ratio = (new_logprobs - old_logprobs).exp()  # (B, T)
    advantages = advantages.unsqueeze(1)  # (B, 1)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    loss = policy_loss = -average(torch.min(unclipped, clipped))
    kl = torch.tensor(float("nan"))  # not measured
    if ref_logprobs is not None:
        # k3 (Schulman 2020, "Approximating KL divergence"): its value estimates KL(pi || ref), but as a loss term its
        # gradient on fresh samples is that of KL(ref || pi). Both pull towards the reference, which is what it is for.
        log_ratio = ref_logprobs - new_logprobs
        kl = average(log_ratio.exp() - log_ratio - 1)
        loss = policy_loss + kl_coef * kl
    gap = (new_logprobs - old_logprobs).abs()
    metrics = (loss, policy_loss, kl, average((clipped < unclipped).float()), average(ratio), average(gap))
    metrics = (*metrics, (gap * mask).max())
    return loss, {name: value.item() for name, value in zip(LOSS_METRICS, metrics, strict=True)}


# ---- 6. the trainer -------------------------------------------------------------------------------------------------


@dataclass
class GRPOSettings:
    """What the algorithm is told."""

    micro_batch_size: int = 4  # sequences per forward pass: bounds memory, changes nothing else
    iterations: int = 1  # optimiser steps on the same samples; above 1 the ratio leaves 1 and clipping acts
    clip_range: float = 0.2
    kl_coef: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass
class Group:
    """G samples of one prompt. Its tensors wait on the CPU from step to step."""

    prompt_ids: torch.Tensor  # (L,)
    position_ids: torch.Tensor | None  # (3, L+T)
    tokens: torch.Tensor  # (G, T)
    old_logprobs: torch.Tensor  # (G, T)
    nucleus: torch.Tensor | None = None  # (G, T, ceil(V / 8))
    mask: torch.Tensor | None = None  # (G, T), 1 for tokens that count; None: all. Text: up to the first end token
    advantages: torch.Tensor | None = None  # (G,)
    ref_logprobs: torch.Tensor | None = None  # (G, T), None when kl_coef is 0


def set_advantages(groups, rewards):
    """3: the advantages of all groups from the rewards (N*G,) of their samples, group after group."""
    size = len(groups[0].old_logprobs)
    for group, advantages in zip(groups, compute_advantages(rewards, size).split(size), strict=True):
        group.advantages = advantages


class GRPO:
    """Samples groups from a policy, and updates its adapter by their advantages.

    Args:
        model: a PeftModel: a frozen base with a trainable adapter, without dropout. optimizer: over the adapter.
        allowed_ids, forward: as for generate_with_logprobs.
        reference: a context manager within which the model is the reference; None: with its adapter disabled.

    add_reference and update read old_logprobs, mask, advantages and ref_logprobs of a group, and call logprobs() for the
    rest. With torch.distributed, W ranks with P prompts each make the step of one process with W*P, from equal
    adapters; the caller gives each rank prompts and seeds of its own.
    """

    def __init__(self, model, optimizer, settings, allowed_ids=slice(0, None), forward=None, reference=None):
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.forward = forward
        self.reference = reference or model.disable_adapter
        self.sampling_args = {"allowed_ids": allowed_ids, "temperature": settings.temperature}  # of scoring, too
        # Under dropout policy, old policy and reference would disagree. Attention's rate is a number, not a module.
        numbers = [(name, x) for m in model.modules() for name, x in vars(m).items() if isinstance(x, float)]
        if any(rate > 0 for name, rate in numbers if name == "p" or "dropout" in name):
            raise ValueError("the model has dropout; set it to 0 in the adapter's and in the model's config")

    def sample(self, prompts, group_size, seed):
        """1: a group of `group_size` (G) samples for each of N prompts: (prompt_ids (L,), position_ids (3, L+T), T).

        position_ids: None for a text model. T must be the same for all, else ValueError. Group i draws from `seed + i`
        alone: the same prompts and seed give the same samples until the policy moves.
        """
        self.model.eval()
        prompt_ids, position_ids, lengths = zip(*prompts, strict=True)
        if len(set(lengths)) > 1:
            raise ValueError(f"sequences sampled side by side have one length, not {sorted(set(lengths))}")
        generators = [torch.Generator(self.model.device).manual_seed(seed + i) for i in range(len(prompts))]
        tokens, logprobs, nucleus = generate_with_logprobs(
            self.model, prompt_ids, lengths[0], num_samples=group_size, top_p=self.settings.top_p,
            position_ids=None if position_ids[0] is None else position_ids, generators=generators, forward=self.forward,
            **self.sampling_args,
        )  # fmt: skip
        groups = []
        for i, rows in enumerate(torch.arange(len(tokens)).split(group_size)):
            kept = None if nucleus is None else nucleus[rows]
            groups.append(Group(prompt_ids[i], position_ids[i], tokens[rows], logprobs[rows], nucleus=kept))
        return groups

    @torch.no_grad()
    def add_reference(self, groups):
        """4: log-probs under the reference, the same model with the adapter disabled, where the loss needs them."""
        if self.settings.kl_coef == 0:
            return
        self.model.eval()
        with self.reference():
            for group in groups:
                if group.advantages.any():
                    group.ref_logprobs = torch.cat([self.logprobs(group, rows) for rows in self.micro_batches(group)])

    @without_cudnn_attention  # in the backward pass too: gradient checkpointing computes there what it has not kept
    def update(self, groups):
        """5 and 6: move the policy, `iterations` optimiser steps over all groups. Returns the metrics.

        A group whose rewards are all equal has advantage 0, teaches nothing and is skipped: it counts in the step's
        mean loss, but not in the metrics, which are means over the others (NaN if there are none). skipped: the share
        of iterations without a step because the gradient was not finite; grad_norm: the mean norm of the others.
        """
        learning = [group for group in groups if group.advantages.any()]
        micro_batches = [(group, rows) for group in learning for rows in self.micro_batches(group)]
        reports = []  # (share, metrics)
        norms = []
        self.model.train()  # wakes gradient checkpointing, which sleeps in eval mode; there is no dropout to wake
        for _ in range(self.settings.iterations):
            for group, rows in micro_batches:
                loss, metrics = self.loss(group, rows)
                share = len(rows) / len(group.old_logprobs)  # however groups are cut, the gradients add up to the same
                (loss * share / len(groups)).backward()
                reports.append((share, metrics))
            norms.append(self.optimizer_step())
        metrics = _average(reports)
        fresh = _average(reports[: len(micro_batches)])  # of the first iteration: later the policy has moved
        metrics |= {name: fresh[name] for name in ("mean_logprob_gap", "max_logprob_gap")}
        metrics["groups_without_spread"] = 1 - len(learning) / len(groups)
        stepped = [norm for norm in norms if 0 < norm < float("inf")]
        metrics["grad_norm"] = sum(stepped) / max(len(stepped), 1)
        metrics["skipped"] = sum(not norm < float("inf") for norm in norms) / len(norms)
        return metrics

    def loss(self, group, rows):
        """5: the mean loss of some samples of a group, and its metrics."""
        return compute_grpo_loss(
            self.logprobs(group, rows),
            group.old_logprobs[rows],
            group.advantages[rows],
            None if group.ref_logprobs is None else group.ref_logprobs[rows],
            None if group.mask is None else group.mask[rows],
            clip_range=self.settings.clip_range,
            kl_coef=self.settings.kl_coef,
        )

    def optimizer_step(self):
        """6: one step of the optimiser, on the mean gradient of all ranks, clipped. Returns its norm before clipping.

        One step on a NaN gradient ruins every weight, and on a gradient of 0 Adam would move on its momentum alone.
        """
        parameters = [p for param_group in self.optimizer.param_groups for p in param_group["params"]]
        if dist.is_initialized():
            for parameter in parameters:
                if parameter.grad is None:  # no group of this rank has spread, but another rank's may have
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
        if 0 < norm < float("inf"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def micro_batches(self, group):
        """Indices of a group's samples, `micro_batch_size` at a time."""
        return torch.arange(len(group.old_logprobs)).split(self.settings.micro_batch_size)

    def logprobs(self, group, rows):
        """4: log-probs (B, T) of some samples of a group under the model as it stands.

        On the CPU: these few numbers are all the loss needs, so the group itself never moves to the GPU.
        """
        ids = torch.cat([group.prompt_ids.expand(len(rows), -1), group.tokens[rows]], dim=1)  # (B, L+T)
        nucleus = None if group.nucleus is None else group.nucleus[rows]
        inputs = {"position_ids": group.position_ids, "nucleus": nucleus, **self.sampling_args}
        return get_per_token_logprobs(self.model, ids, group.tokens.shape[1], **inputs).cpu()


def _average(reports):
    """The metrics of micro-batches as one: means, weighted by their shares; the largest gap. NaN if there are none."""
    if not reports:
        return dict.fromkeys(LOSS_METRICS, float("nan"))
    total = sum(share for share, _ in reports)
    means = {name: sum(share * metrics[name] for share, metrics in reports) / total for name in LOSS_METRICS}
    return means | {"max_logprob_gap": max(metrics["max_logprob_gap"] for _, metrics in reports)}


# ---- one GPU for two models -----------------------------------------------------------------------------------------


class Offload:
    """Lets models take turns on a GPU that cannot hold them all: offload(*models) brings these up, the others leave.

    Frozen weights live in page-locked host memory, which a GPU reads at the full speed of its bus. They are copied up
    when needed and dropped afterwards: nothing is copied back, for they do not change. What is trained is small, and
    stays on the device with its optimiser.

    models: all that take turns, with their adapters. on_evict: called after weights have left the GPU: a CUDA graph
    that read them must be dropped.
    """

    def __init__(self, models, device, on_evict=lambda: None):
        self.device = device
        self.on_evict = on_evict
        self.homes = {}  # {model: [(frozen weight, its place in host memory)]}
        for model in models:
            tensors = [*model.parameters(), *model.buffers()]
            for tensor in tensors:
                tensor.data = tensor.data.to(device) if tensor.requires_grad else tensor.data.pin_memory()
            self.homes[model] = [(tensor, tensor.data) for tensor in tensors if not tensor.requires_grad]

    def __call__(self, *models):
        others = [weight for model in self.homes.keys() - set(models) for weight in self.homes[model]]
        if any(weight.data_ptr() != home.data_ptr() for weight, home in others):
            for weight, home in others:
                weight.data = home
            self.on_evict()
            torch.cuda.empty_cache()  # memory cut into pieces for one model does not fit the other's
        for weight, home in [weight for model in models for weight in self.homes[model]]:
            if weight.data_ptr() == home.data_ptr():
                weight.data = home.to(self.device, non_blocking=True, copy=True)
