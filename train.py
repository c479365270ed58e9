"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a laptop.

    python train.py --group-size 4
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/; --model chooses. The
algorithm is in grpo.py and the rewards are in rewards.py. This file turns a prompt into token ids and positions, turns
sampled codes into pictures, wires both into a GRPO (build_trainer), and runs the loop (train).
"""

import argparse
import copy
import dataclasses
import itertools
import math
import os
import random
import sys
import textwrap
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import peft
import torch
from diffusers import GlmImagePipeline
from PIL import Image
from safetensors import SafetensorError
from torch._dynamo.exc import TorchDynamoException
from transformers import set_seed

from decoder import DecoderGRPO
from grpo import GRPO
from rewards import RewardError, combine, parse_rewards, score
from runtime import UserError, checkpoints, ranks
from runtime.gpu import CapturedForward, needs_offload
from runtime.log import Record, StopRequest, check_tracker
from runtime.metrics import (
    format_step,
    reward_metrics,
    step_metrics,
    total_rewards,
    weights_of,
)

HERE = Path(__file__).resolve().parent
TINY, RELEASE = str(HERE / "tiny-glm-image"), "zai-org/GLM-Image"
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]  # in the language model only
DECODER_LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]  # the attention of every block
GRID_PROMPTS = 3  # of training and held out each: prompts in before-after.png, and pictures of each
EVAL_SEED, HELD_OUT_SEED = 2**29, 2**29 + 2**20  # not training's, not in the low 32 bits: a CPU takes no others
MAX_SKIPPED = 5  # steps in a row without a finite gradient before the run gives up

# ---- settings -------------------------------------------------------------------------------------------------------

# Settings whose best value depends on the model. Everything else has one default, below.
#                       tiny    GLM-Image
DEFAULTS = {
    "prompts":              (f"{TINY}/prompts.txt",     f"{HERE}/prompts/train.txt"),
    "reward":               ("ssim:1,mse:1",            "pickscore:1,clip:1"),  # CLIP holds back the preference score
    "eval_prompts":         (f"{TINY}/heldout.txt",     f"{HERE}/prompts/heldout.txt"),
    "eval_reward":          (f"{TINY}/check.py:shows",  "hps"),
    "eval_count":           (16,                        8),
    "steps":                (48,                        200),
    "lr":                   (1e-3,                      2e-5),  # ten times what is published for full fine-tuning
    "decoder_lr":           (1e-3,                      1e-4),
    "kl_coef":              (0.3,                       0.01),
    "height":               (128,                       1024),  # GLM-Image was never trained below 1024
    "width":                (128,                       1024),
    "temperature":          (1.0,                       0.9),  # GLM-Image: its own sampler, so that what is trained
    "top_p":                (0.95,                      0.75),  # is what is deployed
    # Pictures are compared in a group that shares noise and steps: what all of them lack cancels in the z-score. But
    # guidance has to be above 1, for the unguided half drops the codes: it makes the decoder follow the policy.
    "decode_steps":         (6,                         12),
    "guidance_scale":       (1.0,                       1.5),
    "eval_decode_steps":    (6,                         30),  # judged as deployed
    "eval_guidance_scale":  (1.0,                       1.5),
}  # fmt: skip
# What a resumed run may change: it does not alter the result.
RESUMABLE = {"micro_batch_size", "steps", "offload", "compile", "out", "resume", "sample_every", "save_every"}
RESUMABLE |= {"keep_checkpoints", "eval_every", "log"}


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, as for any other mistake of the user's
        raise UserError(message.removeprefix("argument "))


def number(kind, interval):
    """A type for argparse: a number in an interval such as "(0, 1]"."""
    low, high = map(float, interval[1:-1].split(","))

    def parse(text):
        value = kind(text)
        if not (low <= value <= high and value < math.inf and (value > low or interval[0] == "[")):
            raise argparse.ArgumentTypeError(f"must be in {interval}, got {value}")
        return value

    parse.__name__ = kind.__name__
    return parse


def build_parser():
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    count, positive, switch = number(int, "[1, inf)"), number(float, "(0, inf)"), ("auto", "yes", "no")

    def flag(name, kind, default, help, choices=None):
        if name in DEFAULTS:
            tiny, release = (str(value).replace(f"{HERE}/", "") for value in DEFAULTS[name])
            help += f" (default: {tiny} for tiny, {release} for GLM-Image)"
        elif default is not None:
            help += f" (default: {default})"
        flag, metavar = "--" + name.replace("_", "-"), "|".join(choices) if choices else kind.__name__.upper()
        group.add_argument(flag, type=kind, default=default, help=help, choices=choices, metavar=metavar)

    group = parser.add_argument_group("model and data")
    flag("model", str, None, "folder or hub id of a GLM-Image pipeline (default: GLM-Image with a GPU, else tiny)")
    flag("prompts", str, None, "text file, one prompt a line")
    flag("targets", str, None, "folder with one picture a prompt, sorted by name (default: tiny's, for its prompts)")
    flag("reward", str, None, "rewards with weights, or my_file.py:function, which runs that file")
    flag("combine", str, None, "add rewards, or their z-scores (default: zscore for several)", ("sum", "zscore"))

    group = parser.add_argument_group("the algorithm")
    flag("train", str, "codes", "which half learns: codes, decoder or both", ("codes", "decoder", "both"))
    flag("group_size", number(int, "[2, inf)"), 4, "pictures sampled for a prompt and compared with one another")
    flag("prompts_per_step", count, 4, "groups in a step, on each GPU")
    flag("steps", number(int, "[0, inf)"), None, "training steps; 0 evaluates only")
    flag("iterations", count, 1, "optimiser steps on each step's pictures; clipping acts above 1")
    flag("lr", positive, None, "AdamW's learning rate")
    flag("decoder_lr", positive, None, "the same for the decoder's adapter")
    flag("paintings", number(int, "[2, inf)"), 4, "with --train both, how often each code sequence is painted")
    flag("noise_level", number(float, "(0, 1]"), 0.7, "of the moves that the decoder draws, when it learns")
    flag("clip_range", positive, 0.2, "how far a ratio may leave 1 before its gradient is cut")
    flag("kl_coef", number(float, "[0, inf)"), None, "weight of the KL penalty towards the model before training")
    flag("lora_rank", count, 16, "rank of the adapter")
    flag("seed", number(int, "[0, 4294967295]"), 0, "fixes prompts, samples and noise")

    group = parser.add_argument_group("pictures")
    flag("temperature", positive, None, "divides the logits, in sampling and in scoring")
    flag("top_p", number(float, "(0, 1]"), None, "sample from the likeliest codes that hold this share")
    flag("height", count, None, "height of the pictures in pixels, a multiple of 32")
    flag("width", count, None, "width of the pictures in pixels, a multiple of 32")
    flag("decode_steps", count, None, "denoising steps of the decoder")
    flag("guidance_scale", number(float, "[1, inf)"), None, "decoder's guidance; above 1 doubles its cost")

    group = parser.add_argument_group("evaluation, before and after")
    flag("eval_prompts", str, None, "prompts that are never trained on, one a line")
    flag("eval_targets", str, None, "folder with one picture for each of them (default: tiny's, for its held-out ones)")
    flag("eval_reward", str, None, "rewards that only judge: nothing is trained to please them")
    flag("eval_count", count, None, "evaluate this many first prompts of training, and of those held out")
    flag("eval_every", number(int, "[0, inf)"), 0, "steps between evaluations; 0: before and after only")
    flag("eval_decode_steps", count, None, "denoising steps")
    flag("eval_guidance_scale", number(float, "[1, inf)"), None, "guidance")

    group = parser.add_argument_group("memory and speed")
    flag("micro_batch_size", count, 4, "sequences in a pass, pictures painted at a time; bounds memory")
    flag("offload", str, "auto", "policy and decoder take turns on the GPU; auto: if they have to", switch)
    flag("compile", str, "auto", "sample with a compiled CUDA graph; auto: on a GPU", switch)

    group = parser.add_argument_group("what a run leaves")
    flag("out", str, None, "folder for everything the run leaves (default: the next free runs/N)")
    flag("resume", str, None, "go on with the run in this folder, from its newest checkpoint")
    flag("sample_every", count, 10, "steps between pictures of a group")
    flag("save_every", count, 20, "steps between checkpoints")
    flag("keep_checkpoints", count, 2, "newest checkpoints kept, beside that of the best evaluation")
    flag("log", str, "none", "also log metrics and pictures there", ("none", "tensorboard", "wandb", "trackio"))
    return parser


def parse_settings(arguments=None):
    """The command line as settings, completed from the run that it resumes, or by the model's defaults."""
    parser = build_parser()
    settings = parser.parse_args(arguments)
    if settings.resume is not None:
        if settings.out is not None:
            raise UserError("--resume names the folder of the run already: leave out --out")
        return resumed_settings(parser, arguments, Path(settings.resume))
    if settings.model is None:
        settings.model = RELEASE if torch.cuda.is_available() else TINY
    for name, (tiny, release) in DEFAULTS.items():
        if getattr(settings, name) is None:
            setattr(settings, name, tiny if Path(settings.model).resolve() == Path(TINY) else release)
    if settings.train != "codes" and settings.decode_steps == 1:
        raise UserError("a decoder of one move has nothing to choose: --decode-steps has to be 2 or more")
    if settings.height % 32 or settings.width % 32:
        raise UserError(f"--height and --width must be multiples of 32, got {settings.height} and {settings.width}")
    pixels = settings.height * settings.width
    if settings.model == RELEASE and not 2**20 <= pixels <= 2**22:
        print(f"warning: GLM-Image was trained on 2^20 to 2^22 pixels, this is {pixels:,}")
    for prompts, targets in (("prompts", "targets"), ("eval_prompts", "eval_targets")):  # those of the tiny model
        if getattr(settings, targets) is None and getattr(settings, prompts) == DEFAULTS[prompts][0]:
            setattr(settings, targets, str(Path(TINY) / ("targets" if targets == "targets" else "heldout-targets")))
    return settings


