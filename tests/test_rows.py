"""What people bring and take away: prompts as rows, a tracker, the best evaluation, versions."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from accelerate import PartialState, tracking
from conftest import error_from, judge_file, records, resume, write_reward
from PIL import Image

from inputs.prompts import read_file
from runtime import trackers
from runtime.folder import versions
from runtime.numbers import best_earlier_evaluation

ROWS = [
    {"tag": "counting", "prompt": "a photo of  three clocks\u3000", "include": [{"count": 3}]},
    {"type": 2, "tag": "three", "prompt": "#1 {x}", "include": None, "more": " 1  2 "},
]


def write_rows(name, *rows):
    Path(name).write_text("\n\n".join(json.dumps(row) for row in rows))
    return name


def test_a_row_is_a_prompt_with_columns(tmp_path):
    """After a mark that some editors write at the beginning of a file."""
    file = write_rows(tmp_path / "rows.jsonl", *ROWS)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    first, second = read_file(file)
    assert (first.text, first.type, first.line) == ("a photo of three clocks", "counting", 1)
    assert (second.text, second.type, second.line) == ("#1 {x}", "2", 3)
    assert first.row == {"tag": "counting", "include": [{"count": 3}], "type": "counting"}
    assert second.row == {"type": 2, "tag": "three", "include": None, "more": " 1  2 "}


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("rows.jsonl", '{"prompt": "a ring"', "cannot read line 1"),
        ("rows.jsonl", '\n{"text": "a ring"}', "cannot read line 2 ('prompt')"),
        ("rows.jsonl", '["a ring"]', "an example"),
        ("rows.jsonl", '{"prompt": " "}', """cannot read line 1 (its "prompt" is no text);"""),
        ("rows.jsonl", '{"prompt": null}', """cannot read line 1 (its "prompt" is no text);"""),
        ("a.txt", "\na ring\n<|image|>", "line 3 of"),
        ("latin.txt", b"caf\xe9", "'utf-8' codec can't decode"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in error_from(read_file, file)


def test_a_reward_gets_the_columns_it_has_a_parameter_for(quick, capsys):
    """A list with a value per picture; None where a row has none."""
    rows = [{"prompt": "a ring", "include": [2], "tag": "a"}, {"prompt": "a cross", "other": 1}]
    write_rows("rows.jsonl", *rows)
    write_rows("new.jsonl", {"prompt": "a circle", "include": [3], "new": "its own"})
    given = "{'a ring': [[2], 'a'], 'a circle': [[3], None]}.get(p, [None, None])"
    fits = f"[i if [include[i], tag[i]] == {given} else 1 / 0 for i, p in enumerate(prompts)]"
    own = judge_file("own", fits, "tag", "include")
    judge = judge_file("judge", "[len(x or '') for x in new]", "new=()")
    flags = f"--prompts rows.jsonl --eval-prompts new.jsonl --reward {own} --eval-reward {judge}"
    flags += " --targets none --eval-targets none --prompts-per-step 2 --steps 1 --out run"
    assert quick(flags) == 2
    words = "asks for 'tag'; for prompts of new.jsonl there are images, prompts, targets, group_size, include, new ("
    assert words in capsys.readouterr().err
    write_rows("new.jsonl", {"prompt": "a circle", "include": [3], "tag": None, "new": "its own"})
    assert quick(flags) == 0
    kept = {"own.py", "judge.py", "prompts.jsonl", "eval_prompts.jsonl"}
    assert {file.name for file in Path("run/start").iterdir()} == kept


def test_the_best_evaluation_is_named():
    """Where it is above the last by more than its standard error."""

    def best(*pairs):
        steps = [{"step": 10 * i, "judge": "f", "reward/f": [*x]} for i, x in enumerate(pairs)]
        return best_earlier_evaluation(steps)

    step, words = best((0.5, 0.02), (0.9, 0.05), (0.84, 0.05))
    assert (step, words) == (10, "f was highest after 10 steps: 0.900 +- 0.050, now 0.840")
    assert best((0.5, 0.02), (0.9, 0.07), (0.84, 0.05)) is None
    assert best((0.5, 0.02), (0.9, 0.05)) is best((0.9, None), (0.5, 0.1)) is None
    assert best((0.9, 0.05), (None, None)) is best((0.9, 0.05), (0.5, 0.1), (None, None)) is None
    # Without a judge what counts is what is trained, the sum.
    steps = [{"step": i, "judge": None, "reward": [i, 0], "reward/a": [-i, 0]} for i in (0, 1)]
    assert best_earlier_evaluation(steps) is None
    steps[1]["reward"], steps[1]["reward/a"] = [-1, 0], [2, 0]
    assert best_earlier_evaluation(steps)[1].startswith("reward was highest after 0 steps: 0.000")


def test_a_tracker_gets_the_numbers(judged, monkeypatch, capsys):
    tracker = Mock()
    monkeypatch.setattr("runtime.trackers.start", lambda *given: tracker)
    # The numbers and the picture before, the step's numbers, then both after.
    tracker.log.side_effect = [None, None, ValueError("away"), None, None]
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Image=lambda pixels: pixels))
    assert judged("--tracker trackio --steps 1 --out run") == 0
    assert "warning: cannot send numbers to trackio (away)" in capsys.readouterr().out
    (before, after), (line,) = records("run/evaluation.jsonl"), records("run/metrics.jsonl")
    calls = [(call.kwargs["step"], call.args[0]) for call in tracker.log.call_args_list]
    shown = [calls.pop(i)[1]["before-after"] for i in (4, 1)]
    assert np.array_equal(shown[0], Image.open("run/before-after.png")) and shown[1].ndim == 3
    assert [step for step, _ in calls] == [0, 1, 1]
    assert calls[1][1].items() >= {(k, v) for k, v in line.items() if v is not None}
    for (_, numbers), record in ((calls[0], before), (calls[2], after)):
        assert numbers["held out/reward"] == pytest.approx(record["reward"][0])
    assert tracker.store_init_configuration.call_args.args[0]["steps"] == 1
    tracker.finish.assert_called_once()


def test_a_tracker_ends_no_run(quick, monkeypatch, capsys):
    """Nor does it hide what does. If it cannot start, no folder is left."""
    start = Mock(side_effect=ValueError("No API key configured"))
    monkeypatch.setattr("runtime.trackers.start", start)
    with monkeypatch.context() as patch:
        patch.setattr("train.load", lambda *given: pytest.fail("it loads"))
        assert quick("--tracker wandb --steps 1 --out run") == 2
    assert "cannot start --tracker wandb (No API key configured)" in capsys.readouterr().err
    start.side_effect = None
    start.return_value.finish.side_effect = ConnectionError("away")
    assert quick("--tracker wandb --steps 1 --out run") == 0
    assert "warning: cannot finish wandb (away)" in capsys.readouterr().out
    reward = write_reward("if call == 2:\n    return [0, torch.inf]")
    assert quick(*reward, "--tracker wandb --steps 1 --out broken") == 2
    output, errors = capsys.readouterr()
    assert (
        "reward 'mine.py:reward' has to return 2 finite" in errors
        and "cannot finish wandb" in output
    )


def test_other_trackers_take_pictures_in_their_own_ways(tmp_path):
    Image.new("RGB", (3, 2), "red").save(tmp_path / "before-after.png")
    for name, layout in (("wandb", {}), ("tensorboard", {"dataformats": "NHWC"})):
        trackers.Tracker(name, tracker := Mock()).log_picture(tmp_path / "before-after.png", 7)
        ((pictures,), options) = tracker.log_images.call_args
        assert pictures["before-after"].tolist() == [[[[255, 0, 0]] * 3] * 2]
        assert options == {"step": 7, **layout}


def test_trackers_are_told_which_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    # Trackers write to accelerate's log, which asks for a state of its own.
    stub = Mock(side_effect=lambda *given, **more: tracking.logger.info("begins") or Mock())
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {"wandb": stub, "trackio": stub})
    (run := tmp_path / "run").mkdir()
    for name in ("wandb", "wandb", "trackio"):
        trackers.start(name, run)
    first, again, other = (call.kwargs for call in stub.call_args_list)
    assert first == again == other | {"id": first["name"]} and first["resume"] == "allow"
    assert re.fullmatch("run-[0-9a-f]{8}", first["name"])
    assert {call.args for call in stub.call_args_list} == {("grpo-glm-image",)}
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "named")
    trackers.start("wandb", run.rename(tmp_path / "moved"))
    own = stub.call_args
    assert (*own.args, own.kwargs["name"], own.kwargs["id"]) == ("mine", "named", first["id"])


def test_a_run_names_what_made_it(quick, one_step, monkeypatch, capsys):
    """A resume under other versions is warned of, each time."""
    made = json.loads((one_step / "settings.json").read_text())["versions"]
    assert made == versions() and made.keys() >= {"torch", "code"}
    assert "your modules" not in made  # there are none
    shutil.copytree(one_step, "run")
    assert resume("run --steps 1") == 0 and "began with" not in capsys.readouterr().out
    monkeypatch.setattr("runtime.folder.versions", lambda: made | {"torch": "9"})
    for _ in range(2):
        assert resume("run --steps 1") == 0
        words = f"warning: run began with torch {made['torch']} (now 9): numbers may differ"
        assert words in capsys.readouterr().out
    assert json.loads(Path("run/settings.json").read_text())["versions"] == made


def test_code_is_told_apart_without_git(tmp_path, monkeypatch):
    """And what users put beside it is none of it. Unpacked within another project it has no
    commit."""
    git = "git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"
    for words in ("init -q", "commit -q --allow-empty -m x"):
        subprocess.run([*git, *words.split()], check=True)
    monkeypatch.setattr("runtime.folder.ROOT", root := tmp_path / "unpacked")
    (root / "runtime").mkdir(parents=True)
    found = []
    for name in ("grpo.py", "runtime/data.py", "my_reward.py"):
        (root / name).write_text(name)
        found.append(versions()["code"])
    assert found[0] != found[1] == found[2] and "commit" not in versions()
