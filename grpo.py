"""GRPO in one file: group relative policy optimisation of an autoregressive model that writes image codes.

The policy pi writes T tokens o_1..o_T for a prompt q; a decoder paints them; a reward R judges the picture. GRPO
(Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1) raises the expected reward without a value network:
the baseline of a sample is the mean reward of its group, all G pictures of the same prompt. It minimises

    loss = -1/G sum_i 1/T sum_t [ min(r A, clip(r, 1 - c, 1 + c) A) - kl_coef * k3 ]

    r  = pi(o_t) / pi_old(o_t)                    ratio: how far the policy has moved since it sampled this token
    A  = (R_i - mean(R)) / (std(R) + eps)         advantage: the z-score of the reward in its group of G
    k3 = ref/pi - log(ref/pi) - 1                 an estimate of KL(pi || reference), never negative

One step of training, in the order of this file:

    1. generate_with_logprobs     sample G sequences of exactly T tokens for each prompt, keep their log-probs (pi_old)
    2. decode, score              handed in: tokens -> pictures -> one reward a picture
    3. compute_advantages         rewards -> z-scores, per group
    4. get_per_token_logprobs     log-probs of those tokens in one forward pass: the reference's, then the policy's
    5. compute_grpo_loss          the formula above
    6. GRPO.step                  ties 1-5 together: micro-batches, reference, gradient clipping, optimiser

What follows it changes no number, and can be skipped at first: HostWeights (7) lets a policy and a decoder that do not fit
on a GPU together take turns, gather and average_gradients (8) make one step of several GPUs, FastSampler (9) does 1 for
all groups of a step at once.

The reference is the model before training. It costs no memory: the policy is a frozen base plus a LoRA adapter, so the
base with its adapter disabled is the reference. Nothing here knows GLM-Image; train.py hands in prompts as ids and
positions, a decoder and a reward. Any causal language model of transformers works.

Left out, because one reader does not need it: a value network, a learned reward model, a second copy of the model, a
generation server, replay of old samples, padding (a group shares one prompt, image codes have one length) and loss
variants (DAPO, Dr. GRPO, GSPO); each of those is an edit of compute_advantages or compute_grpo_loss.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

MAX_GRAD_NORM = 1.0  # a rare prompt must not undo a run; the norm before clipping is logged

# ---- 1. sample ------------------------------------------------------------------------------------------------------


def _log_distribution(logits, num_codes, temperature, allowed=None):
    """Log-probabilities of the ids the sampler may choose: (..., vocabulary) -> (..., num_codes) float32.

    Sampling and scoring both come through here, so that a ratio never compares two different distributions.
    """
    logits = logits[..., :num_codes].float()  # softmax in bf16 would lose the tail
    if temperature != 1:  # the largest tensor of a step: no copy for nothing
        logits = logits / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits.log_softmax(-1)


def _nucleus(logprobs, top_p):
    """The smallest set of most likely ids that holds `top_p` of the mass: (G, V) -> (G, V) bool. Holtzman et al. 2020."""
    ordered, ids = logprobs.sort(dim=-1, descending=True)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    keep = mass_before < top_p
    keep[..., 0] = True  # rounding must not empty the set
    return torch.zeros_like(keep).scatter(-1, ids, keep)


def _pack(mask):
    """(..., V) bool -> (..., ceil(V / 8)) uint8: 2 KB instead of 16 KB a token for GLM-Image's 16,384 codes."""
    bits = pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8)).byte()  # (..., bytes, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1, dtype=torch.uint8)


