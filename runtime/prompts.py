"""Files of prompts, and folders of pictures that some rewards compare with."""

import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from runtime import UserError

LONGEST_PROMPT = 4096  # characters: all prompts of a step take as much memory and time as its longest


@dataclass
class Prompts:
    """Prompts, and for each a picture that some rewards compare with (or None), or None if there are no such."""

    texts: list
    targets: list | None

    def take(self, rows):
        return [self.texts[i] for i in rows], self.targets and [self.targets[i] for i in rows]


def read_prompts(path, folder):
    """The prompts in a file, with the target pictures in a folder, unless it is None or "none"."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts file {path}: {error}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write one a line")
    if (longest := max(map(len, prompts))) > LONGEST_PROMPT:
        raise UserError(f"the prompts file {path} has a prompt of {longest:,} characters; {LONGEST_PROMPT:,} at most")
    if folder in (None, "none", ""):
        return Prompts(prompts, None)
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"the folder of target pictures {folder} does not exist")
    files = [f for f in folder.iterdir() if f.suffix.lower() in Image.registered_extensions()]
    files.sort(key=lambda f: [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", f.name)])
    if len(files) != len(prompts):
        raise UserError(f"{folder} has {len(files)} pictures for {len(prompts)} prompts; give one a prompt, by line")
    try:
        return Prompts(prompts, [Image.open(file := each).convert("RGB") for each in files])
    except OSError as error:
        raise UserError(f"the target picture {file} cannot be opened: {error}") from None
