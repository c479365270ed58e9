"""Train GLM-Image with GRPO on one GPU, or a tiny GLM-Image on a laptop.

    python train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/; --model chooses. The
algorithm is in grpo.py and the rewards are in rewards.py. This file turns a prompt into token ids and positions, turns
sampled codes into pictures, and leaves numbers, pictures and the adapter in the folder --out.
"""

import argparse
import json
import os
import random
import signal
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import GlmImagePipeline
from peft import LoraConfig, get_peft_model
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from grpo import GRPO
from rewards import parse_rewards, score

TINY, RELEASE = str(Path(__file__).resolve().parent / "tiny-glm-image"), "zai-org/GLM-Image"
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]  # in the language model only
EVAL_PROMPTS = 16  # the first lines of the prompts file, a group each, before and after training

# Settings whose best value depends on the model. Everything else has one default, in Settings.
#                       tiny    GLM-Image
DEFAULTS = {
    "steps":            (60,    200),
    "lr":               (2e-3,  5e-5),  # an adapter of a small model needs, and bears, larger steps
    "height":           (128,   512),  # pixels; at 1024 a GLM-Image step costs about three times as much
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


# ---- settings ------------------------------------------------------------------------------------------------------


def option(default, help, ok=lambda value: True, rule=""):
    return field(default=default, metadata={"help": help, "ok": ok, "rule": rule})


def at_least(minimum):
    return (lambda value: value >= minimum), f"be at least {minimum}"


def above(minimum):
    return (lambda value: value > minimum), f"be above {minimum}"


MULTIPLE_OF_32 = (lambda value: value > 0 and value % 32 == 0), "be a multiple of 32"


@dataclass
class Settings:
    model: str = option(None, "folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)")
    prompts: str = option(f"{TINY}/prompts.txt", "text file, one prompt a line")
    targets: str = option(None, "folder with one picture a prompt, sorted by name (default: tiny's, for its prompts)")
    reward: str = option("ssim", "rewards with weights: ssim:1,mse:0.5 or my_file.py:function, which runs that file")
    group_size: int = option(4, "pictures sampled for a prompt and compared with one another", *at_least(2))
    prompts_per_step: int = option(4, "groups in a step", *at_least(1))
    micro_batch_size: int = option(4, "sequences in a pass; bounds memory, changes nothing else", *at_least(1))
    steps: int = option(None, "training steps", *at_least(0))
    iterations: int = option(1, "optimiser steps on each step's pictures; clipping acts above 1", *at_least(1))
    lr: float = option(None, "AdamW's learning rate", *above(0))
    clip_range: float = option(0.2, "how far a ratio may leave 1 before its gradient is cut", *above(0))
    kl_coef: float = option(0.01, "weight of the KL penalty towards the model before training", *at_least(0))
    lora_rank: int = option(16, "rank of the adapter", *at_least(1))
    temperature: float = option(None, "divides the logits, in sampling and in scoring", *above(0))
    top_p: float = option(
        None, "sample from the likeliest codes that hold this share", lambda v: 0 < v <= 1, "be in (0, 1]"
    )
    height: int = option(None, "height of the pictures in pixels", *MULTIPLE_OF_32)
    width: int = option(None, "width of the pictures in pixels", *MULTIPLE_OF_32)
    decode_steps: int = option(None, "denoising steps of the decoder", *at_least(1))
    guidance_scale: float = option(None, "decoder's guidance; above 1 doubles its cost", *at_least(1))
    seed: int = option(0, "fixes prompts, samples and noise", *at_least(0))
    out: str = option(None, "folder for everything the run leaves (default: the next free runs/N)")
    sample_every: int = option(10, "steps between pictures of a group", *at_least(1))
    save_every: int = option(20, "steps between saves of the adapter", *at_least(1))


def parse_settings(arguments=None):
    """The command line as Settings, with what depends on the model filled in. Returns them and why this model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    for option_ in fields(Settings):
        text = option_.metadata["help"]
        if option_.name in DEFAULTS:
            text += " (default: {} for tiny, {} for GLM-Image)".format(*DEFAULTS[option_.name])
        elif option_.default is not None:
            text += f" (default: {os.path.relpath(option_.default) if option_.name == 'prompts' else option_.default})"
        flag = "--" + option_.name.replace("_", "-")
        parser.add_argument(flag, type=option_.type, default=option_.default, help=text, metavar=option_.type.__name__)
    settings = Settings(**vars(parser.parse_args(arguments)))
    why = "as --model says"
    if settings.model is None:
        settings.model = RELEASE if torch.cuda.is_available() else TINY
        why = "a CUDA GPU is present" if torch.cuda.is_available() else "there is no CUDA GPU"
    for name, (tiny, release) in DEFAULTS.items():
        if getattr(settings, name) is None:
            setattr(settings, name, tiny if Path(settings.model).resolve() == Path(TINY) else release)
    if settings.targets is None and Path(settings.prompts).resolve() == Path(TINY) / "prompts.txt":
        settings.targets = f"{TINY}/targets"
    for option_ in fields(Settings):
        value = getattr(settings, option_.name)
        if value is not None and not option_.metadata["ok"](value):
            flag, rule = option_.name.replace("_", "-"), option_.metadata["rule"]
            raise UserError(f"--{flag} must {rule}, got {value}")
    return settings, why


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
    if settings.out is None:
        number = 1
        while Path(f"runs/{number}").exists():
            number += 1
        settings.out = f"runs/{number}"
    out = Path(settings.out)
    if (out / "metrics.jsonl").exists():
        raise UserError(f"{out} already holds a run; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    return out


# ---- GLM-Image: prompts in, pictures out ---------------------------------------------------------------------------


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
    large = tokens[:, -rows * columns :].view(
        -1, rows, columns
    )  # the decoder sees the picture's codes, not the preview's
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
    """The stock pipeline, split: the policy with a fresh adapter, and a pipeline of everything else that paints."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        pipe = GlmImagePipeline.from_pretrained(settings.model, dtype=dtype)
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
    ) as error:  # no network, no such folder, no pipeline
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"cannot load {settings.model} ({reason}); give --model a folder with a GLM-Image pipeline, or {TINY}"
        ) from None
    if device.type == "cuda":
        pipe.vision_language_encoder.activation_checkpointing_enable()  # recompute activations instead of keeping them
    torch.manual_seed(settings.seed)  # the adapter's start
    lora = LoraConfig(r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules=LORA_TARGETS)
    policy = get_peft_model(pipe.vision_language_encoder, lora)  # PEFT keeps the adapter in float32 over a bf16 base
    painter = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    painter.set_progress_bar_config(disable=True)
    return policy, painter


