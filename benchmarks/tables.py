"""The tables and charts of docs/worth.md, from variants.csv, whose runs variants.py makes.

    python benchmarks/tables.py          prints the tables
    python benchmarks/tables.py --draw   and draws the charts in assets/, with matplotlib

A share is of correct pictures of the 48 held-out captions, 16 of each.
"""

import argparse
import re
import sys
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import variants
from benchmarks.variants import (
    BEFORE,
    CLIP,
    CLIP_RANGES,
    EIGHT,
    GAMED,
    HARD,
    HONEST,
    LOSSES,
    PLAIN,
    SEEDS,
    SHIPPED,
    SHUFFLED,
    WITH_KL,
    Variant,
    correct,
    rate_of,
    written,
)

PARTS = {PLAIN, "no std", WITH_KL.name, "REINFORCE", "no baseline", SHUFFLED}
BLUE, RED, DARK, GREY = "#2d6cae", "#c62828", "#444", "#bbb"


# ---- statistics and tables -----------------------------------------------------------------------


def of_seeds(rows, variant, step, value=correct, seeds=SEEDS):
    """A value per seed, after as many pictures as these steps take; before training a lone one."""
    where = {"start": variant.start, "variant": variant.name}
    if variant.name != BEFORE:
        where["lr"] = rate_of(rows, variant)
        rows = [row for row in rows if abs(row["pictures"] - 64 * step) < 96]
    found = [row for row in rows if all(row[key] == x for key, x in where.items())]
    found = [row for row in found if row["clean"] is not None]  # else only its rate was judged
    return np.array([value(row) for row in found if row["seed"] in seeds])


def compare(rows, variants, steps=20):
    """After these steps, paired by seed: {variant: its mean less that of its reference}.

    Also the standard error of all differences, and the threshold from which they are significant.
    It is Dunnett's, simulated for as many comparisons with the same references: without any true
    difference 5 tables in 100 have one above it.
    """
    pairs = {each.name: each.reference for each in variants}
    before = Variant(variants[0].start, BEFORE)
    shares = {each.name: of_seeds(rows, each, steps) for each in [*variants, before]}
    names = list(dict.fromkeys([*pairs, *pairs.values()]))
    draws = np.random.default_rng(0).normal(size=(len(names), 100_000, len(SEEDS)))
    chance = {name: x * (len(shares[name]) > 1) for name, x in zip(names, draws)}
    found, drawn = (
        np.array([x[name] - x[other] for name, other in pairs.items()]) for x in (shares, chance)
    )
    errors = [np.sqrt(x.var(-1, ddof=1).mean(0) / len(SEEDS)) for x in (found, drawn)]
    critical = np.quantile(np.abs(drawn.mean(-1)).max(0) / errors[1], 0.95)
    return dict(zip(pairs, found.mean(-1))), errors[0], critical * errors[0]