def resumed_settings(parser, arguments, out):
    """The settings of the run in `out`, with those flags that do not change what the run computes."""
    step, num_ranks, saved = checkpoints.read_state(out)
    settings = parser.parse_args(arguments, argparse.Namespace(**saved))  # flags that are not given keep these values
    settings.out = str(out)
    changed = [name for name in saved.keys() - RESUMABLE if getattr(settings, name) != saved[name]]
    if changed:
        was = ", ".join(f"--{n.replace('_', '-')} {getattr(settings, n)} (was {saved[n]})" for n in sorted(changed))
        raise UserError(f"a resumed run keeps its settings, but these differ: {was}")
    if num_ranks != ranks.count() and settings.steps > 0:  # the prompts of a step would be others
        raise UserError(f"{out} was made by {num_ranks} processes, not {ranks.count()}: start as many with torchrun")
    if 0 < settings.steps < step:
        raise UserError(f"--steps {settings.steps} is less than the {step} steps already made")
    return settings


# ---- GLM-Image: prompts in, pictures out ----------------------------------------------------------------------------


def encode_prompt(processor, prompt, height, width):
    """A prompt as the policy reads it, and the 3-D positions of everything it reads and writes.

    GLM-Image writes a preview of about 256 codes first, then the picture proper, a code for 32x32 pixels; both row by
    row. Positions are (temporal, height, width). Text counts up on all three; a grid stands still in time at its start
    s and spreads over (s + row, s + column); what follows starts at s + the longer side.

    Returns: prompt_ids (L,), position_ids (3, L+T), T. Height and width are multiples of 32.
    """
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]]
    size = {"target_h": height, "target_w": width}
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=size
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
    rows, columns, scale = settings.height // 32, settings.width // 32, pipe.vae_scale_factor
    large = tokens[:, -rows * columns :].view(-1, rows, columns)  # the decoder is not shown the preview
    prior = large.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)  # (G, 4*rows*columns)
    shape = 1, pipe.transformer.config.in_channels, settings.height // scale, settings.width // scale
    own = torch.Generator().manual_seed(seed + 2**31)  # the codes drew from the seed itself
    noise = torch.randn(shape, generator=own)
    images = []
    for batch in prior.split(settings.micro_batch_size):
        images += pipe(
            prompt=[prompt] * len(batch), prior_token_ids=batch.to(pipe.transformer.device),
            latents=noise.expand(len(batch), -1, -1, -1), height=settings.height, width=settings.width,
            num_inference_steps=settings.decode_steps, guidance_scale=settings.guidance_scale,
        ).images  # fmt: skip
    return images


