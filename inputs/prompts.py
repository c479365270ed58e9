"""Prompts, and pictures that go with them."""

import json
import random
import re
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import torch
from PIL import Image, ImageOps

from inputs import UserError, find_path, load_from_file, readable

PICTURE = "<|image|>"  # GLM-Image would look for a picture there
TYPE = re.compile(r"# *type: *(.+)")  # a line for the prompts below it


@dataclass
class Prompt:
    """What a picture is painted for."""

    text: str
    type: str | None = None  # for evaluations; None where the file names none
    line: int = 0  # where it stands in its file
    target: Image.Image | None = None  # what some rewards compare with
    row: dict = field(default_factory=dict)  # what else a .jsonl file says of it, for rewards
    source: Image.Image | None = None  # the picture that it changes: glm_image/editing.py
    codes: torch.Tensor | None = None  # of the source, (rows*columns,) int64, one per 32x32 pixels

    def identity(self):
        """What tells prompts apart: all that the policy reads."""
        return self.text, self.source and self.source.tobytes()


def read_prompts(settings, prefix=""):
    """The prompts to train on, or with "eval_" the held-out prompts, and their targets."""
    file = getattr(settings, f"{prefix}prompts")
    copy = f"{prefix}prompts{Path(file).suffix}"
    prompts = read_file(Path(settings.resume, "start", copy) if settings.resume else file)
    for prompt, picture in zip(prompts, read_pictures(prompts, "target", settings, prefix)):
        prompt.target = picture
    return prompts


def evenly(prompts, count):
    """`count` of them, evenly over the types: the first of each, then the second of each ..."""
    by_type = {}
    for prompt in prompts:
        by_type.setdefault(prompt.type, []).append(prompt)
    turns = chain(*zip_longest(*by_type.values()))
    return [prompt for prompt in turns if prompt][:count]


def choose(prompts, count):
    """`count` of them, evenly over the types.

    Where fewer than all are taken, they are from all over the file, which may be sorted: in an
    order that is shuffled, and always the same.
    """
    if len(prompts) > count:
        types = [*dict.fromkeys(prompt.type for prompt in prompts)]
        random.Random(0).shuffle(prompts := [*prompts])
        prompts.sort(key=lambda prompt: types.index(prompt.type))  # which keeps the new order
    return evenly(prompts, count)


def read_file(path):
    """The Prompts in a text file, a line each, or in a .jsonl file; lines are counted from 1."""
    readers = {".txt": read_lines, ".jsonl": read_rows}
    if (form := Path(path).suffix) not in readers:
        words = "a prompt per line, or .jsonl, an object per line: docs/rewards.md"
        raise UserError(f"{path} is no file of prompts: these are .txt, {words}")
    with readable(f"read the prompts file {path}"):
        # Not splitlines(): U+2028 and the like end no prompt.
        lines = Path(find_path(path)).read_text(encoding="utf-8-sig").split("\n")
        prompts = readers[form](lines)
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write a prompt per line")
    for prompt in prompts:
        if PICTURE in prompt.text:
            raise UserError(f"line {prompt.line} of {path} has {PICTURE} in it: leave that out")
    if any(prompt.type for prompt in prompts):
        for prompt in prompts:
            prompt.type = prompt.type or "other"
            prompt.row.setdefault("type", prompt.type)
    return prompts


def one_line(text):
    """White space of any type is one space, and none at both ends."""
    return " ".join(text.split())


def read_lines(lines):
    """A prompt per line.

    "# type: counting" names the type of the prompts below it; others with # in front are comments.
    """
    of_type = None
    prompts = []
    for number, line in enumerate(map(one_line, lines), 1):
        if named := TYPE.fullmatch(line):
            of_type = named[1]
        elif line and line[0] != "#":
            prompts.append(Prompt(line, of_type, number))
    return prompts


def read_rows(lines):
    """A JSON object per line: "prompt", and "type" or "tag" if there are types.

    "target" and "source" name pictures, see read_pictures. All but the prompt are columns, for
    rewards with a parameter of that name.
    """
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            with readable(f"read line {number}", '; an example: {"prompt": "three circles"}'):
                row = json.loads(line)
                if not isinstance(row["prompt"], str) or not row["prompt"].strip():
                    raise TypeError('its "prompt" is no text')
                text, of_type = one_line(row.pop("prompt")), row.get("type") or row.get("tag")
                of_type = of_type and str(of_type)
            prompts.append(Prompt(text, of_type, number, row=row))
    return prompts


def read_pictures(prompts, kind, settings, prefix=""):
    """The picture of each prompt, its "target" or "source", None where it has none.

    Rows of a .jsonl file may name theirs, in the folder of --targets or --sources, or without a
    folder beside that file. Otherwise the pictures of the folder go with the prompts in order,
    sorted by name as file browsers do: a2, A10, b1; or my_file.py:function draws them. Each is made
    to size as it is read: of another shape, its middle is cut out.
    """
    file, place = (getattr(settings, prefix + name) for name in ("prompts", f"{kind}s"))
    names = [prompt.row.get(kind) for prompt in prompts]
    if place in ("none", "") or not (place or any(names)):
        return [None] * len(prompts)
    drawn = place and ".py:" in place
    # The file itself, also in a resumed run: there are no pictures beside its copy in start/.
    folder = Path(find_path(file)).parent if drawn or not place else Path(find_path(place))
    if any(names):
        images = (
            name and read_picture(folder / str(name), f" in line {prompt.line} of {file}")
            for name, prompt in zip(names, prompts)
        )
    elif drawn:
        names = images = load_from_file(place)()
    else:
        names = sorted(folder.glob("[!.]*"), key=as_people_count)
        images = map(read_picture, names)
    if len(names) != len(prompts):
        raise UserError(f"{place} has {len(names)} {kind} pictures for {len(prompts)} prompts")
    size = settings.width, settings.height
    return [image and ImageOps.fit(image, size, Image.Resampling.LANCZOS) for image in images]


def as_people_count(file):
    """What a file is sorted by."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(9), file.name.casefold())


def read_picture(file, where=""):
    """Upright, and on white where it is transparent. where: it is named, for an error."""
    with readable(f"read the picture {file}{where}"):
        # No others: for some of them Pillow starts another program.
        image = Image.open(file, formats=["PNG", "JPEG", "WEBP"])
        image = ImageOps.exif_transpose(image).convert("RGBA")  # which closes the file
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
