"""Which runs of losses are made, by rules that were fixed before the first run of seeds 20 to 29,
and before any run of "stale" and "long".

- Seeds 0 to 2 choose the rate of a row: the lowest whose mean is within 2 points of its best mean.
- New seeds judge the row at that rate, and choose nothing.
- A row is compared with one other, from which it differs in one thing, by a t-test paired by seed:
  by its own differences alone. All that a table plans share its 5% (Bonferroni).
- A run fails if it ends 20 points or more below the median of its row's judging seeds. It counts in
  the means, and is counted in a column of its own.
- Of "long" the lengths of correct and of wrong answers are shown beside, and not tested.

tables.py prints the commands of the runs that are missing.
"""

import csv
import shlex
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# Seeds 3, 4 and 10 to 14 are of earlier rounds: they neither choose nor judge.
CHOOSING = range(3)
TASKS = "pictures", "texts"
# {the tasks of a table: the seeds that judge}
TABLES = {TASKS: range(20, 30), ("stale",): range(20, 25), ("long",): range(20, 25)}
WITHIN, FAILS = 0.02, 0.2
# What a row changes beside the loss, and the rates among which its seeds 0 to 2 choose.
# stale: 16 optimiser steps per batch of texts; long: lists of 2 to 30 words.
SETTINGS = [
    ("pictures", "", "--kl-coef 0", "5e-4 1e-3 2e-3"),
    ("pictures", ", 4 mini-batches", "--kl-coef 0 --mini-batches 4", "5e-4 1e-3 2e-3"),
    ("pictures", ", 4 passes", "--kl-coef 0 --iterations 4", "5e-4 1e-3 2e-3"),
    (
        "pictures",
        ", 4 passes, no clip",
        "--kl-coef 0 --iterations 4 --clip-range 1e9",
        "2.5e-4 5e-4 1e-3",
    ),
    ("texts", "", "1 1 0.2 8", "3e-4 6e-4 1.2e-3"),
    ("texts", ", 4 mini-batches", "4 1 0.2 8", "1.5e-4 3e-4 6e-4"),
    ("texts", ", 4 passes", "1 4 0.2 8", "1.5e-4 3e-4 6e-4"),
    ("stale", "", "4 4 0.2 8", "1.5e-4 3e-4"),
    ("stale", ", no clip", "4 4 inf 8", "1.5e-4 3e-4"),
    ("stale", ", cap 5", "4 4 4.0 8", "1.5e-4 3e-4"),
    ("long", "", "1 1 0.2 30", "3e-4 6e-4"),
    # Runs of other pages, and of the round before.
    ("pictures", ", dynamic", "--kl-coef 0 --steps 11 --warmup-steps 10", ""),
    ("pictures", ", KL 0.2", "--kl-coef 0.2", ""),
    ("pictures", ", 32 x 2", "--kl-coef 0 --prompts-per-step 32 --group-size 2", ""),
    ("pictures", ", 8 x 8", "--kl-coef 0 --prompts-per-step 8 --group-size 8", ""),
    ("pictures", ", 4 x 16", "--kl-coef 0 --prompts-per-step 4 --group-size 16", ""),
]
GAMED = "--reward many --warmup-steps 0 --steps 12 --kl-coef"
SETTINGS += [("pictures", f", gamed, KL {kl}", f"{GAMED} {kl}", "") for kl in ("0", "0.2", "1")]
TEXTS = "mini_batches", "iterations", "clip_range", "words"  # of a row of texts.csv
DAPO, CLIPS = "DAPO's token mean", "DAPO's two clip ranges"
BOTH = ["GRPO, 4 mini-batches", "GRPO, 4 passes"]
BOTH += ["Dr. GRPO", "REINFORCE", "RAFT", "REINFORCE++", "No baseline"]
GSPO = {"GSPO, 4 mini-batches": "GRPO, 4 mini-batches"}
# {task: {row: the row with which it is compared}}. A row is run as its loss is named here:
# "Dr. GRPO" is also RLOO, GPG and REINFORCE++-baseline (same.py).
PLAN = {
    "pictures": dict.fromkeys(BOTH, "GRPO") | GSPO | {"GRPO, 4 passes, no clip": "GRPO, 4 passes"},
    "texts": dict.fromkeys([*BOTH, DAPO, "Rewards shuffled"], "GRPO")
    | GSPO
    | {f"{DAPO}, 4 mini-batches": "GRPO, 4 mini-batches"}
    | {f"{row}, 4 mini-batches": f"{DAPO}, 4 mini-batches" for row in (CLIPS, "CISPO")},
    "stale": dict.fromkeys(["GRPO, no clip", "GSPO", DAPO], "GRPO")
    | dict.fromkeys([CLIPS, "CISPO", "CISPO, cap 5"], DAPO),
    "long": dict.fromkeys(["Dr. GRPO", DAPO], "GRPO"),
}