def _unpack(packed, size):
    """The inverse of _pack: (..., ceil(size / 8)) uint8 -> (..., size) bool."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.bool().flatten(-2)[..., :size]


def _draw(logits, num_codes, temperature, top_p, generators):
    """One id a row: logits (N*G, vocabulary) -> ids (N*G, 1), log-probs (N*G, 1), nucleus (N*G, bytes) or None.

    Each of the N groups draws from a generator of its own, so its ids do not depend on who is sampled beside it.
    """
    logp, nucleus = _log_distribution(logits, num_codes, temperature), None  # (N*G, V)
    if top_p < 1:
        nucleus = _nucleus(logp, top_p)  # (N*G, V)
        logp = _log_distribution(logits, num_codes, temperature, nucleus)
    # The winner of a race of exponential clocks with rates p is a draw from p. torch.multinomial runs the same race, but
    # first asks the GPU whether p is valid: the CPU would wait for every token instead of working ahead.
    groups = zip(logp.chunk(len(generators)), generators, strict=True)
    clocks = torch.cat([torch.empty_like(group).exponential_(generator=generator) for group, generator in groups])
    ids = (logp.exp() / clocks).argmax(-1, keepdim=True)  # (N*G, 1)
    return ids, logp.gather(-1, ids), None if nucleus is None else _pack(nucleus)


def _positions(position_ids, start, stop, batch):
    """A stretch of the positions for a batch: (3, L+T) -> (3, batch, stop - start); None stays None."""
    return None if position_ids is None else position_ids[:, None, start:stop].expand(-1, batch, -1)


@torch.no_grad()
def generate_with_logprobs(
    model,
    prompt_ids,
    num_new_tokens,
    *,
    num_samples=1,
    position_ids=None,
    num_codes=None,
    temperature=1.0,
    top_p=1.0,
    generator=None,
):
    """Sample `num_samples` (G) continuations of exactly `num_new_tokens` (T) tokens, with their log-probs.

    transformers' generate() would do, but it may stop at an end token (an image of 1,023 codes cannot be painted),
    offers no generator, and its scores come after the top-p cut without saying what was cut.

    Args:
        model: a causal language model of transformers, with or without a PEFT adapter.
        prompt_ids: (L,) int64. One prompt: a group shares it, so it is read once and nothing is padded.
        position_ids: (3, L+T) int64 for a model with 3-D positions, None for a text model. A model with 3-D positions
            that is not told them falls back to text positions, silently.
        num_codes: only ids below this can be sampled (rules out end tokens and unused ids); None allows every id.
        temperature: divides the logits, > 0. top_p: in (0, 1], 1 keeps every id.
        generator: a torch.Generator on the model's device.

    Returns:
        tokens (G, T) int64; logprobs (G, T) float32, each under the very distribution it was drawn from;
        nucleus (G, T, ceil(num_codes / 8)) uint8 on the CPU, the ids that top-p left at each step as bits, or None
        when `top_p` is 1.

    Raises:
        ValueError: temperature or top_p out of range.
    """
    if temperature <= 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}")
    position_ids = None if position_ids is None else position_ids.to(model.device)
    ids, start, cache = prompt_ids.to(model.device).unsqueeze(0), 0, None  # (1, L)
    tokens, logprobs, nucleus = [], [], []
    for t in range(num_new_tokens):
        positions = _positions(position_ids, start, start + ids.shape[1], len(ids))
        output = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1]  # (G, vocabulary)
        if t == 0:  # the prompt was read once; from here on every sample of the group shares what was read
            cache.batch_repeat_interleave(num_samples)
            logits = logits.expand(num_samples, -1)
        ids, logp, kept = _draw(logits, num_codes, temperature, top_p, [generator])  # (G, 1), (G, 1), (G, bytes)
        start = len(prompt_ids) + t
        tokens.append(ids)
        logprobs.append(logp)
        nucleus.append(kept)
    nucleus = None if top_p == 1 else torch.stack(nucleus, dim=1).cpu()  # (G, T, bytes)
    return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1), nucleus


# ---- 2. decode and score: handed in by the caller, see GRPO ---------------------------------------------------------

# ---- 3. advantages --------------------------------------------------------------------------------------------------


def compute_advantages(rewards, group_size, eps=1e-6):
    """The z-score of each reward within its group; a group of equal rewards gets exactly 0.

    Args:
        rewards: (N*G,) float, prompt after prompt: rows 0..G-1 are the group of the first prompt, and so on. NaN is a
            sample without a reward: it takes no part in mean and spread, and gets 0.
        eps: keeps the division finite, in units of the reward.

    Returns:
        (N*G,) float32.

    Raises:
        ValueError: group_size below 2 (a lone sample has no baseline), a length that is not a multiple of it, or an
            infinite reward.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not form groups of {group_size}; a group needs 2 or more")
    for i in rewards.isinf().nonzero().flatten().tolist():
        raise ValueError(f"the reward of image {i} (prompt {i // group_size}, sample {i % group_size}) is {rewards[i]}")
    groups = rewards.double().view(-1, group_size)  # float64: a float32 mean is off by an ulp, which eps would blow up
    valid = ~groups.isnan()
    centred = (groups - groups.nanmean(dim=1, keepdim=True)).where(valid, 0)
    count = valid.sum(dim=1, keepdim=True)
    spread = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # unbiased
    highest = groups.where(valid, -torch.inf).amax(dim=1, keepdim=True)
    lowest = groups.where(valid, torch.inf).amin(dim=1, keepdim=True)
    return (centred / (spread + eps)).masked_fill(highest == lowest, 0).flatten().float()


