"""Repair a decoder that was rounded to a few bits, by `train.py --train decoder`.

    python benchmarks/repair_decoder.py [--reward benchmarks/repair_decoder.py:noise]

A run of the tiny model with two things changed: each row of the decoder's matrices is rounded to
four levels between its least and largest weight, and in place of codes that the policy samples it
paints those of a right drawing, so that what is wrong in a picture is the decoder's fault. Takes
the flags of train.py.
"""

import sys
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import make
import torch
import world

import rewards
import train
from grpo import Group
from runtime.settings import TINY

FLAGS = f"--model {TINY} --train decoder --group-size 8 --micro-batch-size 8 --prompts-per-step 8"
FLAGS += " --steps 25 --eval-every 0 --kl-coef 0 --reward benchmarks/repair_decoder.py:likeness"
load = train.load


def load_rounded(*arguments, **options):
    """The pipeline, with each matrix of the decoder rounded."""
    pipe = load(*arguments, **options)
    for layer in pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            least, largest = layer.weight.data.aminmax(dim=1, keepdim=True)
            step = (largest - least).clamp(min=1e-12) / 3  # four levels
            layer.weight.data = ((layer.weight.data - least) / step).round() * step + least
    return pipe


def likeness(images, prompts, targets):
    """To the right drawings: ssim, which hardly sees hue, and mse."""
    targets = [world.draw(world.MEANING[text].scene()) for text in prompts]
    return rewards.ssim(images, prompts, targets) + rewards.mse(images, prompts, targets)


def noise(images, prompts, targets):
    """The control: rewards that say nothing."""
    return torch.rand(len(images))


def drawn(run, prompts, sampling, seed):
    """In place of Run.sample: the large codes (G, 16) of what a caption asks for, all the same."""
    scenes = [world.MEANING[text].scene() for text in prompts.texts]
    codes = make.codes_of(scenes, make.corner_codes(make.make_codebook()))[:, 256:]
    G = sampling.sequences
    return [Group(None, None, own.expand(G, -1), torch.zeros(1, 1)) for own in codes]


def main():
    with patch.object(train, "load", load_rounded), patch.object(train.Run, "sample", drawn):
        return train.main([*FLAGS.split(), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
