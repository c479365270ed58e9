"""Evaluations by type of prompt: which prompts are judged and shown, errors by hand, the
table, frames."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import prompts_of, records
from PIL import Image

from inputs.prompts import Prompt, choose, evenly
from runtime.evaluation import count_to_show
from runtime.numbers import evaluation_metrics, evaluation_table

NAN = math.nan


def rewards_of(**rewards):
    """{name: (N, G)}, the first of them as the lone reward that is trained."""
    named = {f"reward/{name}": torch.tensor(values) for name, values in rewards.items()}
    return {"reward": next(iter(named.values())), **named}


# ---- which prompts -------------------------------------------------------------------------------


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
    whole = evaluation_metrics(rewards_of(a=a, b=b), "xxxy")
    assert [*whole["types"]] == ["x", "y", "mean of types"]
    x, y, mean = whole["types"].values()
    assert [each["prompts"] for each in (whole, x, y, mean)] == [4, 3, 1, 4] and x["images"] == 6
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
    pairs = evaluation_metrics(rewards_of(a=[[0.0], [1.0], [2.0], [4.0]]), "xxyy")["types"]
    # Errors of types are independent.
    assert pairs["mean of types"]["reward"][1] == pytest.approx(math.hypot(0.5, 1.0) / 2)
    for kinds in ([None] * 4, "xxxx"):
        assert evaluation_metrics(rewards_of(a=a), kinds)["types"] == {}  # one is all


def evaluation(step, x, y):
    """An evaluation: two types of two prompts; two pictures each."""
    values = np.array([[x, x], [x, x + 0.2], [y, y], [y, y + 0.2]])
    rewards = rewards_of(**{"f.py:facts": values, "g.py:right": 2 * values})
    own = {"step": step, "judge": "g.py:right", "adapter": None}
    return own | evaluation_metrics(rewards, "xxyy")


def test_the_table_by_hand():
    """The judge's rows by type are below its own, and fit 100 columns."""
    before, after = evaluation(0, 0.2, 0.4), evaluation(3, 0.5, 0.4)
    title, *lines = evaluation_table([before, after]).splitlines()
    words = ": mean +- standard error over prompts (docs/numbers.md)"
    assert title == f"4 held-out prompts x 2 pictures{words}"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    errors = [np.std(x, ddof=1) / 2 for x in ([0.2, 0.3, 0.4, 0.5], [0.5, 0.6, 0.4, 0.5])]
    del cells[1]
    assert cells == [
        ["reward", "before", "after 3 steps"],
        ["f.py:facts", f"0.350 +- {errors[0]:.3f}", f"0.500 +- {errors[1]:.3f}"],  # no sum
        ["g.py:right", f"0.700 +- {2 * errors[0]:.3f}", f"1.000 +- {2 * errors[1]:.3f}"],
        ["- x", "0.500 +- 0.100", "1.100 +- 0.100"],
        ["- y", "0.900 +- 0.100", "0.900 +- 0.100"],
        ["- mean of types", "0.700 +- 0.071", "1.000 +- 0.071"],
    ]
    assert {len(line) for line in lines} == {max(map(len, lines))} and len(lines[0]) <= 100
    after["reward"] = [1.5, 0.1]  # of two rewards there is a sum
    rows = evaluation_table([after]).splitlines()[3:6]
    assert [row.split()[1] for row in rows] == ["reward", "f.py:facts", "g.py:right"]


def test_a_type_may_have_a_bar_in_its_name():
    values = np.array([[0.0, 1.0]] * 4)
    own = {"step": 0, "judge": "f", "adapter": None}
    own |= evaluation_metrics(rewards_of(f=values), ["a|b", "a|b", "y", "y"])
    assert r"| - a\|b" in evaluation_table([own])


