"""What a run trains on and what judges it: prompts, pictures that some rewards compare with, rewards."""

import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError
from transformers.utils import cached_file

from rewards import RewardError, parse_rewards, score
from runtime import UserError, checkpoints, short_name
from runtime.adapters import adapter_file
from runtime.log import check_tracker
from runtime.settings import TINY

LONGEST_PROMPT = 4096  # characters: all prompts of a step take as much memory and time as its longest


@dataclass
class Source:
    """A picture to edit: its sides are multiples of 32."""

    image: Image.Image
    codes: torch.Tensor | None = None  # (rows*columns,) int64, one for 32x32 pixels, once the model has read it


@dataclass
class Prompts:
    """N prompts, with what goes with each."""

    texts: list
    targets: list | None = None  # pictures that some rewards compare with; an entry may be None
    sources: list | None = None  # the Sources to edit; None where pictures are painted from nothing

    def __len__(self):
        return len(self.texts)

    def take(self, rows):
        columns = self.texts, self.targets, self.sources
        return Prompts(*(column and [column[row] for row in rows] for column in columns))

    def with_sources(self):
        """Pairs of a text and the Source to edit, or None."""
        return zip(self.texts, self.sources or [None] * len(self), strict=True)

    @property
    def for_rewards(self):
        """What rewards are given beside the pictures: texts, targets, pictures that are edited."""
        return self.texts, self.targets, self.sources and [source.image for source in self.sources]


def read_prompts(path, folder, sources=None, pixels=0):
    """The prompts in a file, with the target pictures in a folder, unless it is None or "none".

    sources: a folder with the pictures to edit, or None. pixels: those of a picture to be painted; see fitted.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts file {path}: {error}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write one per line")
    if (longest := max(map(len, prompts))) > LONGEST_PROMPT:
        raise UserError(f"the prompts file {path} has a prompt of {longest:,} characters; {LONGEST_PROMPT:,} at most")
    targets = None if folder in (None, "none", "") else read_pictures(folder, "target", len(prompts))
    images = sources and read_pictures(sources, "source", len(prompts))
    return Prompts(prompts, targets, images and [Source(fitted(image, pixels)) for image in images])


def read_pictures(folder, kind, count):
    """`count` pictures of a folder, sorted by name, 2 before 10."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"the folder of {kind} pictures {folder} does not exist")
    files = [f for f in folder.iterdir() if f.suffix.lower() in Image.registered_extensions()]
    files.sort(key=lambda f: [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", f.name)])
    if len(files) != count:
        raise UserError(f"{folder} has {len(files)} pictures for {count} prompts; give one per prompt, by line")
    try:
        return [Image.open(file := each).convert("RGB") for each in files]
    except OSError as error:
        raise UserError(f"the {kind} picture {file} cannot be opened: {error}") from None


def fitted(image, pixels):
    """A source of about so many pixels and nearly its own shape, with sides that are multiples of 32.

    Other sides break the pipeline off, as do sides below 512 with the released model, which would read them enlarged.
    """
    if max(image.size) > 4 * min(image.size):
        raise UserError(f"a source of {image.width}x{image.height} pixels: one side is over 4 times the other, cut it")
    scale = math.sqrt(pixels / (image.width * image.height))
    size = [max(32, round(side * scale / 32) * 32) for side in image.size]
    return image.resize(size, Image.Resampling.LANCZOS)


@dataclass
class Data:
    """What a run trains on, and what judges it."""

    prompts: Prompts
    held_out: Prompts
    rewards: dict  # {name: (function, weight)}
    judges: dict  # rewards that nothing is trained to please


def read_inputs(settings):
    """Prompts of training and held out, and a hash of all that is read: {setting: hash}.

    What is wrong with them is said before anything loads; also if a run that is resumed began with others.
    """
    check_tracker(settings.tracker)
    with readable_loading(settings.model):
        cached_file(settings.model, "model_index.json")  # fail now if the model is missing: rewards take a while
    size = settings.height * settings.width
    prompts = read_prompts(settings.prompts, settings.targets, settings.sources, size)
    held_out = read_prompts(settings.eval_prompts, settings.eval_targets, settings.eval_sources, size)
    folder = settings.adapter
    adapters = [adapter_file(folder, name) for name in checkpoints.FOLDERS] if folder else []
    hashes = {"adapter": sha256_of(file.read_bytes() for file in adapters if file)}
    for prefix, some in (("", prompts), ("eval_", held_out)):
        texts, *pictures = some.for_rewards
        hashes[f"{prefix}prompts"] = sha256_of(["\n".join(texts).encode()])
        for kind, given in zip(("targets", "sources"), pictures, strict=True):
            hashes[f"{prefix}{kind}"] = sha256_of(picture.tobytes() for picture in given or [])
    if settings.resume is not None:
        *_, began = checkpoints.read_state(Path(settings.resume))
        changed = [name for name in hashes if hashes[name] != began[name]]
        if changed:
            named = ", ".join(f"--{name.replace('_', '-')} {getattr(settings, name)}" for name in changed)
            raise UserError(f"{settings.resume} began with another {named}: put it back as it was, or start anew "
                            f"with what was learned: --adapter {settings.resume}")  # fmt: skip
    return prompts, held_out, hashes


def sha256_of(parts):
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def load_data(settings, prompts, held_out):
    """With rewards: what is wrong with them is said before 35 GB of model load."""
    rewards = load_rewards("reward", settings, prompts)
    for one, other in ((prompts, held_out), (held_out, prompts)):
        if one.targets is None and other.targets is not None:  # likeness does not apply there
            one.targets = [None] * len(one.texts)
    judges = {}
    if settings.eval_reward not in ("none", ""):
        judges = load_rewards("eval_reward", settings, held_out)
    return Data(prompts, held_out, rewards, judges)


def load_rewards(flag, settings, prompts):
    """The rewards that a flag names, tried on two blank pictures: what cannot work fails now, not in an hour."""
    print(f"loading --{flag.replace('_', '-')} {getattr(settings, flag)}", flush=True)
    blank = [Image.new("RGB", (settings.width, settings.height))] * 2
    try:
        rewards = parse_rewards(getattr(settings, flag))
        score(rewards, blank, *prompts.take([0]).for_rewards)
    except (ValueError, torch.OutOfMemoryError) as error:
        tried = " (tried on two blank pictures)" if isinstance(error, RewardError) else ""
        raise UserError(f"--{flag.replace('_', '-')}: {str(error).strip().splitlines()[0]}{tried}") from None
    for name, (function, _) in rewards.items():
        if hasattr(function, "coverage"):
            print(f"{short_name(name)}: {function.coverage(prompts.texts)}", flush=True)
    return rewards


@contextmanager
def readable_loading(model):
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        hint = f"give --model a folder with a GLM-Image pipeline, or {TINY}"
        raise UserError(f"cannot load {model} ({reason}); {hint}") from None
