"""GRPO in one file: group relative policy optimisation of a model that writes tokens.

GRPO is reinforcement learning: it raises the mean reward of what a model samples. For a prompt the
policy, a language model, writes a group of G sequences of T tokens. They may be texts; here they
are the codes of G pictures, which a decoder paints. Each picture gets a reward R. The loss pushes
up the probability of the tokens of the pictures that beat their group, and pushes down those of the
pictures below its mean:

    A          = (R - mean(R)) / std(R)  the advantage of a picture: a z-score within its group
    plain loss = -mean(A log pi(token))  over tokens, samples and prompts

pi(token) is the probability that the policy gives a token, after the prompt and the tokens before
it. So the plain loss is cross-entropy on the policy's own samples, weighted by A: what beats its
group is imitated, the rest is avoided. Every token gets the A of its whole picture, since only a
finished picture has a reward. A token that makes no difference stands in good and bad pictures
alike, so over many groups its pushes cancel; what is left moves the tokens that matter.

mean(R) is the baseline, the reward to expect for this prompt. Without it, rewards of 9 and 10 would
push both samples up, and which pictures happened to be sampled would matter more than which are
better: the gradient, an estimate from a few samples, would have a high variance. The baseline does
not change the goal. Over the policy's own samples the mean of grad log pi is
    sum(pi * grad log pi) = grad sum(pi) = grad 1 = 0,
so a constant times grad log pi adds nothing to the mean gradient. It changes only the gradient's
variance. (mean(R) includes the R of the sample itself, which scales the gradient by (G - 1) / G.)

Dividing by std(R) gives every prompt advantages of the same scale, even if its rewards barely
differ. Unlike the baseline it changes the goal: a prompt's mean reward now weighs 1 / std(R). And
where the pictures are equally good and the reward is noisy, the noise gets as large a push as a
real difference elsewhere. A group of equal rewards has A = 0, and is left out. The mean of A is 0,
so at ratio 1 the loss below is 0. Its gradient is not: watch the reward, not the loss.

The oldest such method, REINFORCE, is the plain loss with A = R. PPO adds three things: a second
network, which learns to predict the baseline; the ratio; and the clip. GRPO takes the group's mean
in place of that network, keeps the ratio and the clip, and adds a KL term to the loss:

    ratio = pi(token) / pi_old(token)   pi_old: the policy when it sampled
    loss  = -mean(min(ratio A, clip(ratio, 1 - c, 1 + c) A) - kl_coef k3)
    k3    = ref/pi - log(ref/pi) - 1    an estimate of KL(pi || ref), never negative

(Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1).

The ratio is an importance weight, by which the same samples serve several optimiser steps. pi_old
drew them. After one step the policy is pi: a token that is now twice as likely would be drawn twice
as often, so it counts twice. The mean over draws of pi_old, sum(pi_old * pi/pi_old * A), is then
sum(pi * A), the mean over draws of pi. (The ratio corrects for its own token, not for the tokens
before it, so pi must stay near pi_old.) The gradient is ratio * A * grad log pi: at ratio 1 the
gradient of A * log pi, as in the plain loss.

The clip limits how far one batch of samples may push a token, because samples of pi_old say little
about a policy far from it. It acts only where the ratio has left 1 by more than c, clip_range, in
the direction in which A pushes:

                     A > 0, pushes up              A < 0, pushes down
    ratio > 1 + c    no gradient: far enough       gradient: it brings the ratio back
    ratio < 1 - c    gradient: it brings it back   no gradient: far enough

"No gradient" is of ratio * A; the KL term of that token keeps a gradient. A clamp without the min
would be flat in all four cells: a token that has moved the wrong way would get no gradient either.
The clip does not hold the ratio: shared weights and momentum may move the token on.

The KL term holds the policy near ref, the reference: the model before training. Without it, the
policy may drift to pictures that score high and look wrong. The reference costs a pass over the
samples, but no memory: the policy is a frozen base plus a LoRA adapter, which changes nothing at
first, so the base with its adapter off is the reference. (train.py --adapter begins with a trained
adapter; there the reference is a frozen copy of it.) Why k3: see compute_grpo_loss.

By default there is one optimiser step per batch. The ratio then is 1 up to rounding, and the clip
has nothing to do. With several steps both act. Use mini_batches if a batch has many groups: its
steps cost no further pass. Use iterations if sampling and painting take most of the time: each
repeats the passes on the same samples. On two small tasks, pictures and texts, four mini-batches
gained 7 +- 4 and 0 +- 7 points of correct samples, four passes 4 +- 6 and -1 +- 8 (docs/worth.md).

Sampling may be cut to the likeliest tokens of pi_old, the nucleus (top_p). Then pi and ref are cut
to the same tokens, and all three are renormalised. Tokens outside of the nucleus get no gradient,
and the KL term compares the cut distributions.

A training step has six parts, in this order; examples/pictures.py has them in a whole trainer:

    groups = trainer.sample(prompts, G, seed)  # 1. G sequences per prompt, with log pi_old
    rewards = ...                              # 2. paint and score: in train.py, or your own
    set_advantages(groups, rewards)            # 3. z-scores within each group
    trainer.add_reference(groups)              # 4. log ref of the same tokens
    metrics = trainer.update(groups)           # 4. log pi, with a gradient; 5. loss; 6. optimiser

Part 4 computes log pi again: sampling keeps no graph through which a gradient could flow, and each
optimiser step changes log pi.

Advantages, loss and class GRPO are the algorithm: the sections are in the order of reading, not of
a step. After them comes how a language model recomputes log-probs and samples, then class Offload,
by which models take turns on a GPU, and the rest: padding, texts that end, guards against silent
mistakes. Nothing here depends on GLM-Image: docs/copying.md trains a text model with this file
alone, and has the lines to change for another loss (Dr. GRPO, DAPO, GSPO).
"""

