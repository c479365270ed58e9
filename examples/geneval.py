"""GenEval (Ghosh et al. 2023) with transformers alone: its 553 prompts, its judge, and a reward to
train on.

    python examples/geneval.py          # writes geneval.txt; geneval-training.txt: others like them
    python train.py --prompts geneval-training.txt --reward examples/geneval.py:facts
    python train.py --adapter runs/1 --steps 0 --prompts geneval.txt --eval-count 553 --eval-reward
    examples/geneval.py:right

Prompts and rules are those of github.com/djghosh13/geneval. So is the detector, Mask2Former Swin-S
trained on COCO, but with its authors' weights instead of mmdetection's, so scores may differ a
little.
"""

import functools
import math
import re
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch.nn.functional as F
from PIL import Image
from transformers.models.mask2former import image_processing_pil_mask2former as pil
from transformers.models.mask2former import modeling_mask2former as modeling

from rewards import CLIP_L, Clip, lend_gpu

CLASSES = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear,
zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball,
kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup,
fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza,
donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse, tv
remote, computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock,
vase, scissors, teddy bear, hair drier, toothbrush""".replace("\n", " ").split(
    ", "
)  # in COCO's order
COLOURS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
NUMBERS = {"two": 2, "three": 3, "four": 4}
PLACES = ["left of", "right of", "above", "below"]


def published_prompts(seed=43, count=100):
    """{kind: prompts} of the benchmark, by its templates and drawn in its order."""
    draw = np.random.default_rng(seed)
    one_of = lambda names: names[draw.choice(len(names))]
    several_of = lambda names, n=2: [names[i] for i in draw.choice(len(names), n, replace=False)]
    a = lambda words: f"an {words}" if words[0] in "aeiou" else f"a {words}"
    several = lambda name, number: f"{number} {name}{'es' if name.endswith('s') else 's'}"
    coloured = lambda name, colour: f"{a(colour)} {name}"
    placed = lambda one, other, place: f"{a(one)} {place} {a(other)}"
    things = CLASSES[1:]  # a person is given no colour
    templates = {
        "two_object": lambda: " and ".join(map(a, several_of(CLASSES))),
        "counting": lambda: several(one_of(CLASSES), list(NUMBERS)[draw.integers(0, 3)]),
        "colors": lambda: coloured(one_of(things), one_of(COLOURS)),
        "position": lambda: placed(*several_of(CLASSES), one_of(PLACES)),
        "color_attr": lambda: " and ".join(map(coloured, several_of(things), several_of(COLOURS))),
    }
    kinds = {"single_object": list(map(a, several_of(CLASSES, len(CLASSES))))}
    for kind, write in templates.items():
        kinds[kind] = dict.fromkeys(write() for _ in range(count))
    return {kind: [f"a photo of {words}" for words in kinds[kind]] for kind in kinds}


def asked_for(prompt):
    """(number of each, [(colour or None, class), ...], place of the first or None); or None: not of
    GenEval's form."""
    names = "|".join(CLASSES)
    thing = rf"an? (?:({'|'.join(COLOURS)}) )?({names})"
    if found := re.fullmatch(rf"a photo of ({'|'.join(NUMBERS)}) ({names})e?s", prompt.strip()):
        return NUMBERS[found[1]], [(None, found[2])], None
    pair = rf"a photo of {thing}(?: (and|{'|'.join(PLACES)}) {thing})?"
    if found := re.fullmatch(pair, prompt.strip()):
        things = [(found[1], found[2]), (found[4], found[5])]
        return 1, things if found[3] else things[:1], found[3] if found[3] in PLACES else None
    return None


def box(mask):
    return Image.fromarray(mask).getbbox()  # left, top, right, bottom


def places(one, other):
    """Where a thing is, seen from another: by their masks, (height, width) bool. Diagonally, two
    places hold.

    The offset of their centres counts in units of its length, after a tenth of both sizes is taken
    off.
    """
    boxes = np.reshape([box(one), box(other)], (2, 2, 2))  # two corners, x and y
    offset = np.subtract(*boxes.mean(1))
    rest = np.maximum(abs(offset) - 0.1 * np.ptp(boxes, axis=1).sum(0), 0) * np.sign(offset)
    x, y = rest / max(np.linalg.norm(offset), 1e-6)
    return {place for place, share in zip(PLACES, (-x, x, -y, y)) if share > 0.5}


