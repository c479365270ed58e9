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
base with its adapter disabled is the reference. To train an adapter further, first merge it into its base. Where
all weights learn, take a frozen copy, made before training, and give the groups to its add_reference at every step:

    reference = GRPO(copy.deepcopy(model).requires_grad_(False), optimizer, settings, allowed_ids)
    reference.add_reference(groups)

Nothing here depends on GLM-Image: examples/text_model.py trains a text model with this file alone. On a CPU, call
torch.set_num_threads(1) for models as small as that one. What works, and what does not (tests/test_zoo.py):

    models      of transformers: dense, experts, windows, linear attention, learned positions, image codes anywhere in
                the vocabulary; your own, if it takes and returns what generate_with_logprobs gives and reads. No Mamba,
                RWKV, RecurrentGemma (no past_key_values), nor any with dropout, layerdrop or router jitter
    adapters    LoRA and its like, or all weights. Not prompt and prefix tuning
    prompts     of several lengths only where all layers have full attention, by sdpa, and positions are an input

Watch mean_logprob_gap, how far sampling and scoring disagree on fresh samples: 1e-6 in float32, 0.05 in bfloat16, but
nats with a rope that changes with the length (longrope, dynamic), beyond its window. For another loss, edit:

    Dr. GRPO                 no `/ (std + eps)` in compute_advantages; weight = mask / mask.shape[1] / len(mask)
    DAPO's token mean        weight = mask / mask.sum().clamp(min=1); GRPO.weight: return group.mask[rows].sum().item()
    DAPO's two clip ranges   clip_range=(0.2, 0.28); ratio.clamp(1 - clip_range[0], 1 + clip_range[1])
    DAPO's dynamic sampling  loop over 1 to 3 with new seeds, up to a limit; the same number of groups on every rank
    GSPO                     clip_range=3e-4; ratio = (log_ratio * share * len(mask)).sum(1, keepdim=True).exp()
