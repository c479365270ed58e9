"""What a run trains on and what judges it: prompts, pictures that go with them, rewards."""

import json
import random
import re
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO, TextIOWrapper
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps
from transformers.utils import cached_file

from rewards import Reward, UserError, parse_rewards, score
from runtime import checkpoints, foreign, ranks, resume
from runtime.errors import option, readable, say
from runtime.settings import readable_loading
from runtime.words import counted

# A line for the prompts below it.
TYPE = re.compile(r"#+ *(?:type|kind) *[:=\uff1a] *(\S.*)", re.IGNORECASE)
# What pasting leaves unseen: no width, or a blank. Other format characters of Unicode are seen, or
# end the emoji of a flag.
UNSEEN = "\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\u2800\u3164"

# Files of other forms, whose lines are no prompts: by their name, and by a line of theirs.
TABLES = {".csv", ".tsv", ".json", ".yaml", ".yml", ".xlsx", ".parquet"}
JSON = re.compile(r'\{|\[\s*(["{\[]|$)')
MARK = re.compile(r"([-*\u2022]|[0-9]+[.)]) ")  # of a list
QUOTED = re.compile("[\"'\u201c].*[\"'\u201d]")

# In place of them.
ROWS = "write a prompt per line, or give a .jsonl file, an object per line: docs/rewards.md"

# What rewards are given under these names is no column of a .jsonl file.
TAKEN = {"rewards", "images", "prompts", "targets", "sources", "group_size"}


@dataclass
class Prompt:
    """What a picture is painted for."""

    text: str
    type: str | None = None  # for evaluations; None where the file names none
    line: int = 0  # where it stands in its file
    target: Image.Image | None = None  # what some rewards compare with
    row: dict = field(default_factory=dict)  # what else a .jsonl file says of it, for rewards

    def for_rewards(self):
        """What rewards are given beside pictures of it, by the names of their parameters."""
        return {"prompts": self.text, "targets": self.target, **self.row}

    def columns(self):
        """The names of all else that rewards may ask for, and that is known of this prompt."""
        given = self.for_rewards().items()
        return {name for name, value in given if value is not None} - {"prompts", "targets"}

    def given(self):
        """{name: picture} that the policy reads beside the text."""
        return {}

    def identity(self):
        """What tells prompts apart: all that the policy reads."""
        return self.text, *(picture.tobytes() for picture in self.given().values())


def for_rewards(prompts):
    """{parameter: its values, one per prompt}, see score in rewards.py."""
    rows = [prompt.for_rewards() for prompt in prompts]
    return {name: [row[name] for row in rows] for name in rows[0]}


def read_prompts(settings, prefix=""):
    """The prompts to train on, or with "eval_" the held-out prompts, and their targets."""
    path, folder = (getattr(settings, prefix + name) for name in ("prompts", "targets"))
    prompts = read_file(path)
    if folder not in (None, "none", ""):
        size = settings.width, settings.height
        for prompt, picture in zip(prompts, read_pictures(folder, "target", len(prompts), size)):
            prompt.target = picture
    return prompts


def evenly(prompts, count):
    """`count` of them, evenly over the types: the first of each, then the second of each ..."""
    by_type = {}
    for prompt in prompts:
        by_type.setdefault(prompt.type, []).append(prompt)
    turns = chain(*zip_longest(*by_type.values()))
    return [prompt for prompt in turns if prompt][:count]


