"""The pages: links lead somewhere, flags exist, tables are those of their files; README's run, whole:

README_RUN=runs/1 pytest tests/test_docs.py
"""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import records
from PIL import Image
from torch.distributed.run import get_args_parser
from train_decoder import DecoderSettings
from train_edits import EditSettings

import grpo
from benchmarks import losses, plan, tables
from runtime.settings import Settings, build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("[a-z]*/README.md")])
NAMES = subprocess.run(
    ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()
FILES = [ROOT / name for name in NAMES] or sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")])
FILES = [file for file in FILES if file.exists()]
TESTS = [file for file in FILES if "test" in str(file.relative_to(ROOT))]
SOURCES = [file for file in FILES if file not in TESTS]
# Not "--eval-...", which names several.
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w.-]*\.\.)")
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


BLOCK = re.compile(r"^ *```.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def without_code(text):
    return re.sub(r"`[^`\n]+`", "", BLOCK.sub("", text))


def code_of(text):
    """The commands of code blocks, without their comments, and code within lines."""
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    commands = [re.sub(r"(^| )#.*", "", line) for line in lines]
    return commands + [
        span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))
    ]


def anchors(page):
    """As GitHub makes them: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    return broken


@cache
def flags_of(name):
    """Those of train.py, of torchrun, or of another script: {"--steps", ...}."""
    classes = {"train.py": Settings, "examples/train_decoder.py": DecoderSettings}
    classes["examples/train_edits.py"] = EditSettings
    if name in classes or name == "torchrun":
        parser = build_parser(classes[name]) if name in classes else get_args_parser()
        return {option for action in parser._actions for option in action.option_strings}
    source = (ROOT / name).read_text()
    own = {"--help", *re.findall(r'"(--[a-z][a-z-]*)"', source)}
    words = "train.main(", "parse_settings(arguments)", "parse_known_args("
    if any(word in source for word in words):  # it takes a run's
        own |= flags_of("examples/train_decoder.py")
    return own


@cache
def script(word):
    """The source that a word names, with or without its folder: "benchmarks/variants.py". None for
    other words."""
    found = [file for file in SOURCES if word and str(file.relative_to(ROOT)).endswith(word)]
    return str(found[0].relative_to(ROOT)) if word.endswith(".py") and found else None


def unknown_flags(command, page=""):
    """A flag belongs to the script before it; without one, to train.py, or to torchrun or a script
    the page names."""
    words = command.split()
    if words and words[0].endswith(("pip", "apt", "ruff", "git")):
        return []
    scripts = {name for word in re.findall(r"[\w/-]+\.py", page) if (name := script(word))}
    known = set().union(*map(flags_of, {"train.py", *scripts, *re.findall("torchrun", page)}))
    unknown = []
    for word in words:
        if word == "torchrun" or script(word):
            known = flags_of(script(word) or word)
        unknown += [flag for flag in FLAG.findall(word) if flag not in known]
    return unknown


@named
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


@named
def test_flags_on_the_pages_exist(page):
    text = page.read_text()
    assert {
        command: unknown for command in code_of(text) if (unknown := unknown_flags(command, text))
    } == {}


def test_flags_in_docstrings_and_messages_exist():
    ours = "train.py", "torchrun", "examples/train_decoder.py", "examples/train_edits.py"
    ours += ("benchmarks/texts.py",)
    unknown = {}
    for source in SOURCES:
        known = set().union(*map(flags_of, (*ours, str(source.relative_to(ROOT)))))
        unknown[source.name] = set(FLAG.findall(source.read_text())) - known
    assert {name: flags for name, flags in unknown.items() if flags} == {
        "smollm2.py": {"--no-deps"},  # pip's
        "texts.py": {"--no-deps"},
    }


def test_the_tables_are_those_of_the_files():
    names = "worth", "kl", "running"
    pages = " ".join("".join((ROOT / "docs" / f"{name}.md").read_text() for name in names).split())
    runs = tables.read_runs()
    texts = [table(runs) for table in (tables.table_of_kl, tables.table_of_splits)]
    for tasks in tables.TABLES:
        # Of a task without a row that all judging seeds have run there is none.
        of_tasks = tables.table_of_losses(runs, tasks).split("\n\n")
        texts += [text for text in of_tasks if text.startswith("|")]
    assert [text for text in texts if " ".join(text.split()) not in pages] == []


def test_the_header_of_grpo_says_what_several_steps_gained():
    runs = tables.read_runs()
    values = plan.judge(runs, runs, plan.TASKS)
    found = tables.compare(values, plan.pairs(plan.TASKS))
    header = " ".join(grpo.__doc__.split())
    for row, words in ("4 mini-batches", "mini-batches gained"), ("4 passes", "passes"):
        both = [found[task, f"GRPO, {row}"] for task in plan.TASKS]
        gained, other = (f"{round(100 * x)} +- {100 * half:.0f}" for x, half in both)
        assert re.search(rf"four {words} {re.escape(gained)} and {re.escape(other)}\b", header)


def test_copying_says_what_each_loss_of_the_file_changes():
    _, page = (ROOT / "docs" / "copying.md").read_text().split("\n## Another loss\n")
    remarks = dict(re.findall(r"^- \*\*(.+?)\*\*: (.*(?:\n  .*)*)", page, re.MULTILINE))
    assert [*remarks] == [*losses.EDITS]
    for loss, function in losses.FUNCTIONS.items():
        assert f"with `{function.__name__}`" in remarks[loss]


@pytest.mark.parametrize("loss", losses.EDITS)
def test_the_code_of_an_edit_stands_once(loss):
    """In one of the two files, each edit after the one before it."""
    files = losses.edited(loss)
    for _, new in losses.EDITS[loss]:
        assert sum(text.count(new) for text in files.values()) == 1 or not new


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_has_the_first_program_and_the_lines_of_the_examples(name):
    page = (ROOT / name).read_text()
    assert f"```python\n{(ROOT / 'examples' / 'one_screen.py').read_text()}```" in page
    rungs = re.findall(r"^\| `python (examples/\S+)` \| (\d+) \|", page, re.MULTILINE)
    length = lambda file: len((ROOT / file).read_text().splitlines())
    assert [int(lines) for _, lines in rungs] == [length(file) for file, _ in rungs]
    assert len(rungs) == 4 and length("train.py") < 300


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_reward_of_readme_is_a_mean(name, tmp_path):
    """Of all pixels alike, and no integer: pictures that nearly agree still differ."""
    page = (ROOT / name).read_text()
    (code,) = re.findall(r"```python\n(# my_reward\.py.*?)```", page, re.DOTALL)
    (tmp_path / "own.py").write_text(code)
    score = runpy.run_path(str(tmp_path / "own.py"))["score"]
    numbers = np.random.default_rng(0).integers(0, 256, (3, 40, 24, 3), dtype=np.uint8)
    numbers[0, 10:30, 6:18] = 255  # a bright middle
    numbers[1, 0, 0], numbers[2] = 0, numbers[1]
    numbers[2, 0, 0] = 1
    found = score([Image.fromarray(each) for each in numbers], ["a", "b", "c"])
    assert found == pytest.approx(numbers[..., 0].mean((1, 2)), abs=1e-9)
    assert found[2] > found[1]


RUN = os.environ.get("README_RUN")
RUN = RUN and os.path.abspath(RUN)  # a test's own folder is the working one


@pytest.mark.skipif(not RUN, reason="README_RUN names no run of README's command")
def test_the_tiny_model_learns_as_readme_says():
    """From 54% correct held-out pictures to 95%, with room for another CPU's rounding."""
    before, *_, after = records(f"{RUN}/evaluation.jsonl")
    shares = [each["reward/correct"][0] for each in (before, after)]
    assert shares[0] == pytest.approx(0.54, abs=0.01) and shares[1] >= 0.88
    rewards = [each["reward/facts"][0] for each in (before, after)]
    assert rewards[0] == pytest.approx(0.72, abs=0.01) and rewards[1] >= 0.95


