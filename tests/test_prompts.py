"""The prompts are what prompts/README.md says: how many of each kind, what they quote, and that held out is held out."""

import json
import re
from pathlib import Path

import pytest

from rewards import quoted

FOLDER = Path(__file__).parent.parent / "prompts"
PROMPTS = {name: (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines() for name in ("train", "heldout")}
README = (FOLDER / "README.md").read_text(encoding="utf-8")
TABLE = re.findall(r"(?m)^\| (.+?) \| (\d+) \| (\d+) \| (.*)\|$", README)  # kind, train, heldout, example
CHINESE = re.compile("[\u4e00-\u9fff]")

# Words that any prompt may use: all others of the held-out object prompts must be new.
GENERAL = """
one two three four five six seven eight nine ten half pair both each all only just exactly last next
above across along around behind beneath between centre corners edge far for from front left middle nearer off open
outside right top under the and but has its than them while with end order
black blue bright green grey orange pale pink purple red scarlet silver turquoise white yellow
chalk copper enamel glass ice porcelain wood rusty shallow short stripy
carved crosses drying facing head jump lies mark perched photo seen sleeps standing stuck stuffed turned viewer watercolour
"""


def folded(prompt):
    return " ".join(prompt.lower().split())


def stems(text):
    """Its words of three letters or more, in the singular, more or less: {"berr"} for "berry" and "berries"."""
    return {re.sub(r"(ies?|ys?|es|(?<!s)s|e)$", "", word) for word in re.findall("[a-z]{3,}", text.lower())}


@pytest.mark.parametrize("name, least", [("train", 240), ("heldout", 48)])
def test_counts_and_quotes(name, least):
    prompts, column = PROMPTS[name], {"train": 1, "heldout": 2}[name]
    counts = {row[0]: int(row[column]) for row in TABLE}
    assert len(prompts) >= least and len({folded(p) for p in prompts}) == len(prompts)
    assert all(p == p.strip() != "" and not re.search("['’]", p) for p in prompts)
    assert counts.pop("all") == len(prompts) == sum(counts.values())

    text = [p for p in prompts if quoted(p)]
    assert text == [p for i, p in enumerate(prompts) if i % 8 in (1, 5)]  # the kinds take turns
    chinese = sum(bool(CHINESE.search(p)) for p in text)
    assert (len(text) - chinese, chinese) == (counts["English text"], counts["Chinese text"])
    for prompt in text:
        assert 2 <= len(quoted(prompt)) <= 5, prompt
        for string in quoted(prompt):
            low, high = (8, 30) if CHINESE.search(string) else (20, 60)
            assert low <= len(string) <= high, string


def test_readme_examples_are_in_train():
    assert {row[3].strip() for row in TABLE[:-1]} <= set(PROMPTS["train"])  # the last row is the sum


def test_heldout_is_new():
    train, heldout = PROMPTS["train"], PROMPTS["heldout"]
    assert not {folded(p) for p in train} & {folded(p) for p in heldout}
    assert not {folded(s) for p in train for s in quoted(p)} & {folded(s) for p in heldout for s in quoted(p)}
    objects = heldout[::2]  # counting, spatial, attributes, several objects: every other line
    assert not (stems(" ".join(objects)) - stems(GENERAL)) & stems(" ".join(train))


# ---- questions about what is where ----------------------------------------------------------------------------------

LINES = [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_prompt_about_objects_has_questions():
    """Counting, spatial relations, attributes and several objects: every other line of both files, in their order."""
    assert [line["prompt"] for line in LINES] == [*PROMPTS["train"][::2], *PROMPTS["heldout"][::2]]
    assert len(LINES) == 160 and all(line.keys() == {"prompt", "questions"} for line in LINES)
    for line in LINES:
        assert 2 <= len(line["questions"]) <= 5
        for question in line["questions"]:
            assert re.fullmatch(r"[A-Z][^?\"\n]*[a-z]\?", question) and len(question) < 100, question


def test_no_question_is_asked_twice():
    """Neither of one prompt nor of two, so that held out is held out."""
    questions = [folded(question) for line in LINES for question in line["questions"]]
    assert len(questions) == len(set(questions))


def test_counting_prompts_have_a_question_with_a_number():
    for line in LINES[::4]:
        assert any("exactly" in question for question in line["questions"]), line["prompt"]
