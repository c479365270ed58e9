"""The tables of losses in docs/, from variants.csv and texts.csv."""

import argparse
import csv
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TASKS = "pictures", "texts"
# Fixed before the runs: these seeds choose a row's rate, the others judge the row at that rate.
CHOOSING, JUDGING = range(3), range(10, 15)
# The flags of variants.csv and the settings of texts.csv, as the tables name them.
STEPS = {
    "--kl-coef 0": "",
    "--kl-coef 0 --steps 11 --warmup-steps 10": "",  # dynamic sampling: about as many pictures
    "--kl-coef 0 --mini-batches 4": ", 4 mini-batches",
    "--kl-coef 0 --iterations 4": ", 4 passes",
    "--kl-coef 0 --iterations 4 --clip-range 1e9": ", 4 passes, no clip",
    "--kl-coef 0.2": ", KL 0.2",
    "--kl-coef 0 --prompts-per-step 32 --group-size 2": ", 32 x 2",
    "--kl-coef 0 --prompts-per-step 8 --group-size 8": ", 8 x 8",
    "--kl-coef 0 --prompts-per-step 4 --group-size 16": ", 4 x 16",
    "--reward many --warmup-steps 0 --steps 12 --kl-coef 0": ", gamed, KL 0",
    "--reward many --warmup-steps 0 --steps 12 --kl-coef 0.2": ", gamed, KL 0.2",
    "--reward many --warmup-steps 0 --steps 12 --kl-coef 1": ", gamed, KL 1",
    "1 1": "",
    "4 1": ", 4 mini-batches",
    "1 4": ", 4 passes",
}
# docs/copying.md says what each changes.
ROWS = ["GRPO", "Rewards shuffled", "REINFORCE", "No baseline", "Dr. GRPO", "RAFT", "REINFORCE++"]
ROWS += ["REINFORCE++-baseline", "DAPO's token mean", "DAPO's dynamic sampling", "GPG"]
ROWS += ["GRPO, 4 mini-batches", "GRPO, 4 passes", "GRPO, 4 passes, no clip"]
ROWS += [f"{x}, 4 mini-batches" for x in ("DAPO's two clip ranges", "GSPO", "CISPO")]


def read(name):
    file = ROOT / "benchmarks" / f"{name}.csv"
    return [*csv.DictReader(file.read_text("utf-8").splitlines())]


def read_runs(column="correct"):
    """{(task, row): {rate: {seed: share of correct pictures or answers}}}."""
    found = defaultdict(lambda: defaultdict(dict))
    rows = [("pictures", row["flags"], row) for row in read("variants") if row["loss"]]
    rows += [("texts", f"{row['mini_batches']} {row['iterations']}", row) for row in read("texts")]
    for task, steps, row in rows:
        of_rate = found[task, row["loss"] + STEPS[steps]][float(row["lr"])]
        of_rate[int(row["seed"])] = float(row.get(column) or "nan")
    return found


def means(rates):
    """{rate: mean of the choosing seeds}, of rates that all of them have tried."""
    tried = {rate: own for rate, own in sorted(rates.items()) if own.keys() >= {*CHOOSING}}
    return {rate: np.mean([own[seed] for seed in CHOOSING]) for rate, own in tried.items()}


def best_rate(rates):
    """Of equal means the lower rate; 0 where there is nothing to choose from."""
    return max(found := means(rates), key=found.get, default=0)


def judge(runs, values):
    """{(task, row): values of the judging seeds at its best rate}, of rows that have them all."""
    own = {key: values[key].get(best_rate(runs[key]), {}) for key in runs}
    own = {key: x for key, x in own.items() if x.keys() >= {*JUDGING}}
    return {key: np.array([x[seed] for seed in JUDGING]) for key, x in own.items()}


@cache
def quantile(p, freedom):
    """Of Student's t. At t = sqrt(freedom) tan(x) its density over x is as cos(x)^(freedom - 1)."""
    x = np.pi * np.linspace(-0.5, 0.5, 100_001)
    below = np.cumsum(np.cos(x) ** (freedom - 1))
    return freedom**0.5 * np.tan(np.interp(p, below / below[-1], x))


def reference(task, row):
    return task, "GRPO, 4 mini-batches" if "mini" in row and "GRPO" not in row else "GRPO"


def compare(values):
    """{(task, row): shares} -> {(task, row): (difference from its reference, half an interval)}.

    At least 93 of 100 such studies have all true differences in their intervals, as a test
    simulates.
    """
    pairs = [(key, x) for key in values if (x := reference(*key)) in values and x != key]
    own, found = {key: x.var(ddof=1) for key, x in values.items()}, {}
    for key, other in pairs:
        # Five runs tell a row's variance poorly: it is drawn to the mean variance of its task.
        pooled = np.mean([own[each] for each in own if each[0] == key[0]])
        n = len(values[key])
        a, b = ((2 * pooled + (n - 1) * own[each]) / (n + 1) / n for each in (key, other))
        freedom = (n + 1) * (a + b) ** 2 / (a * a + b * b)  # Welch and Satterthwaite's
        half = quantile(1 - 0.05 / (2 * len(pairs)), int(freedom)) * (a + b) ** 0.5
        found[key] = values[key].mean() - values[other].mean(), half
    return found


