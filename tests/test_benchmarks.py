"""The benchmarks run, and what they print follows from what they measure."""

import csv
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import check
import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    TINY,
    build_run,
    painted,
    perturb,
    prompts_of,
    shorten,
    tiny_settings,
)
from PIL import Image, ImageColor

import rewards
import train
from benchmarks import best_of, film, repair_decoder, variants
from runtime.jsonl import as_lines
from runtime.pictures import save_pictures
from viewer.sheets import RED


@pytest.fixture
def run(capsys):
    """Runs a benchmark as a command; returns the lines that it printed."""

    def run(module, *arguments):
        module.main(*map(str, arguments))
        return capsys.readouterr().out.splitlines()

    return run


# ---- the film ------------------------------------------------------------------------------------


def test_the_film_shows_what_each_evaluation_has_painted(run, tmp_path):
    """Of four captions, of which the last picture is wrong."""
    captions = ["a ring", "two rings", "a red ring", "a ring and a cross"]
    lines = []
    for step in (0, 20):
        shown = []
        for i, caption in enumerate(captions):
            place = f"evaluation/{step:06d}/{i}"
            images = [Image.new("RGB", (64, 64), (60 * i, 200, step)) for _ in range(4)]
            saved = save_pictures(tmp_path, place, images, {})
            shown.append({"prompt": caption, "reward/correct": [1, 1, 1, 0], **saved})
        share = {"reward/correct": [step / 100, 0]}
        lines.append({"step": step, "judge": "correct", "shown": shown, "held out": share})
    (tmp_path / "evaluation.jsonl").write_text(as_lines(lines))
    (tmp_path / "settings.json").write_text("{}")
    before, after = film.evaluations(tmp_path)
    assert before[:2] == (0, 0) and after[:2] == (20, 0.2)
    assert [(caption, [is_correct for _, is_correct in cells]) for caption, cells in after[2]] == [
        (caption, [1, 1, 1, 0]) for caption in captions
    ]
    pixels = np.asarray(film.frame(*after)).astype(int)
    assert not np.array_equal(pixels[36:, 144:448], pixels[36:, 592:])  # other captions
    red = np.abs(pixels[35] - ImageColor.getrgb(RED)).sum(-1) < 60  # just above the pictures
    for left in (144, 592):
        assert red[left + 228 : left + 300].all() and not red[left : left + 222].any()
    run(film, tmp_path, tmp_path / "film.gif")
    sheet = Image.open(tmp_path / "film.gif")
    assert (sheet.size, sheet.n_frames) == ((896, 188), 2)


# ---- a rounded decoder ---------------------------------------------------------------------------


def test_repairing_a_rounded_decoder(run, tmp_path):
    """What is painted is a right drawing, by matrices of four levels per row."""
    few = "--steps 1 --prompts-per-step 2 --group-size 2 --eval-count 2 --decode-steps 2"
    few += " --eval-decode-steps 2 --out"
    lines = "\n".join(run(repair_decoder, *few.split(), tmp_path / "run"))
    before, after = map(
        float, re.search(r"\| \S+likeness +\| (\S+) \S+ \S+ -> (\S+)", lines).groups()
    )
    assert 0.5 < before < 1 and abs(after - before) < 0.2 and after != before

    texts = ["a cross and a ring", "three diamonds"]
    pipe, settings = train.load(TINY, CPU), tiny_settings()
    for text in texts:
        _, images = painted(pipe, text, repair_decoder.codes_of(text), settings, 0)
        assert check.correct(images, [text]).all()
    rounded = repair_decoder.load_rounded(TINY, CPU).transformer.transformer_blocks[0]
    assert {len(row.unique()) for row in rounded.attn1.to_q.weight} <= {2, 3, 4}


# ---- variants of GRPO ----------------------------------------------------------------------------


def made_up(**shares):
    """Lines of variants.csv: of each variant 70% +- 2% after 20 steps, or what is given."""
    rows = []
    names = dict.fromkeys((start, name) for start, name, *_ in ALL_VARIANTS)
    for start, name in names:
        for lr, seed, step in itertools.product([5e-4, 1e-3, 2e-3, 4e-3], range(5), (10, 12, 20)):
            share = shares.get(name, 0.7) + 0.02 * (seed - 1) * (-1) ** len(name)
            row = dict.fromkeys(variants.COLUMNS, share if step == 20 else 0.5)
            row["chosen_on"] = float(lr == 1e-3) if (step, seed, start) == (20, 0, "hard") else None
            where = {"start": start, "variant": name, "lr": lr, "seed": seed, "step": step}
            row["kl"] = None if name == "no KL" else 0.5
            rows.append(row | where)
    for start in ("hard", "shipped"):
        before = dict.fromkeys(variants.COLUMNS, 0.5) | {"seed": 0, "step": 0, "lr": None}
        rows.append(before | {"start": start, "variant": "before training", "chosen_on": None})
    return rows