def load(settings, device):
    """The stock pipeline, on the CPU: its weights are mapped from the files, so that several processes share them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if version("diffusers").startswith(("0.40.", "0.41.")):
        raise UserError("diffusers 0.40 and 0.41 paint GLM-Image wrong (they drop its timesteps): take 0.42.1 or later")
    try:
        return GlmImagePipeline.from_pretrained(settings.model, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        reason, mend = str(error).strip().split("\n")[0], f"give --model a folder with a GLM-Image pipeline, or {TINY}"
        raise UserError(f"cannot load {settings.model} ({reason}); {mend}") from None


def add_adapter(module, targets, settings):
    """The module with a fresh adapter, float32 even over a bfloat16 base, and the adapter's optimizer."""
    lora = peft.LoraConfig(r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules=targets)
    model = peft.get_peft_model(module, lora)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0)


def build_trainer(pipe, settings, rewards, device):
    """A GRPO of the pipeline's language model, with a fresh adapter, and of everything else in it as the decoder.

    `rewards`: {name: (function, weight)}, see rewards.py.
    """
    # The decoder makes these tables on the CPU, and would copy them to the GPU in every block.
    pipe.transformer.rope.register_forward_hook(lambda _, inputs, tables: [t.to(inputs[0].device) for t in tables])
    policy = pipe.vision_language_encoder
    policy.model.visual = policy.model.vqmodel = None  # they read pictures
    if device.type != "cpu":
        policy.activation_checkpointing_enable()  # recompute activations instead of keeping them
        pipe.vae.enable_slicing()  # one picture at a time: the VAE takes more memory than all the rest, and little time
    set_seed(settings.seed)  # the adapter's start
    policy, optimizer = add_adapter(policy, LORA_TARGETS, settings)

    decoder = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    decoder.set_progress_bar_config(disable=True)
    decoder_modules = [decoder.text_encoder.requires_grad_(False), decoder.transformer.requires_grad_(False)]
    decoder_modules.append(decoder.vae.requires_grad_(False))

    def encode(prompt):
        return encode_prompt(decoder.processor, prompt, settings.height, settings.width)

    def total(raw_rewards, group_size):
        how = settings.combine if group_size > 1 else "sum"
        return combine(raw_rewards, weights_of(rewards), group_size, how)

    def score_images(images, prompts, targets):
        raw_rewards = score(rewards, images, prompts, targets)
        return total(raw_rewards, settings.group_size), raw_rewards

    compiled = settings.compile == "yes" or (settings.compile == "auto" and device.type == "cuda")
    trainer = GRPO(
        policy,
        optimizer,
        encode,
        lambda prompt, tokens, seed: decode_images(decoder, prompt, tokens, settings, seed),
        score_images,
        settings,
        num_codes=decoder.transformer.config.prior_vq_quantizer_codebook_size,
        forward=CapturedForward(policy, encode("")[2]) if compiled else None,
        decoder_modules=decoder_modules,
        device=device,
        offload=needs_offload(settings, device, [policy, *decoder_modules]),
    )
    trainer.pipe, trainer.total = decoder, total  # for build_decoder
    return trainer


