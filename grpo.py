"""GRPO in one file: group relative policy optimisation of an autoregressive model that writes image
codes.

For a prompt, the policy pi writes T tokens o_1..o_T; a decoder paints them; a reward R scores the
picture. GRPO (Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1) raises the expected
reward without a value network: the baseline of a sample is the mean reward of its group, the G
pictures of one prompt. It minimises

    loss = -1/G sum_i 1/T sum_t [ min(r A, clip(r, 1 - c, 1 + c) A) - kl_coef * k3 ]

    r  = pi(o_t) / pi_old(o_t)                    ratio: how far the policy has moved since it sampled this token
    A  = (R_i - mean(R)) / (std(R) + eps)         advantage: the z-score of the reward in its group of G
    k3 = ref/pi - log(ref/pi) - 1                 an estimate of KL(pi || reference), never negative

averaged over the N prompts of a step. What this adds to REINFORCE, whose loss is -R log pi(o_t):
the group's mean, so that only what is better than usual is reinforced; its std, so that all prompts
count alike; the ratio and its clip, so that the same samples can serve several optimiser steps; k3,
so that the policy stays near its start. With one iteration per step the ratio is 1, nothing is
clipped, and the gradient is that of -A log pi(o_t), and of the KL term.

One training step, in the order of this file:

    1. generate_with_logprobs     in GRPO.sample: G sequences of T tokens per prompt, with their log-probs (pi_old)
    2. paint and score            tokens -> pictures -> one reward per picture: in train.py, or your own
    3. compute_advantages         in set_advantages: rewards -> z-scores, per group
    4. get_per_token_logprobs     in GRPO.add_reference, then in GRPO.update: log-probs of those tokens, in one pass
    5. compute_grpo_loss          in GRPO.update: the formula above
    6. GRPO.update                micro-batches, gradient clipping, the optimiser

The reference is the model before training. It costs no memory: the policy is a frozen base plus a
LoRA adapter, so the base with its adapter disabled is the reference. Nothing here depends on
GLM-Image: examples/text_model.py trains a text model with this file alone. To copy it, or for
another loss (Dr. GRPO, DAPO, GSPO), read docs/copying.md.
"""

import inspect
import math
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers.generation.logits_process import TopPLogitsWarper

# cuDNN's attention is left out: on recent GPUs it is reported to give wrong tokens and NaN (pytorch
# 193893, trl 7181).
without_cudnn_attention = sdpa_kernel(
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
)

# ---- 1. sample -----------------------------------------------------------------------------------


