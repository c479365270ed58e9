"""The prompts that ship: what is held out is not trained on."""

from pathlib import Path

from inputs.prompts import read_file
from reward_models.text import quoted

FOLDER = Path(__file__).parent.parent / "prompts"


def folded(text):
    return " ".join(text.lower().split())


def test_heldout_is_new():
    """Neither a prompt nor a text that it quotes; and all have a type, of which evaluations report
    each."""
    train, heldout = (read_file(FOLDER / f"{name}.txt") for name in ("train", "heldout"))
    for parts_of in (lambda text: [text], quoted):
        first, second = (
            {folded(x) for p in some for x in parts_of(p.text)} for some in (train, heldout)
        )
        assert first and second and not first & second
    assert {prompt.type for prompt in train} == {prompt.type for prompt in heldout}
    assert "other" not in {prompt.type for prompt in train}