def pairs(tasks):
    """{(task, row): the row with which it is compared} of a table."""
    return {(task, row): (task, x) for task in tasks for row, x in PLAN[task].items()}


def rows(tasks):
    """The (task, row) that a table needs."""
    return [*((task, "GRPO") for task in tasks), *pairs(tasks)]


def read(name):
    file = ROOT / "benchmarks" / f"{name}.csv"
    return [*csv.DictReader(file.read_text("utf-8").splitlines())]


def read_runs(column="correct"):
    """{(task, row): {rate: {seed: a column of the files}}}."""
    found = defaultdict(lambda: defaultdict(dict))
    names = {flags: (task, name) for task, name, flags, _ in SETTINGS}
    lines = [(row["flags"], row) for row in read("variants") if row["loss"]]
    lines += [(" ".join(row[each] for each in TEXTS), row) for row in read("texts")]
    for flags, row in lines:
        task, name = names[flags]
        of_rate = found[task, row["loss"] + name][float(row["lr"])]
        of_rate[int(row["seed"])] = float(row.get(column) or "nan")
    return found


def settings_of(task, row):
    """Its loss, its flags, and the rates among which seeds 0 to 2 choose."""
    loss, comma, name = row.partition(",")
    ((flags, rates),) = [x[2:] for x in SETTINGS if x[:2] == (task, comma + name)]
    rates = "6e-4" if loss == "Rewards shuffled" else rates  # GRPO's: nothing is learned
    return loss, flags, [*map(float, rates.split())]


def means(rates):
    """{rate: mean of the choosing seeds}, of rates that all of them have tried."""
    tried = {rate: own for rate, own in sorted(rates.items()) if own.keys() >= {*CHOOSING}}
    return {rate: np.mean([own[seed] for seed in CHOOSING]) for rate, own in tried.items()}


def choose(key, rates):
    """The rate at which a row is judged; 0 until its seeds have tried all rates of the plan."""
    found = means(rates)
    if not found.keys() >= {*settings_of(*key)[2]}:
        return 0
    # Shares are multiples of 1 / 200 and more: what rounding moves is no difference.
    return min(rate for rate in found if found[rate] > max(found.values()) - WITHIN - 1e-9)


def judge(runs, values, tasks):
    """{(task, row): values of the judging seeds at its rate}, of rows that have them all."""
    own = {key: values[key][choose(key, runs[key])] for key in rows(tasks)}
    seeds = TABLES[tasks]
    return {
        key: np.array([x[seed] for seed in seeds]) for key, x in own.items() if {*seeds} <= x.keys()
    }


def missing(runs):
    """[(key, rate, seed)] that are planned and not in the files, in the order in which to run them.

    First what chooses rates. Then each row is finished on all tasks before the next begins, since
    the tables show finished rows alone. A rate of 0 is not chosen yet.
    """
    found = []
    for tables in ([TASKS], [("stale",), ("long",)]):
        keys = [(key, TABLES[tasks]) for tasks in tables for key in rows(tasks)]
        names = [row for (_, row), _ in keys]
        keys.sort(key=lambda each: names.index(each[0][1]))
        rates = [(key, settings_of(*key)[2]) for key, _ in keys]
        planned = [(key, rate, x) for x in CHOOSING for key, own in rates for rate in own]
        planned += [(key, choose(key, runs[key]), x) for key, seeds in keys for x in seeds]
        found += [run for run in planned if run[2] not in runs[run[0]].get(run[1], {})]
    return found


def command(key, rate, seed):
    loss, flags, _ = settings_of(*key)
    name = "variants" if key[0] == "pictures" else "texts"
    if name == "texts":
        values = *flags.split(), 5 if seed in CHOOSING else 20
        names = [x.replace("_", "-") for x in (*TEXTS, "answers")]
        flags = " ".join(f"--{x} {y}" for x, y in zip(names, values))
    call = f"python benchmarks/{name}.py {shlex.quote(loss)} {flags} --lr {rate} --seed {seed}"
    return f"{call} >> benchmarks/{name}.csv"
