"""Judge by their pixels whether pictures show what they were asked for: four rewards, and a count
for tiny-glm-image.

    python tiny-glm-image/check.py                      # the model as shipped
    python tiny-glm-image/check.py --adapter runs/1     # after training: a run's folder, or that of an adapter

As rewards (`--reward tiny-glm-image/check.py:facts`):

facts   the share of what is asked that the picture shows. To learn from.
right   1 where it shows all of it, else 0. To judge by.
clean   1 where nothing in it is other than one of the shapes, else 0. It must not fall while the
others rise.
near    how near its pixels are to those of a scene as drawn. It tells paintings of the same codes
        apart, so that the decoder has something to learn from; an empty picture has the most of it,
        so it goes with `facts`.

The count paints with the stock pipeline, draws its own samples, and prints the share of right
pictures by kind: GenEval's six for captions (arXiv 2310.11513), four for edits. GenEval lets
further objects pass unless it counts; here they are wrong.
"""

import functools
import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import make

MATCH = 0.85  # a shape counts from this overlap (intersection over union) with it as drawn
NEAR = (
    100  # and with a colour no further from its name's than this, the sum over red, green and blue
)
STRAY = 60  # pixels of a place (of 4,096) that differ from the background: with fewer it is empty
FILES = {
    "prompts": None,
    "heldout": None,
    "edits": "sources",
    "heldout-edits": "heldout-sources",
}  # and sources


# ---- what a picture shows ------------------------------------------------------------------------


def look(image):
    """The scene of a picture: for each of the four places (shape, colour), None where it is empty,
    or "mess"."""
    return tuple(map(look_at, places_of(image)))


def places_of(image):
    """Its four places (64, 64, 3): upper left, upper right, lower left, lower right."""
    pixels = np.asarray(image.convert("RGB").resize((make.SIZE, make.SIZE))).astype(int)
    corners = itertools.product((0, make.CELL), (0, make.CELL))
    return [pixels[top : top + make.CELL, left : left + make.CELL] for top, left in corners]


def look_at(pixels):
    """One place (64, 64, 3): where it is nearer to its colour than to the background it is compared
    with every shape.

    A pixel of an edge lies between both colours. What lies elsewhere is foreign to the shape.
    """
    from_white = difference(pixels, make.WHITE)
    figure = from_white > 120
    if figure.sum() < STRAY:
        return None
    colour = np.median(pixels[figure & (from_white >= np.median(from_white[figure]))], axis=0)
    name = min(make.COLOURS, key=lambda name: difference(colour, make.COLOURS[name]))
    if difference(colour, make.COLOURS[name]) > NEAR:
        return "mess"
    from_colour = difference(pixels, colour)
    foreign = from_colour + from_white > difference(colour, make.WHITE) + 120
    own = (from_colour < from_white) & ~foreign
    overlaps = {
        shape: (own & mask).sum() / (own | mask | foreign).sum()
        for shape, mask in outlines().items()
    }
    shape = max(overlaps, key=overlaps.get)
    return (shape, name) if overlaps[shape] >= MATCH else "mess"


def difference(pixels, colour):
    return np.abs(pixels - np.array(colour)).sum(-1)


@functools.cache
def outlines():
    """{shape: where it is drawn, (64, 64) bool}"""
    drawn = {shape: make.draw(((shape, "black"), None, None, None)) for shape in make.SHAPES}
    return {
        shape: np.asarray(image.convert("L"))[: make.CELL, : make.CELL] < 130
        for shape, image in drawn.items()
    }


# ---- what it was asked for -----------------------------------------------------------------------


def caption_facts(caption, scene):
    """{fact: the share of it that holds}, for the assignment of objects to places that suits the
    caption best."""
    objects = make.NUMBERS.get(caption.word, len(caption.shapes))
    things = [place for place in range(4) if scene[place] is not None]
    number = float(len(things) == objects and "mess" not in scene)
    found = []
    for places in itertools.permutations(range(4), objects):
        seen = [("", "") if scene[place] in (None, "mess") else scene[place] for place in places]
        shapes = [
            shape == asked for (shape, _), asked in zip(seen, itertools.cycle(caption.shapes))
        ]
        facts = {"number": number, "shape": sum(shapes) / objects}
        if caption.colours:
            colours = [
                colour == asked
                for (_, colour), asked in zip(seen, itertools.cycle(caption.colours))
            ]
            facts["colour"] = sum(colours) / objects
        if caption.kind == "position":
            facts["relation"] = float(all(shapes) and holds(caption.word, *places))
        found.append(facts)
    return max(found, key=lambda facts: sum(facts.values()))


