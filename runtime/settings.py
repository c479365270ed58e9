"""The command line: every setting with its default, going on with a run, and what a start
prints."""

import argparse
import math
import os
import shlex
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import torch

from rewards import REWARDS, split_spec
from runtime import ROOT, UserError, checkpoints, ranks

TINY = str(ROOT / "tiny-glm-image")
CHECK = "tiny-glm-image/check.py"
RELEASE = "zai-org/GLM-Image"
# Defaults of a run that edits, with the tiny model's own sources and with the released model.
TINY_EDITS = {
    "prompts": f"{TINY}/edits.txt",
    "targets": f"{TINY}/edit-targets",
    "reward": "ssim:1,mse:1",
}
TINY_EDITS |= {
    "eval_prompts": f"{TINY}/heldout-edits.txt",
    "eval_targets": f"{TINY}/heldout-edit-targets",
}
TINY_EDITS |= {"eval_sources": f"{TINY}/heldout-sources", "lr": 2e-3, "warmup_steps": 0}
EDITS = {
    "reward": "edit:1,keep:0.2",
    "eval_reward": "aesthetic",
}  # the usual rewards would judge a wish as a caption
UPDATE = 3.3  # passes of the decoder that take as long as one of its training passes, estimated in docs/memory.md
FILES = {"adapter", "prompts", "targets", "sources", "eval_prompts", "eval_targets", "eval_sources"}
# A resumed run may change these: what alters results by rounding at most; and where files lie,
# whose contents count.
MAY_CHANGE = {
    "micro_batch_size",
    "offload",
    "compile",
    "steps",
    "save_every",
    "eval_every",
    "tracker",
    "out",
    "resume",
}
MAY_CHANGE |= FILES


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


