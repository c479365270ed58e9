"""The diffusion decoder as a policy too, trained by the very update of grpo.py: `train.py --train decoder` or `both`.

A flow-matching decoder goes from noise (level 1) to a picture (level 0) in S moves. At level s its latents are
x = (1 - s) clean + s noise, and it predicts the velocity v = noise - clean: so clean = x - s v, noise = x + (1 - s) v.
The stock sampler is an ODE, its next latents x + (s' - s) v leave nothing to choose. Draw every move from a Gaussian
(Flow-CPS, Wang & Yu 2025, arXiv:2509.05952), a = --noise-level; but the last, whose noise would stay in the picture,
which is therefore not trained:

    std = s' sin(a pi / 2),    mean = (1 - s') clean + sqrt(s'^2 - std^2) noise

and a path is a trajectory with probabilities, as a code sequence is: Flow-GRPO (Liu et al. 2025, arXiv:2505.05470),
whose own SDE learns as well, but damages pictures of few moves.

Credit: each of the G code sequences of a prompt is painted K times from one starting noise. The codes get the mean
reward of their K pictures, compared among the G; the decoder that of each picture, compared among the K of the same
codes. In one flat group of G*K nearly all of the spread would be the codes'.

In the terms of grpo.py one move of these K is a group, and the D = C*H*W numbers of its latents are the tokens, each
drawn from a Gaussian of its own. So --clip-range and --kl-coef mean what they mean for the codes. (Flow-GRPO has one
ratio for all D, by the mean of their log-probs: the same gradient on fresh samples, a KL term of 1/D.)
"""

import math
from dataclasses import dataclass

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline

from grpo import GRPO, without_cudnn_attention


def gaussian_move(x, v, level, next_level, noise_level):
    """Mean (K, C, H, W) and std (a number) of the next latents; without noise, to the last bit the stock scheduler's.

    x: latents (K, C, H, W) float32. v: velocity, like x. level, next_level: of noise, in 0..1. noise_level: in 0..1.
    """
    std = next_level * math.sin(noise_level * math.pi / 2)
    replaced = next_level - math.sqrt(next_level**2 - std**2)  # that much of the predicted noise makes room for fresh
    return x + (next_level - level) * v - replaced * (x + (1 - level) * v), std  # the ODE's move, less that


def log_density(x, mean, std):
    """Log-density of each number of x under its Gaussian: (K, C, H, W) -> (K, D) float32."""
    return (-((x - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2).flatten(1)


@dataclass
class Move:
    """One move of K paintings of the same codes, a group for GRPO.update. Latents and log-probs wait on the CPU."""

    latents: torch.Tensor  # (K, C, H, W)
    next_latents: torch.Tensor  # (K, C, H, W)
    old_logprobs: torch.Tensor  # (K, D)
    levels: tuple  # of noise: before, after
    calls: list  # what else the pipeline gave the transformer, for one painting: [with codes], guided [with, without]
    mask: None = None  # all numbers count
    advantages: torch.Tensor | None = None  # (K,)
    ref_logprobs: torch.Tensor | None = None  # (K, D), None when kl_coef is 0


def repeat_for_moves(rewards, moves):
    """The rewards (N*G*K,) of all paintings, again for each move on their paths, as set_advantages wants them."""
    of_paths = rewards.view(-1, len(moves[0].old_logprobs))  # (N*G, K)
    return of_paths.repeat_interleave(len(moves) // len(of_paths), dim=0).flatten()


class PathScheduler(FlowMatchEulerDiscreteScheduler):
    """The stock scheduler, with its levels and times, but all moves except the last are drawn and kept."""

    def begin(self, noise_level, seeds):
        """A group of paintings begins, of which each draws by a seed of its own: the same in a batch of any size."""
        self.noise_level, self.generators = noise_level, [torch.Generator().manual_seed(seed) for seed in seeds]
        self.calls, self.moves = [], {}  # {number: the first five fields of a Move, batch by batch}

    def record_call(self, transformer, _, options):
        """For a hook of the transformer. All paintings share codes, prompt and time: of each tensor a row is enough."""
        row = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        self.calls = [*self.calls, row | {"hidden_states": None}]  # which are kept as latents

    def step(self, model_output, timestep, sample, return_dict=True, **options):
        if self.step_index is None:
            self._init_step_index(timestep)
        i, (level, next_level) = self.step_index, self.sigmas[self.step_index : self.step_index + 2].tolist()
        calls, self.calls = self.calls, []
        if next_level == 0:
            return super().step(model_output, timestep, sample, return_dict=return_dict, **options)
        if i == 0:  # a batch begins
            self.batch, self.generators = self.generators[: len(sample)], self.generators[len(sample) :]
        x = sample.float()  # and so it stays: bfloat16 would round by more than the std of late moves
        mean, std = gaussian_move(x, model_output, level, next_level, self.noise_level)  # the pipeline gives float32
        noise = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in self.batch])
        after = mean + std * noise.to(x.device)
        self.moves.setdefault(i, []).append((x, after, log_density(after, mean, std), (level, next_level), calls))
        self._step_index = i + 1
        return (after,)


class DecoderGRPO(GRPO):
    """Trains an adapter of a pipeline's decoder by the paths on which it has painted.

    model: a PeftModel of pipe.transformer. optimizer: over its adapter. settings: as for GRPO, with noise_level and
    guidance_scale. pipe: a GlmImagePipeline; it is not changed.
    """

    def __init__(self, model, optimizer, settings, pipe):
        super().__init__(model, optimizer, settings)
        self.scheduler = PathScheduler.from_config(pipe.scheduler.config)
        self.pipe = GlmImagePipeline(**{**pipe.components, "scheduler": self.scheduler})
        self.pipe.set_progress_bar_config(disable=True)

    @without_cudnn_attention  # as in logprobs
    def paint(self, decode_images, prompt, tokens, paintings, seed):
        """Paint each of G code sequences (G, T) `paintings` (K) times, from one starting noise.

        decode_images: see train.py. Returns G*K images, sequence after sequence, and the Moves of each, in that order.
        """
        images, moves = [], []
        own = torch.Generator().manual_seed(seed + 2**30)  # the codes drew from `seed`, see also decode_images
        for codes in tokens:
            self.scheduler.begin(self.settings.noise_level, torch.randint(2**62, (paintings,), generator=own).tolist())
            with self.pipe.transformer.register_forward_pre_hook(self.scheduler.record_call, with_kwargs=True):
                images += decode_images(self.pipe, prompt, codes.expand(paintings, -1), self.settings, seed)
            for batches in self.scheduler.moves.values():
                *tensors, levels, calls = zip(*batches, strict=True)
                moves.append(Move(*(torch.cat(rows).cpu() for rows in tensors), levels[0], calls[0]))
        return images, moves

    @without_cudnn_attention
    def logprobs(self, move, rows):
        """Log-probs (B, D) of the latents that were drawn, under the decoder as it stands, on the CPU."""
        device, v = self.model.device, []
        x, after = move.latents[rows].to(device), move.next_latents[rows].to(device)
        for call in move.calls:  # copies, not views: bfloat16 kernels round by the layout
            call = {k: t.repeat_interleave(len(rows), 0) if isinstance(t, torch.Tensor) else t for k, t in call.items()}
            v.append(self.model(**{**call, "hidden_states": x.to(self.model.dtype)})[0].float())
        v = v[0] if len(v) == 1 else v[1] + self.settings.guidance_scale * (v[0] - v[1])  # as the pipeline guides
        return log_density(after, *gaussian_move(x, v, *move.levels, self.settings.noise_level)).cpu()
