"""The tables of losses in docs/, and the chart of docs/worth.md, from variants.csv and texts.csv.

python benchmarks/tables.py          prints the tables
python benchmarks/tables.py --draw   and draws the chart, with matplotlib
"""

import argparse
import csv
import itertools
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]

# The flags of variants.csv and the settings of texts.csv, as the tables name them.
ONE = "--kl-coef 0"
STEPS = {
    ONE: "",
    f"{ONE} --steps 11 --warmup-steps 10": "",  # dynamic sampling: about as many pictures
    f"{ONE} --mini-batches 4": ", 4 mini-batches",
    f"{ONE} --iterations 4": ", 4 passes",
    f"{ONE} --iterations 4 --clip-range 1e9": ", 4 passes, no clip",
    "": ", KL",
    f"{ONE} --steps 10 --warmup-steps 10": "",  # of the shipped start
    f"{ONE} --steps 10 --warmup-steps 10 --reward correct": ", reward of 0 and 1",
    f"{ONE} --prompts-per-step 32 --group-size 2": ", 32 x 2",
    f"{ONE} --prompts-per-step 8 --group-size 8": ", 8 x 8",
    f"{ONE} --prompts-per-step 4 --group-size 16": ", 4 x 16",
    ("1", "1"): "",
    ("4", "1"): ", 4 mini-batches",
    ("1", "4"): ", 4 passes",
}
# What each row changes, and how it differs from what was published.
ROWS = {
    "GRPO": ("-", "yes"),
    "REINFORCE": ("neither baseline nor division", "yes"),
    "No baseline": ("no baseline", "a control"),
    "Dr. GRPO": ("no division; one length for all", "the longest text of the batch"),
    "RLOO": ("the mean of the others; no division", "yes"),
    "RAFT": ("imitates the best of the group", "one sample, also where all are wrong"),
    "REINFORCE++": ("the batch's mean and std", "its KL is left out"),
    "REINFORCE++-baseline": ("the batch's std", "yes"),
    "DAPO's token mean": ("mean over all tokens", "yes"),
    "DAPO's dynamic sampling": ("other prompts for equal groups", "at most three batches a step"),
    "GPG": ("no division, no ratio; mean over groups that teach", "draws no further prompts"),
    "Rewards shuffled": ("control: nothing to learn", "-"),
    "GRPO, 4 mini-batches": ("four optimiser steps per batch, on a quarter each", "yes"),
    "GRPO, 4 passes": ("four optimiser steps per batch, on all of it", "yes"),
    "GRPO, 4 passes, no clip": ("no clip", "a control"),
    "DAPO's two clip ranges, 4 mini-batches": ("0.28 above, 0.2 below", "yes"),
    "GSPO, 4 mini-batches": ("a ratio per sequence", "yes"),
    "CISPO, 4 mini-batches": ("clips a weight, not the loss", "verl's cap, 1.2"),
}
TASKS = {"hard": "pictures", "texts": "texts"}
# With Adam and pictures, which all have one length, these are the same.
SAME = {("hard", "RLOO"): "as Dr. GRPO", ("hard", "DAPO's token mean"): "as GRPO"}


# ---- the files -----------------------------------------------------------------------------------


