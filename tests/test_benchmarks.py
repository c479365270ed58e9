"""The benchmarks run, and what they print follows from what they measure."""

import csv
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    TINY,
    build_run,
    perturb,
    prompts_of,
    shorten,
    tiny_settings,
)

from benchmarks import tables, variants
from runtime.data import read_file


@pytest.fixture
def run(capsys):
    """Runs a benchmark as a command; returns the lines that it printed."""

    def run(module, *arguments):
        module.main(*map(str, arguments))
        return capsys.readouterr().out.splitlines()

    return run


# ---- variants of GRPO ----------------------------------------------------------------------------


def made_up(**shares):
    """Lines of variants.csv: of each variant 70% +- 2% after 20 steps, or what is given."""
    rows = []
    names = dict.fromkeys((start, name) for start, name, *_ in ALL_VARIANTS)
    for start, name in names:
        for lr, seed, step in itertools.product([5e-4, 1e-3, 2e-3, 4e-3], range(5), (10, 12, 20)):
            share = shares.get(name, 0.7) + 0.02 * (seed - 1) * (-1) ** len(name)
            last = step == (10 if start == "shipped" else 20)
            row = dict.fromkeys(variants.COLUMNS, share if last else 0.5)
            chosen = last and seed == 0 and start != "gamed"
            row["chosen_on"] = float(lr == 1e-3) if chosen else None
            where = {"start": start, "variant": name, "lr": lr, "seed": seed, "step": step}
            where["pictures"] = 64 * step + 40 * (name == "RAFT")  # steps may take more
            row["kl"] = None if name == "no KL" else 0.5
            rows.append(row | where)
    for start in ("hard", "shipped"):
        before = dict.fromkeys(variants.COLUMNS, 0.5) | {"seed": 0, "step": 0, "lr": None}
        rows.append(before | {"start": start, "variant": "before training", "chosen_on": None})
    return rows


ALL_VARIANTS = [*variants.ALL, *variants.SHIPPED]


def write(rows):
    with open(variants.CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, variants.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def test_the_table_of_variants_by_hand(run, monkeypatch, tmp_path):
    """What the file has is read, not made again."""
    monkeypatch.setattr(variants, "OUT", tmp_path)
    monkeypatch.setattr(variants, "CSV", tmp_path / "variants.csv")
    write(made_up(**{"4 iterations": 0.4}))
    lines = run(tables)
    assert {line for line in lines if line.startswith("| 4 iterations | 1e-3")} == {
        "| 4 iterations | 1e-3 | 50.0% | 40.0% | GRPO without KL | **-30.0** |",
        "| 4 iterations | 1e-3 | 40.0% | GRPO without KL | **-30.0** |",  # as shipped, 10 steps
    }
    assert [line for line in lines if line.endswith("| GRPO without KL | +0.0 |")]  # no difference
    assert [line for line in lines if line.startswith("| RAFT | 1e-3 | 50.0% |")]
    # Correct pictures of 48 captions, not a mean over their types.
    shares = dict.fromkeys(variants.CAPTIONS, 0) | {"one": 1, "binding": 0.5}
    assert variants.correct(shares) == pytest.approx((2 + 5) / 48)
    captions = Counter(prompt.type for prompt in read_file(f"{TINY}/heldout.txt"))
    assert captions == variants.CAPTIONS


def test_a_row_is_trained_at_its_best_rate_and_kept_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(variants, "OUT", tmp_path)
    monkeypatch.setattr(variants, "CSV", tmp_path / "variants.csv")
    write(made_up())
    trained = []
    monkeypatch.setattr(variants, "train_again", lambda *given: trained.append(given))
    variants.main("GSPO")
    variants.main("GSPO", "--shipped", "--lr", "3e-3", "--seed", "1", "--keep")
    found = [(row.start, row.name, *others) for row, *others in trained]
    assert found == [("hard", "GSPO", 1e-3, 0, False), ("shipped", "GSPO", 3e-3, 1, True)]
    assert "--steps 10" in trained[1][0].flags
    with pytest.raises(SystemExit):
        variants.main("GSPO", "--shipped", "--seed", "1", "--keep")
    assert "variants.csv has GSPO at 0.001 with seed 1 already" in capsys.readouterr().err


def test_the_threshold_of_one_comparison_is_students():
    """Of three differences: 4.303, from the tables."""
    alone = [variants.Variant("hard", "GRPO without KL", "before training")]
    differences, error, threshold = tables.compare(made_up(), alone)
    assert threshold / error == pytest.approx(4.303, rel=0.05)
    assert error == pytest.approx(0.02 / 3**0.5) and differences == pytest.approx(
        {"GRPO without KL": 0.2}
    )


def test_the_exact_kl_by_trying_every_code(monkeypatch):
    """Each code of each place in turn, read again as the only one that differs."""
    shorten(monkeypatch.setattr)
    settings, prompts = tiny_settings("--temperature 2"), prompts_of("a red circle")
    run = build_run(settings)
    perturb(run.trainer.model, 0.2)
    data = SimpleNamespace(held_out=prompts)
    monkeypatch.setattr(variants, "loaded", lambda model, adapter: (settings, data, run))
    monkeypatch.setattr(variants, "PICTURES", 4)
    found = variants.exact_kl(None, None)
    encoded = run.glm_image.encode(prompts, settings)
    (group,) = run.trainer.sample(encoded, 4, variants.evaluation.SEED)
    expected = 0
    for place in range(group.tokens.shape[1]):
        for code in group.nucleus[:, place].any(0).nonzero().flatten():
            changed = replace(group, tokens=group.tokens.clone())
            changed.tokens[:, place] = code
            with torch.no_grad():
                pi = run.trainer.logprobs(changed, torch.arange(4))[:, place]
                with run.trainer.reference():
                    ref = run.trainer.logprobs(changed, torch.arange(4))[:, place]
            drawable = group.nucleus[:, place, code]
            expected += (pi.exp() * (pi - ref))[drawable].sum() / group.tokens.numel()
    assert found == pytest.approx(expected.item(), rel=1e-4) and found > 0.01
