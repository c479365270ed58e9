"""The command line: every setting with its default, the folder of a run, what a start prints."""

import argparse
import json
import math
import os
import re
import shlex
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from itertools import count
from pathlib import Path

import torch

from rewards import REWARDS, split_spec
from runtime import ROOT, UserError, checkpoints, counted, ranks, readable

TINY = str(ROOT / "tiny-glm-image")
RELEASE = "zai-org/GLM-Image"

# Each flag: its name, type and, if it is the same for all models, default; below that its help.
FLAGS = """
model and data
  model text
      folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)
  adapter text
      start from the adapters of the run in this folder; with --steps 0 only evaluate them
  prompts text
      text file, one prompt per line
  order shuffled|file = shuffled
      order of prompts: shuffled each epoch, or the file's
  targets text
      folder with one picture per prompt, sorted by name
  sources text
      to train edits: folder with the picture that each prompt changes, sorted by name
  reward text
      NAME[=FOLDER][:WEIGHT],... with NAME one of REWARDS, or my_file.py:function, which runs that
      file; FOLDER: the model's files, in place of a download
  combine sum|zscore
      add rewards, or their z-scores (default: zscore for several)

the algorithm
  train codes|decoder|both = codes
      what learns: codes (the policy that writes them), decoder or both
  group_size int [2, inf) = 4
      code sequences per prompt; paintings with --train decoder
  prompts_per_step int [1, inf)
      prompts per step, on each GPU
  steps int [0, inf)
      training steps; 0 evaluates only
  iterations int [1, inf) = 1
      optimiser steps on each step's pictures; ratios are clipped only above 1
  lr float (0, inf)
      AdamW's learning rate
  decoder_lr float (0, inf)
      AdamW's learning rate for the decoder's adapter
  warmup_steps int [0, inf)
      steps over which the learning rates rise
  paintings int [2, inf)
      with --train both, how often each code sequence is painted
  noise_level float (0, 1]
      if the decoder learns: share of a step's noise drawn anew
  clip_range float (0, inf) = 0.2
      how far a ratio may leave 1 before its gradient is cut
  kl_coef float [0, inf)
      weight of the KL from the model before training
  lora_rank int [1, inf) = 16
      rank of the adapter
  lora_alpha int [1, inf)
      the adapter's update is scaled by this over the rank (default: twice the rank)
  seed int [0, 4294967295] = 0
      fixes the order of prompts, the samples and the noise

pictures
  temperature float (0, inf)
      divides the logits, in sampling and in recomputing log-probs
  top_p float (0, 1]
      sample from the likeliest codes that make up this share
  height int [1, inf)
      height of the pictures in pixels, a multiple of 32
  width int [1, inf)
      width of the pictures in pixels, a multiple of 32
  decode_steps int [1, inf)
      denoising steps of the decoder
  guidance_scale float [1, inf)
      decoder's guidance; above 1 doubles its cost

evaluation, before and after
  eval_prompts text
      prompts that are never trained on, one per line
  eval_targets text
      folder with one picture per held-out prompt
  eval_sources text
      folder with the picture that each held-out prompt changes
  eval_reward text
      rewards that are only reported, never trained on; none: no such reward
  eval_count int [1, inf)
      prompts per evaluation, of training and held out each, evenly over kinds
  eval_every int [0, inf)
      steps between evaluations; 0: before and after only
  eval_decode_steps int [1, inf)
      denoising steps in an evaluation
  eval_guidance_scale float [1, inf)
      decoder's guidance in an evaluation

memory and speed
  base bfloat16|int8 = bfloat16
      frozen weights: bfloat16 (on a CPU float32), or int8 for half the memory
  micro_batch_size int [1, inf) or auto = auto
      sequences per pass, pictures painted at a time; auto: 4 on a CPU, else the most of 8, 4, 2, 1
      that fit
  offload auto|yes|no = auto
      policy and decoder take turns on the GPU; auto: if they have to
  compile auto|yes|no = auto
      compile the step of sampling; auto: on a GPU (a CUDA graph in any case)

what a run leaves
  out text
      folder for everything the run leaves (default: the next free runs/N)
  resume text
      go on with the run in this folder, from its newest checkpoint
  save_every int [1, inf) = 20
      steps between checkpoints
  tracker none|tensorboard|wandb|trackio = none
      also log metrics there, and pictures (not to trackio)
"""  # Not --log, which torchrun would take for an abbreviation of its own --log-dir.
FILES = {"adapter", "prompts", "targets", "sources", "eval_prompts", "eval_targets", "eval_sources"}
# A resumed run may change these: what alters results by rounding at most; and where files lie,
# whose contents count.
MAY_CHANGE = FILES | {"micro_batch_size", "offload", "compile", "steps", "out", "resume"}
MAY_CHANGE |= {"save_every", "eval_every", "tracker"}
# A flag that was given and cannot act is refused.
IDLE = {
    "codes": ("decoder_lr", "noise_level", "paintings"),
    "decoder": ("lr", "paintings"),
    "both": (),
}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, as for any error that the user can fix."""
        raise UserError(message.removeprefix("argument "))


def number(kind, interval, *words):
    """A type for argparse: a number in an interval such as "(0, 1]", or one of some words."""
    low, high = map(float, interval[1:-1].split(","))

    def parse(text):
        if text in words:
            return text
        value = kind(text)
        if not (low <= value <= high and value < math.inf and (value > low or interval[0] == "[")):
            raise argparse.ArgumentTypeError(f"must be in {interval}, got {value}")
        return value

    parse.__name__ = " or ".join([kind.__name__, *words])
    return parse


def type_of(words):
    """What argparse is told of a type in FLAGS."""
    if "|" in words:
        return {"choices": words.split("|"), "metavar": words}
    kind, _, rest = words.partition(" ")
    interval, *others = rest.split(" or ")
    parse = {"text": str, "int": int, "float": float}[kind]
    parse = number(parse, interval, *others) if rest else parse
    return {"type": parse, "metavar": parse.__name__.upper()}


def build_parser():
    """The parser of FLAGS."""
    parser = Parser(
        description="Train GLM-Image with GRPO, or a tiny GLM-Image on a CPU. See README.md.",
        usage="python train.py [--FLAG VALUE ...]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiny, release = (each["decoder"] | each["usual"] for each in map(defaults_of, (TINY, RELEASE)))
    by_model = {name: f"{tiny[name]} for tiny, {release[name]} for GLM-Image" for name in release}
    by_model |= {name: tiny[name] for name in release if tiny[name] == release[name]}
    for part in FLAGS.strip().split("\n\n"):
        title, *flags = re.split(r"\n  (?! )", part)
        group = parser.add_argument_group(title)
        for flag in flags:
            spec, *lines = flag.split("\n")
            name, kind, default = re.fullmatch(r"(\w+) (.*?)(?: = (.*))?", spec).groups()
            words = " ".join(map(str.strip, lines)).replace("REWARDS", ", ".join(REWARDS))
            if shown := default or by_model.get(name):
                words += f" (default: {shown})"
            option = "--" + name.replace("_", "-")
            group.add_argument(option, default=default, help=words, **type_of(kind))
    return parser


def defaults_of(model):
    """What a run with this model takes where no flag is given.

    {"usual": {setting: value}, "edits" and "decoder": what then comes before the usual, "pixels":
    the least and the most that the model was trained on}, from defaults.json in its folder; of a
    model without one, from that in glm_image.
    """
    file = Path(model) / "defaults.json"
    file = file if file.is_file() else ROOT / "glm_image" / "defaults.json"
    with readable(f"read {file}"):
        return json.loads(file.read_text())


def parse_settings(arguments=None):
    """The command line, completed from the run that it resumes, or by the model's defaults.

    From here on it is only read, but for the size of micro-batches on a GPU, see plan in gpu.py.
    """
    parser = build_parser()
    settings = parser.parse_args(arguments)
    if settings.resume is not None:
        settings = resumed_settings(parser, arguments, settings)
    else:
        complete(settings)
    # What is named from this project's folder is found from any other, too.
    for name in FILES | {"model"}:
        path = getattr(settings, name)
        if path and not Path(path).exists() and (ROOT / path).exists():
            setattr(settings, name, str(ROOT / path))
    weights = [weight for _, weight in split_spec(settings.reward)]
    if weights and not any(weights):
        raise UserError(f"--reward {settings.reward}: all weights are 0, nothing can be learned")
    if settings.combine is None:
        settings.combine = "zscore" if len(weights) > 1 else "sum"
    if settings.micro_batch_size == "auto" and not torch.cuda.is_available():
        settings.micro_batch_size = 4
    return settings


def part_of(settings, kind):
    """A dataclass, each of its fields from the setting of that name if there is one."""
    names = [field.name for field in fields(kind) if hasattr(settings, field.name)]
    return kind(**{name: getattr(settings, name) for name in names})


def groups_of(settings):
    """G code sequences per prompt, compared with one another; K paintings of each, likewise."""
    sequences = 1 if settings.train == "decoder" else settings.group_size
    paintings = {"codes": 1, "decoder": settings.group_size, "both": settings.paintings}
    return sequences, paintings[settings.train]


def complete(settings):
    """Fill in the model's defaults; refuse flags that do not go together."""
    sources = Path(TINY, "sources")
    own_sources = settings.sources is not None and Path(settings.sources).resolve() == sources
    if settings.model is None:
        settings.model = RELEASE if torch.cuda.is_available() and not own_sources else TINY
        unusable = Path("/dev/nvidia0").exists() and not torch.cuda.is_available()
        if unusable and "CUDA_VISIBLE_DEVICES" not in os.environ:
            print("warning: torch cannot use the GPU (an old driver?): this trains the tiny model")
    for name in IDLE[settings.train]:
        if getattr(settings, name) is not None:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} has no effect with --train {settings.train}: leave it out")
    of_model = defaults_of(settings.model)
    defaults = of_model["usual"]
    if settings.sources or settings.eval_sources:
        if settings.train != "codes":
            raise UserError("with --sources only the codes can learn: leave out --train")
        edits = {} if "sources" in of_model["edits"] else of_model["edits"]
        if own_sources and settings.prompts is None:
            edits = edits | defaults_of(TINY)["edits"]
        needed = ("sources", "prompts", "eval_sources", "eval_prompts")
        if any(getattr(settings, name) is None and name not in edits for name in needed):
            raise UserError("edits need --sources, --prompts, --eval-sources and --eval-prompts")
        defaults = defaults | edits
    if settings.train != "codes":
        defaults = defaults | of_model["decoder"]
    for name, value in defaults.items():
        if getattr(settings, name) is None and name not in IDLE[settings.train]:
            setattr(settings, name, value)
    if settings.train != "codes" and settings.decode_steps == 1:
        raise UserError("with --train decoder or both --decode-steps has to be 2 or more")
    height, width = settings.height, settings.width
    if height % 32 or width % 32:
        raise UserError(f"--height and --width must be multiples of 32, got {height} and {width}")
    least, most = of_model["pixels"]
    if not least <= height * width <= most:
        sizes = f"{least:,} to {most:,}" if least < most else f"{least:,}"
        print(f"warning: it was trained on pictures of {sizes} pixels, this is {height * width:,}")