def build_parser():
    """The parser, and {setting: (its default for tiny, for GLM-Image)} where they differ: see
    docs/settings.md."""
    layout = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "usage": "python train.py [--FLAG VALUE ...]",
    }
    about = "Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a laptop. See README.md."
    parser = Parser(description=about, allow_abbrev=False, **layout)
    by_model = {}
    count = number(int, "[1, inf)")
    positive = number(float, "(0, inf)")
    switch = ("auto", "yes", "no")

    def flag(name, kind, default, help, choices=None):
        """`default`: one for all models, a pair (tiny, GLM-Image), or None."""
        if isinstance(default, tuple):
            by_model[name] = default
            shown = [str(value).replace(f"{ROOT}/", "") for value in default]
            default = None
            help += f" (default: {shown[0]} for tiny, {shown[1]} for GLM-Image)"
        elif default is not None:
            help += f" (default: {default})"
        option = "--" + name.replace("_", "-")
        metavar = "|".join(choices) if choices else kind.__name__.upper()
        group.add_argument(
            option, type=kind, default=default, help=help, choices=choices, metavar=metavar
        )

    group = parser.add_argument_group("model and data")
    flag(
        "model",
        str,
        None,
        "folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)",
    )
    flag(
        "adapter",
        str,
        None,
        "start from the adapters of the run in this folder; with --steps 0 only evaluate them",
    )
    flag(
        "prompts",
        str,
        (f"{TINY}/prompts.txt", f"{ROOT}/prompts/train.txt"),
        "text file, one prompt per line",
    )
    flag(
        "order",
        str,
        "shuffled",
        "order of prompts: shuffled each epoch, or the file's",
        ("shuffled", "file"),
    )
    flag("targets", str, None, "folder with one picture per prompt, sorted by name")
    flag(
        "sources",
        str,
        None,
        "to train edits: folder with the picture that each prompt changes, sorted by name",
    )
    flag(
        "reward",
        str,
        (f"{CHECK}:facts", "pickscore:1,clip:1"),
        f"NAME[=FOLDER][:WEIGHT],... with NAME one of {', '.join(REWARDS)}, or my_file.py:function, which runs that "
        "file; FOLDER: the model's files, in place of a download",
    )
    flag(
        "combine",
        str,
        None,
        "add rewards, or their z-scores (default: zscore for several)",
        ("sum", "zscore"),
    )

    group = parser.add_argument_group("the algorithm")
    halves = ("codes", "decoder", "both")
    flag(
        "train",
        str,
        "codes",
        "what learns: codes (the policy that writes them), decoder or both",
        halves,
    )
    flag(
        "group_size",
        number(int, "[2, inf)"),
        4,
        "code sequences per prompt; paintings with --train decoder",
    )
    flag("prompts_per_step", count, (16, 4), "prompts per step, on each GPU")
    flag("steps", number(int, "[0, inf)"), (20, 200), "training steps; 0 evaluates only")
    flag(
        "iterations",
        count,
        1,
        "optimiser steps on each step's pictures; ratios are clipped only above 1",
    )
    flag("lr", positive, (5e-4, 2e-5), "AdamW's learning rate")
    flag("decoder_lr", positive, (1e-3, 1e-4), "AdamW's learning rate for the decoder's adapter")
    flag(
        "warmup_steps",
        number(int, "[0, inf)"),
        (20, 10),
        "optimiser steps over which the learning rates rise",
    )
    flag(
        "paintings",
        number(int, "[2, inf)"),
        4,
        "with --train both, how often each code sequence is painted",
    )
    flag(
        "noise_level",
        number(float, "(0, 1]"),
        0.7,
        "if the decoder learns: share of a step's noise drawn anew",
    )
    flag("clip_range", positive, 0.2, "how far a ratio may leave 1 before its gradient is cut")
    flag(
        "kl_coef",
        number(float, "[0, inf)"),
        (0.2, 0.01),
        "weight of the KL from the model before training",
    )
    flag("lora_rank", count, 16, "rank of the adapter")
    flag(
        "lora_alpha",
        count,
        None,
        "the adapter's update is scaled by this over the rank (default: twice the rank)",
    )
    flag(
        "seed",
        number(int, "[0, 4294967295]"),
        0,
        "fixes the order of prompts, the samples and the noise",
    )

    group = parser.add_argument_group("pictures")
    flag(
        "temperature", positive, (1.0, 0.9), "divides the logits, in sampling and in reading again"
    )
    flag(
        "top_p",
        number(float, "(0, 1]"),
        (0.95, 0.75),
        "sample from the likeliest codes that make up this share",
    )
    flag("height", count, (128, 1024), "height of the pictures in pixels, a multiple of 32")
    flag("width", count, (128, 1024), "width of the pictures in pixels, a multiple of 32")
    flag("decode_steps", count, (6, 12), "denoising steps of the decoder")
    flag(
        "guidance_scale",
        number(float, "[1, inf)"),
        (1.0, 1.5),
        "decoder's guidance; above 1 doubles its cost",
    )

    group = parser.add_argument_group("evaluation, before and after")
    flag(
        "eval_prompts",
        str,
        (f"{TINY}/heldout.txt", f"{ROOT}/prompts/heldout.txt"),
        "prompts that are never trained on, one per line",
    )
    flag("eval_targets", str, None, "folder with one picture per held-out prompt")
    flag("eval_sources", str, None, "folder with the picture that each held-out prompt changes")
    flag(
        "eval_reward",
        str,
        (f"{CHECK}:right,{CHECK}:clean", "hps"),
        "rewards that are only reported, never trained on; none: no such reward",
    )
    flag(
        "eval_count",
        count,
        (48, 8),
        "prompts per evaluation, of training and held out each, evenly over kinds",
    )
    flag(
        "eval_every",
        number(int, "[0, inf)"),
        (10, 50),
        "steps between evaluations; 0: before and after only",
    )
    flag("eval_decode_steps", count, (6, 30), "denoising steps in an evaluation")
    flag(
        "eval_guidance_scale",
        number(float, "[1, inf)"),
        (1.0, 1.5),
        "decoder's guidance in an evaluation",
    )

    group = parser.add_argument_group("memory and speed")
    bases = ("bfloat16", "int8")
    flag(
        "base",
        str,
        "bfloat16",
        "frozen weights: bfloat16 (on a CPU float32), or int8 for half the memory",
        bases,
    )
    flag(
        "micro_batch_size",
        number(int, "[1, inf)", "auto"),
        "auto",
        "sequences per pass, pictures painted at a time; auto: 4 on a CPU, else the most of 8, 4, 2, 1 that fit",
    )
    flag(
        "offload",
        str,
        "auto",
        "policy and decoder take turns on the GPU; auto: if they have to",
        switch,
    )
    flag(
        "compile",
        str,
        "auto",
        "compile the step of sampling; auto: on a GPU (a CUDA graph in any case)",
        switch,
    )

    group = parser.add_argument_group("what a run leaves")
    flag("out", str, None, "folder for everything the run leaves (default: the next free runs/N)")
    flag("resume", str, None, "go on with the run in this folder, from its newest checkpoint")
    flag("save_every", count, 20, "steps between checkpoints")
    trackers = ("none", "tensorboard", "wandb", "trackio")
    # Not --log, which torchrun would take for an abbreviation of its own --log-dir.
    flag("tracker", str, "none", "also log metrics there, and pictures (not to trackio)", trackers)
    return parser, by_model


