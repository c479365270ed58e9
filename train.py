"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a laptop.

    python train.py --group-size 4
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/; --model chooses. The
algorithm is in grpo.py and the rewards are in rewards.py. This file turns a prompt into token ids and positions, turns
sampled codes into pictures, and leaves numbers, pictures, checkpoints and the adapter in the folder --out.
"""

import argparse
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import diffusers
import numpy as np
import peft
import torch
import torch.distributed as dist
import transformers
from diffusers import GlmImagePipeline
from PIL import Image, ImageDraw, ImageFont, ImageOps
from safetensors import SafetensorError
from torch._dynamo.exc import TorchDynamoException
from tqdm import tqdm
from transformers import set_seed

from grpo import GRPO, FastSampler, RankError, gather
from rewards import RewardError, combine, parse_rewards, score

TINY, RELEASE = str(Path(__file__).resolve().parent / "tiny-glm-image"), "zai-org/GLM-Image"
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]  # in the language model only
EVAL_PROMPTS = 8  # an evaluation paints a group for each of the first lines of the prompts file
SHOWN = 4  # prompts, and pictures of each, in before-after.png
EVAL_SEED = 2**62  # beyond the seeds of all training steps
MAX_SKIPPED = 5  # steps in a row without a finite gradient before the run gives up
PHASES = ("sample", "move", "decode", "score", "reference", "update")  # of a step, as they are timed

# Settings whose best value depends on the model. Everything else has one default, in Settings.
#                       tiny    GLM-Image
DEFAULTS = {
    "steps":            (48,    200),
    "lr":               (1e-3,  5e-5),  # an adapter of a small model needs, and bears, larger steps,
    "kl_coef":          (0.3,   0.01),  # but then takes a strong leash to keep its pictures whole
    "height":           (128,   512),  # pixels; at 1024 GLM-Image writes 1,280 codes a picture, at 512 it writes 512
    "width":            (128,   512),
    "temperature":      (1.0,   0.9),  # GLM-Image: its own sampler, so that what is trained is what is deployed
    "top_p":            (0.95,  0.75),
    # Reward pictures are compared inside a group that shares noise, steps and guidance, so what all of them lack cancels
    # in the z-score: fewer steps than the release's 50, and no second pass for its guidance of 1.5.
    "decode_steps":     (6,     20),
    "guidance_scale":   (1.0,   1.0),
}  # fmt: skip


class UserError(Exception):
    """Something the user can mend: shown as one line, exit code 2."""


# ---- settings -------------------------------------------------------------------------------------------------------


def option(default, help, ok=lambda value: True, rule="", free=False):
    """A setting, its help, its check in words, and whether a resumed run may change it (it does not alter the result)."""
    return field(default=default, metadata={"help": help, "ok": ok, "rule": rule, "free": free})


def at_least(minimum):
    return (lambda value: value >= minimum), f"be at least {minimum}"


def above(minimum):
    return (lambda value: minimum < value < float("inf")), f"be above {minimum}"


OFFLOAD = (lambda value: value in ("auto", "always", "never")), "be auto, always or never"
SAMPLERS = (lambda value: value in ("auto", "plain", "fast", "compile")), "be auto, plain, fast or compile"
TRACKERS = (lambda value: value in ("none", "tensorboard", "wandb")), "be none, tensorboard or wandb"
COMBINE = (lambda value: value in ("sum", "zscore")), "be sum or zscore"
SEED = (lambda value: 0 <= value < 2**32), "be in 0..2**32-1"
SHARE = (lambda value: 0 < value <= 1), "be in (0, 1]"
MULTIPLE_OF_32 = (lambda value: value > 0 and value % 32 == 0), "be a multiple of 32"


@dataclass
class Settings:
    model: str = option(None, "folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)")
    prompts: str = option(f"{TINY}/prompts.txt", "text file, one prompt a line")
    targets: str = option(None, "folder with one picture a prompt, sorted by name (default: tiny's, for its prompts)")
    reward: str = option("ssim:1,mse:1", "rewards with weights, or my_file.py:function, which runs that file")
    combine: str = option(None, "sum: add rewards; zscore: add their z-scores (default: zscore for several)", *COMBINE)
    group_size: int = option(4, "pictures sampled for a prompt and compared with one another", *at_least(2))
    prompts_per_step: int = option(4, "groups in a step, on each GPU", *at_least(1))
    micro_batch_size: int = option(
        4,
        "sequences in a pass, pictures painted at a time; bounds memory, results differ by rounding only",
        *at_least(1),
        free=True,
    )
    steps: int = option(None, "training steps; 0 evaluates only", *at_least(0), free=True)
    iterations: int = option(1, "optimiser steps on each step's pictures; clipping acts above 1", *at_least(1))
    lr: float = option(None, "AdamW's learning rate", *above(0))
    clip_range: float = option(0.2, "how far a ratio may leave 1 before its gradient is cut", *above(0))
    kl_coef: float = option(None, "weight of the KL penalty towards the model before training", *at_least(0))
    lora_rank: int = option(16, "rank of the adapter", *at_least(1))
    temperature: float = option(None, "divides the logits, in sampling and in scoring", *above(0))
    top_p: float = option(None, "sample from the likeliest codes that hold this share", *SHARE)
    height: int = option(None, "height of the pictures in pixels", *MULTIPLE_OF_32)
    width: int = option(None, "width of the pictures in pixels", *MULTIPLE_OF_32)
    decode_steps: int = option(None, "denoising steps of the decoder", *at_least(1))
    guidance_scale: float = option(None, "decoder's guidance; above 1 doubles its cost", *at_least(1))
    offload: str = option(
        "auto", "always: policy and decoder take turns on the GPU; auto: if they have to", *OFFLOAD, free=True
    )
    sampler: str = option(
        "auto",
        "plain: group by group; fast: all at once; compile: compiled too; auto: compile on a GPU, fast on a CPU",
        *SAMPLERS,
        free=True,
    )
    seed: int = option(0, "fixes prompts, samples and noise", *SEED)
    out: str = option(None, "folder for everything the run leaves (default: the next free runs/N)", free=True)
    resume: str = option(None, "go on with the run in this folder, from its newest checkpoint", free=True)
    sample_every: int = option(10, "steps between pictures of a group", *at_least(1), free=True)
    save_every: int = option(20, "steps between checkpoints", *at_least(1), free=True)
    keep: int = option(2, "newest checkpoints kept, beside that of the best evaluation", *at_least(1), free=True)
    eval_every: int = option(0, "steps between evaluations; 0: before and after only", *at_least(0), free=True)
    log: str = option("none", "also log metrics and pictures to tensorboard or wandb", *TRACKERS, free=True)


def parse_settings(arguments=None):
    """The command line as Settings, completed from the checkpoint it resumes or from DEFAULTS. Returns them and why."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for setting in fields(Settings):
        text, default = setting.metadata["help"], setting.default
        if setting.name in DEFAULTS:
            text += " (default: {} for tiny, {} for GLM-Image)".format(*DEFAULTS[setting.name])
        elif default is not None:
            text += f" (default: {os.path.relpath(default) if setting.name == 'prompts' else default})"
        flag = "--" + setting.name.replace("_", "-")
        parser.add_argument(flag, type=setting.type, help=text, metavar=setting.type.__name__)
    given = vars(parser.parse_args(arguments))
    settings, why = Settings(**given), "as --model says"
    if settings.resume is not None:
        settings, why = resumed_settings(given), "as the run that goes on"
    elif settings.model is None:
        settings.model = RELEASE if torch.cuda.is_available() else TINY
        why = "a CUDA GPU is present" if torch.cuda.is_available() else "there is no CUDA GPU"
    for name, (tiny, release) in DEFAULTS.items():
        if getattr(settings, name) is None:
            setattr(settings, name, tiny if Path(settings.model).resolve() == Path(TINY) else release)
    if settings.targets is None and Path(settings.prompts).resolve() == Path(TINY) / "prompts.txt":
        settings.targets = f"{TINY}/targets"
    for setting in fields(Settings):
        value = getattr(settings, setting.name)
        if value is not None and not setting.metadata["ok"](value):
            flag, rule = setting.name.replace("_", "-"), setting.metadata["rule"]
            raise UserError(f"--{flag} must {rule}, got {value}")
    return settings, why