"""

import inspect
import warnings
from contextlib import contextmanager, nullcontext
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

    All N*G run side by side, since each token reads all weights once, however many sequences there are. Not with
    transformers' generate(): it takes no generator per prompt, and to tell what top-p removed it keeps all scores.

    Args:
        prompts: N tensors (L_i,) int64. Shorter ones are padded on the left, and the padding is masked.
        position_ids: N tensors (3, L_i+T) int64, or None: the model makes its own, as in scoring. A model with 3-D
            positions that is not given them falls back to text positions, silently.
        allowed_ids: slice(first, end) of the vocabulary, V ids that may be sampled: no end tokens, no unused ids.
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
    padded = len(set(lengths)) > 1
    if padded:
        _refuse_padding(model)
        position_ids = position_ids or [torch.arange(length) for length in lengths]

    def side_by_side(tensors):  # N of (..., length), padded on the left -> (..., N*G, longest)
        longest = max(tensor.shape[-1] for tensor in tensors)
        rows = [pad(tensor, (longest - tensor.shape[-1], 0)) for tensor in tensors]
        return torch.stack(rows, dim=-2).repeat_interleave(num_samples, dim=-2).to(model.device)

    prompt_ids = side_by_side(prompts)  # (N*G, L)
    not_padding = side_by_side([torch.ones(length, dtype=torch.bool) for length in lengths])[:, None, None]
    longest = prompt_ids.shape[1]  # L
    positions = [None] * num_new_tokens  # of each pass
    if position_ids is not None:  # ([3,] N*G, L), then ([3,] N*G, 1)
        positions = side_by_side(position_ids)[..., :-1].split([longest] + [1] * (num_new_tokens - 1), dim=-1)
    shaping = allowed_ids, temperature, top_p, generators
    options = {"use_cache": True, "logits_to_keep": 1}

    # First the prompts, in one pass that fills the cache; then one token per pass. Masks have four dimensions, which
    # are taken as they are: with a 2-D mask transformers syncs with the GPU at every token.
    mask = _mask_padding(not_padding[..., :longest]) if padded else None
    output = model(input_ids=prompt_ids, attention_mask=mask, position_ids=positions[0], **options)
    if getattr(output, "past_key_values", None) is None:
        raise ValueError("the model returns no past_key_values: Mamba, RWKV and their like cannot be sampled here")
    sampled = [_sample_token(output.logits[:, -1], *shaping)]
    for length, place in enumerate(positions[1:], start=longest + 1):
        output = (forward or model)(
            input_ids=sampled[-1][0],  # (N*G, 1)
            attention_mask=not_padding[..., :length] if padded else None,
            position_ids=place,
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


def _mask_padding(not_padding):
    """What each token of the prompts attends to: (N*G, 1, 1, L) bool -> (N*G, 1, L, L) bool.

    The real tokens up to itself, and itself: a padding token that attended to nothing might get NaN from attention, and
    0 x NaN is NaN in whatever reads it.
    """
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
        rewards: (N*G,) numbers, prompt after prompt: the first G are the group of the first prompt. NaN is a sample
            without a reward: it takes no part in mean and spread, and gets 0.
        eps: keeps the division finite, in units of the reward.

    Returns: (N*G,) float32. ValueError for another shape, a G below 2 (a lone sample has no baseline), infinity.
    """
    rewards = torch.as_tensor(rewards, device="cpu")
    if group_size < 2 or rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} are no groups of {group_size}: give (N*G,), with G 2 or more")
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
    # (B, T, vocabulary) are all we need, even of a model that does not know logits_to_keep. Computing them in slices
    # would not save memory: one layer's backward pass sets the peak.
    inputs = {"input_ids": input_ids[:, :-1], "position_ids": position_ids}
    logits = model(**inputs, use_cache=False, logits_to_keep=num_new_tokens).logits[:, -num_new_tokens:]
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
        mask: (B, T), 1 for tokens that count; None: all. Another shape is a ValueError: (B, 1) would count T times.
        clip_range: a ratio beyond 1 +- this, in the direction the advantage pushes, gets no further gradient.
        kl_coef: weight of k3; above 0 it needs `ref_logprobs`, else ValueError.

    Returns: the loss, a scalar, and metrics as floats: loss, policy_loss, kl (nats per token; NaN without a reference),
    clip_fraction (share of tokens whose gradient was cut), ratio_mean, and mean and largest |new - old|, the gap: on
    fresh samples it is rounding, between sampling with a cache and scoring in one pass.
    """
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError("kl_coef above 0 needs ref_logprobs")
    mask = torch.ones_like(new_logprobs) if mask is None else mask.to(new_logprobs.dtype)
    if mask.shape != new_logprobs.shape:
        raise ValueError(f"a mask {tuple(mask.shape)} for log-probs {tuple(new_logprobs.shape)}")
    share = mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)  # (B, T), of each token in the mean of the means
    weight = share  # of each token in the loss; other losses change this

    def average(x):
        return (x * share).sum()

    log_ratio = new_logprobs - old_logprobs  # (B, T)
    ratio = log_ratio.exp()
    advantages = advantages.unsqueeze(1)  # (B, 1)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    loss = policy_loss = -(torch.min(unclipped, clipped) * weight).sum()
    kl = torch.tensor(float("nan"))  # not measured
    if ref_logprobs is not None:
        # k3 (Schulman 2020, "Approximating KL divergence"): its value estimates KL(pi || ref), but as a loss term its
        # gradient on fresh samples is that of KL(ref || pi). Both pull towards the reference, which is what it is for.
        k3 = (ref_logprobs - new_logprobs).exp() - (ref_logprobs - new_logprobs) - 1
        kl = average(k3)
        loss = policy_loss + kl_coef * (k3 * weight).sum()
    gap = log_ratio.abs()
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
        model: a PeftModel: a frozen base with a trainable adapter, LoRA or its like. optimizer: over the adapter.
        allowed_ids, forward: as for generate_with_logprobs.
        reference: a context manager within which the model is the reference; None: with its adapter disabled.

    add_reference and update read old_logprobs, mask, advantages and ref_logprobs of a group, and call logprobs() for
    the rest. With torch.distributed, W ranks with P prompts each make the step of one process with W*P, from equal
    adapters; the caller gives each rank prompts and seeds of its own.
    """

    def __init__(self, model, optimizer, settings, allowed_ids=slice(0, None), forward=None, reference=None):
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.forward = forward
        self.reference = reference or self.without_adapter
        self.sampling_args = {"allowed_ids": allowed_ids, "temperature": settings.temperature}  # of scoring, too
        self.steps = 0  # optimiser steps so far
        self.sampled_at = 0  # self.steps at the last sampling
        self.warnings = WARNINGS.copy()  # each is given once
        _refuse_noise(model)

    def sample(self, prompts, group_size, seed):
        """1: a group of `group_size` (G) samples for each of N prompts: (prompt_ids (L,), position_ids (3, L+T), T).

        position_ids: None for a text model. T must be the same for all, else ValueError. Group i draws from `seed + i`
        alone: the same prompts and seed give the same samples until the policy moves.
        """
        self.model.eval()
        self.sampled_at = self.steps
        prompt_ids, position_ids, lengths = zip(*prompts, strict=True)
        if len(set(lengths)) > 1:
            raise ValueError(f"sequences sampled together need one length, not {sorted(set(lengths))}")
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
        learning = self.with_spread(groups)
        if self.settings.kl_coef == 0:
            return
        self.model.eval()
        with self.reference():
            for group in learning:
                group.ref_logprobs = torch.cat([self.logprobs(group, rows) for rows in self.micro_batches(group)])

    @without_cudnn_attention  # in the backward pass too: gradient checkpointing computes there what it has not kept
    def update(self, groups):
        """5 and 6: move the policy, `iterations` optimiser steps over all groups. Returns the metrics.

        A group whose rewards are all equal has advantage 0, teaches nothing and is skipped: it counts in the step's
        mean loss, but not in the metrics, which are means over the others (NaN if there are none). skipped: the share
        of iterations without a step because the gradient was not finite; grad_norm: the mean norm of the others.
        """
        learning = self.with_spread(groups)
        micro_batches = [(group, rows) for group in learning for rows in self.micro_batches(group)]
        total = self.total_weight(groups)
        fresh = self.steps == self.sampled_at
        unmoved = self.steps == 0 and not self.optimizer.state  # that of a resumed run has a state
        reports = []  # (weight, metrics)
        norms = []
        self.model.train()  # enables gradient checkpointing, which is off in eval mode; there is no dropout
        self.optimizer.zero_grad()  # an update that ended in an exception has left half a gradient
        for _ in range(self.settings.iterations):
            for group, rows in micro_batches:
                loss, metrics = self.loss(group, rows)
                weight = self.weight(group, rows)  # however groups are cut, the gradients add up to the same
                (loss * weight / total).backward()
                reports.append((weight, metrics))
            norms.append(self.optimizer_step())

        metrics = _average(reports)
        first = _average(reports[: len(micro_batches)])  # iteration only: then the policy moves
        metrics |= {name: first[name] for name in ("mean_logprob_gap", "max_logprob_gap")}
        metrics["groups_without_spread"] = 1 - len(learning) / len(groups)
        stepped = [norm for norm in norms if 0 < norm < float("inf")]
        metrics["grad_norm"] = sum(stepped) / max(len(stepped), 1)
        metrics["skipped"] = sum(not norm < float("inf") for norm in norms) / len(norms)
        self.warn_once("gap", fresh and first["mean_logprob_gap"] > 0.1)
        self.warn_once("kl", unmoved and first["kl"] > 0.01)
        self.warn_once("gradient", learning and norms[0] == 0)
        return metrics

    def with_spread(self, groups):
        """The groups that teach something: their rewards differ."""
        if any(group.advantages is None for group in groups):
            raise ValueError("groups have no advantages yet: set_advantages comes before add_reference and update")
        return [group for group in groups if group.advantages.any()]

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

    def weight(self, group, rows):
        """5: how much some samples of a group count in the loss of the step, which is a weighted mean: their number."""
        return len(rows)

    def total_weight(self, groups):
        """Over all groups, skipped ones included; averaged over ranks, as the gradients are."""
        total = sum(self.weight(group, rows) for group in groups for rows in self.micro_batches(group))
        total = torch.tensor(float(total), device=self.model.device)
        if dist.is_initialized():
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        return total.item()

    def optimizer_step(self):
        """6: one step of the optimiser, on the mean gradient of all ranks, clipped. Returns its norm before clipping.

        One step on a NaN gradient ruins every weight, and on a gradient of 0 Adam would move on its momentum alone.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if dist.is_initialized():
            for parameter in parameters:
                if parameter.grad is None:  # no group of this rank has spread, but another rank's may have
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
        if 0 < norm < float("inf"):
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        return norm

    def micro_batches(self, group):
        """Indices of a group's samples, `micro_batch_size` at a time."""
        return torch.arange(len(group.old_logprobs)).split(self.settings.micro_batch_size)

    @contextmanager
    def without_adapter(self):
        """Within it the model is the reference, if nothing but an adapter learns."""
        with getattr(self.model, "disable_adapter", nullcontext)():
            if any(p.requires_grad for p in self.model.parameters()):  # PEFT freezes what it disables
                raise ValueError("not only an adapter learns: the reference must be a frozen copy, see grpo.py")
            yield

    def warn_once(self, name, condition):
        """Gives one of WARNINGS."""
        if condition and name in self.warnings:
            warnings.warn(self.warnings.pop(name), stacklevel=4)  # where update is called

    def logprobs(self, group, rows):
        """4: log-probs (B, T) of some samples of a group under the model as it stands.

        On the CPU: these few numbers are all the loss needs, so the group itself never moves to the GPU.
        """
        ids = torch.cat([group.prompt_ids.expand(len(rows), -1), group.tokens[rows]], dim=1)  # (B, L+T)
        nucleus = None if group.nucleus is None else group.nucleus[rows]
        inputs = {"position_ids": group.position_ids, "nucleus": nucleus, **self.sampling_args}
        return get_per_token_logprobs(self.model, ids, group.tokens.shape[1], **inputs).cpu()


