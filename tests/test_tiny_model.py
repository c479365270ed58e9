"""The tiny model and its judge: check.py knows pictures by their pixels, and the model follows some
of its prompts."""

import random
from functools import partial
from types import SimpleNamespace

import check
import make
import numpy as np
import pytest
import torch
import train_edits
import world
from conftest import CPU, TINY
from PIL import Image, ImageFilter

import train
from devices.cpu import Plan
from glm_image.editing import encode_edit, read_edits, read_sources
from glm_image.model import encode_prompt
from inputs.prompts import Prompt, read_prompts
from rewards import Reward
from runtime.data import Data
from runtime.settings import Settings

RED, BLUE, GREEN = ("circle", "red"), ("circle", "blue"), ("square", "green")


def lines(name):
    return [
        line for line in (TINY / f"{name}.txt").read_text().splitlines() if not line.startswith("#")
    ]


def kind_of(prompt):
    return {**world.MEANING, **world.WISHES}[prompt].kind


def drawn(kind, prefix=""):
    name = f"heldout_{kind}" if prefix else f"edit_{kind}"
    return getattr(world, name)()


def shown(*things):
    """The picture of up to four things, or of None, place by place."""
    return world.draw((*things, None, None, None, None)[:4])


# ---- the judge -----------------------------------------------------------------------------------


def spoiled(image, seed):
    """The picture with soft edges, and with noise."""
    noise = np.random.default_rng(seed).normal(0, 12, (128, 128, 3))
    noisy = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    return [image.filter(ImageFilter.GaussianBlur(2)), noisy]


def some(captions, count):
    return random.Random(0).sample(captions, min(count, len(captions)))


@pytest.mark.parametrize("kind", world.KINDS)
def test_the_judge_passes_captions_as_drawn_blurred_too_and_noisy(kind):
    captions = some(world.CAPTIONS[kind], 40)
    images, texts = [world.draw(caption.scene()) for caption in captions], [*map(str, captions)]
    assert check.correct(images, texts).all() and (check.facts(images, texts) == 1).all()
    for i in range(min(8, len(images))):
        assert check.correct(spoiled(images[i], i), [texts[i]] * 2).all()


def wrong_scenes(caption):
    """Scenes that differ from what a caption says in one thing that it says: shape, colour, number
    or place."""
    scene = caption.scene()
    at = lambda place, thing: (*scene[:place], thing, *scene[place + 1 :])
    occupied = [place for place in range(4) if scene[place]]
    for place in occupied:
        shape, colour = scene[place]
        yield from (at(place, (other, colour)) for other in set(world.SHAPES) - {shape})
        if caption.colours:
            yield from (at(place, (shape, other)) for other in set(world.COLOURS) - {colour})
        yield at(place, None)
    for place in set(range(4)) - set(occupied):
        yield at(place, scene[occupied[0]])
    if len(caption.colours) == 2:
        yield caption._replace(colours=caption.colours[::-1]).scene()
    if caption.kind == "position":
        yield caption._replace(shapes=caption.shapes[::-1]).scene()
        for relation in set(world.RELATIONS) - {caption.word}:
            yield caption._replace(word=relation).scene()


def test_the_judge_fails_every_picture_with_one_thing_wrong():
    tried = 0
    for kind in world.KINDS:
        for caption in some(world.CAPTIONS[kind], 2):
            images = [world.draw(scene) for scene in wrong_scenes(caption)]
            given = images, [str(caption)] * len(images)
            assert check.facts(*given).max() < 1 and check.correct(*given).max() == 0
            assert check.clean(images).all()  # wrong, but clean
            tried += len(images)
    assert tried > 100


def test_the_judge_leaves_free_what_a_caption_does_not_say():
    for prompt, *things in (
        ("a circle", None, None, BLUE),  # its place and its colour
        ("a circle and a square", None, GREEN, None, BLUE),
        ("a circle left of a square", BLUE, None, None, GREEN),
        ("a circle above a square", BLUE, None, None, GREEN),
    ):
        assert check.correct([shown(*things)], [prompt]) == 1


def test_the_share_of_facts_by_hand():
    square = ("square", "blue")
    cases = [
        ("three circles", (RED, BLUE), (0 + 2 / 3) / 2),
        ("two circles", (RED, RED, RED), (0 + 1) / 2),
        ("two red circles", (RED, BLUE), (1 + 1 + 1 / 2) / 3),
        ("a red circle", (BLUE,), 2 / 3),
        ("a red circle and a blue square", (BLUE, ("square", "red")), (1 + 1 + 0) / 3),
        ("a circle left of a square", (square, RED), (1 + 1 + 0) / 3),
        ("a circle left of a square", (RED,), (0 + 1 / 2 + 0) / 3),
        ("a circle", (), 0),
    ]
    for prompt, things, share in cases:
        assert check.facts([shown(*things)], [prompt]).item() == pytest.approx(share), prompt


