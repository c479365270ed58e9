"""The benchmarks run, and what they print follows from what they measure."""

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY
from test_zoo import llama
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import losses, plan, same, tables, texts, variants
from inputs.prompts import read_file


def test_a_row_is_the_run_that_its_flags_name(monkeypatch, tmp_path, capsys):
    """A copy with the loss is trained, then judged. Its own steps come before the row's flags."""
    calls = []

    def run(call, cwd, **_):
        assert (cwd / "grpo.py").read_text() == losses.edited("Dr. GRPO")["grpo.py"]
        calls.append(" ".join(map(str, call[2:])))
        (out := cwd / call[-1]).mkdir()
        captions = [prompt.text for prompt in read_file(str(cwd / "captions.txt"))]
        assert captions == [prompt.text for prompt in read_file(f"{TINY}/heldout.txt")]
        judged = {"reward/correct": [0.5, 0.1], "reward/many": [0.25, 0]}
        records = {"evaluation": [judged]}
        records["metrics"] = [{"clip_fraction": 0.2}, {"clip_fraction": None}]
        for name, lines in records.items():
            (out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(variants.subprocess, "run", run)
    monkeypatch.setattr(variants, "OUT", tmp_path)
    flags = str.split("--start shipped --lr 1e-3 --seed 3 --kl-coef 0 --steps 11")
    variants.main("Dr. GRPO", *flags)
    own = "--steps 20 --warmup-steps 20 --eval-count 1 --eval-every 0"
    end = "--kl-coef 0 --steps 11 --lr 0.001 --seed 3 --out run"
    assert calls[0].endswith(f" {own} {end}")
    assert calls[1].endswith(f"--steps 0 --adapter run {variants.JUDGED} --out judged")
    row = "shipped,Dr. GRPO,--kl-coef 0 --steps 11,0.001,3,0.50000,0.25000,0.20000"
    assert capsys.readouterr().out.strip() == f"{row},{losses.cpu()}"


def test_sums_over_the_tokens_of_texts_are_by_one_length():
    """By that of all batches, not by the longest answer of each. Other losses stay as they are."""
    new = torch.randn(2, 5, requires_grad=True)
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    weights = {}
    for loss in ("REINFORCE", "GRPO"):
        given = new, new.detach(), torch.tensor([-1.0, -1]), None, mask
        value, _ = texts.module(loss, 11).compute_grpo_loss(*given, 0.2, 0.0)
        (weights[loss],) = torch.autograd.grad(value, new)
    torch.testing.assert_close(weights["REINFORCE"], mask / 11 / 2)
    torch.testing.assert_close(weights["GRPO"], mask / mask.sum(1, keepdim=True) / 2)


@pytest.mark.parametrize(
    "answer, whole, by_word",
    [
        (" table bread river\n", 1, 1),
        (" table bread river", 0, 1),
        (" table river bread\n", 0, 1 / 3),
        (" table bread\n", 0, 2 / 3),
        (" table bread river table table table\n", 0, 1 / 2),
        ("\n", 0, 0),
    ],
)
def test_a_text_is_rewarded_as_a_whole_or_by_its_words(answer, whole, by_word):
    words = ["table", "bread", "river"]
    assert texts.reward(answer, words, by_word=False) == whole
    assert texts.reward(answer, words, by_word=True) == pytest.approx(by_word)


VOCABULARY = ["\n", *texts.WORDS, *texts.SHOTS.split()]


class Words:
    """A tokenizer: each word is an id, and so is the end of a line."""

    def encode(self, text):
        return [VOCABULARY.index(word) for word in re.findall(r"\S+|\n", text)]

    def decode(self, ids):
        words = [*VOCABULARY, *["other"] * 50]
        return "".join(f" {words[i]}" for i in ids).replace(" \n", "\n")


@pytest.mark.parametrize("key", plan.rows(("stale",)) + plan.rows(("long",)), ids=" ".join)
def test_a_row_of_texts_is_trained_as_planned(key, monkeypatch, capsys):
    """One step, of a tiny model: the number of optimiser steps, and the lengths of both types."""
    monkeypatch.setattr(texts, "STEPS", 1)
    monkeypatch.setattr(texts, "load", lambda: (Words(), llama()))
    monkeypatch.setattr(texts, "reward", lambda x, *_: float("\n" in x or len(x) % 2))
    taken = []
    hook = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    _, _, *arguments = shlex.split(plan.command(key, 1e-6, 0).split(" >> ")[0])
    texts.main(*arguments, "--answers", "2")
    hook.remove()
    assert len(taken) == (16 if key[0] == "stale" else 1)
    header = Path(plan.ROOT, "benchmarks/texts.csv").read_text().splitlines()[0]
    row = dict(zip(header.split(","), capsys.readouterr().out.strip().split(","), strict=True))
    longest = 33 if key[0] == "long" else 11
    assert 1 <= float(row["length_correct"]) < float(row["length_wrong"]) == longest
    assert 0 < float(row["correct"]) < 1 and float(row["clipped"]) >= 0


# ---- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares, chosen",
    [
        ({5e-4: 0.79, 1e-3: 0.8, 2e-3: 0.81}, 5e-4),  # within 2 points of the best
        ({5e-4: 0.78, 1e-3: 0.8, 2e-3: 0.81}, 1e-3),
        ({5e-4: 0.7, 1e-3: 0.8, 2e-3: 0.83}, 2e-3),
        ({5e-4: 0.7, 1e-3: 0.8, 2e-3: 0.83, 4e-3: 0.9}, 4e-3),  # all that was tried counts
        ({5e-4: 0.79, 1e-3: 0.8}, 0),  # a rate of the plan has not been tried
    ],
)
def test_a_row_takes_the_lowest_rate_within_2_points_of_its_best(shares, chosen):
    # Other seeds do not choose.
    rates = {rate: {0: x - 0.1, 1: x, 2: x + 0.1, 3: 0, 20: 0} for rate, x in shares.items()}
    assert plan.choose(("pictures", "RAFT"), rates) == chosen
    rates[max(rates)].pop(2)
    assert plan.choose(("pictures", "RAFT"), rates) != max(rates)