# ---- 4. log-probs by teacher forcing --------------------------------------------------------------------------------


def get_per_token_logprobs(
    model, input_ids, num_new_tokens, *, position_ids=None, num_codes=None, temperature=1.0, nucleus=None
):
    """Log-probs of the last `num_new_tokens` (T) ids of each row under the sampler's own distribution, in one pass.

    Args:
        input_ids: (B, L+T) int64, prompt and sampled tokens.
        position_ids, num_codes, temperature: as given to generate_with_logprobs.
        nucleus: (B, T, bytes) uint8 as it returned them. New, old and reference policy renormalise over this same set:
            a ratio of probabilities over different sets would not be an importance weight.

    Returns:
        (B, T) float32, with gradient.
    """
    input_ids = input_ids.to(model.device)
    position_ids = None if position_ids is None else position_ids.to(model.device)
    # The logits at one position predict the id at the next, so the last id is only ever a target; and asking for the
    # last T logits alone spares the prompt's (a row of 16,512 numbers each). Cutting these T into slices would not lower
    # the peak of a training pass: with activation checkpointing that is the backward pass of one layer.
    logits = model(
        input_ids=input_ids[:, :-1],
        position_ids=_positions(position_ids, 0, -1, len(input_ids)),
        use_cache=False,
        logits_to_keep=num_new_tokens,
    ).logits  # (B, T, vocabulary)
    size = logits[..., :num_codes].shape[-1]
    allowed = None if nucleus is None else _unpack(nucleus.to(model.device), size)  # (B, T, V)
    logp = _log_distribution(logits, num_codes, temperature, allowed)
    return logp.gather(-1, input_ids[:, -num_new_tokens:].unsqueeze(-1)).squeeze(-1)


# ---- 5. loss --------------------------------------------------------------------------------------------------------


def compute_grpo_loss(
    new_logprobs, old_logprobs, advantages, ref_logprobs=None, mask=None, clip_range=0.2, kl_coef=0.0
):
    """The clipped surrogate with a KL penalty (DeepSeekMath, eq. 3-4), averaged over each sequence, then over sequences.

    Args:
        new_logprobs, old_logprobs, ref_logprobs: (B, T) float32; only the first carries a gradient.
        advantages: (B,) float32, one a sequence: every token of a picture shares its praise or blame.
        mask: (B, T), 1 for tokens that count (a text model: up to and including the first end token); None: all.
        clip_range: a ratio beyond 1 +- this, in the direction the advantage pushes, gets no further gradient.
        kl_coef: weight of k3; needs `ref_logprobs` when above 0.

    Returns:
        loss (scalar tensor), and metrics as floats: policy_loss, kl (nats a token), clip_fraction (share of tokens
        whose gradient was cut), ratio_mean.

    Raises:
        ValueError: kl_coef above 0 without ref_logprobs.
    """
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError("kl_coef above 0 needs ref_logprobs")
    ratio = (new_logprobs - old_logprobs).exp()  # (B, T)
    advantages = advantages.unsqueeze(1)  # (B, 1)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    # k3 (Schulman 2020, "Approximating KL divergence"): its value estimates KL(pi || ref), but as a loss term its
    # gradient on fresh samples is that of KL(ref || pi). Both pull towards the reference, which is what it is for.
    log_ratio = (new_logprobs if ref_logprobs is None else ref_logprobs) - new_logprobs
    k3 = log_ratio.exp() - log_ratio - 1
    mask = torch.ones_like(ratio) if mask is None else mask.to(ratio.dtype)

    def average(x):
        return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()

    policy_loss, kl = -average(torch.min(unclipped, clipped)), average(k3)
    metrics = {"policy_loss": policy_loss, "kl": kl, "clip_fraction": average((clipped < unclipped).float())}
    metrics["ratio_mean"] = average(ratio)
    return policy_loss + kl_coef * kl, {name: value.item() for name, value in metrics.items()}