import itertools
import math
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers.generation.logits_process import TopPLogitsWarper


@dataclass
class GRPOSettings:
    """Settings of the algorithm."""

    # sequences per forward pass in parts 4 and 5, at most a group; fewer take less memory
    micro_batch_size: int = 4
    # number of parts into which a batch's groups are split, with an optimiser step for each
    mini_batches: int = 1
    # passes over a batch, each with all its optimiser steps
    iterations: int = 1
    # how far a ratio may be pushed from 1 before its gradient is cut
    clip_range: float = 0.2
    # weight of the KL from the reference, the model before training; 0: no reference
    kl_coef: float = 0.0
    # divides the logits, in sampling and in recomputing log-probs
    temperature: float = 1.0
    # sample from the smallest set of likeliest tokens whose total probability reaches this; 1: from
    # all. Deployed models do so: the other tokens are each unlikely, but together drawn often
    top_p: float = 1.0
    # the id that ends a text, or several, as generation_config.eos_token_id has; None: pictures
    end_ids: int | list | tuple | None = None
    # larger gradients are scaled down to this norm: one outlier must not wreck training
    max_grad_norm: float = 1.0


@dataclass
class Group:
    """G samples of one prompt. Its tensors wait on the CPU between the parts of a step."""

    # L: the length of the prompt, without padding. T: the number of tokens of a sample.
    prompt_ids: torch.Tensor  # (L,)
    # Time, row and column of each token: a picture's codes form a grid. None: as in a text.
    position_ids: torch.Tensor | None  # (3, L+T)
    tokens: torch.Tensor  # (G, T)
    old_logprobs: torch.Tensor  # (G, T)
    # At each place, True for the ids that top-p kept, of the V ids that may be sampled.
    nucleus: torch.Tensor | None = None  # (G, T, V) bool
    # 1 for tokens that count: of a text, those through its end. None: all count.
    mask: torch.Tensor | None = None  # (G, T)
    # One number per sample, from set_advantages. Or one per token.
    advantages: torch.Tensor | None = None  # (G,) or (G, T)
    # None when kl_coef is 0.
    ref_logprobs: torch.Tensor | None = None  # (G, T)


# ---- 3. advantages -------------------------------------------------------------------------------


def compute_advantages(rewards, group_size, eps=1e-6):
    """The z-score of each reward within its group; a group of equal rewards gets exactly 0.

    Args:
        rewards: (N*G,) numbers, prompt after prompt: the first G are the group of the first prompt.
            NaN is a sample without a reward: it takes no part in mean and std, and gets 0.
        eps: keeps the division finite, in units of the reward.

    Returns: (N*G,) float32. ValueError for infinity, and for G = 1, which has no baseline.
    """
    centred, std = centre_groups(rewards, group_size)
    return (centred / (std + eps)).nan_to_num(0).flatten().float()


def centre_groups(rewards, group_size):
    """The rewards less the mean of their group, (N, G) float64, and each group's std, (N, 1).

    The mean is the baseline. The variance divides by G - 1. NaN stays NaN, and is not counted.
    """
    rewards = torch.as_tensor(rewards, device="cpu")
    if rewards.ndim != 1 or group_size < 2 or rewards.isinf().any():
        raise ValueError(f"rewards {tuple(rewards.shape)}: give (N*G,), G > 1, none infinite")
    # float32 first: what differs beyond its digits is rounding, as of sums in another order, and
    # must not become a z-score. Then float64, in which the mean of equal float32 numbers is exact:
    # in float32 eight rewards of 9.9 would get advantages of 0.47.
    groups = rewards.float().double().view(-1, group_size)  # (N, G)
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    count = (~groups.isnan()).sum(dim=1, keepdim=True)
    variance = centred.square().nansum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    return centred, variance.sqrt()