def build_decoder(trainer, settings):
    """A DecoderGRPO, which takes over decode and score from `trainer`, that of the codes; None if it does not learn."""
    if settings.train == "codes":
        return None
    size = settings.paintings if settings.train == "both" else settings.group_size
    if settings.train == "decoder":
        trainer.settings = argparse.Namespace(**{**vars(settings), "group_size": 1})  # one code sequence a prompt
    own = argparse.Namespace(**{**vars(settings), "group_size": size, "lr": settings.decoder_lr})
    adapter = add_adapter(trainer.pipe.transformer, DECODER_LORA_TARGETS, own)  # pipe.transformer now contains it
    if trainer.device.type != "cpu":
        trainer.pipe.transformer.enable_gradient_checkpointing()
    return DecoderGRPO(*adapter, trainer, trainer.pipe, own, trainer.total)


# ---- what a step trains on, and how it is judged --------------------------------------------------------------------


def read_prompts(path, folder):
    """The prompts in a file, and their target pictures (or None)."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts file {path}: {error}") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"the prompts file {path} has no prompt in it; write one a line")
    if folder is None:
        return prompts, None
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"the folder of target pictures {folder} does not exist")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in Image.registered_extensions())
    if len(files) != len(prompts):
        raise UserError(f"{folder} has {len(files)} pictures for {len(prompts)} prompts; give one a prompt, by line")
    try:
        return prompts, [Image.open(file).convert("RGB") for file in files]
    except OSError as error:
        raise UserError(f"a target picture cannot be opened: {error}") from None


def load_rewards(settings, spec, prompts, targets):
    """The rewards of a spec, tried on a blank picture: what cannot work fails now, not in an hour."""
    try:
        rewards = parse_rewards(spec)
        score(rewards, [Image.new("RGB", (settings.width, settings.height))], prompts[:1], targets and targets[:1])
    except ValueError as error:
        raise UserError(str(error)) from None
    return rewards


def prompt_indices(step, settings, count):
    """Which prompts a step trains on: every line once an epoch, reshuffled. A function of the seed, not of history.

    Each rank takes a stretch of the step's prompts.
    """
    groups = settings.prompts_per_step * ranks.count()
    epochs = [divmod(step * groups + i, count) for i in ranks.stretch(groups)]
    return [random.Random(f"{settings.seed} {epoch}").sample(range(count), count)[i] for epoch, i in epochs]


def seed_of_step(step, settings):
    """The seed of this rank's first group; those that follow count up, on through all ranks."""
    return (settings.seed * 1_000_003 + step) * 1_000 + ranks.rank() * settings.prompts_per_step


