"""Evaluations by type of prompt: the file, which prompts are judged and shown, errors by hand, the
table, frames."""

import math
import random
import re
import weakref
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CPU, prompts_of, records
from PIL import Image

from rewards import Reward
from runtime import evaluation as evaluation_module
from runtime.cpu import Machine
from runtime.data import Prompt, evenly, read_file
from runtime.evaluation import (
    evaluate,
    evaluation_metrics,
    evaluation_table,
    rows_to_show,
    wrong_pictures,
)

NAN = math.nan


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
    assert [(prompt.text, prompt.type, prompt.line) for prompt in read_file(file)] == [
        ("alone", "other", 1),
        ("three circles", "counting", 3),
        ("# 1 fan", "two words", 7),
        ("\\a", "two words", 8),
        ("two", "counting", 10),
    ]
    file.write_text("a\n# b\n")
    assert read_file(file)[0].type is None  # there is one type, without a name


def test_evaluated_are_the_first_prompts_of_each_kind_in_turn():
    prompts = [Prompt(text, kind) for text, kind in zip("abcdefg", "xxxyyzx")]
    order = lambda prompts, count: "".join(prompt.text for prompt in evenly(prompts, count))
    assert [order(prompts, count) for count in (5, 99, 4)] == ["adfbe", "adfbecg", "adfb"]
    assert order(prompts_of(*"abcd"), 3) == "abc"


# ---- numbers -------------------------------------------------------------------------------------


def test_kinds_by_hand():
    """Of unequal size, with a picture that has no reward, and a type to which one reward does not
    apply. Errors are over prompts: pictures of a prompt that are alike say no more than one."""
    a = [[0.0, 1.0], [1.0, 1.0], [NAN, 0.5], [0.0, 0.0]]  # four prompts, two pictures each
    b = [[1.0, 0.0], [2.0, 4.0], [3.0, 3.0], [NAN, NAN]]
    error = lambda *means: np.std(means, ddof=1) / math.sqrt(3)
    metrics = evaluation_metrics("all", rewards_of(a=a, b=b), "xxxy")
    assert [*metrics] == ["all", "all, x", "all, y", "all, mean of types"]
    whole, x, y, mean = metrics.values()
    assert [each["prompts"] for each in metrics.values()] == [4, 3, 1, 4] and x["images"] == 6
    assert whole["reward/a"][0] == pytest.approx(np.mean([0, 1, 1, 1, 0.5, 0, 0]))
    expected = pytest.approx([np.mean([0, 1, 1, 1, 0.5]), error(0.5, 1, 0.5)])
    assert x["reward/a"] == x["reward"] == expected
    assert y["reward/a"][0] == 0 and math.isnan(y["reward/a"][1])  # one prompt says nothing more
    assert mean["reward/a"][0] == pytest.approx((x["reward/a"][0] + 0) / 2) != whole["reward/a"][0]
    assert math.isnan(mean["reward/a"][1])  # one of its parts is not known
    assert np.isnan(y["reward/b"]).all()
    # Of those that it has.
    assert x["reward/b"] == whole["reward/b"] == mean["reward/b"]
    assert x["reward/b"][1] == pytest.approx(error(0.5, 3, 3))
    pairs = evaluation_metrics("all", rewards_of(a=[[0.0], [1.0], [2.0], [4.0]]), "xxyy")
    # Errors of types are independent.
    assert pairs["all, mean of types"]["reward"][1] == pytest.approx(math.hypot(0.5, 1.0) / 2)
    for kinds in ([None] * 4, "xxxx"):
        assert [*evaluation_metrics("all", rewards_of(a=a), kinds)] == ["all"]  # one is all


def evaluation(step, x, y):
    """An evaluation: two types of two training prompts, one of them held out; two pictures each."""
    values = np.array([[x, x], [x, x + 0.2], [y, y], [y, y + 0.2]])
    rewards = lambda rows: rewards_of(
        **{"f.py:facts": values[rows], "g.py:right": 2 * values[rows]}
    )
    sets = ("training", [0, 1, 2, 3], "xxyy"), ("held out", [0, 1], "xx")
    metrics = [evaluation_metrics(name, rewards(rows), types) for name, rows, types in sets]
    return {"step": step, "rows": [0], **metrics[0], **metrics[1]}


