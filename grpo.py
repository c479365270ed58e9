"""GRPO in one file: group relative policy optimisation of an autoregressive model that writes image codes.

For a prompt, the policy pi writes T tokens o_1..o_T; a decoder paints them; a reward R scores the picture. GRPO (Shao
et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1) raises the expected reward without a value network: the
baseline of a sample is the mean reward of its group, the G pictures of one prompt. It minimises

    loss = -1/G sum_i 1/T sum_t [ min(r A, clip(r, 1 - c, 1 + c) A) - kl_coef * k3 ]

    r  = pi(o_t) / pi_old(o_t)                    ratio: how far the policy has moved since it sampled this token
    A  = (R_i - mean(R)) / (std(R) + eps)         advantage: the z-score of the reward in its group of G
    k3 = ref/pi - log(ref/pi) - 1                 an estimate of KL(pi || reference), never negative

averaged over the N prompts of a step. What this adds to REINFORCE, whose loss is -R log pi(o_t): the group's mean, so
that only what is better than usual is reinforced; its std, so that all prompts count alike; the ratio and its clip, so
that the same samples bear several optimiser steps; k3, so that the policy stays near its start. With one iteration per
step the ratio is 1, nothing is clipped, and the gradient is that of -A log pi(o_t), and of the KL term.

One training step, in the order of this file:

    1. generate_with_logprobs     sample G sequences of exactly T tokens per prompt, keep their log-probs (pi_old)
    2. paint and score            tokens -> pictures -> one reward per picture: in train.py, or your own
    3. compute_advantages         rewards -> z-scores, per group
    4. get_per_token_logprobs     log-probs of those tokens in one forward pass: the reference's, then the policy's
    5. compute_grpo_loss          the formula above
    6. GRPO                       ties 1, 4 and 5 together; its update: micro-batches, gradient clipping, the optimiser

The reference is the model before training. It costs no memory: the policy is a frozen base plus a LoRA adapter, so the
base with its adapter disabled is the reference. Nothing here depends on GLM-Image: examples/text_model.py trains a text
model with this file alone. To copy it, or for another loss (Dr. GRPO, DAPO, GSPO), read COPYING near its end.
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

MAX_GRAD_NORM = 1.0  # one rare prompt must not undo a run; the norm before clipping is logged

# cuDNN's attention, which torch prefers on recent cards, is left out: on a B200 wrong tokens are reported with fewer
# than 8 key-value heads (pytorch 193893; GLM-Image has 2), on an H100 gradients that are NaN under a mask (trl 7181).
without_cudnn_attention = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

# ---- 1. sample ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@without_cudnn_attention
def generate_with_logprobs(
    model, prompts, num_new_tokens, *, num_samples=1, position_ids=None, allowed_ids=slice(0, None), temperature=1.0,
    top_p=1.0, generators=None, forward=None,
):  # fmt: skip
    """Sample `num_samples` (G) continuations of exactly `num_new_tokens` (T) tokens for each of N prompts.

    All N*G run side by side, since each token reads all weights once, however many sequences there are. transformers'
    generate() would not do: it takes no generator per prompt, and to tell what top-p removed it keeps all scores.

    Args:
        prompts: N tensors (L_i,) int64. Shorter ones are padded on the left, and the padding is masked.
        position_ids: N tensors (3, L_i+T) int64, or None: the model makes its own, as in scoring. A model with 3-D
            positions that is not given them falls back to text positions, silently.
        allowed_ids: slice(first, end) of the vocabulary, V ids that may be sampled: no end tokens, no unused ids.
        temperature: divides the logits; above 0. top_p: in (0, 1]; 1 keeps every id.
        generators: N torch.Generators on the model's device, so that no group depends on its neighbours. None: torch's.
        forward: called instead of the model for every token but the first: on a GPU, a captured graph.

    Returns, on the CPU:
        tokens: (N*G, T) int64, prompt after prompt.
        logprobs: (N*G, T) float32, each under the very distribution its token was drawn from.
        nucleus: (N*G, T, V) bool, the ids that survived top-p. None if top_p is 1.
    """
    _check_sampling(prompts, allowed_ids, temperature, top_p, generators)
    lengths = [len(ids) + num_new_tokens for ids in prompts]
    padded = len(set(lengths)) > 1
    if padded:
        _refuse_padding(model)
        position_ids = position_ids or [torch.arange(length) for length in lengths]

    def side_by_side(tensors):  # N of (L_i,) or (3, L_i), padded on the left -> (N*G, L) or (3, N*G, L)
        longest = max(tensor.shape[-1] for tensor in tensors)
        rows = [pad(tensor, (longest - tensor.shape[-1], 0)) for tensor in tensors]
        return torch.stack(rows, dim=-2).repeat_interleave(num_samples, dim=-2).to(model.device)

    def attended(start, end):  # by tokens start to end, (N*G, 1, end - start, end) bool
        # Padding attends to itself: on recent cards a row that sees nothing may be NaN, silently. And a mask of four
        # dimensions is taken as it is: with two of them transformers syncs with the GPU at every token.
        at = torch.arange(end, device=model.device)
        own = at[start:, None]
        return (not_padding[..., :end] & (at <= own)) | (at == own)

    ids = side_by_side(prompts)  # (N*G, L), then (N*G, 1)
    longest = ids.shape[1]  # L
    positions = None if position_ids is None else side_by_side(position_ids)  # ([3,] N*G, L+T)
    not_padding = side_by_side([torch.ones(length, dtype=torch.bool) for length in lengths])[:, None, None]
    cache = None
    sampled = []
    for end in range(longest, longest + num_new_tokens):  # first the prompts, in one pass; then one token per pass
        start = end - ids.shape[1]
        run = model if cache is None else forward or model
        output = run(
            input_ids=ids, attention_mask=attended(start, end) if padded else None, past_key_values=cache,
            position_ids=None if positions is None else positions[..., start:end], use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ValueError("the model returns no past_key_values: Mamba, RWKV and their like cannot be sampled here")
        sampled.append(_sample_token(output.logits[:, -1], allowed_ids, temperature, top_p, generators))
        ids = sampled[-1][0]

    tokens, logprobs, nucleus = zip(*sampled, strict=True)
    logprobs = torch.cat(logprobs, dim=1).cpu()
    if broken := [i for i, group in enumerate(logprobs.split(num_samples)) if not group.isfinite().all()]:
        raise NotFinite(broken)
    nucleus = torch.stack([ids.cpu() for ids in nucleus], dim=1) if top_p < 1 else None
    return torch.cat(tokens, dim=1).cpu(), logprobs, nucleus


def _sample_token(logits, allowed_ids, temperature, top_p, generators):
    """One id per row: logits (N*G, vocabulary) -> ids (N*G, 1), log-probs (N*G, 1), nucleus (N*G, V) bool or None."""
    logp = _log_distribution(logits, allowed_ids, temperature)  # (N*G, V)
    nucleus = None
    if top_p < 1:  # transformers' own top-p leaves the most likely ids that together hold top_p, the rest become -inf
        nucleus = TopPLogitsWarper(top_p)(None, logp).isfinite()
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
        logits = logits.masked_fill(~nucleus.to(logits.device), float("-inf"))
    return logits.log_softmax(-1)


# ---- 2. paint and score: see train.py -------------------------------------------------------------------------------
# ---- 3. advantages --------------------------------------------------------------------------------------------------


def compute_advantages(rewards, group_size, eps=1e-6):
    """The z-score of each reward within its group; a group of equal rewards gets exactly 0.

    Args:
        rewards: (N*G,) numbers, prompt after prompt: the first G are the group of the first prompt. NaN is a sample
            without a reward: it takes no part in mean and std, and gets 0.
        eps: keeps the division finite, in units of the reward.

    Returns: (N*G,) float32. ValueError for another shape, a G below 2 (a lone sample has no baseline), infinity.
    """
    rewards = torch.as_tensor(rewards, device="cpu")
    _check_rewards(rewards, group_size)
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
        input_ids: (B, L+T) int64, one prompt and what was sampled for it.
        position_ids: (3, L+T), the same for all rows, or None. allowed_ids, temperature: as in sampling.
        nucleus: (B, T, V) bool as sampling returned it. New, old and reference policy renormalise over this same set:
            a ratio of probabilities over different sets would not be an importance weight.

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
    logp = _log_distribution(logits, allowed_ids, temperature, nucleus)  # (B, T, V)
    drawn = input_ids[:, -num_new_tokens:] - allowed_ids.start  # (B, T)
    return logp.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


# ---- 5. loss --------------------------------------------------------------------------------------------------------


def compute_grpo_loss(
    new_logprobs, old_logprobs, advantages, ref_logprobs=None, mask=None, clip_range=0.2, kl_coef=0.0
):
    """The clipped surrogate with a KL penalty (DeepSeekMath, eq. 3-4), averaged over each sequence, then over them.

    Args:
        new_logprobs, old_logprobs, ref_logprobs: (B, T) float32; only the first carries a gradient.
        advantages: (B,) float32: every token of a picture shares its praise or blame. Or (B, T), one per token.
        mask: (B, T), 1 for tokens that count, 0 for those that do not, whatever their numbers are; None: all count.
        clip_range: a ratio beyond 1 +- this, in the direction the advantage pushes, gets no further gradient.
        kl_coef: weight of k3; above 0 it needs `ref_logprobs`.

    Returns: the loss, a scalar, and metrics as floats: loss, policy_loss, kl (nats per token; NaN without a reference),
    clip_fraction (share of tokens whose gradient was cut), ratio_mean, and mean and largest |new - old|, the gap: on
    fresh samples it is rounding, between sampling with a cache and scoring in one pass. ValueError for other shapes.
    """
    _check_loss(new_logprobs.shape, advantages, kl_coef, ref_logprobs, old_logprobs=old_logprobs, mask=mask)
    mask = torch.ones_like(new_logprobs) if mask is None else mask.to(new_logprobs.dtype)
    share = mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)  # (B, T), of a token in the mean of the means
    weight = share  # (B, T), of a token in the loss: what other losses change, see COPYING

    counted = lambda x: torch.where(mask > 0, x, 0)  # before anything is computed: 0 x NaN would be NaN
    average = lambda x: (x * share).sum()

    log_ratio = counted(new_logprobs - old_logprobs)  # (B, T)
    ratio = log_ratio.exp()
    advantages = counted(advantages.view(len(advantages), -1))  # (B, T)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    loss = policy_loss = -(torch.min(unclipped, clipped) * weight).sum()
    kl = torch.tensor(float("nan"))  # not measured
    if ref_logprobs is not None:
        # k3 (Schulman 2020, "Approximating KL divergence"): its value estimates KL(pi || ref), but as a loss term its
        # gradient on fresh samples is that of KL(ref || pi). Both pull towards the reference, which is what it is for.
        log_ref = counted(ref_logprobs - new_logprobs)  # log(ref / pi)
        k3 = log_ref.exp() - log_ref - 1
        kl = average(k3)
        loss = policy_loss + kl_coef * (k3 * weight).sum()
    gap = log_ratio.abs()
    metrics = {"loss": loss, "policy_loss": policy_loss, "kl": kl}
    metrics |= {"clip_fraction": average((clipped < unclipped).float()), "ratio_mean": average(ratio)}
    metrics |= {"mean_logprob_gap": average(gap), "max_logprob_gap": gap.max()}
    return loss, {name: value.item() for name, value in metrics.items()}


# ---- 6. the trainer -------------------------------------------------------------------------------------------------


@dataclass
class GRPOSettings:
    """Settings of the algorithm."""

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
    nucleus: torch.Tensor | None = None  # (G, T, V) bool
    mask: torch.Tensor | None = None  # (G, T), 1 for tokens that count; None: all. Text: up to the first end token
    advantages: torch.Tensor | None = None  # (G,) or (G, T)
    ref_logprobs: torch.Tensor | None = None  # (G, T), None when kl_coef is 0


def set_advantages(groups, rewards):
    """3: the advantages of all groups from the rewards (N*G,) of their samples, group after group."""
    _check_groups(groups, scored=False)
    size = len(groups[0].old_logprobs)
    for group, advantages in zip(groups, compute_advantages(rewards, size).split(size), strict=True):
        group.advantages = advantages


class GRPO:
    """Samples groups from a policy, and updates its adapter by their advantages.

    Args:
        model: a PeftModel: a frozen base with a trainable adapter, LoRA or its like. optimizer: over the adapter.
        allowed_ids, forward: as for generate_with_logprobs.
        reference: a context manager within which the model is the reference; None: with its adapter disabled.

    A group needs old_logprobs, mask, advantages and ref_logprobs; all else is left to logprobs(), which a subclass may
    replace (see DecoderGRPO). With torch.distributed, W ranks with P prompts each make the step of one process with
    W*P; the caller gives each rank prompts and seeds of its own.
    """

    def __init__(self, model, optimizer, settings, allowed_ids=slice(0, None), forward=None, reference=None):
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.forward = forward
        self.reference = reference or self.without_adapter
        self.sampling_args = {"allowed_ids": allowed_ids, "temperature": settings.temperature}  # scoring needs them too
        self.steps = 0  # optimiser steps so far
        self.watch = Watch(model)

    def sample(self, prompts, group_size, seed):
        """1: a group of `group_size` (G) samples for each of N prompts: (prompt_ids (L,), position_ids (3, L+T), T).

        position_ids: None for a text model. T must be the same for all, else ValueError. Group i draws from `seed + i`
        alone: the same prompts and seed give the same samples until the policy moves.
        """
        self.model.eval()
        prompt_ids, position_ids, lengths = zip(*prompts, strict=True)
        self.watch.sample(self, lengths)
        generators = [torch.Generator(self.model.device).manual_seed(seed + i) for i in range(len(prompts))]
        tokens, logprobs, nucleus = generate_with_logprobs(
            self.model, prompt_ids, lengths[0], num_samples=group_size, top_p=self.settings.top_p,
            position_ids=None if position_ids[0] is None else position_ids, generators=generators, forward=self.forward,
            **self.sampling_args,
        )  # fmt: skip
        nucleus = [None] * len(prompts) if nucleus is None else nucleus.split(group_size)
        groups = zip(prompt_ids, position_ids, tokens.split(group_size), logprobs.split(group_size), nucleus)
        return [Group(*group) for group in groups]

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

        A group of equal rewards teaches nothing and is skipped: it counts in the step's mean loss, but not in the
        metrics, which are means over the others (NaN if there are none). skipped: the share of iterations without a
        step because the gradient was not finite; grad_norm: the mean norm of the others; grad_rms: the same per
        parameter, to be compared with the optimiser's eps.
        """
        learning = self.with_spread(groups)
        micro_batches = [(group, rows) for group in learning for rows in self.micro_batches(group)]
        total = self.total_weight(groups)  # samples in the step
        self.watch.begin(self)
        self.model.train()  # enables gradient checkpointing, which is off in eval mode; there is no dropout
        self.optimizer.zero_grad()  # an update that ended in an exception has left half a gradient
        reports = []  # (weight, metrics) of each micro-batch
        norms = []  # the gradient's, per iteration
        for _ in range(self.settings.iterations):
            for group, rows in micro_batches:
                loss, metrics = self.loss(group, rows)
                weight = self.weight(group, rows)  # however groups are cut, the gradients add up to the same
                (loss * weight / total).backward()
                reports.append((weight, metrics))
            norms.append(self.optimizer_step())

        first = _average(reports[: len(micro_batches)])  # the first iteration alone: later the policy has moved
        self.watch.end(self, first, norms)
        metrics = _average(reports) | {name: first[name] for name in ("mean_logprob_gap", "max_logprob_gap")}
        metrics |= _gradient_metrics(norms, sum(p.numel() for p in self.parameters()))
        return metrics | {"groups_without_spread": 1 - len(learning) / len(groups)}

    def with_spread(self, groups):
        """The groups that teach something: their rewards differ."""
        _check_groups(groups, scored=True)
        return [group for group in groups if group.advantages.any()]

    def loss(self, group, rows):
        """5: the mean loss of some samples of a group, and its metrics."""
        known = (group.old_logprobs, group.advantages, group.ref_logprobs, group.mask)
        known = [None if tensor is None else tensor[rows] for tensor in known]
        return compute_grpo_loss(self.logprobs(group, rows), *known, self.settings.clip_range, self.settings.kl_coef)

    def weight(self, group, rows):
        """5: how much some samples of a group count in the step's loss, which is a weighted mean: their number."""
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
        parameters = self.parameters()
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

    def parameters(self):
        """The parameters that are trained."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def micro_batches(self, group):
        """Indices of a group's samples, `micro_batch_size` at a time."""
        return torch.arange(len(group.old_logprobs)).split(self.settings.micro_batch_size)

    @contextmanager
    def without_adapter(self):
        """Within it the model is the reference, if nothing but an adapter learns: PEFT freezes what it disables."""
        with getattr(self.model, "disable_adapter", nullcontext)():
            if any(p.requires_grad for p in self.model.parameters()):
                raise ValueError("not only an adapter learns: the reference must be a frozen copy, see COPYING below")
            yield

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
        names = ("loss", "policy_loss", "kl", "clip_fraction", "ratio_mean", "mean_logprob_gap", "max_logprob_gap")
        return dict.fromkeys(names, float("nan"))
    total = sum(weight for weight, _ in reports)
    means = {name: sum(weight * metrics[name] for weight, metrics in reports) / total for name in reports[0][1]}
    return means | {"max_logprob_gap": max(metrics["max_logprob_gap"] for _, metrics in reports)}