# ---- judging, and the run -------------------------------------------------------------------------------------------


def build_evaluator(trainer, settings):
    """The trainer, painting as deployed: stock moves, --eval-decode-steps and --eval-guidance-scale."""
    evaluator, deployed = copy.copy(trainer), copy.copy(settings)
    deployed.decode_steps, deployed.guidance_scale = settings.eval_decode_steps, settings.eval_guidance_scale
    evaluator.decode = lambda prompt, tokens, seed: decode_images(trainer.pipe, prompt, tokens, deployed, seed)
    return evaluator


def evaluate(evaluator, settings, rewards, eval_rewards, prompts, targets, seed):
    """Paint the first prompts with seeds that training never uses: only the adapter makes these pictures differ.

    Returns the metrics over all ranks, and for some groups (prompt, some pictures, their rewards).
    """
    count, rollouts = max(min(settings.eval_count, len(prompts)), ranks.count()), []
    for chunk in torch.tensor(ranks.stretch(count)).split(settings.prompts_per_step):  # as many at once as in training
        set_seed(chunk[0].item())
        rows = [i % len(prompts) for i in chunk.tolist()]
        chosen = [targets[i] for i in rows] if targets else None
        for i, rollout in enumerate(evaluator.rollout([prompts[i] for i in rows], chosen, seed + chunk[0].item())):
            repeated = [rollout.prompt] * len(rollout.images), chosen and [chosen[i]] * len(rollout.images)
            rollout.raw_rewards |= score(eval_rewards, rollout.images, *repeated)
            few = rollout.images[:GRID_PROMPTS]
            rollouts.append(dataclasses.replace(rollout, tokens=None, old_logprobs=None, nucleus=None, images=few))
    rollouts = [rollout for of_rank in ranks.gather(rollouts) for rollout in of_rank]
    shown = [(r.prompt, r.images, total_rewards(r, rewards)[:GRID_PROMPTS].tolist()) for r in rollouts[:GRID_PROMPTS]]
    return reward_metrics(rollouts, rewards) | {"images": count * settings.group_size, "prompts": count}, shown