def resumed_settings(given):
    """The settings of the run in `--resume`, with those flags that do not change what the run computes."""
    folder = Path(given["resume"])
    _, step, ranks, saved = read_checkpoint(folder)
    if ranks != num_ranks() and given.get("steps") != 0:  # the prompts of a step would be others
        raise UserError(f"{folder} was made by {ranks} processes, this is {num_ranks()}; start as many with torchrun")
    if 0 < given.get("steps", step) < step:
        raise UserError(f"--steps {given['steps']} is less than the {step} steps already made")
    fixed = {f.name for f in fields(Settings) if not f.metadata["free"]}
    changed = [
        f"--{n.replace('_', '-')} {v} (was {saved[n]})" for n, v in given.items() if n in fixed and v != saved[n]
    ]
    if changed:
        raise UserError(f"a resumed run keeps its settings, but these differ: {', '.join(changed)}")
    return Settings(**{**saved, **given, "out": str(folder)})


def read_prompts(settings):
    """The prompts, and their target pictures (or None)."""
    try:
        lines = Path(settings.prompts).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts file {settings.prompts}: {error}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"the prompts file {settings.prompts} has no prompt in it; write one a line")
    if settings.targets is None:
        return prompts, None
    folder = Path(settings.targets)
    if not folder.is_dir():
        raise UserError(f"the folder of target pictures {folder} does not exist")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in Image.registered_extensions())
    if len(files) != len(prompts):
        raise UserError(f"{folder} has {len(files)} pictures for {len(prompts)} prompts; give one a prompt, by line")
    try:
        return prompts, [Image.open(file).convert("RGB") for file in files]
    except OSError as error:
        raise UserError(f"a target picture cannot be opened: {error}") from None