def test_the_table_by_hand():
    """The judge's rows by type are below its own, and fit 100 columns."""
    before, after = evaluation(0, 0.2, 0.4), evaluation(3, 0.5, 0.4)
    title, *lines = evaluation_table([before, after], "g.py:right").splitlines()
    words = ": mean +- standard error over prompts (docs/numbers.md)"
    assert title == f"evaluation after 3 steps, before -> after{words}"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    errors = [np.std(x, ddof=1) / 2 for x in ([0.2, 0.3, 0.4, 0.5], [0.5, 0.6, 0.4, 0.5])]
    facts = f"0.350 +- {errors[0]:.3f} -> 0.500 +- {errors[1]:.3f}"
    right = f"0.700 +- {2 * errors[0]:.3f} -> 1.000 +- {2 * errors[1]:.3f}"
    of_x = "0.500 +- 0.100 -> 1.100 +- 0.100"
    del cells[1]
    assert cells == [
        ["reward", "training: 4 prompts x 2 pictures", "held out: 2 prompts x 2 pictures"],
        ["f.py:facts", facts, "0.250 +- 0.050 -> 0.550 +- 0.050"],  # the sum is shown once
        ["g.py:right", right, of_x],
        ["- x", of_x, ""],
        ["- y", "0.900 +- 0.100 -> 0.900 +- 0.100", ""],
        ["- mean of types", "0.700 +- 0.071 -> 1.000 +- 0.071", ""],
    ]
    assert {len(line) for line in lines} == {max(map(len, lines))} and len(lines[0]) <= 100
    title, _, _, *rows = evaluation_table([after]).splitlines()
    assert title == f"evaluation after 3 steps{words}" and len(rows) == 2
    after["training"]["reward"] = [1.5, 0.1]  # of two rewards there is a sum
    rows = evaluation_table([after]).splitlines()[3:]
    assert [row.split()[1] for row in rows] == ["reward", "f.py:facts", "g.py:right"]


# ---- pictures ------------------------------------------------------------------------------------


def test_prompts_without_a_correct_picture_are_shown():
    """The first of each type; if all have one, the first of each type; without types, the first."""
    prompts = [Prompt(text, kind) for text, kind in zip("abcd", ["low", "low", "high", "high"])]

    def shown(prompts, *verdicts, judge="mine"):
        raw = {row: {"mine": torch.tensor(pair)} for row, pair in enumerate(verdicts)}
        without_correct, first = rows_to_show(prompts, wrong_pictures(raw, judge))
        return without_correct or first

    right, wrong = [0.0, 1.0], [0.0, 0.0]
    assert shown(prompts, right, wrong, wrong, wrong) == [1, 2]
    assert shown(prompts, right, right, wrong, right) == [2]
    assert shown(prompts, right, right, right, right) == [0, 2]
    assert shown(prompts, right, wrong, wrong, [0.0, NAN]) == [1, 2]
    # None is known to be wrong: a half is no verdict; nobody judges.
    assert shown(prompts, right, wrong, wrong, [0.0, 0.5]) == [0, 2]
    assert shown(prompts, right, wrong, wrong, wrong, judge=None) == [0, 2]
    plain = prompts_of(*"abcdefghijk")
    assert shown(plain, right, *[wrong] * 10) == [1, 2, 3, 4, 5, 6, 7, 8]


class Picture:
    """Stands in for one, which can be told from another."""