@torch.no_grad()
@without_cudnn_attention
def generate_with_logprobs(
    model,
    prompts,
    num_new_tokens,
    *,
    num_samples=1,
    position_ids=None,
    allowed_ids=slice(0, None),
    temperature=1.0,
    top_p=1.0,
    end_ids=(),
    generators=None,
    forward=None,
):
    """Sample `num_samples` (G) continuations of exactly `num_new_tokens` (T) tokens for each of N
    prompts.

    All N*G run side by side: a pass reads all weights once, however many sequences it has.
    transformers' generate() would not do: it takes no generator per prompt, and would have to keep
    all logits to tell what top-p removed.

    Args:
        prompts: N tensors (L_i,) int64. Shorter ones are padded on the left, and the padding is
            masked.
        position_ids: N tensors (3, L_i+T) int64, or None: the model makes its own. A model with 3-D
            positions that is not given them falls back to text positions, silently.
        allowed_ids: slice(first, end), the ids that may be sampled, V of them; for pictures no end
            tokens.
        temperature: divides the logits; above 0. top_p: in (0, 1]; 1 keeps every id.
        end_ids: the ids that end a text, a tuple. Sampling stops, at a smaller T, one token after
            all texts have ended.
        generators: N torch.Generators on the model's device, so that no group depends on its
            neighbours. None: torch's.
        forward: called instead of the model for every token but the first: on a GPU, a captured
            graph.

    Returns, on the CPU:
        tokens: (N*G, T) int64, prompt after prompt.
        logprobs: (N*G, T) float32, each under the very distribution its token was drawn from.
        nucleus: (N*G, T, V) bool, the ids that survived top-p. None if top_p is 1.
    """
    _check_sampling(prompts, allowed_ids, temperature, top_p, generators)
    if padded := len(set(map(len, prompts))) > 1:
        _refuse_padding(model)
        position_ids = position_ids or [torch.arange(len(ids) + num_new_tokens) for ids in prompts]

    def side_by_side(tensors):  # N of (L_i,) or (3, L_i), padded on the left -> (N, L) or (3, N, L)
        longest = max(tensor.shape[-1] for tensor in tensors)
        return torch.stack([pad(row, (longest - row.shape[-1], 0)) for row in tensors], dim=-2).to(
            model.device
        )

    ids = side_by_side(prompts)  # (B, L), then (B, 1)
    positions = None if position_ids is None else side_by_side(position_ids)  # ([3,] N, L+T)
    not_padding = side_by_side(
        [torch.ones(len(ids) + num_new_tokens, dtype=torch.bool) for ids in prompts]
    )  # (N, L+T)
    rows = torch.arange(
        len(prompts), device=model.device
    )  # (B,), the prompt of each: first B = N, then N*G
    last = torch.tensor(
        [-1], device=model.device
    )  # in place of a number: see get_per_token_logprobs
    cache = None
    sampled = []

    def read(end):  # a forward pass over `ids`, which end there -> logits (B, vocabulary), cache
        start = end - ids.shape[1]
        mask = _attended(not_padding[rows], start, end) if padded else None
        at = None if positions is None else positions[..., rows, start:end]
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": at,
            "past_key_values": cache,
        }
        output = (model if cache is None else forward or model)(
            **inputs, use_cache=True, logits_to_keep=last
        )
        if getattr(output, "past_key_values", None) is None:
            raise ValueError(
                "the model returns no past_key_values: Mamba, RWKV and their like cannot be sampled here"
            )
        return output.logits[:, -1], output.past_key_values

    for end in range(
        ids.shape[1], ids.shape[1] + num_new_tokens
    ):  # the prompts in one pass, then one token per pass
        logits, written = read(end)
        if cache is None:  # each prompt was read once; from here on there are G rows of it
            rows = rows.repeat_interleave(num_samples)
            if hasattr(written, "reorder_cache"):
                written.reorder_cache(rows)
                logits = logits[rows]
            else:  # a cache of one's own is made of all rows
                ids = ids[rows]
                logits, written = read(end)
        cache = written
        sampled.append(_sample_token(logits, allowed_ids, temperature, top_p, generators))
        ids = sampled[-1][0]
        if (
            end_ids
            and not mask_through_end(torch.cat([drawn[0] for drawn in sampled], dim=1), end_ids)[
                :, -1
            ].any()
        ):
            break  # this token counts in no text

    tokens, logprobs, nucleus = zip(*sampled, strict=True)
    logprobs = torch.cat(logprobs, dim=1).cpu()
    if broken := [
        i for i, group in enumerate(logprobs.split(num_samples)) if not group.isfinite().all()
    ]:
        raise NotFinite(broken)
    nucleus = torch.stack([kept.cpu() for kept in nucleus], dim=1) if top_p < 1 else None
    return torch.cat(tokens, dim=1).cpu(), logprobs, nucleus


def mask_through_end(tokens, end_ids):
    """(B, T), 1 through the first token in `end_ids`. That one counts: without it no step could
    teach when to stop."""
    ended = torch.isin(tokens, torch.tensor(end_ids, device=tokens.device)).int()  # (B, T)
    return (ended.cumsum(1) - ended == 0).float()


def _attended(
    not_padding, start, end
):  # by the tokens from start to end: (B, L+T) bool -> (B, 1, end - start, end)
    # Padding attends to itself: on recent cards a row that sees nothing may be NaN, silently. The
    # mask has four dimensions because transformers takes it as it is; given one of two, it would
    # sync with the GPU at every token.
    at = torch.arange(end, device=not_padding.device)
    own = at[start:, None]
    return (not_padding[:, None, None, :end] & (at <= own)) | (at == own)


