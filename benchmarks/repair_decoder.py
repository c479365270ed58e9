"""Repair a decoder that was rounded to a few bits, by `train.py --train decoder`: the reward is
likeness to its codes.

    python benchmarks/repair_decoder.py --bits 2 --steps 25

Each row of a matrix is rounded to 2^bits levels between its least and largest weight. The stock
scheduler's pictures are judged by the drawings that their codes were taken from, on captions held
out: by SSIM, and, since that knows little of colours, by the share of objects that check.py finds
as drawn, both shape and colour in their place.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import check
import make
import torch

import rewards
import train
from runtime.data import Prompts, read_prompts
from runtime.log import Phases
from runtime.settings import TINY

CPU = torch.device("cpu")
FLAGS = "--train decoder --group-size 8 --micro-batch-size 8 --prompts-per-step 8 --steps 200 --kl-coef 0 --reward ssim:1,mse:1"


def load_rounded(bits, settings):
    """The pipeline, with each matrix of the decoder rounded."""
    pipe = train.load(settings, CPU)
    for layer in pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear):
            least, largest = layer.weight.data.aminmax(dim=1, keepdim=True)
            step = (largest - least).clamp(min=1e-12) / (2**bits - 1)
            layer.weight.data = ((layer.weight.data - least) / step).round() * step + least
    return pipe


def drawings(file):
    """(caption, drawing, its large codes (1, 16)) of each caption."""
    texts = read_prompts(file, None).texts
    scenes = [make.MEANING[text].scene() for text in texts]
    codes = make.codes_of(scenes, make.corner_codes(make.make_codebook()))[:, 256:].split(1)
    return list(zip(texts, map(make.draw, scenes), codes, strict=True))


def judge(pipe, examples, settings):
    """Of the stock scheduler's pictures: "SSIM 0.812, 75.0% of objects as drawn"."""
    images = [
        train.develop(pipe, train.paint(pipe, text, codes, settings, 10**9))[0]
        for text, _, codes in examples
    ]
    drawn = [drawing for _, drawing, _ in examples]
    ssim = rewards.ssim(images, None, drawn).mean()
    return f"SSIM {ssim:.4f}, {share_as_drawn(images, drawn):.1%} of objects as drawn"


def share_as_drawn(images, drawings):
    """Of all objects in the drawings, the share that the pictures show in the same place, shape and
    colour."""
    pairs = [
        pair
        for both in zip(images, drawings, strict=True)
        for pair in zip(*map(check.look, both), strict=True)
    ]
    found = [seen == drawn for seen, drawn in pairs if drawn is not None]
    return sum(found) / len(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.usage = "%(prog)s [--bits N] [flags of train.py, such as --steps 25]"
    parser.add_argument(
        "--bits", type=int, default=3, help="of the decoder's matrices (default: 3)"
    )
    options, flags = parser.parse_known_args()
    settings = train.parse_settings(["--model", TINY, *FLAGS.split(), *flags])
    torch.set_num_threads(1)  # see device in runtime/ranks.py
    pipe, policy, decoder = train.build(load_rounded(options.bits, settings), settings, CPU)
    groups = []  # in the place of what the policy samples: the codes of the step's drawings
    run = train.Run(
        pipe, SimpleNamespace(model=policy.model, sample=lambda *_: groups), decoder, Phases(CPU)
    )
    training, held_out = drawings(settings.prompts), drawings(settings.eval_prompts)
    before = judge(pipe, held_out, settings)
    print(f"{options.bits} bits, seed {settings.seed}: {before}, {len(held_out)} held-out drawings")
    likeness = rewards.parse_rewards(settings.reward)
    chosen = torch.Generator().manual_seed(settings.seed)
    for step in range(1, settings.steps + 1):
        rows = torch.randperm(len(training), generator=chosen)[: settings.prompts_per_step].tolist()
        texts, targets, codes = zip(*(training[row] for row in rows), strict=True)
        groups[:] = [
            SimpleNamespace(tokens=tokens, old_logprobs=torch.zeros(1)) for tokens in codes
        ]
        train.grpo_step(
            run, settings, likeness, Prompts(texts, targets), train.seed_of_step(step, settings)
        )
        if step % 25 == 0 or step == settings.steps:
            print(f"step {step}: {judge(pipe, held_out, settings)}", flush=True)


if __name__ == "__main__":
    main()
