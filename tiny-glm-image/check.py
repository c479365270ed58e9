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
from runtime.pictures import save_grid

MATCH = 0.85  # a shape counts from this overlap (intersection over union) with one of the shapes as drawn
SEED = 10**9  # training uses smaller ones


def nearest(colour, palette):
    return min(palette, key=lambda name: np.abs(np.array(palette[name]) - colour).sum())


def describe(image):
    """(shape, colour, background) of a picture, or None when it shows no clean shape.

    The corners give the background, what differs from it is the figure, and the figure's outline is compared with every
    shape at every radius the model was taught. Blank, broken or two-coloured figures overlap with none well enough.
    """
    pixels = np.asarray(image.convert("RGB").resize((make.SIZE, make.SIZE))).astype(int)
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


def shows(images, prompts, targets=None):
    """A reward, see rewards.py: 1 where the picture shows what 'a red circle on a pink background' says, else 0.

    NaN for prompts that are no such caption.
    """
    captions = {make.caption(*attributes) for attributes in make.ALL}
    found = [describe(image) for image in images]
    right = [float(words is not None and make.caption(*words) == p) for words, p in zip(found, prompts, strict=True)]
    return torch.tensor([value if p in captions else float("nan") for value, p in zip(right, prompts, strict=True)])


def paint(samples, prompts, adapter=None):
    """Rollouts of `samples` pictures for each prompt, by the shipped model or with an adapter; rewards: see shows."""
    settings = train.parse_settings(["--model", train.TINY, "--group-size", str(samples), "--combine", "sum"])
    device = torch.device("cpu")
    trainer = train.build_trainer(train.load(settings, device), settings, {"shows": (shows, 1.0)}, device)
    if adapter:
        trainer.model.load_adapter(adapter, "trained")
        trainer.model.set_adapter("trained")
    groups = [prompts[i : i + 4] for i in range(0, len(prompts), 4)]
    return [rollout for i, group in enumerate(groups) for rollout in trainer.rollout(group, seed=SEED + 4 * i)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--adapter", help="folder of a trained adapter")
    parser.add_argument("--samples", type=int, default=8, help="pictures a prompt, 2 or more (default: 8)")
    parser.add_argument("--sheet", default="check.png", help="where to save some of the pictures (default: check.png)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # see train.py
    rows = []
    for name in ("prompts", "heldout"):
        rollouts = paint(options.samples, (HERE / f"{name}.txt").read_text().splitlines(), options.adapter)
        right, words, total = 0, np.zeros(3, dtype=int), len(rollouts) * options.samples
        for rollout in rollouts:
            right += int(rollout.rewards.sum())
            for image in rollout.images:
                found = describe(image) or ("none", "none", "none")
                words += [f" {word} " in f" {rollout.prompt} " for word in found]
        for rollout in rollouts[:4]:
            captions = ["right" if reward else "wrong" for reward in rollout.rewards.tolist()]
            rows.append((rollout.prompt, list(zip(rollout.images, captions))[:8]))
        parts = ", ".join(f"{word} {n / total:.0%}" for word, n in zip(("shape", "colour", "background"), words))
        print(f"{name}.txt: {right}/{total} right = {right / total:.1%} ({parts})", flush=True)
    save_grid(options.sheet, rows, "first four prompts of training, then of those kept out", cell=128)


if __name__ == "__main__":
    main()
