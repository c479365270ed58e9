"""examples/geneval.py: prompts as published, every rule on masks made by hand, models that are tiny
and random."""

import importlib.util
import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from test_rewards import tiny_clip
from transformers import (
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SwinConfig,
)

import rewards

spec = importlib.util.spec_from_file_location("geneval", ROOT / "examples" / "geneval.py")
geneval = importlib.util.module_from_spec(spec)
spec.loader.exec_module(geneval)

# ---- prompts -------------------------------------------------------------------------------------

PUBLISHED = {  # from results by prompt that others have published: some of each kind
    "single_object": ["bench", "cow", "bicycle", "clock", "backpack", "sink"],
    "two_object": ["bench and a sports ball", "toothbrush and a snowboard"],
    "counting": ["four sinks", "three benchs", "two wine glasses", "four buses"],
    "colors": ["yellow orange", "black tv remote"],
    "position": ["refrigerator below a scissors", "skateboard above a person"],
    "color_attr": ["green skis and a brown airplane", "black bus and a brown cell phone"],
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """[{kind: prompts}] of the benchmark and of training, by the command."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "geneval.py"), run_name="__main__")
    files = []
    for name in ("geneval.txt", "geneval-training.txt"):
        _, *parts = Path(name).read_text().split("# kind: ")
        files.append({kind: texts for kind, *texts in (part.splitlines() for part in parts)})
    return files


def test_prompts_to_train_on_are_of_the_same_form_and_none_of_the_benchmark(written):
    benchmark, kinds = written
    # All single objects are in it.
    assert [*kinds] == str.split("two_object counting colors position color_attr")
    for kind, texts in kinds.items():
        assert len(texts) > 100 and None not in map(geneval.asked_for, texts)
        assert not set(texts) & set(benchmark[kind])


def test_prompts_are_the_published_ones_in_their_kinds(written):
    """Each is understood again."""
    kinds, _ = written
    sizes = {
        "single_object": 80,
        "two_object": 99,
        "counting": 80,
        "colors": 94,
        "position": 100,
        "color_attr": 100,
    }
    assert {kind: len(set(texts)) for kind, texts in kinds.items()} == sizes
    for kind, some in PUBLISHED.items():
        assert {
            f"a photo of {words if kind == 'counting' else f'a {words}'}" for words in some
        } <= set(kinds[kind])
    assert kinds["single_object"][:3] == [
        "a photo of a bench",
        "a photo of a cow",
        "a photo of a bicycle",
    ]
    for kind, texts in kinds.items():
        for number, things, place in map(geneval.asked_for, texts):
            assert (number > 1) == (kind == "counting") and bool(place) == (kind == "position")
            assert len(things) == 1 + (kind in ("two_object", "position", "color_attr"))
            assert all(bool(colour) == kind.startswith("color") for colour, _ in things)


@pytest.mark.parametrize(
    "prompt, asked",
    [
        ("a photo of an orange", (1, [(None, "orange")], None)),
        ("a photo of an orange orange", (1, [("orange", "orange")], None)),
        (
            "a photo of a tv remote left of a tv\n",
            (1, [(None, "tv remote"), (None, "tv")], "left of"),
        ),
        ("a photo of four skises", (4, [(None, "skis")], None)),
        ("a photo of a unicorn", None),
        ("a cat", None),
        ("a photo of a cat and a dog and a bird", None),
    ],
)
def test_what_a_prompt_asks_for(prompt, asked):
    assert geneval.asked_for(prompt) == asked


# ---- rules ---------------------------------------------------------------------------------------


def rectangle(left, top, right, bottom):
    mask = np.zeros((100, 100), bool)
    mask[top:bottom, left:right] = True
    return mask


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ((10, 40, 30, 60), (70, 40, 90, 60), {"left of"}),
        ((40, 70, 60, 90), (40, 10, 60, 30), {"below"}),
        ((0, 0, 20, 20), (80, 80, 100, 100), {"left of", "above"}),  # (80 - 4) / 113 both
        (
            (20, 20, 60, 60),
            (28, 20, 68, 60),
            set(),
        ),  # an offset of 8 is no more than a tenth of 40 + 40
        ((20, 20, 60, 60), (36, 20, 76, 60), set()),  # (16 - 8) / 16 is not above a half
        ((20, 20, 60, 60), (38, 20, 78, 60), {"left of"}),  # (18 - 8) / 18 is
        ((0, 0, 20, 20), (30, 60, 50, 80), {"above"}),  # (30 - 4) / 67 and (60 - 4) / 67
        (
            (0, 30, 100, 40),
            (40, 60, 60, 70),
            {"above"},
        ),  # sizes count by direction: 100 + 20 wide, 10 + 10 high
    ],
)
def test_places_by_hand(one, other, expected):
    assert geneval.places(rectangle(*one), rectangle(*other)) == expected


LEFT, RIGHT = rectangle(5, 40, 25, 60), rectangle(75, 40, 95, 60)
BLUE = rectangle(40, 0, 60, 20)


def found(**masks):
    return {name: masks.get(name.replace(" ", "_"), []) for name in geneval.CLASSES}


def colour_by_place(things):
    """Of the thing that comes first: red on the left, green on the right, blue in the middle."""
    names = {id(LEFT): "red", id(RIGHT): "green", id(BLUE): "blue"}
    return lambda name: names[id(things[name][0])]


@pytest.mark.parametrize(
    "prompt, things, right, credit",
    [
        ("a photo of a dog", {}, False, 0),
        ("a photo of a dog", {"dog": [LEFT]}, True, 1),
        (
            "a photo of a dog",
            {"dog": [LEFT, RIGHT], "cat": [BLUE]},
            True,
            0,
        ),  # one too many, which the judge allows
        ("a photo of a dog and a cat", {"dog": [LEFT]}, False, 1 / 2),
        ("a photo of a dog and a cat", {"dog": [LEFT, LEFT], "cat": [RIGHT]}, True, 1 / 2),
        ("a photo of three dogs", {"dog": [LEFT] * 3, "cat": [RIGHT]}, True, 1),
        ("a photo of three dogs", {"dog": [LEFT] * 4}, False, 2 / 3),
        ("a photo of two dogs", {"dog": [LEFT] * 5}, False, -1 / 2),
        ("a photo of a red dog", {"dog": [LEFT]}, True, 1),
        ("a photo of a red dog", {"dog": [RIGHT]}, False, 1 / 2),
        (
            "a photo of a red dog",
            {"dog": [LEFT, RIGHT]},
            True,
            0,
        ),  # the surest is red; the number is wrong
        ("a photo of a red dog", {"dog": [RIGHT, LEFT]}, False, 0),
        ("a photo of a red dog and a green cat", {"dog": [LEFT], "cat": [RIGHT]}, True, 1),
        ("a photo of a red dog and a green cat", {"dog": [LEFT], "cat": [LEFT]}, False, 3 / 4),
        ("a photo of a dog left of a cat", {"dog": [LEFT], "cat": [RIGHT]}, True, 1),
        ("a photo of a dog right of a cat", {"dog": [LEFT], "cat": [RIGHT]}, False, 2 / 3),
        ("a photo of a dog left of a cat", {"dog": [LEFT, RIGHT], "cat": [RIGHT]}, True, 1 / 3),
        ("a photo of a dog left of a cat", {"dog": [RIGHT, LEFT], "cat": [BLUE]}, False, 1 / 3),
        ("a photo of a dog left of a cat", {"dog": [LEFT]}, False, 1 / 3),
    ],
)
def test_rules_by_hand(prompt, things, right, credit):
    things = found(**things)
    asked = geneval.asked_for(prompt)
    assert geneval.is_right(things, colour_by_place(things), *asked) is right
    assert geneval.credit(things, colour_by_place(things), *asked) == pytest.approx(credit)


# ---- the detector and CLIP -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("geneval")
    stages = [f"stage{i}" for i in (1, 2, 3, 4)]
    swin = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1] * 4,
        num_heads=[1] * 4,
        window_size=2,
        out_features=stages,
    )
    sizes = {"hidden_dim": 32, "feature_size": 32, "mask_feature_size": 32, "dim_feedforward": 16}
    layers = {
        "encoder_layers": 1,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "encoder_feedforward_dim": 16,
    }
    torch.manual_seed(0)
    config = Mask2FormerConfig(
        backbone_config=swin, num_queries=5, num_labels=80, **sizes, **layers
    )
    with patch("transformers.models.mask2former.modeling_mask2former.requires_backends"):  # scipy
        Mask2FormerForUniversalSegmentation(config).save_pretrained(folder / "detector")
    return geneval.Judge(folder / "detector", str(tiny_clip(folder / "clip")))


def test_the_detector_is_read_as_mmdetection_reads_it(judge):
    """A score is the chance of a class times the mean certainty within the mask: here in float64,
    in loops."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    pixels = judge.prepare(image, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 800, 1088)  # the shorter side 800, the longer a multiple of 32
    with torch.no_grad():
        output = judge.detector(pixels)
    chances = output.class_queries_logits[0].double().softmax(-1)[:, :-1]
    resize = torch.nn.functional.interpolate
    logits = resize(
        resize(output.masks_queries_logits, size=(800, 1088), mode="bilinear"),
        size=(48, 64),
        mode="bilinear",
    )
    ranked = sorted(
        ((chances[q, c].item(), q, c) for q in range(5) for c in range(80)), reverse=True
    )[:100]
    masks = (logits[0] > 0).numpy()
    sure = [logits[0, q][logits[0, q] > 0].double().sigmoid().mean().item() for q in range(5)]
    scores = [
        (chance * sure[q], masks[q], geneval.CLASSES[c])
        for chance, q, c in ranked
        if masks[q].any()
    ]
    least = (
        float(np.median([score for score, _, _ in scores])) + 1e-9
    )  # half of them are not sure enough
    expected = {}
    for score, mask, name in scores:
        if score > least:
            expected.setdefault(name, []).append((score, mask))
    assert len(expected) > 5 and max(map(len, expected.values())) > 1
    things = judge.find(image, least)
    assert {name: len(masks) for name, masks in things.items() if masks} == {
        n: len(m) for n, m in expected.items()
    }
    for name, scored in expected.items():
        for mask, (_, theirs) in zip(
            things[name], sorted(scored, key=lambda pair: -pair[0]), strict=True
        ):
            assert (mask == theirs).all()


def detections(monkeypatch, judge, *things):
    """Makes the detector find (class, chance, mask of 100x100): exactly these."""
    classes = torch.full((1, len(things), 81), -30.0)
    for i, (name, chance, _) in enumerate(things):
        classes[0, i, [geneval.CLASSES.index(name), 80]] = torch.tensor([chance, 1 - chance]).log()
    masks = torch.tensor(np.stack([mask for _, _, mask in things])).float()[None] * 40 - 20
    output = SimpleNamespace(class_queries_logits=classes, masks_queries_logits=masks)
    monkeypatch.setattr(judge, "detector", FakeDetector(output))
    monkeypatch.setattr(geneval, "judge", lambda: judge)


class FakeDetector(torch.nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, pixels):
        return self.output


def test_thresholds_are_three_tenths_and_nine_tenths_in_counting(judge, monkeypatch):
    """Through score, as a run calls it; a prompt of another form does not apply."""
    image = Image.new("RGB", (100, 100))
    functions = {"right": (geneval.right, 1.0), "facts": (geneval.facts, 1.0)}
    detections(
        monkeypatch,
        judge,
        ("dog", 0.95, LEFT),
        ("dog", 0.88, RIGHT),
        ("cat", 0.32, RIGHT),
        ("bird", 0.28, BLUE),
    )
    prompts = [
        "a photo of a cat",
        "a photo of a bird",
        "a photo of two dogs",
        "a photo of a dog left of a cat",
        "a dog",
    ]
    values = rewards.score(functions, [image] * 5, prompts, None)
    np.testing.assert_equal(values["right"].tolist(), [1, 0, 0, 1, math.nan])
    np.testing.assert_allclose(values["facts"].tolist(), [1, 0, 1 / 2, 1 / 3, math.nan], rtol=1e-6)
    detections(monkeypatch, judge, *[("dog", 0.95, LEFT)] * 20)
    # 16 at most.
    assert (
        rewards.score(functions, [image], ["a photo of four dogs"], None)["facts"].item()
        == 1 - 12 / 4
    )


def test_a_colour_is_asked_of_the_thing_alone(judge, monkeypatch):
    """Cut out along its box, grey around its mask; the mean of three phrases of CLIP decides."""
    mask = rectangle(20, 30, 60, 50)
    mask[30, 20] = False
    seen = []

    def embed(images, prompts):
        seen.append((images, prompts))
        axis = torch.eye(10)
        words = axis[9].repeat(30, 1)
        words[0:3] = 0.7 * axis[5] + math.sqrt(0.51) * torch.stack(
            [axis[0], -axis[0], axis[0]]
        )  # red: .947 as a mean
        words[3:6] = axis[[5, 1, 1]]  # orange: one phrase fits, .447 as a mean
        words[15:18] = 0.8 * axis[5] + 0.6 * axis[2]  # purple: .8
        return axis[5:6], words

    monkeypatch.setattr(judge.clip, "embed", embed)
    assert judge.colour(Image.new("RGB", (100, 100), "red"), mask, "hot dog") == "red"
    ((crop,), texts) = seen[0]
    assert (
        crop.size == (40, 20)
        and crop.getpixel((0, 0)) == (0x99,) * 3
        and crop.getpixel((1, 0)) == (255, 0, 0)
    )
    assert texts[3:6] == [
        "a photo of a orange hot dog",
        "a photo of a orange-colored hot dog",
        "a photo of a orange object",
    ]
    assert len(texts) == 30
