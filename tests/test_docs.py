"""The pages: links lead somewhere, flags exist, tables are those of their files; README's run, whole:

README_RUN=runs/1 pytest tests/test_docs.py
"""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from conftest import records
from torch.distributed.run import get_args_parser
from train_decoder import DecoderSettings
from train_edits import EditSettings

from benchmarks import losses, tables
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
    ours = ("train.py", "torchrun", "examples/train_decoder.py", "examples/train_edits.py")
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


def test_copying_shows_the_losses_of_the_file():
    page = (ROOT / "docs" / "copying.md").read_text()
    cells = re.findall(r"^\| (.*) \| `(.*)`<br>→ (.*) \|$", page, re.MULTILINE)
    edits = [(loss, *edit) for loss, own in losses.EDITS.items() for edit in own]
    for (remark, old, new), (loss, *edit) in zip(cells, edits, strict=True):
        assert [old, new.strip("`")] == [edit[0], edit[1] or "nothing"]
        first = edit[0] == losses.EDITS[loss][0][0]
        assert remark.startswith(f"{loss}: ") if first else not remark
    named = set(re.findall(r"with `(\w+)`", "".join(remark for remark, *_ in cells)))
    assert named == {function.__name__ for function in losses.FUNCTIONS.values()}


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_readme_has_the_first_program_and_the_lines_of_the_examples(name):
    page = (ROOT / name).read_text()
    assert f"```python\n{(ROOT / 'examples' / 'one_screen.py').read_text()}```" in page
    rungs = re.findall(r"^\| `python (examples/\S+)` \| (\d+) \|", page, re.MULTILINE)
    length = lambda file: len((ROOT / file).read_text().splitlines())
    assert [int(lines) for _, lines in rungs] == [length(file) for file, _ in rungs]
    assert len(rungs) == 4 and length("train.py") < 300


RUN = os.environ.get("README_RUN")
RUN = RUN and os.path.abspath(RUN)  # a test's own folder is the working one


@pytest.mark.skipif(not RUN, reason="README_RUN names no run of README's command")
def test_the_tiny_model_learns_as_readme_says():
    """From 54% correct held-out pictures to 95%, with room for another CPU's rounding."""
    before, *_, after = records(f"{RUN}/evaluation.jsonl")
    shares = [each["reward/correct"][0] for each in (before, after)]
    assert shares[0] == pytest.approx(0.54, abs=0.01) and shares[1] >= 0.88


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


def test_an_installed_project_has_all_that_it_imports():
    """`pip install -e .`: grpo, rewards, train and their packages, from any folder."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [ROOT / f"{name}.py" for name in setup["py-modules"]]
    files += [file for name in setup["packages"] for file in (ROOT / name).glob("*.py")]
    imports = re.compile(r"^ *(?:from|import) (\w+)|\"(\w+)\.\w+:", re.MULTILINE)
    named = {x for file in files for pair in imports.findall(file.read_text()) for x in pair if x}
    ours = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/")) if path.stem in named}
    assert {"grpo", "glm_image", "reward_models"} <= ours
    assert ours <= {*setup["py-modules"], *setup["packages"]}
