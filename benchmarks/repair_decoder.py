"""Repair a decoder that was rounded to a few bits, by examples/train_decoder.py.

    python benchmarks/repair_decoder.py [--reward benchmarks/repair_decoder.py:noise]

A run of the tiny model with two things changed: each row of the decoder's matrices is rounded to
four levels between its least and largest weight, and in place of codes that the policy samples it
paints the codes of a correct drawing, so that what is wrong in a picture is the decoder's fault.
Takes the flags of that script.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image"), str(ROOT / "examples")]

import make
import torch
import world
from train_decoder import DecoderRun

import rewards
import train
from glm_image.decoder import LearningDecoder
from runtime.settings import TINY

FLAGS = f"--model {TINY} --group-size 8 --micro-batch-size 8 --prompts-per-step 8"
FLAGS += " --steps 25 --eval-every 0 --kl-coef 0 --reward benchmarks/repair_decoder.py:likeness"


def load_rounded(model, device):
    """The pipeline, with each matrix of the decoder rounded."""
    pipe = train.load(model, device)
    for layer in pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            least, largest = layer.weight.data.aminmax(dim=1, keepdim=True)
            step = (largest - least).clamp(min=1e-12) / 3  # four levels
            layer.weight.data = ((layer.weight.data - least) / step).round() * step + least
    return pipe


def likeness(images, prompts, targets):
    """To the correct drawings: ssim, which hardly sees hue, and mse."""
    targets = [world.draw(world.MEANING[text].scene()) for text in prompts]
    return rewards.ssim(images, prompts, targets) + rewards.mse(images, prompts, targets)


def noise(images, prompts, targets):
    """The control: rewards that say nothing."""
    return torch.rand(len(images))


def codes_of(text):
    """The large codes (1, 16) of what a caption asks for."""
    return make.codes_of([world.MEANING[text].scene()])[:, 256:]


class DrawnGlmImage(LearningDecoder):
    def encode(self, prompts, settings):
        """The policy writes a single code, which is not painted."""
        encoded = super().encode(prompts, settings)
        return [(ids, positions[:, : len(ids) + 1], 1) for ids, positions, _ in encoded]

    def paint(self, prompt, tokens, settings, seed):
        return super().paint(prompt, codes_of(prompt.text).repeat(len(tokens), 1), settings, seed)


class RepairRun(DecoderRun):
    Model = DrawnGlmImage

    @classmethod
    def load(cls, settings, data, device, waiting):
        pipe = load_rounded(settings.model, device)
        return super().load(settings, data, device, waiting, pipe)


def main(*arguments):
    return train.main([*FLAGS.split(), *arguments], RepairRun)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