def set_advantages(groups, rewards):
    """The advantages of N Groups of one size, from their rewards (N*G,), group after group."""
    group_size = len(groups[0].old_logprobs)
    advantages = compute_advantages(rewards, group_size).split(group_size)
    for group, of_group in zip(groups, advantages, strict=True):
        group.advantages = of_group


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
    """The clipped loss with a KL term (DeepSeekMath, eq. 3-4); the header says why it is so.

    Both terms are means over the tokens of a sample, then over samples.

    Args:
        new_logprobs, old_logprobs, ref_logprobs: (B, T) float32, of B samples: log pi, log pi_old
            and log ref. Only the first gets a gradient.
        advantages: (B,) float32: the same for every token of a sample. Or (B, T), one per token.
        mask: (B, T), 1 for tokens that count, 0 for those that do not, whatever their numbers are;
            None: all count. A sample of which no token counts adds 0 to the mean.
        clip_range: a ratio beyond 1 +- this, in the direction the advantage pushes, gets no further
            gradient.
        kl_coef: weight of the KL term; above 0 it needs `ref_logprobs`.

    Returns: the loss, a scalar, and metrics as floats: loss, policy_loss, kl (nats per token; NaN
    without a reference), clip_fraction (share of tokens that were clipped), ratio_mean, and
    mean_logprob_gap ("gap" on the screen) and max_logprob_gap, of |new - old|: at the first step of
    the optimiser it is rounding, of sampling token by token against recomputing all at once.
    ValueError for other shapes.
    """
    _check_loss(new_logprobs, old_logprobs, advantages, ref_logprobs, mask, kl_coef)
    mask = torch.ones_like(new_logprobs) if mask is None else mask.to(new_logprobs.dtype)
    masked = lambda x: torch.where(mask > 0, x, 0)  # before any product: 0 x NaN is NaN

    log_ratio = masked(new_logprobs - old_logprobs.detach())  # (B, T)
    ratio = log_ratio.exp()
    advantages = masked(advantages.detach().view(len(advantages), -1))  # (B, T)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages  # flat beyond the range
    # The clipped term is the smaller where A has pushed the ratio beyond the range: above it with
    # A > 0, below it with A < 0. Elsewhere the gradient is that of ratio A.
    policy_terms = -torch.min(unclipped, clipped)

    k3 = torch.full_like(ratio, math.nan)  # not measured
    if ref_logprobs is not None:
        # Schulman 2020, "Approximating KL divergence", has three estimates from draws of pi.
        # k1 = log(pi/ref): its mean is KL(pi || ref). As a loss it would not hold the policy: a
        # step changes the KL by changing which tokens are drawn, but autograd takes these as given.
        # What is left is grad log pi, whose mean is 0, as the header says of the baseline.
        # k2 = k1 * k1 / 2: its mean gradient is that of KL(pi || ref), but its mean is not that KL.
        # k3 = k1 + ref/pi - 1: the mean of ref/pi - 1 is sum(ref - pi) = 0, so the mean of k3 is
        # KL(pi || ref). And it pulls: a step against its gradient, (1 - ref/pi) grad log pi, lowers
        # a token that pi makes likelier than ref, and raises a token that pi makes less likely. The
        # mean of this gradient is that of KL(ref || pi), which also is least where pi is ref.
        # So k3 has the value of KL(pi || ref), and the gradient of the other KL, with the same
        # minimum. It is the published term.
        # (These means are over pi. The samples are of pi_old, so after a step they hold only
        # approximately.)
        log_ref_ratio = masked(ref_logprobs.detach() - new_logprobs)  # log(ref / pi)
        # Near 0, exp(x) - 1 - x is mostly rounding, and may be negative. expm1 avoids that.
        k3 = torch.expm1(log_ref_ratio) - log_ref_ratio

    # A mean over the tokens of a sample, then over samples: a long text counts like a short one.
    share = mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)  # (B, T)
    # Hook: other losses weigh the tokens otherwise (docs/copying.md); metrics stay means.
    loss_share = share
    loss = policy_loss = (policy_terms * loss_share).sum()
    if kl_coef > 0:
        loss = policy_loss + kl_coef * (k3 * loss_share).sum()

    mean = lambda x: (x * share).sum()
    gap = log_ratio.abs()
    metrics = {
        "loss": loss,
        "policy_loss": policy_loss,
        "kl": mean(k3),
        "clip_fraction": mean((clipped < unclipped).float()),
        "ratio_mean": mean(ratio),
        "mean_logprob_gap": mean(gap),
        "max_logprob_gap": gap.max(),
    }
    return loss, {name: value.item() for name, value in metrics.items()}


# ---- the trainer of a policy: it samples groups, and learns from them ----------------------------