# ---- 6. the training step -------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """One group: G samples of one prompt. Its tensors wait on the CPU between phases."""

    prompt: str
    prompt_ids: torch.Tensor  # (L,)
    position_ids: torch.Tensor | None  # (3, L+T)
    tokens: torch.Tensor  # (G, T)
    old_logprobs: torch.Tensor  # (G, T)
    nucleus: torch.Tensor | None  # (G, T, bytes)
    images: list = None  # G
    rewards: torch.Tensor = None  # (G,)
    advantages: torch.Tensor = None  # (G,)
    ref_logprobs: torch.Tensor = None  # (G, T), None when kl_coef is 0


def _mean_and_spread(values, group_size):
    """Mean of (N*G,), and the mean over groups of the spread inside a group; NaN left out, None if nothing is left."""
    groups = [group[~group.isnan()] for group in values.split(group_size)]
    spreads = [group.std().item() for group in groups if len(group) > 1]
    mean = torch.cat(groups).mean().item() if any(map(len, groups)) else None
    return mean, sum(spreads) / len(spreads) if spreads else None


def _reward_metrics(results, group_size):
    """Means and spreads over what every rank got: (rewards (N*G,), {name: (N*G,)}, advantages (N*G,)) each."""
    rewards, parts, advantages = zip(*results, strict=True)
    rewards, metrics = torch.cat(rewards), {}
    metrics["reward"], metrics["reward_std"] = _mean_and_spread(rewards, group_size)
    for name in parts[0]:
        values = torch.cat([part[name] for part in parts])
        metrics[f"reward/{name}"], metrics[f"reward_std/{name}"] = _mean_and_spread(values, group_size)
    alive = torch.cat(advantages).view(-1, group_size).any(dim=1)
    metrics["dead_groups"] = (~alive).double().mean().item()
    metrics["unscored"] = int(rewards.isnan().sum())
    return metrics