def _sample_token(logits, allowed_ids, temperature, top_p, generators):
    """One id per row: logits (N*G, vocabulary) -> ids (N*G, 1), log-probs (N*G, 1), nucleus (N*G,
    V) bool or None."""
    logp = _log_distribution(logits, allowed_ids, temperature)  # (N*G, V)
    nucleus = None
    if (
        top_p < 1
    ):  # transformers' own top-p leaves the most likely ids that together hold top_p, the rest become -inf
        nucleus = TopPLogitsWarper(top_p)(None, logp).isfinite()
        logp = _log_distribution(logits, allowed_ids, temperature, nucleus)
    # The Gumbel-max trick in its exponential form: with E = -log(uniform), argmax(p / E) is a draw
    # from p. torch.multinomial does the same, but checks p first, which would make the CPU wait for
    # the GPU at every token.
    noise = torch.empty_like(logp)
    generators = generators or [None]
    for group, generator in zip(noise.chunk(len(generators)), generators, strict=True):
        group.exponential_(generator=generator)
    drawn = (logp.exp() / noise).argmax(-1, keepdim=True)  # (N*G, 1)
    return drawn + allowed_ids.start, logp.gather(-1, drawn), nucleus


def _log_distribution(logits, allowed_ids, temperature, nucleus=None):
    """Log-probabilities of the ids the sampler may choose: (..., vocabulary) -> (..., V) float32.

    Sampling and reading again both come through here, so that a ratio never compares two different
    distributions.
    """
    logits = logits[..., allowed_ids].float() / temperature  # softmax in bf16 would lose the tail
    if nucleus is not None:
        logits = logits.masked_fill(~nucleus.to(logits.device), float("-inf"))
    return logits.log_softmax(-1)


# ---- 2. paint and score: see train.py ------------------------------------------------------------
# ---- 3. advantages -------------------------------------------------------------------------------


def compute_advantages(rewards, group_size, eps=1e-6):
    """The z-score of each reward within its group; a group of equal rewards gets exactly 0.

    Args:
        rewards: (N*G,) numbers, prompt after prompt: the first G are the group of the first prompt.
            NaN is a sample without a reward: it takes no part in mean and std, and gets 0.
        eps: keeps the division finite, in units of the reward.

    Returns: (N*G,) float32. ValueError for another shape, a G below 2 (a lone sample has no
    baseline), infinity.
    """
    centred, std = centre_groups(rewards, group_size)
    return (centred / (std + eps)).nan_to_num(0).flatten().float()


