"""The chart of the losses in docs/worth.md, which tables.py draws.

Above the difference of each row from its reference, of rows that all judging seeds have run; below
the share over the learning rate, a panel for each row.
"""

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.plan import CHOOSING, ROOT, TABLES, TASKS, judge, means, pairs, rows
from benchmarks.tables import compare

COLORS = {"pictures": "C0", "texts": "C1"}
EDGE = 35  # points: what lies further off is written at the edge
RATES = 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3


def draw_differences(axes, differences):
    """A full dot: 0 is outside of its interval."""
    for axis, (task, color) in zip(axes, COLORS.items()):
        keys = [key for key in differences if key[0] == task][::-1]
        for y, key in enumerate(keys):
            x, half = 100 * np.array(differences[key])
            face = color if abs(x) > half else "white"
            axis.errorbar(x, y, xerr=half, fmt="o", color=color, markerfacecolor=face)
            if abs(x) > EDGE:
                axis.text(np.clip(x, 1 - EDGE, EDGE / 2), y, f"{x:+.0f} ± {half:.0f}", va="bottom")
        names = [f"{key[1]}\nfrom {pairs(TASKS)[key][1]}" for key in keys]
        axis.set_yticks(range(len(keys)), names)
        axis.set_ylim(-0.5, max(1, len(keys)) - 0.5)
        axis.set(xlim=(-EDGE, EDGE), xlabel=f"{task}: difference, points")
        axis.axvline(0, color="gray")


def draw_rates(axes, runs):
    """A line through the means of the seeds that choose; what is below 40% is not shown."""
    names = [*dict.fromkeys(row for _, row in rows(TASKS) if row != "Rewards shuffled")]
    for axis, name in zip(axes, names):
        for task, color in COLORS.items():
            if (task, name) in rows(TASKS):
                shares = runs[task, name]
                mean = [100 * y for y in means(shares).values()]
                axis.plot([*means(shares)], mean, color=color, label=task)
                for seeds, face in (CHOOSING, "white"), (TABLES[TASKS], color):
                    dots = [(x, 100 * y[i]) for x, y in shares.items() for i in seeds if i in y]
                    label = f"{task}, seeds {seeds[0]} to {seeds[-1]}"
                    dots = np.array(dots).reshape(-1, 2).T
                    axis.scatter(*dots, 15, face, edgecolors=color, label=label)
        axis.set(title=name, xscale="log", xlim=(1.2e-4, 5e-3), ylim=(40, 100))
        axis.minorticks_off()
        axis.set_xticks(RATES, RATES)
        axis.set(xlabel="learning rate", ylabel="correct, %")
    axes[-1].axis("off")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center")


@rc_context({"font.size": 8})
def draw(runs):
    differences = compare(judge(runs, runs, TASKS), pairs(TASKS))
    heights = [10]  # inches
    if differences:
        most = max(sum(task == own for own, _ in differences) for task in TASKS)
        heights = [1 + most / 2, 10]
    figure = Figure((10, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)
    *above, below = parts[:, 0]
    if differences:
        draw_differences(above[0].subplots(1, 2), differences)
    draw_rates(below.subplots(5, 3).flatten(), runs)
    figure.savefig(ROOT / "assets/losses.png")