def make_out_folder(settings):
    if rank() > 0:
        return Path(gather(None)[0])
    if settings.out is None:
        number = 1
        while Path(f"runs/{number}").exists():
            number += 1
        settings.out = f"runs/{number}"
    out = Path(settings.out)
    if settings.resume is None and checkpoints(out):
        raise UserError(f"{out} already holds a run; choose another --out, or go on with it: --resume {out}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if settings.steps > 0 or settings.resume is None:
            (out / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    gather(settings.out)
    return out


# ---- several GPUs ---------------------------------------------------------------------------------------------------


def join_ranks():
    """Meet the other processes that torchrun has started, if it has. Each takes a GPU; the first of them speaks."""
    if not dist.is_torchelastic_launched():
        return
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if 0 < count <= local:
        raise UserError(f"this machine has {count} GPUs, so --nproc-per-node can be {count} at most")
    if count:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if count else "gloo")
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        transformers.utils.logging.disable_progress_bar()
        diffusers.utils.logging.disable_progress_bar()


def leave_ranks(together):
    """Close the connection, which waits for the others. Where one of them is lost, ending the process has to do."""
    if dist.is_initialized() and together:
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def share(count):
    """Which of `count` things this rank takes: a stretch of them, and all stretches together are all of them."""
    return range(rank() * count // num_ranks(), (rank() + 1) * count // num_ranks())


# ---- GLM-Image: prompts in, pictures out ----------------------------------------------------------------------------


def encode_prompt(processor, prompt, height, width):
    """A prompt as the policy reads it, and the 3-D positions of everything it reads and writes.

    GLM-Image writes a preview of about 256 codes first, then the picture proper, a code for 32x32 pixels; both row by
    row. Positions are (temporal, height, width). Text counts up on all three; a grid stands still in time at its start
    s and spreads over (s + row, s + column); what follows starts at s + the longer side.

    Returns: prompt_ids (L,), position_ids (3, L+T), T. Height and width are multiples of 32.
    """
    inputs = processor.apply_chat_template(
        [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )
    prompt_ids = inputs["input_ids"][0]  # (L,)
    start = len(prompt_ids)
    positions, count = [torch.arange(start).expand(3, -1)], 0
    for _, rows, columns in inputs["image_grid_thw"].flip(0).tolist():  # listed large first, written preview first
        grid = torch.cartesian_prod(torch.tensor([0]), torch.arange(rows), torch.arange(columns)).T  # (3, rows*columns)
        positions.append(start + grid)
        start, count = start + max(rows, columns), count + rows * columns
    return prompt_ids, torch.cat(positions, dim=1), count


def decode_images(pipe, prompt, tokens, settings, seed):
    """Paint a group: (G, T) tokens of one prompt -> G PIL images.

    One starting noise for the whole group: its pictures then differ by the policy's choices alone. One prompt a batch:
    glyph embeddings of different prompts would be padded, and the decoder does not mask the padding.
    """
    rows, columns = settings.height // 32, settings.width // 32
    large = tokens[:, -rows * columns :].view(-1, rows, columns)  # the decoder is not shown the preview
    prior = large.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)  # (G, 4*rows*columns)
    scale, channels = pipe.vae_scale_factor, pipe.transformer.config.in_channels
    noise = torch.randn(
        1, channels, settings.height // scale, settings.width // scale, generator=torch.Generator().manual_seed(seed)
    )
    images = []
    for batch in prior.split(settings.micro_batch_size):
        images += pipe(
            prompt=[prompt] * len(batch),
            prior_token_ids=batch.to(pipe.transformer.device),
            latents=noise.expand(len(batch), -1, -1, -1),
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.decode_steps,
            guidance_scale=settings.guidance_scale,
        ).images
    return images


def load(settings, device):
    """The stock pipeline, on the CPU: its weights are mapped from the files, so that several processes share them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        return GlmImagePipeline.from_pretrained(settings.model, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"cannot load {settings.model} ({reason}); give --model a folder with a GLM-Image pipeline, or {TINY}"
        ) from None


def split(pipe, settings, device):
    """The policy with a fresh adapter, and a pipeline of everything else that paints."""
    pipe.vision_language_encoder.model.visual = pipe.vision_language_encoder.model.vqmodel = None  # they read pictures
    if device.type == "cuda":
        pipe.vision_language_encoder.activation_checkpointing_enable()  # recompute activations instead of keeping them
        pipe.vae.enable_slicing()  # one picture at a time: the VAE takes more memory than all the rest, and little time
    set_seed(settings.seed)  # the adapter's start
    lora = peft.LoraConfig(r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules=LORA_TARGETS)
    policy = peft.get_peft_model(pipe.vision_language_encoder, lora)  # the adapter stays float32 over a bf16 base
    painter = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    painter.set_progress_bar_config(disable=True)
    return policy, painter


def working_memory(settings):
    """Bytes to leave beside GLM-Image's weights, from what benchmarks/memory.py computes.

    41 KB a token for the cache of all sequences that are sampled side by side, 0.8 MB a token for those in a training pass,
    and 3 GB for the VAE's activations or, at other times, for gaps between tensors.
    """
    tokens = 320 + settings.height * settings.width // 32**2  # prompt, preview and picture
    sampled = settings.prompts_per_step * settings.group_size
    return (sampled * 41e3 + settings.micro_batch_size * 0.8e6) * tokens + 3e9


def take_turns(settings, device, modules):
    """Whether policy and decoder have to take turns on the GPU; printed, with the reason. All ranks decide alike."""
    if device.type == "cpu":
        return False
    torch.cuda.empty_cache()  # reward models have been there and back
    weights = sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))
    free, total = torch.cuda.mem_get_info(device)
    free = min(gather(min(free, torch.cuda.get_per_process_memory_fraction(device) * total)))
    work = working_memory(settings)
    offload = {"always": True, "never": False, "auto": weights + work > free}[settings.offload]
    print(
        f"memory: {weights / 1e9:.1f} GB of weights and {work / 1e9:.1f} GB to work in, {free / 1e9:.1f} GB free on the GPU: "
        f"policy and decoder {'take turns on it' if offload else 'both stay on it'} (--offload {settings.offload})"
    )
    return offload


# ---- pictures to look at --------------------------------------------------------------------------------------------


def save_grid(path, rows, title, cell=192):
    """Rows of pictures as one PNG: `rows` is a list of (label, [(image, caption), ...])."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    width, height = cell + 8, cell + 60
    sheet = Image.new("RGB", (max(len(cells) for _, cells in rows) * width + 8, len(rows) * height + 30), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 6), title, "black", font)
    for r, (label, cells) in enumerate(rows):
        top = 30 + r * height
        pen.text((8, top), textwrap.shorten(label, 120), "black", font)
        for c, (image, caption) in enumerate(cells):
            sheet.paste(ImageOps.contain(image, (cell, cell)), (8 + c * width, top + 20))
            caption = textwrap.fill(textwrap.shorten(caption, 2 * cell // 7), cell // 7)
            pen.multiline_text((8 + c * width, top + 22 + cell), caption, "black", small, spacing=2)
    sheet.save(path)
    return sheet


# ---- what a run leaves, and how it goes on --------------------------------------------------------------------------


def append(path, record):
    with open(path, "a") as file:  # opened anew for each line: a folder that is gone is noticed at once
        file.write(json.dumps(record) + "\n")


def rewind(path, step):
    """The records up to a step. Later ones, and a line cut short by a kill, are taken out of the file."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    records = [record for record in records if record["step"] <= step]
    beside = path.with_suffix(".unfinished")
    beside.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(beside, path)
    return records


def checkpoints(out):
    """Complete checkpoints of a run, oldest first."""
    return sorted(folder for folder in (out / "checkpoints").glob("[0-9]*"))


def save_checkpoint(out, step, policy, optimizer, settings, best=None):
    """Adapter, optimiser, step and settings, written beside and renamed: a kill leaves the last complete one.

    Nothing else is needed to go on: the prompts and all random draws of a step are functions of the seed and the step.
    """
    final, beside = out / "checkpoints" / f"{step:06d}", out / "checkpoints" / ".unfinished"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    state = {"step": step, "ranks": num_ranks(), "settings": asdict(settings)}
    (beside / "state.json").write_text(json.dumps(state))
    if final.exists():  # resumed from here; only the settings may be new, a larger --steps for one
        os.replace(beside / "state.json", final / "state.json")
        beside.rmdir()
        return
    policy.save_pretrained(beside)
    torch.save(optimizer.state_dict(), beside / "optimizer.pt")
    os.replace(beside, final)
    for old in checkpoints(out)[: -settings.keep]:
        if old.name != f"{best:06d}":
            shutil.rmtree(old)


def read_checkpoint(out):
    """The newest checkpoint of a run: its folder and step, and the number of processes and the settings of the run."""
    found = checkpoints(out)
    if not found:
        raise UserError(f"there is no checkpoint in {out} to resume")
    try:
        state = json.loads((found[-1] / "state.json").read_text())
        return found[-1], state["step"], state.get("ranks", 1), state["settings"]
    except (OSError, ValueError, KeyError) as error:
        raise corrupt(found[-1], error) from None


def restore(folder, policy, optimizer):
    try:
        peft.set_peft_model_state_dict(policy, peft.load_peft_weights(folder, device="cpu"))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise corrupt(folder, error) from None


def corrupt(folder, error):
    reason = str(error).strip().split("\n")[0]
    return UserError(f"cannot read the checkpoint {folder} ({reason}); delete that folder to go on from the one before")


def save_before_after(out, before, after):
    """Groups of the first prompts, before training and after: same prompts, seeds and noise, side by side."""
    rows = []
    for i, (prompt, _) in enumerate(after["shown"]):
        cells = []
        for label, record in (("before", before), ("after", after)):
            files = sorted((out / "evaluation" / f"{record['step']:06d}").glob(f"{i + 1}-*.png"))
            captions = [f"{label}, {show(reward)}" for reward in record["shown"][i][1]]
            cells += [(Image.open(file), caption) for file, caption in zip(files, captions, strict=True)]
        rows.append((prompt, cells))
    title = f"before training, and with the same prompts, seeds and noise after {after['step']} steps; rewards below"
    save_grid(out / "before-after.png", rows, title, cell=112)


def open_tracker(settings, out):
    """TensorBoard's or Weights & Biases' own writer, through accelerate."""
    if settings.log == "none":
        return None
    from accelerate import PartialState, tracking

    PartialState()
    try:
        if settings.log == "tensorboard":
            tracker = tracking.TensorBoardTracker("tensorboard", out)
        else:
            tracker = tracking.WandBTracker("grpo-glm-image", name=out.name, dir=out)
        tracker.start()
    except ImportError:
        raise UserError(f"--log {settings.log} needs a package: pip install {settings.log}") from None
    return tracker


# ---- the run --------------------------------------------------------------------------------------------------------


def lines_of_step(step, settings, count):
    """Which prompts a step trains on: every line once an epoch, reshuffled. A function of the seed, not of history.

    Each rank takes a stretch of the step's prompts.
    """
    groups = settings.prompts_per_step * num_ranks()
    epochs = [divmod(step * groups + i, count) for i in share(groups)]
    return [random.Random(f"{settings.seed} {epoch}").sample(range(count), count)[i] for epoch, i in epochs]


def seed_of_step(step, settings):
    """The seed of this rank's first group; those that follow count up, on through all ranks."""
    return (settings.seed * 1_000_003 + step) * 1_000 + rank() * settings.prompts_per_step


def show(value):
    return "none" if value is None else f"{value:.3f}"  # no image of the step had this reward


def report(step, m, settings):
    seconds = " ".join(f"{name} {m[f'seconds/{name}']:.1f}s" for name in PHASES if f"seconds/{name}" in m)
    peaks = [m[f"gpu_gb/{name}"] for name in PHASES if f"gpu_gb/{name}" in m]
    memory = f" | {max(peaks):.1f} GB" if peaks else ""
    parts = [f"{k[7:]} {show(v)} +- {show(m['reward_std/' + k[7:]])}" for k, v in m.items() if k.startswith("reward/")]
    trouble = f" | {m['unscored']} images without a reward" if m["unscored"] else ""
    trouble += " | SKIPPED: the gradient was not finite" if m["skipped"] else ""
    return (
        f"step {step}/{settings.steps} | reward {show(m['reward'])} +- {show(m['reward_std'])} ({', '.join(parts)}) | dead groups "
        f"{m['dead_groups']:.2f} | kl {m['kl']:.4f} | clipped {m['clip_fraction']:.3f} | grad norm {m['grad_norm']:.2f} | "
        f"gap {m['max_logprob_gap']:.0e} | {seconds}{memory}{trouble}"
    )


class Run:
    """Everything between the command line and the GRPO steps: evaluation, logging, checkpoints, an orderly end."""

    def __init__(self, settings, why):
        self.settings = settings
        self.prompts, self.targets = read_prompts(settings)
        try:
            rewards = parse_rewards(settings.reward)
            blank = Image.new("RGB", (settings.width, settings.height))  # what cannot work fails now, not in an hour
            score(rewards, [blank], self.prompts[:1], self.targets and self.targets[:1])
        except ValueError as error:
            raise UserError(str(error)) from None
        settings.combine = settings.combine or ("zscore" if len(rewards) > 1 else "sum")
        weights = {name: weight for name, (_, weight) in rewards.items()}
        self.out = make_out_folder(settings)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        name += f", one of {num_ranks()}" if num_ranks() > 1 else ""
        print(f"device: {name}\nmodel: {settings.model}, {why}; --model FOLDER_OR_ID chooses another")
        print(textwrap.fill("settings: " + " ".join(f"{k}={v}" for k, v in asdict(settings).items()), 118))
        targets = "no targets" if self.targets is None else f"{len(self.targets)} targets"
        print(f"{len(self.prompts)} prompts, {targets}; everything the run leaves goes to {self.out}", flush=True)
        self.tracker = open_tracker(settings, self.out) if rank() == 0 else None
        self.policy, painter = split(load(settings, device), settings, device)
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0)
        frozen = [painter.text_encoder, painter.transformer, painter.vae]
        sampler = settings.sampler if settings.sampler != "auto" else "compile" if device.type == "cuda" else "fast"
        self.trainer = GRPO(
            self.policy,
            self.optimizer,
            encode=lambda prompt: encode_prompt(painter.processor, prompt, settings.height, settings.width),
            decode=lambda prompt, tokens, seed: decode_images(painter, prompt, tokens, settings, seed),
            score=lambda images, prompts, targets: score(rewards, images, prompts, targets),
            settings=settings,
            combine=None if settings.combine == "sum" else lambda p: combine(p, weights, settings.group_size, "zscore"),
            num_codes=painter.transformer.config.prior_vq_quantizer_codebook_size,
            frozen=frozen,
            device=device,
            offload=take_turns(settings, device, [self.policy, *frozen]),
            sampler=None
            if sampler == "plain"
            else FastSampler(self.policy, settings.prompts_per_step, sampler == "compile"),
            on_phase=self.on_phase,
        )
        self.step, self.evaluations = 0, []
        if settings.resume is not None:  # after the trainer has moved the adapter: the optimiser's state follows it
            folder, self.step, *_ = read_checkpoint(self.out)
            restore(folder, self.policy, self.optimizer)
        gather(None)  # all have read what the first now goes on writing
        if rank() == 0:
            rewind(self.out / "metrics.jsonl", self.step)
            self.evaluations = rewind(self.out / "evaluation.jsonl", self.step)
        self.evaluations = gather(self.evaluations)[0]
        self.bar = tqdm(total=settings.steps, initial=self.step, unit="step", dynamic_ncols=True, disable=rank() > 0)
        self.stopping = self.announced = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.on_signal)

    def on_signal(self, signum, frame):
        self.stopping = True
        if num_ranks() == 1:  # torchrun passes on what the terminal has sent already
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)

    def on_phase(self, text):
        if self.stopping and not self.announced:  # not in the handler, which may have interrupted a write
            self.announced = True
            self.bar.write("asked to stop: finishing this step, saving, then a last evaluation; once more ends at once")
        self.bar.set_description_str(text, refresh=sys.stderr.isatty())

    def save(self):
        if rank() > 0:
            return
        rated = [record for record in self.evaluations if record["reward"] is not None]
        best = max(rated, key=lambda record: record["reward"], default={"step": 0})
        save_checkpoint(self.out, self.step, self.policy, self.optimizer, self.settings, best["step"])

    def save_if_whole(self):
        """After a failure: if the policy has moved already, the step is half made, and the last checkpoint stands."""
        if not self.trainer.half_made:
            self.save()

    def log(self, values, picture=None):
        if self.tracker is not None:
            self.tracker.log({k: v for k, v in values.items() if v is not None}, step=self.step)
        if self.tracker is not None and picture is not None:
            layout = {"dataformats": "NHWC"} if self.settings.log == "tensorboard" else {}
            self.tracker.log_images({"group": np.asarray(picture)[None]}, step=self.step, **layout)

    def evaluate(self):
        """The first prompts with seeds that training never uses: only the adapter makes these pictures differ."""
        count = max(min(EVAL_PROMPTS, len(self.prompts)), num_ranks())
        lines, start = [i % len(self.prompts) for i in share(count)], share(count).start
        set_seed(start)
        rollouts, metrics = self.trainer.rollout(
            [self.prompts[i] for i in lines], self.targets and [self.targets[i] for i in lines], EVAL_SEED + start
        )
        mine = [(r.prompt, r.images[:SHOWN], r.rewards[:SHOWN].tolist()) for r in rollouts[: max(SHOWN - start, 0)]]
        shown = [group for groups in gather(mine) for group in groups]
        record = {k: v for k, v in metrics.items() if k.startswith("reward")}
        record |= {"images": count * self.settings.group_size, "prompts": count}
        groups = [(prompt, [None if math.isnan(r) else r for r in rewards]) for prompt, _, rewards in shown]
        self.evaluations.append({"step": self.step, **record, "shown": groups})
        if rank() > 0:
            return
        folder = self.out / "evaluation" / f"{self.step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for i, (_, images, _) in enumerate(shown):
            for j, image in enumerate(images):
                image.save(folder / f"{i + 1}-{j + 1}.png")
        self.log({f"evaluation/{k}": v for k, v in record.items()})
        append(self.out / "evaluation.jsonl", self.evaluations[-1])
        self.bar.write(
            f"evaluation after {self.step} steps: mean reward {show(metrics['reward'])} on {record['images']} images "
            f"({count} prompts x {self.settings.group_size})"
        )

    def train_step(self):
        settings, lines = self.settings, lines_of_step(self.step, self.settings, len(self.prompts))
        # Every draw of a step starts from the step's seed, a reward's own included: nothing random needs saving.
        set_seed(seed_of_step(self.step, settings) % 2**32)
        rollouts, metrics = self.trainer.step(
            [self.prompts[i] for i in lines],
            self.targets and [self.targets[i] for i in lines],
            seed_of_step(self.step, settings),
        )
        self.step += 1
        if rank() > 0:
            return metrics
        append(self.out / "metrics.jsonl", {"step": self.step, **metrics})
        picture = None
        if self.step % settings.sample_every == 0 or self.step in (1, settings.steps) or self.stopping:
            group = rollouts[0]
            cells = [(image, f"reward {r:.3f}") for image, r in zip(group.images, group.rewards.tolist())]
            picture = save_grid(self.out / f"group-{self.step:06d}.png", [(group.prompt, cells)], f"step {self.step}")
        self.log(metrics, picture)
        self.bar.set_postfix_str(f"reward {show(metrics['reward'])}")
        self.bar.update()
        self.bar.write(report(self.step, metrics, settings))
        return metrics

    def evaluated(self):
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.step

    def due(self):
        """Whether this step gets an evaluation that it has not had."""
        every = self.settings.eval_every
        return not self.evaluated() and (self.step == 0 or (every > 0 and self.step % every == 0))

    def train(self):
        settings, skipped = self.settings, 0
        if settings.steps == 0:
            return self.evaluate()
        self.save()
        while True:
            if any(gather(self.stopping)):  # together, or the others would wait for the one that stopped
                self.stopping = True
                break
            if self.due():
                self.evaluate()
            if self.step >= settings.steps:
                break
            skipped = skipped + 1 if self.train_step()["skipped"] else 0
            if skipped == MAX_SKIPPED:
                raise UserError(f"{skipped} steps in a row had no finite gradient; start anew with a lower --lr")
            if self.step % settings.save_every == 0 or self.due():
                self.save()
        self.save()
        if rank() == 0:
            self.policy.save_pretrained(self.out / "adapter")
        if self.stopping:
            command = "python" if num_ranks() == 1 else f"torchrun --nproc-per-node {num_ranks()}"
            self.bar.write(f"saved; go on with: {command} train.py --resume {self.out}")
        if not self.evaluated():
            self.evaluate()
        if rank() == 0:
            save_before_after(self.out, self.evaluations[0], self.evaluations[-1])