def resumed_settings(parser, arguments, flags):
    """The settings of the run in `flags.resume`, with flags that do not change what it computes."""
    out = Path(flags.resume)
    if flags.out is not None and Path(flags.out) != out:
        raise UserError("--resume names the folder of the run already: leave out --out")
    step, num_ranks, before, _ = checkpoints.read_state(out)
    # An earlier version kept it, and counted iterations in the warm-up.
    if before.pop("sequences", None) and before["iterations"] > 1:
        raise UserError(f"an earlier version made {out}: start anew, with --adapter {out}")
    # Where there is no flag, the saved value.
    settings = parser.parse_args(arguments, argparse.Namespace(**before))
    settings.out = settings.resume = str(out)
    now = checkpoints.saved(settings)
    differ = sorted(name for name in before.keys() - MAY_CHANGE if now[name] != before[name])
    if differ:
        flags = [f"--{name.replace('_', '-')} {now[name]} (was {before[name]})" for name in differ]
        raise UserError(f"a resumed run keeps its settings, but these differ: {', '.join(flags)}")
    if num_ranks != ranks.count():  # the prompts of a step would be others
        made = f"{out} was made by {num_ranks} processes, not {ranks.count()}"
        raise UserError(f"{made}: start that many with torchrun")
    if settings.steps < step:
        raise UserError(f"--steps {settings.steps} is less than the {step} steps already made")
    return settings