def read(name):
    with open(ROOT / "benchmarks" / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def shares():
    """{(task, row): {rate: {seed: share of correct pictures or answers}}}."""
    found = defaultdict(lambda: defaultdict(dict))
    for row in read("variants"):
        length = 10 if row["start"] == "shipped" else 20
        if row["flags"] in STEPS and row["loss"] and (row["step"] != "10" or length == 10):
            where = row["start"], row["loss"] + STEPS[row["flags"]]
            found[where][float(row["lr"])][int(row["seed"])] = float(row["correct"])
    for row in read("texts"):
        where = "texts", row["loss"] + STEPS[row["mini_batches"], row["iterations"]]
        found[where][float(row["lr"])][int(row["seed"])] = float(row["correct"])
    return found


def grid(rates):
    """{rate: {seed: share}} -> (rates, seeds), NaN where none has run."""
    seeds = sorted({seed for own in rates.values() for seed in own})
    return np.array([[own.get(seed, np.nan) for seed in seeds] for _, own in sorted(rates.items())])


def at_rates_of_others(shares):
    """(..., rates, seeds) -> (..., seeds): each at the rate with the best mean of the other seeds.

    So no run chooses for itself.
    """
    ran = ~np.isnan(shares)
    known = np.where(ran, shares, 0)
    number = ran.sum(-1, keepdims=True) - ran  # of the other seeds
    others = (known.sum(-1, keepdims=True) - known) / np.maximum(number, 1)
    best = np.where(number > 0, others, -np.inf).argmax(-2)  # (..., seeds)
    return np.take_along_axis(shares, best[..., None, :], -2).squeeze(-2)


# ---- statistics ----------------------------------------------------------------------------------


def variances(values):
    """{(task, row): (..., seeds)} -> {(task, row): the variance of a run}.

    Of five seeds or more it is the row's own (Welch). Other rows have the median of the rows of
    their task; a row with more than five times as much has its own.
    """
    found, number = {}, {}
    for key, x in values.items():
        number[key] = (~np.isnan(x)).sum(-1)
        found[key] = np.nanvar(x, -1) * number[key] / np.maximum(number[key] - 1, 1)
    for task in {task for task, _ in values}:
        own = [key for key in values if key[0] == task]
        median = np.median([found[key] for key in own], axis=0)
        median = median / np.log(2)  # of three seeds the median is that share of the mean
        for key in own:
            alone = (number[key] >= 5) | (found[key] > 5 * median)
            found[key] = np.where(alone, found[key], median)
    return found


def compare(rows, pairs, truth=0.05, draws=20_000):
    """Means {(task, row): share} at the rates of others, and their differences.

    rows: {(task, row): (rates, seeds)}. pairs: ((task, row), (task, reference)). Of differences it
    returns {pair: (difference, half of its interval, power)}. In 95 of 100 such studies all
    intervals hold their true difference. power: how often this very procedure finds a true
    difference of `truth`. Rates are chosen in each study, too.
    """

    def judged(rows):
        """Means of the rows, and a width of each pair's difference."""
        values = {key: at_rates_of_others(x) for key, x in rows.items()}
        spread = variances(values)
        squares = {key: spread[key] / (~np.isnan(x)).sum(-1) for key, x in values.items()}
        widths = {(a, b): np.sqrt(squares[a] + squares[b]) for a, b in pairs}
        return {key: np.nanmean(x, -1) for key, x in values.items()}, widths, spread

    random, (means, wide, spread) = np.random.default_rng(0), judged(rows)
    drawn = {}
    for key, x in rows.items():
        noise = random.normal(size=(draws, *x.shape)) * spread[key] ** 0.5
        drawn[key] = np.where(np.isnan(x), x, np.nanmean(x, 1, keepdims=True) + noise)
    drawn_means, widest, _ = judged(drawn)
    chance = {(a, b): drawn_means[a] - drawn_means[b] for a, b in pairs}
    # A row that has to choose ends below its best rate: the error is around what it ends at.
    chance = {pair: x - x.mean() for pair, x in chance.items()}
    far = {pair: abs(chance[pair]) / widest[pair] for pair in pairs}
    # Each pair has a distribution of its own, and all are exceeded equally often.
    ranks = [x.argsort().argsort() / draws for x in far.values()]
    level = np.quantile(np.max(ranks, axis=0), 0.95)
    found = {}
    for pair in pairs:
        critical = np.quantile(far[pair], level)
        power = np.mean(abs(chance[pair] + truth) > critical * widest[pair])
        difference = means[pair[0]] - means[pair[1]]
        found[pair] = difference, critical * wide[pair], power
    return means, found


def pairs_of(rows):
    """Each row with its own reference, where both are among the rows."""
    pairs = []
    for task, row in rows:
        # From the shipped start both losses are compared under the same reward.
        several = row.endswith(", 4 mini-batches") and not row.startswith("GRPO")
        reference = "GRPO, 4 mini-batches" if several else "GRPO"
        reference = row.replace("Dr. ", "") if task == "shipped" else reference
        if reference != row and (task, reference) in rows:
            pairs.append(((task, row), (task, reference)))
    return pairs


def study(found):
    """compare() of all rows that the tables name, each with its own reference."""
    rows = {key: grid(own) for key, own in found.items() if key[1] in ROWS or key[0] == "shipped"}
    rows = {key: x for key, x in rows.items() if x.shape[1] > 1}
    return compare(rows, pairs_of(rows))


# ---- tables --------------------------------------------------------------------------------------


def markdown(titles, lines):
    """A table of cells that are texts."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (titles, *lines))
    return "\n".join([first, "|---" * len(titles) + "|", *others])


def points(difference, half, *_):
    return f"{100 * difference:+.1f} ± " + (f"{100 * half:.1f}" if half < 1 else "over 100")


def table_of_losses(values, differences):
    lines = []
    for row, words in ROWS.items():
        cells = []
        for task in TASKS:
            share = values.get((task, row))
            cells.append(SAME.get((task, row), "") if share is None else f"{share:.1%}")
            pair = next((each for each in differences if each[0] == (task, row)), None)
            text = ""
            if pair:
                difference, half, _ = differences[pair]
                text = points(difference, half)
                text = f"**{text}**" if abs(difference) > half else text
            cells.append(text)
        if any(cells):
            lines.append([row, *words, *cells])
    titles = ["Loss", "what it changes", "published so, or else"]
    return markdown([*titles, *(x for task in TASKS.values() for x in (task, "difference"))], lines)


def table_of_graded(values, differences):
    """From the model as shipped, with a graded reward and with a reward of 0 and 1."""
    lines = []
    for row in ("Dr. GRPO", "Dr. GRPO, reward of 0 and 1"):
        pair = ("shipped", row), ("shipped", row.replace("Dr. ", ""))
        if pair in differences:
            cells = (f"{values[key]:.1%}" for key in pair[::-1])
            lines.append([row, *cells, points(*differences[pair])])
    return markdown(["From the model as shipped", "GRPO", "Dr. GRPO", "difference"], lines)


def table_of_rates(found):
    """The mean at each rate, with the number of seeds."""
    lines = []
    for task, row in [key for key in found if key[1] in ROWS or key[0] == "shipped"]:
        rates = sorted(found[task, row].items())
        cells = [f"{x:g}: {np.mean([*own.values()]):.1%} ({len(own)})" for x, own in rates]
        lines.append([TASKS.get(task, task), row, ", ".join(cells)])
    return markdown(["task", "row", "rate: mean (seeds)"], sorted(lines))


def table_of_single_differences(found):
    """Rows with five seeds at their best rates: each difference for itself (Welch's interval)."""
    rows, lines = {}, []
    for (task, row), rates in found.items():
        best = max(rates, key=lambda rate: np.mean([*rates[rate].values()]))
        if row in ROWS and len(rates[best]) >= 5:
            rows[task, row] = grid({best: rates[best]})
    for pair in pairs_of(rows):
        _, differences = compare({key: rows[key] for key in pair}, [pair])
        (task, row), (_, reference) = pair
        lines.append([TASKS.get(task, task), row, reference, points(*differences[pair])])
    return markdown(["task", "row", "reference", "difference, alone"], lines)


def table_of_kl():
    """The KL term where the reward is gamed: reward, correct pictures, exact KL; three seeds."""
    lines = []
    for loss, coef in (("GRPO", "0"), ("GRPO", "0.2"), ("GRPO", "1"), ("k2", "0.2")):
        rows = [row for row in read("variants") if (row["loss"], row["step"]) == (loss, "12")]
        rows = [row for row in rows if row["flags"].startswith("--reward many")]
        rows = [row for row in rows if row["flags"].endswith(f"--kl-coef {coef}")]
        reward, share = (np.mean([float(row[x]) for row in rows]) for x in ("many", "correct"))
        lines.append([loss.replace("GRPO", "k3"), coef, f"{reward:.2f}", f"{share:.1%}"])
    return markdown(["KL term", "kl_coef", "gamed reward", "correct"], lines)


def table_of_splits(found):
    """64 pictures a step, as N prompts times groups of G; three seeds."""
    splits = ["32 x 2", "16 x 4", "8 x 8", "4 x 16"]
    rows = ["GRPO, 32 x 2", "GRPO", "GRPO, 8 x 8", "GRPO, 4 x 16"]
    lines = []
    for rate in (0.001, 0.002):
        runs = [[found["hard", row][rate][seed] for seed in range(3)] for row in rows]
        lines.append([f"{rate:g}", *(f"{np.mean(own):.1%}" for own in runs)])
    return markdown(["rate", *splits], lines)


def power(differences):
    words = []
    for task, name in TASKS.items():
        own = [x for ((t, _), _), x in differences.items() if t == task]
        half, chance = (100 * np.median([x[i] for x in own] or [0]) for i in (1, 2))
        words.append(f"{name} ± {half:.1f} points, and 5 are found {chance:.0f} times in 100")
    return f"The median interval and the chance to find a true difference: {'; '.join(words)}."


def tables(found):
    """All that docs/ shows."""
    values, differences = study(found)
    losses = table_of_losses(values, differences), power(differences)
    return [*losses, table_of_graded(values, differences), table_of_kl(), table_of_splits(found)]


# ---- the chart -----------------------------------------------------------------------------------


def draw_rates(found, file):
    """Correct pictures or answers over the learning rate; a band from worst to best seed."""
    from matplotlib.figure import Figure

    figure = Figure((10, 8), dpi=100, layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    steps = {"": "one optimiser step per batch", ", 4": "four optimiser steps per batch"}
    for axis, (task, number) in zip(axes, itertools.product(TASKS, steps)):
        rows = [row for row in ROWS if (", 4" in row) == bool(number)]
        tried = set()
        for i, row in enumerate(rows):
            rates = {x: [*own.values()] for x, own in sorted(found[task, row].items())}
            rates = {x: own for x, own in rates.items() if len(own) > 2}
            if len(rates) < 2:
                continue
            tried |= rates.keys()
            style = {"color": f"C{i - 1}" if i else "k"}  # GRPO is black
            axis.plot([*rates], [*map(np.mean, rates.values())], "o-", label=row, ms=4, **style)
            ends = ([*map(end, rates.values())] for end in (min, max))
            axis.fill_between([*rates], *ends, alpha=0.1, lw=0, **style)
        axis.set_xscale("log")
        axis.set_xticks([*tried], [f"{x:g}" for x in tried])
        axis.set_xticks([], minor=True)
        axis.yaxis.set_major_formatter("{x:.0%}")
        axis.tick_params(length=0, which="both", labelsize=9)
        axis.spines[:].set_visible(False)
        axis.grid(color="#ddd")
        axis.legend(frameon=False, fontsize=8)
        axis.set_title(f"{TASKS[task]}: {steps[number]}", size=10)
        axis.set_xlabel("learning rate", size=9)
    figure.savefig(file)


def main(*arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="draw the chart, too")
    options = parser.parse_args(arguments)
    found = shares()
    print(*tables(found), table_of_rates(found), table_of_single_differences(found), sep="\n\n")
    if options.draw:
        draw_rates(found, ROOT / "assets" / "losses.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
