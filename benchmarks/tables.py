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
from benchmarks.plan import TABLES, TASKS, choose, judge, means, pairs, read_runs, rows


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


def simulate(spreads, tasks, fails=None, number=2000):
    """Studies in which all rows are equal, but that one run of ten of `fails` ends 40 points lower.

    spreads: {(task, row): the standard deviation of its runs}, of all rows of a table.

    Returns the share of studies in which all intervals hold the true difference, and {(task, row):
    the difference that 8 of 10 studies would show}.
    """
    random, references, num_seeds = np.random.default_rng(0), pairs(tasks), len(TABLES[tasks])
    held, needed = [], []
    for _ in range(number):
        values = {key: random.normal(0, x, num_seeds) for key, x in spreads.items()}
        if fails:
            values[fails] -= 0.4 * (random.random(num_seeds) < 0.1)
        found = compare(values, references)
        true = {key: -0.04 * (key == fails) for key in found}  # none is compared with `fails`
        held.append(all(abs(x - true[key]) <= half for key, (x, half) in found.items()))
        needed.append([half - x for x, half in found.values()])
    return np.mean(held), dict(zip(found, np.quantile(needed, 0.8, axis=0)))


def spreads_seen(runs, tasks):
    """{(task, row): of its runs at its rate}; of a row without runs the median of its task."""
    own = {key: [*runs[key][choose(key, runs[key])].values()] for key in rows(tasks)}
    known = {key: np.std(x, ddof=1) for key, x in own.items() if len(x) > 2}
    medians = {of: np.median([x for (task, _), x in known.items() if task == of]) for of in tasks}
    return {key: known.get(key, medians[key[0]]) for key in own}


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
                cells[3] = f"{bold}{100 * difference:+.0f} ± {100 * half:.0f}{bold}"
                cells[4] = references[key][1]
            failed = (values[key] <= np.median(values[key]) - plan.FAILS).sum()
            lines.append([*cells, str(failed), *(f"{np.nanmean(x[key]):.2g}" for x in others)])
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


def power(runs, tasks=TASKS):
    """What the intervals of a table are worth, by simulation."""
    seen, fails = spreads_seen(runs, tasks), next(iter(pairs(tasks)))
    truths = {
        "if all runs spread by 4 points": (dict.fromkeys(seen, 0.04), tasks),
        "by the spreads seen": (seen, tasks),
        f"if 1 of 10 runs of {fails[1]} fails besides": (seen, tasks, fails),
    }
    shares = [f"{simulate(*truth)[0]:.0%} {name}" for name, truth in truths.items()]
    lines = [f"All intervals hold in {', '.join(shares)}."]
    for task in tasks:
        sizes = [x for key, x in simulate(seen, tasks)[1].items() if key[0] == task]
        lines.append(f"8 of 10 studies show {100 * np.median(sizes):.0f} points on {task}.")
    return "\n".join(lines)


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
        texts = [table_of_losses(runs, tasks) for tasks in TABLES]
        texts += [text(runs) for text in (table_of_rates, table_of_kl, table_of_splits, power)]
        print(*texts, sep="\n\n")
    waiting = sum(not rate for _, rate, _ in left)
    print(f"# {len(left)} planned runs are missing; {waiting} of them wait for a rate.")


if __name__ == "__main__":
    main(*sys.argv[1:])
