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

from rewards import (
    CHINESE,
    RewardError,
    Text,
    Vqa,
    check_rewards,
    parse_rewards,
    quoted,
    score,
)
from runtime import UserError, checkpoints, counted, ranks, readable, short_name
from runtime.adapters import find_adapters
from runtime.settings import TINY

KIND = re.compile(r"#+ *kind *[:=] *(\S.*)", re.IGNORECASE)  # a line for the prompts below it
ENDINGS = ".avif .bmp .gif .jfif .jp2 .jpeg .jpg .pgm .png .ppm .tif .tiff .webp"


@dataclass
class Source:
    """A picture to edit: its sides are multiples of 32."""

    image: Image.Image
    codes: torch.Tensor | None = None  # (rows*columns,) int64, one per 32x32 pixels, once read


@dataclass
class Prompts:
    """N prompts, with what goes with each."""

    texts: list
    targets: list | None = None  # pictures that some rewards compare with; an entry may be None
    sources: list | None = None  # the Source to edit; None where a picture is painted from nothing
    kinds: list | None = None  # the kind of each, for evaluations; None where the file names none
    lines: list | None = None  # where each stands in its file: two edits may share a text

    def __post_init__(self):
        self.sources = self.sources or [None] * len(self.texts)

    def __len__(self):
        return len(self.texts)

    def take(self, rows):
        columns = vars(self).values()
        return Prompts(*(column and [column[row] for row in rows] for column in columns))

    def evenly(self, count):
        """`count` of them, evenly over the kinds: the first of each, then the second of each ..."""
        ahead = Counter()
        turns = []
        for kind in self.kinds or [None] * len(self):
            turns.append(ahead[kind])
            ahead[kind] += 1
        return self.take(sorted(range(len(self)), key=turns.__getitem__)[:count])

    def for_rewards(self, row=None):
        """What rewards are given beside the pictures, of all prompts or of one.

        Texts, targets, pictures that are edited; of the last two None where there are none.
        """
        some = self if row is None else self.take([row])
        images = [source and source.image for source in some.sources]
        return some.texts, some.targets, images if any(images) else None


def read_prompts(path, folder, sources=None, size=None):
    """The prompts in a file, with pictures in two folders: targets, and sources to edit.

    folder: of the targets; None or "none": there are none. size: (width, height) of a picture to be
    painted, to which both are made.
    """
    texts, kinds, lines = read_lines(path)
    prompts = Prompts(texts, kinds=kinds, lines=lines)
    if sources:
        images = read_pictures(sources, "source", len(texts), size)
        prompts.sources = [Source(image) for image in images]
    if folder not in (None, "none", ""):
        prompts.targets = read_pictures(folder, "target", len(texts), size)
    if repeated := len(texts) - len(set(identities(prompts))):
        print(f"{path}: {counted(repeated, 'prompt')} stood there before")
    return prompts


def identities(prompts):
    """What tells prompts apart: the text, and the picture to edit."""
    images = [source and source.image.tobytes() for source in prompts.sources]
    return list(zip(prompts.texts, images))


def read_lines(path):
    """The prompts in a file, their kinds (None where it names none), their lines from 1.

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
            prompts.append((line[1:] if line.startswith("\\#") else line, kind, number))
        if "<|image|>" in line:
            raise UserError(f"line {number} of {path} contains <|image|>: leave it out")
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write one per line")
    texts, kinds, lines = map(list, zip(*prompts))
    return texts, [kind or "other" for kind in kinds] if any(kinds) else None, lines


def read_pictures(folder, kind, count, size):
    """The pictures of a folder, sorted by name, 2 before 10, as every viewer shows them.

    Each is made to size (width, height) as it is read, so that a folder of photos takes little
    memory: of another shape, its middle is cut out.
    """
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

    prompts: Prompts
    held_out: Prompts
    rewards: dict  # {name: (function, weight)}
    judges: dict  # rewards that nothing is trained to please


def read_inputs(settings):
    """Prompts of training and held out, and {setting: hash} of these, their pictures, the adapter.

    Raises UserError before anything loads: for files and names that are wrong, and for a resumed
    run that began with other files.
    """
    if settings.tracker != "none" and importlib.util.find_spec(settings.tracker) is None:
        package = f"pip install {settings.tracker}"
        raise UserError(f"--tracker {settings.tracker} needs a package: {package}")
    with readable_loading(settings.model):  # now, for rewards take a while
        cached_file(settings.model, "model_index.json")
    size = (settings.width, settings.height)
    prompts = read_prompts(settings.prompts, settings.targets, settings.sources, size)
    pictures = settings.eval_targets, settings.eval_sources
    held_out = read_prompts(settings.eval_prompts, *pictures, size)
    for some, flag in ((prompts, "reward"), (held_out, "eval_reward")):
        with readable_reward(flag):
            if getattr(settings, flag) not in ("none", ""):
                check_rewards(getattr(settings, flag), some.targets, any(some.sources))
    lora = settings.lora_rank, settings.lora_alpha
    adapters = find_adapters(settings.adapter, *lora) if settings.adapter else []
    hashes = {"adapter": sha256_of(file.read_bytes() for file in adapters)}
    for prefix, some in (("", prompts), ("eval_", held_out)):
        texts, targets, sources = some.for_rewards()
        words = ["\n".join(lines or []).encode() for lines in (texts, some.kinds)]
        hashes[f"{prefix}prompts"] = sha256_of(words)
        hashes[f"{prefix}targets"] = sha256_of(picture.tobytes() for picture in targets or [])
        hashes[f"{prefix}sources"] = sha256_of(picture.tobytes() for picture in sources or [])
    if common := len(set(identities(prompts)) & set(identities(held_out))):
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
    for one, other in ((prompts, held_out), (held_out, prompts)):
        if one.targets is None and other.targets is not None:  # likeness does not apply there
            one.targets = [None] * len(one.texts)
    judges = {}
    if settings.eval_reward not in ("none", ""):
        judges = load_rewards("eval_reward", settings.eval_reward, size, [held_out, prompts])
    return Data(prompts, held_out, rewards, judges)


def load_rewards(flag, spec, size, files):
    """The rewards that a flag names, tried on blank pictures for the first of each of `files`.

    These are Prompts. What cannot work fails now, not in an hour.
    """
    print(f"loading --{flag.replace('_', '-')} {spec}", flush=True)
    blank = [Image.new("RGB", size)] * 2
    with readable_reward(flag):
        rewards = parse_rewards(spec)
        for prompts in files:
            score(rewards, blank, *prompts.for_rewards(0))
    texts = files[0].texts
    chinese = sum(CHINESE.search(text) is not None for text in texts)
    of_all = f"of {counted(len(texts), 'prompt')}"
    for name, (function, _) in rewards.items():
        name = short_name(name)
        if type(function) is Text:
            words = sum(bool(quoted(text)) for text in texts)
            print(f"{name}: words to read for {words} {of_all}", flush=True)
        if type(function) is Vqa:  # those of Edit, an heir of it, are the same for all
            known = sum(text.strip() in function.questions for text in texts)
            print(f"{name}: questions for {known} {of_all}", flush=True)
        if chinese and not getattr(function, "reads_chinese", True):
            print(f"{name}: no reward for {chinese} {of_all}, which are Chinese", flush=True)
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
