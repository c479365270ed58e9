"""The world of tiny-glm-image: scenes of coloured shapes, captions that ask for one, and edits.

A scene has four places, each empty or one of 6 shapes in one of 6 colours.
"""

import itertools
import random
from typing import NamedTuple

from PIL import Image, ImageDraw

SIZE = 128  # pixels; 4x4 large codes of 32 pixels each
CELL = 64  # a scene has four places: upper left, upper right, lower left, lower right
RADIUS = 24
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
COLOURS = {
    "red": (215, 40, 45),
    "blue": (40, 80, 205),
    "green": (35, 150, 70),
    "yellow": (250, 205, 40),
    "purple": (125, 55, 165),
    "black": (25, 25, 30),
}
WHITE = (245, 245, 240)
USUAL = dict(zip(SHAPES, COLOURS))  # the colour of a shape where a caption names none
SPRITES = list(itertools.product(SHAPES, COLOURS))  # 36
THINGS = (None, *SPRITES)  # what a place may show
NUMBERS = {"two": 2, "three": 3, "four": 4}
# The places of both objects.
RELATIONS = {"left of": (0, 1), "right of": (1, 0), "above": (0, 2), "below": (2, 0)}
# Of GenEval (arXiv 2310.11513), in its order.
KINDS = ("one", "two", "counting", "colours", "position", "binding")


class Caption(NamedTuple):
    """What a caption says: one or two objects; colours, number or relation if it names them."""

    kind: str
    shapes: tuple
    colours: tuple = ()  # one per shape, or none
    word: str = ""  # a number or a relation

    def __str__(self):
        if self.kind == "counting":
            plural = self.shapes[0] + ("es" if self.shapes[0] == "cross" else "s")
            return " ".join([self.word, *self.colours, plural])
        objects = zip(*filter(None, (self.colours, self.shapes)))
        return f" {self.word or 'and'} ".join(f"a {' '.join(words)}" for words in objects)

    def scene(self):
        """Its picture: per place (shape, colour) or None, filled in reading order."""
        colours = self.colours or [USUAL[shape] for shape in self.shapes]
        objects = list(zip(self.shapes, colours)) * NUMBERS.get(self.word, 1)
        places = RELATIONS.get(self.word, range(4))
        scene = [None] * 4
        for place, thing in zip(places, objects):
            scene[place] = thing
        return tuple(scene)


def all_captions():
    """{type: its captions}: 6, 30, 126, 36, 120 and 900."""
    pairs = list(itertools.permutations(SHAPES, 2))
    colours = list(itertools.permutations(COLOURS, 2))
    one_or_none = [(), *((colour,) for colour in COLOURS)]
    counted = itertools.product(SHAPES, one_or_none, NUMBERS)
    placed = itertools.product(pairs, RELATIONS)
    return {
        "one": [Caption("one", (shape,)) for shape in SHAPES],
        "two": [Caption("two", pair) for pair in pairs],
        "counting": [Caption("counting", (shape,), *words) for shape, *words in counted],
        "colours": [Caption("colours", (shape,), (colour,)) for shape, colour in SPRITES],
        "position": [Caption("position", pair, (), relation) for pair, relation in placed],
        "binding": [Caption("binding", pair, both) for pair in pairs for both in colours],
    }


CAPTIONS = all_captions()
MEANING = {str(caption): caption for captions in CAPTIONS.values() for caption in captions}

# Held out: words of which GRPO trains on no caption that has both, such as two circles, three
# squares ... four rings; and for each shape by itself a colour.
PAIRS = [{"circle", "square"}, {"triangle", "diamond"}, {"cross", "ring"}]
PAIRS += map(set, zip([*NUMBERS] * 2, SHAPES))
COLOUR = dict(zip(SHAPES, ("green", "yellow", "purple", "black", "red", "blue")))


def unrewarded(caption):
    """Whether a caption is held out from GRPO."""
    if caption.kind == "colours":
        return caption.colours[0] == COLOUR[caption.shapes[0]]
    return any(pair <= {caption.word, *caption.shapes} for pair in PAIRS)


def unseen(caption):
    """Whether it is held out from every stage.

    Of a number of a shape: without a colour and in two; in the other four colours it is seen.
    """
    colours = (), (USUAL[caption.shapes[0]],), (COLOUR[caption.shapes[0]],)
    return unrewarded(caption) and (caption.kind != "counting" or caption.colours in colours)


def seen_captions():
    """{type: the captions that the policy learns from}, more of them by relations with colours."""
    placed = itertools.product(CAPTIONS["binding"], RELATIONS)
    coloured = [each._replace(kind="position", word=word) for each, word in placed]
    kinds = CAPTIONS | {"coloured position": coloured}
    return {kind: [each for each in kinds[kind] if not unseen(each)] for kind in kinds}


