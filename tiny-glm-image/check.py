"""Count how often tiny-glm-image paints what its prompt says, judged by pixels and not by any reward.

    python tiny-glm-image/check.py                      # the model as shipped
    python tiny-glm-image/check.py --adapter runs/1     # after training: a run's folder, or that of an adapter

Prints the share of right pictures for captions and for edits, those of training and those kept out of it, and saves a
sheet of them.
It is what `vqa` of rewards.py is for real pictures: a judge that reads the prompt.
"""

import functools
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from tqdm import trange

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import make

MATCH = 0.85  # a shape counts from this overlap (intersection over union) with one of the shapes as drawn
FILES = {"prompts": None, "heldout": None, "edits": "sources", "heldout-edits": "heldout-sources"}  # and sources
SEED = 10**9  # not that of evaluations, nor of training by default


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


def wanted(prompt, source=None):
    """(shape, colour, background) that a caption names, or that a wish makes of its source; else None."""
    if prompt in make.WISHES:
        before = source and describe(source)
        return before and make.edited(before, *make.WISHES[prompt])
    return next((attributes for attributes in make.ALL if make.caption(*attributes) == prompt), None)


def shows(images, prompts, targets=None, sources=None):
    """A reward, see rewards.py: 1 where the picture shows what its prompt says, else 0.

    'a red circle on a pink background' says it all; 'make it blue' says it of its source, which keeps all else. NaN for
    other prompts, and for sources that show no clean shape. sources: a picture or None for each image, or None.
    """
    asked = [wanted(*pair) for pair in zip(prompts, sources or [None] * len(prompts), strict=True)]
    right = [float(describe(image) == words) for image, words in zip(images, asked, strict=True)]
    return torch.tensor([float("nan") if words is None else value for value, words in zip(right, asked, strict=True)])


def paint(samples, prompts, adapter=None, sources=None):
    """`samples` pictures of each prompt, prompt after prompt, by the shipped model or with the adapters of a folder.

    sources: the pictures that the prompts are to change, or None.
    """
    import train  # here, for as a reward this file has no use for it
    from runtime.data import Prompts, Source
    from runtime.log import Phases
    from runtime.settings import TINY

    settings = train.parse_settings(
        ["--model", TINY, "--group-size", str(samples), *(["--adapter", adapter] if adapter else [])]
    )
    device = torch.device("cpu")
    pipe = train.load(settings, device)
    sources = sources and [Source(image) for image in sources]
    train.read_sources(pipe, sources or [], device)
    pipe, policy, _ = train.build(pipe, settings, device)
    run = train.Run(pipe, policy, None, Phases(device))
    images = []
    for i in trange(0, len(prompts), 4, unit="prompts"):
        some = Prompts(prompts, None, sources).take(range(i, min(i + 4, len(prompts))))
        images += train.rollout(run, settings, {}, some, SEED + i).images
    return images


def count_right(name, folder, options):
    """Prints the share of right pictures for the prompts in a file. Returns the first four rows of a sheet.

    folder: of the pictures that the prompts are to change, or None.
    """
    prompts = (HERE / f"{name}.txt").read_text().splitlines()
    sources = folder and [Image.open(file) for file in sorted((HERE / folder).iterdir())]
    images = paint(options.samples, prompts, options.adapter, sources)
    asked = [wanted(*pair) for pair in zip(prompts, sources or [None] * len(prompts), strict=True)]
    asked = [attributes for attributes in asked for _ in range(options.samples)]
    shown = [describe(image) or ("none", "none", "none") for image in images]
    words = np.array(shown) == np.array(asked)  # (pictures, 3): its shape, colour and background
    right = words.all(1)
    parts = ", ".join(f"{word} {n:.0%}" for word, n in zip(("shape", "colour", "background"), words.mean(0)))
    print(f"{name}.txt: {int(right.sum())}/{len(images)} right = {right.mean():.1%} ({parts})", flush=True)
    cells = list(zip(images, ("right" if r else "wrong" for r in right.tolist()), strict=True))
    rows = [cells[i * options.samples :][: options.samples] for i in range(4)]
    first = [[(source, "to edit")] for source in sources or ()] or [[] for _ in prompts]
    return [(prompt, edited + row[:8]) for prompt, edited, row in zip(prompts, first, rows)]


def main():
    from runtime import UserError
    from runtime.pictures import save_grid
    from runtime.settings import Parser, number

    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--adapter", help="folder of a run, or of a trained adapter")
    parser.add_argument("--samples", type=number(int, "[1, inf)"), default=8, help="pictures a prompt (default: 8)")
    parser.add_argument("--sheet", default="check.png", help="where to save some of the pictures (default: check.png)")
    try:
        options = parser.parse_args()
        torch.set_num_threads(1)  # see train.py
        rows = [row for file, folder in FILES.items() for row in count_right(file, folder, options)]
        title = "first four captions of training, then of those kept out; edits likewise"
        save_grid(options.sheet, rows, title, cell=128)
    except (UserError, OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        # An adapter of another model, a damaged one, a folder that cannot be written to.
        print("error:", str(error).strip().split("\n")[0], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