def test_every_held_out_row_counts_and_a_few_are_from_all_over_a_sorted_file():
    """A file of 90 spatial prompts, then 10 others, of one type. Equal prompts are rows too."""
    assert len(choose([Prompt("a ring")] * 5, 5)) == 5
    prompts = [Prompt(f"{'spatial' if i < 90 else 'other'} {i}") for i in range(100)]
    words = [prompt.text for prompt in choose(prompts, 40)]
    assert len(words) == len({*words}) == 40 and 1 <= sum("other" in x for x in words) <= 9
    assert words == [prompt.text for prompt in choose(prompts, 40)]  # each time the same
    everything = [prompt.text for prompt in choose(prompts, 100)]
    assert everything == [prompt.text for prompt in prompts]  # in the order of the file


def test_held_out_prompts_of_a_few_are_evenly_of_all_types():
    prompts = [Prompt(f"{kind} {i}", kind) for kind in "ab" for i in range(50)]
    found = choose(prompts, 6)
    assert [prompt.type for prompt in found] == [*"ababab"]
    assert [prompt.text for prompt in found] != [prompt.text for prompt in evenly(prompts, 6)]


# ---- pictures ------------------------------------------------------------------------------------


def test_the_first_prompt_of_each_type_is_shown():
    """Without types, or of a lone one, the first few; never more than eight."""
    for types, shown in (
        ("aabbb", ["0", "2"]),
        ("babab", ["0", "1"]),
        ("a" * 9, [*"01234567"]),
        ([None] * 3, [*"012"]),
        ("abcdefghij", [*"01234567"]),
    ):
        prompts = evenly([Prompt(str(i), each) for i, each in enumerate(types)], 99)
        assert [each.text for each in prompts[: count_to_show(prompts)]] == shown


# ---- a run ---------------------------------------------------------------------------------------

JUDGES = """
def place(images, prompts, targets):
    return [{"one": 0.26, "two": 0.5, "three": 0.75, "four": 1.0}.get(p, 0.0) + 0.1 * (i % 2) for i, p in enumerate(prompts)]


calls = []


def right(images, prompts, targets):  # the last call is the evaluation after the steps
    calls.append(1)
    images[3 % len(images)].save("last.png")
    last = [0, 1, 0, float("nan"), 1, 1, 0, 0]
    return last if len(calls) == 4 else [float("t" in p) for p in prompts]
"""


def test_a_run_prints_and_keeps_its_evaluations_by_kind(judged, capfd):
    Path("own.txt").write_text("zero\nfour\n")
    Path("new.txt").write_text("# type: low\none\ntwo\n# type: high\nthree\nfive\n")
    Path("mine.py").write_text(JUDGES)
    files = "--prompts own.txt --targets none --eval-prompts new.txt --eval-targets none"
    arguments = "--reward mine.py:place --eval-reward mine.py:right,mine.py:place --eval-count 4"
    assert judged(files, arguments, "--eval-every 1 --steps 2 --out run") == 0
    before, _, after = records("run/evaluation.jsonl")
    assert [each["prompt"] for each in before["shown"]] == ["one", "three"]
    low, high = (before["types"][name] for name in ("low", "high"))
    assert low["prompts"] == 2 and low["reward"] == pytest.approx([0.38 + 0.05, 0.24 / 2])
    assert low["reward/mine.py:right"][0] == high["reward/mine.py:right"][0] == 0.5
    assert after["types"]["low"]["reward/mine.py:right"] == [0.75, 0.25]
    row = r"\| - low +\| 0.500 \+- 0.500 +\| 0.750 \+- 0.250 +\|\n"
    output = "".join(capfd.readouterr())
    assert (len(re.findall(row, output)), output.count("| - low")) == (1, 3)
    verdicts = [each["shown"][1]["reward/mine.py:right"] for each in (before, after)]
    assert after["judge"] == "mine.py:right" and verdicts == [[1, 1], [0, None]]
    kept, last = (Image.open(file) for file in ("run/evaluation/000002/2-2.png", "last.png"))
    assert kept.tobytes() == last.tobytes()
