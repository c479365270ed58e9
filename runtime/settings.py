"""The settings of a run: a flag for each, with its default, its help and its range."""

import argparse
import json
import math
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch

from grpo import GRPOSettings
from rewards import REWARDS, UserError, own_files, split_spec
from runtime import checkpoints, ranks
from runtime.checkpoints import ROOT
from runtime.errors import readable
from runtime.record import counted

TINY = str(ROOT / "tiny-glm-image")
RELEASE = "zai-org/GLM-Image"


def flag(default, help, *, group=None, may_change=False, is_path=False, **limits):
    """A field of Settings, and a flag. The field's type is that of a value on the command line.

    default: None where nothing is given. group: the heading that begins here in --help. may_change:
    a resumed run may have another value. is_path: a file or folder that a run reads. It is also
    found from the project's folder; and a resumed run may name another place, for what it holds is
    compared. limits: at_least, above, at_most.
    """
    about = {"group": group, "may_change": may_change, "is_path": is_path, "limits": limits}
    return field(default=default, metadata={"help": help, **about})


@dataclass(kw_only=True)
class Settings:
    """The settings of train.py. The defaults here are those for GLM-Image.

    While it runs, only runtime/gpu.py changes any: base by what fits, micro_batch_size by what
    does not.

    A model's folder may hold defaults.json with others: tiny-glm-image does. Scripts in examples/
    add settings of their own.
    """

    script = "train.py"
    section = None  # of defaults.json: values that come before its "usual" ones
    overrides: ClassVar[dict] = {}  # {setting: another default for GLM-Image}
    # What grpo.py reads beside these flags: a Settings stands in for GRPOSettings.
    end_ids = GRPOSettings.end_ids
    max_grad_norm = GRPOSettings.max_grad_norm

    model: str = flag(
        None,
        "folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)",
        group="model and data",
    )
    adapter: str = flag(
        None,
        "start from the adapters in this folder: of a run, of a checkpoint, or a published one; "
        "with --steps 0 only evaluate them",
        is_path=True,
    )
    prompts: str = flag("prompts/train.txt", "text file, one prompt per line", is_path=True)
    targets: str = flag(
        None,
        "folder with one picture per prompt, sorted by name; or my_file.py:function, which draws "
        "them",
        is_path=True,
    )
    reward: str = flag(
        "pickscore:1,clip:1",
        f"NAME[=FOLDER][:WEIGHT],... with NAME one of {', '.join(REWARDS)}, or my_file.py:function,"
        " which runs that file; FOLDER: the model's files, in place of a download",
    )
    combine: Literal["sum", "zscore"] = flag(
        None, "add rewards, or their z-scores (default: zscore for several)"
    )

    group_size: int = flag(
        4,
        "pictures per prompt, which are compared with one another",
        group="the algorithm",
        at_least=2,
    )
    prompts_per_step: int = flag(4, "prompts per step, on each GPU", at_least=1)
    steps: int = flag(200, "training steps; 0 evaluates only", may_change=True, at_least=0)
    iterations: int = flag(
        1,
        "optimiser steps on each step's pictures; ratios are clipped only above 1",
        at_least=1,
    )
    lr: float = flag(2e-5, "AdamW's learning rate", above=0)
    warmup_steps: int = flag(10, "steps over which the learning rate rises", at_least=0)
    clip_range: float = flag(0.2, "how far a ratio may leave 1 before its gradient is cut", above=0)
    kl_coef: float = flag(0.01, "weight of the KL from the model before training", at_least=0)
    lora_rank: int = flag(
        16, "rank of a new adapter; its alpha is twice that; --adapter has its own", at_least=1
    )
    seed: int = flag(
        0, "fixes the order of prompts, the samples and the noise", at_least=0, at_most=2**32 - 1
    )

    temperature: float = flag(
        0.9,
        "divides the logits, in sampling and in recomputing log-probs",
        group="pictures",
        above=0,
    )
    top_p: float = flag(
        0.75, "sample from the likeliest codes that make up this share", above=0, at_most=1
    )
    height: int = flag(1024, "height of the pictures in pixels, a multiple of 32", at_least=1)
    width: int = flag(1024, "width of the pictures in pixels, a multiple of 32", at_least=1)
    decode_steps: int = flag(12, "denoising steps of the decoder", at_least=1)
    guidance_scale: float = flag(1.5, "decoder's guidance; above 1 doubles its cost", at_least=1)

    eval_prompts: str = flag(
        "prompts/heldout.txt",
        "prompts that are never trained on, one per line",
        group="evaluation, before and after",
        is_path=True,
    )
    eval_targets: str = flag(None, "folder with one picture per held-out prompt", is_path=True)
    eval_reward: str = flag(
        "hps,variety",
        "rewards that are only reported, never trained on; if the first says 1 or 0, "
        "before-after.png has a red frame where it is 0; none: no such reward",
    )
    eval_count: int = flag(
        8,
        "prompts per evaluation from each of the training and held-out sets, evenly over types",
        at_least=1,
    )
    eval_every: int = flag(
        50, "steps between evaluations; 0: before and after only", may_change=True, at_least=0
    )
    eval_decode_steps: int = flag(30, "denoising steps in an evaluation", at_least=1)
    eval_guidance_scale: float = flag(1.5, "decoder's guidance in an evaluation", at_least=1)

    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto",
        "where the models are; auto: on the GPU, if there is one",
        group="memory and speed",
        may_change=True,
    )
    base: Literal["auto", "bfloat16", "int8"] = flag(
        "auto",
        "frozen weights: bfloat16 (on a CPU float32), or int8 for half the memory; auto: int8 if "
        "the largest model does not fit otherwise",
    )
    micro_batch_size: int = flag(
        4,
        "sequences per pass of the update, at most a group, and pictures painted at a time; "
        "halved where GPU memory runs out",
        may_change=True,
        at_least=1,
    )
    offload: Literal["auto", "yes", "no"] = flag(
        "auto",
        "policy and decoder take turns on the GPU; auto: if they do not fit together",
        may_change=True,
    )

    out: str = flag(
        None,
        "folder for everything the run leaves (default: the next free runs/N)",
        group="what a run leaves",
    )
    resume: str = flag(
        None, "continue the run in this folder from its newest checkpoint", may_change=True
    )
    save_every: int = flag(20, "steps between checkpoints", may_change=True, at_least=1)

    def __post_init__(self):
        """Fills in what follows from other settings; refuses what cannot work."""
        self.model = found(self.model)
        for each in fields(self):
            check_range(option(each.name), getattr(self, each.name), each.metadata["limits"])
            if each.metadata["is_path"]:
                setattr(self, each.name, found(getattr(self, each.name)))
        if self.height % 32 or self.width % 32:
            size = f"{self.height} and {self.width}"
            raise UserError(f"--height and --width must be multiples of 32, got {size}")
        weights = split_spec(self.reward)
        if not any(weights.values()):
            raise UserError(f"--reward {self.reward}: no weight above 0, so nothing can be learned")
        if self.combine is None:
            self.combine = "zscore" if len(weights) > 1 else "sum"

    def for_evaluation(self):
        """As the model is used after training."""
        own = copy(self)  # not replace(), which would check these as settings of a step
        own.decode_steps, own.guidance_scale = self.eval_decode_steps, self.eval_guidance_scale
        return own


