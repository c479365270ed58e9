"""What people bring and take away: prompts as rows, a tracker, the best evaluation, versions."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import TESTS, error_from, judge_file, records, resume, write_reward
from PIL import Image

import rewards
from rewards import Reward
from runtime import foreign
from runtime import resume as resume_module
from runtime.data import check_columns, read_file
from runtime.evaluation import best_earlier_evaluation
from runtime.record import log_picture, speeds, start_tracker
from runtime.resume import versions

ROWS = [
    {"tag": "counting", "prompt": "a photo of  three clocks\u200b", "include": [{"count": 3}]},
    {"type": "two", "tag": "three", "prompt": "#1 {x}", "include": None, "more": " 1  2 "},
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
    assert (second.text, second.type, second.line) == ("#1 {x}", "two", 3)
    assert first.row == {"tag": "counting", "include": [{"count": 3}], "type": "counting"}
    assert second.row == {"type": "two", "tag": "three", "include": None, "more": " 1  2 "}


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("rows.CSV", "prompt,tag", "give a .jsonl file"),
        ("rows.tsv", "a ring", "is a table or a list"),
        ("list.json", '["a ring"]', "is a table or a list"),
        ("list.yaml", "- a ring", "is a table or a list"),
        ("list.txt", '\n["a ring", "a cross"]', "line 2 of"),
        ("list.txt", '[\n"a ring",\n"a cross"]', "line 1 of"),
        ("list.txt", "# mine\n- a ring\n- a cross", "leave '- ' out"),
        ("list.txt", "1. a ring\n2. a cross", "leave '1. ' out"),
        ("table.txt", "# mine\nPrompt\tNote\na ring\tround", "line 2 of"),
        ("table.txt", 'id;"prompt"\n1;a ring', "the head of a table"),
        ("rows.txt", 'a ring\n{"prompt": "a ring"}', "line 2 of"),
        ("rows.jsonl", '{"prompt": "a ring"', "line 1 of"),
        ("rows.jsonl", '\n{"text": "a ring"}', "line 2 of"),
        ("rows.jsonl", '["a ring"]', "an example"),
        ("rows.jsonl", '"a ring"', "no object with a prompt"),
        ("rows.jsonl", '{"prompt": " "}', "have to be text"),
        ("rows.JSONL", '{"prompt": [{"role": "user"}]}', "have to be text"),
        ("rows.ndjson", '{"prompt": "a \\ud83d"}', "surrogates"),
        ("rows.jsonl", '{"prompt": "a ring", "tag": 3}', "have to be text"),
        *(
            ("rows.jsonl", f'{{"prompt": "a ring", "{name}": 3}}', f"give {name} another name")
            for name in ["rewards", "images", "prompts", "targets", "sources", "group_size"]
        ),
        ("rows.jsonl", '{"prompt": "a <|image|>"}', "leave it out"),
    ],
)
def test_rows_that_cannot_be_read(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    assert words in error_from(read_file, tmp_path / name)


def test_a_reward_gets_the_columns_it_has_a_parameter_for(quick, capsys):
    """In a run, resumed too: a list with a value per picture; None where a row has none."""
    rows = [{"prompt": "a ring", "include": [2], "tag": "a"}, {"prompt": "a cross", "other": 1}]
    write_rows("rows.jsonl", *rows)
    write_rows("new.jsonl", {"prompt": "a circle", "include": [3], "new": "a column of its own"})
    own = judge_file("judge", "[len(x or '') for x in new]", "new=()")
    text = "def counted(images, prompts, targets, tag, include):\n    return"
    given = "{'a ring': [[2], 'a'], 'a circle': [[3], None]}.get(prompt, [None, None])"
    text += (
        f" [i if [include[i], tag[i]] == {given} else 1 / 0 for i, prompt in enumerate(prompts)]"
    )
    Path("own.py").write_text(text)
    flags = "--prompts rows.jsonl --eval-prompts new.jsonl --targets none --eval-targets none"
    flags += (
        f" --reward own.py:counted --eval-reward {own} --prompts-per-step 2 --steps 1 --out run"
    )
    assert quick(flags) == 2
    words = "'own.py:counted' asks for 'tag', which no row of new.jsonl has; its columns: include"
    assert words in capsys.readouterr().err
    Path("own.py").write_text(text.replace("tag, include", "include, tag=()"))
    assert quick(flags) == 0
    hashed = json.loads(Path("run/settings.json").read_text())["inputs"]
    assert hashed.keys() >= {"own.py:counted", "judge.py:judge"}
    write_rows("rows.jsonl", rows[0], rows[1] | {"other": 2})
    assert resume("run --steps 2") == 2
    assert "other prompts" in capsys.readouterr().err


def test_lines_that_are_prompts(tmp_path, capsys):
    """Though one of them looks like an item, or has a tab; quotes are words to write."""
    lines = ["[low key] a ring", "- a cross, 3) a ring", "2.5 rings", "\tprompt, a\tring"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(lines))
    assert [each.text for each in read_file(file)] == [*lines[:3], "prompt, a ring"]
    assert not capsys.readouterr().out
    file.write_text('"a ring"\n“a cross”')
    assert len(read_file(file)) == 2 and "are in quotes" in capsys.readouterr().out


CALLABLES = """
import functools
import torch