def choose_out(settings):
    """The folder of the run, not made yet: a run that is refused at the start leaves none behind."""
    if settings.out is None:
        settings.out = next(f"runs/{i}" for i in itertools.count(1) if not Path(f"runs/{i}").exists())
    settings.out = out = ranks.gather(settings.out)[0]
    if settings.resume is None and checkpoints.find(Path(out)):
        raise UserError(f"{out} already holds a run; choose another --out, or go on with it: --resume {out}")
    return Path(out)


def train(settings):
    """The whole run: what it needs, the loop, and its end."""
    started, cuda = time.time(), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # The tiny model's matrices are so small that threads spend their time waiting for one another: on two cores a
        # second one gains nothing, and beside a busy program it makes a run ten times as long.
        torch.set_num_threads(1)
    check_tracker(settings.log)
    prompts, targets = read_prompts(settings.prompts, settings.targets)
    held_out, held_out_targets = read_prompts(settings.eval_prompts, settings.eval_targets)
    rewards = load_rewards(settings, settings.reward, prompts, targets)
    if targets or held_out_targets:  # where the others have none, likeness does not apply
        targets, held_out_targets = targets or [None] * len(prompts), held_out_targets or [None] * len(held_out)
    held_out = held_out, held_out_targets
    judges = load_rewards(settings, settings.eval_reward, *held_out) if settings.eval_reward else {}
    settings.combine = settings.combine or ("zscore" if len(rewards) > 1 else "sum")
    out = choose_out(settings)
    print_settings(settings, device, len(prompts), len(held_out[0]))
    try:
        trainer, done = build_trainer(load(settings, device), settings, rewards, device), 0
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no memory for the weights ({reason}); --offload yes spares the GPU, no the host") from None
    evaluator = build_evaluator(trainer, settings)  # before the decoder's trainer takes its place
    decoder = build_decoder(trainer, settings)
    halves = {"": trainer} | ({} if decoder is None else {"decoder": decoder})
    if settings.resume is not None:  # after the adapters have moved to the GPU: the optimisers' state follows them
        done = checkpoints.load(out, halves)
    record, stop = Record(out, settings, device, done), StopRequest()
    evaluator.phase = trainer.phase = record.clock
    if decoder is not None:
        decoder.phase = lambda name: record.clock(f"decoder {name}")

    def save():
        if ranks.rank() == 0:
            checkpoints.save(out, done, halves, settings, record.best_step())

    def evaluate_once():
        if settings.steps == 0 or not record.evaluations or record.evaluations[-1]["step"] != done:
            known = evaluate(evaluator, settings, rewards, judges, prompts, targets, EVAL_SEED)
            record.evaluation(done, known, evaluate(evaluator, settings, rewards, judges, *held_out, HELD_OUT_SEED))

    skipped = 0
    try:
        if settings.steps > 0:
            save()
        if done == 0 or settings.steps == 0 or is_multiple(done, settings.eval_every):
            evaluate_once()
        for step in range(done, settings.steps):
            # Every draw of a step starts from the step's seed, a reward's own included: nothing random needs saving.
            seed, rows = seed_of_step(step, settings), prompt_indices(step, settings, len(prompts))
            set_seed(seed % 2**32)
            given = [prompts[i] for i in rows], targets and [targets[i] for i in rows], seed
            rollouts, metrics = trainer.step(*given) if settings.train != "decoder" else (trainer.rollout(*given), {})
            metrics = {"skipped": 0} | metrics | ({} if decoder is None else decoder.learn())
            metrics["skipped"] += metrics.get("decoder/skipped", 0)
            done = step + 1
            for half in halves.values():
                half.policy_moved = False

            metrics = ranks.mean(step_metrics(rollouts, rewards) | metrics | record.clock.read())
            record.step(done, metrics, format_step(done, metrics, settings))
            stopping = any(ranks.gather(stop.received))  # together, or the others would wait for the one that stopped
            if done in (1, settings.steps) or is_multiple(done, settings.sample_every) or stopping:
                record.group(done, rollouts[0], total_rewards(rollouts[0], rewards))
            if stopping:
                break
            skipped = skipped + 1 if metrics["skipped"] else 0
            if skipped == MAX_SKIPPED:
                raise UserError(f"{skipped} steps in a row had no finite gradient; start anew with a lower --lr")
            if is_multiple(done, settings.save_every) or is_multiple(done, settings.eval_every):
                save()
            if is_multiple(done, settings.eval_every):
                evaluate_once()

        if settings.steps > 0:
            save()
            if done < settings.steps:
                torchrun = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE')}"
                command = torchrun if ranks.count() > 1 else "python"
                record.clock.bar.write(f"saved; go on with: {command} train.py --resume {out}")
            evaluate_once()
            record.end(halves, settings)
    except (torch.OutOfMemoryError, RewardError) as error:
        if not any(half.policy_moved for half in halves.values()):  # else the step is half made
            save()
        if isinstance(error, RewardError):
            raise UserError(f"{error}; mend it and go on with --resume {out}") from None
        raise UserError(
            f"out of GPU memory while at '{record.clock.phase}'; --resume {out} goes on, also with --offload yes or a "
            "lower --micro-batch-size; start anew with a lower --height and --width, or --group-size"
        ) from None
    finally:
        record.clock.bar.close()
    print(f"{done} steps, {time.time() - started:.0f} s; what it leaves is in {out}")