def test_of_seeds_20_to_29_all_judge_or_none():
    own = {seed: seed / 100 for seed in (*range(3), 3, *range(10, 15), *range(20, 30))}
    runs = {key: {} for key in plan.rows(plan.TASKS)}
    runs["texts", "GRPO"] = {3e-4: own, 6e-4: own, 1.2e-3: own}
    runs["texts", "RAFT"] = runs["texts", "GRPO"] | {3e-4: own | {20: 0.5}}
    runs["texts", "GSPO, 4 mini-batches"] = {1.5e-4: own, 3e-4: own, 6e-4: own}
    del runs["texts", "RAFT"][3e-4][25]
    runs = plan.defaultdict(
        lambda: plan.defaultdict(dict),
        {key: plan.defaultdict(dict, rates) for key, rates in runs.items()},
    )
    judged = plan.judge(runs, runs, plan.TASKS)
    assert judged.keys() == {("texts", "GRPO"), ("texts", "GSPO, 4 mini-batches")}
    assert judged["texts", "GRPO"].tolist() == [seed / 100 for seed in range(20, 30)]


def by_command(call, monkeypatch, capsys):
    """The row that a command prints, {column: text}, with a training that ends at 0.5."""
    command, file = call.split(" >> ")
    _, program, *arguments = shlex.split(command)
    module = {"benchmarks/variants.py": variants, "benchmarks/texts.py": texts}[program]
    monkeypatch.setattr(texts, "load", lambda: ())
    monkeypatch.setattr(texts, "train", lambda **_: [0.5, 0.01, 7, 9])
    own = ("start", "loss", "flags", "lr", "seed")
    ended = [0.5, 0.6, 0.01, losses.cpu()]
    monkeypatch.setattr(variants, "train", lambda **each: [*map(each.get, own), *ended])
    module.main(*arguments)
    header = Path(tables.ROOT, file).read_text().splitlines()[0]
    row = capsys.readouterr().out.strip().split(",")
    return file, dict(zip(header.split(","), row, strict=True))


