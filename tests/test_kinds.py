"""Evaluations by kind of prompt: the file, which prompts are judged, errors by hand, table,
pictures, card."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import records
from PIL import Image

from runtime import without_nan
from runtime.data import Prompts, read_prompts
from runtime.pictures import WRONG, save_before_after
from runtime.report import (
    best_step,
    evaluation_metrics,
    kinds_table,
    rows_to_show,
    summary,
)

NAN = math.nan
MEAN = "mean of the kinds"


# ---- the file ------------------------------------------------------------------------------------


def read(folder, text):
    (folder / "prompts.txt").write_text(text)
    return read_prompts(folder / "prompts.txt", None)


def test_a_line_names_the_kind_of_the_prompts_below_it(tmp_path):
    text = "alone\n# kind: counting\nthree circles\n# kindred spirits\n## Kind = two words \n\n\\# 1 fan\n\\a\n#kind:counting\ntwo"
    prompts = read(tmp_path, text)
    # Comments are left out.
    assert prompts.texts == ["alone", "three circles", "# 1 fan", "\\a", "two"]
    assert prompts.kinds == ["other", "counting", "two words", "two words", "counting"]
    assert prompts.lines == [1, 3, 7, 8, 10]
    assert read(tmp_path, "a\n# b\n").kinds is None  # there is one kind, without a name


def test_evaluated_are_the_first_prompts_of_each_kind_in_turn():
    prompts = Prompts(list("abcdefg"), kinds=list("xxxyyzx"), lines=list(range(7)))
    assert "".join(prompts.evenly(5).texts) == "adfbe"
    assert (
        "".join(prompts.evenly(99).texts) == "adfbecg"
        and "".join(prompts.evenly(99).kinds) == "xyzxyxx"
    )
    assert prompts.evenly(4).lines == [0, 3, 5, 1]
    assert "".join(Prompts(list("abcd")).evenly(3).texts) == "abc"


# ---- numbers -------------------------------------------------------------------------------------


def test_errors_are_over_prompts():
    """Four pictures of a prompt that are all alike say no more than one: by numpy, prompt by
    prompt."""
    values = torch.tensor([[0.0] * 4, [1.0] * 4, [1.0] * 4]).flatten()
    metrics = evaluation_metrics({"a": values}, values, 4)
    assert metrics["reward"] == pytest.approx(2 / 3)
    error = pytest.approx(np.std([0, 1, 1], ddof=1) / math.sqrt(3))
    assert metrics["reward_error"] == metrics["reward_error/a"] == error
    assert (metrics["images"], metrics["prompts"]) == (12, 3)
    # One prompt says nothing of others.
    assert math.isnan(evaluation_metrics({}, values[:4], 4)["reward_error"])


def test_kinds_by_hand():
    """Of unequal size, with a picture that has no reward, and a kind to which one reward does not
    apply."""
    a = torch.tensor([0.0, 1.0, 1.0, 1.0, NAN, 0.5, 0.0, 0.0])  # four prompts, two pictures each
    b = torch.tensor([1.0, 0.0, 2.0, 4.0, 3.0, 3.0, NAN, NAN])
    metrics = evaluation_metrics({"a": a, "b": b}, a, 2, ["x", "x", "x", "y"])
    x, y, mean = (metrics["kinds"][kind] for kind in ("x", "y", MEAN))
    assert (x["prompts"], x["images"], y["prompts"], mean["prompts"]) == (3, 6, 1, 4)
    assert x["reward/a"] == pytest.approx(np.mean([0, 1, 1, 1, 0.5])) and y["reward/a"] == 0
    assert x["reward_error/a"] == pytest.approx(np.std([0.5, 1, 0.5], ddof=1) / math.sqrt(3))
    # One of its parts is not known.
    assert math.isnan(y["reward_error/a"]) and math.isnan(mean["reward_error/a"])
    assert (
        mean["reward/a"] == pytest.approx((x["reward/a"] + 0) / 2)
        and metrics["reward"] != mean["reward"]
    )
    assert math.isnan(y["reward/b"])
    # Of those that it has.
    assert mean["reward/b"] == x["reward/b"] and mean["reward_error/b"] == x["reward_error/b"]
    assert x["reward_error/b"] == pytest.approx(np.std([0.5, 3, 3], ddof=1) / math.sqrt(3))

    pairs = evaluation_metrics({}, torch.tensor([0.0, 1, 2, 4]), 1, list("xxyy"))["kinds"]
    # Errors of kinds are independent.
    assert pairs[MEAN]["reward_error"] == pytest.approx(math.hypot(0.5, 1.0) / 2)
    for kinds in (None, ["x"] * 4):
        assert "kinds" not in evaluation_metrics({"a": a}, a, 2, kinds)  # one kind needs no table


def evaluation(step, **numbers):
    """A record of evaluation.jsonl: two kinds of two prompts, two pictures each; `numbers`: the
    rewards of x and y."""
    record = {"step": step}
    for prefix, (x, y) in (("", numbers["training"]), ("held_out/", numbers["held_out"])):
        values = torch.tensor([x, x, x, x + 0.2, y, y, y, y + 0.2])
        metrics = evaluation_metrics(
            {"f.py:facts": values, "g.py:right": 2 * values}, values, 2, list("xxyy")
        )
        record |= {prefix + key: value for key, value in without_nan(metrics).items()}
    return record


BEFORE = evaluation(0, training=(0.2, 0.4), held_out=(0.1, 0.3))
AFTER = evaluation(9, training=(0.5, 0.4), held_out=(0.3, 0.3))


def test_the_table_by_hand():
    lines = kinds_table(BEFORE, AFTER)
    heads = [line.strip("| ").split(" | ")[0].strip(" -") for line in lines]
    assert heads == ["", "training", "", "x", "y", MEAN, "", "held-out", "", "x", "y", MEAN]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    # The lone reward is the sum, and shown once.
    assert cells[1] == ["training", "prompts", "f.py:facts", "g.py:right"]
    assert cells[3] == ["x", "2", "0.25 +- 0.05 -> 0.55 +- 0.05", "0.50 +- 0.10 -> 1.10 +- 0.10"]
    assert cells[5][:3] == [MEAN, "4", "0.35 +- 0.04 -> 0.50 +- 0.04"]
    assert cells[9][2] == "0.15 +- 0.05 -> 0.35 +- 0.05"
    assert len({len(line) for line in lines[1:6]}) == 1  # columns stand under one another
    assert "0.55 +- 0.05" in kinds_table(AFTER)[3] and "->" not in kinds_table(AFTER)[3]
    plain = {name: value for name, value in AFTER.items() if "kinds" not in name}
    assert kinds_table(plain) == kinds_table(plain, AFTER) == []


def test_two_rewards_have_their_sum_in_the_table():
    values = torch.tensor([0.0, 1, 2, 4])
    metrics = evaluation_metrics({"a": values, "b": values}, 2 * values, 1, list("xxyy"))
    assert kinds_table(metrics)[1].split()[3::2] == ["prompts", "reward", "a", "b"]


def test_a_line_of_an_evaluation_has_errors():
    before, after = (
        np.std(means, ddof=1) / 2 for means in ([0.2, 0.3, 0.4, 0.5], [0.5, 0.6, 0.4, 0.5])
    )
    words = f"f.py:facts 0.350 +- {before:.3f} -> 0.500 +- {after:.3f}"
    assert summary("", BEFORE, AFTER).startswith(words)
    assert summary("held_out/", AFTER).endswith("(8 images: 4 prompts x 2)")


def test_a_drop_within_the_error_is_no_warning():
    def words(*pairs):
        records = [
            {"step": i, "held_out/reward": r, "held_out/reward_error": e}
            for i, (r, e) in enumerate(pairs)
        ]
        return best_step(records)[1]

    # 0.08 each, 0.11 both.
    assert words((0.877, 0.03), (0.875, 0.03)) == "" and words((0.9, 0.08), (0.8, 0.08)) == ""
    assert words((0.9, 0.03), (0.8, 0.03)) == (
        "on held-out prompts reward was higher after 0 steps, 0.900 +- 0.030, than at the end, 0.800 +- 0.030"
    )
    assert words((0.9, None), (0.8, None)) != ""  # of one prompt there is no error


def test_the_best_step_of_z_scores_is_that_of_a_judge():
    """The raw sum is not what such a run maximises."""
    evaluations = [{"step": 0, "held_out/reward": 5.0, "held_out/reward/hps": 0.2}]
    evaluations.append({"step": 1, "held_out/reward": 1.0, "held_out/reward/hps": 0.3})
    assert best_step(evaluations)[0] == 0 and best_step(evaluations, "reward/hps") == (1, "")


# ---- pictures ------------------------------------------------------------------------------------


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def count(picture, colour):
    """How many pixels are of a colour such as "#2060c0"."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(picture - wanted).sum(-1) < 12).sum())


