"""The prompts that ship: their kinds, what they quote, their questions, and that held out is held
out."""

import re
from pathlib import Path

from reward_models.text import quoted

FOLDER = Path(__file__).parent.parent / "prompts"


def by_kind(name):
    """{kind: its prompts}, in the order of the file, whose first line names a kind."""
    first, *sections = re.split(r"(?m)^# type: (.*)\n", (FOLDER / f"{name}.txt").read_text())
    assert first == "" and len(set(sections[::2])) == len(sections[::2])
    return {kind: prompts.splitlines() for kind, prompts in zip(sections[::2], sections[1::2])}


KINDS = {name: by_kind(name) for name in ("train", "heldout")}
PROMPTS = {
    name: [prompt for prompts in kinds.values() for prompt in prompts]
    for name, kinds in KINDS.items()
}
OBJECTS = ["counting", "spatial relations", "attribute binding", "several objects"]

# Words that any prompt may use: all others of the held-out object prompts must be new.
GENERAL = """
one two three four five six half pair both each all only just exactly last next
above across along around behind beneath between centre corners edge far for from front left
middle nearer off open
outside right top under the and but has its than them while with end order
black blue bright green grey orange pale pink purple red scarlet silver turquoise white yellow
chalk copper enamel glass ice porcelain wood rusty shallow short stripy
carved crosses drying facing head jump lies mark perched photo seen sleeps standing stuck stuffed
turned viewer watercolour
"""


def folded(prompt):
    return " ".join(prompt.lower().split())


def stems(text):
    """Its words of three letters or more, in the singular, more or less: {"berr"} for "berry" and
    "berries"."""
    return {
        re.sub(r"(ies?|ys?|es|(?<!s)s|e)$", "", word)
        for word in re.findall("[a-z]{3,}", text.lower())
    }


def test_heldout_is_new():
    train, heldout = PROMPTS["train"], PROMPTS["heldout"]
    assert not {folded(p) for p in train} & {folded(p) for p in heldout}
    assert not {folded(s) for p in train for s in quoted(p)} & {
        folded(s) for p in heldout for s in quoted(p)
    }
    objects = [prompt for kind in OBJECTS for prompt in KINDS["heldout"][kind]]
    assert not (stems(" ".join(objects)) - stems(GENERAL)) & stems(" ".join(train))