def markdown(titles, lines):
    """A table of cells that are texts."""
    lines = [titles.split(", "), ["---"] * len(lines[0]), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table_of_losses(runs):
    values, clipped = judge(runs, runs), judge(runs, read_runs("clipped"))
    differences, lines = compare(values), []
    for row in ROWS:
        cells = []
        for task in TASKS:
            key = task, row
            share = [f"{100 * x[key].mean():#.3g}%" for x in (values, clipped) if key in x]
            cells.append(", clip ".join(share[: 1 + (", 4" in row)]))
            difference, half = differences.get(key, (0, 0))
            bold = "**" if abs(difference) > half else ""
            cells.append(f"{bold}{100 * difference:+.1f}±{100 * half:.1f}{bold}" if half else "")
        lines.append([row, *cells])
    return markdown("Loss, pictures, difference, texts, difference", lines)


def table_of_rates(runs):
    """What chose each rate."""
    lines = []
    for key in sorted(runs):
        cells = [f"{rate:g}: {share:.1%}" for rate, share in means(runs[key]).items()]
        lines.append([*key, " ".join(cells), f"{best_rate(runs[key]):g}"])
    return markdown("task, row, rate: mean of seeds 0 to 2, best rate", lines)


def table_of_kl(runs):
    """From the shipped start with a gamed reward, from the harder start with an honest reward."""
    full, lines = read_runs("many"), []
    for key in runs:
        if "KL" in key[1]:
            ((rate, share),) = means(runs[key]).items()
            lines.append([key[1], f"{rate:g}", f"{means(full[key])[rate]:.2f}", f"{share:.1%}"])
    return markdown("run, rate, full places, correct", lines)


def table_of_splits(runs):
    """64 pictures a step, as N prompts times groups of G; three seeds."""
    rows = ["GRPO, 32 x 2", "GRPO", "GRPO, 8 x 8", "GRPO, 4 x 16"]
    columns = [means(runs["pictures", row]) for row in rows]
    lines = [[f"{rate:g}", *(f"{own[rate]:.1%}" for own in columns)] for rate in (1e-3, 2e-3)]
    return markdown("rate, 32 x 2, 16 x 4, 8 x 8, 4 x 16", lines)


def draw(runs, differences):
    """Above the differences with their intervals, below each seed over the learning rate."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    losses = [*dict.fromkeys(row.split(",")[0] for row in ROWS)]
    figure = Figure((10, 14), layout="constrained")
    shown = ROWS[:1:-1]  # without shuffled rewards, which end too far off
    for (first, *others), task in zip(figure.subplots(3, 2).T, TASKS):
        x, halves = 100 * np.array([differences.get((task, x), [np.nan] * 2) for x in shown]).T
        first.errorbar(x, range(len(shown)), xerr=halves, fmt="ok")
        first.set_yticks(range(len(shown)), shown if task == TASKS[0] else [])
        first.set_ylim(-0.5, len(shown) - 0.5)
        first.axvline(0)
        first.set_title(f"{task}: points from the reference")
        for several, axis in enumerate(others):
            rows = [row for row in ROWS if (", 4" in row) == several]
            for row in rows:
                own, i = means(runs[task, row]), losses.index(row.split(",")[0])
                if len(own) > 1:
                    color = colormaps["tab20"](2 * i % 20 + i // 10)
                    line = ["-", "--", ":"][("passes" in row) + ("no clip" in row)]
                    axis.plot([*own], [*own.values()], line, label=row, color=color)
                    dots = [(rate, y) for rate in own for y in runs[task, row][rate].values()]
                    axis.plot(*zip(*dots), ".", color=color)
            axis.set_xscale("log")
            axis.minorticks_off()
            rates = {rate for row in rows for rate in means(runs[task, row])}
            axis.set_xticks([*rates], rates)
            axis.legend(fontsize=7)
            axis.set_title(f"{task}, optimiser steps per batch: {1 + 3 * several}")
    figure.savefig(ROOT / "assets/losses.png")


def main(*arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="docs/worth.md's chart")
    options, runs = parser.parse_args(arguments), read_runs()
    for table in table_of_losses, table_of_rates, table_of_kl, table_of_splits:
        print(table(runs) + "\n")
    if options.draw:
        draw(runs, compare(judge(runs, runs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