class GRPO:
    """Trains the adapter of `model` with three functions that know what the tokens mean.

    Args:
        model: a PeftModel: a frozen base with a trainable adapter, without dropout. optimizer: over the adapter.
        encode: prompt -> prompt_ids (L,), position_ids (3, L+T) or None, T.
        decode: (prompt, tokens (G, T), seed) -> list of G images. One call a group: its images must differ by their
            tokens alone, so one seed gives them all the same starting noise.
        score: (images, prompts, targets) -> rewards (N,), {name: (N,)}: the total to maximise and its raw parts.
        combine: {name: (N,)} -> (N,), what to take the z-score of when that is not the total; None: the total.
        settings: any object with group_size, micro_batch_size (bounds memory, changes nothing else), iterations,
            clip_range, kl_coef, temperature and top_p.
        num_codes: only ids below this are sampled, None for all.
        device: where to compute; None: where the model is.
        frozen: modules that decode needs.
        offload: the policy and `frozen` take turns on the device, for a GPU that cannot hold both.
        sampler: a FastSampler of `model`; None: generate_with_logprobs, group by group.
        on_phase: called with a few words when a phase starts, for progress bars.

    With torch.distributed every rank brings its own prompts, as many as the others; gradients and metrics are means over
    all, so N ranks with P prompts each make the step of one process with N*P. Ranks start from equal adapters.
    """

    def __init__(
        self,
        model,
        optimizer,
        encode,
        decode,
        score,
        settings,
        *,
        combine=None,
        num_codes=None,
        frozen=(),
        device=None,
        offload=False,
        sampler=None,
        on_phase=print,
    ):
        if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
            raise ValueError("the model has dropout: policy, old policy and reference would disagree; set it to 0")
        self.model, self.optimizer, self.settings, self.frozen = model, optimizer, settings, frozen
        self.encode, self.decode, self.score, self.combine = encode, decode, score, combine
        self.sampler, self.on_phase = sampler, on_phase
        self.half_made = False  # whether a step has moved the policy and is not over: a bad moment to save
        self.device = torch.device(device or model.device)
        for module in frozen:
            module.requires_grad_(False)
        self.homes = {module: HostWeights(module, self.device) for module in (model, *frozen) if offload}
        for module in () if offload else (model, *frozen):
            module.to(self.device)
        self.shaping = {"num_codes": num_codes, "temperature": settings.temperature}  # same in sampling and scoring
        self.micro_batches = torch.arange(settings.group_size).split(settings.micro_batch_size)

    def step(self, prompts, targets=None, seed=0):
        """One step: a group for each prompt, one optimiser step an iteration. Returns the rollouts and the metrics."""
        rollouts, metrics = self.rollout(prompts, targets, seed)
        learned = self.update(rollouts)
        self.half_made = False
        both = metrics.keys() & learned.keys()  # seconds spent moving weights
        return rollouts, metrics | learned | {name: metrics[name] + learned[name] for name in both}

    def rollout(self, prompts, targets=None, seed=0):
        """Sample, paint and score a group for each of N prompts. Returns the rollouts and what was measured.

        Group i draws from `seed + i` alone: the same prompts and seed give the same pictures until the policy moves.
        """
        size, metrics = self.settings.group_size, {}
        with self._phase("sample", metrics, working=[self.model]):
            self.model.eval()
            rollouts = self._sample(prompts, seed)
        with self._phase("decode", metrics, working=self.frozen):
            for i, rollout in self._each("decode", rollouts):
                rollout.images = self.decode(rollout.prompt, rollout.tokens, seed + i)
        with self._phase("score", metrics):
            self.on_phase("score")
            # One layout everywhere: prompt after prompt, each with its G samples.
            images = [image for rollout in rollouts for image in rollout.images]
            repeated = [prompt for prompt in prompts for _ in range(size)]
            targets = targets and [target for target in targets for _ in range(size)]
            rewards, parts = self.score(images, repeated, targets)  # (N*G,)
        advantages = compute_advantages(self.combine(parts) if self.combine else rewards, size)  # (N*G,)
        for rollout, r, a in zip(rollouts, rewards.split(size), advantages.split(size), strict=True):
            rollout.rewards, rollout.advantages = r, a
        return rollouts, _merge(metrics) | _reward_metrics(gather((rewards, parts, advantages)), size)

    def update(self, rollouts):
        """Move the policy: `iterations` optimiser steps over all rollouts. Returns the means of the metrics.

        A group without spread has advantage 0, teaches nothing and is passed over. If all groups are such there is no
        step: Adam would move on its momentum alone.
        """
        means = ("loss", "policy_loss", "kl", "clip_fraction", "ratio_mean")
        metrics = dict.fromkeys((*means, "grad_norm", "max_logprob_gap", "skipped"), 0.0)
        alive = [rollout for rollout in rollouts if rollout.advantages.any()]
        num_alive = sum(gather(len(alive)))  # over all ranks
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.settings.kl_coef > 0:
            with self._phase("reference", metrics, working=[self.model]):
                self._reference(alive)
        with self._phase("update", metrics, working=[self.model]):
            self.model.train()  # wakes gradient checkpointing, which sleeps in eval mode; there is no dropout to wake
            for iteration in range(self.settings.iterations if num_alive else 0):
                for _, rollout in self._each("update", alive):
                    for rows in self.micro_batches:
                        self._accumulate(rollout, rows, iteration, num_alive, len(rollouts), metrics)
                average_gradients(parameters)
                norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                if norm.isfinite():
                    metrics["grad_norm"] += norm.item() / self.settings.iterations
                    self.half_made = True
                    self.optimizer.step()
                else:  # one NaN stepped upon would be in every weight for good
                    metrics["skipped"] += 1
                self.optimizer.zero_grad()
        return _merge(metrics, add=means)

    def _sample(self, prompts, seed):
        """A rollout for each prompt, without pictures yet."""
        size, shaping = self.settings.group_size, {"top_p": self.settings.top_p, **self.shaping}
        groups, rollouts = [(prompt, *self.encode(prompt)) for prompt in prompts], []
        at_once = 1 if self.sampler is None else self.sampler.groups
        for i, batch in self._each("sample", [groups[i : i + at_once] for i in range(0, len(groups), at_once)]):
            _, prompt_ids, position_ids, lengths = zip(*batch, strict=True)
            generators = [torch.Generator(self.device).manual_seed(seed + i * at_once + j) for j in range(len(batch))]
            if self.sampler is None:
                sampled = generate_with_logprobs(
                    self.model,
                    prompt_ids[0],
                    lengths[0],
                    num_samples=size,
                    position_ids=position_ids[0],
                    generator=generators[0],
                    **shaping,
                )
            else:
                sampled = self.sampler(prompt_ids, position_ids, lengths[0], size, generators, **shaping)
            tokens, logprobs, nucleus = (None if x is None else x.cpu().split(size) for x in sampled)
            for j, (prompt, ids, positions, _) in enumerate(batch):
                kept = None if nucleus is None else nucleus[j]
                rollouts.append(Rollout(prompt, ids, positions, tokens[j], logprobs[j], kept))
        return rollouts

    def _logprobs(self, rollout, rows):
        """Log-probs (B, T) of some rows of a group, under the model as it stands."""
        ids = torch.cat([rollout.prompt_ids.expand(len(rows), -1), rollout.tokens[rows]], dim=1)  # (B, L+T)
        nucleus = None if rollout.nucleus is None else rollout.nucleus[rows]
        return get_per_token_logprobs(
            self.model, ids, rollout.tokens.shape[1], position_ids=rollout.position_ids, nucleus=nucleus, **self.shaping
        )

    @torch.no_grad()
    def _reference(self, rollouts):
        """The reference's log-probs: the same weights with the adapter disabled."""
        self.model.eval()
        with self.model.disable_adapter():
            for _, rollout in self._each("reference", rollouts):
                rollout.ref_logprobs = torch.cat([self._logprobs(rollout, rows).cpu() for rows in self.micro_batches])

    def _accumulate(self, rollout, rows, iteration, num_alive, num_groups, metrics):
        """Add one micro-batch's gradient, and its share of the metrics."""
        new, old = self._logprobs(rollout, rows), rollout.old_logprobs[rows]
        ref = None if rollout.ref_logprobs is None else rollout.ref_logprobs[rows].to(new.device)
        advantages = rollout.advantages[rows].to(new.device)
        loss, parts = compute_grpo_loss(
            new, old.to(new.device), advantages, ref, clip_range=self.settings.clip_range, kl_coef=self.settings.kl_coef
        )
        # The loss is a mean over this micro-batch. Weighted by its share of all samples of the step, which is known
        # before the first pass, the gradients add up to the same sum however the groups are cut.
        (loss * len(rows) / (num_groups * self.settings.group_size)).backward()
        share = len(rows) / (num_alive * self.settings.group_size * self.settings.iterations)
        for name, value in (parts | {"loss": loss.item()}).items():
            metrics[name] += share * value
        if iteration == 0:  # the policy has not moved yet: what is left is the rounding between cache and full pass
            gap = (new.detach().cpu() - old).abs().max().item()
            metrics["max_logprob_gap"] = float(np.maximum(metrics["max_logprob_gap"], gap))  # unlike max(), keeps a NaN

    def _each(self, name, items):
        """enumerate() that tells on_phase how far it is."""
        for i, item in enumerate(items):
            self.on_phase(f"{name} {i + 1}/{len(items)}")
            yield i, item

    @contextmanager
    def _phase(self, name, metrics, working=()):
        """Measure a phase: seconds and, on a GPU, peak memory. When offloading, fetch the weights it needs first."""
        if self.homes and working:
            with self._phase("move", metrics):
                self._fetch(working)
        cuda, started = self.device.type == "cuda", time.perf_counter()
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if cuda:
            torch.cuda.synchronize(self.device)  # the clock would else stop while the GPU is still at work
            if name != "move":
                metrics[f"gpu_gb/{name}"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        metrics[f"seconds/{name}"] = metrics.get(f"seconds/{name}", 0) + time.perf_counter() - started

    def _fetch(self, working):
        """Bring some modules up, after all others went down to make room."""
        for module, weights in self.homes.items():
            if module not in working:
                weights.down()
        if self.sampler is not None and self.model not in working:
            self.sampler.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # memory cut into pieces for one model does not fit the other's
        for module in working:
            self.homes[module].up()


# ---- 7. memory: frozen weights that come and go ---------------------------------------------------------------------


class HostWeights:
    """The frozen weights of a module at home in host memory; up() copies them to the device, down() drops that copy.

    Nothing is copied back, for frozen weights do not change. Their home is page-locked memory, which a GPU reads by
    itself and at the full speed of its bus. What is trained is small, and stays on the device with its optimiser state.
    """

    def __init__(self, module, device):
        self.device = device
        tensors = [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            tensor.data = tensor.data.to(device) if tensor.requires_grad else tensor.data.pin_memory()
        self.frozen, self.is_up = [(tensor, tensor.data) for tensor in tensors if not tensor.requires_grad], False

    def up(self):
        """Copy the weights to the device, unless they are there."""
        for tensor, home in [] if self.is_up else self.frozen:
            tensor.data = home.to(self.device, non_blocking=True, copy=True)
        self.is_up = True

    def down(self):
        """Back to the home; the copy on the device is dropped."""
        for tensor, home in self.frozen:
            tensor.data = home
        self.is_up = False


# ---- 8. several GPUs ------------------------------------------------------------------------------------------------


class RankError(RuntimeError):
    """What stopped one rank, raised on all of them."""


def gather(value):
    """The values of all ranks, in order; a list of one without torch.distributed.

    A rank that fails gathers a RankError, which all ranks then raise: nobody waits for a rank that has gone.
    """
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise RankError(
                "another rank has gone without a word: killed, or its machine ran out of memory; look further up"
            ) from error
    for error in values:
        if isinstance(error, RankError):
            raise error
    return values


def average_gradients(parameters):
    """Replace each gradient by its mean over the ranks, so that all take the same step and stay equal."""
    if not dist.is_initialized():
        return
    gather(None)  # a rank that failed on the way here says so now; in all_reduce the others would wait for it
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]  # None: only dead groups here
    flat = torch.cat([gradient.flatten() for gradient in gradients])  # one message instead of hundreds
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def _merge(metrics, add=()):
    """One dict for all ranks: entries named in `add` are shares of a mean; of the others the largest counts."""
    records = gather(metrics)
    combined = {name: [record[name] for record in records] for name in metrics}
    # numpy's max, unlike Python's, keeps a NaN
    return {name: sum(values) if name in add else float(np.max(values)) for name, values in combined.items()}


# ---- 9. speed: the sampler again, as one CUDA graph -----------------------------------------------------------------


def _grouped_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of one new token: query heads that share a key-value head become the rows of one query.

    query (B, H, 1, D), key and value (B, K, S, D), mask (B, 1, 1, S) -> (B, 1, H, D). transformers does the same, but
    not while compiling: there it copies the cache H / K times (16, for GLM-Image) for every token.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows = query.view(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, K, H / K, D)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(query.shape).transpose(1, 2), None


AttentionInterface.register("grouped", _grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class FastSampler:
    """generate_with_logprobs for all groups of a step at once: the same numbers, up to rounding, sooner.

    A step of one token has to read all weights once, which is the time it cannot beat, for one sequence as for many. So all
    groups go side by side: shorter prompts are padded on the left, and the padding is masked. What the plain loop loses on
    a GPU besides is the time in which Python launches some thousand small kernels a token, one by one. There the step is
    captured as one CUDA graph and replayed: a single launch. A graph repeats the same kernels on the same addresses, so all
    that a step reads or writes stays in place: ids, positions, mask, and a key-value cache of fixed size, whose unused end
    is masked. The adapter stays attached: merged into bfloat16 weights most of its update would be rounded away.

    Args:
        model: as for generate_with_logprobs, with attention over all positions.
        groups: how many groups are sampled at once; fewer are filled up, for each new shape is captured anew.
        compile: let torch.compile fuse the small kernels first. It takes a minute or more, once, and a C compiler.
        fixed: use the cache of fixed size, as always on a GPU and to compile. A growing one gives a CPU less to read.
    """

    ROOM = 256  # the fixed cache is a multiple of this many tokens, so that few are too small for the next prompts

    def __init__(self, model, groups, compile=False, fixed=False):
        self.model, self.groups, self.cache, self.graph, self.size = model, groups, None, None, 0
        self.fixed, self.side = fixed or compile, None
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # the adapter lives in its layers
        if compile:
            base.config.get_text_config()._attn_implementation = "grouped"
        self.forward = torch.compile(base.forward, dynamic=False) if compile else base.forward

    def release(self):
        """Forget the graph, because the weights it reads are about to leave the device, and free the cache."""
        self.graph = self.logits = self.cache = None

    @torch.no_grad()
    def __call__(
        self,
        prompt_ids,
        position_ids,
        num_new_tokens,
        num_samples,
        generators,
        num_codes=None,
        temperature=1.0,
        top_p=1.0,
    ):
        """Sample a group for each of N prompts, at most `groups`.

        Args:
            prompt_ids: N of (L,) int64, of any lengths. position_ids: N of (3, L+T) int64, or of None for a text model.
            generators: N torch.Generators on the model's device.
            num_new_tokens (T), num_samples (G), num_codes, temperature, top_p: as for generate_with_logprobs.

        Returns:
            tokens (N*G, T), logprobs (N*G, T), nucleus (N*G, T, bytes) or None, as generate_with_logprobs does.
        """
        count, fill = len(prompt_ids) * num_samples, self.groups - len(prompt_ids)
        prompt_ids, position_ids = [*prompt_ids, *[prompt_ids[-1]] * fill], [*position_ids, *[position_ids[-1]] * fill]
        logits, positions = self._start(prompt_ids, position_ids, num_new_tokens, num_samples)
        tokens, logprobs, nucleus = [], [], []
        for t in range(num_new_tokens):
            if t > 0:
                logits = self._next(tokens[-1], positions[..., t - 1 : t])
            ids, logp, kept = _draw(logits[:count], num_codes, temperature, top_p, generators)
            tokens.append(ids)
            logprobs.append(logp)
            nucleus.append(kept)
        nucleus = None if top_p == 1 else torch.stack(nucleus, dim=1)
        return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1), nucleus

    def _start(self, prompt_ids, position_ids, num_new_tokens, num_samples):
        """Read the prompts one by one, set their caches side by side, each num_samples times, and capture the step.

        Returns the logits of the first token (groups*G, vocabulary) and the positions of all tokens to come.
        """
        device, longest = self.model.device, max(map(len, prompt_ids))
        self.fixed |= device.type == "cuda"
        logits, caches, positions = [], [], []
        for ids, given in zip(prompt_ids, position_ids, strict=True):
            where = torch.arange(len(ids) + num_new_tokens) if given is None else given  # (L+T,) or (3, L+T)
            read = where[..., : len(ids)].unsqueeze(-2).to(device)
            output = self.model(
                input_ids=ids.unsqueeze(0).to(device), position_ids=read, use_cache=True, logits_to_keep=1
            )
            logits.append(output.logits[:, -1])
            caches.append(output.past_key_values.layers)
            positions.append(where[..., len(ids) :])
        padding = torch.tensor([longest - len(ids) for ids in prompt_ids], device=device).repeat_interleave(num_samples)
        self._make_room(longest + num_new_tokens, len(padding), positions[0], device)
        for i, layers in enumerate(zip(*caches, strict=True)):
            both = [[pad(x, (0, 0, longest - x.shape[2], 0)) for x in (layer.keys, layer.values)] for layer in layers]
            keys, values = (torch.cat(x).repeat_interleave(num_samples, 0) for x in zip(*both, strict=True))
            self.cache.update(keys, values, i)
        self.mask.copy_(torch.arange(self.size, device=device) >= padding.unsqueeze(1))
        self.padded = len({len(ids) for ids in prompt_ids}) > 1
        if self.graph is None and device.type == "cuda":
            self._capture(longest)
        positions = torch.stack(positions, dim=-2).repeat_interleave(num_samples, -2).to(device)  # (..., groups*G, T)
        return torch.cat(logits).repeat_interleave(num_samples, 0), positions

    def _make_room(self, length, rows, positions, device):
        """The places of everything that a step reads or writes; fixed ones are kept as long as they suffice."""
        if self.fixed and self.cache is not None and length <= self.size and rows == len(self.ids):
            self.cache.reset()
            return
        self.graph, self.size = None, max(self.size, -(-length // self.ROOM) * self.ROOM)
        if self.fixed:
            self.cache = StaticCache(self.model.config, max_cache_len=self.size)
        else:
            self.cache = DynamicCache(config=self.model.config)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(*positions.shape[:-1], rows, 1, dtype=torch.long, device=device)
        self.mask = torch.ones(rows, self.size, dtype=torch.bool, device=device)

    def _step(self):
        self.logits = self.forward(
            input_ids=self.ids,
            attention_mask=self._attention_mask(),
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]  # (groups*G, vocabulary)

    def _attention_mask(self):
        """Of the fixed cache all, it hides its unused end itself; the growing one needs a mask if prompts differ in length."""
        if self.fixed:
            return self.mask
        return self.mask[:, : self.cache.get_seq_length() + 1] if self.padded else None

    def _next(self, ids, positions):
        """The logits of the next token, after the ids (N*G, 1) of the last, at their positions (..., groups*G, 1)."""
        self.ids[: len(ids)].copy_(ids)
        self.positions.copy_(positions)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        return self.logits

    def _capture(self, length):
        """Record a step. It is first run in earnest, on a side stream, for what happens once: compilation, workspaces."""
        self.side = self.side or torch.cuda.Stream()  # one for all captures: each would keep a workspace for good
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(3):
                self._step()
                self._rewind(length)
        torch.cuda.current_stream().wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, stream=self.side, capture_error_mode="thread_local"
        ):  # NCCL has threads of its own
            self._step()
        self.graph = graph
        self._rewind(length)

    def _rewind(self, length):
        """Back to the end of the prompts: what the trial steps wrote beyond it will be written over."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
