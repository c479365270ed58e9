"""The benchmarks run, and what they print follows from what they measure."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY

from benchmarks import losses, tables, variants
from runtime.data import read_file


def test_a_row_is_the_run_that_its_flags_name(monkeypatch, tmp_path):
    """A copy with the loss is trained, then judged; pictures that were thrown away count."""
    calls = []

    def run(call, cwd, **_):
        assert (cwd / "grpo.py").read_text() == losses.edited("Dr. GRPO")["grpo.py"]
        calls.append(" ".join(map(str, call[2:])))
        (out := cwd / call[-1]).mkdir()
        captions = [prompt.text for prompt in read_file(str(cwd / "captions.txt"))]
        assert captions == [prompt.text for prompt in read_file(f"{TINY}/heldout.txt")]
        judged = {"reward/correct": [0.5, 0.1], "reward/clean": [0.9, 0], "reward/many": [0.25, 0]}
        records = {"groups": [{"reward": [1, 0]}] * 2, "evaluation": [judged]}
        records["metrics"] = [{"clip_fraction": 0.2, "drawn": 2.0}, {"clip_fraction": None}]
        for name, lines in records.items():
            (out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(variants.subprocess, "run", run)
    monkeypatch.setattr(variants, "OUT", tmp_path)
    monkeypatch.setattr(variants, "CSV", file := tmp_path / "variants.csv")
    file.write_text(",".join(variants.COLUMNS) + "\n")
    flags = str.split("--start shipped --lr 1e-3 --seed 3 --keep --kl-coef 0")
    variants.main("Dr. GRPO", *flags)
    (row,) = csv.DictReader(file.open())
    assert calls[0].endswith("--eval-every 0 --kl-coef 0 --lr 0.001 --seed 3 --out run")
    assert calls[1].endswith(f"--adapter run {variants.JUDGED} --out judged")
    assert [row[name] for name in ("loss", "flags", "lr", "seed", "step", "pictures")] == [
        *("Dr. GRPO", "--kl-coef 0", "0.001", "3", "2", "6")
    ]
    shares = [float(row[name]) for name in ("correct", "clean", "many", "clipped")]
    assert shares == [0.5, 0.9, 0.25, 0.2]


def test_no_seed_chooses_its_own_rate():
    rates = {1e-3: {0: 0.9, 1: 0.5, 2: 0.6}, 2e-3: {0: 0.6, 1: 0.7, 2: 0.5}, 4e-3: {0: 0.8}}
    # For seed 0 the others have 0.55 and 0.6; for seed 1 0.75, 0.55, 0.8; for seed 2 0.7, 0.65, 0.8
    chosen = tables.at_rates_of_others(tables.grid(rates))
    np.testing.assert_equal(chosen, [0.6, np.nan, np.nan])
    del rates[4e-3]
    both = np.stack([tables.grid(rates), 2 * tables.grid(rates)])
    np.testing.assert_allclose(tables.at_rates_of_others(both), [[0.6, 0.5, 0.6], [1.2, 1.0, 1.2]])


def test_variances_by_hand():
    """Three seeds share their median, five have their own, as has a row with a large spread."""
    spread = lambda x: np.array([-x, 0.0, x])  # variance x * x
    rows = {("hard", str(x)): spread(x) for x in (1, 2, 3, 30)}
    rows["hard", "five"] = np.array([-4.0, -4, 0, 4, 4])  # 16
    rows["texts", "a"] = spread(7)
    shared = 9 / np.log(2)
    found = tables.variances(rows)
    expected = [shared, shared, shared, 900, 16, 49 / np.log(2)]
    assert [*found.values()] == pytest.approx(expected)
    twice = tables.variances({key: np.stack([x, 2 * x]) for key, x in rows.items()})
    assert twice["hard", "30"].tolist() == pytest.approx([900, 3600])


def test_intervals_by_hand():
    """Of one pair with five seeds they are Welch's: of 4 to 8 degrees of freedom. Of several pairs
    they are wider, and where rates had to be chosen. What is far off is found; what is not there is
    found 5 times in 100."""
    few = {("hard", "a"): [0.1, 0.2, 0.3, 0.1, 0.2], ("hard", "b"): [0.4, 0.4, 0.7, 0.4, 0.4]}
    many = {key: np.array([x]) for key, x in few.items()}
    pair = tuple(many)
    ((difference, half, power),) = tables.compare(many, [pair], 1e-9, 100_000)[1].values()
    error = sum(x.var(ddof=1) / 5 for x in many.values()) ** 0.5
    assert difference == pytest.approx(0.18 - 0.46) and 2.306 * error < half < 2.776 * error
    assert power == pytest.approx(0.05, abs=0.005)
    assert tables.compare(many, [pair], 9.0)[1][pair][2] > 0.99
    others = {("texts", str(i)): many[pair[0]] + i for i in range(5)}
    several = [pair, *((("texts", str(i)), ("texts", "0")) for i in range(1, 5))]
    assert tables.compare(many | others, several)[1][pair][1] > 1.1 * half
    tied = {key: np.concatenate([x, x + 1e-3, x + 2e-3]) for key, x in many.items()}
    assert tables.compare(tied, [pair])[1][pair][1] > 1.1 * half


def test_the_tables_are_of_the_files(monkeypatch, capsys):
    """Each row against its own reference; what the files do not name stays out."""
    row = dict.fromkeys(variants.COLUMNS, "0.5") | {"start": "hard", "step": "20", "lr": "0.001"}
    rows = []
    for loss, flags, share in [
        ("GRPO", "--kl-coef 0", 0.7),
        ("RAFT", "--kl-coef 0", 0.6),
        ("GRPO", "--kl-coef 0 --mini-batches 4", 0.8),
        ("GSPO", "--kl-coef 0 --mini-batches 4", 0.3),
        ("GRPO", "--kl-coef 0 --iterations 8", 0.1),
    ]:
        for seed in range(5):
            rows.append(
                row | {"correct": share + 0.01 * seed, "loss": loss, "flags": flags, "seed": seed}
            )
    monkeypatch.setattr(tables, "read", lambda name: rows if name == "variants" else [])
    monkeypatch.setattr(tables, "table_of_kl", str)
    monkeypatch.setattr(tables, "table_of_splits", str)
    tables.main()
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[3:5] for line in lines[2:9]}
    assert cells["RAFT"][0] == "62.0%" and cells["RAFT"][1].startswith("**-10.0 ± ")
    assert cells["GSPO, 4 mini-batches"][1].startswith("**-50.0")
    assert cells["GRPO, 4 mini-batches"][1].startswith("**+10.0")
    assert len(lines) and not [line for line in lines if "12.0%" in line]
    alone = [line.split(" | ")[1:] for line in lines[-3:]]
    assert [(row, difference[:5]) for row, _, difference in alone] == [
        ("RAFT", "-10.0"),
        ("GRPO, 4 mini-batches", "+10.0"),
        ("GSPO, 4 mini-batches", "-50.0"),
    ]
    half = float(alone[0][2].split()[2])  # Welch: 8 degrees of freedom
    assert half == pytest.approx(2.306 * 100 * (2 * 0.00025 / 5) ** 0.5, abs=0.15)


@pytest.mark.parametrize("name", ["variants", "texts"])
def test_the_files_have_one_row_per_run(name):
    rows = tables.read(name)
    runs = [
        tuple(
            row.get(x)
            for x in ("start", "loss", "flags", "mini_batches", "iterations", "lr", "seed", "step")
        )
        for row in rows
    ]
    assert len(set(runs)) == len(runs) > 20
    assert Path(tables.ROOT, "benchmarks", f"{name}.csv").read_text().count("\r") == 0
