"""The film at the head of the README: what each evaluation of a run of the tiny model has painted.

python train.py --model tiny-glm-image --eval-every 1 --out runs/1
python benchmarks/film.py runs/1 assets/before-after.gif
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from viewer import read
from viewer.sheets import draw_grid


def frame(folder, evaluation):
    """What an evaluation shows; a wrong picture has a red frame."""
    rows = []
    for shown in evaluation["shown"]:
        verdicts = zip(shown["pictures"], shown["reward/correct"])
        cells = [(Image.open(folder / file), "", correct == 0) for file, correct in verdicts]
        rows.append((shown["prompt"], [cells]))
    share = evaluation["held out"]["reward/correct"][0]
    title = f"step {evaluation['step']}: {share:.0%} of all held-out pictures are correct"
    return draw_grid([title], rows).reduce(2)


def main(folder, file):
    sheets = [frame(Path(folder), evaluation) for evaluation in read(folder).evaluations]
    palette = sheets[-1].quantize(256)  # one for all: what stays the same is stored once
    frames = [sheet.quantize(palette=palette, dither=Image.Dither.NONE) for sheet in sheets]
    milliseconds = [2000, *[400] * (len(frames) - 2), 4000]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", help="of the run")
    parser.add_argument("file", help="to write, a GIF")
    main(**vars(parser.parse_args()))