def centre_groups(rewards, group_size):
    """The rewards less the mean of their group, (N, G) float64, and the unbiased std of each group,
    (N, 1)."""
    rewards = torch.as_tensor(rewards, device="cpu")
    _check_rewards(rewards, group_size)
    # Rounded to float32 first, so that equal rewards stay equal; in float64 their mean is then
    # exact.
    groups = rewards.float().double().view(-1, group_size)  # (N, G)
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    count = (~groups.isnan()).sum(dim=1, keepdim=True)
    return centred, (centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


# ---- 4. read the tokens again: log-probs by teacher forcing --------------------------------------


@without_cudnn_attention
def get_per_token_logprobs(
    model,
    input_ids,
    num_new_tokens,
    *,
    position_ids=None,
    allowed_ids=slice(0, None),
    temperature=1.0,
    nucleus=None,
):
    """Log-probs of the last `num_new_tokens` (T) ids of each row under the sampler's own
    distribution, in one pass.

    Args:
        input_ids: (B, L+T) int64, one prompt and what was sampled for it.
        position_ids: (3, L+T), the same for all rows, or None. allowed_ids, temperature: as in
            sampling.
        nucleus: (B, T, V) bool as sampling returned it. New, old and reference policy renormalise
            over this same set: a ratio of probabilities over different sets would not be an
            importance weight.

    Returns: (B, T) float32, with gradient.
    """
    input_ids = input_ids.to(model.device)
    if position_ids is not None:
        position_ids = (
            position_ids[:, None, : input_ids.shape[1] - 1]
            .expand(-1, len(input_ids), -1)
            .to(model.device)
        )
    # The logits at one position predict the id at the next: the last id is only ever a target, and
    # the last T logits (B, T, vocabulary) are all we need, even of a model that does not know
    # logits_to_keep.
    inputs = {"input_ids": input_ids[:, :-1], "position_ids": position_ids}
    keep = torch.arange(
        -num_new_tokens, 0, device=model.device
    )  # given a number, torch would copy the head per row
    logits = model(**inputs, use_cache=False, logits_to_keep=keep).logits[:, -num_new_tokens:]
    logp = _log_distribution(logits, allowed_ids, temperature, nucleus)  # (B, T, V)
    drawn = input_ids[:, -num_new_tokens:] - allowed_ids.start  # (B, T)
    return logp.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


# ---- 5. loss -------------------------------------------------------------------------------------


def compute_grpo_loss(
    new_logprobs,
    old_logprobs,
    advantages,
    ref_logprobs=None,
    mask=None,
    clip_range=0.2,
    kl_coef=0.0,
):
    """The clipped surrogate with a KL penalty (DeepSeekMath, eq. 3-4), as means over sequences of
    means over tokens.

    Args:
        new_logprobs, old_logprobs, ref_logprobs: (B, T) float32; only the first carries a gradient.
        advantages: (B,) float32: the same for every token of a sample. Or (B, T), one per token.
        mask: (B, T), 1 for tokens that count, 0 for those that do not, whatever their numbers are;
            None: all count.
        clip_range: a ratio beyond 1 +- this, in the direction the advantage pushes, gets no further
            gradient.
        kl_coef: weight of k3; above 0 it needs `ref_logprobs`.

    Returns: the loss, a scalar, and metrics as floats: loss, policy_loss, kl (nats per token; NaN
    without a reference), clip_fraction (share of tokens whose gradient was cut), ratio_mean, and
    mean and largest |new - old|, the gap: on fresh samples it is rounding, between sampling with a
    cache and reading in one pass. ValueError for other shapes.
    """
    _check_loss(
        new_logprobs.shape, advantages, kl_coef, ref_logprobs, old_logprobs=old_logprobs, mask=mask
    )
    mask = torch.ones_like(new_logprobs) if mask is None else mask.to(new_logprobs.dtype)
    share = (
        mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    )  # (B, T), of a token in the mean of means
    weight = share  # (B, T), of a token in the loss: what other losses change, see docs/copying.md
    counted = lambda x: torch.where(
        mask > 0, x, 0
    )  # before anything is computed: 0 x NaN would be NaN
    average = lambda x: (x * share).sum()

    log_ratio = counted(new_logprobs - old_logprobs)  # (B, T)
    ratio = log_ratio.exp()
    advantages = counted(advantages.view(len(advantages), -1))  # (B, T)
    unclipped = ratio * advantages
    clipped = (
        ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    )  # beyond the range its gradient is 0
    loss = policy_loss = -(torch.min(unclipped, clipped) * weight).sum()
    kl = torch.tensor(float("nan"))  # not measured
    if ref_logprobs is not None:
        # k3 (Schulman 2020, "Approximating KL divergence"): its value estimates KL(pi || ref), but
        # as a loss term its gradient on fresh samples is that of KL(ref || pi). Both pull towards
        # the reference, which is what it is for.
        log_ref = counted(ref_logprobs - new_logprobs)  # log(ref / pi)
        k3 = log_ref.exp() - log_ref - 1
        kl = average(k3)
        loss = policy_loss + kl_coef * (k3 * weight).sum()
    metrics = {"loss": loss, "policy_loss": policy_loss, "kl": kl}
    metrics |= {
        "clip_fraction": average((clipped < unclipped).float()),
        "ratio_mean": average(ratio),
    }
    metrics |= {
        "mean_logprob_gap": average(log_ratio.abs()),
        "max_logprob_gap": log_ratio.abs().max(),
    }
    return loss, {name: value.item() for name, value in metrics.items()}


# ---- 6. the trainer ------------------------------------------------------------------------------


@dataclass
class GRPOSettings:
    """Settings of the algorithm."""

    micro_batch_size: int = (
        4  # sequences per forward pass: bounds memory, changes results only by rounding
    )
    iterations: int = (
        1  # optimiser steps on the same samples; above 1 the ratio leaves 1 and clipping acts
    )
    clip_range: float = 0.2
    kl_coef: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    end_ids: tuple = ()  # what ends a text; pictures have none
    max_grad_norm: float = (
        1.0  # one rare prompt must not undo a run; the norm before clipping is logged
    )


@dataclass
class Group:
    """G samples of one prompt. Its tensors wait on the CPU between the parts of a step."""

    prompt_ids: torch.Tensor  # (L,)
    position_ids: torch.Tensor | None  # (3, L+T)
    tokens: torch.Tensor  # (G, T)
    old_logprobs: torch.Tensor  # (G, T)
    nucleus: torch.Tensor | None = None  # (G, T, V) bool
    mask: torch.Tensor | None = (
        None  # (G, T), 1 for tokens that count; None: all. Text: see mask_through_end
    )
    advantages: torch.Tensor | None = None  # (G,) or (G, T)
    ref_logprobs: torch.Tensor | None = None  # (G, T), None when kl_coef is 0


def set_advantages(groups, rewards):
    """3: the advantages of all groups from the rewards (N*G,) of their samples, group after
    group."""
    _check_groups(groups, with_advantages=False)
    size = len(groups[0].old_logprobs)
    for group, advantages in zip(
        groups, compute_advantages(rewards, size).split(size), strict=True
    ):
        group.advantages = advantages


class GRPO:
    """Samples groups from a policy, and updates its adapter by their advantages.

    Args:
        model: a PeftModel: a frozen base with a trainable adapter, LoRA or its like. optimizer:
            over the adapter.
        allowed_ids, forward: as for generate_with_logprobs.
        reference: makes a context within which the model is the reference; None: with its adapter
            disabled.

    A group needs old_logprobs, mask, advantages and ref_logprobs; all else is left to logprobs(),
    which a subclass may replace (see DecoderGRPO). With torch.distributed, W ranks with N prompts
    and seeds of their own equal one with W*N.
    """

    def __init__(
        self, model, optimizer, settings, allowed_ids=slice(0, None), forward=None, reference=None
    ):
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.forward = forward
        self.reference = reference or self.without_adapter
        self.sampling_args = {
            "allowed_ids": allowed_ids,
            "temperature": settings.temperature,
        }  # for reading again, too
        self.steps = 0  # optimiser steps so far
        self.parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        _check_model(model, self.parameters)

    def sample(self, prompts, group_size, seed):
        """1: N Groups of `group_size` (G) samples. prompts: N times (prompt_ids (L,), position_ids
        (3, L+T), T).

        position_ids: None for a text model. T must be the same for all, else ValueError. Group i
        draws from `seed + i`
        alone: the same prompts and seed give the same samples until the policy moves.
        """
        self.model.eval()
        triples = [prompt for prompt in prompts if isinstance(prompt, tuple) and len(prompt) == 3]
        if len(triples) < len(prompts) or len({length for *_, length in triples}) > 1:
            raise ValueError(
                "a prompt is (prompt_ids, position_ids or None, T), with one length T for all of them"
            )
        prompt_ids, position_ids, lengths = zip(*prompts, strict=True)
        generators = [
            torch.Generator(self.model.device).manual_seed(seed + i) for i in range(len(prompts))
        ]
        ends = self.settings.end_ids
        tokens, logprobs, nucleus = generate_with_logprobs(
            self.model,
            prompt_ids,
            lengths[0],
            num_samples=group_size,
            top_p=self.settings.top_p,
            position_ids=None if position_ids[0] is None else position_ids,
            generators=generators,
            forward=self.forward,
            end_ids=ends,
            **self.sampling_args,
        )
        sampled = (tokens, logprobs, nucleus, mask_through_end(tokens, ends) if ends else None)
        sampled = [
            [None] * len(prompts) if each is None else each.split(group_size) for each in sampled
        ]
        return [Group(ids.cpu(), *group) for ids, *group in zip(prompt_ids, position_ids, *sampled)]

    @torch.no_grad()
    def add_reference(self, groups):
        """4: log-probs under the reference, the same model with the adapter disabled, for groups
        with spread."""
        _check_groups(groups, with_advantages=True)
        if self.settings.kl_coef == 0:
            return
        self.model.eval()
        with self.reference():
            for group in filter(lambda group: group.advantages.any(), groups):
                group.ref_logprobs = torch.cat(
                    [self.logprobs(group, rows) for rows in self.micro_batches(group)]
                )

    @without_cudnn_attention  # in the backward pass too: gradient checkpointing computes there what it has not kept
    def update(self, groups):
        """4 to 6: move the policy, `iterations` optimiser steps over all groups. Returns the
        metrics.

        A group of equal rewards is left out, KL term included: it counts in the divisor of the
        loss, but not in the metrics, means over the others (NaN if there are none). skipped: the
        share of iterations whose gradient
        was not finite, and which made no step; grad_norm and, per parameter, grad_rms: of those
        that did.
        """
        _check_groups(groups, with_advantages=True)
        learning = [group for group in groups if group.advantages.any()]
        micro_batches = [(group, rows) for group in learning for rows in self.micro_batches(group)]
        weight = lambda group, rows: len(rows)  # of a micro-batch in the mean loss of the step
        total = sum(weight(group, rows) for group in groups for rows in self.micro_batches(group))
        total = torch.tensor(
            float(total), device=self.model.device
        )  # averaged over ranks, as gradients are
        if dist.is_initialized():
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        total = total.item()
        unmoved = (
            self.steps == 0 and not self.optimizer.state
        )  # a resumed one has a state; plain SGD never has
        self.model.train()  # enables gradient checkpointing, which is off in eval mode; there is no dropout
        self.optimizer.zero_grad()  # an update that ended in an exception has left half a gradient
        reports = []  # (weight, metrics) of each micro-batch
        norms = []  # the gradient's before clipping, per iteration
        for _ in range(self.settings.iterations):
            for group, rows in micro_batches:
                known = (group.old_logprobs, group.advantages, group.ref_logprobs, group.mask)
                known = [None if tensor is None else tensor[rows] for tensor in known]
                new_logprobs = self.logprobs(group, rows)
                loss, metrics = compute_grpo_loss(
                    new_logprobs, *known, self.settings.clip_range, self.settings.kl_coef
                )
                (
                    loss * weight(group, rows) / total
                ).backward()  # these add up to the same however groups are cut
                reports.append((weight(group, rows), metrics))
            if dist.is_initialized():
                for parameter in self.parameters:
                    if (
                        parameter.grad is None
                    ):  # no group of this rank has spread, but another rank's may have
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            norms.append(
                torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm).item()
            )
            # One step on a NaN gradient ruins every weight; on a gradient of 0 Adam would move on
            # its momentum alone.
            if 0 < norms[-1] < float("inf"):
                self.optimizer.step()
                self.steps += 1
            self.optimizer.zero_grad()

        first = _average(
            reports[: len(micro_batches)]
        )  # the first iteration alone: later the policy has moved
        _warn_of(
            first["mean_logprob_gap"], norms, first["kl"] if unmoved and self.optimizer.state else 0
        )
        metrics = _average(reports) | {
            name: first[name] for name in ("mean_logprob_gap", "max_logprob_gap")
        }
        stepped = [norm for norm in norms if 0 < norm < float("inf")]
        norm = sum(stepped) / max(len(stepped), 1)
        metrics |= {
            "grad_norm": norm,
            "grad_rms": norm / math.sqrt(max(sum(p.numel() for p in self.parameters), 1)),
        }
        metrics |= {"skipped": sum(not norm < float("inf") for norm in norms) / len(norms)}
        return metrics | {"groups_without_spread": 1 - len(learning) / len(groups)}

    def micro_batches(self, group):
        """Indices of a group's samples, `micro_batch_size` at a time."""
        return torch.arange(len(group.old_logprobs)).split(self.settings.micro_batch_size)

    @contextmanager
    def without_adapter(self):
        """Within it the model is the reference, if nothing but an adapter learns: PEFT freezes what
        it disables."""
        with getattr(self.model, "disable_adapter", nullcontext)():
            if any(p.requires_grad for p in self.model.parameters()):
                raise ValueError(
                    "not only an adapter learns: the reference must be a frozen copy, see docs/copying.md"
                )
            yield

    def logprobs(self, group, rows):
        """4: log-probs (B, T) of some samples of a group under the model as it is, on the CPU,
        where groups stay."""
        ids = torch.cat(
            [group.prompt_ids.expand(len(rows), -1), group.tokens[rows]], dim=1
        )  # (B, L+T)
        nucleus = None if group.nucleus is None else group.nucleus[rows]
        inputs = {"position_ids": group.position_ids, "nucleus": nucleus, **self.sampling_args}
        return get_per_token_logprobs(self.model, ids, group.tokens.shape[1], **inputs).cpu()


