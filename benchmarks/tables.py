"""The tables of losses in docs/, from variants.csv and texts.csv.

plan.py has the rules, and says which runs there are.
"""

import argparse
import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import plan
from benchmarks.plan import TABLES, choose, judge, means, pairs, read_runs, rows


@cache
def quantile(p, freedom):
    """Of Student's t. At t = sqrt(freedom) tan(x) its density over x is as cos(x)^(freedom - 1)."""
    x = np.pi * np.linspace(-0.5, 0.5, 100_001)
    below = np.cumsum(np.cos(x) ** (freedom - 1))
    return freedom**0.5 * np.tan(np.interp(p, below / below[-1], x))


def compare(values, references):
    """{key: values by seed} -> {key: (mean difference from its reference, half an interval)}.

    references: as `pairs` returns them: all count in the 5%, also those that have not run.
    """
    found = {}
    for key, other in references.items():
        if key in values and other in values:
            paired = values[key] - values[other]
            t = quantile(1 - 0.05 / (2 * len(references)), len(paired) - 1)
            found[key] = paired.mean(), t * paired.std(ddof=1) / len(paired) ** 0.5
    return found


def markdown(titles, lines):
    """A table of cells that are texts."""
    lines = [titles.split(", "), ["---"] * len(lines[0]), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table_of_losses(runs, tasks):
    """Of each task, with the rows that all judging seeds have run."""
    columns = ["clipped", *(["length_correct", "length_wrong"] if tasks == ("long",) else [])]
    values, others = judge(runs, runs, tasks), [judge(runs, read_runs(x), tasks) for x in columns]
    references, differences, found = pairs(tasks), compare(values, pairs(tasks)), []
    for task in tasks:
        lines = []
        for key in (each for each in rows(tasks) if each[0] == task and each in values):
            cells = [key[1], f"{choose(key, runs[key]):g}", f"{values[key].mean():.0%}", "", ""]
            if key in differences:
                difference, half = differences[key]
                bold = "**" if abs(difference) > half else ""
                cells[3] = f"{bold}{round(100 * difference):+d} ± {100 * half:.0f}{bold}"
                cells[4] = references[key][1]
            failed = (values[key] <= np.median(values[key]) - plan.FAILS).sum()
            clipped, *lengths = (np.nanmean(x[key]) for x in others)
            cells += [str(failed), f"{100 * clipped:.2g}%", *(f"{x:.3g}" for x in lengths)]
            lines.append(cells)
        titles = f"{task}, rate, correct, difference, from, failed, {', '.join(columns)}"
        found.append(markdown(titles, lines) if lines else f"No row of {task} is complete.")
    return "\n\n".join(found)


def table_of_rates(runs):
    """What chose each rate."""
    lines = []
    for key in (key for tasks in TABLES for key in rows(tasks)):
        cells = [f"{rate:g}: {share:.1%}" for rate, share in means(runs[key]).items()]
        lines.append([*key, " ".join(cells), f"{choose(key, runs[key]):g}"])
    return markdown("task, row, rate: mean of seeds 0 to 2, chosen", lines)


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


def main(*arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="the missing runs, in their order")
    parser.add_argument("--draw", action="store_true", help="docs/worth.md's chart")
    options, runs = parser.parse_args(arguments), read_runs()
    left = plan.missing(runs)
    if options.missing:
        print(*(plan.command(*run) for run in left if run[1]), sep="\n")
    elif options.draw:
        from benchmarks import chart

        chart.draw(runs)
    else:
        found = [table_of_losses(runs, tasks) for tasks in TABLES]
        found += [table(runs) for table in (table_of_rates, table_of_kl, table_of_splits)]
        print(*found, sep="\n\n")
    waiting = sum(not rate for _, rate, _ in left)
    print(f"# {len(left)} planned runs are missing; {waiting} of them wait for a rate.")


if __name__ == "__main__":
    main(*sys.argv[1:])