class Scorer:
    scale = 2
    def __call__(self, images, prompts, targets, wanted):
        return [self.scale * word for word in wanted]
    def method(self, images, prompts, targets, *, wanted=None):
        return [word + 1 for word in wanted]

class Module(torch.nn.Module):
    def forward(self, images, prompts, targets, wanted=None):
        return [word + 2 for word in wanted]

def bare(function):
    def inner(*given, **named):
        return function(*given, **named)
    return inner

@bare
def decorated(images, prompts, targets, group_size, wanted=None):
    return [word + group_size for word in wanted]

def everything(images, prompts, targets, **columns):
    assert columns.keys() == {"wanted", "other"}
    return columns["wanted"]

def scaled(images, prompts, targets, wanted, scale):
    return [word * scale for word in wanted]

an_object, a_module, method = Scorer(), Module(), Scorer().method
partial = functools.partial(scaled, scale=9)
"""


def test_callables_of_any_type_get_their_columns(tmp_path):
    (tmp_path / "callables.py").write_text(CALLABLES)
    scores = {
        "Scorer": [6, 6, 14, 14],
        "an_object": [6, 6, 14, 14],
        "method": [4, 4, 8, 8],
        "a_module": [5, 5, 9, 9],
        "Module": [5, 5, 9, 9],
        "decorated": [5, 5, 9, 9],
        "everything": [3, 3, 7, 7],
        "partial": [27, 27, 63, 63],
    }
    specs = ",".join(f"{tmp_path}/callables.py:{name}" for name in scores)
    parsed = {name: each.load() for name, each in rewards.parse_rewards(specs).items()}
    images = [Image.new("RGB", (8, 8))] * 4
    found = rewards.score(parsed, images, ["a", "b"], wanted=[3, 7], other=[0, 0])
    assert [each.tolist() for each in found.values()] == [*scores.values()]
    # A builtin has no signature.
    assert foreign.call(max, [1], [2], [0], wanted=0) == [2] and not foreign.asks_for(max, 1, 2, 3)


def test_a_column_that_a_file_lacks_is_refused():
    """An option is none, nor is a parameter that may be None where no file has columns."""

    def reward(images, prompts, targets, want=None, url="here", *, waits=(1,), group_size):
        pass

    check = lambda **files: check_columns(Reward("f.py:f", 1.0, reward), files)
    words = "'f.py:f' asks for 'want', which no row of b has; its columns: wanted"
    assert words in error_from(lambda: check(a={"want"}, b={"wanted"}))
    assert "no row of a has" in error_from(lambda: check(a={"wanted", "type"}, b={"wanted"}))
    check(a={"want", "other"}, b={"want"})
    check(a={"type", "tag"}, b=set())
    # An edit has sources; a judge of edits and of captions gets them where they are.
    judge = lambda images, prompts, targets, sources=None: None
    check_columns(Reward("f.py:f", 1.0, judge), {"a": {"include", "tag"}})
    needy = lambda images, prompts, targets, sources: None
    needs = lambda: check_columns(Reward("f.py:f", 1.0, needy), {"a": {"include", "tag"}})
    assert "asks for 'sources'" in error_from(needs)


def test_what_a_reward_imports_is_copied_but_not_the_projects_code(tmp_path, monkeypatch):
    """Also of a reward in the project's folder. Of equal names the second gets a number."""
    monkeypatch.setattr(resume_module, "ROOT", tmp_path)
    files = {"rewards.py": "", "helper.py": "", "other/helper.py": "x = 1"}
    files |= {"own.py": "import rewards, helper", "other/two.py": "import helper"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = SimpleNamespace(prompts=tmp_path / "own.py", eval_prompts=tmp_path / "own.py")
    used = {name: resume_module.files_of(tmp_path / name) for name in ("own.py", "other/two.py")}
    assert [file.name for file in used["own.py"]] == ["own.py", "helper.py", "rewards.py"]
    copies = resume_module.copies_of(settings, used | {"again": used["other/two.py"]})
    del copies["prompts.py"], copies["eval_prompts.py"]
    names = {"own.py": "own.py", "helper.py": "helper.py"}
    names |= {"two.py": "other/two.py", "5-helper.py": "other/helper.py"}
    assert copies == {name: files[file].encode() for name, file in names.items()}


def test_the_best_evaluation_is_named():
    """Where it is above the last by more than its standard error."""

    def best(*pairs):
        steps = [{"step": 10 * i, "held out": {"reward/f": [*x]}} for i, x in enumerate(pairs)]
        return best_earlier_evaluation(steps, "f")

    step, words = best((0.5, 0.02), (0.9, 0.05), (0.84, 0.05))
    assert (step, words) == (10, "f was highest after 10 steps: 0.900 +- 0.050, now 0.840")
    assert best((0.5, 0.02), (0.9, 0.07), (0.84, 0.05)) is None
    assert best((0.5, 0.02), (0.9, 0.05)) is best((0.9, None), (0.5, 0.1)) is None
    assert best((0.9, 0.05), (None, None)) is best((0.9, 0.05), (0.5, 0.1), (None, None)) is None


def test_a_tracker_gets_the_numbers(judged, monkeypatch, capsys):
    tracker = Mock()
    monkeypatch.setattr("runtime.data.find_spec", lambda name: None)
    assert judged("--tracker wandb") == 2 and "pip install wandb" in capsys.readouterr().err
    monkeypatch.setattr("runtime.data.find_spec", lambda name: True)
    monkeypatch.setattr("runtime.record.start_tracker", lambda *given: tracker)
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
        assert numbers["held out/reward"] == pytest.approx(record["held out"]["reward"][0])
    assert tracker.store_init_configuration.call_args.args[0]["steps"] == 1
    tracker.finish.assert_called_once()


def test_a_tracker_ends_no_run(quick, monkeypatch, capsys):
    """Nor does it hide what does. If it cannot start, nothing is left, so the same command works
    once it can."""
    monkeypatch.setattr("runtime.data.find_spec", lambda name: True)
    start = Mock(side_effect=ValueError("No API key configured"))
    monkeypatch.setattr("runtime.record.start_tracker", start)
    with monkeypatch.context() as patch:
        patch.setattr("train.load", lambda *given: pytest.fail("it loads"))
        assert quick("--tracker wandb --steps 1 --out run") == 2
    assert "cannot start --tracker wandb (No API key configured)" in capsys.readouterr().err
    assert not Path("run").exists()
    start.side_effect = None
    start.return_value.finish.side_effect = ConnectionError("away")
    assert quick("--tracker wandb --steps 1 --out run") == 0
    assert "warning: cannot finish wandb (away)" in capsys.readouterr().out
    reward = write_reward("if call == 2:\n    return [0, torch.inf]")
    assert quick(*reward, "--tracker wandb --steps 1 --out broken") == 2
    output, errors = capsys.readouterr()
    assert "reward 'mine.py:reward' is infinite" in errors and "cannot finish wandb" in output


def test_other_trackers_take_pictures_in_their_own_ways(tmp_path):
    Image.new("RGB", (3, 2), "red").save(tmp_path / "before-after.png")
    for name, layout in (("wandb", {}), ("tensorboard", {"dataformats": "NHWC"})):
        log_picture(tracker := Mock(), name, tmp_path / "before-after.png", 7)
        ((pictures,), options) = tracker.log_images.call_args
        assert pictures["before-after"].tolist() == [[[[255, 0, 0]] * 3] * 2]
        assert options == {"step": 7, **layout}


def test_trackers_are_told_which_run_goes_on(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    tracking = accelerate.tracking
    monkeypatch.setattr(accelerate.PartialState, "_shared_state", {})
    # Trackers write to accelerate's log, which asks for a state of its own.
    stub = Mock(side_effect=lambda *given, **more: tracking.logger.info("begins") or Mock())
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {"wandb": stub, "trackio": stub})
    (run := tmp_path / "run").mkdir()
    for name in ("wandb", "wandb", "trackio"):
        start_tracker(name, run)
    first, again, other = (call.kwargs for call in stub.call_args_list)
    assert first == again == other | {"id": first["name"]} and first["resume"] == "allow"
    assert re.fullmatch("run-[0-9a-f]{8}", first["name"])
    assert {call.args for call in stub.call_args_list} == {("grpo-glm-image",)}
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "named")
    copy = shutil.copytree(run, tmp_path / "copy")
    for folder in (copy, copy, run):
        start_tracker("wandb", folder)
    start_tracker("wandb", run.rename(tmp_path / "moved"))
    started = stub.call_args_list[3:]
    assert {(*call.args, call.kwargs["name"]) for call in started} == {("mine", "named")}
    of_copy, again, *of_run = (call.kwargs["id"] for call in started)
    assert of_copy == again != first["id"] and of_run == [first["id"]] * 2


