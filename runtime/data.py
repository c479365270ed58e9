"""What a run trains on and what judges it: prompts, pictures that some rewards compare with,
rewards."""

import importlib.util
import re
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from PIL import Image, ImageOps
from transformers.utils import cached_file

from rewards import CHINESE, RewardError, Text, Vqa, parse_rewards, quoted, score
from runtime import UserError, checkpoints, counted, readable, short_name
from runtime.adapters import adapter_file
from runtime.settings import TINY

KIND = re.compile(
    r"#+ *kind *[:=] *(\S.*)", re.IGNORECASE
)  # a line that names the kind of the prompts below it
ENDINGS = {
    ".avif",
    ".bmp",
    ".gif",
    ".jfif",
    ".jp2",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
}


@dataclass
class Source:
    """A picture to edit: its sides are multiples of 32."""

    image: Image.Image
    codes: torch.Tensor | None = (
        None  # (rows*columns,) int64, one for 32x32 pixels, once the model has read it
    )


@dataclass
class Prompts:
    """N prompts, with what goes with each."""

    texts: list
    targets: list | None = None  # pictures that some rewards compare with; an entry may be None
    sources: list | None = None  # the Sources to edit; None where pictures are painted from nothing
    kinds: list | None = None  # the kind of each, for evaluations; None where the file names none
    lines: list | None = None  # where each stands in its file: two edits may share a text

    def __len__(self):
        return len(self.texts)

    def take(self, rows):
        return Prompts(
            *(column and [column[row] for row in rows] for column in vars(self).values())
        )

    def evenly(self, count):
        """`count` of them, evenly over the kinds: the first of each kind, then the second of each,
        and so on."""
        seen = Counter()
        turns = []
        for kind in self.kinds or [None] * len(self):
            turns.append(seen[kind])
            seen[kind] += 1
        return self.take(sorted(range(len(self)), key=turns.__getitem__)[:count])

    def with_sources(self):
        """Pairs of a text and the Source to edit, or None."""
        return zip(self.texts, self.sources or [None] * len(self), strict=True)

    @property
    def for_rewards(self):
        """What rewards are given beside the pictures: texts, targets, pictures that are edited."""
        return self.texts, self.targets, self.sources and [source.image for source in self.sources]


def read_prompts(path, folder, sources=None, size=None):
    """The prompts in a file, with pictures in two folders: targets, unless that is None or "none",
    and sources to edit.

    size: (width, height) of a picture to be painted, to which both are made. None: no pictures are
    read.
    """
    texts, kinds, lines = read_lines(path)
    prompts = Prompts(texts, kinds=kinds, lines=lines)
    if sources:
        prompts.sources = [
            Source(image) for image in read_pictures(sources, "source", len(texts), size)
        ]
    if folder not in (None, "none", ""):
        prompts.targets = read_pictures(folder, "target", len(texts), size)
    return prompts


def read_lines(path):
    """The prompts in a file, their kinds (None where it names none), and their places, counted in
    lines from 1.

    "# kind: counting" names the kind of the prompts below it; others with # in front are comments;
    \\# begins a prompt.
    """
    with readable(f"read the prompts file {path}"):
        text = Path(path).read_text(encoding="utf-8-sig")
    kind = None
    found = []
    for number, line in enumerate(
        text.split("\n"), 1
    ):  # not splitlines(): U+2028 and the like belong to the prompt
        line = line.strip().strip(
            "\u200b"
        )  # of no width: what pasting leaves in lines that look empty
        if named := KIND.fullmatch(line):
            kind = named[1]
        elif line and line[0] != "#":
            found.append((line[1:] if line.startswith("\\#") else line, kind, number))
    if not found:
        raise UserError(f"the prompts file {path} has no prompt in it; write one per line")
    for number in [number for line, _, number in found if "<|image|>" in line]:
        raise UserError(
            f"line {number} of {path} contains <|image|>, which stands for a picture: leave it out"
        )
    texts, kinds, lines = map(list, zip(*found))
    return texts, [kind or "other" for kind in kinds] if any(kinds) else None, lines


