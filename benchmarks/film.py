"""The film at the head of the README: what each evaluation of a run has painted.

    python train.py --group-size 4 --eval-every 1 --out runs/film
    python benchmarks/film.py runs/film assets/before-after.gif
"""

import sys
from pathlib import Path

from PIL import Image


def main(run, file):
    sheets = sorted(Path(run, "evaluation").glob("*/sheet.png"))
    frames = [Image.open(sheet).convert("P", palette=Image.Palette.ADAPTIVE) for sheet in sheets]
    milliseconds = [2000, *[300] * (len(frames) - 2), 4000]
    options = {"append_images": frames[1:], "duration": milliseconds, "loop": 0, "optimize": True}
    frames[0].save(file, save_all=True, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