def test_a_run_names_what_made_it(quick, monkeypatch, capsys):
    assert quick("--steps 1 --out run") == 0
    made = json.loads(Path("run/settings.json").read_text())["versions"]
    assert made == versions() and made.keys() >= {"torch", "peft", "commit"}
    # Where the project is no clone, whatever it lies in.
    with monkeypatch.context() as patch:
        patch.setattr("runtime.resume.ROOT", TESTS)
        assert versions()["commit"] is None
    capsys.readouterr()
    assert resume("run --steps 1") == 0 and "began with" not in capsys.readouterr().out
    for _ in range(2):  # each time
        monkeypatch.setattr("runtime.resume.versions", lambda: made | {"torch": "9"})
        assert resume("run --steps 1") == 0
        assert f"began with torch {made['torch']} (9 now): numbers" in capsys.readouterr().out
    of_run = json.loads(Path("run/settings.json").read_text())
    assert of_run["versions"] == made
    assert of_run["resumed"] == [{"step": 1, "versions": made | {"torch": "9"}}]


def test_the_code_of_a_run_is_what_began_it(quick, tmp_path, monkeypatch):
    """A pull while it runs changes nothing of what is recorded."""
    code = tmp_path / "project" / "runtime"
    code.mkdir(parents=True)
    monkeypatch.setattr("runtime.resume.ROOT", code.parent)
    (code / "cpu.py").write_text("1")
    assert quick("--steps 0 --out before") == 0
    pull = f"open({str(code / 'cpu.py')!r}, 'w').write('2')"
    assert quick(*write_reward(pull), "--steps 1 --out run") == 0
    pulled = versions()["code"]
    codes = {run: json.loads(Path(run, "settings.json").read_text()) for run in ("before", "run")}
    codes = {run: each["versions"]["code"] for run, each in codes.items()}
    assert codes["run"] == codes["before"] != pulled and len(pulled) == 12


def test_speeds_by_hand():
    """4 codes in 2 s; two pictures, one of them shared by two samples, in 4 s."""
    group = SimpleNamespace(tokens=SimpleNamespace(shape=(3, 4)))
    rollout = SimpleNamespace(groups=[group], images=[picture := object(), picture, object()])
    found = speeds(rollout, {"seconds/sample": 2, "seconds/paint": 4})
    assert found == {"codes_per_second": 2, "pictures_per_second": 0.5}