def read_file(path):
    """The Prompts in a text file, or in a .jsonl file, their lines counted from 1."""
    form = Path(path).suffix.lower()
    if form in TABLES:
        raise UserError(f"{path} is a table or a list: {ROWS}")
    with readable(f"read the prompts file {path}"):
        content = BytesIO(Path(path).read_bytes())
    with readable(f"read the prompts file {path}", "; save the file as UTF-8"):
        text = TextIOWrapper(content, "utf-8-sig").read()
    # Not splitlines(): U+2028 and the like end no prompt.
    lines = enumerate(text.split("\n"), 1)
    prompts = (read_rows if form in (".jsonl", ".ndjson") else read_lines)(path, lines)
    for prompt in prompts:
        if "<|image|>" in prompt.text:
            raise UserError(f"line {prompt.line} of {path} contains <|image|>: leave it out")
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write a prompt per line")
    if any(prompt.type for prompt in prompts):
        for prompt in prompts:
            prompt.type = prompt.type or "other"
            prompt.row.setdefault("type", prompt.type)
    return prompts


def without_unseen(line):
    """White space of any type is one space, and none at both ends."""
    line = re.sub(rf"^[\s{UNSEEN}]+|[\s{UNSEEN}]+$", "", line)
    if line.startswith("#"):  # in a prompt joiners belong to emoji and Persian words
        line = re.sub(f"[{UNSEEN}]", "", line)
    return re.sub(rf"\s([\s{UNSEEN}]*\s)?", " ", line)


def read_lines(path, lines):
    """A prompt per line.

    "# type: counting" names the type of the prompts below it; others with # in front are comments;
    \\# begins a prompt.
    """
    of_type = None
    prompts = []
    for number, whole in lines:
        line = without_unseen(whole)
        if JSON.match(line):
            raise UserError(f"line {number} of {path} looks like JSON: {ROWS}")
        if named := TYPE.fullmatch(line):
            of_type = named[1]
        elif line and line[0] != "#":
            if not prompts and is_header(whole):
                raise UserError(f"line {number} of {path} looks like the head of a table: {ROWS}")
            prompts.append(Prompt(re.sub(r"^\\#", "#", line), of_type, number))
    some = len(prompts) > 1
    if some and all(MARK.match(prompt.text) for prompt in prompts):
        mark = MARK.match(prompts[0].text)[0]
        raise UserError(f"{path} is a list: a line is a prompt as it stands; leave {mark!r} out")
    if some and all(QUOTED.fullmatch(prompt.text) for prompt in prompts):
        say(f"warning: all prompts of {path} are in quotes: GLM-Image writes what is in quotes")
    return prompts


def is_header(line):
    """Whether a first line names the columns of a table: by tabs, or "prompt" beside others."""
    fields = [field.strip(' "').lower() for field in re.split("[,;|]", line)]
    return "\t" in line.strip() or (len(fields) > 1 and "prompt" in fields)


def read_rows(path, lines):
    """A JSON object per line: "prompt", and "type" or "tag" if there are types.

    What else it holds are columns, for rewards with a parameter of that name.
    """
    prompts = []
    for number, line in lines:
        if not line.strip():
            continue
        with readable(f"read line {number} of {path}", '; an example: {"prompt": "three circles"}'):
            row = json.loads(line)
            if not isinstance(row, dict) or "prompt" not in row:
                raise ValueError("it is no object with a prompt")
            text, of_type = row.pop("prompt"), row.get("type") or row.get("tag")
            text = without_unseen(text) if isinstance(text, str) else None
            if not text or not isinstance(of_type, str | None):
                raise ValueError("prompt and type have to be text")
            text.encode()  # an error for half of an emoji, which the tokenizer could not read
            prompts.append(Prompt(text, of_type, number, row=row))
        if taken := row.keys() & TAKEN:
            raise UserError(f"line {number} of {path}: give {', '.join(taken)} another name")
    return prompts


