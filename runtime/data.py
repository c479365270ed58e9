"""What a run trains on and what judges it: prompts, pictures that go with them, rewards."""

import importlib.util
import random
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from PIL import Image, ImageOps
from transformers.utils import cached_file

from rewards import RewardError, check_rewards, load_from_file, parse_rewards, score
from runtime import UserError, checkpoints, counted, ranks, readable, short_name
from runtime.adapters import find_adapters
from runtime.settings import TINY

KIND = re.compile(r"#+ *kind *[:=] *(\S.*)", re.IGNORECASE)  # a line for the prompts below it
ENDINGS = ".avif .bmp .gif .jfif .jp2 .jpeg .jpg .pgm .png .ppm .tif .tiff .webp"


@dataclass
class Prompt:
    """What a picture is painted for."""

    text: str
    kind: str | None = None  # for evaluations; None where the file names none
    line: int = 0  # where it stands in its file
    target: Image.Image | None = None  # what some rewards compare with

    def for_rewards(self):
        """What rewards are given beside pictures of it, see Scoring.add in rewards.py."""
        return {"prompts": [self.text], "targets": [self.target]}

    def given(self):
        """{name: picture} that the policy reads beside the text."""
        return {}

    def identity(self):
        """What tells prompts apart."""
        return self.text


def read_prompts(settings, prefix=""):
    """The prompts to train on, or with "eval_" the held-out ones, and their targets."""
    path, folder = (getattr(settings, prefix + name) for name in ("prompts", "targets"))
    prompts = read_lines(path)
    if folder not in (None, "none", ""):
        size = settings.width, settings.height
        for prompt, picture in zip(prompts, read_pictures(folder, "target", len(prompts), size)):
            prompt.target = picture
    return prompts


def evenly(prompts, count):
    """`count` of them, evenly over the kinds: the first of each, then the second of each ..."""
    ahead = Counter()
    turns = []
    for prompt in prompts:
        turns.append(ahead[prompt.kind])
        ahead[prompt.kind] += 1
    rows = sorted(range(len(prompts)), key=turns.__getitem__)[:count]
    return [prompts[row] for row in rows]


def read_lines(path):
    """The Prompts in a file, their lines counted from 1.

    "# kind: counting" names the kind of the prompts below it; others with # in front are comments;
    \\# begins a prompt. Spaces and tabs in a row are one space.
    """
    with readable(f"read the prompts file {path}"):
        text = Path(path).read_text(encoding="utf-8-sig")
    kind = None
    prompts = []
    # Not splitlines(): U+2028 and the like belong to the prompt.
    for number, line in enumerate(text.split("\n"), 1):
        # U+200B has no width: pasting leaves it in lines that look empty.
        line = re.sub("[ \t]+", " ", line.strip().strip("\u200b"))
        if named := KIND.fullmatch(line):
            kind = named[1]
        elif line and line[0] != "#":
            text = line[1:] if line.startswith("\\#") else line
            prompts.append(Prompt(text, kind, number))
        if "<|image|>" in line:
            raise UserError(f"line {number} of {path} contains <|image|>: leave it out")
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write one per line")
    if any(prompt.kind for prompt in prompts):
        for prompt in prompts:
            prompt.kind = prompt.kind or "other"
    return prompts


def read_pictures(folder, kind, count, size):
    """The pictures of a folder, sorted by name, 2 before 10, as every viewer shows them.

    Each is made to size (width, height) as it is read, so that a folder of photos takes little
    memory: of another shape, its middle is cut out. In place of a folder my_file.py:function may
    draw them.
    """
    if ".py:" in str(folder):
        return draw_pictures(folder, kind, count, size)
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"the folder of {kind} pictures {folder} does not exist")
    is_number = lambda word: word.isascii() and word.isdigit()
    parts = lambda name: re.split("([0-9]+)", name.casefold())
    numbered = lambda file: [int(x) if is_number(x) else x for x in parts(file.name)]
    files = [file for file in folder.iterdir() if file.is_file() and file.name[0] != "."]
    pictures = [file for file in files if file.suffix.lower() in ENDINGS.split()]
    if len(pictures) != count:
        others = sorted(file.name for file in files if file not in pictures)[:3]
        unread = f" (not read: {', '.join(others)})" if others else ""
        number = f"{folder} has {counted(len(pictures), 'picture')}{unread}"
        raise UserError(f"{number} for {counted(count, 'prompt')}; give one each, sorted by name")
    images = []
    other_shapes = 0
    for file in sorted(pictures, key=numbered):
        try:
            with Image.open(file) as opened:
                image = as_shown(opened)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise UserError(f"the {kind} picture {file} cannot be read: {error}") from None
        stretch = image.width * size[1] / (image.height * size[0])
        other_shapes += not 1 / 1.05 < stretch < 1.05
        images.append(ImageOps.fit(image, size, Image.Resampling.LANCZOS))
    if other_shapes:
        number = counted(other_shapes, "picture")
        print(f"{folder}: {number} of another shape than what is painted, cut to the middle")
    return images


def draw_pictures(name, kind, count, size):
    with readable(f"draw the {kind} pictures by {name}"):
        images = load_from_file(name)()
    if len(images) != count:
        raise UserError(f"{name} draws {counted(len(images), 'picture')} for {count} prompts")
    return [ImageOps.fit(image, size, Image.Resampling.LANCZOS) for image in images]


