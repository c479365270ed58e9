"""GRPO in one file: group relative policy optimisation of an autoregressive model that writes image codes.

The policy pi writes T tokens o_1..o_T for a prompt q; a decoder paints them; a reward R judges the picture. GRPO
(Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1) raises the expected reward without a value network:
the baseline of a sample is the mean reward of its group, all G pictures of the same prompt. It minimises

    loss = -1/G sum_i 1/T sum_t [ min(r A, clip(r, 1 - c, 1 + c) A) - kl_coef * k3 ]

    r  = pi(o_t) / pi_old(o_t)                    ratio: how far the policy has moved since it sampled this token
    A  = (R_i - mean(R)) / (std(R) + eps)         advantage: the z-score of the reward in its group of G
    k3 = ref/pi - log(ref/pi) - 1                 an estimate of KL(pi || reference), never negative

averaged over the N prompts of a step. On fresh samples, which is all there is with one iteration, the ratio is 1,
nothing is clipped, and the gradient is the policy gradient: that of -A log pi(o_t), and of the KL term.

One step of training, in the order of this file:

    1. generate_with_logprobs     sample G sequences of exactly T tokens for each prompt, keep their log-probs (pi_old)
    2. paint and score            yours: tokens -> pictures -> one reward a picture; GLM-Image's are in train.py
    3. compute_advantages         rewards -> z-scores, per group
    4. get_per_token_logprobs     log-probs of those tokens in one forward pass: the reference's, then the policy's
    5. compute_grpo_loss          the formula above
    6. GRPO                       ties 1, 4 and 5 together; its update: micro-batches, gradient clipping, the optimiser

The reference is the model before training. It costs no memory: the policy is a frozen base plus a LoRA adapter, so the
base with its adapter disabled is the reference. Nothing here depends on GLM-Image: prompts come as ids and positions,
and a causal language model of transformers with a PEFT adapter works (one with sliding or linear attention, if prompts
sampled together have one length); examples/text_model.py trains one by this file alone. On a CPU call
torch.set_num_threads(1) for models as small as that: more threads only wait for one another.

For another loss, edit: Dr. GRPO, the division in compute_advantages and `average` in compute_grpo_loss; DAPO's two clip
ranges, the clamp there; GSPO, the ratio there. DAPO's dynamic sampling is a loop around sampling and scoring.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers.generation.logits_process import TopPLogitsWarper

MAX_GRAD_NORM = 1.0  # a rare prompt must not undo a run; the norm before clipping is logged
LOSS_METRICS = ("loss", "policy_loss", "kl", "clip_fraction", "ratio_mean", "mean_logprob_gap", "max_logprob_gap")

# cuDNN's attention, which torch prefers on an H100 since 2.11, is left out: wrong tokens are reported with fewer than 8
# key-value heads (pytorch 193893; GLM-Image has 2), and gradients that are NaN under a mask (trl 7181, torch 2.13).
without_cudnn_attention = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

# ---- 1. sample ------------------------------------------------------------------------------------------------------


class NotFinite(ValueError):
    """Sampled log-probs are NaN or infinite; its argument: for which prompts, as a list of their numbers."""


@torch.no_grad()
@without_cudnn_attention
def generate_with_logprobs(
    model, prompts, num_new_tokens, *, num_samples=1, position_ids=None, num_codes=None, temperature=1.0, top_p=1.0,
    generators=None, forward=None,
):  # fmt: skip
    """Sample `num_samples` (G) continuations of exactly `num_new_tokens` (T) tokens for each of N prompts.

    All N*G side by side, because a token costs one read of all weights, for one sequence as for many. Not by
    transformers' generate(): it takes no generator, and would keep the scores of every id to say what top-p left.

    Args:
        prompts: N tensors (L_i,) int64. Shorter ones are padded on the left, and the padding is masked.
        position_ids: N tensors (3, L_i+T) int64, or None for a text model. A model with 3-D positions that is not told
            them falls back to text positions, silently.
        num_codes: only ids below this are sampled; None: every id. Image codes are the lowest ids of the vocabulary, so
            this rules out end tokens and unused ids.
        temperature: divides the logits, > 0 or ValueError. top_p: in (0, 1] or ValueError; 1 keeps every id.
        generators: N torch.Generators on the model's device, or ValueError: a group's samples do not depend on its
            neighbours'. None: torch's own.
        forward: computes every token but the first in place of the model: on a GPU, a captured graph.

    Returns:
        On the CPU: tokens (N*G, T) int64, prompt after prompt; logprobs (N*G, T) float32, each under the very
        distribution it was drawn from; nucleus (N*G, T, ceil(V / 8)) uint8, as bits which of the V ids that may be
        sampled top-p left, or None.
    """
    if temperature <= 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}")
    if generators is not None and len(generators) != len(prompts):
        raise ValueError(f"{len(generators)} generators for {len(prompts)} prompts: give one each")
    lengths = [len(ids) + num_new_tokens for ids in prompts]
    position_ids = position_ids or [torch.arange(length) for length in lengths]

    def side_by_side(tensors):  # N of (..., length), filled up on the left -> (..., N*G, longest)
        longest = max(tensor.shape[-1] for tensor in tensors)
        rows = [pad(tensor, (longest - tensor.shape[-1], 0)) for tensor in tensors]
        return torch.stack(rows, dim=-2).repeat_interleave(num_samples, dim=-2).to(model.device)

    inputs, positions = side_by_side(prompts), side_by_side(position_ids)  # (N*G, L), ([3,] N*G, L+T)
    not_padding = side_by_side([torch.ones(length, dtype=torch.bool) for length in lengths])[:, None, None]
    prompt_mask, cache, tokens, logprobs, nuclei = None, None, [], [], []  # not_padding: (N*G, 1, 1, L+T)
    if not not_padding.all():
        # A mask of four dimensions is taken as it is; for one of two, transformers would ask the GPU at every token
        # whether it masks anything.
        prompt_mask = _mask_padding(model.config.get_text_config(), not_padding[..., : inputs.shape[1]])
    for end in range(inputs.shape[1], not_padding.shape[-1]):
        compute = model if cache is None or forward is None else forward
        output = compute(
            input_ids=inputs,
            attention_mask=prompt_mask if prompt_mask is None or cache is None else not_padding[..., :end],
            position_ids=positions[..., end - inputs.shape[1] : end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        inputs, logp, kept = _sample_token(output.logits[:, -1], num_codes, temperature, top_p, generators or [None])
        tokens.append(inputs)  # (N*G, 1)
        logprobs.append(logp)  # (N*G, 1)
        nuclei.append(kept)  # (N*G, V)
    tokens, logprobs, bits = torch.cat(tokens, dim=1).cpu(), torch.cat(logprobs, dim=1).cpu(), None
    if broken := [i for i, logp in enumerate(logprobs.split(num_samples)) if not logp.isfinite().all()]:
        raise NotFinite(broken)
    if top_p < 1:  # 2 KB a token for GLM-Image, instead of 16
        bits = torch.from_numpy(np.packbits(torch.stack([kept.cpu() for kept in nuclei], dim=1), axis=-1))
    return tokens, logprobs, bits


def _mask_padding(config, not_padding):
    """Which tokens of the prompts each of them sees: (N*G, 1, 1, L) bool -> (N*G, 1, L, L) bool.

    The real ones up to itself, and itself: a token of the padding that saw nothing might get NaN from attention, and
    0 x NaN is NaN in whatever reads it. Raises ValueError for a model that would not apply this mask as it is.
    """
    layers, kind = set(getattr(config, "layer_types", None) or ()), str(config._attn_implementation)
    if kind in ("eager", "flex_attention") or "flash" in kind:
        raise ValueError("prompts of several lengths need another attention: attn_implementation='sdpa'")
    if layers - {"full_attention"} or getattr(config, "sliding_window", None):
        raise ValueError("not all layers of this model take such a mask: sample prompts of one length together")
    itself = torch.eye(not_padding.shape[-1], dtype=torch.bool, device=not_padding.device)  # (L, L)
    return not_padding.expand(-1, -1, len(itself), -1).tril() | itself


def _sample_token(logits, num_codes, temperature, top_p, generators):
    """One id a row: logits (N*G, vocabulary) -> ids (N*G, 1), log-probs (N*G, 1), nucleus (N*G, V) bool or None."""
    logp, nucleus = _log_distribution(logits, num_codes, temperature), None  # (N*G, V)
    if top_p < 1:
        nucleus = TopPLogitsWarper(top_p)(None, logp).isfinite()  # the likeliest ids that hold top_p of the mass
        logp = _log_distribution(logits, num_codes, temperature, nucleus)
    # The Gumbel-max trick in its exponential form: with E = -log(uniform), argmax(p / E) is a draw from p. So draws
    # torch.multinomial, but it first asks the GPU whether p is valid: the CPU would wait for every token.
    noise = torch.empty_like(logp)
    for group, generator in zip(noise.chunk(len(generators)), generators, strict=True):
        group.exponential_(generator=generator)
    ids = (logp.exp() / noise).argmax(-1, keepdim=True)  # (N*G, 1)
    return ids, logp.gather(-1, ids), nucleus


def _log_distribution(logits, num_codes, temperature, nucleus=None):
    """Log-probabilities of the ids the sampler may choose: (..., vocabulary) -> (..., V) float32.

    Sampling and scoring both come through here, so that a ratio never compares two different distributions.
    """
    logits = logits[..., :num_codes].float() / temperature  # softmax in bf16 would lose the tail
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
    groups = rewards.float().double().view(-1, group_size)  # (N, G): in float64 the mean of equal float32 is exact
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    count = (~groups.isnan()).sum(dim=1, keepdim=True)
    std = (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()  # unbiased
    return (centred / (std + eps)).nan_to_num(0).flatten().float()


# ---- 4. log-probs by teacher forcing --------------------------------------------------------------------------------


@without_cudnn_attention
def get_per_token_logprobs(
    model, input_ids, num_new_tokens, *, position_ids=None, num_codes=None, temperature=1.0, nucleus=None
):
    """Log-probs of the last `num_new_tokens` (T) ids of each row under the sampler's own distribution, in one pass.

    Args:
        input_ids: (B, L+T) int64, prompt and sampled tokens.
        position_ids: (3, L+T), of this one prompt, or None. num_codes, temperature: as in sampling.
        nucleus: (B, T, ceil(V / 8)) as it returned them. New, old and reference policy renormalise over this same set:
            a ratio of probabilities over different sets would not be an importance weight.

    Returns: (B, T) float32, with gradient.
    """
    input_ids = input_ids.to(model.device)
    if position_ids is not None:
        position_ids = position_ids[:, None, :-1].expand(-1, len(input_ids), -1).to(model.device)  # (3, B, L+T-1)
    # The logits at one position predict the id at the next, so the last id is only ever a target, and the last T logits
    # are all we need. Slices of them would not lower the peak: that is the backward pass of one layer.
    logits = model(
        input_ids=input_ids[:, :-1], position_ids=position_ids, use_cache=False, logits_to_keep=num_new_tokens
    ).logits  # (B, T, vocabulary)
    if nucleus is not None:
        bits = np.unpackbits(nucleus, axis=-1, count=logits[..., :num_codes].shape[-1])
        nucleus = torch.from_numpy(bits).bool().to(model.device)  # (B, T, V)
    logp = _log_distribution(logits, num_codes, temperature, nucleus)
    return logp.gather(-1, input_ids[:, -num_new_tokens:].unsqueeze(-1)).squeeze(-1)


# ---- 5. loss --------------------------------------------------------------------------------------------------------


def compute_grpo_loss(
    new_logprobs, old_logprobs, advantages, ref_logprobs=None, mask=None, clip_range=0.2, kl_coef=0.0
):
    """The clipped surrogate with a KL penalty (DeepSeekMath, eq. 3-4), averaged over each sequence, then over them.

    Args:
        new_logprobs, old_logprobs, ref_logprobs: (B, T) float32; only the first carries a gradient.
        advantages: (B,) float32, one a sequence: every token of a picture shares its praise or blame.
        mask: (B, T), 1 for tokens that count; None: all.
        clip_range: a ratio beyond 1 +- this, in the direction the advantage pushes, gets no further gradient.
        kl_coef: weight of k3; above 0 it needs `ref_logprobs`, or ValueError.

    Returns: the loss, a scalar, and metrics as floats: loss, policy_loss, kl (nats a token; NaN without a reference),
    clip_fraction (share of tokens whose gradient was cut), ratio_mean.
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
    cut = average((clipped < unclipped).float())
    metrics = {"loss": loss, "policy_loss": policy_loss, "kl": kl, "clip_fraction": cut, "ratio_mean": average(ratio)}
    return loss, {name: value.item() for name, value in metrics.items()}


