"""The settings of a run: each is a flag, and the comment above it is the flag's help."""

import argparse
import inspect
import json
import math
import os
import sys
import textwrap
from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch

from glm_image.model import RELEASE, TINY, is_tiny
from grpo import GRPOSettings
from inputs import ROOT, Own, UserError, as_own, readable, script_name
from rewards import REWARDS
from runtime.folder import OF_RUN
from runtime.terminal import option, say


@dataclass(kw_only=True)
class Settings(GRPOSettings):
    """The settings of train.py; the defaults are GLM-Image's.

    The settings of the algorithm in grpo.py are flags, too. Scripts in examples/ add more settings.
    During a run only `micro_batch_size` changes: devices/memory.py halves it when memory runs out.
    """

    # ---- model and data

    # folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)
    model: str = None
    # start from the adapters in this folder: of a run, of a checkpoint, or a published one; with
    # --steps 0 only evaluate them
    adapter: str = None
    # text file, one prompt per line; or .jsonl, with columns for rewards
    prompts: str = Own("prompts/train.txt")
    # folder with a picture per prompt, sorted by name, or with those that rows of a .jsonl name as
    # "target" (default: the file's folder); or my_file.py:function, which draws them
    targets: str = None
    # NAME[=FOLDER][:WEIGHT],... with NAME one of REWARDS, see below, or my_file.py:function, which
    # runs that file; FOLDER: the model's files, in place of a download
    reward: str = "pickscore:1,clip:1"
    # add rewards, or their z-scores (default: zscore for several)
    combine: Literal["sum", "zscore"] = None

    # ---- the algorithm

    # pictures per prompt, which are compared with one another
    group_size: int = 4
    # prompts per step, on each GPU
    prompts_per_step: int = 4
    # order of the prompts: shuffled in each epoch, or the file's, as for a curriculum
    order: Literal["shuffled", "file"] = "shuffled"
    # training steps; 0 only evaluates
    steps: int = 200
    # AdamW's learning rate
    lr: float = 2e-5
    # steps over which the learning rate rises
    warmup_steps: int = 10
    # rank of a new adapter; its alpha is twice that; --adapter has its own
    lora_rank: int = 16
    # fixes the order of prompts, the samples and the noise
    seed: int = 0

    # Settings of grpo.py with another default. Their comments are there.

    kl_coef: float = 0.01
    temperature: float = 0.9
    top_p: float = 0.75

    # ---- pictures

    # height of the pictures in pixels, a multiple of 32
    height: int = 1024
    # width of the pictures in pixels, a multiple of 32
    width: int = 1024
    # denoising steps of the decoder
    decode_steps: int = 12
    # decoder's guidance; above 1 doubles its cost
    guidance_scale: float = 1.5
    # denoising steps with guidance, the first ones (default: all)
    guidance_steps: int = None

    # ---- evaluation, before and after

    # prompts that are never trained on, one per line
    eval_prompts: str = Own("prompts/heldout.txt")
    # the same of the held-out prompts
    eval_targets: str = None
    # rewards that are reported and never trained on; if the first only ever gives 0 or 1, pictures
    # with 0 get a red frame in before-after.png; none: no such reward
    eval_reward: str = "hps,variety"
    # held-out prompts per evaluation, evenly over types
    eval_count: int = 16
    # steps between evaluations; 0: before and after only
    eval_every: int = 50
    # denoising steps in an evaluation
    eval_decode_steps: int = 30
    # decoder's guidance in an evaluation
    eval_guidance_scale: float = 1.5

    # ---- memory and speed

    # where the models are; auto: on the GPU, if there is one
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # frozen weights: bfloat16 (on a CPU float32), or int8 for half the memory; auto: int8 if the
    # largest model does not fit otherwise
    base: Literal["auto", "bfloat16", "int8"] = "auto"
    # sequences per pass of the update, at most a group, and pictures painted at a time; halved
    # where GPU memory runs out
    micro_batch_size: int = 4
    # policy and decoder take turns on the GPU; auto: if they do not fit together
    offload: Literal["auto", "yes", "no"] = "auto"

    # ---- what a run leaves

    # folder for everything the run leaves (default: the next free runs/N)
    out: str = None
    # continue the run in this folder from its newest checkpoint
    resume: str = None
    # steps between checkpoints; a kill or Ctrl-C costs the steps since the last; checkpoints of
    # evaluated steps stay, of all others only the newest
    save_every: int = 1
    # send the numbers to a tracker, too
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"

    # Settings of grpo.py that are no flags.
    end_ids: ClassVar = GRPOSettings.end_ids
    max_grad_norm: ClassVar[float] = GRPOSettings.max_grad_norm

    # Other defaults for the tiny family, see is_tiny: a run of minutes on one CPU core.
    tiny: ClassVar[dict] = {
        "prompts": Own(f"{TINY}/prompts.txt"),
        # The tiny model's own judge: it needs no download.
        "reward": "facts",
        # 64 pictures take a few seconds, and make the gradient less noisy than 16 would.
        "prompts_per_step": 16,
        "steps": 10,
        # 50 times GLM-Image's, for a twentieth of its steps.
        "lr": 1e-3,
        # The rate rises over the whole run.
        "warmup_steps": 10,
        # 20 times GLM-Image's: the policy moves that much further. See docs/kl.md.
        "kl_coef": 0.2,
        # As the tiny model was trained. The release is deployed with 0.9 and 0.75.
        "temperature": 1.0,
        "top_p": 0.95,
        "height": 128,
        "width": 128,
        # Plain shapes need no more steps, and no guidance.
        "decode_steps": 6,
        "guidance_scale": 1.0,
        "eval_prompts": Own(f"{TINY}/heldout.txt"),
        "eval_reward": "correct,clean,variety",
        # All held-out prompts.
        "eval_count": 48,
        "eval_every": 5,
        "eval_decode_steps": 6,
        "eval_guidance_scale": 1.0,
        # Also beside a GPU, so that the README's digits appear everywhere.
        "device": "cpu",
    }

    def __post_init__(self):
        """Refuses what cannot work."""
        for name, value in vars(self).items():
            if isinstance(value, int | float):
                check_number(name, value)
        if self.height % 32 or self.width % 32:
            size = f"{self.height} and {self.width}"
            raise UserError(f"--height and --width must be multiples of 32, got {size}")
        if self.guidance_steps and self.guidance_scale <= 1:
            raise UserError("--guidance-steps needs a --guidance-scale above 1")

    @property
    def learned(self):
        """The names of the adapters that learn."""
        return ("adapter",)

    def not_default(self):
        """The names of settings that are not the defaults of the model."""
        usual = {each.name: each.default for each in fields(self)}
        usual |= self.tiny if is_tiny(self.model) else {}
        # A file of the same name in the working folder is a choice.
        told = lambda x: (x, isinstance(x, Own))
        return [name for name, x in usual.items() if told(x) != told(getattr(self, name))]

    def of_project(self):
        """The names of settings whose files are the project's, whatever the working folder has."""
        return [name for name, x in vars(self).items() if isinstance(x, Own)]

    def for_evaluation(self):
        """As the model is used after training."""
        settings = copy(self)  # not replace(), which would check these as settings of a step
        settings.decode_steps = self.eval_decode_steps
        settings.guidance_scale = self.eval_guidance_scale
        settings.guidance_steps = None
        return settings


