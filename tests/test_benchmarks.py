"""The benchmarks run, and what they print follows from what they measure."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY

from benchmarks import losses, tables, texts, variants
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
    assert capsys.readouterr().out.strip() == row


def test_sums_over_the_tokens_of_texts_are_by_one_length():
    """By that of all batches, not by the longest answer of each. Other losses stay as they are."""
    new = torch.randn(2, 5, requires_grad=True)
    mask = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    weights = {}
    for loss in ("REINFORCE", "GRPO"):
        given = new, new.detach(), torch.tensor([-1.0, -1]), None, mask
        value, _ = texts.module(loss).compute_grpo_loss(*given, 0.2, 0.0)
        (weights[loss],) = torch.autograd.grad(value, new)
    torch.testing.assert_close(weights["REINFORCE"], mask / texts.LENGTH / 2)
    torch.testing.assert_close(weights["GRPO"], mask / mask.sum(1, keepdim=True) / 2)


def test_seeds_0_to_2_choose_and_seeds_10_to_14_judge():
    judging = {seed: seed / 100 for seed in range(10, 15)}
    own = {0: 0.5, 1: 0.5, 2: 0.5}
    rates = {
        4e-3: own | judging,  # as good as 2e-3, and higher
        2e-3: own | {3: 0.0, 4: 0.0} | judging,
        1e-3: {0: 0.4, 1: 0.4, 2: 0.4, 3: 1.0, 4: 1.0} | dict.fromkeys(range(10, 15), 1.0),
        8e-3: {0: 0.9, 1: 0.9},
    }
    assert [*tables.means(rates)] == [1e-3, 2e-3, 4e-3]
    assert tables.best_rate(rates) == 2e-3
    assert tables.best_rate({8e-3: rates[8e-3]}) == 0
    runs = {("texts", "GRPO"): rates, ("texts", "GSPO, 4 mini-batches"): {1e-3: own}}
    (shares,) = tables.judge(runs, runs).values()  # the other row has not been judged
    assert shares.tolist() == [0.1, 0.11, 0.12, 0.13, 0.14]
    clipped = {key: {2e-3: dict.fromkeys(range(10, 15), 0.3)} for key in runs}
    assert tables.judge(runs, clipped)["texts", "GRPO"].tolist() == [0.3] * 5


@pytest.mark.parametrize(
    "p, freedom, expected",
    [(0.975, 4, 2.776), (0.995, 10, 3.169), (0.999, 6, 5.208), (0.975, 1000, 1.962)],
)
def test_quantiles_are_those_of_the_t_table(p, freedom, expected):
    assert tables.quantile(p, freedom) == pytest.approx(expected, abs=6e-4)


def test_intervals_by_hand():
    """Variances of 2.5, 10 and 0, with a mean of 25 / 6. The other task does not count.

    There are two differences, so the quantiles are those of 1 - 0.05 / 4.
    """
    values = {
        ("texts", "GRPO"): np.array([1.0, 2, 3, 4, 5]),
        ("texts", "RAFT"): np.array([2.0, 4, 6, 8, 10]),
        ("texts", "GPG"): np.array([7.0, 7, 7, 7, 7]),
        ("pictures", "GRPO"): np.array([-10.0, 10, -10, 10, 0]),
    }
    reference, row, other = ((2 * 25 / 6 + 4 * own) / 6 / 5 for own in (2.5, 10, 0))
    found = tables.compare(values)
    assert found.keys() == {("texts", "RAFT"), ("texts", "GPG")}
    freedom = [6 * (reference + x) ** 2 / (reference**2 + x**2) for x in (row, other)]
    assert [*map(int, freedom)] == [9, 10]  # the quantiles' degrees of freedom
    difference, half = found["texts", "RAFT"]
    assert difference == 3 and half == pytest.approx(2.685 * (reference + row) ** 0.5, rel=1e-3)
    difference, half = found["texts", "GPG"]
    assert difference == 4 and half == pytest.approx(2.634 * (reference + other) ** 0.5, rel=1e-3)


def test_all_intervals_hold_in_93_of_100_studies():
    """Studies with the variances of these runs, in which all losses are equal."""
    random, held, spread = np.random.default_rng(0), [], {}
    for key, rates in tables.read_runs().items():
        if key[1] in tables.ROWS and (best := tables.best_rate(rates)):
            spread[key] = np.std([*rates[best].values()], ddof=1)
    assert len(spread) > 10
    for _ in range(2000):
        study = {key: random.normal(0, x, 5) for key, x in spread.items()}
        intervals = tables.compare(study).values()
        held.append(all(abs(difference) <= half for difference, half in intervals))
    assert np.mean(held) >= 0.93


def test_the_tables_are_of_the_files(monkeypatch, capsys):
    """Each row against its own reference, bold where 0 is outside; the clip where it can act."""
    row = {"start": "hard", "lr": "0.001", "many": "0.5", "clipped": "0.0025"}
    rows = []
    for loss, flags, share in [
        ("GRPO", "--kl-coef 0", 0.7),
        ("RAFT", "--kl-coef 0", 0.6),
        ("GPG", "--kl-coef 0", 0.71),
        ("GRPO", "--kl-coef 0 --mini-batches 4", 0.8),
        ("GSPO", "--kl-coef 0 --mini-batches 4", 0.3),
    ]:
        for seed in (0, 1, 2, *range(10, 15)):
            correct = share + 0.01 * (seed - 12) * (seed >= 10)
            rows.append(row | {"correct": correct, "loss": loss, "flags": flags, "seed": seed})
    monkeypatch.setattr(tables, "read", lambda name: rows if name == "variants" else [])
    monkeypatch.setattr(tables, "table_of_kl", str)
    monkeypatch.setattr(tables, "table_of_splits", str)
    tables.main()
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[1:3] for line in lines[2:20]}
    assert cells["RAFT"][0] == "60.0%" and cells["RAFT"][1].startswith("**-10.0±")
    assert cells["GPG"][1].startswith("+1.0±") and "clip" not in cells["GPG"][0]
    assert cells["GSPO, 4 mini-batches"][1].startswith("**-50.0")
    assert cells["GRPO, 4 mini-batches"][1].startswith("**+10.0")
    assert cells["GRPO, 4 mini-batches"][0] == "80.0%, clip 0.250%"
    assert "| pictures | RAFT | 0.001: 60.0% | 0.001 |" in lines


def test_the_chart_is_drawn_of_what_is_there(monkeypatch, tmp_path):
    """A line for each row with several rates, in the panel of its task and number of steps."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    (tmp_path / "assets").mkdir()
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    drawn, plot = [], axes.plot

    def recorded(self, *args, label=None, **style):
        drawn.append(label)
        return plot(self, *args, label=label, **style)

    monkeypatch.setattr(axes, "plot", recorded)
    own = {rate: dict.fromkeys((0, 1, 2), 0.5) for rate in (1e-3, 2e-3)}
    rows = {(task, row): own for task in tables.TASKS for row in ("GRPO", "GRPO, 4 passes")}
    rows["texts", "RAFT"] = {1e-3: own[1e-3]}
    tables.draw(tables.defaultdict(dict, rows), {("texts", "GPG"): (0, 0.1)})
    assert [label for label in drawn if label] == ["GRPO", "GRPO, 4 passes"] * 2
    assert (tmp_path / "assets" / "losses.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["variants", "texts"])
def test_the_files_have_one_row_per_run(name):
    rows = tables.read(name)
    runs = [
        tuple(
            row.get(x)
            for x in ("start", "loss", "flags", "mini_batches", "iterations", "lr", "seed")
        )
        for row in rows
    ]
    assert len(set(runs)) == len(runs) > 20
    assert Path(tables.ROOT, "benchmarks", f"{name}.csv").read_text().count("\r") == 0


def test_seeds_that_judge_have_800_answers():
    assert {(int(row["seed"]) >= 10, row["answers"]) for row in tables.read("texts")} <= {
        (False, "5"),
        (True, "20"),
    }
