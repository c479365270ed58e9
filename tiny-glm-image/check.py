"""Count how often tiny-glm-image paints what its prompt says, judged by pixels and not by any reward.

    python tiny-glm-image/check.py                              # the model as shipped
    python tiny-glm-image/check.py --adapter runs/1/adapter     # after training

Prints the share of right pictures for the prompts of training and for those kept out of it, and saves a sheet of them.
"""

import argparse
import functools
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import make

import train
from grpo import generate_with_logprobs

MATCH = 0.85  # a shape counts from this overlap (intersection over union) with one of the shapes as drawn


def nearest(colour, palette):
    return min(palette, key=lambda name: np.abs(np.array(palette[name]) - colour).sum())


def describe(image):
    """(shape, colour, background) of a 128x128 picture, or None when it shows no clean shape.

    The corners give the background, what differs from it is the figure, and the figure's outline is compared with every
    shape at every radius the model was taught. Blank, broken or two-coloured figures overlap with none well enough.
    """
    pixels = np.asarray(image.convert("RGB")).astype(int)
    corners = np.concatenate([pixels[:8, :8].reshape(-1, 3), pixels[-8:, -8:].reshape(-1, 3)])
    background = np.median(corners, axis=0)
    figure = np.abs(pixels - background).sum(-1) > 120
    if figure.sum() < 200:
        return None
    colour = np.median(pixels[figure], axis=0)
    figure &= np.abs(pixels - colour).sum(-1) < 120
    overlap, shape = max(((figure & mask).sum() / (figure | mask).sum(), shape) for mask, shape in outlines())
    if overlap < MATCH:
        return None
    return shape, nearest(colour, make.COLOURS), nearest(background, make.BACKGROUNDS)


@functools.cache
def outlines():
    """Every shape at every radius as (mask (128, 128) bool, its name)."""

    def mask(shape, radius):
        return np.asarray(make.draw(shape, "yellow", "black", radius))[..., 0] > 140

    return [(mask(shape, radius), shape) for shape in make.SHAPES for radius in make.RADII]


def shows(image, prompt):
    """Whether the picture shows the shape, the colour and the background of 'a red circle on a pink background'."""
    found = describe(image)
    return found is not None and make.caption(*found) == prompt


def paint(policy, painter, prompt, settings, seed):
    prompt_ids, position_ids, count = train.encode_prompt(painter.processor, prompt, settings.height, settings.width)
    tokens, _, _ = generate_with_logprobs(
        policy,
        prompt_ids,
        count,
        num_samples=settings.group_size,
        position_ids=position_ids,
        num_codes=make.NUM_CODES,
        temperature=settings.temperature,
        top_p=settings.top_p,
        generator=torch.Generator().manual_seed(seed),
    )
    return train.decode_images(painter, prompt, tokens, settings, seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--adapter", help="folder of a trained adapter")
    parser.add_argument("--samples", type=int, default=8, help="pictures a prompt (default: 8)")
    parser.add_argument("--sheet", default="check.png", help="where to save some of the pictures (default: check.png)")
    options = parser.parse_args()
    settings, _ = train.parse_settings(["--model", train.TINY, "--group-size", str(options.samples)])
    policy, painter = train.split(train.load(settings, torch.device("cpu")), settings, torch.device("cpu"))
    if options.adapter:
        policy.load_adapter(options.adapter, "trained")
        policy.set_adapter("trained")
    policy.eval()
    rows = []
    for name in ("prompts", "heldout"):
        prompts = (HERE / f"{name}.txt").read_text().splitlines()
        right, words = 0, np.zeros(3, dtype=int)
        for i, prompt in enumerate(prompts):
            images = paint(policy, painter, prompt, settings, seed=10**9 + i)
            for image in images:
                right += shows(image, prompt)
                found = describe(image) or ("none", "none", "none")
                words += [f" {word} " in f" {prompt} " for word in found]
            cells = [(image, "right" if shows(image, prompt) else "wrong") for image in images[:8]]
            rows += [(prompt, cells)] if i < 4 else []
        total = len(prompts) * options.samples
        parts = ", ".join(f"{word} {n / total:.0%}" for word, n in zip(("shape", "colour", "background"), words))
        print(f"{name}.txt: {right}/{total} right = {right / total:.1%} ({parts})", flush=True)
    train.save_grid(options.sheet, rows, "first four prompts of training, then of those kept out", cell=128)


if __name__ == "__main__":
    main()
