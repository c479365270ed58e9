"""The command line: every setting with its default, going on with a run, and what a start prints."""

import argparse
import difflib
import json
import math
import os
import shlex
import shutil
import sys
import textwrap
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import torch

from rewards import REWARDS, split_spec
from runtime import UserError, checkpoints, ranks, readable

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "tiny-glm-image")
RELEASE = "zai-org/GLM-Image"
TINY_TARGETS = {"edits.txt": f"{TINY}/edit-targets", "heldout-edits.txt": f"{TINY}/heldout-edit-targets"}
# Defaults of a run that edits.
TINY_EDITS = {"prompts": f"{TINY}/edits.txt", "eval_prompts": f"{TINY}/heldout-edits.txt"}
TINY_EDITS |= {"eval_sources": f"{TINY}/heldout-sources", "reward": "ssim:1,mse:1"}
EDITS = {"reward": "edit:1,keep:0.2", "eval_reward": "aesthetic"}  # the usual rewards would judge a wish as a caption
# A resumed run may change these: its length, what it leaves, and settings that change results by rounding alone.
MAY_CHANGE = {"micro_batch_size", "sample_batch", "steps", "offload", "compile", "out", "resume", "save_every"}
MAY_CHANGE |= {"eval_every", "tracker"}

ABOUT = """Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a laptop.

    python train.py --steps 8
    python train.py --prompts mine.txt --eval-prompts new.txt --reward mine.py:f"""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, as for any error that the user can fix; for an unknown flag, also one that may have been meant."""
        meant = []
        if message.startswith("unrecognized arguments: --"):
            flag = message.split()[2].partition("=")[0].replace("_", "-")
            known = self._option_string_actions
            meant = [name for name in known if name.startswith(flag)] or difflib.get_close_matches(flag, known)
        raise UserError(message.removeprefix("argument ") + (f"; did you mean {meant[0]}?" if meant else ""))


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
    """The parser, and {setting: (its default for tiny, for GLM-Image)} where the best value depends on the model."""
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter, "usage": "python train.py [--FLAG VALUE ...]"}
    parser = Parser(description=ABOUT, allow_abbrev=False, **layout)
    by_model = {}
    count = number(int, "[1, inf)")
    positive = number(float, "(0, inf)")
    switch = ("auto", "yes", "no")

    def flag(name, kind, default, help, choices=None):
        """`default`: one for all models, a pair (tiny, GLM-Image), or None."""
        if isinstance(default, tuple):
            by_model[name] = default
            shown = [str(value).replace(f"{ROOT}/", "") for value in default]
            default, help = None, f"{help} (default: {shown[0]} for tiny, {shown[1]} for GLM-Image)"
        elif default is not None:
            help += f" (default: {default})"
        option = "--" + name.replace("_", "-")
        metavar = "|".join(choices) if choices else kind.__name__.upper()
        group.add_argument(option, type=kind, default=default, help=help, choices=choices, metavar=metavar)

    group = parser.add_argument_group("model and data")
    flag("model", str, None, "folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)")
    flag("settings", str, None, "file of settings to start from, such as a run's settings.json; other flags win")
    flag("adapter", str, None, "start from the adapters of the run in this folder; with --steps 0 only evaluate them")
    flag("prompts", str, (f"{TINY}/prompts.txt", f"{ROOT}/prompts/train.txt"), "text file, one prompt per line")
    flag("order", str, "shuffled", "of the prompts: shuffled each epoch, or as in the file", ("shuffled", "file"))
    flag("targets", str, None, "folder with one picture per prompt, sorted by name (default: tiny's, for its prompts)")
    flag("sources", str, None, "to train edits: folder with the picture that each prompt changes, sorted by name")
    # GLM-Image: CLIP holds back the preference score.
    flag("reward", str, (f"{TINY}/check.py:facts", "pickscore:1,clip:1"),
         f"NAME[=FOLDER][:WEIGHT],... with NAME one of {', '.join(REWARDS)}, or my_file.py:function, which runs that "
         "file; FOLDER: the model's files, in place of a download")  # fmt: skip
    flag("combine", str, None, "add rewards, or their z-scores (default: zscore for several)", ("sum", "zscore"))

    group = parser.add_argument_group("the algorithm")
    halves = ("codes", "decoder", "both")
    flag("train", str, "codes", "what learns: codes (the policy that writes them), decoder or both", halves)
    flag("group_size", number(int, "[2, inf)"), 4, "code sequences per prompt; with --train decoder, paintings of one")
    flag("prompts_per_step", count, (16, 4), "prompts per step, on each GPU")
    flag("steps", number(int, "[0, inf)"), (20, 200), "training steps; 0 evaluates only")
    flag("iterations", count, 1, "optimiser steps on each step's pictures; ratios are clipped only above 1")
    # GLM-Image: published for training all weights are 1e-6 to 1e-5, and an adapter takes about ten times as much.
    flag("lr", positive, (3e-4, 2e-5), "AdamW's learning rate")
    flag("decoder_lr", positive, (1e-3, 1e-4), "AdamW's learning rate for the decoder's adapter")
    # GLM-Image: Adam's first steps are of full size whatever the gradient, and clipping does not bound them.
    flag("warmup_steps", number(int, "[0, inf)"), (0, 10), "optimiser steps over which the learning rates rise")
    flag("paintings", number(int, "[2, inf)"), 4, "with --train both, how often each code sequence is painted")
    flag("noise_level", number(float, "(0, 1]"), 0.7, "if the decoder learns: share of a step's noise drawn anew")
    flag("clip_range", positive, 0.2, "how far a ratio may leave 1 before its gradient is cut")
    flag("kl_coef", number(float, "[0, inf)"), (0.2, 0.01), "weight of the KL from the model before training")
    flag("lora_rank", count, 16, "rank of the adapter")
    flag("lora_alpha", count, None, "the adapter's update is scaled by this over the rank (default: twice the rank)")
    flag("seed", number(int, "[0, 4294967295]"), 0, "fixes the order of prompts, the samples and the noise")

    group = parser.add_argument_group("pictures")
    # GLM-Image: those of its own sampler, so that it is trained as it is deployed.
    flag("temperature", positive, (1.0, 0.9), "divides the logits, in sampling and in scoring")
    flag("top_p", number(float, "(0, 1]"), (0.95, 0.75), "sample from the likeliest codes, this probability in all")
    flag("height", count, (128, 1024), "height of the pictures in pixels, a multiple of 32")  # never trained below 1024
    flag("width", count, (128, 1024), "width of the pictures in pixels, a multiple of 32")
    # Few steps will do: pictures are compared in a group, so what all of them lack cancels in the z-score. But guidance
    # has to be above 1: the unguided half drops the codes, so guidance makes the decoder follow the policy.
    flag("decode_steps", count, (6, 12), "denoising steps of the decoder")
    flag("guidance_scale", number(float, "[1, inf)"), (1.0, 1.5), "decoder's guidance; above 1 doubles its cost")
    flag("guidance_steps", count, None, "in training, guide only so many denoising steps, the first (default: all)")

    group = parser.add_argument_group("evaluation, before and after")
    flag("eval_prompts", str, (f"{TINY}/heldout.txt", f"{ROOT}/prompts/heldout.txt"),
         "prompts that are never trained on, one per line")  # fmt: skip
    flag("eval_targets", str, None, "folder with one picture per held-out prompt (default: tiny's, for its prompts)")
    flag("eval_sources", str, None, "folder with the picture that each held-out prompt changes")
    flag("eval_reward", str, (f"{TINY}/check.py:right,{TINY}/check.py:clean", "hps"),
         "rewards that only judge: nothing is trained to please them; none: no such judge")  # fmt: skip
    flag("eval_count", count, (48, 8), "prompts in an evaluation, of training and held out each: evenly over kinds")
    flag("eval_every", number(int, "[0, inf)"), (10, 50), "steps between evaluations; 0: before and after only")
    flag("eval_decode_steps", count, (6, 30), "denoising steps in an evaluation")  # GLM-Image: judged as deployed
    flag("eval_guidance_scale", number(float, "[1, inf)"), (1.0, 1.5), "decoder's guidance in an evaluation")

    group = parser.add_argument_group("memory and speed")
    bases = ("bfloat16", "int8")
    flag("base", str, "bfloat16", "frozen weights: bfloat16 (on a CPU float32), or int8 for half the memory", bases)
    flag("micro_batch_size", number(int, "[1, inf)", "auto"), "auto",
         "sequences per pass, pictures painted at a time; auto: 4 on a CPU, on a GPU up to 8, as fit")  # fmt: skip
    flag("sample_batch", count, None, "prompts sampled at a time; bounds memory (default: all of a step)")
    flag("offload", str, "auto", "policy and decoder take turns on the GPU; auto: if they have to", switch)
    flag("compile", str, "auto", "compile sampling; auto: on a GPU, where it is a CUDA graph either way", switch)

    group = parser.add_argument_group("what a run leaves")
    flag("out", str, None, "folder for everything the run leaves (default: the next free runs/N)")
    flag("resume", str, None, "go on with the run in this folder, from its newest checkpoint")
    flag("save_every", count, 20, "steps between checkpoints")
    trackers = ("none", "tensorboard", "wandb", "trackio")
    # Not --log, which torchrun would take for an abbreviation of its own --log-dir.
    flag("tracker", str, "none", "also log metrics there, and pictures (not to trackio)", trackers)
    return parser, by_model


def parse_settings(arguments=None):
    """The command line as settings, completed from the run that it resumes, or by the model's defaults.

    Everything is decided here and only read later, except the size of micro-batches on a GPU, see plan in gpu.py.
    """
    parser, by_model = build_parser()
    settings = parser.parse_args(arguments)
    if settings.settings is not None:
        arguments = [*flags_in(settings.settings), *(sys.argv[1:] if arguments is None else arguments)]
        settings = parser.parse_args(arguments)
    if settings.resume is not None:
        settings = resumed_settings(parser, arguments, settings)
    else:
        complete(settings, by_model)
    weights = [weight for _, weight in split_spec(settings.reward)]
    if weights and not any(weights):
        raise UserError(f"--reward: all weights in {settings.reward} are 0: there is nothing to learn from")
    if settings.combine is None:
        settings.combine = "zscore" if len(weights) > 1 else "sum"
    if settings.micro_batch_size == "auto" and not torch.cuda.is_available():
        settings.micro_batch_size = 4
    # Code sequences per prompt, compared with one another; and paintings of each sequence, compared in the same way.
    settings.sequences = 1 if settings.train == "decoder" else settings.group_size
    settings.paintings = {"codes": 1, "decoder": settings.group_size, "both": settings.paintings}[settings.train]
    return settings


def changed(settings, **values):
    return argparse.Namespace(**{**vars(settings), **values})


def deployed(settings):
    """The settings of an evaluation: it samples and paints as deployed, each code sequence once."""
    return changed(
        settings, decode_steps=settings.eval_decode_steps, guidance_scale=settings.eval_guidance_scale,
        guidance_steps=None, sequences=settings.group_size, paintings=1,
    )  # fmt: skip


def decoder_passes(settings):
    """For a picture: one in each denoising step, and where that is guided another, without the codes."""
    guided = settings.guidance_steps or settings.decode_steps
    return settings.decode_steps + guided * (settings.guidance_scale > 1)


def flags_in(file):
    """The settings in a file as flags, checked like any; not a run's folder, nor settings that follow from others."""
    with readable(f"read the settings in {file}"):
        saved = json.loads(Path(file).read_text())
        dropped = {"out", "resume", "settings", "sequences", "" if saved.get("train") == "both" else "paintings"}
        kept = {name: value for name, value in saved.items() if value is not None and name not in dropped}
        return [f"--{name.replace('_', '-')}={value}" for name, value in kept.items()]


