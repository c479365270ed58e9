"""One picture after training beside the best of k before: what RL changes (docs/worth.md).

python benchmarks/best_of.py                     the table and the figure, from best-of.csv
python benchmarks/best_of.py runs/1              a run of the tiny model beside its start
python benchmarks/best_of.py runs/1 --add NAME   and keeps its numbers in best-of.csv
"""

import argparse
import csv
import sys
from dataclasses import replace
from itertools import groupby
from math import comb
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import variants
from rewards import variety
from runtime import evaluation
from runtime.log import evaluation_metrics

CSV = ROOT / "benchmarks" / "best-of.csv"
PICTURES = 64  # of each held-out caption
SEED = 2**29 + 2**21  # + i for caption i: nothing else samples from these
KS = [2**i for i in range(7)]
BEFORE = "before training"
COLOURS = {BEFORE: "#444", "default run": "#2d6cae", variants.SHUFFLED: "#c62828"}
COLUMNS = ["run", "type", "caption", "correct", "distinct", "distinct correct", "variety"]


def measured(name, folder):
    """The lines of a run, a line per caption; without a folder, of what all runs start from."""
    settings, data, run = variants.loaded(variants.start_of("shipped"), folder)
    settings = replace(settings, group_size=PICTURES, prompts_per_step=1)
    results = evaluation.judge(run, settings, variants.JUDGES, data.held_out, SEED)
    for prompt, (rewards, images) in zip(data.held_out, results):
        correct = rewards["correct"]
        distinct = dict(zip([image.tobytes() for image in images], correct.tolist()))
        numbers = int(correct.sum()), len(distinct), int(sum(distinct.values()))
        spread = f"{variety(images, None, None, PICTURES).mean():.5f}"
        yield dict(zip(COLUMNS, [name, prompt.type, prompt.text, *numbers, spread]))


def curve(rows):
    """pass@k for KS: (mean of the six types, its standard error over captions).

    The chance that at least one of k pictures is correct, without bias from n of which c are: 1 -
    C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374). rows: of one seed, or of several.
    """
    types = {row["caption"]: row["type"] for row in rows}
    wrong = [PICTURES - int(row["correct"]) for row in rows]
    for k in KS:
        values = torch.tensor([1 - comb(each, k) / comb(PICTURES, k) for each in wrong])
        values = values.view(-1, len(types)).mean(0)[:, None]  # a caption's mean over seeds
        metrics = evaluation_metrics("all", {"reward": values}, [*types.values()])
        yield metrics["all, mean of types"]["reward"]


def table(rows):
    """Lines of docs/worth.md; of runs that differ in their seed alone the means."""
    lines = [f"|  | pass@1 | pass@64 | {' | '.join(COLUMNS[4:])} |", "|---" * 6 + "|"]
    for name, own in groupby(rows, lambda row: row["run"].partition(", seed")[0]):
        own = [*own]
        (one, error), *_, (last, _) = curve(own)
        cells = [f"{one:.1%} +- {error:.1%}", f"{last:.1%}"]
        cells += [f"{np.mean([float(row[key]) for row in own]):.3g}" for key in COLUMNS[4:]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows, file):
    """pass@k of the runs that have a colour, a line per seed."""
    sheet = Image.new("RGB", (1760, 640), "white")
    pen = ImageDraw.Draw(sheet)
    place = variants.plane(pen, (130, 1270), KS, (0.6, 0.7, 0.8, 0.9, 1), "k of pass@k")
    for run, own in groupby(rows, lambda row: row["run"]):
        if colour := COLOURS.get(run.partition(", seed")[0]):
            pen.line([place(k, mean) for k, (mean, _) in zip(KS, curve([*own]))], colour, 5)
    for i, (name, colour) in enumerate(COLOURS.items()):
        pen.text((1320, 400 + 50 * i), name, colour, anchor="lm")
    sheet.reduce(2).save(file)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="One picture after, beside the best of k before.")
    parser.add_argument("run", nargs="?", type=Path, help="a run's folder; none: the start")
    parser.add_argument("--add", metavar="NAME", help="keep the numbers in best-of.csv")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [*csv.DictReader(CSV.read_text().splitlines())]
    if not (options.run or options.add):
        (ROOT / "runs").mkdir(exist_ok=True)
        draw(rows, ROOT / "runs" / "best-of.png")
        return print(table(rows))
    new = [*measured(options.add or str(options.run), options.run)]
    print(table([*(row for row in rows if row["run"] == BEFORE), *new]))
    if options.add:
        with open(CSV, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(new)


if __name__ == "__main__":
    main()