class Wish(NamedTuple):
    """What an edit asks for."""

    kind: str
    shape: str  # the object that is named
    word: str = ""  # its new colour or shape

    def __str__(self):
        return FORMS[self.kind].format(shape=self.shape, word=self.word)

    def places(self, scene):
        """Where it can be done: at the object that it names, or in each empty place."""
        shapes = [thing and thing[0] for thing in scene]
        wanted = None if self.kind == "add" else self.shape
        return [place for place in range(4) if shapes[place] == wanted]

    def edited(self, scene, place=None):
        """The scene after this edit; what is added takes the first empty place, or `place`."""
        place = self.places(scene)[0] if place is None else place
        new = self.shape, self.word
        if self.kind == "reshape":
            new = self.word, scene[place][1]
        elif self.kind == "remove":
            new = None
        return (*scene[:place], new, *scene[place + 1 :])


FORMS = {
    "recolour": "make the {shape} {word}",
    "reshape": "make the {shape} a {word}",
    "remove": "remove the {shape}",
    "add": "add a {word} {shape}",
}
ALL_WISHES = [Wish(form, *sprite) for form in ("recolour", "add") for sprite in SPRITES]
ALL_WISHES += [Wish("reshape", *pair) for pair in itertools.permutations(SHAPES, 2)]
ALL_WISHES += [Wish("remove", shape) for shape in SHAPES]
WISHES = {str(wish): wish for wish in ALL_WISHES}  # 108


def random_edit(rng):
    """(scene, Wish): two or three different shapes anywhere, and something not yet so."""
    shapes = rng.sample(SHAPES, 4)
    scene = [None] * 4
    for place, shape in zip(rng.sample(range(4), rng.choice((2, 3))), shapes):
        scene[place] = shape, rng.choice(list(COLOURS))
    shape, colour = rng.choice(list(filter(None, scene)))
    form = rng.choice(list(FORMS))
    words = {
        "recolour": [other for other in COLOURS if other != colour],
        "reshape": shapes[3:],
        "remove": [""],
        "add": list(COLOURS),
    }
    return tuple(scene), Wish(form, shapes[3] if form == "add" else shape, rng.choice(words[form]))


def draw(scene):
    """A scene as 128x128 pixels."""
    image = Image.new("RGB", (SIZE, SIZE))
    for place, thing in enumerate(scene):
        image.paste(draw_thing(thing), (CELL * (place % 2), CELL * (place // 2)))
    return image


def draw_thing(thing):
    """A place as 64x64 pixels, drawn four times larger and averaged down for smooth edges."""
    image = Image.new("RGB", (4 * CELL, 4 * CELL), WHITE)
    shape, fill = (thing[0], COLOURS[thing[1]]) if thing else ("", WHITE)
    pen, c, r = ImageDraw.Draw(image), 2 * CELL, 4 * RADIUS  # c: the centre, x and y
    box = lambda x, y: (c - x, c - y, c + x - 1, c + y - 1)
    if shape in ("circle", "ring"):
        pen.ellipse(box(r, r), fill)
    if shape == "ring":
        pen.ellipse(box(r // 2, r // 2), WHITE)
    elif shape == "square":
        pen.rectangle(box(r * 5 // 6, r * 5 // 6), fill)
    elif shape == "triangle":
        pen.polygon([(c, c - r), (c + r, c + r * 7 // 8), (c - r, c + r * 7 // 8)], fill)
    elif shape == "diamond":
        pen.polygon([(c, c - r), (c + r, c), (c, c + r), (c - r, c)], fill)
    elif shape == "cross":
        pen.rectangle(box(r, r // 3), fill)
        pen.rectangle(box(r // 3, r), fill)
    return image.resize((CELL, CELL), Image.Resampling.BOX)


def random_scene(rng):
    return tuple(rng.choice(SPRITES) if rng.random() < 0.75 else None for _ in range(4))


# ---- the edits to train on: pictures for --sources and --targets, drawn when they are needed -----


def split_edits():
    """144 edits (scene, Wish) to train on and 24 held out, form after form: two lists."""
    rng = random.Random(0)
    by_form = {form: {} for form in FORMS}
    while min(map(len, by_form.values())) < 42:
        edit = random_edit(rng)
        by_form[edit[1].kind].setdefault(edit)
    of_all = lambda rows: [edit for edits in by_form.values() for edit in list(edits)[rows]]
    return of_all(slice(36)), of_all(slice(36, 42))


def edit_sources():
    return [draw(scene) for scene, _ in split_edits()[0]]


def edit_targets():
    return [draw(wish.edited(scene)) for scene, wish in split_edits()[0]]


def heldout_sources():
    return [draw(scene) for scene, _ in split_edits()[1]]


def heldout_targets():
    return [draw(wish.edited(scene)) for scene, wish in split_edits()[1]]
