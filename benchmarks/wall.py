"""All held-out captions before a run and after, nothing selected: assets/wall.png.

python train.py --group-size 4 --out runs/1
python benchmarks/wall.py runs/1 assets/wall.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from benchmarks import command, variants
from runtime import evaluation
from runtime.data import evenly
from runtime.settings import TINY
from viewer.sheets import RED

CELL = 37  # pixels


def wall(adapter):
    """A column for each caption, in two rows of columns; a red frame is a picture that is wrong."""
    settings, data, run = variants.loaded(TINY, adapter)
    shown = evenly(data.held_out, settings.eval_count)  # as in an evaluation
    results = evaluation.score_prompts(
        run, settings, variants.JUDGES, shown, evaluation.SEEDS["held out"]
    )
    sheet = Image.new("RGB", (24 * CELL, 8 * CELL), "white")
    for i, rewards, images in results:
        for j, (image, correct) in enumerate(zip(images, rewards["correct"])):
            left, top = i % 24 * CELL, (i // 24 * 4 + j) * CELL
            sheet.paste("white" if correct else RED, (left, top, left + CELL, top + CELL))
            sheet.paste(image.resize((CELL - 4, CELL - 4)), (left + 2, top + 2))
    return sheet


def main(run, file):
    before, after = wall(None), wall(run)
    both = Image.new("RGB", (before.width, 2 * before.height + 12), "white")
    both.paste(before, (0, 0))
    both.paste(after, (0, before.height + 12))
    both.save(file)


if __name__ == "__main__":
    command.run(main, __doc__, "RUN", "FILE")