# The least and the most that a number may be, here and in examples/. All others are above 0.
LIMITS = {
    "group_size": (2, math.inf),
    "paintings": (2, math.inf),
    "steps": (0, math.inf),
    "warmup_steps": (0, math.inf),
    "kl_coef": (0, math.inf),
    "eval_every": (0, math.inf),
    "seed": (0, 2**32 - 1),
    "top_p": (math.ulp(0), 1),
    "noise_level": (math.ulp(0), 1),
}


def check_number(name, value):
    least, most = LIMITS.get(name, (math.ulp(0), math.inf))
    if not least <= value <= most:
        words = f"at least {least}" if least != math.ulp(0) else "above 0"
        words += f" and at most {most}" if most < math.inf else ""
        raise UserError(f"{option(name)} must be {words}, got {value}")


# ---- from the command line -----------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, as for any error that the user can fix."""
        raise UserError(message.removeprefix("argument "))


def build_parser(kind=Settings):
    """The fields of Settings, or of a class made from it, as flags.

    What it parses are the flags that were given, and no others.
    """
    parser = Parser(
        description=sys.modules["__main__"].__doc__,  # of the script that takes these flags
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog=f"python {sys.argv[0]}",
        usage="%(prog)s [--FLAG VALUE ...]",
        epilog=textwrap.fill(f"REWARDS: {', '.join(REWARDS)}"),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    by_name = {each.name: each for each in fields(kind)}
    groups = {}
    for name, (heading, words) in read_comments(kind).items():
        default = release = by_name[name].default
        if kind.tiny.get(name, release) != release:
            of_release = "" if release is None else f", {release} for GLM-Image"
            default = f"{kind.tiny[name]} for tiny{of_release}"
        if default is not None:
            words += f" (default: {default})"
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        groups[heading].add_argument(option(name), help=words, **argument_of(by_name[name].type))
    words = "JSON file of settings, such as runs/1/settings.json, for a run like that; flags win"
    parser.add_argument("--config", help=words, metavar="FILE")
    return parser


def read_comments(kind):
    """{setting: (the heading it stands under, the comment above it)}.

    A class comes before the class that it extends, whose comment counts where it has none. A
    setting without any comment is no flag.
    """
    names = {each.name for each in fields(kind)}
    comments = {}
    for each in kind.__mro__[:-1]:  # without object
        heading, words = "the algorithm", []  # of grpo.py, which has no headings
        for line in map(str.strip, inspect.getsource(each).splitlines()):
            if line.startswith("# ---- "):
                heading = line.strip("# -")
            elif line.startswith("# "):
                words.append(line.removeprefix("# ").replace("%", "%%"))  # for argparse
            else:
                name = line.partition(":")[0]
                if words and name in names:
                    comments.setdefault(name, (heading, " ".join(words)))
                words = []
    return comments


def argument_of(hint):
    """What argparse is told of a type: a number or text, or one of some words."""
    if words := get_args(hint):
        return {"choices": words, "metavar": "|".join(words)}
    # Of --out=~/runs the shell leaves the ~ to the program.
    return {"type": os.path.expanduser if hint is str else hint, "metavar": hint.__name__.upper()}


# Settings that name files, which may be the project's.
FILES = {"model", "prompts", "targets", "sources", "eval_prompts", "eval_targets", "eval_sources"}


def parse_settings(arguments=None, kind=Settings, script=ROOT / "train.py"):
    """The Settings of a command line.

    Its flags come before the settings in --config, or in the folder of --resume, and these before
    the model's defaults. kind: the class, in examples/ another than Settings. script: its file.
    """
    parser = build_parser(kind)
    given = vars(parser.parse_args(arguments))
    if "resume" in given:
        if given.keys() & {"out", "config"}:
            raise UserError("--resume names the folder and its settings: leave out --out, --config")
        given["config"] = str(Path(given["resume"], "settings.json"))
    if config := given.pop("config", None):
        own = script_name(script)
        given = read_settings(config, parser, own, resumed="resume" in given) | given
    for prefix in ("", "eval_"):
        if f"{prefix}prompts" in given:  # the default targets are not theirs
            given = {f"{prefix}targets": None} | given
    given |= {name: as_own(given[name]) for name in FILES & given.keys() if given[name]}
    model = given.get("model") or (RELEASE if torch.cuda.is_available() else TINY)
    tiny = is_tiny(model)
    settings = kind(**(kind.tiny if tiny else {}) | given | {"model": model})
    least, most = (128**2, 128**2) if tiny else (1024**2, 2048**2)
    pixels = settings.height * settings.width
    if not least <= pixels <= most:
        sizes = f"{least:,}" if tiny else f"{least:,} to {most:,}"
        say(f"warning: trained on {sizes} pixels per picture; this run paints {pixels:,}")
    return settings


def read_settings(file, parser, own, resumed):
    """The settings in a JSON file, such as a run's settings.json, as if they were flags.

    own: the script that reads them. resumed: whether for that run itself, not for a run like it.
    """
    hint = '; --resume is the folder of a run, --config a file such as {"steps": 50, "lr": 1e-4}'
    with readable(f"read {file}", hint):
        values = dict(json.loads(Path(file).read_text("utf-8-sig")))
    if (script := values.get("script", own)) != own:
        raise UserError(f"{file} is of a run of {script}, not of {own}: give it to that")
    given = {name: x for name, x in values.items() if x is not None and name not in OF_RUN}
    if not resumed and "base" not in values.get("not_default", values):
        given.pop("base", None)  # what "auto" has become on that card
    with readable(f"use {file}"):
        found = vars(parser.parse_args([f"{option(name)}={x}" for name, x in given.items()]))
    of_project = found.keys() & {*values.get("of_project", ())}
    return found | {name: Own(found[name]) for name in of_project}