def run_with(folder, *evaluations):
    """A run's folder with the pictures of evaluations: {step: for each prompt (rewards, {judge: its
    answers})}."""
    made = []
    for step, shown in evaluations:
        pictures = folder / "evaluation" / f"{step:06d}"
        pictures.mkdir(parents=True)
        for i, (rewards, _) in enumerate(shown):
            for j in range(len(rewards)):
                Image.new("RGB", (64, 64), "black").save(pictures / f"{i + 1}-{j + 1}.png")
        made.append(
            {"step": step, "shown": [[f"prompt {i}", *entry] for i, entry in enumerate(shown)]}
        )
    return made


def test_wrong_pictures_are_framed(tmp_path):
    """By the first judge that answers yes or no; without such a judge there are no frames."""
    before = (
        0,
        [([0.1, 0.2], {"h.py:pretty": [0.0, 0.7], "g.py:right": [0, 1.0], "late": [1, 1]})],
    )
    after = (
        5,
        [([0.1, 0.2], {"h.py:pretty": [1.0, 0.0], "g.py:right": [1, None], "late": [0, 0]})],
    )
    save_before_after(tmp_path, *run_with(tmp_path, before, after))
    sheet = pixels(tmp_path / "before-after.png")
    black = sheet.sum(-1) == 0
    row = int(black.sum(1).argmax())
    left = [x for x in np.flatnonzero(black[row]) if not black[row, x - 1]]
    frames = ["#{:02x}{:02x}{:02x}".format(*sheet[row, x - 2]) for x in left]
    assert frames == [WRONG, "#ffffff", "#ffffff", "#ffffff"]
    save_before_after(
        tmp_path, None, *run_with(tmp_path, (7, [([0.1, 0.2], {"h.py:pretty": [0.0, 0.7]})]))
    )
    sheet = pixels(tmp_path / "before-after.png")
    assert count(sheet, WRONG) == 0


