"""Evaluations by type of prompt: the file, which prompts are judged and shown, errors by hand, the
table, frames."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import prompts_of, records, tiny_settings
from PIL import Image

import train
from runtime import UserError
from runtime.data import Prompt, evenly, read_lines
from runtime.log import (
    Record,
    evaluation_metrics,
    rows_to_show,
    summary,
    types_table,
    without_nan,
)

NAN = math.nan
MEAN = "mean of the types"


def rewards_of(**rewards):
    """{name: (N, G)}, the first of them as the lone reward that is trained."""
    named = {f"reward/{name}": torch.tensor(values) for name, values in rewards.items()}
    return {"reward": next(iter(named.values())), **named}


# ---- the file ------------------------------------------------------------------------------------


def test_a_line_names_the_kind_of_the_prompts_below_it(tmp_path):
    text = "alone\n# type: counting\nthree circles\n# kindred spirits\n## Kind = two words \n\n\\# 1 fan\n\\a\n#kind:counting\ntwo"
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    # Comments are left out.
    assert [(prompt.text, prompt.type, prompt.line) for prompt in read_lines(file)] == [
        ("alone", "other", 1),
        ("three circles", "counting", 3),
        ("# 1 fan", "two words", 7),
        ("\\a", "two words", 8),
        ("two", "counting", 10),
    ]
    file.write_text("a\n# b\n")
    assert read_lines(file)[0].type is None  # there is one type, without a name


def test_evaluated_are_the_first_prompts_of_each_kind_in_turn():
    prompts = [Prompt(text, kind) for text, kind in zip("abcdefg", "xxxyyzx")]
    for count, expected in ((5, "adfbe"), (99, "adfbecg"), (4, "adfb")):
        assert "".join(prompt.text for prompt in evenly(prompts, count)) == expected
    assert "".join(prompt.text for prompt in evenly(prompts_of(*"abcd"), 3)) == "abc"


# ---- numbers -------------------------------------------------------------------------------------


def test_errors_are_over_prompts():
    """Four pictures of a prompt that are all alike say no more than one: by numpy, prompt by
    prompt."""
    values = [[0.0] * 4, [1.0] * 4, [1.0] * 4]
    metrics = evaluation_metrics(rewards_of(a=values))
    assert metrics["reward"] == pytest.approx(2 / 3)
    error = pytest.approx(np.std([0, 1, 1], ddof=1) / math.sqrt(3))
    assert metrics["reward_error"] == metrics["reward_error/a"] == error
    assert (metrics["images"], metrics["prompts"]) == (12, 3)
    # One prompt says nothing of others.
    assert math.isnan(evaluation_metrics(rewards_of(a=values[:1]))["reward_error"])


def test_kinds_by_hand():
    """Of unequal size, with a picture that has no reward, and a type to which one reward does not
    apply."""
    a = [[0.0, 1.0], [1.0, 1.0], [NAN, 0.5], [0.0, 0.0]]  # four prompts, two pictures each
    b = [[1.0, 0.0], [2.0, 4.0], [3.0, 3.0], [NAN, NAN]]
    metrics = evaluation_metrics(rewards_of(a=a, b=b), ["x", "x", "x", "y"])
    x, y, mean = (metrics["types"][kind] for kind in ("x", "y", MEAN))
    assert (x["prompts"], x["images"], y["prompts"], mean["prompts"]) == (3, 6, 1, 4)
    assert x["reward/a"] == pytest.approx(np.mean([0, 1, 1, 1, 0.5])) and y["reward/a"] == 0
    assert x["reward_error/a"] == pytest.approx(np.std([0.5, 1, 0.5], ddof=1) / math.sqrt(3))
    # One of its parts is not known.
    assert math.isnan(y["reward_error/a"]) and math.isnan(mean["reward_error/a"])
    assert mean["reward/a"] == pytest.approx((x["reward/a"] + 0) / 2) != metrics["reward"]
    assert math.isnan(y["reward/b"])
    # Of those that it has.
    assert mean["reward/b"] == x["reward/b"] and mean["reward_error/b"] == x["reward_error/b"]
    assert x["reward_error/b"] == pytest.approx(np.std([0.5, 3, 3], ddof=1) / math.sqrt(3))

    pairs = evaluation_metrics(rewards_of(a=[[0.0], [1.0], [2.0], [4.0]]), "xxyy")["types"]
    # Errors of types are independent.
    assert pairs[MEAN]["reward_error"] == pytest.approx(math.hypot(0.5, 1.0) / 2)
    for kinds in ([None] * 4, ["x"] * 4):
        assert "types" not in evaluation_metrics(rewards_of(a=a), kinds)  # one needs no table


def evaluation(x, y):
    """The numbers of an evaluation: two types of two prompts, two pictures each, with these
    rewards."""
    values = np.array([[x, x], [x, x + 0.2], [y, y], [y, y + 0.2]])
    rewards = rewards_of(**{"f.py:facts": values, "g.py:right": 2 * values})
    return without_nan(evaluation_metrics(rewards, "xxyy"))


BEFORE, AFTER = evaluation(0.2, 0.4), evaluation(0.5, 0.4)


def test_the_table_by_hand():
    lines = types_table("held-out", BEFORE["types"], AFTER["types"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    # The lone reward is the sum, and shown once.
    assert cells[0] == ["held-out", "prompts", "f.py:facts", "g.py:right"]
    assert [row[0] for row in cells[2:]] == ["x", "y", "mean of the types"]
    facts, right = "0.250 +- 0.050 -> 0.550 +- 0.050", "0.500 +- 0.100 -> 1.100 +- 0.100"
    assert cells[2] == ["x", "2", facts, right]
    assert cells[4][1:3] == ["4", "0.350 +- 0.035 -> 0.500 +- 0.035"]
    assert len({len(line) for line in lines}) == 1  # columns stand under one another
    alone = types_table("held-out", AFTER["types"]).splitlines()[2]
    assert "| 0.550 +- 0.050 |" in alone and "->" not in alone


def test_two_rewards_have_their_sum_in_the_table():
    values = torch.tensor([[0.0], [1.0], [2.0], [4.0]])
    rewards = {"reward": 2 * values, "reward/a": values, "reward/b": values}
    head = types_table("training", evaluation_metrics(rewards, "xxyy")["types"]).splitlines()[0]
    assert head.split()[1::2] == ["training", "prompts", "reward", "a", "b"]


def test_a_line_of_an_evaluation_has_errors():
    before, after = (
        np.std(means, ddof=1) / 2 for means in ([0.2, 0.3, 0.4, 0.5], [0.5, 0.6, 0.4, 0.5])
    )
    words = f"f.py:facts 0.350 +- {before:.3f} -> 0.500 +- {after:.3f}, g.py:right"
    assert summary("", BEFORE, AFTER).startswith(words)
    held_out = {f"held_out/{name}": value for name, value in AFTER.items()}
    assert summary("held_out/", BEFORE | held_out).startswith("f.py:facts 0.500")
    assert summary("held_out/", BEFORE | held_out).endswith("(8 pictures: 4 prompts x 2)")


# ---- pictures ------------------------------------------------------------------------------------


def test_prompts_without_a_correct_picture_are_shown():
    """The first of each type; if all have one, the first of each type; without types, the first."""
    prompts = [Prompt(text, kind) for text, kind in zip("abcd", ["low", "low", "high", "high"])]

    def shown(prompts, *answers, judge="right"):
        results = [({"right": torch.tensor(own)}, []) for own in answers]
        return rows_to_show(prompts, results, judge)

    right, wrong, unknown = [0.0, 1.0], [0.0, 0.0], [NAN, 0.0]
    assert shown(prompts, right, wrong, wrong, wrong) == [1, 2]
    assert shown(prompts, right, right, wrong, right) == [2]
    assert shown(prompts, right, unknown, right, right) == [0, 2]
    assert shown(prompts, wrong, wrong, right, right, judge=None) == [0, 2]
    plain = prompts_of(*"abcdefghijk")
    assert shown(plain, right, *[wrong] * 10) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("judge", ["g.py:right", None])
def test_pictures_that_are_not_correct_are_framed(tmp_path, monkeypatch, judge):
    """If the settings name a judge; if not, their rewards stand below."""
    grids = []
    draw_grid = lambda *arguments: grids.append(arguments) or Image.new("RGB", (8, 8))
    monkeypatch.setattr("runtime.log.draw_grid", draw_grid)
    settings = SimpleNamespace(frame_by=judge)
    record = SimpleNamespace(settings=settings, weights={"a": 2.0}, done=7)
    record.folder = lambda step: tmp_path / str(step)
    rewards = {"a": torch.tensor([0.1, 0.2, 0.3]), "g.py:right": torch.tensor([0.0, 1.0, NAN])}
    images = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    results = [None, (rewards, images)]
    Record.draw_evaluation(record, prompts_of("first", "second"), results, [1])
    ((title, ((label, cells),), corner, *_),) = grids
    assert (title, label) == ("after 7 steps", "second")
    assert [image for image, *_ in cells] == images
    assert Image.open(tmp_path / "7" / "1-2.png").getpixel((0, 0)) == (1, 0, 0)
    frames = [bool(framed) for *_, framed in cells]
    captions = [caption for _, caption, _ in cells]
    if judge:
        assert corner.split() == ["red", "frame:", "not", "correct,", "says", "g.py:right"]
        assert frames == [True, False, False] and captions == [""] * 3
    else:
        assert corner == "" and not any(frames)
        assert captions == ["reward 0.200", "reward 0.400", "reward 0.600"]


def test_what_frames_pictures_is_said_and_never_guessed():
    assert tiny_settings().frame_by == "tiny-glm-image/check.py:correct"
    assert tiny_settings("--eval-reward mine.py:right").frame_by is None
    own = tiny_settings("--eval-reward mine.py:good:2,b.py:c --frame-by mine.py:good")
    assert own.frame_by == "mine.py:good"
    with pytest.raises(UserError, match="--frame-by mine.py:god: --eval-reward has no"):
        tiny_settings("--eval-reward mine.py:good --frame-by mine.py:god")
    assert train.parse_settings(["--model", "elsewhere"]).frame_by is None


# ---- a run ---------------------------------------------------------------------------------------

JUDGES = """
def place(images, prompts, targets):
    return [{"one": 0.26, "two": 0.5, "three": 0.75, "four": 1.0}.get(p, 0.0) + 0.1 * (i % 2) for i, p in enumerate(prompts)]