def _average(reports):
    """The metrics of micro-batches as one: weighted means; the largest gap. NaN if there are none."""
    if not reports:
        return dict.fromkeys(LOSS_METRICS, float("nan"))
    total = sum(weight for weight, _ in reports)
    means = {name: sum(weight * metrics[name] for weight, metrics in reports) / total for name in LOSS_METRICS}
    return means | {"max_logprob_gap": max(metrics["max_logprob_gap"] for _, metrics in reports)}


# ---- faults that would be silent ------------------------------------------------------------------------------------

WARNINGS = {
    "gap": "sampling and scoring disagree by more than 0.1 nats per token (mean_logprob_gap): the loss is wrong. Look "
    "at positions, at noise in train mode, at a rope that changes with the length, at a cache that is not used",
    "kl": "kl is above 0 although nothing has moved: the reference is not the model before training. An adapter must "
    "change nothing at first: merge one that is trained further into its base; PiSSA and OLoRA have no reference here",
    "gradient": "rewards differ, but the gradient is exactly 0: does the optimizer hold the weights of the active "
    "adapter? Or are the samples of a group alike, all tokens masked or clipped, top_p too low to leave a choice?",
}


def _refuse_noise(model):
    """ValueError for a model that would score other distributions than it sampled from."""
    adapters = getattr(model, "peft_config", {})
    if any(config.is_prompt_learning for config in adapters.values()):
        raise ValueError("prompt and prefix tuning put virtual tokens before each sampled one: take LoRA or its like")
    trained = {part for name, p in model.named_parameters() if p.requires_grad for part in name.split(".")}
    for name, module in model.named_modules():
        for number, value in vars(module).items():  # the rate sits on a Dropout, or on the caller of F.dropout
            kind = f"{type(module).__name__}.{number}".lower()
            noise = isinstance(value, float) and value > 0 and ("drop" in kind or "jitter" in kind)
            if noise and name.split(".")[-1] not in adapters.keys() - trained:  # those are not active
                raise ValueError(f"{name}.{number} is {value}, which is noise: set it to 0 in the config")