def test_prompts_without_a_right_picture_are_shown():
    """The first of each kind; none wrong: the first of each kind; no kinds, no judge: the first."""
    prompts = Prompts(["a", "b", "c", "d"], kinds=["low", "low", "high", "high"])
    right = [1, 0, 0, 0, 0, 0, 0, 0]
    assert rows_to_show(prompts, {"share": [0.5, 1] * 4, "right": right}, 2) == [1, 2]
    assert rows_to_show(prompts, {"right": [0, 1, None, None] * 2}, 2) == [0, 2]
    assert rows_to_show(Prompts(list("abcdef")), {}, 2) == [0, 1, 2, 3]
    assert rows_to_show(Prompts(list("abcdef")), {"right": [1, *[0] * 11]}, 2) == [1, 2, 3, 4]


# ---- a run ---------------------------------------------------------------------------------------

JUDGES = """
def place(images, prompts, targets):
    return [{"one": 0.26, "two": 0.5, "three": 0.75, "four": 1.0}.get(p, 0.0) + 0.1 * (i % 2) for i, p in enumerate(prompts)]


def right(images, prompts, targets):
    return [float("t" in p) for p in prompts]
"""


def test_a_run_prints_and_keeps_its_evaluations_by_kind(quick, capfd):
    Path("own.txt").write_text("# kind: low\none\ntwo\nzero\n# kind: high\nthree\nfour\nfive\n")
    Path("new.txt").write_text("two\nthree\n")
    Path("mine.py").write_text(JUDGES)
    arguments = str.split(
        "--prompts own.txt --targets none --eval-prompts new.txt --eval-targets none"
    )
    arguments += str.split("--reward mine.py:place --eval-reward mine.py:right --eval-count 4")
    assert quick(*arguments, "--steps 1 --out run") == 0
    _, after = records("run/evaluation.jsonl")
    low = after["kinds"]["low"]
    # Not zero, the third.
    assert low["prompts"] == 2 and low["reward"] == pytest.approx((0.26 + 0.5) / 2 + 0.05)
    assert low["reward_error"] == pytest.approx(0.24 / 2) and low["reward/mine.py:right"] == 0.5
    assert (
        after["kinds"]["high"]["reward/mine.py:right"] == 0.5
        and after["reward/mine.py:right"] == 0.5
    )
    assert "held_out/kinds" not in after and after["held_out/reward_error"] == pytest.approx(
        0.25 / 2
    )
    shown = [(prompt, judges["mine.py:right"]) for prompt, _, judges in after["shown"]]
    assert shown[:2] == [("one", [0, 0]), ("four", [0, 0])]  # the first that is wrong, of each kind
    assert shown[2:] == [("two", [1, 1]), ("three", [1, 1])]
    lines = "".join(capfd.readouterr()).splitlines()
    row = "| low               | 2       | 0.43 +- 0.12 -> 0.43 +- 0.12 | 0.50 +- 0.50 "
    assert sum(line.startswith(row) for line in lines) == 1  # once, at the end
    assert records("run/adapter/evaluation.jsonl")[-1]["kinds"]["low"]["prompts"] == 2
    assert quick(*arguments, "--steps 0 --out judged") == 0
    assert "| low               | 2       | 0.43 +- 0.12 " in "".join(capfd.readouterr())