def _average(reports):
    """The metrics of micro-batches as one: weighted means; the largest gap. NaN if no group taught
    anything."""
    total = sum(weight for weight, _ in reports) or math.nan
    names = ("loss", "policy_loss", "kl", "clip_fraction", "ratio_mean", "mean_logprob_gap")
    means = {
        name: sum(weight * metrics[name] for weight, metrics in reports) / total for name in names
    }
    return means | {
        "max_logprob_gap": max(
            [metrics["max_logprob_gap"] for _, metrics in reports], default=math.nan
        )
    }


# ---- one GPU for two models ----------------------------------------------------------------------


class Offload:
    """Lets models take turns on a GPU that cannot hold them all: offload(*models) brings these up,
    the others leave.

    Frozen weights live in page-locked host memory, which a GPU reads at the full speed of its bus.
    Without `pin` they stay where they are, such as mapped from a file, and are read at a fifth of
    it. They are copied up when needed and then dropped, for they do not change. What is trained is
    small, and stays on the device. on_evict: called after weights have left the GPU: a CUDA graph
    that read them must be dropped.
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
            self.homes[model] = [
                (tensor, tensor.data) for tensor in tensors if not tensor.requires_grad
            ]

    def __call__(self, *models):
        others = [
            weight for model in self.homes.keys() - set(models) for weight in self.homes[model]
        ]
        if any(weight.data_ptr() != home.data_ptr() for weight, home in others):
            for weight, home in others:
                weight.data = home
            self.on_evict()
        torch.cuda.empty_cache()  # memory fragmented by one model, or by rewards, would not fit the other
        for weight, home in [weight for model in models for weight in self.homes[model]]:
            if weight.data_ptr() == home.data_ptr():
                weight.data = home.to(self.device, non_blocking=True, copy=True)


# ---- checks: misuse is refused with one line, or warned of ---------------------------------------


def _warn_of(
    gap, norms, drift
):  # gap: NaN if no rewards differ. drift: the KL before any step, which is to be 0
    still = norms[0] == 0 and not math.isnan(gap)
    signs = {
        "mean_logprob_gap is above 0.1 (0.05 is normal in bfloat16): sampled and reread log-probs disagree": gap
        > 0.1,
        "kl is above 0 although nothing has moved: the reference is not the model before training": drift
        > 0.01,
        "rewards differ, but the gradient is exactly 0: does the optimizer hold the active adapter?": still,
        "the gradient is NaN or infinite: no step was taken": not all(
            norm < float("inf") for norm in norms
        ),
    }
    for sign in filter(signs.get, signs):  # Python shows each once for a line that calls update
        warnings.warn(
            f"{sign}; causes are in docs/copying.md", stacklevel=4
        )  # where update is called


class NotFinite(ValueError):
    """Sampled log-probs are NaN or infinite; args[0]: the indices of the prompts concerned."""


def _check_sampling(prompts, allowed_ids, temperature, top_p, generators):
    if any(not torch.is_tensor(ids) or ids.ndim != 1 or len(ids) == 0 for ids in prompts):
        raise ValueError("a prompt is a tensor (L,) of ids, with L 1 or more")
    first = allowed_ids.start if isinstance(allowed_ids, slice) else None
    if not isinstance(first, int) or first < 0 or allowed_ids.step not in (None, 1):
        raise ValueError(
            f"allowed_ids is {allowed_ids}: give slice(first, end), with first 0 or more"
        )
    if temperature <= 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}"
        )
    if generators is not None and len(generators) != len(prompts):
        raise ValueError(f"{len(generators)} generators for {len(prompts)} prompts: give one each")


def _refuse_padding(model):
    """ValueError for a model that would not take positions and a mask of four dimensions as they
    are."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(getattr(base, "config", None), "get_text_config", lambda: None)()
    attention = getattr(config, "_attn_implementation", None) or "eager"
    masked = attention not in ("eager", "flex_attention") and "flash" not in attention
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    placed = "position_ids" in inspect.signature(base.forward).parameters
    tables = [module for name, module in base.named_modules() if "position" in name]
    offset = any(
        getattr(table, "padding_idx", None) is not None for table in tables
    )  # Roberta adds padding_idx + 1
    if offset or not (masked and full and placed) or getattr(config, "sliding_window", None):
        raise ValueError(
            "sample prompts of one length together: docs/copying.md says which models take others"
        )