def markdown(titles, lines):
    """A table of cells that are texts."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (titles, *lines))
    return "\n".join([first, "|---" * len(titles) + "|", *others])


def points(difference, threshold):
    """Bold: significant."""
    mark = "**" if abs(difference) > threshold else ""
    return f"{mark}{100 * difference:+.1f}{mark}"


def table(rows, variants, steps=(10, 20)):
    differences, error, threshold = compare(rows, variants, steps[-1])
    after = f"after {steps[0]} steps", *map(str, steps[1:])
    titles = "Variant", "rate", *after, "compared with", "difference"
    lines = []
    for variant in variants:
        shares = [of_seeds(rows, variant, step).mean() for step in steps]
        cells = [variant.name, written(rate_of(rows, variant)), *map("{:.1%}".format, shares)]
        lines.append([*cells, variant.reference, points(differences[variant.name], threshold)])
    found = 1 - NormalDist(0.05, error).cdf(threshold)
    words = (
        f"Bold: significant, from {100 * threshold:.1f} points on. Standard error of a difference: "
    )
    words += (
        f"{100 * error:.1f}. {100 * threshold + 84 * error:.1f} points are found 8 times in 10, "
    )
    words += f"5 points {100 * found:.0f} times in 100."
    return f"{markdown(titles, lines)}\n\n{words}"


def worths(rows):
    """{loss of losses.py: its difference in points, bold if significant}, for docs/copying.md."""
    found = {}
    for family in (HARD, LOSSES):
        differences, _, threshold = compare(rows, family)
        for variant in [each for each in family if each.loss]:
            against = f" against {variant.reference}" if variant.reference != PLAIN else ""
            found[variant.loss] = points(differences[variant.name], threshold) + against
    return found


def table_of_clip(rows):
    seeds = range(5)
    lines = []
    for variant in CLIP:
        shares = of_seeds(rows, variant, 20, seeds=seeds)
        lines.append([variant.name, *map("{:.1%}".format, [*shares, shares.mean()])])
    return markdown(["After 20 steps", *(f"seed {i}" for i in seeds), "mean"], lines)


def table_of_clip_ranges(rows):
    values = itemgetter("clipped"), itemgetter("chosen_on"), correct
    lines = []
    for variant in sorted(CLIP_RANGES, key=lambda each: each.loss):
        shares = [of_seeds(rows, variant, 20, value, [0]).item() for value in values]
        cells = [written(rate_of(rows, variant)), *map("{:.1%}".format, shares)]
        lines.append([variant.name, *cells])
    titles = "Seed 0, after 20 steps", "rate", "codes clipped", "training captions", "held out"
    return markdown(titles, lines)


def table_of_kl(rows):
    """The KL term where the reward is gamed, and from the harder start, where it is honest."""
    titles = (
        "KL term",
        "gamed: reward",
        "correct",
        "exact KL",
        "honest: rate",
        "correct",
        "exact KL",
    )
    lines = []
    for gamed in GAMED:
        if honest := HONEST.get(gamed.name):
            values = itemgetter("objects"), correct, itemgetter("kl")
            reward, share, kl = (of_seeds(rows, gamed, 12, each).mean() for each in values)
            cells = [gamed.name, f"{reward / 4:.2f}", f"{share:.1%}", f"{kl:.4f}"]
            share, kl = (of_seeds(rows, honest, 20, each).mean() for each in values[1:])
            lines.append([*cells, written(rate_of(rows, honest)), f"{share:.1%}", f"{kl:.4f}"])
    return markdown(titles, lines)


def tables(rows):
    """All of docs/worth.md."""
    first = [table(rows, family) for family in (HARD, LOSSES, EIGHT)]
    shipped = table(rows, SHIPPED, (10,))
    return [*first, shipped, table_of_clip_ranges(rows), table_of_clip(rows), table_of_kl(rows)]


# ---- charts --------------------------------------------------------------------------------------


def draw_all(rows):
    assets = ROOT / "assets"
    draw_shares(rows, HARD, assets / "parts.png", PARTS)
    draw_shares(rows, LOSSES, assets / "losses.png", {each.name for each in LOSSES})
    draw_gamed(rows, assets / "kl.png")


def panels(height, *titles):
    """A figure as wide as a page, and its axes, with a title below each."""
    from matplotlib.figure import Figure

    figure = Figure((8.8, height), dpi=100, layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for each, title in zip(axes, titles):
        each.spines[:].set_visible(False)
        each.grid(color="#ddd")
        each.set_axisbelow(True)
        each.tick_params(length=0, which="both", labelsize=9)
        each.yaxis.set_major_formatter("{x:.0%}")
        each.set_xlabel(title, size=9)
    return figure, axes


def draw_shares(rows, family, file, names):
    """Shares after 10 steps and 20, with their error and a point per seed, by outcome.

    names: of the variants of the family that are drawn; the threshold is of the whole family.
    """
    differences, error, threshold = compare(rows, family)
    drawn = [Variant("hard", BEFORE), *(each for each in family if each.name in names)]
    drawn.sort(key=lambda each: of_seeds(rows, each, 20).mean())
    title = "correct held-out pictures after 10 steps (grey), after 20 (points: seeds); in colour: "
    figure, (axes,) = panels(0.7 + 0.22 * len(drawn), f"{title}significant")
    labels = []
    for y, variant in enumerate(drawn):
        shares, colour, label = of_seeds(rows, variant, 20), DARK, variant.name
        if variant.reference:
            difference = differences[variant.name]
            if abs(difference) > threshold:
                colour = BLUE if difference > 0 else RED
            label = f"{label}, {written(rate_of(rows, variant))}"
            words = f"{100 * difference:+.1f} vs {variant.reference}"
            place = {"xytext": (1.02, y), "textcoords": axes.get_yaxis_transform(), "va": "center"}
            axes.annotate(words, (1, y), color=colour, size=9, annotation_clip=False, **place)
            axes.errorbar(shares.mean(), y, xerr=error / np.sqrt(2), color=colour)  # of a share
        labels.append(label)
        axes.plot(of_seeds(rows, variant, 10).mean(), y, "o", color=GREY, markersize=6)
        axes.plot(shares.mean(), y, "o", color=colour, markersize=9)
        axes.plot(shares, [y] * len(shares), "o", color=colour, markerfacecolor="w", markersize=4)
    axes.set_yticks(range(len(drawn)), labels)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter("{x:.0%}")
    figure.savefig(file)


def draw_gamed(rows, file):
    """Gamed runs, a dot for each: correct pictures over kl_coef and over the exact KL."""
    before = of_seeds(rows, Variant("shipped", BEFORE), 0).mean()
    runs = [row for row in rows if row["start"] == "gamed" and row["kl"] is not None]
    figure, axes = panels(3.2, "kl_coef", "exact KL")
    for each in axes:
        for loss, colour in (("k2", BLUE), ("k3", RED)):
            own = [row for row in runs if row["variant"].endswith("k2") == (loss == "k2")]
            coefs = [float(re.search("[0-9.]+", row["variant"])[0]) for row in own]
            values = coefs if each is axes[0] else [row["kl"] for row in own]
            each.scatter(values, [*map(correct, own)], color=colour, label=loss)
        each.axhline(before, color=DARK, label=BEFORE)
        each.set_xscale("log")
        each.xaxis.set_major_formatter("{x:g}")
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(file)


def main(*arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="draw the charts, too")
    options = parser.parse_args(arguments)
    rows = variants.read()
    print(*tables(rows), sep="\n\n")
    if options.draw:
        draw_all(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