# ---- 6. the trainer -------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """G samples of one prompt. Its tensors wait on the CPU from step to step."""

    prompt_ids: torch.Tensor  # (L,)
    position_ids: torch.Tensor | None  # (3, L+T)
    tokens: torch.Tensor  # (G, T)
    nucleus: torch.Tensor | None  # (G, T, ceil(V / 8))
    old_logprobs: torch.Tensor  # (G, T)
    mask: torch.Tensor | None = None  # (G, T), 1 for tokens that count; None: all. Text: up to the first end token
    advantages: torch.Tensor | None = None  # (G,)
    ref_logprobs: torch.Tensor | None = None  # (G, T), None when kl_coef is 0


def set_advantages(groups, rewards):
    """3: the advantages of all groups from the rewards (N*G,) of their samples, group after group."""
    size = len(groups[0].old_logprobs)
    for group, advantages in zip(groups, compute_advantages(rewards, size).split(size), strict=True):
        group.advantages = advantages


class GRPO:
    """Samples groups from a policy, and moves its adapter by their advantages.

    Args:
        model: a PeftModel: a frozen base with a trainable adapter, without dropout. optimizer: over the adapter.
        settings: has micro_batch_size (bounds memory, changes nothing else), iterations, clip_range, kl_coef,
            temperature and top_p.
        num_codes, forward: as for generate_with_logprobs.

    add_reference and update need of a group what Group has from old_logprobs on, and a logprobs() that knows the rest.
    With torch.distributed, W ranks with P prompts each make the step of one process with W*P, from equal adapters; it
    is the caller who gives each rank prompts and seeds of its own.
    """

    def __init__(self, model, optimizer, settings, num_codes=None, forward=None):
        self.model, self.optimizer, self.settings, self.forward = model, optimizer, settings, forward
        self.sampling_args = {"num_codes": num_codes, "temperature": settings.temperature}  # of sampling and scoring
        # Under dropout policy, old policy and reference would disagree. That of attention is a number, not a module.
        numbers = [(name, x) for m in model.modules() for name, x in vars(m).items() if isinstance(x, float)]
        if any(rate > 0 for name, rate in numbers if name == "p" or "dropout" in name):
            raise ValueError("the model has dropout; set it to 0 in the adapter's and in the model's config")

    def sample(self, prompts, group_size, seed):
        """1: a group of `group_size` (G) samples for each of N prompts: (prompt_ids (L,), position_ids (3, L+T), T).

        position_ids: None for a text model. T is the same for all, or ValueError. Group i draws from `seed + i` alone:
        the same prompts and seed give the same samples until the policy moves.
        """
        self.model.eval()
        prompt_ids, position_ids, lengths = zip(*prompts, strict=True)
        if len(set(lengths)) > 1:
            raise ValueError(f"sequences sampled side by side have one length, not {sorted(set(lengths))}")
        generators = [torch.Generator(self.model.device).manual_seed(seed + i) for i in range(len(prompts))]
        sampled = generate_with_logprobs(
            self.model, prompt_ids, lengths[0], num_samples=group_size, top_p=self.settings.top_p,
            position_ids=None if position_ids[0] is None else position_ids, generators=generators, forward=self.forward,
            **self.sampling_args,
        )  # fmt: skip
        tokens, logprobs, nucleus = [[None] * len(prompts) if x is None else x.split(group_size) for x in sampled]
        return [Group(*each) for each in zip(prompt_ids, position_ids, tokens, nucleus, logprobs, strict=True)]

    @torch.no_grad()
    def add_reference(self, groups):
        """4: the reference's log-probs, those of the same weights with the adapter disabled, where they are needed."""
        self.model.eval()
        with self.model.disable_adapter():
            for group in groups if self.settings.kl_coef > 0 else ():
                if group.advantages.any():
                    group.ref_logprobs = torch.cat([self.logprobs(group, rows) for rows in self.micro_batches(group)])

    @without_cudnn_attention  # in the backward pass too: gradient checkpointing computes there what it has not kept
    def update(self, groups):
        """5 and 6: move the policy, `iterations` optimiser steps over all groups. Returns the metrics.

        A group without spread has advantage 0, teaches nothing and is passed over: it counts in the step's mean loss,
        but not in the metrics, which are means over the others. If all groups are such there is no step (Adam would
        move on its momentum alone), and the metrics of the loss are NaN. skipped: the share of the iterations without a
        step because the gradient was not finite; grad_norm: the mean norm of the others.
        """
        with_spread, iterations = [group for group in groups if group.advantages.any()], self.settings.iterations
        micro_batches = [(group, rows) for group in with_spread for rows in self.micro_batches(group)]
        metrics = dict.fromkeys(LOSS_METRICS, 0.0 if with_spread else float("nan"))
        metrics["groups_without_spread"] = 1 - len(with_spread) / len(groups)
        parameters = [p for param_group in self.optimizer.param_groups for p in param_group["params"]]
        coefficients = {"clip_range": self.settings.clip_range, "kl_coef": self.settings.kl_coef}
        norms, skipped = [], 0
        self.model.train()  # wakes gradient checkpointing, which sleeps in eval mode; there is no dropout to wake
        for iteration in range(iterations):
            for group, rows in micro_batches:
                new, old = self.logprobs(group, rows), group.old_logprobs[rows]  # (B, T)
                ref = None if group.ref_logprobs is None else group.ref_logprobs[rows]
                mask = torch.ones_like(old) if group.mask is None else group.mask[rows]
                loss, parts = compute_grpo_loss(new, old, group.advantages[rows], ref, mask, **coefficients)
                # A mean over the micro-batch, which counts by its share of all samples of the step: however groups are
                # cut, the gradients add up to the same.
                share = len(rows) / len(group.old_logprobs)
                (loss * share / len(groups)).backward()
                for name, value in parts.items():
                    metrics[name] += value * share / len(with_spread) / iterations
                if iteration == 0:  # what is left is the rounding between sampling with a cache and one full pass
                    gap = (new.detach() - old).abs() * mask
                    mean_gap = (gap.sum(1) / mask.sum(1).clamp(min=1)).mean().item()
                    metrics["mean_logprob_gap"] += mean_gap * share / len(with_spread)
                    metrics["max_logprob_gap"] = max(metrics["max_logprob_gap"], gap.max().item())
            for parameter in parameters if dist.is_initialized() else ():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM).item()
            if 0 < norm < float("inf"):
                self.optimizer.step()
                norms.append(norm)
            elif norm != 0:  # one NaN stepped upon would be in every weight for good
                skipped += 1
            self.optimizer.zero_grad()
        return metrics | {"grad_norm": sum(norms) / len(norms) if norms else 0.0, "skipped": skipped / iterations}

    def micro_batches(self, group):
        """The numbers of a group's samples, as many at a time as go through the model together."""
        return torch.arange(len(group.old_logprobs)).split(self.settings.micro_batch_size)

    def logprobs(self, group, rows):
        """4: log-probs (B, T) of some samples of a group under the model as it stands, on the CPU as the group is."""
        ids = torch.cat([group.prompt_ids.expand(len(rows), -1), group.tokens[rows]], dim=1)  # (B, L+T)
        nucleus = None if group.nucleus is None else group.nucleus[rows]
        inputs = {"position_ids": group.position_ids, "nucleus": nucleus, **self.sampling_args}
        return get_per_token_logprobs(self.model, ids, group.tokens.shape[1], **inputs).cpu()


# ---- one GPU for two models -----------------------------------------------------------------------------------------


class Offload:
    """Lets models take turns on a GPU that has no room for all: offload(*models) brings these, after the others left.

    Frozen weights have their home in page-locked host memory, which a GPU reads at the full speed of its bus. They are
    copied up when needed and dropped afterwards: nothing is copied back, for they do not change. What is trained is
    small, and stays on the device with its optimiser.

    models: all that take turns, with their adapters. left: called when weights have left the GPU, for whoever holds
    their addresses.
    """

    def __init__(self, models, device, left=lambda: None):
        self.device, self.left, self.homes = device, left, {}  # {model: [(frozen weight, its place in host memory)]}
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
            self.left()
            torch.cuda.empty_cache()  # memory cut into pieces for one model does not fit the other's
        for weight, home in [weight for model in models for weight in self.homes[model]]:
            if weight.data_ptr() == home.data_ptr():
                weight.data = home.to(self.device, non_blocking=True, copy=True)
