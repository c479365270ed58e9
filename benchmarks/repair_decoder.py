"""Repair a decoder that was rounded to a few bits, by `train.py --train decoder`.

    python benchmarks/repair_decoder.py --bits 2 --steps 25

The reward is likeness to its codes. Each row of a matrix is rounded to 2^bits levels between its
least and largest weight. The stock scheduler's pictures are judged by the drawings that their codes
were taken from, on captions held out: by SSIM, and, since that knows little of colours, by the
share of objects that check.py finds as drawn, both shape and colour in their place.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import check
import make
import torch
import world

import rewards
import train
from grpo import Group
from runtime.data import Prompts, read_prompts
from runtime.settings import TINY

CPU = torch.device("cpu")
FLAGS = "--train decoder --group-size 8 --micro-batch-size 8 --prompts-per-step 8 --steps 200"
FLAGS += " --kl-coef 0 --reward ssim:1,mse:1"


def load_rounded(bits):
    """The pipeline, with each matrix of the decoder rounded."""
    pipe = train.load(TINY, CPU)
    for layer in pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            least, largest = layer.weight.data.aminmax(dim=1, keepdim=True)
            step = (largest - least).clamp(min=1e-12) / (2**bits - 1)
            layer.weight.data = ((layer.weight.data - least) / step).round() * step + least
    return pipe


def drawings(file):
    """The captions with their drawings as targets, and the large codes (N, 16) of these."""
    texts = read_prompts(file, None).texts
    scenes = [world.MEANING[text].scene() for text in texts]
    codes = make.codes_of(scenes, make.corner_codes(make.make_codebook()))[:, 256:]
    return Prompts(texts, [world.draw(scene) for scene in scenes]), codes


class DrawnRun(train.Run):
    """In place of what the policy samples: the codes of the drawings, a step's in `codes`."""

    def sample(self, prompts, sampling, seed):
        return [Group(None, None, codes[None], torch.zeros(1, 1)) for codes in self.codes]


def judge(run, prompts, codes, painting):
    """Of the stock scheduler's pictures: "SSIM 0.812, 75.0% of objects as drawn"."""
    images = []
    for text, own in zip(prompts.texts, codes):
        latents = train.paint(run.pipe, text, own[None], painting, 10**9)
        images += train.to_images(run.pipe, latents, 1)
    ssim = rewards.ssim(images, None, prompts.targets).mean()
    return f"SSIM {ssim:.4f}, {share_as_drawn(images, prompts.targets):.1%} of objects as drawn"


def share_as_drawn(images, drawings):
    """The share of the drawn objects that the pictures show in the same place, shape and colour."""
    same = []
    for image, drawing in zip(images, drawings):
        pairs = zip(check.look(image), check.look(drawing))
        same += [thing == drawn for thing, drawn in pairs if drawn is not None]
    return sum(same) / len(same)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.usage = "%(prog)s [--bits N] [flags of train.py, such as --steps 25]"
    words = "of the decoder's matrices (default: 3)"
    parser.add_argument("--bits", type=int, default=3, help=words)
    options, flags = parser.parse_known_args()
    settings = train.parse_settings(["--model", TINY, *FLAGS.split(), *flags])
    torch.set_num_threads(1)  # see device in runtime/ranks.py
    pipe, adapted = train.build(load_rounded(options.bits), settings, CPU)
    trainers = train.make_trainers(settings, pipe, adapted, CPU)
    run = DrawnRun(pipe, *trainers, settings.train, train.Phases(CPU))
    sampling, _ = train.sampling_of(settings)
    prompts, codes = drawings(settings.prompts)
    held_out = drawings(settings.eval_prompts)
    before = judge(run, *held_out, sampling.painting)
    name = f"{options.bits} bits, seed {settings.seed}"
    print(f"{name}: {before}, {len(held_out[0])} held-out drawings")
    likeness = rewards.parse_rewards(settings.reward)
    order = torch.Generator().manual_seed(settings.seed)
    for step in range(settings.steps):
        rows = torch.randperm(len(prompts), generator=order)[: settings.prompts_per_step].tolist()
        run.codes = codes[rows]
        train.set_learning_rates(run.trainers, settings, step)
        seed = train.seed_of_step(step + 1, settings.seed, settings.prompts_per_step)
        train.grpo_step(run, sampling, likeness, prompts.take(rows), seed)
        if (step + 1) % 25 == 0 or step + 1 == settings.steps:
            print(f"step {step + 1}: {judge(run, *held_out, sampling.painting)}", flush=True)


if __name__ == "__main__":
    main()