def print_settings(settings, device, num_prompts, num_held_out):
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    name += " (OMP_NUM_THREADS sets another number)" if device.type == "cpu" else ""
    name += f", one of {ranks.count()}" if ranks.count() > 1 else ""
    print(f"device: {name}\nmodel: {settings.model}; --model FOLDER_OR_ID chooses another")
    print(textwrap.fill("settings: " + " ".join(f"{k}={v}" for k, v in vars(settings).items()), 118))
    codes = settings.height * settings.width // 32**2 + 256
    judged = min(settings.eval_count, num_prompts) + min(settings.eval_count, num_held_out)
    paintings = settings.paintings if settings.train == "both" else 1
    for what, groups, steps, guidance in (
        ("a step", settings.prompts_per_step * paintings, settings.decode_steps, settings.guidance_scale),
        ("an evaluation", judged, settings.eval_decode_steps, settings.eval_guidance_scale),
    ):
        passes = 2 * steps if guidance > 1 else steps  # with codes, and without
        print(f"{what}: {groups * settings.group_size} pictures of about {codes:,} codes, {passes} decoder passes each")
    print(f"{num_prompts} prompts, {num_held_out} held out; what the run leaves goes to {settings.out}", flush=True)


def is_multiple(step, every):
    return every > 0 and step % every == 0


def main(arguments=None):
    """train(), with what the user can mend as one line and exit code 2, whichever rank it happened on."""
    settings = None
    warnings.simplefilter("ignore", FutureWarning)  # of one library about another
    try:
        ranks.join()
        settings = parse_settings(arguments)
        train(settings)
        ranks.leave()
        return 0
    except KeyboardInterrupt:  # before the first step: there is nothing to save yet
        return 130
    except UserError as error:
        message = error
    except TorchDynamoException as error:
        message = f"torch.compile failed ({str(error).strip().splitlines()[0]}); --compile no does without"
    except (OSError, SafetensorError) as error:
        message = f"cannot write to {settings.out}: {error}"
    except RuntimeError as error:
        if ranks.count() == 1 or "peer" not in str(error):
            raise
        message = "another rank has gone: it failed, was killed, or its machine ran out of memory; look further up"
    print("error:", f"rank {ranks.rank()}: {message}" if ranks.count() > 1 else message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
