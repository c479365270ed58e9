"""What a run trains on and what judges it: prompts, pictures that go with them, rewards."""

import json
import random
import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path, PureWindowsPath

import torch
from PIL import Image, ImageOps

from lookup import UserError, find_path, forget_modules, load_from_file
from rewards import REWARDS, Reward, score, weights_of
from runtime import ranks
from runtime.terminal import readable, say

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


def seed_of_step(step, seed, prompts_per_step):
    """The seed of this rank's first group; the groups after it count up, on through all ranks."""
    return (seed * 1_000_003 + step) * 1_000 + ranks.rank() * prompts_per_step


@dataclass
class Data:
    """What a run trains on, and what judges it."""

    prompts: list
    held_out: list
    rewards: dict  # {name: Reward}
    judges: dict  # rewards that nothing is trained to please

    def own(self):
        """The rewards in files of the user's."""
        return [each for each in (self.rewards | self.judges).values() if each.own]


def read_inputs(settings, read):
    """The Data of a run, its rewards not yet loaded.

    read: (settings, "" or "eval_") -> [Prompt]. Raises UserError for files and names that are
    wrong, before anything loads.
    """
    forget_modules()
    prompts, held_out = read(settings), read(settings, "eval_")
    specs = settings.reward, settings.eval_reward
    rewards, judges = map(parse_rewards, specs)
    if not any(weights_of(rewards).values()):
        raise UserError("--reward names nothing to train on: give a reward with a weight")
    for name in rewards.keys() & judges.keys():
        if rewards[name].source != judges[name].source:
            raise UserError(f"--reward and --eval-reward have two rewards named {name!r}")
        judges[name] = rewards[name]  # it loads once
    for some, of_file in ((rewards, prompts), (judges, held_out)):
        # A reward gets None where a row lacks what others have.
        columns = dict.fromkeys(name for prompt in of_file for name in prompt.row)
        for prompt in of_file:
            prompt.row = {name: prompt.row.get(name) for name in columns}
        likeness = {"mse", "ssim", "lpips"} & some.keys()
        if likeness and not any(prompt.target for prompt in of_file):
            raise UserError(f"reward {min(likeness)!r} needs --targets, or --eval-targets")
    data = Data(prompts, held_out, rewards, judges)
    for each in data.own():
        load_from_file(each.source)
    known, new = ({prompt.identity() for prompt in some} for some in (prompts, held_out))
    if common := len(known & new):
        say(f"warning: {common} of the {len(new)} held-out prompts are also training prompts")
    return data


def parse_rewards(spec):
    """'ssim,clip=folder:0.5' -> {"ssim": Reward("ssim"), "clip": Reward("clip=folder", 0.5)}.

    'none' -> {}. The names are what people read, 'my.py:f' for 'a/my.py:f'; each has one reward.
    UserError for what can be known to be wrong before anything loads.
    """
    rewards = {}
    for item in spec.split(","):
        if item.strip() not in ("", "none"):
            number = r"-?\d*\.?\d+(?:e-?\d+)?"
            source, weight = re.fullmatch(rf"\s*(.+?)(?::({number}))?\s*", item).groups()
            name, reward = source.partition("=")[0], Reward(source, float(weight or 1))
            if reward.own:
                name = PureWindowsPath(source).name
            elif name not in REWARDS:
                known = f"known: {', '.join(sorted(REWARDS))}; your own: file.py:function"
                raise UserError(f"unknown reward {name!r}; {known}")
            if name in rewards:
                raise UserError(f"two rewards are named {name!r}: rename or leave out one of them")
            rewards[name] = reward
    return rewards


def load_rewards(settings, data):
    """Loads the rewards, before the model, and tries them on blank pictures.

    What cannot work fails now, not in an hour.
    """
    rewards = data.rewards | data.judges
    say(f"loading the rewards {', '.join(rewards)}")
    blank = [Image.new("RGB", (settings.width, settings.height))] * 2
    for name, reward in rewards.items():
        hint = "; docs/rewards.md says what it needs, and how to load it from a folder"
        # A bug in the user's own file is its traceback.
        with nullcontext() if reward.own else readable(f"load the reward {name}", hint):
            reward.load()
        if settings.steps > 0 and name in data.rewards:
            check_parameters(reward, data.prompts[0].row, settings.prompts)
        check_parameters(reward, data.held_out[0].row, settings.eval_prompts)
        score({name: reward}, blank, data.held_out[:1])


def check_parameters(reward, columns, file):
    """UserError if it has a parameter that prompts of a file, with these columns, do not fill.

    One with a default may be left out.
    """
    known = "images", "prompts", "targets", "group_size", *columns
    for each in reward.parameters:
        any_number = each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        if each.default is each.empty and not any_number and each.name not in known:
            words = f"reward {reward.source!r} asks for {each.name!r}; for prompts of {file} "
            raise UserError(f"{words}there are {', '.join(known)} (docs/rewards.md)")