def read_pictures(folder, kind, count, size):
    """`count` pictures of a folder, sorted by name as file browsers do: a2, A10, b1.

    Each is made to size (width, height) as it is read: of another shape, its middle is cut out. In
    place of a folder my_file.py:function may draw them.
    """
    if ".py:" in folder:
        drawing = Reward(folder).load()
        if asked := [*drawing.asks_for()]:
            words = f"cannot be called as docs/rewards.md says: it gets no {asked[0]}"
            raise UserError(f"{folder} {words}")
        found = images = drawing()
        is_list = isinstance(found, list | tuple)
        if not is_list or not all(isinstance(image, Image.Image) for image in found):
            gave = foreign.shortened(found)
            raise UserError(f"{folder} gave {gave}: return a list of Pillow images")
    elif not Path(folder).is_dir():
        what = "is a file; name its folder" if Path(folder).exists() else "does not exist"
        raise UserError(f"the folder of {kind} pictures {folder} {what}")
    else:
        in_order = lambda file: re.sub(
            "[0-9]+", lambda digits: digits[0].zfill(9), file.name.casefold()
        )
        found = sorted(Path(folder).glob("[!.]*"), key=in_order)
        images = (read_picture(kind, file) for file in found)
    if len(found) != count:
        raise UserError(f"{folder} has {counted(len(found), 'picture')} for {count} prompts")
    return [ImageOps.fit(image, size, Image.Resampling.LANCZOS) for image in images]


def read_picture(kind, file):
    """Upright, in sRGB by its colour profile, and on white where it is transparent."""
    try:
        # No others: for some of them Pillow starts another program.
        with Image.open(file, formats=["PNG", "JPEG", "WEBP"]) as image:
            image = ImageOps.exif_transpose(image)
        profile = image.info.get("icc_profile")
        if image.mode.startswith("I"):  # 16 bits of grey, which convert would cut to 255
            image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
        if image.mode not in ("L", "CMYK"):
            image = image.convert("RGBA")
        if profile:
            image = to_srgb(image, profile)
        image = image.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"the {kind} picture {file} cannot be read as PNG, JPEG or WebP: {error}"
        ) from None
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def to_srgb(image, profile):
    """By the colour profile of its file. A profile that is damaged, or of another mode, is none."""
    profiles = BytesIO(profile), ImageCms.createProfile("sRGB")
    mode = "RGBA" if image.mode == "RGBA" else "RGB"
    with suppress(ImageCms.PyCMSError):
        return ImageCms.profileToProfile(image, *profiles, outputMode=mode)
    return image


def prompt_indices(step, settings, count):
    """Which of `count` prompts a step trains on: each once per epoch, shuffled unless --order file.

    A function of the seed and the step alone, so that a resumed run needs no state. Each rank takes
    its share.
    """
    groups = settings.prompts_per_step * ranks.count()
    places = [divmod(step * groups + i, count) for i in ranks.shard(groups)]  # (epoch, place in it)
    if settings.order == "file":
        return [place for _, place in places]
    shuffled = {
        epoch: random.Random(f"{settings.seed} {epoch}").sample(range(count), count)
        for epoch in {epoch for epoch, _ in places}
    }
    return [shuffled[epoch][place] for epoch, place in places]


@dataclass
class Data:
    """What a run trains on, and what judges it."""

    prompts: list
    held_out: list
    rewards: dict  # {name: Reward}
    judges: dict  # rewards that nothing is trained to please
    made_of: dict  # see resume.py
    copies: dict  # see copies_of in resume.py