def complete(settings, by_model):
    """Fill in the model's defaults; refuse flags that do not go together."""
    tiny_edits = settings.sources is not None and Path(settings.sources).resolve() == Path(TINY, "sources")
    if settings.model is None:
        settings.model = RELEASE if torch.cuda.is_available() and not tiny_edits else TINY
        if Path("/dev/nvidia0").exists() and not torch.cuda.is_available() and "CUDA_VISIBLE_DEVICES" not in os.environ:
            print("warning: torch cannot use the GPU here (is its driver too old?): this trains the tiny model")
    tiny = Path(settings.model).resolve() == Path(TINY)
    if settings.sources or settings.eval_sources:
        complete_edits(settings, (TINY_EDITS if tiny_edits else {}) | ({} if tiny else EDITS))
    fill_in(settings, {name: for_tiny if tiny else release for name, (for_tiny, release) in by_model.items()})
    if settings.train != "codes" and settings.decode_steps == 1:
        raise UserError("a decoder of one denoising step has nothing to choose: --decode-steps has to be 2 or more")
    if settings.guidance_steps and (settings.guidance_scale == 1 or settings.guidance_steps > settings.decode_steps):
        raise UserError("--guidance-steps must be at most --decode-steps, with a --guidance-scale above 1")
    if settings.height % 32 or settings.width % 32:
        raise UserError(f"--height and --width must be multiples of 32, got {settings.height} and {settings.width}")
    pixels = settings.height * settings.width
    if settings.model == RELEASE and not 2**20 <= pixels <= 2**22:
        print(f"warning: GLM-Image was trained on 2^20 to 2^22 pixels, this is {pixels:,}")
    choose_targets(settings)