ALL_VARIANTS = variants.ALL


def write(rows):
    with open(variants.CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, variants.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def test_the_table_of_variants_by_hand(run, monkeypatch, tmp_path):
    """What the file has is read, not made again."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(variants, "OUT", tmp_path)
    monkeypatch.setattr(variants, "CSV", tmp_path / "variants.csv")
    write(made_up(**{"4 iterations": 0.4}))
    lines = run(variants)
    (line,) = [line for line in lines if line.startswith("| 4 iterations | 1e-3")]
    assert line == "| 4 iterations | 1e-3 | 50.0% | 40.0% | 40.0% | plain GRPO | **-30.0** |"
    assert [line for line in lines if line.endswith("| plain GRPO | +0.0 |")]  # not told apart
    assert Image.open(tmp_path / "variants.png").width == 880


def test_a_gamed_run_is_a_dot_in_both_panels(monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    before, run = dict.fromkeys(variants.COLUMNS, 0.3), dict.fromkeys(variants.COLUMNS, 0.9)
    before |= {"start": "shipped", "variant": "before training", "seed": 0}
    run |= {"start": "gamed", "variant": "KL 0.2, k2", "step": 12, "kl": 0.01}
    figures = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file: figures.append(self))
    variants.draw_gamed([before, run], None)
    for axes, value in zip(figures[0].axes, (0.2, 0.01)):
        k2, k3 = axes.collections
        assert k2.get_offsets().tolist() == [[value, 0.9]] and len(k3.get_offsets()) == 0
        assert [line.get_ydata() for line in axes.lines] == [[0.3, 0.3]]  # before training


def test_a_row_is_trained_at_its_best_rate_or_the_given_and_kept(run, monkeypatch, tmp_path):
    monkeypatch.setattr(variants, "OUT", tmp_path)
    monkeypatch.setattr(variants, "CSV", tmp_path / "variants.csv")
    monkeypatch.setattr(variants, "make_hard_start", lambda: made.append(1))
    monkeypatch.setattr(variants, "lines_of", lambda *given: trained.append(given) or [row])
    trained, made = [], []
    rows = [row for row in made_up() if row["variant"] in ("no std", "KL 1")]
    row = rows[0] | {"lr": 8e-3, "step": 10, "chosen_on": 0.4}
    write(rows)
    no_std, k2 = variants.HARD[3], variants.HONEST["KL 0.2, k2"]
    run(variants, "KL 1")
    assert trained.pop()[1:] == (2e-3, 0) and not made
    assert run(variants, "no std") == ["no std, rate 1e-3, after 10 steps: 50.0%"] and made
    assert len(variants.read()) == len(rows)
    run(variants, no_std.name, k2.name, "--lr", "8e-3", "--seed", "1", "--keep")
    assert trained == [(no_std, 1e-3, 0), (no_std, 8e-3, 1), (k2, 8e-3, 1)]
    assert len(variants.read()) == len(rows) + 2
    for wrong in ("nostd", "no std --keep"):  # a run that is kept already
        with pytest.raises(SystemExit):
            run(variants, *wrong.rsplit(maxsplit=1 if "-" in wrong else 0))


def test_the_threshold_of_one_comparison_is_students():
    """Of three differences: 4.303, from the tables."""
    alone = [variants.Variant("hard", "plain GRPO", "before training")]
    differences, error, threshold = variants.compare(made_up(), alone)
    assert threshold / error == pytest.approx(4.303, rel=0.05)
    assert error == pytest.approx(0.02 / 3**0.5) and differences == pytest.approx(
        {"plain GRPO": 0.2}
    )


def test_the_harder_start_is_another_policy(monkeypatch, tmp_path):
    monkeypatch.setattr(variants, "OUT", tmp_path)
    monkeypatch.setattr(variants, "HARD_START", {"steps": 1, "lr": 1e-4})
    variants.make_hard_start()
    weights = "vision_language_encoder/model.safetensors"
    assert (tmp_path / "hard-start" / weights).read_bytes() != (TINY / weights).read_bytes()


def test_the_exact_kl_by_trying_every_code(monkeypatch):
    """Each code of each place in turn, read again as the only one that differs."""
    shorten(monkeypatch.setattr)
    settings, prompts = tiny_settings("--temperature 2"), prompts_of("a red circle")
    run = build_run(settings)
    perturb(run.policy.model, 0.2)
    data = SimpleNamespace(held_out=prompts)
    monkeypatch.setattr(variants, "loaded", lambda model, adapter: (settings, data, run))
    monkeypatch.setattr(variants, "PICTURES", 4)
    found = variants.exact_kl(None, None)
    encoded = run.glm_image.encode(prompts, settings)
    (group,) = run.policy.sample(encoded, 4, variants.evaluation.SEEDS["held out"])
    expected = 0
    for place in range(group.tokens.shape[1]):
        for code in group.nucleus[:, place].any(0).nonzero().flatten():
            changed = replace(group, tokens=group.tokens.clone())
            changed.tokens[:, place] = code
            with torch.no_grad():
                pi = run.policy.logprobs(changed, torch.arange(4))[:, place]
                with run.policy.reference():
                    ref = run.policy.logprobs(changed, torch.arange(4))[:, place]
            drawable = group.nucleus[:, place, code]
            expected += (pi.exp() * (pi - ref))[drawable].sum() / group.tokens.numel()
    assert found == pytest.approx(expected.item(), rel=1e-4) and found > 0.01


# ---- the best of k -------------------------------------------------------------------------------


def test_the_best_of_k_by_hand(run, monkeypatch, tmp_path):
    """Of one type never and always correct, of another twice 1 picture in 64."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(best_of, "CSV", tmp_path / "best-of.csv")
    monkeypatch.setattr(variants, "OUT", tmp_path / "runs")
    rows = [("two", 0), ("two", 64), ("colours", 1), ("colours", 1)]
    lines = [f"{variants.BEFORE},{kind},{i},{n},2,1,0.25" for i, (kind, n) in enumerate(rows)]
    for seed, correct in enumerate((64, 0)):  # all are correct, none is
        lines += [
            f'"default run, seed {seed}",{kind},{i},{correct},{seed + 1},1,0'
            for i, (kind, _) in enumerate(rows)
        ]
    best_of.CSV.write_text("\n".join([",".join(best_of.COLUMNS), *lines, ""]))
    *_, line, of_two_seeds = run(best_of)
    assert of_two_seeds == "| default run | 50.0% +- 0.0% | 50.0% | 1.5 | 1 | 0 |"
    # 1/64 and 1 in the one type, 1/2 in the other: the mean of both.
    numbers = "25.8% +- 25.0% | 75.0% | 2 | 1 | 0.25"
    assert line == f"| before training | {numbers} |"
    assert Image.open(tmp_path / "runs" / "best-of.png").width == 880


def test_a_run_is_measured_by_its_distinct_pictures(run, monkeypatch, tmp_path):
    monkeypatch.setattr(best_of, "CSV", tmp_path / "best-of.csv")
    monkeypatch.setattr(best_of, "PICTURES", 3)
    best_of.CSV.write_text(",".join(best_of.COLUMNS) + "\n")
    red, blue = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")

    def score_prompts(run, settings, rewards, prompts, seed):
        assert (settings.group_size, list(rewards)) == (3, ["correct", "clean"])
        for row in range(len(prompts)):
            yield row, {"correct": torch.tensor([1.0, 0.0, 1.0])}, [red, blue, red.copy()]

    monkeypatch.setattr(best_of.evaluation, "score_prompts", score_prompts)
    monkeypatch.setattr(best_of, "KS", [1, 2])
    run(best_of, variants.BEFORE, "mine")
    with pytest.raises(SystemExit, match="has 'mine' already"):
        run(best_of, variants.BEFORE, "mine")
    name, _, _, *numbers = best_of.CSV.read_text().splitlines()[1].split(",")
    assert name == "mine" and numbers[:3] == ["2", "2", "1"]
    different = 1 - rewards.ssim_map(rewards.to_tensor(red), rewards.to_tensor(blue)).mean().item()
    assert float(numbers[3]) == pytest.approx((2 * 0.5 + 1) / 3 * different, abs=1e-4)


def test_worth_has_the_table_of_best_of():
    rows = [*csv.DictReader(best_of.CSV.read_text().splitlines())]
    assert best_of.table(rows) in (best_of.ROOT / "docs" / "worth.md").read_text()