def read_inputs(settings, read):
    """The Data of a run, its rewards not yet loaded.

    read: (settings, "" or "eval_") -> [Prompt]. Raises UserError before anything loads: for files
    and names that are wrong, and for a resumed run that began with other files.
    """
    groups = settings.prompts_per_step * ranks.count()
    if groups > 1000:  # seed_of_step would give two steps some seeds in common
        raise UserError(f"--prompts-per-step: at most 1000 in all processes, got {groups}")
    foreign.forget_files()
    with readable_loading(settings.model):  # now, for rewards take a while
        cached_file(settings.model, "model_index.json")
    if settings.tracker != "none" and find_spec(settings.tracker) is None:
        package = f"pip install {settings.tracker}"
        raise UserError(f"--tracker {settings.tracker} needs a package: {package}")
    prompts, held_out = read(settings), read(settings, "eval_")
    columns = dict.fromkeys(name for prompt in (*prompts, *held_out) for name in prompt.row)
    for prompt in (*prompts, *held_out):  # a reward gets None where a row lacks what others have
        prompt.row = {name: prompt.row.get(name) for name in columns}
    rewards = parse_rewards(settings.reward)
    judges = parse_rewards(settings.eval_reward, rewards)
    for some, first in ((rewards, prompts[0]), (judges, held_out[0])):
        for reward in some.values():
            reward.check(first.target)
    if prompts[0].target and not held_out[0].target:
        say("warning: no held-out prompt has a target (--eval-targets): likeness is not evaluated")
    adapters = checkpoints.find_adapters(settings.adapter)
    for folder in adapters.values():
        if kind := checkpoints.needs_peft(folder):
            words = "load_adapter() would load another adapter; load by PEFT what this run trains"
            say(f"warning: {folder} is {kind}: {words} (docs/memory.md, After the run)")
    files = {
        name: resume.files_of(each.file) for name, each in (rewards | judges).items() if each.file
    }
    made_of = resume.inputs_of(prompts, held_out, adapters, files)
    if settings.resume:
        made_of = resume.compare(settings, made_of)
    known, new = ({prompt.identity() for prompt in some} for some in (prompts, held_out))
    if common := len(known & new):
        say(f"warning: {common} of the {len(new)} held-out prompts are also training prompts")
    copies = resume.copies_of(settings, files)
    return Data(prompts, held_out, rewards, judges, made_of, copies)


def load_rewards(settings, data):
    """Loads the rewards, before the 35 GB of model, and tries them on blank pictures.

    What cannot work fails now, not in an hour.
    """
    files = (settings.prompts, data.prompts), (settings.eval_prompts, data.held_out)
    columns = {path: {*chain(*(each.columns() for each in prompts))} for path, prompts in files}
    everything = data.rewards | data.judges
    for reward in everything.values():
        if reward.file:  # now, before a reward is downloaded
            check_columns(reward.load(), columns)
    sets = {"reward": [data.prompts], "eval_reward": [data.held_out, data.prompts]}
    for (flag, tried), rewards in zip(sets.items(), (data.rewards, data.judges)):
        if rewards:
            say(f"loading {option(flag)} {getattr(settings, flag)}")
        for reward in rewards.values():
            check_columns(reward.load(), columns)
        for prompts in tried:
            blank = [Image.new("RGB", (settings.width, settings.height))] * 2
            score(rewards, blank, **for_rewards(prompts[:1]))
        for name, reward in rewards.items():
            if left_out := sum(not reward.applies(prompt.text) for prompt in tried[0]):
                prompts = f"{left_out} of {counted(len(tried[0]), 'prompt')}"
                say(f"{name}: does not apply to {prompts}")
    crops = [name for name, each in everything.items() if getattr(each.function, "crops", False)]
    side, longer = sorted([settings.height, settings.width])
    if crops and side < longer:
        say(f"{', '.join(crops)}: of each picture only the middle {side}x{side} counts")


def check_columns(reward, columns):
    """UserError if a reward asks for a column that no row of a file of prompts has.

    columns: {path of the file: its columns}. Where no file has any, a parameter that may be None is
    no typing mistake; nor is `sources`, which an edit has.
    """
    there = {*chain(*columns.values())} - {"type", "tag", "sources"}
    for name, optional in reward.asks_for("images", "prompts", "targets").items():
        for path, known in columns.items():
            may_lack = optional and (not there or name == "sources")
            if name not in known | {"group_size"} and not may_lack:
                has = f"its columns: {', '.join(sorted(known)) or 'none'}"
                words = f"asks for {name!r}, which no row of {path} has; {has}"
                raise UserError(f"reward {reward.source!r} {words} (docs/rewards.md)")