def fill_in(settings, defaults):
    for name, value in defaults.items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)


def complete_edits(settings, defaults):
    """Fill in the defaults of a run that edits; refuse what such a run cannot do."""
    fill_in(settings, defaults)
    if None in (settings.sources, settings.prompts, settings.eval_sources, settings.eval_prompts):
        raise UserError("edits need --sources with --prompts, and --eval-sources with --eval-prompts to judge by")
    if settings.train != "codes":
        raise UserError("with --sources only the codes can learn, not the decoder: leave out --train")


def choose_targets(settings):
    """The tiny model's own targets for its own prompts, unless a flag names others or "none", see data.py."""
    for prompts, targets in (("prompts", "targets"), ("eval_prompts", "eval_targets")):
        file = Path(getattr(settings, prompts)).resolve()
        if getattr(settings, targets) is None and file.parent == Path(TINY):
            setattr(settings, targets, TINY_TARGETS.get(file.name))


def resumed_settings(parser, arguments, flags):
    """The settings of the run in `flags.resume`, with those flags that do not change what the run computes."""
    out = Path(flags.resume)
    if flags.out is not None:
        raise UserError("--resume names the folder of the run already: leave out --out")
    step, num_ranks, saved, _ = checkpoints.read_state(out)
    settings = parser.parse_args(arguments, argparse.Namespace(**saved))  # where there is no flag, the saved value
    settings.out = settings.resume = str(out)
    differ = sorted(name for name in saved.keys() - MAY_CHANGE if getattr(settings, name) != saved[name])
    if differ:
        was = ", ".join(f"--{name.replace('_', '-')} {getattr(settings, name)} (was {saved[name]})" for name in differ)
        raise UserError(f"a resumed run keeps its settings, but these differ: {was}")
    if flags.steps == 0 and step > 0:
        raise UserError(f"a run is resumed to be longer; to evaluate its adapters: --adapter {out} --steps 0")
    if num_ranks != ranks.count():  # the prompts of a step would be others
        raise UserError(f"{out} was made by {num_ranks} processes, not {ranks.count()}: start that many with torchrun")
    if settings.steps < step:
        raise UserError(f"--steps {settings.steps} is less than the {step} steps already made")
    return settings