def test_the_missing_runs_complete_the_plan(monkeypatch, capsys):
    """From no run at all, one by one: what a command prints is what was missing, and the rows that
    wait for a rate get it. Rates are chosen first. Then a row is finished before the next begins."""
    lines = {"variants": [], "texts": []}
    monkeypatch.setattr(plan, "read", lines.get)
    done, first = [], plan.missing(plan.read_runs())
    while runs := [run for run in plan.missing(plan.read_runs()) if run[1]]:
        for run in runs:
            file, row = by_command(plan.command(*run), monkeypatch, capsys)
            lines[Path(file).stem].append(row)
        found = plan.read_runs()
        assert {found[key][rate][seed] for key, rate, seed in runs} == {0.5}
        done += runs
    assert not plan.missing(plan.read_runs()) and len(done) == len(first)
    seeds = Counter(seed for (task, _), _, seed in done if task in plan.TASKS)
    assert [*seeds] == [0, 1, 2, *range(20, 30)]
    judged = [key for key, _, seed in done if key[0] in plan.TASKS and seed >= 20]
    assert judged[::10] == [*dict.fromkeys(judged)] and judged[10:20] == 10 * [("texts", "GRPO")]
    rows = len(plan.rows(plan.TASKS))
    assert {seeds[seed] for seed in range(20, 30)} == {rows}
    of_texts = [row for row in lines["texts"] if row["seed"] in ("0", "20")]
    assert {(row["seed"], row["answers"]) for row in of_texts} == {("0", "5"), ("20", "20")}


def test_each_row_is_compared_with_one_that_is_run_too():
    for tasks in plan.TABLES:
        assert {*plan.pairs(tasks).values()} <= {*plan.rows(tasks)}
        assert all(key[0] == other[0] for key, other in plan.pairs(tasks).items())


# ---- intervals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "p, freedom, expected",
    [(0.975, 4, 2.776), (0.995, 10, 3.169), (0.999, 6, 5.208), (0.975, 1000, 1.962)],
)
def test_quantiles_are_those_of_the_t_table(p, freedom, expected):
    assert tables.quantile(p, freedom) == pytest.approx(expected, abs=6e-4)


def test_intervals_by_hand():
    """A row by its own differences, seed by seed. What is planned shares the 5%, run or not."""
    values = {"GRPO": np.array([1.0, 2, 3, 4, 5]), "RAFT": np.array([2.0, 3, 4, 5, 11])}
    values |= {"GSPO": np.array([0.0, 100, 0, 100, 0])}
    references = {"RAFT": "GRPO", "GSPO": "RAFT", "CISPO": "GRPO", "REINFORCE": "CISPO"}
    found = tables.compare(values, references)
    assert found.keys() == {"RAFT", "GSPO"}
    # The differences are 1, 1, 1, 1, 6: their mean is 2, their variance 5. t(4) at 1 - 0.05 / 8.
    assert found["RAFT"] == (2, pytest.approx(4.315, rel=1e-3))


def simulate(spreads, fails=None, number=2000):
    """Studies in which all rows are equal, but that one run of ten of `fails` ends 40 points lower.

    spreads: {(task, row): the standard deviation of its runs}.

    Returns the share of studies in which all intervals hold the true difference, and {(task, row):
    the difference that 8 of 10 studies would show}.
    """
    random, references = np.random.default_rng(0), plan.pairs(plan.TASKS)
    held, needed = [], []
    for _ in range(number):
        values = {key: random.normal(0, x, 10) for key, x in spreads.items()}
        if fails:
            values[fails] -= 0.4 * (random.random(10) < 0.1)
        found = tables.compare(values, references)
        true = {key: -0.04 * (key == fails) for key in found}  # none is compared with `fails`
        held.append(all(abs(x - true[key]) <= half for key, (x, half) in found.items()))
        needed.append([half - x for x, half in found.values()])
    return np.mean(held), dict(zip(found, np.quantile(needed, 0.8, axis=0)))


def spreads_seen():
    """{(task, row): of all its runs at its rate}; of a row without runs the median of its task."""
    runs, keys = plan.read_runs(), plan.rows(plan.TASKS)
    own = {key: [*runs[key][plan.choose(key, runs[key])].values()] for key in keys}
    known = {key: np.std(x, ddof=1) for key, x in own.items() if len(x) > 2}
    assert len(known) > 20
    medians = {of: np.median([x for (task, _), x in known.items() if task == of]) for of, _ in keys}
    return {key: known.get(key, medians[key[0]]) for key in keys}