# ---- pictures to look at -------------------------------------------------------------------------------------------


def save_grid(path, rows, title, cell=192):
    """Rows of (image, caption) as one PNG. `rows` is a list of (label, [(image, caption), ...])."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    width, height = cell + 8, cell + 40
    sheet = Image.new(
        "RGB", (max(len(cells) for _, cells in rows) * width + 8, len(rows) * (height + 20) + 30), "white"
    )
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 6), title, "black", font)
    for r, (label, cells) in enumerate(rows):
        top = 30 + r * (height + 20)
        pen.text((8, top), label, "black", font)
        for c, (image, caption) in enumerate(cells):
            left = 8 + c * width
            thumbnail = image.copy()
            thumbnail.thumbnail((cell, cell))
            sheet.paste(thumbnail, (left, top + 20))
            pen.multiline_text((left, top + 22 + cell), textwrap.fill(caption, cell // 7), "black", small, spacing=2)
    sheet.save(path)


def save_group(path, rollout, step):
    cells = [(image, f"reward {r:.3f}") for image, r in zip(rollout.images, rollout.rewards.tolist(), strict=True)]
    save_grid(path, [(rollout.prompt, cells)], f"step {step}: one group, most of the same prompt")


def save_before_after(path, before, after, columns=8):
    """The first picture of each evaluation prompt: same prompt, seed and noise, before training and after."""

    def row(rollouts):
        return [(r.images[0], f"{r.rewards[0]:.3f}  {r.prompt}") for r in rollouts[:columns]]

    save_grid(path, [("before", row(before)), ("after", row(after))], "same prompts and seeds")


# ---- the run -------------------------------------------------------------------------------------------------------


def lines_of_step(step, settings, count):
    """Which prompts a step trains on: every line once an epoch, reshuffled. A function of the seed, not of history."""
    first = step * settings.prompts_per_step
    epochs = [divmod(i, count) for i in range(first, first + settings.prompts_per_step)]
    return [random.Random(f"{settings.seed} {epoch}").sample(range(count), count)[i] for epoch, i in epochs]


def step_seed(step, settings):
    return (settings.seed * 1_000_003 + step) * 10_000  # group i adds i


def report(step, m, settings):
    seconds = " ".join(f"{name} {m[f'seconds/{name}']:.1f}s" for name in ("sample", "decode", "score", "learn"))
    memory = f" | {m['gpu_gb']:.1f} GB" if "gpu_gb" in m else ""
    parts = " ".join(f"{name[7:]} {value:.3f}" for name, value in m.items() if name.startswith("reward/"))
    return (
        f"step {step}/{settings.steps} | reward {m['reward']:.3f} +- {m['reward_std']:.3f} ({parts}) | dead groups "
        f"{m['dead_groups']:.2f} | kl {m['kl']:.4f} | clipped {m['clip_fraction']:.3f} | grad norm {m['grad_norm']:.2f} | "
        f"gap {m['max_logprob_gap']:.0e} | {seconds}{memory}"
    )


def main(arguments=None):
    started = time.time()
    settings, why = parse_settings(arguments)
    prompts, targets = read_prompts(settings)
    try:
        rewards = parse_rewards(settings.reward)
        blank = Image.new("RGB", (settings.width, settings.height))
        score(rewards, [blank], prompts[:1], targets and targets[:1])  # a reward that cannot work fails now, not later
    except ValueError as error:
        raise UserError(str(error)) from None
    out = make_out_folder(settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"device: {name}\nmodel: {settings.model}, because {why}; --model FOLDER_OR_ID chooses another")
    print(textwrap.fill("settings: " + " ".join(f"{k}={v}" for k, v in asdict(settings).items()), 118))
    print(f"prompts: {len(prompts)}, targets: {'none' if targets is None else len(targets)}, everything goes to: {out}")

    policy, painter = load(settings, device)
    trainable = [p for p in policy.parameters() if p.requires_grad]
    bar = tqdm(total=settings.steps, unit="step", dynamic_ncols=True)
    trainer = GRPO(
        policy,
        torch.optim.AdamW(trainable, lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0),
        encode=lambda prompt: encode_prompt(painter.processor, prompt, settings.height, settings.width),
        decode=lambda prompt, tokens, seed: decode_images(painter, prompt, tokens, settings, seed),
        score=lambda images, prompts, targets: score(rewards, images, prompts, targets),
        settings=settings,
        num_codes=painter.transformer.config.prior_vq_quantizer_codebook_size,
        frozen=[painter.text_encoder, painter.transformer, painter.vae],
        device=device,
        on_phase=bar.set_description_str,
    )

    def evaluate(label):
        """The first prompts, seeds that training never uses: the same pictures but for what the adapter changes."""
        chosen = min(EVAL_PROMPTS, len(prompts))
        rollouts, metrics = trainer.rollout(prompts[:chosen], targets and targets[:chosen], seed=10**12)
        count = chosen * settings.group_size
        bar.write(f"{label} training: mean reward {metrics['reward']:.4f} on {count} images ({chosen} prompts)")
        parts = {k: v for k, v in metrics.items() if k.startswith("reward")}
        return rollouts, parts | {"images": count, "prompts": chosen}

    stop = SimpleNamespace(asked=False)

    def on_interrupt(signum, frame):
        stop.asked = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        bar.write("interrupted: finishing this step, then saving; Ctrl-C again quits at once")

    signal.signal(signal.SIGINT, on_interrupt)
    before, evaluation = evaluate("before")
    evaluation = {"before": evaluation}
    step = 0
    try:
        with open(out / "metrics.jsonl", "w") as log:
            while step < settings.steps and not stop.asked:
                lines = lines_of_step(step, settings, len(prompts))
                rollouts, metrics = trainer.step(
                    [prompts[i] for i in lines], targets and [targets[i] for i in lines], step_seed(step, settings)
                )
                step += 1
                if device.type == "cuda":
                    metrics["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
                log.write(json.dumps({"step": step, **metrics}) + "\n")
                log.flush()
                bar.set_postfix_str(f"reward {metrics['reward']:.3f}")
                bar.update()
                bar.write(report(step, metrics, settings))
                if step % settings.sample_every == 0 or step in (1, settings.steps) or stop.asked:
                    save_group(out / f"group-{step:04d}.png", rollouts[0], step)
                if step % settings.save_every == 0:
                    policy.save_pretrained(out / "adapter")
    except torch.cuda.OutOfMemoryError:
        raise UserError(
            f"out of GPU memory ({bar.desc}); lower --micro-batch-size, --group-size, or --height and --width"
        ) from None
    finally:
        policy.save_pretrained(out / "adapter")
    after, evaluation["after"] = evaluate("after")
    (out / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")
    save_before_after(out / "before-after.png", before, after)
    bar.close()
    print(f"{step} steps in {time.time() - started:.0f} s; adapter, numbers and pictures are in {out}")


def cli(arguments=None):
    """main(), with what the user can mend as one line and exit code 2."""
    try:
        main(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(cli())