def as_shown(image):
    """A picture as every viewer shows it, in RGB: upright, and on white where it is transparent."""
    if image.mode[0] in "IF":  # Pillow would clip what is above 255
        raise ValueError("it has more than 8 bits per colour: save it with 8")
    image = ImageOps.exif_transpose(image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def prompt_indices(step, settings, count):
    """Which of `count` prompts a step trains on: each once per epoch, in its order or shuffled.

    A function of the seed and the step alone, so that a resumed run needs no state. Each rank takes
    its share.
    """
    groups = settings.prompts_per_step * ranks.count()
    places = [divmod(step * groups + i, count) for i in ranks.shard(groups)]  # (epoch, place in it)
    if settings.order == "file":
        return [place for _, place in places]
    shuffled = lambda epoch: random.Random(f"{settings.seed} {epoch}").sample(range(count), count)
    return [shuffled(epoch)[place] for epoch, place in places]


@dataclass
class Data:
    """What a run trains on, and what judges it."""

    prompts: list
    held_out: list
    rewards: dict  # {name: (function, weight)}
    judges: dict  # rewards that nothing is trained to please


def read_inputs(settings, read):
    """Prompts of training and held out, and {setting: hash} of these, their pictures, the adapter.

    read: (settings, "" or "eval_") -> [Prompt]. Raises UserError before anything loads: for files
    and names that are wrong, and for a resumed run that began with other files.
    """
    if settings.tracker != "none" and importlib.util.find_spec(settings.tracker) is None:
        package = f"pip install {settings.tracker}"
        raise UserError(f"--tracker {settings.tracker} needs a package: {package}")
    with readable_loading(settings.model):  # now, for rewards take a while
        cached_file(settings.model, "model_index.json")
    prompts, held_out = read(settings), read(settings, "eval_")
    for some, flag in ((prompts, "reward"), (held_out, "eval_reward")):
        with readable_reward(flag):
            if getattr(settings, flag) not in ("none", ""):
                check_rewards(getattr(settings, flag), some[0].for_rewards())
    adapters = find_adapters(settings.adapter, settings.lora_rank) if settings.adapter else []
    hashes = {"adapter": sha256_of(file.read_bytes() for file in adapters)}
    for prefix, some in (("", prompts), ("eval_", held_out)):
        words = ["\n".join(prompt.text for prompt in some)]
        words += ["\n".join(prompt.kind or "" for prompt in some)] * (some[0].kind is not None)
        hashes[f"{prefix}prompts"] = sha256_of(word.encode() for word in words)
        columns = {
            name: [prompt.for_rewards()[name][0] for prompt in some]
            for name in some[0].for_rewards()
        }
        del columns["prompts"]
        for name, pictures in columns.items():
            hashes[prefix + name] = sha256_of(x.tobytes() for x in pictures if x is not None)
    known, new = ({prompt.identity() for prompt in some} for some in (prompts, held_out))
    for some, path in ((prompts, settings.prompts), (held_out, settings.eval_prompts)):
        if repeated := len(some) - len({prompt.identity() for prompt in some}):
            print(f"{path}: {counted(repeated, 'duplicate prompt')}")
    if common := len(known & new):
        print(f"warning: {common} of the {len(held_out)} held-out prompts are trained on, too")
    if settings.resume is not None:
        *_, before = checkpoints.read_state(Path(settings.resume))
        if changed := [name for name in hashes if hashes[name] != before[name]]:
            flags = [f"--{x.replace('_', '-')} {getattr(settings, x)}" for x in changed]
            again = f"start anew with what was learned: --adapter {settings.resume}"
            raise UserError(
                f"{settings.resume} began with another {', '.join(flags)}: put it back, or {again}"
            )
    return prompts, held_out, hashes


def sha256_of(parts):
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def load_data(settings, prompts, held_out):
    """The prompts with their rewards, which load before the 35 GB of model."""
    size = (settings.width, settings.height)
    rewards = load_rewards("reward", settings.reward, size, [prompts])
    judges = {}
    if settings.eval_reward not in ("none", ""):
        judges = load_rewards("eval_reward", settings.eval_reward, size, [held_out, prompts])
    return Data(prompts, held_out, rewards, judges)


def load_rewards(flag, spec, size, files):
    """The rewards that a flag names, tried on blank pictures for the first of each of `files`.

    These are lists of Prompts. What cannot work fails now, not in an hour.
    """
    print(f"loading --{flag.replace('_', '-')} {spec}", flush=True)
    blank = [Image.new("RGB", size)] * 2
    with readable_reward(flag):
        rewards = parse_rewards(spec)
        for prompts in files:
            score(rewards, blank, **prompts[0].for_rewards())
    texts = [prompt.text for prompt in files[0]]
    for name, (function, _) in rewards.items():
        applies = getattr(function, "applies", None)
        count = sum(map(applies, texts)) if applies else len(texts)
        if count < len(texts):
            of_all = f"{len(texts) - count} of {counted(len(texts), 'prompt')}"
            print(f"{short_name(name)}: does not apply to {of_all}", flush=True)
    return rewards


@contextmanager
def readable_reward(flag):
    try:
        yield
    except (ValueError, torch.OutOfMemoryError) as error:
        tried = " (tried on two blank pictures)" if isinstance(error, RewardError) else ""
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--{flag.replace('_', '-')}: {reason}{tried}") from None


def readable_loading(model):
    return readable(f"load {model}", f"give --model a folder with a GLM-Image pipeline, or {TINY}")