def _check_rewards(rewards, group_size):
    if group_size < 2 or rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} are no groups of {group_size}: give (N*G,), with G 2 or more"
        )
    if rewards.requires_grad:
        raise ValueError("rewards carry a gradient: give rewards.detach()")
    for i in rewards.isinf().nonzero().flatten().tolist():
        raise ValueError(
            f"the reward of sample {i % group_size} of prompt {i // group_size} is {rewards[i]}"
        )


def _check_loss(shape, advantages, kl_coef, ref_logprobs, **others):
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError("kl_coef above 0 needs ref_logprobs")
    for name, tensor in {"ref_logprobs": ref_logprobs, **others}.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} for log-probs {tuple(shape)}")
    if advantages.shape not in (shape, shape[:1]):  # (B, 1) would meet (B, T) as (B, B, T)
        raise ValueError(
            f"advantages {tuple(advantages.shape)} for log-probs {tuple(shape)}: give (B,) or (B, T)"
        )


def _check_groups(groups, with_advantages):
    sizes = [len(group.old_logprobs) for group in groups]
    if not groups or (len(set(sizes)) > 1 and not with_advantages):
        raise ValueError(f"groups of {sizes} samples: give one group or more, all of one size")
    if with_advantages and any(group.advantages is None for group in groups):
        raise ValueError(
            "groups have no advantages yet: set_advantages comes before add_reference and update"
        )