@pytest.mark.parametrize("case", range(30))
def test_an_evaluation_keeps_no_pictures_but_those_that_it_may_show(monkeypatch, case):
    """All of them could be gigabytes. Whatever the verdicts, and on the second of two ranks too."""
    draw = random.Random(case)
    types = draw.choice([[None], "ab", "abcdefghijkl"])
    prompts = [Prompt("a ring", draw.choice(types)) for _ in range(draw.randrange(1, 40))]
    prompts = evenly(prompts, 99)
    share = draw.choice([0, 0.05, 0.5])  # of pictures that are correct
    verdicts = torch.tensor([[draw.random() < share for _ in range(6)] for _ in prompts]).float()
    verdicts[-1, 0] = draw.choice([0.0, 1.0, 0.5])  # a half: those before were no verdicts
    raw = {row: {"mine": of_row} for row, of_row in enumerate(verdicts)}
    painted, there, kept, shown = {}, weakref.WeakSet(), [], []

    def judge(*given, **named):
        for row in range(len(prompts)):
            images = [Picture() for _ in range(6)]
            there.update(images)
            painted[row] = [*map(id, images)]
            yield row, raw[row], images
            del images
            kept.append(len(there))

    monkeypatch.setattr(evaluation_module, "judge", judge)
    settings = SimpleNamespace(eval_count=99, group_size=6)
    record = SimpleNamespace(weights={"mine": 1.0}, judge="mine", done=0, ends=True)
    record.write, records = lambda line: None, {"evaluation": []}
    record.track = lambda numbers: None
    append = lambda name, more: records[name].extend(more)
    record.folder = SimpleNamespace(records=records, append=append)
    record.draw_evaluation = lambda rows, prompts, pictures, *_: shown.append(pictures)
    reward = {"mine": Reward("mine")}
    data = SimpleNamespace(prompts=prompts, held_out=prompts, rewards=reward, judges=reward)
    evaluate(SimpleNamespace(machine=Machine([], CPU)), settings, data, record)
    may_show = lambda raw: rows_to_show(prompts, wrong_pictures(raw, "mine"))
    without_correct, first = may_show(raw)
    rows = records["evaluation"][0]["rows"]
    assert rows == (without_correct or first) and max(kept) <= 2 * 8 * 4 + 6
    assert {row: [*map(id, x)] for row, x in shown[0].items()} == {
        row: painted[row][:4] for row in rows
    }
    second = {row: raw[row] for row in range(len(prompts) // 2, len(prompts))}
    assert {*rows} & second.keys() <= {*chain(*may_show(second))}


# ---- a run ---------------------------------------------------------------------------------------

JUDGES = """
def place(images, prompts, targets):
    return [{"one": 0.26, "two": 0.5, "three": 0.75, "four": 1.0}.get(p, 0.0) + 0.1 * (i % 2) for i, p in enumerate(prompts)]


calls = []


def right(images, prompts, targets):  # the last call is of held-out prompts after the steps
    calls.append(1)
    images[-1].save("last.png")
    return [0, 1, 0, float("nan")] if len(calls) == 8 else [float("t" in p) for p in prompts]
"""


def test_a_run_prints_and_keeps_its_evaluations_by_kind(judged, capfd, monkeypatch):
    """Pictures that score 0 with the first judge are framed."""
    grids = []
    draw_grid = lambda *given: grids.append(given) or Image.new("RGB", (99, 9))
    monkeypatch.setattr("runtime.record.draw_grid", draw_grid)
    Path("own.txt").write_text("# type: low\none\ntwo\nzero\n# type: high\nthree\nfour\nfive\n")
    Path("new.txt").write_text("two\nfive\n")
    Path("mine.py").write_text(JUDGES)
    files = "--prompts own.txt --targets none --eval-prompts new.txt --eval-targets none"
    arguments = "--reward mine.py:place --eval-reward mine.py:right,mine.py:place --eval-count 4"
    assert judged(files, arguments, "--eval-every 1 --steps 2 --out run") == 0
    before, _, after = records("run/evaluation.jsonl")
    assert before["rows"] == after["rows"] == [1]  # not correct, before
    low, high = after["training, low"], after["training, high"]
    # Not zero, the third.
    assert low["prompts"] == 2 and low["reward"] == pytest.approx([0.38 + 0.05, 0.24 / 2])
    assert low["reward/mine.py:right"][0] == high["reward/mine.py:right"][0] == 0.5
    assert after["held out"]["reward"][1] == pytest.approx(0.5 / 2)
    assert not any(name.startswith("held out,") for name in after)
    row = r"\| - low +\| 0.500 \+- 0.500 -> 0.500 \+- 0.500 \| +\|\n"
    output = "".join(capfd.readouterr())
    assert len(re.findall(row, output)) == output.count("| - low") == 1  # at the end
    sheets = {title: others for title, *others in grids}
    for title, wrong in (("before", [True, True]), ("after 2 steps", [True, False])):
        ((prompt, cells),), corner = sheets[title]
        pictures, captions, framed = zip(*cells)
        captioned = "five", ("reward 0.000", "reward 0.100")
        assert ((prompt, captions), [*framed]) == (captioned, wrong)
        assert corner == "red frame:\nmine.py:right is 0"
    kept, last = (Image.open(file) for file in ("run/evaluation/000002/1-2.png", "last.png"))
    assert kept.tobytes() == last.tobytes() == pictures[1].tobytes()