def is_right(found, colour_of, number, things, place):
    """As GenEval judges: extra things are allowed, except in counting; colour and place are those
    of the surest thing.

    found: {class: masks, the surest first}. colour_of: name of a class -> colour of its surest
    thing.
    """
    if number > 1:
        return len(found[things[0][1]]) == number
    if not all(found[name] for _, name in things):
        return False
    if any(colour and colour_of(name) != colour for colour, name in things):
        return False
    return place is None or place in places(*(found[name][0] for _, name in things))


def credit(found, colour_of, number, things, place):
    """As Flow-GRPO rewards (Liu et al. 2025): the mean over numbers, colours and places, so extra
    things cost.

    A number counts 1 - |number - found| / number, below 0 for a crowd. Where it is wrong, colour
    and place count 0.
    """
    credits = []
    for colour, name in things:
        credits.append(1 - abs(number - len(found[name])) / number)
        if colour:
            credits.append(len(found[name]) == 1 and colour_of(name) == colour)
    if place:
        exact = all(len(found[name]) == 1 for _, name in things)
        credits.append(exact and place in places(*(found[name][0] for _, name in things)))
    return np.mean(credits)


class Judge:
    def __init__(self, detector="facebook/mask2former-swin-small-coco-instance", clip=CLIP_L):
        with patch.object(modeling, "requires_backends"):  # scipy, which only its loss needs
            kind = modeling.Mask2FormerForUniversalSegmentation
            self.detector = kind.from_pretrained(detector, weights_only=True)
        size = {"shortest_edge": 800, "longest_edge": 1333}
        self.prepare = pil.Mask2FormerImageProcessorPil(size=size)
        self.clip = Clip(clip, clip)

    def find(self, image, least):
        """{class: masks (height, width) bool, the surest first}, at most 16 each, for all that
        scores above `least`."""
        pixels = self.prepare(image, return_tensors="pt")["pixel_values"]  # (1, 3, h, w)
        with lend_gpu(self.detector) as device:
            output = self.detector(pixels.to(device))
            logits = F.interpolate(output.masks_queries_logits, pixels.shape[-2:], mode="bilinear")
            logits = F.interpolate(logits, image.size[::-1], mode="bilinear")
            logits = logits[0]  # (queries, height, width)
            masks = logits > 0
            sure = (logits.sigmoid() * masks).sum((1, 2)) / (masks.sum((1, 2)) + 1e-6)  # (queries,)
            # (queries, classes), without "nothing"
            chances = output.class_queries_logits[0].softmax(-1)[:, :-1]
            chance, index = chances.flatten().topk(100)
            score, order = (chance * sure[index // len(CLASSES)]).sort(descending=True)
            masks = masks.cpu().numpy()
        found = {name: [] for name in CLASSES}
        for i in index[order[score > least]].tolist():
            found[CLASSES[i % len(CLASSES)]].append(masks[i // len(CLASSES)])
        return {name: same[:16] for name, same in found.items()}

    def colour(self, image, mask, name):
        """The likeliest colour by CLIP of a thing that is cut out and put on grey."""
        grey = Image.new("RGB", image.size, "#999")
        crop = Image.composite(image, grey, Image.fromarray(mask)).crop(box(mask))
        texts = []
        for colour in COLOURS:
            texts += [f"a photo of a {colour} {name}", f"a photo of a {colour}-colored {name}"]
            texts.append(f"a photo of a {colour} object")
        picture, words = self.clip.embed([crop], texts)  # (1, D), (30, D)
        means = F.normalize(words.view(len(COLOURS), 3, -1).mean(1), dim=-1)  # (10, D)
        return COLOURS[(means @ picture[0]).argmax()]


judge = functools.cache(Judge)


def value_of(rule, image, prompt):
    """What a rule says of a picture; NaN if its prompt is not of GenEval's form."""
    if (asked := asked_for(prompt)) is None:
        return math.nan
    image = image.convert("RGB")
    found = judge().find(image, least=0.9 if asked[0] > 1 else 0.3)
    return rule(found, lambda name: judge().colour(image, found[name][0], name), *asked)


def right(images, prompts, targets):
    return [value_of(is_right, *pair) for pair in zip(images, prompts)]


def facts(images, prompts, targets):
    return [value_of(credit, *pair) for pair in zip(images, prompts)]


if __name__ == "__main__":
    benchmark, others = published_prompts(), published_prompts(seed=0, count=400)
    training = {kind: [x for x in others[kind] if x not in benchmark[kind]] for kind in others}
    for file, kinds in {"geneval.txt": benchmark, "geneval-training.txt": training}.items():
        parts = ["\n".join([f"# kind: {kind}", *kinds[kind], ""]) for kind in kinds if kinds[kind]]
        Path(file).write_text("".join(parts))
