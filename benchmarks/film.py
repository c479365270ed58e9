"""The film at the head of the README: what each evaluation of a run has painted.

python train.py --model tiny-glm-image --eval-every 1 --out runs/1
python benchmarks/film.py runs/1 assets/before-after.gif
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from benchmarks import command
from runtime.errors import readable
from viewer.run import is_wrong, read
from viewer.sheets import draw_grid, side_by_side


def evaluations(folder):
    """Of each evaluation its step, the share of all pictures that are correct, and rows.

    A row is (caption, [(picture, whether it is correct)]). folder: of a run of the tiny model.
    """
    with readable("make a film"):
        run = read(folder)
    for evaluation in run.evaluations:
        rows = []
        for shown in evaluation["shown"]:
            pictures = [run.open(place) for place in shown["pictures"]]
            correct = [not is_wrong(evaluation, shown, j) for j in range(len(pictures))]
            rows.append((shown["prompt"], [*zip(pictures, correct)]))
        yield evaluation["step"], evaluation["held out"]["reward/correct"][0], rows


def frame(step, share, rows):
    """Half of the captions beside the other half, for the width of a page."""
    verdicts = [is_correct for _, cells in rows for _, is_correct in cells]
    rows = [
        (caption, [(x, "", not is_correct) for x, is_correct in cells]) for caption, cells in rows
    ]
    half = -(-len(rows) // 2)
    when = f"after {step} steps" if step else "before training"
    left = draw_grid(f"{when}: {sum(verdicts)} of {len(verdicts)} correct", rows[:half])
    right = draw_grid(f"all held-out captions: {share:.0%} correct", rows[half:])
    return side_by_side(left, right).reduce(2)


def main(run, file):
    sheets = [frame(*each) for each in evaluations(run)]
    palette = sheets[-1].quantize(256)  # one for all: what stays the same is stored once
    frames = [sheet.quantize(palette=palette, dither=Image.Dither.NONE) for sheet in sheets]
    milliseconds = [2000, *[400] * (len(frames) - 2), 4000]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)


if __name__ == "__main__":
    command.run(main, __doc__, "RUN", "FILE")