def holds(relation, first, second):
    """Whether of two places, numbered row by row, the first stands in this relation to the
    second."""
    if relation in ("left of", "right of"):
        first, second = first % 2, second % 2
    else:
        first, second = first // 2, second // 2
    return first < second if relation in ("left of", "above") else first > second


def edit_facts(wish, before, scene):
    """{fact: the share of it that holds}: what was to change, and all else place by place."""
    found = []
    for place, wanted in wanted_places(wish, before):
        same = sum(scene[other] == before[other] for other in range(4) if other != place) / 3
        seen = scene[place]
        if wanted is None or seen in (None, "mess"):
            done = float(seen == wanted)
        else:
            done = (seen[0] == wanted[0]) / 2 + (seen[1] == wanted[1]) / 2
        found.append({"done": done, "kept": same})
    return max(found, key=lambda facts: sum(facts.values()))


def wanted_places(wish, before):
    """(place, what has to be there): one, or each empty place for something added. None: this
    cannot be asked of it."""
    named = [place for place in range(4) if before[place] and before[place][0] == wish.shape]
    if "mess" in before or len(named) != (wish.kind != "add"):
        return []
    if wish.kind != "add":
        return [(named[0], wish.edited(before)[named[0]])]
    return [(place, (wish.shape, wish.word)) for place in range(4) if before[place] is None]


def facts_of(image, prompt, source=None):
    """{fact: 0 to 1} of a picture, or None where this file does not know what is asked for."""
    if prompt in make.MEANING:
        return caption_facts(make.MEANING[prompt], look(image))
    if prompt not in make.WISHES or source is None:
        return None
    before = look(source)
    if not wanted_places(make.WISHES[prompt], before):
        return None
    return edit_facts(make.WISHES[prompt], before, look(image))


# ---- four rewards, see rewards.py ----------------------------------------------------------------


def facts(images, prompts, targets=None, sources=None):
    """The mean of the facts of each picture. NaN for prompts that are not of this world.

    sources: a picture or None for each image, or None.
    """
    found = [
        facts_of(*asked)
        for asked in zip(images, prompts, sources or [None] * len(images), strict=True)
    ]
    return torch.tensor(
        [float("nan") if each is None else sum(each.values()) / len(each) for each in found]
    )


def right(images, prompts, targets=None, sources=None):
    """1 where all facts hold, else 0. NaN as for `facts`."""
    shares = facts(images, prompts, targets, sources)
    return torch.where(shares.isnan(), shares, (shares > 1 - 1e-6).float())


def clean(images, prompts=None, targets=None):
    """1 where every place is empty or shows one of the shapes in one of the colours, else 0."""
    return torch.tensor([float("mess" not in look(image)) for image in images])


def near(images, prompts=None, targets=None):
    """1 less the mean difference from the nearest scene that could have been drawn, pixels in
    0..1."""
    return torch.tensor(
        [1 - np.mean([nearest(place) for place in places_of(image)]) for image in images]
    )


def nearest(pixels):
    """The mean difference of one place (64, 64, 3) from the shape and colour that is nearest to it,
    or from none."""
    return np.abs(pixels - sprites()).mean((1, 2, 3)).min() / 255


@functools.cache
def sprites():
    """All that a place may show, (37, 64, 64, 3): nothing, and each shape in each colour."""
    scenes = [(thing, None, None, None) for thing in (None, *make.SPRITES)]
    return np.stack(
        [np.asarray(make.draw(scene))[: make.CELL, : make.CELL] for scene in scenes]
    ).astype(np.float32)


# ---- the count -----------------------------------------------------------------------------------


