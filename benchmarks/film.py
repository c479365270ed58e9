"""The film at the head of the README: what each evaluation of a run has painted.

python train.py --model tiny-glm-image --eval-every 1 --out runs/1
python benchmarks/film.py runs/1 assets/before-after.gif
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import numpy as np
from check import correct
from PIL import Image

import train
from benchmarks import command
from runtime.data import evenly, read_prompts
from runtime.evaluation import SHOWN
from runtime.folder import read_jsonl
from runtime.record import draw_grid


def evaluations(run):
    """Of each evaluation its step, the share of all pictures that are correct, and rows of some.

    A row is (caption, [(picture, whether it is correct)]). run: the folder of a run of the tiny
    model.
    """
    settings = train.parse_settings(["--model", "tiny-glm-image"])
    held_out = evenly(read_prompts(settings, "eval_"), settings.eval_count)
    records = read_jsonl(Path(run, "evaluation.jsonl"))
    captions = [held_out[row].text for row in records[0]["rows"]]
    for record in records:
        folder = Path(run, "evaluation", f"{record['step']:06d}")
        rows = []
        for i, caption in enumerate(captions, 1):
            pictures = [Image.open(folder / f"{i}-{j}.png") for j in range(1, SHOWN + 1)]
            rows.append((caption, [*zip(pictures, correct(pictures, [caption] * SHOWN).tolist())]))
        share = record["held out"]["reward/correct"][0]
        yield record["step"], share, rows


def frame(step, share, rows):
    """Two captions beside two others, for the width of a page."""
    rows = [
        (caption, [(x, "", not is_correct) for x, is_correct in cells]) for caption, cells in rows
    ]
    left = draw_grid(f"after {step} steps" if step else "before training", rows[:2])
    right = draw_grid(f"all held-out captions: {share:.0%} correct", rows[2:4])
    return Image.fromarray(np.hstack([left, right])).reduce(2)


def main(run, file):
    sheets = [frame(*each) for each in evaluations(run)]
    palette = sheets[-1].quantize(128)  # one for all: what stays the same is stored once
    frames = [sheet.quantize(palette=palette, dither=Image.Dither.NONE) for sheet in sheets]
    milliseconds = [2000, *[400] * (len(frames) - 2), 4000]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)


if __name__ == "__main__":
    command.run(main, __doc__, "RUN", "FILE")
