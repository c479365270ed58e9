"""What a run trains on and what judges it: prompts, pictures that go with them, rewards."""

import random
import re
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from transformers.utils import cached_file

from rewards import (
    UserError,
    check_rewards,
    load_from_file,
    own_files,
    parse_rewards,
    score,
    split_spec,
)
from runtime import checkpoints, ranks
from runtime.errors import readable
from runtime.record import counted, short_name
from runtime.settings import TINY, option

# A line for the prompts below it.
TYPE = re.compile(r"#+ *(?:type|kind) *[:=] *(\S.*)", re.IGNORECASE)


@dataclass
class Prompt:
    """What a picture is painted for."""

    text: str
    type: str | None = None  # for evaluations; None where the file names none
    line: int = 0  # where it stands in its file
    target: Image.Image | None = None  # what some rewards compare with

    def for_rewards(self):
        """What rewards are given beside pictures of it, by the names of their parameters."""
        return {"prompts": self.text, "targets": self.target}

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
    prompts = read_lines(path)
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


def read_lines(path):
    """The Prompts in a file, their lines counted from 1.

    "# type: counting" names the type of the prompts below it; others with # in front are comments;
    \\# begins a prompt. Spaces and tabs in a row are one space.
    """
    with readable(f"read the prompts file {path}"):
        text = Path(path).read_text(encoding="utf-8-sig")
    of_type = None
    prompts = []
    # Not splitlines(): U+2028 and the like belong to the prompt.
    for number, line in enumerate(text.split("\n"), 1):
        # U+200B has no width: pasting leaves it in lines that look empty.
        line = re.sub("[ \t]+", " ", line.strip().strip("\u200b"))
        if named := TYPE.fullmatch(line):
            of_type = named[1]
        elif line and line[0] != "#":
            prompts.append(Prompt(re.sub(r"^\\#", "#", line), of_type, number))
        if "<|image|>" in line:
            raise UserError(f"line {number} of {path} contains <|image|>: leave it out")
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write a prompt per line")
    if any(prompt.type for prompt in prompts):
        for prompt in prompts:
            prompt.type = prompt.type or "other"
    return prompts


def read_pictures(folder, kind, count, size):
    """`count` pictures of a folder, sorted by name as file browsers do: a2, A10, b1.

    Each is made to size (width, height) as it is read: of another shape, its middle is cut out. In
    place of a folder my_file.py:function may draw them.
    """
    if ".py:" in folder:
        found = images = load_from_file(folder)()
    elif not Path(folder).is_dir():
        raise UserError(f"the folder of {kind} pictures {folder} does not exist")
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
    """Upright, in RGB, and on white where it is transparent."""
    try:
        # No others: for some of them Pillow starts another program.
        with Image.open(file, formats=["PNG", "JPEG", "WEBP"]) as image:
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits of grey, which convert would cut to 255
            image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
        image = image.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"the {kind} picture {file} cannot be read as PNG, JPEG or WebP: {error}"
        ) from None
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def prompt_indices(step, settings, count):
    """Which of `count` prompts a step trains on: each once per epoch, shuffled.

    A function of the seed and the step alone, so that a resumed run needs no state. Each rank takes
    its share.
    """
    groups = settings.prompts_per_step * ranks.count()
    places = [divmod(step * groups + i, count) for i in ranks.shard(groups)]  # (epoch, place in it)
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
    """Prompts of training and held out, and hashes of what a run reads, for --resume.

    They are {"inputs": see hash_of, "rewards": {"FILE.py:FUNCTION": of its file}}.

    read: (settings, "" or "eval_") -> [Prompt]. Raises UserError before anything loads: for files
    and names that are wrong, and for a resumed run that began with other files.
    """
    with readable_loading(settings.model):  # now, for rewards take a while
        cached_file(settings.model, "model_index.json")
    prompts, held_out = read(settings), read(settings, "eval_")
    check_rewards(settings.reward, prompts[0].target)
    check_rewards(settings.eval_reward, held_out[0].target)
    if prompts[0].target and not held_out[0].target:
        print(
            "warning: no held-out prompt has a target (--eval-targets): likeness is not evaluated"
        )
    adapters = checkpoints.find_adapters(settings.adapter)
    own = own_files(settings.reward) | own_files(settings.eval_reward)
    hashed = {
        "inputs": hash_of(prompts, held_out, adapters),
        "rewards": {name: sha256(file.read_bytes()).hexdigest() for name, file in own.items()},
    }
    if settings.resume:
        compare(settings.resume, hashed)
    known, new = ({prompt.identity() for prompt in some} for some in (prompts, held_out))
    if common := len(known & new):
        print(f"warning: {common} of the {len(new)} held-out prompts are also training prompts")
    return prompts, held_out, hashed


def compare(out, hashed):
    """With what the run in `out` has read: UserError for other inputs, a warning for rewards."""
    before = checkpoints.read_state(Path(out))
    if hashed["inputs"] != before["inputs"]:
        raise UserError(
            f"{out} was started with other prompts or pictures; restore the files, "
            f"or start a new run from its adapter: --adapter {out}"
        )
    for name, own in hashed["rewards"].items():
        if own != before["rewards"][name]:
            print(f"warning: the file of {name} has changed since the run began")


def hash_of(prompts, held_out, adapters):
    """One hash of prompts, their types and pictures, and of the adapters that a run starts from."""
    digest = sha256(str(len(prompts)).encode())
    for prompt in (*prompts, *held_out):
        digest.update(repr((prompt.text, prompt.type)).encode())
        for given in prompt.for_rewards().values():
            digest.update(given.tobytes() if isinstance(given, Image.Image) else b"")
    for folder in adapters:
        digest.update((folder / checkpoints.WEIGHTS).read_bytes())
    return digest.hexdigest()


def load_data(settings, prompts, held_out):
    """The prompts with their rewards, which load before the 35 GB of model."""
    rewards = load_rewards(settings, "reward", [prompts])
    judges = load_rewards(settings, "eval_reward", [held_out, prompts])
    return Data(prompts, held_out, rewards, judges)


def load_rewards(settings, flag, files):
    """The rewards that a flag names, tried on blank pictures for the first of each of `files`.

    These are lists of Prompts. What cannot work fails now, not in an hour.
    """
    spec = getattr(settings, flag)
    if split_spec(spec):
        print(f"loading {option(flag)} {spec}", flush=True)
    rewards = parse_rewards(spec)
    for prompts in files:
        blank = [Image.new("RGB", (settings.width, settings.height))] * 2
        score(rewards, blank, **for_rewards(prompts[:1]))
    for name, (function, _) in rewards.items():
        applies = getattr(function, "applies", lambda prompt: True)
        if left_out := sum(not applies(prompt.text) for prompt in files[0]):
            prompts = f"{left_out} of {counted(len(files[0]), 'prompt')}"
            print(f"{short_name(name)}: does not apply to {prompts}", flush=True)
    return rewards


def readable_loading(model):
    hint = f"; give --model a folder with a GLM-Image pipeline, or {TINY}"
    return readable(f"load {model}", hint)
