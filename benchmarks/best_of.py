"""One picture after training beside the best of k before: what RL changes (docs/worth.md).

python benchmarks/best_of.py               the table and the figure, from best-of.csv
python benchmarks/best_of.py runs/1        a run of the tiny model beside its start
python benchmarks/best_of.py runs/1 NAME   and keeps its numbers in best-of.csv

In place of a run's folder "before training" is the start itself.
"""

import csv
import sys
from dataclasses import replace
from itertools import groupby
from math import comb
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import command, variants
from benchmarks.variants import BEFORE
from rewards import variety
from runtime import evaluation
from runtime.evaluation import evaluation_metrics

CSV = ROOT / "benchmarks" / "best-of.csv"
PICTURES = 64  # of each held-out caption
SEED = 2**29 + 2**21  # + i for caption i: nothing else samples from these
KS = [2**i for i in range(7)]
COLOURS = {BEFORE: "#444", "default run": "#2d6cae", variants.SHUFFLED: "#c62828"}
COLUMNS = ["run", "type", "caption", "correct", "distinct", "distinct correct", "variety"]


def measured(name, folder):
    """The lines of a run, a line per caption; without a folder, of the start."""
    settings, data, run = variants.loaded(variants.start_of("shipped"), folder)
    settings = replace(settings, group_size=PICTURES, prompts_per_step=1)
    results = evaluation.score_prompts(run, settings, variants.JUDGES, data.held_out, SEED)
    for row, rewards, images in results:
        prompt = data.held_out[row]
        correct = rewards["correct"]
        distinct = dict(zip([image.tobytes() for image in images], correct.tolist()))
        numbers = int(correct.sum()), len(distinct), int(sum(distinct.values()))
        spread = f"{variety(images, None, None, PICTURES).mean():.5f}"
        yield dict(zip(COLUMNS, [name, prompt.type, prompt.text, *numbers, spread]))


def curve(rows, over="all, mean of types"):
    """pass@k for KS: (a mean of the six types or over "all" captions, its error over captions).

    The chance that at least one of k pictures is correct, without bias from n of which c are: 1 -
    C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374). rows: of one seed, or of several.
    """
    types = {row["caption"]: row["type"] for row in rows}
    wrong = [PICTURES - int(row["correct"]) for row in rows]
    for k in KS:
        values = torch.tensor([1 - comb(each, k) / comb(PICTURES, k) for each in wrong])
        values = values.view(-1, len(types)).mean(0)[:, None]  # a caption's mean over seeds
        metrics = evaluation_metrics("all", {"reward": values}, [*types.values()])
        yield metrics[over]["reward"]


def by_run(rows):
    """[(name without its seed, rows of all its seeds)], in the order of the file."""
    groups = groupby(rows, lambda row: row["run"].partition(", seed")[0])
    return [(name, [*own]) for name, own in groups]


def table(rows):
    """Lines of docs/worth.md; of runs that differ in their seed alone the means."""
    lines = []
    for name, own in by_run(rows):
        (one, error), *_, (last, _) = curve(own)
        means = [np.mean([float(row[key]) for row in own]) for key in COLUMNS[4:]]
        shares = f"{one:.1%} +- {error:.1%}", f"{last:.1%}"
        lines.append([name, *shares, *map("{:.3g}".format, means)])
    return variants.markdown(["", "pass@1", "pass@64", *COLUMNS[4:]], lines)


def draw(rows, file):
    """pass@k of the runs that have a colour, a line per seed."""
    figure, (axes,) = variants.panels(3.2, "k of pass@k")
    for name, own in by_run(rows):
        if colour := COLOURS.get(name):
            seeds = groupby(own, lambda row: row["run"])
            shares = [[share for share, _ in curve([*each])] for _, each in seeds]  # (seeds, KS)
            first, *_ = axes.plot(KS, np.transpose(shares), color=colour)
            first.set_label(name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(file)


def main(run=None, name=None):
    torch.set_num_threads(1)
    rows = [*csv.DictReader(CSV.read_text().splitlines())]
    if run is None:
        print(table(rows))
        variants.OUT.mkdir(parents=True, exist_ok=True)
        return draw(rows, variants.OUT / "best-of.png")
    if name in (row["run"] for row in rows):
        sys.exit(f"best-of.csv has {name!r} already: give another name, or take its lines out")
    new = [*measured(name or run, None if run == BEFORE else run)]
    print(table([*(row for row in rows if row["run"] == BEFORE), *new]))
    if name:
        variants.append(CSV, COLUMNS, new)


if __name__ == "__main__":
    command.run(main, __doc__, "[RUN]", "[NAME]")