def _gradient_metrics(norms, size):
    """What update says of its gradients; size: how many numbers each has."""
    stepped = [norm for norm in norms if 0 < norm < float("inf")]
    norm = sum(stepped) / max(len(stepped), 1)
    skipped = sum(not norm < float("inf") for norm in norms) / len(norms)
    return {"grad_norm": norm, "grad_rms": norm / math.sqrt(max(size, 1)), "skipped": skipped}


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


# ---- if you copy this file: what works, other losses, and the checks ------------------------------------------------

COPYING = """What works (tests/test_zoo.py); what does not is refused, or warned of, with what to do instead:

    models      of transformers: dense, experts, windows, linear attention, learned positions, image codes anywhere in
                the vocabulary; or your own, see below. None without past_key_values: Mamba, RWKV, RecurrentGemma
    adapters    LoRA and its like, or all weights. One that is trained further is first merged into its base
    prompts     of several lengths where all layers have full attention, by sdpa, and positions are an input
    ranks       of torch.distributed, without DistributedDataParallel, seeded alike until their adapters are made

If you train all weights, make a frozen copy before training and call its add_reference(groups) at every step:

    reference = GRPO(copy.deepcopy(model).requires_grad_(False), optimizer, settings, allowed_ids)

Watch mean_logprob_gap, how far sampling and scoring disagree on fresh samples: 1e-6 in float32, 0.05 in bfloat16. With
a rope that depends on the length (longrope, dynamic) it is whole nats beyond the original window. On a CPU, call
torch.set_num_threads(1) for small models. For another loss, edit (in brackets: arXiv):

    Dr. GRPO                 no `/ (std + eps)` in compute_advantages; weight = mask / mask.shape[1] / len(mask)
    DAPO's token mean        weight = mask / mask.sum().clamp(min=1); in GRPO.weight:
                             return len(rows) if group.mask is None else group.mask[rows].sum().item()
    DAPO's two clip ranges   ratio.clamp(1 - clip_range, 1 + 1.4 * clip_range): of 0.2 and 0.28
    DAPO's dynamic sampling  loop over 1 to 3 with new seeds, up to a limit; the same number of groups on every rank
    Mask-GRPO's filter       the same where groups have little spread: GenEval .60 -> .73 (2510.13418)
    GSPO                     ratio = (log_ratio * share * len(mask)).sum(1, keepdim=True).exp()
                             with clip_range: float = 3e-4 in GRPOSettings, and train.py --clip-range 3e-4
    old = new.detach()       ratio = (log_ratio - log_ratio.detach()).exp(), where gap is large and iterations is 1
    STAGE                    advantages (G, T), smaller where a group's codes are alike: GenEval .78 -> .89 (2509.25027)
    GCPO                     a mask for 30% of the tokens, early, at edges or diverse: better than all (2509.22485)

A model of your own has to take and return this (rest: attention_mask, position_ids, use_cache, logits_to_keep):

    class MyModel(torch.nn.Module):
        device = torch.device("cpu")  # where its weights are

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 32)
            self.memory = torch.nn.GRU(32, 50, batch_first=True)

        def forward(self, input_ids, past_key_values=None, **rest):  # (B, length): the prompt, then one token per call
            logits, cache = self.memory(self.embedding(input_ids), past_key_values)
            return SimpleNamespace(logits=logits, past_key_values=cache)  # (B, length, vocabulary); anything but None
"""