# ---- the code ------------------------------------------------------------------------------------


SCRIPTS = [file for file in SOURCES if '__name__ == "__main__"' in file.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_every_script_has_help(script, tmp_path, monkeypatch, capsys):
    """It begins with what the script's own docstring says, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    about = ast.get_docstring(ast.parse(script.read_text())).splitlines()[0]
    helped = capsys.readouterr().out
    assert not ended.value.code and ("usage: " in helped or about in helped)
    assert about in helped or script.name == "make.py"
    assert list(tmp_path.iterdir()) == []


def test_grpo_and_its_tests_need_nothing_else(tmp_path):
    """Copied into an empty folder, as docs/copying.md says, they run in a process of their own.

    All tests are collected there, which imports what the file imports. Those that run are of every
    section and cheap: all would take four times as long, and have run here. An installed project
    would be found from any folder, so the imports are read as well.
    """
    files = [ROOT / "grpo.py", ROOT / "test_grpo.py"]
    imports = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    ours = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py"), *ROOT.glob("*/"))}
    for file in files:
        shutil.copy(file, tmp_path)
        assert ours & {*imports.findall(file.read_text())} <= {"grpo"}
    call = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_grpo.py", "-k"]
    call.append("by_hand or formula or generate or positions or turns or refused")
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": ""}}
    done = subprocess.run(call, check=False, capture_output=True, text=True, **where)
    passed = re.search(r"(\d+) passed, \d+ deselected", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) >= 25, done.stdout


def test_an_installed_project_has_all_that_it_imports():
    """`pip install -e .`: grpo from any folder, and no other name."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [ROOT / f"{name}.py" for name in setup["py-modules"]]
    files += [file for name in setup["packages"] for file in (ROOT / name).glob("*.py")]
    imports = re.compile(r"^ *(?:from|import) (\w+)|\"(\w+)\.\w+:", re.MULTILINE)
    named = {x for file in files for pair in imports.findall(file.read_text()) for x in pair if x}
    ours = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/")) if path.stem in named}
    assert ours <= {*setup["py-modules"], *setup["packages"]} == {"grpo"}


FLOORS = "grpo inputs", "glm_image", "rewards reward_models", "runtime", "devices viewer", "train"


def test_imports_go_down():
    """So who needs GLM-Image alone imports no trainer."""
    floors = {name: i for i, names in enumerate(FLOORS) for name in names.split()}
    for file in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")):
        place = file.relative_to(ROOT).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text("utf-8"))) if place in floors else ():
            names = [each.name for each in getattr(node, "names", ())]
            names = [node.module] if isinstance(node, ast.ImportFrom) else names
            for name in names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                assert floors.get(name.partition(".")[0], 0) <= floors[place], (file, name)