def _refuse_padding(model):
    """ValueError for a model that would not take positions and the mask of _mask_padding as they are."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(getattr(base, "config", None), "get_text_config", lambda: None)()
    attention = getattr(config, "_attn_implementation", None) or "eager"
    masked = attention not in ("eager", "flex_attention") and "flash" not in attention
    masked = masked and not getattr(config, "sliding_window", None)
    masked = masked and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    offsets = [getattr(module, "padding_idx", None) for name, module in base.named_modules() if "position" in name]
    placed = "position_ids" in inspect.signature(base.forward).parameters
    if not masked or not placed or any(offset is not None for offset in offsets):  # Roberta adds padding_idx + 1
        raise ValueError(
            "prompts of several lengths need position_ids, full attention in all layers, and "
            "attn_implementation='sdpa': for this model, sample prompts of one length together"
        )


# ---- one GPU for two models -----------------------------------------------------------------------------------------


class Offload:
    """Lets models take turns on a GPU that cannot hold them all: offload(*models) brings these up, the others leave.

    Frozen weights live in page-locked host memory, which a GPU reads at the full speed of its bus. They are copied up
    when needed and dropped afterwards: nothing is copied back, for they do not change. What is trained is small, and
    stays on the device with its optimiser.

    models: all that take turns, with their adapters. on_evict: called after weights have left the GPU: a CUDA graph
    that read them must be dropped. pin: False leaves frozen weights where they are, such as mapped from a file: that
    takes no host memory, but copies at a fifth of the speed.
    """

    def __init__(self, models, device, on_evict=lambda: None, pin=True):
        self.device = device
        self.on_evict = on_evict
        self.homes = {}  # {model: [(frozen weight, its place in host memory)]}
        for model in models:
            tensors = [*model.parameters(), *model.buffers()]
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.data = tensor.data.to(device)
                elif pin:
                    tensor.data = tensor.data.pin_memory()
            self.homes[model] = [(tensor, tensor.data) for tensor in tensors if not tensor.requires_grad]

    def __call__(self, *models):
        others = [weight for model in self.homes.keys() - set(models) for weight in self.homes[model]]
        if any(weight.data_ptr() != home.data_ptr() for weight, home in others):
            for weight, home in others:
                weight.data = home
            self.on_evict()
            torch.cuda.empty_cache()  # memory fragmented by one model would not fit the other
        for weight, home in [weight for model in models for weight in self.homes[model]]:
            if weight.data_ptr() == home.data_ptr():
                weight.data = home.to(self.device, non_blocking=True, copy=True)