class GRPO:
    """The trainer of a policy: it samples groups, and learns from their advantages.

    Args:
        model: the policy, a PeftModel: a frozen base with a trainable adapter, LoRA or its like.
            The base is a transformers model, or one that takes and returns the same
            (docs/copying.md, "A model of your own").
        optimizer: over the adapter.
        settings: GRPOSettings, read when they are used: you may change them between steps.
        allowed_ids, token_forward: as for generate_with_logprobs.
        reference: a function returning a context manager within which the model is the reference;
            None: the model with its adapter disabled.
        average: takes tensors, and averages each over all processes in place; None: there is one
            process. W processes, each with its own N prompts and seeds, do what one with W*N does.
        begin: called as sample, add_reference and update begin, with "sample", "reference" or
            "update", and the model. An Offload can bring it to the GPU then.

    add_reference and update use a group's old_logprobs, mask, advantages and ref_logprobs. Only
    logprobs() reads the rest: override it for another type of policy, as glm_image/decoder.py does.
    """

    def __init__(
        self,
        model,
        optimizer,
        settings,
        allowed_ids=slice(0, None),
        token_forward=None,
        reference=None,
        average=None,
        begin=lambda part, *models: None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.settings = settings
        self.allowed_ids = allowed_ids
        self.token_forward = token_forward
        self.reference = reference or self.without_adapter
        self.average = average or (lambda tensors: None)
        self.begin = begin
        self.steps = 0  # optimiser steps so far
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        self.parameters = [p for p in parameters if p.requires_grad]
        _check_process(self.parameters, average)
        self.rank = torch.distributed.get_rank() if _is_joined() else 0
        # For sample() without a seed. Each process has 2**24 seeds of its own.
        self.seeds = itertools.count(2**24 * self.rank)
        # In the whole process: cuDNN's attention may give wrong tokens (pytorch 193893, trl 7181).
        torch.backends.cuda.enable_cudnn_sdp(False)

    def sample(self, prompts, group_size, seed=None, *, max_new_tokens=None):
        """1: N Groups of `group_size` (G) samples.

        prompts: N lists or tensors (L,) of ids without padding, for texts of at most
        `max_new_tokens` (T). Or N tuples (prompt_ids, position_ids (3, L+T), T), with one T for
        all, where the model does not count its positions itself.

        Group i draws from `seed + i` alone: the same prompts and seed give the same samples until
        the policy moves. So the seeds of two steps must differ by N or more. Without a seed each
        call takes the next N, from 0 on.
        """
        prompt_ids, position_ids, length = _checked_prompts(prompts, max_new_tokens)
        self.begin("sample", self.model)
        self.model.eval()
        seeds = self.seeds if seed is None else itertools.count(seed)
        generators = [torch.Generator(self.model.device).manual_seed(next(seeds)) for _ in prompts]
        tokens, logprobs, nucleus = generate_with_logprobs(
            self.model,
            prompt_ids,
            length,
            num_samples=group_size,
            position_ids=None if position_ids[0] is None else position_ids,
            allowed_ids=self.allowed_ids,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            end_ids=self.settings.end_ids,
            generators=generators,
            token_forward=self.token_forward,
        )
        mask = None
        if self.settings.end_ids is not None:
            mask = mask_through_end(tokens, self.settings.end_ids)  # (N*G, T)
            # Ended texts are sampled on until the longest ends. No reward may see those tokens.
            if not mask.all():
                tokens = tokens.where(mask > 0, torch.tensor(self.settings.end_ids).flatten()[0])
        sampled = tokens, logprobs, nucleus, mask
        return [
            Group(prompt_ids[i].cpu(), position_ids[i], *(_rows(each, rows) for each in sampled))
            for i, rows in enumerate(torch.arange(len(tokens)).split(group_size))
        ]

    @torch.no_grad()
    def add_reference(self, groups):
        """4: log-probs under the reference, for groups whose rewards differ."""
        self.begin("reference", self.model)
        if self.settings.kl_coef == 0:
            return
        self.model.eval()
        with self.reference():
            for group in groups:
                if self.teaches(group):
                    group.ref_logprobs = self.all_logprobs(group)

    @torch.enable_grad()
    def update(self, groups):
        """4 to 6: move the policy, by `mini_batches * iterations` optimiser steps.

        Groups of equal rewards are left out. The loss still divides by all groups of its
        mini-batch. The metrics, kl too, are means over those that stay, in all processes: NaN if
        none does.

        Returns the metrics of compute_grpo_loss, and
            mean_logprob_gap, max_logprob_gap: from the first optimiser step with a group that
                teaches; the latter of this process.
            skipped: the share of optimiser steps that were not made, their gradient not being
                finite.
            grad_norm: the mean over the other optimiser steps, before clipping.
            groups_without_spread: the share of groups that were left out, of this process.
        """
        self.begin("update", self.model)
        with_spread = [group for group in groups if self.teaches(group)]
        # Dealt one by one, on through all processes: as one process would deal all groups.
        number, dealt = self.settings.mini_batches, self.rank * len(groups)
        mini_batches = [groups[(i - dealt) % number :: number] for i in range(number)]
        # Whether the policy still is the reference. An optimizer that was resumed has a state.
        at_start = self.steps == 0 and not self.optimizer.state
        # Eval mode switches dropout off. Gradient checkpointing works in train mode only: a model
        # that uses it must have no dropout, or the ratios of fresh samples would not be 1.
        modules = self.model.modules()
        self.model.train(any(getattr(each, "gradient_checkpointing", False) for each in modules))
        reports = []  # of each optimiser step: (size, metrics) of each micro-batch
        norms = []  # of the gradient before clipping, of each optimiser step
        for mini_batch in mini_batches * self.settings.iterations:
            pairs = [(group, rows) for group in mini_batch for rows in self.micro_batches(group)]
            # Of the mini-batch, groups of equal rewards included.
            sizes = sum(self.size_in_loss(*pair) for pair in pairs)
            total = torch.tensor(sizes, dtype=torch.float32, device=self.model.device)
            self.average([total])  # the mean over processes, as step() takes that of the gradients
            for each in self.parameters:
                # Zeros, not None: a process whose groups have no spread still joins the average.
                each.grad = torch.zeros_like(each)
            reports.append([])
            for group, rows in pairs:
                if not self.teaches(group):
                    continue
                loss, metrics = compute_grpo_loss(  # 5
                    self.logprobs(group, rows),  # 4
                    group.old_logprobs[rows],
                    group.advantages[rows],
                    _rows(group.ref_logprobs, rows),
                    _rows(group.mask, rows),
                    self.settings.clip_range,
                    self.settings.kl_coef,
                )
                size = self.size_in_loss(group, rows)
                # The gradients of micro-batches add up to the gradient of the step.
                (loss * size / total.item()).backward()
                reports[-1].append((size, metrics))
            norms.append(self.step())  # 6

        # Of the first step that had a group to learn from: then the policy has moved already.
        means = [self.mean_metrics(each) for each in reports]
        first = next((each for each in means if not math.isnan(each["loss"])), means[0])
        _warn_of(first, norms, at_start, with_spread, self.model)
        finite = [norm for norm in norms if norm < math.inf]
        return self.mean_metrics([*itertools.chain(*reports)]) | {
            "mean_logprob_gap": first["mean_logprob_gap"],
            "max_logprob_gap": first["max_logprob_gap"],
            "grad_norm": sum(finite) / max(len(finite), 1),
            "skipped": 1 - len(finite) / len(norms),
            "groups_without_spread": 1 - len(with_spread) / len(groups),
        }

    def logprobs(self, group, rows):
        """4: log-probs (B, T) of some samples of a group under the model as it is.

        They are 0 after the last token that counts in any of these samples. They are on the CPU,
        where the group's other tensors wait. Autograd passes through .cpu().
        """
        end = int(_ends(group)[rows].max())
        ids = torch.cat([group.prompt_ids.expand(len(rows), -1), group.tokens[rows, :end]], dim=1)
        logprobs = get_per_token_logprobs(
            self.model,
            ids,  # (B, L+end)
            end,
            position_ids=group.position_ids,
            allowed_ids=self.allowed_ids,
            temperature=self.settings.temperature,
            nucleus=None if group.nucleus is None else group.nucleus[rows, :end],
        )
        return pad(logprobs.cpu(), (0, group.tokens.shape[1] - end))

    def all_logprobs(self, group):
        """4: log-probs (G, T) of all samples of a group, in the samples' order."""
        rows = self.micro_batches(group)
        parts = torch.cat([self.logprobs(group, each) for each in rows])
        return parts[torch.cat(rows).argsort()]

    def step(self):
        """6: an optimiser step by the gradients as they are. Returns their norm before clipping."""
        self.average([each.grad for each in self.parameters])
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm).item()
        # NaN would ruin every weight; with a gradient of 0 Adam would move by its momentum.
        if 0 < norm < math.inf:
            # Counted first: a step that fails midway has moved some of the weights.
            self.steps += 1
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @contextmanager
    def without_adapter(self):
        """Within it the model is the reference: PEFT disables the adapter, and freezes it."""
        with getattr(self.model, "disable_adapter", nullcontext)():
            if any(p.requires_grad for p in self.model.parameters()):
                hint = "the reference must be a frozen copy, see docs/copying.md"
                raise ValueError(f"not only an adapter learns: {hint}")
            yield

    def micro_batches(self, group):
        """Indices of a group's samples, `micro_batch_size` at a time, short ones together."""
        return _ends(group).argsort(stable=True).split(self.settings.micro_batch_size)

    def mean_metrics(self, reports):
        """[(size, metrics)] of micro-batches -> their means over all processes; NaN if none.

        max_logprob_gap is the largest, of this process.
        """
        names = "loss", "policy_loss", "kl", "clip_fraction", "ratio_mean", "mean_logprob_gap"
        sums = [sum(size * metrics[name] for size, metrics in reports) for name in names]
        total = sum(size for size, _ in reports)
        # Not doubles: an Apple GPU has none.
        sums = torch.tensor([*sums, total], dtype=torch.float32, device=self.model.device)
        self.average([sums])
        *sums, total = sums.tolist()
        gaps = [metrics["max_logprob_gap"] for _, metrics in reports]
        means = {name: value / (total or math.nan) for name, value in zip(names, sums)}
        return means | {"max_logprob_gap": max(gaps, default=math.nan)}

    def teaches(self, group):
        # Hook: groups of equal rewards are left out of 4 to 6, to save their passes, although eq. 3
        # keeps their KL term (docs/kl.md).
        return group.advantages.any()

    def size_in_loss(self, group, rows):
        # Hook: a micro-batch counts in the mean of the step by its size. DAPO counts tokens.
        return len(rows)