def check_range(name, value, limits):
    """Refuses a number beyond one of its limits, NaN and infinity."""
    if value is None or not limits:
        return
    low, high = limits.get("at_least", -math.inf), limits.get("at_most", math.inf)
    inside = low <= value <= high and value > limits.get("above", -math.inf)
    if not inside or not math.isfinite(value):
        words = [f"{word.replace('_', ' ')} {limit}" for word, limit in limits.items()]
        raise UserError(f"{name}: must be {' and '.join(words)}, got {value}")


def default_model():
    """GLM-Image on a GPU that can train it, else the tiny model."""
    if torch.cuda.is_available():
        if not (too_old := ranks.gpu_without_bfloat16()):
            return RELEASE
        print(f"warning: {too_old} has no bfloat16: training the tiny model, on the CPU")
    return TINY


def found(path):
    """What is named from this project's folder is found from any other, too."""
    elsewhere = path and not Path(path).exists() and (ROOT / path).exists()
    return str(ROOT / path) if elsewhere else path


# ---- from the command line -----------------------------------------------------------------------


def option(name):
    return f"--{name.replace('_', '-')}"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, as for any error that the user can fix."""
        raise UserError(message.removeprefix("argument "))


def build_parser(kind=Settings):
    """The fields of Settings, or of a class made from it, as flags.

    What it parses are the flags that were given, and no others.
    """
    parser = Parser(
        description="Train GLM-Image with GRPO, or a tiny GLM-Image on a CPU. See README.md.",
        usage=f"python {kind.script} [--FLAG VALUE ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    tiny = usual_settings(TINY, kind)
    for each in fields(kind):
        words = each.metadata["help"]
        default = kind.overrides.get(each.name, each.default)
        if tiny.get(each.name, default) != default:
            of_release = "" if default is None else f", {default} for GLM-Image"
            default = f"{tiny[each.name]} for tiny{of_release}"
        if default is not None:
            words += f" (default: {default})"
        if each.metadata["group"]:
            group = parser.add_argument_group(each.metadata["group"])
        group.add_argument(option(each.name), help=words, **argument_of(each.type))
    return parser


def argument_of(hint):
    """What argparse is told of a type: a number or text, or one of some words."""
    if words := get_args(hint):
        return {"choices": words, "metavar": "|".join(words)}
    return {"type": hint, "metavar": hint.__name__.upper()}


def read_defaults(model):
    """What defaults.json in the model's folder holds; nothing where there is none.

    {"usual": {setting: value}, a section: what comes before the usual, "pixels": the least and the
    most that the model was trained on}.
    """
    file = Path(model) / "defaults.json"
    if not file.is_file():
        return {}
    with readable(f"read {file}"):
        return json.loads(file.read_text())


def usual_settings(model, kind):
    """{setting: value} without flags, as far as the model's folder says; see Settings."""
    defaults = read_defaults(model)
    usual = kind.overrides | defaults.get("usual", {}) | defaults.get(kind.section, {})
    for name in usual.keys() - {each.name for each in fields(kind)}:
        raise UserError(f"{Path(model, 'defaults.json')}: there is no setting {name!r}")
    return usual


