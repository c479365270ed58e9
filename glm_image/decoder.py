"""The diffusion decoder as a policy too, trained by the very update of grpo.py: `train.py --train
decoder` or `both`.

A flow-matching decoder goes from noise (level 1) to a picture (level 0) in S denoising steps. At
level s its latents are x = (1 - s) clean + s noise, and it predicts the velocity v = noise - clean,
so that clean = x - s v and
noise = x + (1 - s) v. The stock scheduler is deterministic: an ODE, whose next latents are x + (s'
- s) v. Here every step but the last is drawn from a Gaussian (Flow-CPS, Wang & Yu 2025,
arXiv:2509.05952), with a = --noise-level:

    std = s' sin(a pi / 2),    mean = (1 - s') clean + sqrt(s'^2 - std^2) noise

The noise of the last step would stay in the picture, so that step remains the ODE's and is not
trained. The path of a painting is then a trajectory with probabilities, like a code sequence:
Flow-GRPO (Liu et al. 2025, arXiv:2505.05470), whose own SDE learns as well, but damages pictures
painted in few steps.

Credit: each of the G code sequences of a prompt is painted K times from one starting noise. The
codes get the mean reward of their K pictures, compared among the G; the decoder gets the reward of
each picture, compared among the K of the same codes. In one flat group of G*K nearly all of the
spread would be the codes'.

In the terms of grpo.py, one denoising step of these K paintings is a group, and the D = C*H*W
numbers of its latents are the tokens, each drawn from a Gaussian of its own. So --clip-range and
--kl-coef mean what they mean for the codes. (Flow-GRPO has one ratio for all D, by the mean of
their log-probs: the same gradient on fresh samples, KL term 1/D.)
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline

from glm_image.painting import paint
from grpo import GRPO, without_cudnn_attention

PATH_SEED = 2**30  # added to a group's seed for the paths of its paintings; see SEEDS in train.py


def gaussian_step(x, v, level, next_level, noise_level):
    """Mean (K, C, H, W) and std (a number) of the next latents; without noise, to the last bit the
    stock scheduler's.

    x: latents (K, C, H, W) float32. v: velocity, like x. level, next_level: of noise, in 0..1.
    noise_level: in 0..1.
    """
    std = next_level * math.sin(noise_level * math.pi / 2)
    replaced = next_level - math.sqrt(
        next_level**2 - std**2
    )  # this much of the predicted noise gives way to new noise
    return x + (next_level - level) * v - replaced * (
        x + (1 - level) * v
    ), std  # the ODE's step, less that noise


def log_density(x, mean, std):
    """Log-density of each number of x under its Gaussian: (K, C, H, W) -> (K, D) float32."""
    return (-((x - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2).flatten(
        1
    )


@dataclass
class DenoisingStep:
    """One denoising step of K paintings of the same codes, a group for GRPO.update. Its tensors
    wait on the CPU."""

    latents: torch.Tensor  # (K, C, H, W)
    next_latents: torch.Tensor  # (K, C, H, W)
    old_logprobs: torch.Tensor  # (K, D)
    levels: tuple  # noise levels before and after
    calls: list  # the transformer's other arguments, for one painting: [with codes], or if guided [with, without]
    mask: None = None  # all numbers count
    advantages: torch.Tensor | None = None  # (K,)
    ref_logprobs: torch.Tensor | None = None  # (K, D), None when kl_coef is 0


def repeat_for_steps(rewards, steps):
    """The rewards (N*G*K,) of all paintings, repeated for each denoising step of their paths, for
    set_advantages."""
    per_sequence = rewards.view(-1, len(steps[0].old_logprobs))  # (N*G, K)
    return per_sequence.repeat_interleave(len(steps) // len(per_sequence), dim=0).flatten()


class PathScheduler(FlowMatchEulerDiscreteScheduler):
    """The stock scheduler, with its levels and times, but all steps except the last are drawn and
    recorded."""

    def begin(self, noise_level, seeds):
        """A group of paintings begins, each drawn by a seed of its own: the same in a batch of any
        size."""
        self.noise_level = noise_level
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.calls = []
        self.recorded = {}  # {number of the step: a DenoisingStep per batch}

    def record_call(self, transformer, _, options):
        """For a hook of the transformer. All paintings share codes, prompt and time: one row of
        each tensor will do."""
        row = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        self.calls = [*self.calls, row | {"hidden_states": None}]  # kept as latents

    def step(self, model_output, timestep, sample, return_dict=True, **options):
        if self.step_index is None:
            self._init_step_index(timestep)
        i = self.step_index
        level, next_level = self.sigmas[i : i + 2].tolist()
        calls, self.calls = self.calls, []
        if next_level == 0:  # the last step
            return super().step(model_output, timestep, sample, return_dict=return_dict, **options)
        if i == 0:  # a batch begins
            self.batch = self.generators[: len(sample)]
            self.generators = self.generators[len(sample) :]
        x = (
            sample.float()
        )  # and so it stays: bfloat16 would round by more than the std of late steps
        mean, std = gaussian_step(
            x, model_output, level, next_level, self.noise_level
        )  # the pipeline gives float32
        noise = torch.stack(
            [torch.randn(x.shape[1:], generator=generator) for generator in self.batch]
        )
        after = mean + std * noise.to(x.device)
        logprobs = log_density(after, mean, std)
        drawn = DenoisingStep(x, after, logprobs, levels=(level, next_level), calls=calls)
        self.recorded.setdefault(i, []).append(drawn)
        self._step_index = i + 1
        return (after,)


class DecoderGRPO(GRPO):
    """Trains an adapter of a pipeline's decoder by the denoising paths that it has drawn. Its
    samples are paintings.

    model: a PeftModel of pipe.transformer. optimizer: over its adapter. settings: GRPOSettings.
    noise_level: in 0..1.
    guidance_scale: as for painting. pipe: a GlmImagePipeline; it is not changed. reference: as for
    GRPO.
    """

    def __init__(
        self, model, optimizer, settings, pipe, noise_level, guidance_scale, reference=None
    ):
        super().__init__(model, optimizer, settings, reference=reference)
        self.noise_level = noise_level
        self.guidance_scale = guidance_scale
        self.scheduler = PathScheduler.from_config(pipe.scheduler.config)
        self.pipe = GlmImagePipeline(**{**pipe.components, "scheduler": self.scheduler})
        self.pipe.set_progress_bar_config(disable=True)

    @without_cudnn_attention  # as in logprobs
    def paint_paths(self, prompt, tokens, num_paintings, settings, seed):
        """Paint each of G code sequences (G, T) of a prompt `num_paintings` (K) times, all from one
        starting noise.

        settings: as for `paint`. seed: fixes the noise and the paths. Returns latents of G*K
        pictures and the DenoisingSteps, both sequence after sequence.
        """
        generator = torch.Generator().manual_seed(seed + PATH_SEED)
        latents = []
        steps = []
        for codes in tokens:
            seeds = torch.randint(2**62, (num_paintings,), generator=generator).tolist()
            self.scheduler.begin(self.noise_level, seeds)
            with self.pipe.transformer.register_forward_pre_hook(
                self.scheduler.record_call, with_kwargs=True
            ):
                latents.append(
                    paint(self.pipe, prompt, codes.expand(num_paintings, -1), settings, seed)
                )
            path = [merge(self.scheduler.recorded.pop(i)) for i in list(self.scheduler.recorded)]
            for step, following in pairwise(path):
                step.next_latents = following.latents  # the same numbers: the host keeps them once
            steps += path
        return torch.cat(latents), steps

    @without_cudnn_attention
    def logprobs(self, step, rows):
        """Log-probs (B, D) of the latents that were drawn, under the decoder as it stands, on the
        CPU."""
        device = self.model.device
        x = step.latents[rows].to(device)
        after = step.next_latents[rows].to(device)
        v = []
        for call in step.calls:  # copies, not views: bfloat16 kernels round by the layout
            call = {
                k: t.repeat_interleave(len(rows), 0) if isinstance(t, torch.Tensor) else t
                for k, t in call.items()
            }
            v.append(self.model(**{**call, "hidden_states": x.to(self.model.dtype)})[0].float())
        v = (
            v[0] if len(v) == 1 else v[1] + self.guidance_scale * (v[0] - v[1])
        )  # as the pipeline guides
        return log_density(after, *gaussian_step(x, v, *step.levels, self.noise_level)).cpu()


def merge(batches):
    """One DenoisingStep of all K paintings, on the CPU, from those of the batches in which they
    were painted."""
    names = ("latents", "next_latents", "old_logprobs")
    return replace(
        batches[0],
        **{name: torch.cat([getattr(batch, name) for batch in batches]).cpu() for name in names},
    )
