"""Judge by their pixels whether pictures show what they were asked for: five rewards.

    python train.py --model tiny-glm-image --reward facts

facts   the share of what is asked that the picture shows. To learn from.
correct 1 where it shows all of it, else 0. To judge by.
clean   1 where nothing in it is other than one of the shapes, else 0. It must not fall while the
        others rise.
near    how near its pixels are to those of a scene as drawn. It tells paintings of the same codes
        apart, so that the decoder has something to learn from; an empty picture has the most of it,
        so it goes with `facts`.
many    the share of the four places in which something stands: a reward to be gamed.

GenEval (arXiv 2310.11513) lets further objects pass unless it counts; here they are wrong.
"""

import functools
import itertools
import operator
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import world
from world import CELL

MATCH = 0.85  # a shape counts from this overlap (intersection over union) with it as drawn
NEAR = 100  # and with a colour no further from its name's, the sum over red, green and blue
STRAY = 60  # pixels of a place (of 4,096) that differ from the background: with fewer it is empty


# ---- what a picture shows ------------------------------------------------------------------------


def look(image):
    """The scene of a picture: per place (shape, colour), None where it is empty, or "mess"."""
    return tuple(look_at(place.tobytes()) for place in places_of(image))


def places_of(image):
    """Its four places (4, 64, 64, 3): upper left, upper right, lower left, lower right."""
    pixels = np.asarray(image.convert("RGB").resize((world.SIZE, world.SIZE)))  # uint8
    return pixels.reshape(2, CELL, 2, CELL, 3).swapaxes(1, 2).reshape(4, CELL, CELL, 3)


# Samples are often equal, and three rewards look at each of them.
@functools.lru_cache(4000)
def look_at(place):
    """What stands in a place, the bytes of (64, 64, 3) uint8, by comparison with every shape.

    Its figure is what is nearer to its colour than to the background. A pixel of an edge lies
    between both colours. What lies elsewhere is foreign to the shape.
    """
    pixels = np.frombuffer(place, np.uint8).reshape(CELL, CELL, 3).astype(int)
    from_white = difference(pixels, world.WHITE)
    figure = from_white > 120
    if figure.sum() < STRAY:
        return None
    colour = np.median(pixels[figure & (from_white >= np.median(from_white[figure]))], axis=0)
    name = min(world.COLOURS, key=lambda name: difference(colour, world.COLOURS[name]))
    if difference(colour, world.COLOURS[name]) > NEAR:
        return "mess"
    from_colour = difference(pixels, colour)
    foreign = from_colour + from_white > difference(colour, world.WHITE) + 120
    own = (from_colour < from_white) & ~foreign
    overlap = lambda shape: (own & shape).sum() / (own | shape | foreign).sum()
    overlaps = {shape: overlap(outline) for shape, outline in outlines().items()}
    shape = max(overlaps, key=overlaps.get)
    return (shape, name) if overlaps[shape] >= MATCH else "mess"


def difference(pixels, colour):
    return np.abs(pixels - np.array(colour)).sum(-1)


@functools.cache
def outlines():
    """{shape: where it is drawn, (64, 64) bool}"""
    return {shape: drawn((shape, "black")).mean(-1) < 130 for shape in world.SHAPES}


def drawn(thing):
    """The pixels (64, 64, 3) of a place that shows this, or nothing."""
    return np.asarray(world.draw_thing(thing)).astype(int)


# ---- what it was asked for -----------------------------------------------------------------------


def caption_facts(caption, scene):
    """{fact: the share of it that holds}, with objects in the places that suit the caption best."""
    objects = world.NUMBERS.get(caption.word, len(caption.shapes))
    number = float(4 - scene.count(None) == objects and "mess" not in scene)
    share = lambda seen, asked: sum(map(operator.eq, seen, itertools.cycle(asked))) / objects
    found = []
    for places in itertools.permutations(range(4), objects):
        shapes, colours = zip(*(words_of(scene[place]) for place in places))
        facts = {"number": number, "shape": share(shapes, caption.shapes)}
        if caption.colours:
            facts["colour"] = share(colours, caption.colours)
        if caption.kind == "position":
            facts["relation"] = float(facts["shape"] == 1 and holds(caption.word, *places))
        found.append(facts)
    return max(found, key=lambda facts: sum(facts.values()))


def holds(relation, first, second):
    """Whether of two places, numbered row by row, the first is in this relation to the second."""
    wanted = world.RELATIONS[relation]
    bit = max(wanted)  # of a place: 1 for its column, 2 for its row
    return (first & bit, second & bit) == wanted


def edit_facts(wish, before, scene):
    """{fact: the share of it that holds}: what was to change, and all else place by place.

    None where this cannot be asked of the picture before.
    """
    named = [thing for thing in before if thing and thing[0] == wish.shape]
    if "mess" in before or len(named) != (wish.kind != "add"):
        return None
    found = []
    for place in wish.places(before):
        after = wish.edited(before, place)
        same = [*map(operator.eq, scene, after)]
        done = float(same[place])
        if after[place]:
            done = sum(map(operator.eq, words_of(scene[place]), after[place])) / 2
        found.append({"done": done, "kept": (sum(same) - same[place]) / 3})
    return max(found, key=lambda facts: sum(facts.values()), default=None)


def words_of(thing):
    """Shape and colour of what stands in a place, empty words for nothing and for a mess."""
    return ("", "") if thing in (None, "mess") else thing


def facts_of(image, prompt, source=None):
    """{fact: 0 to 1} of a picture, or None where this file does not know what is asked for."""
    if prompt in world.MEANING:
        return caption_facts(world.MEANING[prompt], look(image))
    if prompt in world.WISHES and source is not None:
        return edit_facts(world.WISHES[prompt], look(source), look(image))
    return None


# ---- five rewards, see rewards.py ----------------------------------------------------------------


def facts(images, prompts, sources=None):
    """The mean of the facts of each picture. NaN for prompts that are not of this world.

    sources: a picture or None for each image, or None.
    """
    shares = map(facts_of, images, prompts, sources or [None] * len(images))
    return torch.tensor([sum(x.values()) / len(x) if x else float("nan") for x in shares])


def correct(images, prompts, sources=None):
    """1 where all facts hold, else 0. NaN as for `facts`."""
    shares = facts(images, prompts, sources)
    return torch.where(shares.isnan(), shares, (shares > 1 - 1e-6).float())


def clean(images):
    """1 where every place is empty or shows one of the shapes in one of the colours, else 0."""
    return torch.tensor([float("mess" not in look(image)) for image in images])


def near(images):
    """1 less the mean difference from the nearest scene that could be drawn, pixels in 0..1."""
    found = []
    for image in images:
        places = places_of(image)[:, None].astype(int)  # (4, 1, 64, 64, 3)
        differences = np.abs(places - sprites()).mean((2, 3, 4))  # (4, 37)
        found.append(1 - np.mean(differences.min(1) / 255))
    return torch.tensor(found)


def many(images):
    """The share of the places in which something stands, whatever was asked for."""
    return torch.tensor([sum(thing is not None for thing in look(x)) / 4 for x in images])


@functools.cache
def sprites():
    """All that a place may show, (37, 64, 64, 3): nothing, and each shape in each colour."""
    return np.stack([*map(drawn, world.THINGS)]).astype(np.float32)