# ==== Below: how a language model recomputes log-probs, and samples ===============================

# ---- 4. recompute the log-probs, of all tokens at once -------------------------------------------


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
    """Log-probs of the last `num_new_tokens` (T) ids of each row, as the sampler would have them.

    Args:
        input_ids: (B, L+T) int64, one prompt and what was sampled for it.
        position_ids: (3, L+T), the same for all rows, or None.
        allowed_ids, temperature: as in sampling; V ids may be sampled.
        nucleus: (B, T, V) bool, the ids that top-p kept, as sampling returned it. New, old and
            reference policy renormalise over this same set: a ratio of probabilities over different
            sets would not be an importance weight, and a token outside of a set has the log-prob
            -inf. The KL term, too, compares what top-p has kept of the distributions.

    Returns: (B, T) float32, with gradient. The value for an id that is not allowed is meaningless:
    mask it in the loss.
    """
    input_ids = input_ids.to(model.device)
    if position_ids is not None:
        of_one = position_ids[:, None, : input_ids.shape[1] - 1].to(model.device)
        position_ids = of_one.expand(-1, len(input_ids), -1)
    # The logits at one position predict the id at the next: the last id is only ever a target, and
    # the last T logits are enough. logits_to_keep is a tensor of places: for a number transformers
    # slices the hidden states, and the product with that slice copies the head's weight for each
    # row. A model that does not know logits_to_keep returns all logits.
    last = torch.arange(-num_new_tokens, 0, device=model.device)
    output = model(
        input_ids=input_ids[:, :-1],
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=last,
    )
    logits = output.logits[:, -num_new_tokens:]  # (B, T, vocabulary)
    logp = _log_distribution(logits, allowed_ids, temperature, nucleus)  # (B, T, V)
    index = (input_ids[:, -num_new_tokens:] - allowed_ids.start).clamp(0, logp.shape[-1] - 1)
    return logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _log_distribution(logits, allowed_ids, temperature, nucleus=None):
    """Log-probabilities of the ids that may be sampled: (..., vocabulary) -> (..., V) float32.

    Sampling and recomputing both come through here, so that a ratio never compares two different
    distributions.
    """
    logits = logits[..., allowed_ids].float()  # softmax in bf16 would lose the tail
    if temperature != 1:  # dividing by 1 would be a pass over all logits for nothing
        logits = logits / temperature
    if nucleus is not None:
        logits = logits.masked_fill(~nucleus.to(logits.device), float("-inf"))
    return logits.log_softmax(-1)