def read_pictures(folder, kind, count, size):
    """The pictures of a folder, sorted by name, 2 before 10, as every viewer shows them.

    Each is made to size (width, height) as it is read, so that a folder of photos takes little
    memory: of another shape, its middle is cut out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"the folder of {kind} pictures {folder} does not exist")
    is_picture = lambda f: (
        f.is_file() and f.suffix.lower() in ENDINGS and not f.name.startswith(".")
    )
    numbered = lambda f: [
        int(x) if x.isascii() and x.isdigit() else x for x in re.split("([0-9]+)", f.name)
    ]
    files = sorted(filter(is_picture, folder.iterdir()), key=numbered)
    if len(files) != count:
        raise UserError(
            f"{folder} has {len(files)} pictures for {count} prompts; give one per prompt, sorted by name"
        )
    pictures = []
    other_shapes = 0
    for file in files:
        try:
            with Image.open(file) as opened:
                image = as_shown(opened)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise UserError(f"the {kind} picture {file} cannot be read: {error}") from None
        stretch = image.width * size[1] / (image.height * size[0])
        other_shapes += not 1 / 1.05 < stretch < 1.05
        pictures.append(ImageOps.fit(image, size, Image.Resampling.LANCZOS))
    if other_shapes:
        print(
            f"{folder}: {counted(other_shapes, 'picture')} of another shape than what is painted, cut to the middle"
        )
    return pictures


def as_shown(image):
    """A picture as every viewer shows it, in RGB: upright, and on white where it is transparent."""
    if image.mode[0] in "IF":  # Pillow would clip what is above 255
        raise ValueError("it has more than 8 bits per colour: save it with 8")
    image = ImageOps.exif_transpose(image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


@dataclass
class Data:
    """What a run trains on, and what judges it."""

    prompts: Prompts
    held_out: Prompts
    rewards: dict  # {name: (function, weight)}
    judges: dict  # rewards that nothing is trained to please


def read_inputs(settings):
    """Prompts of training and held out, and {setting: hash} of these, of their pictures and of the
    adapter.

    Raises UserError before anything loads: for files that are wrong, and for a resumed run that
    began with other files.
    """
    if settings.tracker != "none" and importlib.util.find_spec(settings.tracker) is None:
        raise UserError(
            f"--tracker {settings.tracker} needs a package: pip install {settings.tracker}"
        )
    with readable_loading(settings.model):
        cached_file(
            settings.model, "model_index.json"
        )  # fail now if the model is missing: rewards take a while
    size = (settings.width, settings.height)
    prompts = read_prompts(settings.prompts, settings.targets, settings.sources, size)
    held_out = read_prompts(
        settings.eval_prompts, settings.eval_targets, settings.eval_sources, size
    )
    folder = settings.adapter
    adapters = [adapter_file(folder, name) for name in checkpoints.FOLDERS] if folder else []
    hashes = {"adapter": sha256_of(file.read_bytes() for file in adapters if file)}
    for prefix, some in (("", prompts), ("eval_", held_out)):
        texts, targets, sources = some.for_rewards
        hashes[f"{prefix}prompts"] = sha256_of(
            "\n".join(lines or []).encode() for lines in (texts, some.kinds)
        )
        hashes[f"{prefix}targets"] = sha256_of(picture.tobytes() for picture in targets or [])
        hashes[f"{prefix}sources"] = sha256_of(picture.tobytes() for picture in sources or [])
    asked = lambda some: [
        (text, source and source.image.tobytes()) for text, source in some.with_sources()
    ]
    if seen := len(set(asked(prompts)) & set(asked(held_out))):
        print(f"warning: {seen} of the {len(held_out)} held-out prompts are trained on, too")
    if settings.resume is not None:
        *_, began = checkpoints.read_state(Path(settings.resume))
        if changed := [name for name in hashes if hashes[name] != began[name]]:
            named = ", ".join(
                f"--{name.replace('_', '-')} {getattr(settings, name)}" for name in changed
            )
            raise UserError(
                f"{settings.resume} began with another {named}: put it back as it was, or start anew "
                f"with what was learned: --adapter {settings.resume}"
            )
    return prompts, held_out, hashes


def sha256_of(parts):
    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def load_data(settings, prompts, held_out):
    """The prompts with their rewards, which load before the 35 GB of model."""
    rewards = load_rewards("reward", settings, [prompts])
    for one, other in ((prompts, held_out), (held_out, prompts)):
        if one.targets is None and other.targets is not None:  # likeness does not apply there
            one.targets = [None] * len(one.texts)
    judges = (
        {}
        if settings.eval_reward in ("none", "")
        else load_rewards("eval_reward", settings, [held_out, prompts])
    )
    return Data(prompts, held_out, rewards, judges)


def load_rewards(flag, settings, files):
    """The rewards that a flag names, tried on blank pictures for the first prompt of each of
    `files`, all Prompts.

    What cannot work fails now, not in an hour.
    """
    print(f"loading --{flag.replace('_', '-')} {getattr(settings, flag)}", flush=True)
    blank = [Image.new("RGB", (settings.width, settings.height))] * 2
    try:
        rewards = parse_rewards(getattr(settings, flag))
        for prompts in files:
            score(rewards, blank, *prompts.take([0]).for_rewards)
    except (ValueError, torch.OutOfMemoryError) as error:
        tried = " (tried on two blank pictures)" if isinstance(error, RewardError) else ""
        raise UserError(
            f"--{flag.replace('_', '-')}: {str(error).strip().splitlines()[0]}{tried}"
        ) from None
    texts = files[0].texts
    chinese = sum(CHINESE.search(text) is not None for text in texts)
    for name, (function, _) in rewards.items():
        if type(function) in (
            Vqa,
            Text,
        ):  # the questions of Edit, an heir of Vqa, are the same for all
            known = [
                quoted(text) if type(function) is Text else text.strip() in function.questions
                for text in texts
            ]
            what = "words to read" if type(function) is Text else "questions"
            print(
                f"{short_name(name)}: {what} for {sum(map(bool, known))} of {len(texts)} prompts",
                flush=True,
            )
        if chinese and not getattr(function, "reads_chinese", True):
            print(
                f"{short_name(name)}: no reward for {chinese} of {len(texts)} prompts, which are Chinese",
                flush=True,
            )
    return rewards


def readable_loading(model):
    return readable(f"load {model}", f"give --model a folder with a GLM-Image pipeline, or {TINY}")