def parse_settings(arguments=None):
    """The command line, completed from the run that it resumes, or by the model's defaults. From
    here on all of it is only read, but for the size of micro-batches on a GPU, see plan in
    gpu.py."""
    parser, by_model = build_parser()
    settings = parser.parse_args(arguments)
    if settings.resume is not None:
        settings = resumed_settings(parser, arguments, settings)
        find_files(settings)
    else:
        find_files(settings)
        complete(settings, by_model)
    weights = [weight for _, weight in split_spec(settings.reward)]
    if weights and not any(weights):
        raise UserError(
            f"--reward: all weights in {settings.reward} are 0: there is nothing to learn from"
        )
    if settings.combine is None:
        settings.combine = "zscore" if len(weights) > 1 else "sum"
    if settings.micro_batch_size == "auto" and not torch.cuda.is_available():
        settings.micro_batch_size = 4
    # Code sequences per prompt, compared with one another; and paintings of each sequence, compared
    # in the same way.
    settings.sequences = 1 if settings.train == "decoder" else settings.group_size
    settings.paintings = {"codes": 1, "decoder": settings.group_size, "both": settings.paintings}[
        settings.train
    ]
    return settings


def find_files(settings):
    """What is named from this project's folder is found from any other, too."""
    for name in FILES | {"model"}:
        path = getattr(settings, name)
        if path and not Path(path).exists() and (ROOT / path).exists():
            setattr(settings, name, str(ROOT / path))


def changed(settings, **values):
    return argparse.Namespace(**{**vars(settings), **values})


def deployed(settings):
    """The settings of an evaluation: it samples and paints as deployed, each code sequence once."""
    return changed(
        settings,
        decode_steps=settings.eval_decode_steps,
        guidance_scale=settings.eval_guidance_scale,
        sequences=settings.group_size,
        paintings=1,
    )


def complete(settings, by_model):
    """Fill in the model's defaults; refuse flags that do not go together."""
    own_sources = settings.sources is not None and Path(settings.sources).resolve() == Path(
        TINY, "sources"
    )
    if settings.model is None:
        settings.model = RELEASE if torch.cuda.is_available() and not own_sources else TINY
        if (
            Path("/dev/nvidia0").exists()
            and not torch.cuda.is_available()
            and "CUDA_VISIBLE_DEVICES" not in os.environ
        ):
            print(
                "warning: torch cannot use the GPU here (is its driver too old?): this trains the tiny model"
            )
    tiny = Path(settings.model).resolve() == Path(TINY)
    if settings.sources or settings.eval_sources:
        fill_in(settings, TINY_EDITS if own_sources and settings.prompts is None else {})
        fill_in(settings, {} if tiny else EDITS)
        if None in (
            settings.sources,
            settings.prompts,
            settings.eval_sources,
            settings.eval_prompts,
        ):
            raise UserError(
                f"edits need --sources ({settings.sources}), --prompts, --eval-sources and --eval-prompts"
            )
        if settings.train != "codes":
            raise UserError(
                "with --sources only the codes can learn, not the decoder: leave out --train"
            )
    if (
        tiny and settings.train != "codes"
    ):  # paintings of the same codes nearly always show the same facts
        fill_in(settings, {"reward": f"{CHECK}:facts:1,{CHECK}:near:0.1", "warmup_steps": 0})
    fill_in(
        settings,
        {name: for_tiny if tiny else release for name, (for_tiny, release) in by_model.items()},
    )
    if settings.train != "codes" and settings.decode_steps == 1:
        raise UserError(
            "a decoder of one denoising step has nothing to choose: --decode-steps has to be 2 or more"
        )
    if settings.height % 32 or settings.width % 32:
        raise UserError(
            f"--height and --width must be multiples of 32, got {settings.height} and {settings.width}"
        )
    pixels = settings.height * settings.width
    if settings.model == RELEASE and not 2**20 <= pixels <= 2**22:
        print(f"warning: GLM-Image was trained on 2^20 to 2^22 pixels, this is {pixels:,}")


def fill_in(settings, defaults):
    for name, value in defaults.items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)