# ---- 1. sample -----------------------------------------------------------------------------------


@torch.no_grad()
def generate_with_logprobs(
    model,
    prompt_ids,
    num_new_tokens,
    *,
    num_samples=1,
    position_ids=None,
    allowed_ids=slice(0, None),
    temperature=1.0,
    top_p=1.0,
    end_ids=None,
    generators=None,
    token_forward=None,
):
    """Sample `num_samples` (G) continuations of `num_new_tokens` (T) tokens for each of N prompts.

    All N*G run side by side: a pass reads all weights once, however many sequences it has.
    transformers' generate() would not do: it takes no generator per prompt, and would have to keep
    all logits to tell what top-p removed.

    Args:
        prompt_ids: N tensors (L_i,) int64. Shorter ones are padded on the left, and the padding is
            masked.
        position_ids: N tensors (3, L_i+T) int64, time, row and column of each token; or None: the
            model makes its own. Without them a model with such positions, as GLM-Image has, would
            silently take the positions of a text.
        allowed_ids: slice(first, end), the ids that may be sampled, V of them; for pictures no end
            tokens.
        temperature: divides the logits; above 0.
        top_p: in (0, 1]; 1 keeps every id.
        end_ids: the id that ends a text, or several. T then is the length of the longest text, at
            most `num_new_tokens`; what stands after an end is noise. None: T is `num_new_tokens`.
        generators: N torch.Generators on the model's device, so that no group depends on its
            neighbours. None: torch's.
        token_forward: called instead of the model for every token but the first, e.g. a captured
            CUDA graph.

    Returns, on the CPU:
        tokens: (N*G, T) int64, prompt after prompt.
        logprobs: (N*G, T) float32, under the sampling distribution: after temperature and top-p.
        nucleus: (N*G, T, V) bool, the ids that survived top-p, kept for part 4. None if top_p is 1.
    """
    ids, positions, not_padding = _pad_left(prompt_ids, position_ids, num_new_tokens, model.device)
    # A tensor, not a number: see get_per_token_logprobs.
    last = torch.tensor([-1], device=model.device)

    def next_logits(ids, rows, end, cache=None):
        """Logits (B, vocabulary) for the token after `ids` (B, length), and the cache with `ids`.

        `ids` extends the cache and ends at position `end`. rows: (B,), the prompt of each row.
        """
        start = end - ids.shape[1]
        # Two dimensions, from which transformers makes each layer's own: windows, recurrent states.
        # A padding token sees nothing. There torch's kernels answer 0 (since 2.5: pytorch 133882;
        # on Apple since 2.9), except cuDNN's, which GRPO switches off. NaN would end in NotFinite.
        mask = None if not_padding is None else not_padding[rows, :end]
        forward = token_forward if token_forward and cache is not None else model
        output = forward(
            input_ids=ids,
            attention_mask=mask,
            position_ids=None if positions is None else positions[..., rows, start:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last,
        )
        if output.past_key_values is None:  # a token would see only the token before it
            raise ValueError("the model returns no past_key_values: it cannot be sampled here")
        return output.logits[:, -1], output.past_key_values

    def draw(logits):
        return _sample_token(logits, allowed_ids, temperature, top_p, generators or [None])

    # A prompt is read once, then its row of the cache is repeated for its G samples.
    length = ids.shape[1]
    rows = torch.arange(len(ids), device=model.device).repeat_interleave(num_samples)  # (N*G,)
    logits, cache = next_logits(ids, rows[::num_samples], length)  # each prompt once
    if hasattr(cache, "reorder_cache"):
        cache.reorder_cache(rows)
        logits = logits[rows]
    else:  # this cache cannot repeat rows: each prompt is read G times
        logits, cache = next_logits(ids[rows], rows, length)

    # The samples: the first tokens follow from that pass, then each pass gives one more.
    samples = [draw(logits)]
    # Samples whose text may go on: they alone are rows of the cache.
    unfinished = torch.arange(len(rows), device=model.device)
    for end in range(length + 1, length + num_new_tokens):
        if end_ids is not None and len(samples) % 16 == 0:  # rarely: the CPU waits for the GPU here
            # A captured step has a fixed number of rows.
            unfinished = _drop_ended(samples, unfinished, end_ids, None if token_forward else cache)
            if not len(unfinished):
                break
        newest = samples[-1][0]  # (N*G, 1)
        found, cache = next_logits(newest[unfinished], rows[unfinished], end, cache)
        # Noise is drawn for all rows, so no sample depends on which others have ended.
        logits = found.new_zeros(logits.shape).index_copy(0, unfinished, found)
        samples.append(draw(logits))

    tokens, logprobs, nuclei = zip(*samples, strict=True)
    tokens = torch.cat(tokens, dim=1).cpu()
    T = num_new_tokens if end_ids is None else int(mask_through_end(tokens, end_ids).sum(1).max())
    logprobs = torch.cat(logprobs, dim=1).cpu()[:, :T]
    if not logprobs.isfinite().all():
        causes = "damaged weights, a GPU kernel that fails, or too high a learning rate"
        greedy = "temperature is 0; for the likeliest tokens set top_p to 1e-6"
        raise NotFinite(f"sampled log-probs are not finite: {causes if temperature else greedy}")
    nucleus = torch.stack([each.cpu() for each in nuclei[:T]], dim=1) if top_p < 1 else None
    return tokens[:, :T], logprobs, nucleus


def _sample_token(logits, allowed_ids, temperature, top_p, generators):
    """One id per row: logits (N*G, vocabulary) -> ids (N*G, 1), log-probs (N*G, 1), nucleus.

    nucleus: (N*G, V) bool, the most likely ids that together hold top_p. None if top_p is 1.
    """
    logp = _log_distribution(logits, allowed_ids, temperature)  # (N*G, V)
    nucleus = None
    if top_p < 1:
        nucleus = _nucleus(logp, top_p)
        logp = _log_distribution(logits, allowed_ids, temperature, nucleus)
    # The Gumbel-max trick in its exponential form: with E = -log(uniform), argmax(p / E) is a draw
    # from p. torch.multinomial does the same, but checks p first, which would make the CPU wait for
    # the GPU at every token.
    noise = torch.empty_like(logp)  # E
    # Each generator fills the G rows of its prompt; None, torch's own, fills all.
    for rows, generator in zip(noise.chunk(len(generators)), generators, strict=True):
        rows.exponential_(generator=generator)
    index = (logp.exp() / noise).argmax(-1, keepdim=True)  # (N*G, 1)
    return index + allowed_ids.start, logp.gather(-1, index), nucleus


# ==== Nothing below is needed to understand GRPO. =================================================
# ---- one GPU for two models ----------------------------------------------------------------------


class Offload:
    """Lets models, now on the CPU, take turns on a GPU that cannot hold all: all_but(policy).

    As begin=lambda part, model: offload.all_but(model) GRPO calls it. With `pin`, the default where
    there is a GPU, frozen weights live in page-locked host memory, which a GPU reads at the full
    speed of its bus. Without, they stay where they are, such as mapped from a file, and are read a
    third as fast. They are copied up when needed and then dropped, for they do not change. What is
    trained is small, and stays on the device. on_evict: called after weights have left the GPU: a
    CUDA graph that read them must be dropped.
    """

    def __init__(self, models, device, on_evict=lambda: None, pin=None):
        pin = torch.cuda.is_available() if pin is None else pin
        self.device = device
        self.on_evict = on_evict
        self.homes = {}  # {model: [(frozen tensor, its data in host memory)]}
        for model in models:
            tensors = [*model.parameters(), *model.buffers()]
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.data = tensor.data.to(device)
                elif pin:
                    tensor.data = tensor.data.pin_memory()
            self.homes[model] = [(each, each.data) for each in tensors if not each.requires_grad]

    def all_but(self, *models):
        """These come to the GPU, after all others have left it."""
        others = [pair for model in self.homes.keys() - set(models) for pair in self.homes[model]]
        if any(tensor.data_ptr() != home.data_ptr() for tensor, home in others):
            for tensor, home in others:
                tensor.data = home
            self.on_evict()
        torch.cuda.empty_cache()  # free memory in small pieces would not fit the next model
        for tensor, home in [pair for model in models for pair in self.homes[model]]:
            if tensor.data_ptr() == home.data_ptr():
                tensor.data = home.to(self.device, non_blocking=True, copy=True)


# ---- prompts side by side, texts that end, a nucleus ---------------------------------------------


def _pad_left(prompt_ids, position_ids, num_new_tokens, device):
    """Prompts side by side: ids (N, L), positions ([3,] N, L+T), and what is not padding (N, L+T).

    Positions are None if the model makes its own, and the third is None where nothing is padded.
    """

    def side_by_side(tensors):  # N of (..., L_i) -> (..., N, L)
        longest = max(tensor.shape[-1] for tensor in tensors)
        rows = [pad(row, (longest - row.shape[-1], 0)) for row in tensors]
        return torch.stack(rows, dim=-2).to(device)

    not_padding = None
    if len({len(ids) for ids in prompt_ids}) > 1:
        lengths = [len(ids) + num_new_tokens for ids in prompt_ids]
        not_padding = side_by_side([torch.ones(length, dtype=torch.bool) for length in lengths])
        if position_ids is None:
            position_ids = [torch.arange(length) for length in lengths]
    positions = None if position_ids is None else side_by_side(position_ids)
    return side_by_side(prompt_ids), positions, not_padding


def _drop_ended(samples, unfinished, end_ids, cache):
    """Those of the samples `unfinished`, the rows of the cache, whose text has not ended.

    The others leave the cache. From a cache without reorder_cache they leave when all have ended.
    """
    tokens = torch.cat([token for token, *_ in samples], dim=1)  # (N*G, tokens so far)
    ended = torch.isin(tokens, tokens.new_tensor(end_ids)).any(1)[unfinished]
    going_on = (~ended).nonzero()[:, 0]  # rows of the cache
    if len(going_on) and not hasattr(cache, "reorder_cache"):
        return unfinished
    if 0 < len(going_on) < len(unfinished):
        cache.reorder_cache(going_on)
    return unfinished[going_on]


def mask_through_end(tokens, end_ids):
    """(B, T), 1 through the first token in `end_ids`, an id or several, 0 after it.

    That token counts too: without it no step would teach the model to stop.
    """
    is_end = torch.isin(tokens, tokens.new_tensor(end_ids)).int()  # (B, T)
    return (is_end.cumsum(1) - is_end == 0).float()


def _nucleus(logp, top_p):
    """The most likely ids that together hold top_p: log-probs (B, V) -> (B, V) bool."""
    if logp.device.type != "cpu":
        return TopPLogitsWarper(top_p)(None, logp).isfinite()
    # The warper sorts, which is slow on a CPU, and needless where a single id holds top_p. (Above
    # one half there is one such id at most.) A GPU would have to tell the CPU which rows these are.
    nucleus = logp.exp() > max(top_p, 0.5)
    rows = ~nucleus.any(-1)
    nucleus[rows] = TopPLogitsWarper(top_p)(None, logp[rows]).isfinite()
    return nucleus


def _ends(group):
    """(G,): of each sample the number of tokens through the last that counts, at least 1."""
    counts = torch.ones_like(group.old_logprobs) if group.mask is None else group.mask > 0
    return (counts * torch.arange(1, counts.shape[1] + 1)).amax(1).clamp(min=1).long()


def _rows(tensor, rows):
    return None if tensor is None else tensor[rows]


# ---- what guards against silent mistakes ---------------------------------------------------------


class NotFinite(ValueError):
    """Sampled log-probs are NaN or infinite."""


def _checked_prompts(prompts, max_new_tokens):
    """What GRPO.sample was given -> N ids (L,), N positions or None, T."""
    of_texts = 'give a list of prompts, each a list of ids: tokenizer(texts)["input_ids"]'
    if isinstance(prompts, str | torch.Tensor) or hasattr(prompts, "keys") or not len(prompts):
        raise ValueError(of_texts)
    full = [each if isinstance(each, tuple) else (each, None, max_new_tokens) for each in prompts]
    if any(len(each) != 3 or each[2] is None for each in full):
        raise ValueError("give max_new_tokens, or tuples (prompt_ids, position_ids, T)")
    prompt_ids, position_ids, lengths = zip(*full, strict=True)
    if len(set(lengths)) > 1:
        raise ValueError("the prompts have several T: give one for all")
    try:
        prompt_ids = [torch.as_tensor(ids) for ids in prompt_ids]
    except (TypeError, ValueError, RuntimeError):  # texts, dictionaries, lists in lists
        raise ValueError(of_texts) from None
    if any(ids.ndim != 1 or ids.is_floating_point() for ids in prompt_ids):
        raise ValueError(f"{of_texts}; of a tensor (1, L) give [0]")
    return prompt_ids, position_ids, lengths[0]


def _check_loss(new_logprobs, old_logprobs, advantages, ref_logprobs, mask, kl_coef):
    """Refuses shapes that would broadcast silently, and a KL penalty without a reference."""
    shapes = [x.shape for x in (new_logprobs, old_logprobs, ref_logprobs, mask) if x is not None]
    if len(set(shapes)) > 1 or len(advantages) != len(new_logprobs):
        raise ValueError(f"log-probs and mask {shapes}, {len(advantages)} advantages: give (B, T)")
    if kl_coef > 0 and ref_logprobs is None:
        raise ValueError("kl_coef above 0 needs ref_logprobs")


def _is_joined():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _check_process(parameters, average):
    """Refuses policies that would drift apart; warns of steps that are rounded away."""
    if average is not None:
        sums = torch.stack([p.detach().float().sum() for p in parameters])
        means = sums.clone()
        average([means])
        if not torch.allclose(means, sums):
            raise ValueError("the processes begin with different adapters: seed them alike before")
    elif _is_joined():
        raise ValueError("torch.distributed is started: GRPO needs `average`, see docs/copying.md")
    if any(p.dtype != torch.float32 for p in parameters):
        warnings.warn("trained weights are not float32: steps are rounded away", stacklevel=3)


def _warn_of(metrics, norms, at_start, groups, model):
    """Warns where an update's metrics say that something is wrong (causes: docs/numbers.md).

    metrics: from the first optimiser step that had a group to learn from. norms: of all steps.
    at_start: whether the policy was the reference then. groups: those with unequal rewards.
    """
    signs = []
    # Rounding alone was seen to make 4e-6 in float32, and 0.05 in bfloat16.
    most = 1e-3 if all(p.dtype == torch.float32 for p in model.parameters()) else 0.1
    if metrics["mean_logprob_gap"] > most:
        signs.append(f"mean_logprob_gap is above {most}: sampled and recomputed log-probs disagree")
    if at_start and metrics["kl"] > 0.01:
        signs.append("kl is above 0 at the start: the reference is not the model before training")
    if groups and not any(norms):
        alike = all(len(group.old_logprobs.unique(dim=0)) == 1 for group in groups)
        other = "does the optimizer hold the active adapter?"
        cause = "equal samples got different rewards" if alike else other
        signs.append(f"rewards differ, but the gradient is exactly 0: {cause}")
    if not all(norm < math.inf for norm in norms):
        signs.append("the gradient is NaN or infinite: no step was taken")
    for sign in signs:  # Python shows each once for a line that calls update
        warnings.warn(f"{sign}; causes are in docs/numbers.md", stacklevel=4)  # at that line