@contextmanager
def claim_folder(resume, name):
    """The run's folder, taken before anything loads, so that two runs never share one.

    resume, name: --resume and --out. Left empty it is removed.
    """
    with ExitStack() as locks:
        claimed = _claim(resume, name, locks) if ranks.rank() == 0 else None
        out, reason = ranks.gather(claimed)[0]
        if reason is not None:
            raise UserError(reason)
        try:
            yield out
        finally:
            if ranks.rank() == 0:
                with suppress(OSError):  # runs/ goes too, if this was the first
                    if [file.name for file in out.iterdir()] == ["settings.json"]:
                        (out / "settings.json").unlink()
                        out.rmdir()
                        out.parent.rmdir()


def _claim(resume, name, locks):
    """(folder, None), or (folder, why it cannot be had).

    Creating settings.json claims a new folder. `locks` keeps that file open and locked, so that
    nothing else resumes the run; a kill ends the lock.
    """
    names = [resume or name] if resume or name else map("runs/{}".format, count(1))
    for out in map(Path, names):
        try:
            if resume is None:
                out.mkdir(parents=True, exist_ok=name is not None)
                if checkpoints.find(out):
                    again = f"--resume {shlex.quote(str(out))}"
                    return out, f"{out} already holds a run; choose another --out, or {again}"
            file = (out / "settings.json").open("x" if resume is None else "a")
            locks.enter_context(file)
            busy = f"another process is still at work on the run in {out}: wait for it, or stop it"
            return out, busy if _locked(file) else None
        except FileExistsError:
            if name is not None:
                what = "already holds a run" if out.is_dir() else "is no folder"
                return out, f"{out} {what}; choose another --out, or delete it"
        except OSError as error:
            return out, f"cannot write to {out}: {error.strerror or error}"


