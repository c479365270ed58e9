"""The diffusion decoder as a policy too, trained by the very update of grpo.py.

examples/train_decoder.py trains it. A flow-matching decoder goes from noise (level 1) to a picture
(level 0) in S denoising steps. At level s its latents are x = (1 - s) clean + s noise, and it
predicts the velocity v = noise - clean, so that clean = x - s v and noise = x + (1 - s) v. The
stock scheduler is deterministic: an ODE, whose next latents are x + (s' - s) v. Here every step but
the last is drawn from a Gaussian (Flow-CPS, Wang & Yu 2025, arXiv:2509.05952), with a =
--noise-level:

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
from dataclasses import dataclass
from itertools import pairwise

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline

from glm_image.adapters import add_adapter
from glm_image.model import GlmImage
from grpo import GRPO, NotFinite

PATH_SEED = 2**30  # added to a group's seed for the paths of its paintings; see evaluation.py


def gaussian_step(x, v, level, next_level, noise_level):
    """Mean (K, C, H, W) and std (a number) of the next latents.

    Without noise, bit-identical to the stock scheduler. x: latents (K, C, H, W) float32. v:
    velocity, like x. level, next_level: of noise, in 0..1. noise_level: in 0..1.
    """
    std = next_level * math.sin(noise_level * math.pi / 2)
    renewed = next_level - math.sqrt(next_level**2 - std**2)  # of the noise: it gives way to new
    ode = x + (next_level - level) * v
    return ode - renewed * (x + (1 - level) * v), std


def log_density(x, mean, std):
    """Log-density of each number of x under its Gaussian: (K, C, H, W) -> (K, D) float32."""
    logprobs = -((x - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2
    return logprobs.flatten(1)


@dataclass
class DenoisingStep:
    """One denoising step of K paintings of the same codes: a group for GRPO.update.

    Its tensors wait on the CPU.
    """

    latents: torch.Tensor  # (K, C, H, W)
    next_latents: torch.Tensor  # (K, C, H, W)
    old_logprobs: torch.Tensor  # (K, D)
    levels: tuple  # noise levels before and after
    # The transformer's other arguments, for one painting: [with codes], if guided [with, without].
    calls: list
    mask: None = None  # all numbers count
    advantages: torch.Tensor | None = None  # (K,)
    ref_logprobs: torch.Tensor | None = None  # (K, D), None when kl_coef is 0


def repeat_for_steps(rewards, steps):
    """The rewards (N*G*K,) of all paintings, repeated for each denoising step of their paths."""
    per_sequence = rewards.view(-1, len(steps[0].old_logprobs))  # (N*G, K)
    return per_sequence.repeat_interleave(len(steps) // len(per_sequence), dim=0).flatten()


class PathScheduler(FlowMatchEulerDiscreteScheduler):
    """The stock scheduler, its levels and times, but all steps except the last are drawn."""

    def begin(self, noise_level, seeds):
        """A batch of the same codes; each painting has its own seed: alike in any batch."""
        self.noise_level = noise_level
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.calls = []
        self.steps = []  # DenoisingSteps

    def record_call(self, transformer, _, options):
        """For a hook. All paintings share codes, prompt and time: a row of each tensor will do."""
        row = {name: x[:1] if torch.is_tensor(x) else x for name, x in options.items()}
        self.calls = [*self.calls, row | {"hidden_states": None}]  # kept as latents

    def step(self, model_output, timestep, sample, **options):
        if self.step_index is None:
            self._init_step_index(timestep)
        i = self.step_index
        level, next_level = self.sigmas[i : i + 2].tolist()
        calls, self.calls = self.calls, []
        if next_level == 0:  # the last step
            return super().step(model_output, timestep, sample, **options)
        x = sample.float()  # and so it stays: bfloat16 would round by more than a late step's std
        mean, std = gaussian_step(x, model_output, level, next_level, self.noise_level)
        noise = [torch.randn(x.shape[1:], generator=generator) for generator in self.generators]
        after = mean + std * torch.stack(noise).to(x.device)
        tensors = [each.cpu() for each in (x, after, log_density(after, mean, std))]
        self.steps.append(DenoisingStep(*tensors, levels=(level, next_level), calls=calls))
        self._step_index = i + 1
        return (after,)


class LearningDecoder(GlmImage):
    """A GlmImage whose decoder has an adapter that learns."""

    compiles_decoder = False  # not tried

    def prepare_training(self, settings, device, adapters=None):
        adapters = {**(adapters or {})}
        folder = adapters.pop("decoder-adapter", None)
        super().prepare_training(settings, device, adapters)
        transformer = self.pipe.transformer
        adapted = add_adapter(transformer, "decoder", settings.lora_rank, folder)
        self.decoder, self.decoder_reference = adapted
        if device.type != "cpu":
            transformer.enable_gradient_checkpointing()


class DecoderGRPO(GRPO):
    """Trains the adapter of a decoder by the denoising paths that it has drawn.

    model: a LearningDecoder; it is not changed. optimizer: over the decoder's adapter. settings:
    GRPOSettings. noise_level: in 0..1. guidance_scale: as for settings. options: as for GRPO.
    """

    def __init__(self, model, optimizer, settings, noise_level, guidance_scale, **options):
        begin = lambda part, _: model.begin(f"decoder/{part}", model.pipe.transformer)
        options |= {"reference": model.decoder_reference, "begin": begin}
        super().__init__(model.decoder, optimizer, settings, **options)
        self.noise_level = noise_level
        self.guidance_scale = guidance_scale
        self.scheduler = PathScheduler.from_config(model.pipe.scheduler.config)
        components = {**model.pipe.components, "scheduler": self.scheduler}
        self.painter = type(model)(GlmImagePipeline(**components), model.begin)

    def paint_paths(self, prompt, tokens, settings, seed):
        """Paint each of a prompt's G code sequences (G, T) K times.

        All start from one noise. seed: fixes it, and the paths. Returns latents of G*K pictures and
        the DenoisingSteps, both sequence after sequence. Raises NotFinite.
        """
        generator = torch.Generator().manual_seed(seed + PATH_SEED)
        hook = self.painter.pipe.transformer.register_forward_pre_hook
        latents = []
        steps = []
        for codes in tokens:
            seeds = torch.randint(2**62, (settings.paintings_per_sequence,), generator=generator)
            batches = []
            for own in seeds.split(settings.micro_batch_size):
                self.scheduler.begin(self.noise_level, own.tolist())
                with hook(self.scheduler.record_call, with_kwargs=True):
                    repeated = codes.expand(len(own), -1)
                    latents.append(self.painter.paint(prompt, repeated, settings, seed))
                batches.append(self.scheduler.steps)
            self.scheduler.steps = []  # or the last path would stay until the next
            path = [merge(each) for each in zip(*batches, strict=True)]
            for step, following in pairwise(path):
                step.next_latents = following.latents  # the same numbers: the host keeps them once
            steps += path
        if not all(step.old_logprobs.isfinite().all() for step in steps):
            raise NotFinite(
                "the log-probs of a denoising step are not finite: damaged weights, or too high a "
                "learning rate"
            )
        return torch.cat(latents), steps

    def logprobs(self, step, rows):
        """Log-probs (B, D) of the latents that were drawn, under the decoder as it stands."""
        x = step.latents[rows].to(self.model.device)
        after = step.next_latents[rows].to(self.model.device)
        # Copies, not views: bfloat16 kernels round by the layout.
        repeat = lambda x: x.repeat_interleave(len(rows), 0) if torch.is_tensor(x) else x
        v = []
        for call in step.calls:
            inputs = {name: repeat(value) for name, value in call.items()}
            inputs["hidden_states"] = x.to(self.model.dtype)
            v.append(self.model(**inputs)[0].float())
        if len(v) == 2:  # as the pipeline guides
            v = [v[1] + self.guidance_scale * (v[0] - v[1])]
        return log_density(after, *gaussian_step(x, v[0], *step.levels, self.noise_level)).cpu()


def merge(batches):
    """One DenoisingStep of all K paintings, from those of their batches."""
    step = batches[0]
    for name in ("latents", "next_latents", "old_logprobs"):
        setattr(step, name, torch.cat([getattr(batch, name) for batch in batches]))
    return step