WARNINGS = {
    "gap": "sampling and scoring disagree by more than 0.1 nats per token (mean_logprob_gap): the loss is wrong. Look "
    "at positions, at noise in train mode, at a rope that depends on the length, at a cache that is not used",
    "kl": "kl is above 0 although nothing has moved: the reference is not the model before training. An adapter must "
    "change nothing at first: merge one that is trained further into its base; PiSSA and OLoRA have no reference here",
    "gradient": "rewards differ, but the gradient is exactly 0: does the optimizer hold the weights of the active "
    "adapter? Or are the samples of a group alike, all tokens masked or clipped, top_p too low to leave a choice?",
    "skipped": "the gradient is NaN or infinite: no step was taken. Look at old_logprobs, advantages and rewards for "
    "the same, and at the learning rate of the steps before",
}


class NotFinite(ValueError):
    """Sampled log-probs are NaN or infinite; args[0]: the indices of the prompts concerned."""


def _check_sampling(prompts, allowed_ids, temperature, top_p, generators):
    for ids in prompts:
        if not torch.is_tensor(ids) or ids.ndim != 1 or len(ids) == 0:
            given = f"a tensor {tuple(ids.shape)}" if torch.is_tensor(ids) else f"a {type(ids).__name__}"
            raise ValueError(f"a prompt is {given}: give a tensor (L,) of ids, with L 1 or more")
    first = allowed_ids.start if isinstance(allowed_ids, slice) else None
    if not isinstance(first, int) or first < 0 or allowed_ids.step not in (None, 1):
        raise ValueError(f"allowed_ids is {allowed_ids}: give slice(first, end), with first 0 or more")
    if temperature <= 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}")
    if generators is not None and len(generators) != len(prompts):
        raise ValueError(f"{len(generators)} generators for {len(prompts)} prompts: give one each")


