"""All held-out captions before a run and after, nothing selected: assets/wall.png.

    python train.py --group-size 4 --out runs/1
    python benchmarks/wall.py runs/1 assets/wall.png

before-after.png shows captions that had no correct picture before. This also prints how many of
their pictures are correct by chance: judged again from other seeds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from benchmarks import variants
from runtime import evaluation
from runtime.data import evenly
from runtime.pictures import RED
from runtime.settings import TINY

OTHER_SEED = 7


def judged(adapter):
    """Of each held-out caption four pictures, and whether they are correct: from two seeds."""
    settings, data, run = variants.loaded(TINY, adapter)
    shown = evenly(data.held_out, settings.eval_count)  # as in an evaluation
    seeds = evaluation.SEEDS["held out"], OTHER_SEED
    results = [evaluation.judge(run, settings, data.judges, shown, seed) for seed in seeds]
    name = settings.frame_by
    return [[(rewards[name].tolist(), images) for rewards, images in each] for each in results]


def wall(results):
    """A column for each caption, in two rows of columns; a red frame is a picture that is wrong."""
    cell = 37  # pixels
    sheet = Image.new("RGB", (24 * cell, 8 * cell), "white")
    for i, (correct, images) in enumerate(results):
        for j, image in enumerate(images):
            left, top = i % 24 * cell, (i // 24 * 4 + j) * cell
            sheet.paste("white" if correct[j] else RED, (left, top, left + cell, top + cell))
            sheet.paste(image.resize((cell - 4, cell - 4)), (left + 2, top + 2))
    return sheet


def main(run, file):
    results = {"before": judged(None), "after": judged(run)}
    before, after = (wall(shown) for shown, _ in results.values())
    both = Image.new("RGB", (before.width, 2 * before.height + 12), "white")
    both.paste(before, (0, 0))
    both.paste(after, (0, before.height + 12))
    both.save(file)

    of_before, _ = results["before"]
    none = [i for i, (correct, _) in enumerate(of_before) if not any(correct)]
    print(f"{len(none)} captions had no correct picture before; of {4 * len(none)} are correct:")
    for name, evaluations in results.items():
        shown, again = (sum(sum(each[i][0]) for i in none) for each in evaluations)
        print(f"{name}: {shown:.0f} and, from other seeds, {again:.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