def code_in(settings, given):
    """As flags, the settings that run a file outside tiny-glm-image/, and are not among the given.

    Both are {name: value}.
    """
    flags = []
    for name in settings.keys() - given.keys():
        value = str(settings[name])
        files = own_files(value).values()
        if not all(file.resolve().is_relative_to(TINY) for file in files):
            flags.append(f"{option(name)} {value}")
    return " ".join(sorted(flags))


def parse_settings(arguments=None, kind=Settings):
    """The Settings of a command line.

    Its flags come before the settings of the run that it resumes, or before the model's defaults.
    kind: the class, in examples/ another than Settings.
    """
    given = vars(build_parser(kind).parse_args(arguments))
    if "resume" in given:
        return kind(**resumed(given, kind))
    model = found(given.get("model")) or default_model()
    usual = usual_settings(model, kind) | given | {"model": model}
    if code := code_in(usual, given):
        raise UserError(f"{model}/defaults.json runs code: if you trust it, give {code}")
    settings = kind(**usual)
    least, most = read_defaults(model).get("pixels", (2**20, 2**22))  # 1024x1024 to 2048x2048
    pixels = settings.height * settings.width
    if not least <= pixels <= most:
        sizes = f"{least:,} to {most:,}" if least < most else f"{least:,}"
        print(f"warning: trained on {sizes} pixels per picture; this run paints {pixels:,}")
    return settings


def resumed(given, kind):
    """{name: value} of the run in --resume, and the flags that do not change what it computes."""
    out = given["resume"]
    state = checkpoints.read_state(Path(out))
    before = state["settings"]
    about = {each.name: each.metadata for each in fields(kind)}
    if before.keys() != about.keys():
        hint = f"start a new run from its adapter: --adapter {out}"
        raise UserError(f"{out} was made by another script or version; {hint}")
    differ = []
    for name, value in sorted(checkpoints.shortened(given).items()):
        fixed = not (about[name]["may_change"] or about[name]["is_path"])
        if fixed and value != before[name]:
            differ.append(f"{option(name)} {value} (was {before[name]})")
    if differ:
        raise UserError(f"a resumed run keeps its settings; different here: {', '.join(differ)}")
    if state["ranks"] != ranks.count():  # the prompts of a step would be others
        raise UserError(f"{out} began with {state['ranks']} processes: start as many by torchrun")
    if code := code_in(before, given):
        print(f"{out} runs code, as when it began: {code}")
    return before | given


def print_start(settings, out, device, num_prompts, num_held_out):
    """What runs where, and how much there is to do."""
    name = f"CPU in float32, {counted(torch.get_num_threads(), 'thread')} (OMP_NUM_THREADS)"
    name = torch.cuda.get_device_name() if device.type == "cuda" else name
    print(f"device: {name}\nmodel: {settings.model}; --model FOLDER_OR_ID chooses another")
    groups = counted(settings.prompts_per_step * ranks.count(), "group")
    prompts = f"{counted(num_prompts, 'prompt')}, {num_held_out} held out"
    print(f"a step: {groups} of {settings.group_size}; {prompts}; output folder: {out}", flush=True)