@contextmanager
def claim_folder(settings):
    """The run's folder, taken before anything loads, so that two runs never share one. Left empty it is removed."""
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
    """(folder, None), or (folder, why it cannot be had).

    To create settings.json is to take a new folder. `locks` keeps it open and locked, so that nothing else resumes the
    run; a kill at any moment ends the lock.
    """
    names = [settings.resume or settings.out] if settings.resume or settings.out else map("runs/{}".format, count(1))
    for out in map(Path, names):
        try:
            if settings.resume is None:
                out.mkdir(parents=True, exist_ok=settings.out is not None)
                if checkpoints.find(out):
                    resume = f"--resume {shlex.quote(str(out))}"
                    return out, f"{out} already holds a run; choose another --out, or go on with it: {resume}"
            file = (out / "settings.json").open("x" if settings.resume is None else "a")
            locks.enter_context(file)
            busy = f"another process is still at work on the run in {out}: wait for it, or stop it"
            return out, busy if _locked(file) else None
        except FileExistsError:
            if out.is_dir() and settings.out is not None:
                return out, f"{out} already holds a run; choose another --out, or delete it: it has no checkpoint"
        except OSError as error:
            return out, f"cannot write to {out}: {error.strerror or error}"


def _locked(file):
    """Whether another process has locked it. If not, this one does, but for Windows and disks that have no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        return isinstance(error, BlockingIOError)


def print_start(settings, out, device, num_prompts, num_held_out):
    """What runs where, with which settings, and how much there is to do."""
    name = f"CPU in float32, threads: {torch.get_num_threads()} (OMP_NUM_THREADS sets another number)"
    name = torch.cuda.get_device_name() if device.type == "cuda" else name
    several = f" on {ranks.count()} processes" if ranks.count() > 1 else ""
    print(f"device: {name}\nmodel: {settings.model}; --model FOLDER_OR_ID chooses another")
    defaults = vars(parse_settings(["--model", settings.model]))
    width = shutil.get_terminal_size((118, 0)).columns
    for words, default in (("settings:", False), ("by default:", True)):
        for name, value in vars(settings).items():
            if (value == defaults[name]) == default and value is not None and name not in ("model", "sequences"):
                words += f" {name}={str(value).removeprefix(f'{Path.cwd()}/')}"
        print(textwrap.fill(words, width, break_on_hyphens=False, break_long_words=False))  # a path can be copied
    codes = settings.height * settings.width // 32**2 + (0 if settings.sources else 256)  # the preview
    judged = min(settings.eval_count, num_prompts) + min(settings.eval_count, num_held_out)
    painted = settings.prompts_per_step * ranks.count() * settings.sequences * settings.paintings
    work = {"a step": (painted, settings), "an evaluation": (judged * settings.group_size, deployed(settings))}
    for what, (pictures, painter) in work.items():
        passes = decoder_passes(painter)
        print(f"{what}: {pictures} pictures{several} of about {codes:,} codes, {passes} decoder passes each")
    print(f"{num_prompts} prompts, {num_held_out} held out; what the run leaves goes to {out}", flush=True)