def _check_model(model, parameters):
    """ValueError if sampling and reading again would differ, or, on all ranks, if their adapters
    are unequal."""
    if (
        isinstance(getattr(model, "module", None), torch.nn.Module)
        and "Parallel" in type(model).__name__
    ):
        raise ValueError(
            "the model is wrapped: give model.module, for the trainer averages gradients itself"
        )
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ValueError(
            "prompt and prefix tuning put virtual tokens before each sampled one: take LoRA instead"
        )
    for name, module in model.named_modules():
        for rate, value in vars(
            module
        ).items():  # the rate sits on a Dropout, or on the caller of F.dropout
            noisy = (
                "drop" in rate
                or "jitter" in rate
                or (rate == "p" and "Dropout" in type(module).__name__)
            )
            if noisy and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{name}.{rate} is {value}, noise in train mode: set it to 0 in the config"
                )
    if any(p.dtype != torch.float32 for p in parameters):
        warnings.warn(
            "trained weights are not float32: most of a usual step is rounded away", stacklevel=3
        )
    if dist.is_initialized() and model.device.type != "meta":
        sums = [
            p.detach().flatten().view(torch.uint8).sum().item() for p in parameters
        ]  # exact in any order
        extremes = torch.tensor([sums, [-number for number in sums]], device=model.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if extremes.sum(0).any():  # the largest and the smallest differ
            raise ValueError(
                "the ranks begin with different adapters: seed them alike until the adapter is made"
            )