def _locked(file):
    """Whether another process has locked it. If not, this one does.

    On Windows, and on disks that have no locks, nothing is locked.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        return isinstance(error, BlockingIOError)


def print_start(settings, out, device, num_prompts, num_held_out):
    """What runs where, with which settings, and how much there is to do."""
    name = f"CPU in float32, {counted(torch.get_num_threads(), 'thread')} (OMP_NUM_THREADS)"
    name = torch.cuda.get_device_name() if device.type == "cuda" else name
    print(f"device: {name}\nmodel: {settings.model}; --model FOLDER_OR_ID chooses another")
    usual = parse_settings(["--model", settings.model, "--train", settings.train])
    usual = checkpoints.saved(usual) | {"train": "codes"}
    shown = {
        name: value for name, value in checkpoints.saved(settings).items() if value is not None
    }
    del shown["model"]
    if device.type == "cpu" and settings.base == "bfloat16":
        del shown["base"]
    for title, default in {"settings:": False, "by default:": True}.items():
        pairs = [pair for pair in shown.items() if (pair[1] == usual[pair[0]]) == default]
        print(title, *(f"{name}={value}" for name, value in pairs))
    sequences, paintings = groups_of(settings)
    a_step = settings.prompts_per_step * ranks.count() * sequences * paintings
    judged = sum(min(settings.eval_count, prompts) for prompts in (num_prompts, num_held_out))
    several = f" on {ranks.count()} processes" if ranks.count() > 1 else ""
    print(f"a step: {a_step} pictures{several}; an evaluation: {judged * settings.group_size}")
    prompts = f"{counted(num_prompts, 'prompt')}, {num_held_out} held out"
    print(f"{prompts}; what the run leaves goes to {out}", flush=True)