def resumed_settings(parser, arguments, flags):
    """The settings of the run in `flags.resume`, with those flags that do not change what the run
    computes."""
    out = Path(flags.resume)
    if flags.out is not None and Path(flags.out) != out:
        raise UserError("--resume names the folder of the run already: leave out --out")
    step, num_ranks, before, _ = checkpoints.read_state(out)
    settings = parser.parse_args(
        arguments, argparse.Namespace(**before)
    )  # where there is no flag, the saved value
    settings.out = settings.resume = str(out)
    now = checkpoints.saved(settings)
    differ = sorted(name for name in before.keys() - MAY_CHANGE if now[name] != before[name])
    if differ:
        was = ", ".join(
            f"--{name.replace('_', '-')} {now[name]} (was {before[name]})" for name in differ
        )
        raise UserError(f"a resumed run keeps its settings, but these differ: {was}")
    if num_ranks != ranks.count():  # the prompts of a step would be others
        raise UserError(
            f"{out} was made by {num_ranks} processes, not {ranks.count()}: start that many with torchrun"
        )
    if settings.steps < step:
        raise UserError(f"--steps {settings.steps} is less than the {step} steps already made")
    return settings


@contextmanager
def claim_folder(settings):
    """The run's folder, taken before anything loads, so that two runs never share one. Left empty
    it is removed."""
    with ExitStack() as locks:
        out, reason = ranks.gather(_claim(settings, locks) if ranks.rank() == 0 else None)[0]
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


def _claim(settings, locks):
    """(folder, None), or (folder, why it cannot be had). Creating settings.json claims a new
    folder.

    `locks` keeps that file open and locked, so that nothing else resumes the run; a kill ends the
    lock.
    """
    names = (
        [settings.resume or settings.out]
        if settings.resume or settings.out
        else map("runs/{}".format, count(1))
    )
    for out in map(Path, names):
        try:
            if settings.resume is None:
                out.mkdir(parents=True, exist_ok=settings.out is not None)
                if checkpoints.find(out):
                    resume = f"--resume {shlex.quote(str(out))}"
                    return (
                        out,
                        f"{out} already holds a run; choose another --out, or go on with it: {resume}",
                    )
            file = (out / "settings.json").open("x" if settings.resume is None else "a")
            locks.enter_context(file)
            busy = f"another process is still at work on the run in {out}: wait for it, or stop it"
            return out, busy if _locked(file) else None
        except FileExistsError:
            if settings.out is not None:
                what = "already holds a run" if out.is_dir() else "is no folder"
                return out, f"{out} {what}; choose another --out, or delete it"
        except OSError as error:
            return out, f"cannot write to {out}: {error.strerror or error}"


def _locked(file):
    """Whether another process has locked it. If not, this one does, but for Windows and disks that
    have no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        return isinstance(error, BlockingIOError)


def print_start(settings, out, device, num_prompts, num_held_out):
    """What runs where, with which settings, and how much there is to do."""
    name = (
        f"CPU in float32, threads: {torch.get_num_threads()} (OMP_NUM_THREADS sets another number)"
    )
    name = torch.cuda.get_device_name() if device.type == "cuda" else name
    several = f" on {ranks.count()} processes" if ranks.count() > 1 else ""
    print(f"device: {name}\nmodel: {settings.model}; --model FOLDER_OR_ID chooses another")
    usual = checkpoints.saved(parse_settings(["--model", settings.model]))
    shown = [
        pair
        for pair in checkpoints.saved(settings).items()
        if pair[1] is not None and pair[0] != "model"
    ]
    print("settings:", *(f"{name}={value}" for name, value in shown if value != usual[name]))
    print("by default:", *(f"{name}={value}" for name, value in shown if value == usual[name]))
    codes = settings.height * settings.width // 32**2 + (
        0 if settings.sources else 256
    )  # the preview
    judged = min(settings.eval_count, num_prompts) + min(settings.eval_count, num_held_out)
    painted = settings.prompts_per_step * ranks.count() * settings.sequences * settings.paintings
    work = {
        "a step": (painted, settings),
        "an evaluation": (judged * settings.group_size, deployed(settings)),
    }
    for what, (pictures, painter) in work.items():
        passes = painter.decode_steps * (
            2 if painter.guidance_scale > 1 else 1
        )  # guided: with and without the codes
        learned = ""
        if (
            painter.paintings > 1
        ):  # reference and update read all denoising steps again but the last
            again = (
                passes
                * (1 - 1 / painter.decode_steps)
                * ((painter.kl_coef > 0) + UPDATE * painter.iterations)
            )
            learned = f", and work like {again:.0f} passes for the decoder to learn from it"
        print(
            f"{what}: {pictures} pictures{several} of about {codes:,} codes, {passes} decoder passes each{learned}"
        )
    print(
        f"{num_prompts} prompts, {num_held_out} held out; what the run leaves goes to {out}",
        flush=True,
    )