def _refuse_padding(model):
    """ValueError for a model that would not take positions and a mask of four dimensions as they are."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(getattr(base, "config", None), "get_text_config", lambda: None)()
    attention = getattr(config, "_attn_implementation", None) or "eager"
    masked = attention not in ("eager", "flex_attention") and "flash" not in attention
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    placed = "position_ids" in inspect.signature(base.forward).parameters
    offsets = [getattr(module, "padding_idx", None) for name, module in base.named_modules() if "position" in name]
    offset = any(padding is not None for padding in offsets)  # Roberta adds padding_idx + 1
    if offset or not (masked and full and placed) or getattr(config, "sliding_window", None):
        raise ValueError(
            "prompts of several lengths need position_ids, full attention in all layers, and "
            "attn_implementation='sdpa': for this model, sample prompts of one length together"
        )


def _check_rewards(rewards, group_size):
    if group_size < 2 or rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} are no groups of {group_size}: give (N*G,), with G 2 or more")
    if rewards.requires_grad:
        raise ValueError("rewards carry a gradient: give rewards.detach()")
    for i in rewards.isinf().nonzero().flatten().tolist():
        raise ValueError(f"the reward of image {i} (prompt {i // group_size}, sample {i % group_size}) is {rewards[i]}")


def _check_loss(shape, advantages, kl_coef, ref_logprobs, **others):
    """shape: (B, T). others: more tensors of this shape, or None."""
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError("kl_coef above 0 needs ref_logprobs")
    for name, tensor in {"ref_logprobs": ref_logprobs, **others}.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} for log-probs {tuple(shape)}")
    if advantages.shape not in (shape, shape[:1]):  # (B, 1) would meet (B, T) as (B, B, T)
        raise ValueError(f"advantages {tuple(advantages.shape)} for log-probs {tuple(shape)}: give (B,) or (B, T)")


def _check_groups(groups, scored):
    sizes = [len(group.old_logprobs) for group in groups]
    if not groups or (len(set(sizes)) > 1 and not scored):
        raise ValueError(f"groups of {sizes} samples: give one group or more, all of one size")
    if scored and any(group.advantages is None for group in groups):
        raise ValueError("groups have no advantages yet: set_advantages comes before add_reference and update")


class Watch:
    """Refuses models whose sampling and scoring, or whose ranks, would differ; gives each of WARNINGS once."""

    def __init__(self, model):
        self.sampled_at = 0  # trainer.steps at the last sampling
        self.hooks = []
        self.left = WARNINGS.copy()
        if isinstance(getattr(model, "module", None), torch.nn.Module) and "Parallel" in type(model).__name__:
            raise ValueError("the model is wrapped: give model.module, for the trainer averages gradients itself")
        if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
            raise ValueError("prompt and prefix tuning put virtual tokens before each sampled one: take LoRA instead")

    def sample(self, trainer, lengths):
        self.sampled_at = trainer.steps
        if len(set(lengths)) > 1:
            raise ValueError(f"sequences sampled together need one length, not {sorted(set(lengths))}")

    def begin(self, trainer):
        """Before an update."""
        self.fresh = trainer.steps == self.sampled_at
        self.unmoved = trainer.steps == 0 and not trainer.optimizer.state  # a resumed run has a state
        if trainer.steps == 0:
            self.hooks += _refuse_noise(trainer.model)
            _refuse_unequal_ranks(trainer.parameters(), trainer.model)

    def end(self, trainer, first, norms):
        """After it. first: the metrics of its first iteration. norms: of its gradients."""
        while self.hooks:
            self.hooks.pop().remove()
        signs = {
            "gap": self.fresh and first["mean_logprob_gap"] > 0.1,
            # An optimiser that keeps no state, such as plain SGD, does not tell whether the run was resumed.
            "kl": self.unmoved and trainer.optimizer.state and first["kl"] > 0.01,
            "gradient": norms[0] == 0 and not math.isnan(first["loss"]),  # NaN: no rewards differ
            "skipped": not all(norm < float("inf") for norm in norms),
        }
        for name in [name for name, seen in signs.items() if seen and name in self.left]:
            warnings.warn(self.left.pop(name), stacklevel=4)  # where update is called


def _refuse_noise(model):
    """Hooks that raise ValueError where a module is called that adds noise in train mode; what is not called may."""
    names = {module: name for name, module in model.named_modules()}

    def refuse(module, _):
        for rate, value in vars(module).items():  # the rate sits on a Dropout, or on the caller of F.dropout
            noisy = "drop" in rate or "jitter" in rate or (rate == "p" and "Dropout" in type(module).__name__)
            if noisy and isinstance(value, float) and value > 0:
                raise ValueError(f"{names[module]}.{rate} is {value}, which is noise: set it to 0 in the config")

    return [module.register_forward_pre_hook(refuse) for module in names]


def _refuse_unequal_ranks(parameters, model):
    """ValueError on all ranks, if what they train is not the same. The sums of its bytes are exact in any order."""
    if not dist.is_initialized():
        return
    sums = [p.detach().flatten().view(torch.uint8).sum().item() for p in parameters]
    extremes = torch.tensor([sums, [-number for number in sums]], device=model.device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes.sum(0).any():  # the largest and the smallest differ
        raise ValueError("the ranks begin with different adapters: seed them alike until the adapter is made")
