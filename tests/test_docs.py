"""The pages: links lead somewhere; flags, rewards and tests that they name exist."""

import ast
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from train_decoder import DecoderSettings
from train_edits import EditSettings

import rewards
from benchmarks import losses, variants
from rewards import parse_rewards
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
FLAGS = 40  # of --help
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
    if "train.main(" in source or "parse_settings(arguments)" in source:  # it takes a run's
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


def test_a_broken_link_and_an_unknown_flag_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title: here\n[a](page.md#a-title-here) [b](page.md#a-title) [c](gone.md) [d](https://a.b)\n`[e](f)`\n"
    )
    assert broken_links(page) == ["page.md#a-title", "gone.md"]
    assert unknown_flags("python train.py --steps 3 --speed 4") == ["--speed"]
    assert unknown_flags("torchrun --nnodes 2 --steps 3 train.py --steps 3") == ["--steps"]
    assert unknown_flags("--hard-start") == ["--hard-start"]
    assert unknown_flags("--hard-start", "see variants.py") == []


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
    chromium = {"--headless", "--hide-scrollbars", "--no-sandbox", "--screenshot", "--window-size"}
    # pip's; a browser's; of CSS.
    assert {name: flags for name, flags in unknown.items() if flags} == {
        "smollm2.py": {"--no-deps"},
        "lesson.py": chromium,
        "page.py": {"--columns"},
    }


def test_the_page_of_rewards_lists_them():
    text = (ROOT / "docs" / "rewards.md").read_text()
    table = re.search(r"^\| Name \| What it rewards \|.*?\n\n", text, re.MULTILINE | re.DOTALL)[0]
    rows = [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in table.splitlines()[2:] if row]
    listed = {name for names in rows for name in names} - {"my_file.py:function"}
    assert sorted(listed) == sorted(rewards.REWARDS)


def test_the_columns_of_the_first_tables_are_explained():
    page = (ROOT / "docs" / "numbers.md").read_text()
    names = parse_rewards(Settings.tiny["reward"]) | parse_rewards(Settings.tiny["eval_reward"])
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_every_page_is_reached_from_the_readme():
    """By a link there, or on a page of docs/ that is reached."""
    waiting = [ROOT / "README.md"]
    reached = set()
    while waiting:
        page = waiting.pop()
        reached.add(page)
        linked = re.findall(r"\]\(([^)\s#]+\.md)", without_code(page.read_text()))
        pages = {(page.parent / target).resolve() for target in linked}
        waiting += [target for target in pages - reached if target.parent == ROOT / "docs"]
    assert sorted(page.name for page in (ROOT / "docs").glob("*.md") if page not in reached) == []


def test_the_readme_shows_the_whole_trainer_and_four_commands():
    text = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    whole = (ROOT / "examples" / "pictures.py").read_text()
    docstring_and_path, _, code = whole.partition("\nimport random\n")
    assert shown == f"import random\n{code}" and docstring_and_path.endswith("sys.exit()\n")
    (commands,) = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [line for line in commands.splitlines() if line[0] != "#"]
    assert commands[0].endswith(". .venv/bin/activate")
    assert commands[1:] == [
        "pip install -r requirements.txt",
        # Beside a GPU, too, it downloads nothing.
        "python train.py --model tiny-glm-image --group-size 4",
        "pytest",
    ]
    assert len(text.splitlines()) <= 150


def test_the_chinese_readme_says_the_same():
    """Its commands, code, links, pictures and numbers are those of the README, in their order."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "README.zh.md")]
    texts = [text.partition("\n")[2] for text in texts]  # the first lines link to each other
    for part in (r"^```.*?^```", r"\]\(([^)#]+)", r"`[^`\n]+`|\d+(?:\.\d+)?(?: GB|%|B\b)?"):
        english, chinese = (re.findall(part, text, re.MULTILINE | re.DOTALL) for text in texts)
        assert sorted(chinese) == sorted(english)


def test_the_tables_of_variants_are_those_of_the_file():
    page = (ROOT / "docs" / "worth.md").read_text()
    assert [table for table in variants.tables(variants.read()) if table not in page] == []


def test_copying_shows_the_losses_of_the_file():
    page = (ROOT / "docs" / "copying.md").read_text()
    cells = re.findall(r"^\|(.*)\| `(.*)`<br>→ (.*) \|$", page, re.MULTILINE)
    shown = [(old, new.strip("`")) for _, old, new in cells]
    assert shown == [(edit.old, edit.new or "nothing") for edit in losses.EDITS]
    before = None
    for (remark, *_), edit in zip(cells, losses.EDITS):
        assert remark.startswith(f" {edit.loss}") if edit.loss != before else remark == " "
        before = edit.loss
    named = set(re.findall(r"with `(\w+)`", "".join(remark for remark, *_ in cells)))
    assert named == {function.__name__ for function in losses.FUNCTIONS.values()}


def test_the_rows_that_worth_names_can_be_trained():
    """`python benchmarks/variants.py "no KL"`: a row from the harder start."""
    page = (ROOT / "docs" / "worth.md").read_text()
    names = [re.findall('"([^"]+)"', code) for code in re.findall(r"variants\.py( \"[^`]+)`", page)]
    known = {variant.name for variant in [*variants.HARD, *variants.CLIP]}
    assert names and {each for some in names for each in some} <= known


def test_the_tests_that_show_mistakes_exist():
    """Below each table of mistakes stand its tests: as many parts as it has rows."""
    sources = "\n".join(file.read_text() for file in TESTS)
    exist = set(re.findall(r"^def (test_\w+)", sources, flags=re.MULTILINE))
    page = (ROOT / "docs" / "worth.md").read_text()
    table = re.compile(r"^\| Wrong .*\n\|---.*\n((?:\|.*\n)+)\nTests((?:.+\n)+)", re.MULTILINE)
    numbers = []
    for rows, tests in table.findall(page):
        numbers.append(len(rows.splitlines()))
        parts = [re.findall(r"`(test_\w+)`", part) for part in tests.split(";")]
        assert len(parts) == numbers[-1] and all(parts)
        assert {name for names in parts for name in names} - exist == set()
    assert sum(numbers) == 19


# ---- the code ------------------------------------------------------------------------------------


SCRIPTS = [file for file in SOURCES if '__name__ == "__main__"' in file.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_every_script_has_help(script, tmp_path, monkeypatch, capsys):
    """It begins with what the script's own docstring says, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    about = ast.get_docstring(ast.parse(script.read_text())).splitlines()[0]
    helped = capsys.readouterr().out
    assert not ended.value.code and ("usage: " in helped or about in helped)
    assert about in helped or script.name == "make.py"
    assert list(tmp_path.iterdir()) == []


def test_an_installed_project_has_all_that_it_imports():
    """`pip install -e .`: grpo, rewards, train and their rooms, from any folder."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [ROOT / f"{name}.py" for name in setup["py-modules"]]
    files += [file for name in setup["packages"] for file in (ROOT / name).glob("*.py")]
    imports = re.compile(r"^ *(?:from|import) (\w+)|\"(\w+)\.\w+:", re.MULTILINE)
    named = {x for file in files for pair in imports.findall(file.read_text()) for x in pair if x}
    ours = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/")) if path.stem in named}
    assert {"grpo", "glm_image", "reward_models"} <= ours
    assert ours <= {*setup["py-modules"], *setup["packages"]}


def test_there_are_few_flags():
    assert len(build_parser()._actions) - 1 <= FLAGS  # without --help itself