def right(images, prompts, targets):
    return [float("t" in p) for p in prompts]
"""


def test_a_run_prints_and_keeps_its_evaluations_by_kind(quick, capfd):
    Path("own.txt").write_text("# type: low\none\ntwo\nzero\n# type: high\nthree\nfour\nfive\n")
    Path("new.txt").write_text("two\nthree\n")
    Path("mine.py").write_text(JUDGES)
    arguments = str.split(
        "--prompts own.txt --targets none --eval-prompts new.txt --eval-targets none"
    )
    arguments += str.split("--reward mine.py:place --eval-reward mine.py:right --eval-count 4")
    arguments += str.split("--frame-by mine.py:right")
    assert quick(*arguments, "--steps 1 --out run") == 0
    _, after = records("run/evaluation.jsonl")
    low = after["types"]["low"]
    # Not zero, the third.
    assert low["prompts"] == 2 and low["reward"] == pytest.approx((0.26 + 0.5) / 2 + 0.05)
    assert low["reward_error"] == pytest.approx(0.24 / 2) and low["reward/mine.py:right"] == 0.5
    assert after["types"]["high"]["reward/mine.py:right"] == after["reward/mine.py:right"] == 0.5
    assert "held_out/types" not in after
    assert after["held_out/reward_error"] == pytest.approx(0.25 / 2)
    lines = "".join(capfd.readouterr()).splitlines()
    row = "| low               | 2       | 0.430 +- 0.120 -> 0.430 +- 0.120 | 0.500 +- 0.500 "
    assert sum(line.startswith(row) for line in lines) == 1  # once, at the end
    assert records("run/adapter/evaluation.jsonl")[-1]["types"]["low"]["prompts"] == 2
    assert quick(*arguments, "--steps 0 --out judged") == 0
    assert "| low               | 2       | 0.430 +- 0.120 " in "".join(capfd.readouterr())