def main(arguments=None):
    started = time.time()
    try:
        run = Run(*parse_settings(arguments))
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"no memory for the weights ({reason}); --offload always needs least on the GPU, --offload never on the host"
        ) from None
    try:
        run.train()
    except torch.OutOfMemoryError:
        run.save_if_whole()
        raise UserError(
            f"out of GPU memory while at '{run.bar.desc}'; try --offload always, lower --micro-batch-size, or --height and "
            f"--width, or --group-size; --resume {run.out} goes on (with another --offload or --micro-batch-size if you like)"
        ) from None
    except RewardError as error:
        run.save()
        raise UserError(f"{error}; mend it and go on with --resume {run.out}") from None
    except TorchDynamoException as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"torch.compile failed ({reason}); --sampler fast does without") from None
    except RankError:
        run.save_if_whole()
        raise
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {run.out}: {error}") from None
    finally:
        run.bar.close()
    print(f"{run.step} steps, {time.time() - started:.0f} s; what it leaves is in {run.out}")


def cli(arguments=None):
    """main(), with what the user can mend as one line and exit code 2, whichever rank it happened on."""
    try:
        try:
            join_ranks()
            main(arguments)
            gather(None)  # the first has the most to write; who leaves early would break the connection
        except UserError as error:
            gather(RankError(f"rank {rank()}: {error}" if rank() else str(error)))  # raised here too
    except RankError as error:
        lost = error.__cause__ is not None  # then nobody else may be there to say so, nor to take leave of
        if rank() == 0 or lost:
            print(f"error: {error}", file=sys.stderr)
        leave_ranks(together=not lost)
        return 2
    except KeyboardInterrupt:  # before the first step: there is nothing to save yet
        return 130
    leave_ranks(together=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli())