def test_intervals_are_worth_what_the_page_says():
    """In how many of 100 studies all of them hold; from which size 8 of 10 show a difference."""
    seen = spreads_seen()
    equal, _ = simulate(dict.fromkeys(seen, 0.04))
    held, needed = simulate(seen)
    failing, _ = simulate(seen, ("pictures", "Dr. GRPO"))
    assert min(equal, held) > 0.94 and failing < 0.9
    page = " ".join(Path(tables.ROOT, "docs/worth.md").read_text("utf-8").split())
    (sentences,) = re.findall(r"by simulation: (.*?) on the texts\.", page)
    shares = [100 * x for x in (equal, held, failing)]
    # By chance a share of 2000 studies is 1 point off.
    assert [*map(int, re.findall(r"in (\d+)", sentences))] == pytest.approx(shares, abs=2)
    sizes = [
        100 * np.median([x for (task, _), x in needed.items() if task == of]) for of in plan.TASKS
    ]
    shown = re.findall(r"difference of (\d+) .* of (\d+)$", sentences)
    assert [*map(int, *shown)] == pytest.approx(sizes, abs=0.7)


def test_the_tables_are_of_the_files(monkeypatch, capsys):
    """Each row against its own reference, bold where 0 is outside. A row without all of its judging
    seeds is not shown."""
    row = {"start": "hard", "many": "0.5", "clipped": "0.0025"}
    rows = []
    for loss, flags, share in [
        ("GRPO", "--kl-coef 0", 0.7),
        ("RAFT", "--kl-coef 0", 0.6),
        ("Dr. GRPO", "--kl-coef 0", 0.71),
        ("REINFORCE", "--kl-coef 0", 0.9),
        ("GRPO", "--kl-coef 0 --mini-batches 4", 0.8),
        ("GSPO", "--kl-coef 0 --mini-batches 4", 0.3),
    ]:
        for rate in ("0.0005", "0.001", "0.002"):
            for seed in (0, 1, 2, *(range(20, 30) if rate == "0.001" else [])):
                correct = share - 0.1 * (rate == "0.0005") + 0.001 * (seed - 24.5) * (seed >= 20)
                correct -= 0.01 * (seed % 2) * (loss == "Dr. GRPO") * (seed >= 20)
                correct -= 0.32 * (seed == 29 and loss == "Dr. GRPO")
                changes = {"correct": correct, "loss": loss, "flags": flags}
                rows.append(row | changes | {"seed": seed, "lr": rate})
    rows = [each for each in rows if (each["loss"], each["seed"]) != ("REINFORCE", 27)]
    monkeypatch.setattr(plan, "read", lambda name: rows if name == "variants" else [])
    for name in ("table_of_kl", "table_of_splits"):
        monkeypatch.setattr(tables, name, str)
    tables.main()
    lines = capsys.readouterr().out.splitlines()
    end = lines.index("No row of texts is complete.")
    cells = {line.split(" | ")[0][2:]: line.strip("| ").split(" | ")[1:] for line in lines[2:end]}
    assert "REINFORCE" not in cells
    assert cells["GRPO"] == ["0.001", "70%", "", "", "0", "0.25%"]
    assert cells["RAFT"] == ["0.001", "60%", "**-10 ± 0**", "GRPO", "0", "0.25%"]
    assert cells["Dr. GRPO"][1:3] == ["67%", "-3 ± 14"] and cells["Dr. GRPO"][4] == "1"
    own = cells["GSPO, 4 mini-batches"]
    assert own[2:4] == ["**-50 ± 0**", "GRPO, 4 mini-batches"]
    assert cells["GRPO, 4 mini-batches"][2:4] == ["**+10 ± 0**", "GRPO"]
    rates = "0.0005: 50.0% 0.001: 60.0% 0.002: 60.0%"
    assert f"| pictures | RAFT | {rates} | 0.001 |" in lines
    left = plan.missing(plan.read_runs())
    waiting = sum(not rate for _, rate, _ in left)
    assert (
        lines[-1] == f"# {len(left)} planned runs are missing; {waiting} of them wait for a rate."
    )
    tables.main("--missing")
    *calls, _ = capsys.readouterr().out.splitlines()
    assert len(calls) == len(left) - waiting and calls[0] == plan.command(*left[0])