def test_near_falls_with_every_pixel_that_was_not_drawn():
    images = [shown(RED), shown(BLUE)]
    for _ in range(2):
        images.append(images[-1].filter(ImageFilter.GaussianBlur(2)))
    near = check.near(images).tolist()
    assert near[0] == near[1] == 1 > near[2] > near[3] > 0.98


def test_the_judge_calls_a_mess_a_mess():
    """Noise, half a shape, two colours, another colour, two shapes in one, a stray patch: none
    clean, none right."""
    red, blank = shown(RED), shown()
    noise = np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    images = [Image.blend(red, blank, 0.6), Image.fromarray(noise), Image.new("RGB", (128, 128))]
    for other, box in (
        (blank, (0, 0, 32, 128)),
        (shown(BLUE), (0, 0, 32, 128)),
        (shown(("cross", "red")), (0, 0, 64, 32)),
        (Image.new("RGB", (24, 24), "blue"), (0, 0, 24, 24)),
    ):
        images.append(red.copy())
        images[-1].paste(other.crop(box), box)
    assert [check.look(image)[0] for image in images] == ["mess"] * 7
    assert not check.clean(images).any() and not check.facts(images, ["a red circle"] * 7).any()
    assert check.clean([red, blank]).all()


def test_the_judge_reads_a_wish_with_its_source():
    source, cross, ring = shown(RED, None, GREEN), ("cross", "red"), ("ring", "blue")
    wishes = {
        "make the circle blue": shown(BLUE, None, GREEN),
        "make the circle a cross": shown(cross, None, GREEN),
        "remove the circle": shown(None, None, GREEN),
        "add a blue ring": shown(RED, ring, GREEN),
    }
    for asked in wishes:
        judged = check.correct(
            [*wishes.values()], [asked] * 4, sources=[source.resize((256,) * 2)] * 4
        )
        assert judged.tolist() == [wish == asked for wish in wishes]
    assert world.WISHES["add a blue ring"].edited((RED, None, GREEN, None))[1] == ring
    elsewhere = shown(RED, None, GREEN, ring)
    # It does not say where.
    assert check.correct([elsewhere], ["add a blue ring"], sources=[source]) == 1
    for wish, things, share in (
        ("make the circle blue", (RED, None, GREEN), (1 / 2 + 1) / 2),
        ("make the square a cross", (RED, RED, ("cross", "green")), (1 + 2 / 3) / 2),
        ("remove the circle", (RED,), (0 + 2 / 3) / 2),
    ):
        (found,) = check.facts([shown(*things)], [wish], sources=[source]).tolist()
        assert found == pytest.approx(share)


def test_the_judge_judges_only_what_it_can():
    source, two = shown(RED), shown(*[RED] * 4)
    messy = source.copy()
    messy.paste("grey", (80, 80, 90, 110))
    blue = "make the circle blue"
    given = [(blue, None), (blue, messy), (blue, two), ("make the square blue", source)]
    given += [("add a red ring", two), ("make it bigger", source), ("a red circle", None)]
    prompts, sources = zip(*given)
    for judge in (check.facts, check.correct):
        judged = judge([source] * 7, prompts, sources=sources)
        assert judged.isnan().tolist() == [True] * 6 + [False] and judged[6] == 1
        assert judge([source], [blue]).isnan().all()


# ---- the data ------------------------------------------------------------------------------------


def test_captions_of_the_tiny_model():
    """All kinds in both files; pairs of shapes, and of a number and a shape, are in one of them."""
    pairs, numbered, parts = [], [], []
    for name in ("prompts", "heldout"):
        captions = {world.MEANING[line] for line in lines(name)}
        assert len(captions) == len(lines(name))
        assert {caption.kind for caption in captions} == {*world.KINDS}
        parts.append(captions)
        shapes = [frozenset(caption.shapes) for caption in captions]
        pairs.append({pair for pair in shapes if len(pair) == 2})
        counting = [caption for caption in captions if caption.kind == "counting"]
        numbered.append({(caption.word, caption.shapes[0]) for caption in counting})
    for first, second in (parts, pairs, numbered):
        assert first and second and not first & second
    assert not any(map(world.unrewarded, parts[0]))


