"""Repair a decoder that was rounded to a few bits, with decoder.py: the reward is likeness to what its codes say.

    python benchmarks/repair_decoder.py --bits 3        # --bits 32 leaves the decoder as it is

A quantised GLM-Image is what small cards run, and its decoder pays for that in detail. Here the tiny model's decoder is
rounded, each row of a matrix to 2^bits levels between its least and largest weight, and an adapter beside it is trained
on the training captions. The stock sampler's pictures are judged by the drawings that their codes were taken from, on
captions held out: by SSIM, and, since that knows little of colours, by the share of objects that check.py finds as drawn,
both shape and colour in their place. The reward is SSIM and MSE.
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import check
import make
import torch

import rewards
import train
from glm_image.decoder import repeat_for_steps
from grpo import set_advantages
from runtime.data import read_prompts
from runtime.pictures import save_grid
from runtime.settings import TINY

CPU = torch.device("cpu")


def load_rounded(bits, settings):
    """The pipeline, with each matrix of the decoder rounded."""
    pipe = train.load(settings, CPU)
    for layer in pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear) and bits < 32:
            least, largest = layer.weight.data.aminmax(dim=1, keepdim=True)
            step = (largest - least).clamp(min=1e-12) / (2**bits - 1)
            layer.weight.data = ((layer.weight.data - least) / step).round() * step + least
    return pipe


def drawings(settings):
    """For training, and held out: (caption, drawing, its large codes (1, 16)) of each caption."""
    corners = make.corner_codes(make.make_codebook())
    files = []
    for file in (settings.prompts, settings.eval_prompts):
        texts = read_prompts(file, None).texts
        scenes = [make.MEANING[text].scene() for text in texts]
        codes = make.codes_of(scenes, corners)[:, 256:].split(1)
        files.append(list(zip(texts, map(make.draw, scenes), codes, strict=True)))
    return files


def judge(pipe, examples, settings):
    """The stock sampler's pictures, and "SSIM 0.812, 75.0% of objects as drawn"."""
    images = [train.paint(pipe, text, codes, settings, seed=10**9)[0] for text, _, codes in examples]
    drawn = [drawing for _, drawing, _ in examples]
    likeness = rewards.ssim(images, None, drawn).mean().item()
    return images, f"SSIM {likeness:.4f}, {share_as_drawn(images, drawn):.1%} of objects as drawn"


def share_as_drawn(images, drawings):
    """Of all objects in the drawings, the share that the pictures show in the same place, shape and colour."""
    pairs = [pair for both in zip(images, drawings, strict=True) for pair in zip(*map(check.look, both), strict=True)]
    found = [seen == drawn for seen, drawn in pairs if drawn is not None]
    return sum(found) / len(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bits", type=int, default=3, help="of the decoder's matrices (default: 3)")
    parser.add_argument("--steps", type=int, default=200, help="training steps of 64 pictures (default: 200)")
    parser.add_argument("--lr", default="1e-3", help="learning rate (default: 1e-3)")
    parser.add_argument("--kl-coef", default="0", help="weight of the KL penalty (default: 0)")
    parser.add_argument("--iterations", default="1", help="optimiser steps on each step's pictures (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of pictures, noise and adapter (default: 0)")
    parser.add_argument("--shuffle", action="store_true", help="a control: rewards go to wrong paintings of a group")
    parser.add_argument("--sheet", help="where to save pictures before and after")
    options = parser.parse_args()
    torch.set_num_threads(1)  # see train.py
    flags = ["--model", TINY, "--train", "decoder", "--group-size", "8", "--micro-batch-size", "8"]
    flags += ["--decoder-lr", options.lr, "--kl-coef", options.kl_coef, "--iterations", options.iterations]
    settings = train.parse_settings([*flags, "--seed", str(options.seed)])
    pipe, policy, decoder = train.build(load_rounded(options.bits, settings), settings, CPU)
    run = train.Run(pipe, policy, decoder, None)
    likeness = rewards.parse_rewards("ssim:1,mse:1")
    weights = rewards.weights_of(likeness)
    training, held_out = drawings(settings)
    pictures_before, before = judge(pipe, held_out, settings)
    pictures_after, count = pictures_before, len(held_out)
    print(f"{options.bits} bits, seed {options.seed}: {before}, {count} held-out drawings", flush=True)
    started, chosen = time.time(), torch.Generator().manual_seed(options.seed)
    for step in range(1, options.steps + 1):
        texts, targets, codes = zip(
            *(training[i] for i in torch.randperm(len(training), generator=chosen)[:8].tolist())
        )
        images = []
        steps = []  # denoising steps
        seed = train.seed_of_step(step, settings)
        for i, (text, sequence) in enumerate(zip(texts, codes, strict=True)):
            painted, path = train.paint_group(run, settings, text, sequence, seed + i)
            images += painted
            steps += path
        raw_rewards = rewards.score(likeness, images, texts, targets)
        combined = rewards.combine(raw_rewards, weights, settings.group_size, "zscore")
        set_advantages(steps, repeat_for_steps(combined, steps))
        if options.shuffle:
            for denoising_step in steps:
                denoising_step.advantages = denoising_step.advantages.roll(1)  # each painting gets its neighbour's
        decoder.add_reference(steps)
        metrics = decoder.update(steps)
        if step % 25 == 0 or step == options.steps:
            pictures_after, after = judge(pipe, held_out, settings)
            reward, seconds = rewards.combine(raw_rewards, weights).mean(), (time.time() - started) / step
            print(f"step {step}: {after}; reward of this step's paths {reward:.4f}, ", end="")
            print(f"kl {metrics['kl']:.2g}, " if settings.kl_coef > 0 else "", end="")
            print(f"norm {metrics['grad_norm']:.2g}, {seconds:.2f} s a step", flush=True)
    if options.sheet:
        rows, title = [], f"a decoder of {options.bits} bits, before and after {options.steps} steps"
        for i in range(1, count, max(count // 5, 1)):
            text, drawing, _ = held_out[i]
            rows.append((text, [(drawing, "drawn"), (pictures_before[i], "before"), (pictures_after[i], "after")]))
        save_grid(options.sheet, rows, title, cell=128)


if __name__ == "__main__":
    main()