def test_the_chart_is_drawn_of_what_is_there(monkeypatch, tmp_path):
    """Full dots are the judging seeds. Differences have a panel once a row has them all."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    from benchmarks import chart

    (tmp_path / "assets").mkdir()
    monkeypatch.setattr(chart, "ROOT", tmp_path)
    dots, intervals = [], []
    monkeypatch.setattr(axes, "scatter", lambda self, *given, **_: dots.append(given))
    monkeypatch.setattr(
        axes, "errorbar", lambda self, *given, **each: intervals.append((given, each))
    )
    choosing = dict.fromkeys(range(3), 0.5)
    runs = plan.defaultdict(lambda: plan.defaultdict(dict))
    for row, share in ("GRPO", 0.6), ("RAFT", 0.7), ("REINFORCE", 0.3):
        for rate in (3e-4, 6e-4, 1.2e-3):
            runs["texts", row][rate] = dict(choosing) | {3: 0.9, 10: 0.9}
        judging = {seed: share + 0.01 * (seed % 2) for seed in range(20, 30)}
        runs["texts", row][3e-4] |= judging
    del runs["texts", "REINFORCE"][3e-4][29]
    monkeypatch.setattr(tables, "read_runs", lambda: runs)
    tables.main("--draw")
    drawn = [(face, *dot) for x, y, _, face in dots for dot in zip(x, y, strict=True)]
    assert Counter(drawn)["white", 3e-4, 50] == 9
    judged = {(x, round(y)) for face, x, y in drawn if face != "white"}
    assert judged == {(3e-4, y) for y in (60, 61, 70, 71, 30, 31)}
    (((x, _), style),) = intervals
    assert x == pytest.approx(10) and style["markerfacecolor"] != "white"
    assert (tmp_path / "assets" / "losses.png").stat().st_size > 10_000


# ---- one gradient --------------------------------------------------------------------------------


def test_losses_have_one_gradient_where_the_page_says_so():
    """Those of a line in both tasks. Those of two lines differ on texts."""
    page = Path(tables.ROOT, "docs/worth.md").read_text("utf-8")
    table, *_ = page.split("| Losses with one gradient")[1].split("\n\n")
    cells = [[x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    group = {name: i for i, (names, *_) in enumerate(cells) for name in names.split(", ")}
    assert {*group} == {*same.NAMES} and len(cells) == 7
    equal = torch.tensor([[group[x] == group[y] for y in same.NAMES] for x in same.NAMES])
    of_pictures, of_texts = same.cosines("pictures"), same.cosines("texts")
    for found in of_pictures, of_texts:
        assert found[equal].min() > 0.99999
    assert of_texts[~equal].max() < 0.9985
    # Of one length the first two lines are one.
    first = [i for i, x in enumerate(same.NAMES) if group[x] < 2]
    assert of_pictures[first][:, first].min() > 0.99999
    others = [i for i, x in enumerate(same.NAMES) if group[x] > 1]
    assert of_pictures[first][:, others].max() < 0.96
    columns = [same.NAMES.index(name) for name in ("GRPO", "Dr. GRPO")]
    for names, *shown in cells:
        row = same.NAMES.index(names.split(", ")[0])
        for found, both in zip((of_pictures, of_texts), shown):
            assert both == ", ".join(f"{x:.3f}" for x in found[row, columns])


# ---- the files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["variants", "texts"])
def test_the_files_have_one_row_per_run(name):
    rows = plan.read(name)
    columns = "start", "loss", "flags", *plan.TEXTS, "lr", "seed"
    runs = [tuple(map(row.get, columns)) for row in rows]
    assert len(set(runs)) == len(runs) > 20
    assert Path(plan.ROOT, "benchmarks", f"{name}.csv").read_text().count("\r") == 0
    # Of the judging seeds all name the CPU.
    assert all(row["cpu"] for row in rows if int(row["seed"]) >= 20)


def test_seeds_that_judge_have_800_answers():
    assert {(int(row["seed"]) >= 10, row["answers"]) for row in plan.read("texts")} <= {
        (False, "5"),
        (True, "20"),
    }