def test_no_stage_sees_what_is_held_out(pipe, monkeypatch):
    """Neither captions, but for the single objects, nor edits."""
    learned = {str(caption) for captions in world.seen_captions().values() for caption in captions}
    assert {kind_of(caption) for caption in lines("heldout") if caption in learned} == {"one"}
    captions, edits, (training, held_out) = [], [], world.split_edits()
    monkeypatch.setattr(make, "split_edits", lambda: (training, held_out))
    monkeypatch.setattr(make, "random_edit", lambda rng: rng.choice([*training[:24], *held_out]))
    note = lambda caption, *_: captions.append(str(caption)) or world.MEANING["a ring"]
    monkeypatch.setattr(make, "misread", note)
    read = (None,) * 4, world.WISHES["add a black ring"]
    monkeypatch.setattr(make, "misread_edit", lambda *edit: edits.append(edit[:2]) or read)
    monkeypatch.setattr(make, "optimise", lambda *given: [given[-1]() for _ in range(10)])

    def policy(input_ids, logits_to_keep, **_):
        assert len(input_ids[:, -16:].unique(dim=0)) == 1  # what was misread
        width = pipe.vision_language_encoder.lm_head.out_features
        return SimpleNamespace(logits=torch.zeros(len(input_ids), logits_to_keep, width))

    policy.config = pipe.vision_language_encoder.config
    make.train_policy(policy, 1, 1e-3, make.redraw)
    assert len(captions) == 10 * 12 and set(captions) <= learned
    assert edits and not set(edits) & set(held_out)


def test_edits_sources_and_targets_of_the_tiny_model():
    pairs = []
    for prefix in ("", "heldout-"):
        wishes = lines(f"{prefix}edits")
        sources = drawn("sources", prefix)
        assert len(wishes) == len(sources) and {kind_of(wish) for wish in wishes} == set(
            world.FORMS
        )
        assert check.correct(drawn("targets", prefix), wishes, sources=sources).all()
        # Nothing is asked for that is there already.
        assert not check.correct(sources, wishes, sources=sources).any()
        pairs += zip((source.tobytes() for source in sources), wishes)
    assert len(set(pairs)) == len(pairs)  # those held out are others


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("edits", [False, True])
def test_the_base_paints_clean_pictures_and_shows_some_of_what_it_is_asked_for(edits):
    """Of captions and of edits that are held out: there is something to learn from."""
    kind, read = (train_edits.EditSettings, read_edits) if edits else (Settings, read_prompts)
    settings = train.parse_settings(["--model", str(TINY)], kind)
    held_out = train.read_inputs(settings, read).held_out
    some = held_out[::8]
    load_run = partial(train_edits.load_run, Data(some, some, {}, {})) if edits else train.Run.load
    run = load_run(settings, Plan(CPU, "bfloat16"), {})
    rewards = {name: Reward(name, 1.0, getattr(check, name)) for name in ("correct", "clean")}
    groups = run.trainer.sample(run.glm_image.encode(some, settings), 1, 0)
    _, scores = run.paint_and_score(settings, rewards, some, groups, 0)
    assert scores["clean"].mean() > 0.8 and 0 < scores["correct"].mean() < 1


def test_every_word_of_the_tiny_model_is_one_token(pipe):
    words_of = pipe.processor.tokenizer.convert_ids_to_tokens
    ids, _, count = encode_prompt(pipe.processor, "three circles", 128, 128)
    words = " ".join(word for word in words_of(ids) if not word.startswith("<|"))
    assert words == "three Ġcircles <sop> 4 Ġ4 <eop> <sop> 16 Ġ16 <eop>" and count == 256 + 16
    edit = Prompt("make the circle blue", source=shown(RED))
    read_sources(pipe, [edit], CPU)
    ids, _, count = encode_edit(pipe.processor, edit, 128, 128)
    words = words_of(ids)
    assert (words[1], words[18]) == ("<|begin_of_image|>", "<|end_of_image|>")
    assert torch.equal(ids[2:18], edit.codes) and count == 16  # no preview
    assert words[19:23] == ["make", "Ġthe", "Ġcircle", "Ġblue"]


def test_the_tower_reads_the_codes_of_a_drawing_that_the_policy_was_taught(pipe):
    rng = random.Random(5)
    scenes = [world.random_scene(rng) for _ in range(20)]
    drawn = [Prompt("", source=world.draw(scene)) for scene in scenes]
    read_sources(pipe, drawn, CPU)
    assert torch.equal(torch.stack([each.codes for each in drawn]), make.codes_of(scenes)[:, 256:])