def load(adapter=None):
    """The stock pipeline, with the adapters of a run's folder, or of the folder of an adapter."""
    from diffusers import GlmImagePipeline
    from transformers.utils import logging

    from runtime import UserError
    from runtime.adapters import adapter_file

    logging.set_verbosity_error()  # of arguments that diffusers hands on the old way
    files = {name: adapter_file(adapter, name) for name in ("codes", "decoder")} if adapter else {}
    if adapter and not any(files.values()):
        raise UserError(
            f"there is no adapter in {adapter}: give --adapter the folder of a run that has ended"
        )
    pipe = GlmImagePipeline.from_pretrained(str(HERE), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    try:
        if file := files.get("codes"):
            pipe.vision_language_encoder.load_adapter(str(file.parent))
        if file := files.get("decoder"):
            pipe.transformer.load_lora_adapter(str(file.parent), weight_name=file.name, prefix=None)
    except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"cannot read the adapter {file}: {str(error).strip().splitlines()[0]}"
        ) from None
    # diffusers 0.42.1 joins the features of sources, which transformers 5.23 wants apart: see
    # README.md here.
    policy = pipe.vision_language_encoder
    read, channels = policy.get_image_tokens, policy.config.vision_config.hidden_size
    policy.get_image_tokens = lambda joined, grids: read(joined.unflatten(0, (-1, channels)), grids)
    return pipe


def paint(pipe, prompts, samples, seed, sources=None):
    """`samples` pictures of each prompt, prompt after prompt. sources: the pictures to change, one
    each, or None."""
    images = []
    for i in range(0, len(prompts), 8):
        texts = [text for text in prompts[i : i + 8] for _ in range(samples)]
        originals = sources and [[source] for source in sources[i : i + 8] for _ in range(samples)]
        images += pipe(
            texts,
            image=originals,
            height=make.SIZE,
            width=make.SIZE,
            num_inference_steps=6,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(seed * 1000 + i),
        ).images
    return images


def count_right(pipe, name, folder, options):
    """Prints the share of right pictures for a file's prompts; `folder`: what they change. Returns
    a sheet's rows."""
    from runtime.data import read_lines
    from runtime.pictures import FRAMES

    prompts, kinds, _ = read_lines(HERE / f"{name}.txt")
    sources = folder and [Image.open(file) for file in sorted((HERE / folder).iterdir())]
    images = paint(pipe, prompts, options.samples, options.seed, sources)
    each = [prompt for prompt in prompts for _ in range(options.samples)]
    originals = sources and [source for source in sources for _ in range(options.samples)]
    marks = right(images, each, None, originals).view(-1, options.samples)  # (prompts, samples)
    by_kind = {}
    for kind, mark in zip(kinds, marks.mean(1).tolist(), strict=True):
        by_kind.setdefault(kind, []).append(mark)
    mean = np.mean([np.mean(own) for own in by_kind.values()])
    # Over prompts: pictures of one prompt are much alike.
    error = np.sqrt(sum(np.var(own, ddof=1) / len(own) for own in by_kind.values())) / len(by_kind)
    shares = ", ".join(f"{kind} {np.mean(own):.0%}" for kind, own in by_kind.items())
    guard = (
        f"facts {facts(images, each, None, originals).mean():.3f}, clean {clean(images).mean():.1%}"
    )
    print(
        f"{name}.txt: {mean:.1%} +- {error:.1%} right, mean of the kinds ({shares}); {guard}",
        flush=True,
    )
    rows = []
    for i in (
        i for i, kind in enumerate(kinds) if kind not in kinds[: max(0, i - 1)]
    ):  # the first two of each
        own = images[i * options.samples :][: min(options.samples, 8)]
        cells = [
            (image, "right" if mark else "wrong", FRAMES[mark])
            for image, mark in zip(own, marks[i].tolist())
        ]
        rows.append((prompts[i], ([(sources[i], "to edit")] if sources else []) + cells))
    return rows


def main():
    from runtime import UserError
    from runtime.pictures import save_grid
    from runtime.settings import Parser, number

    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--adapter", help="folder of a run, or of a trained adapter")
    parser.add_argument(
        "--samples",
        type=number(int, "[1, inf)"),
        default=4,
        help="pictures per prompt (default: 4)",
    )
    parser.add_argument(
        "--seed", type=number(int, "[0, 1000000]"), default=1, help="of the samples (default: 1)"
    )
    parser.add_argument(
        "--sheet",
        default="check.png",
        help="where to save some of the pictures (default: check.png)",
    )
    try:
        options = parser.parse_args()
        torch.set_num_threads(1)  # see runtime/ranks.py
        pipe = load(options.adapter)
        rows = {name: count_right(pipe, name, folder, options) for name, folder in FILES.items()}
        rows = rows["heldout"] + rows["heldout-edits"]
        save_grid(options.sheet, rows, "the first two of each kind, held out", cell=96)
    except (
        UserError,
        OSError,
    ) as error:  # such as an adapter of another model, or a folder that cannot be written to
        print("error:", str(error).strip().split("\n")[0], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
