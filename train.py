"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a laptop.

    python train.py --group-size 4
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/; --model chooses. The
algorithm is in grpo.py, the rewards are in rewards.py, the settings in runtime/settings.py. Here a prompt becomes token
ids and positions, sampled codes become pictures, and one step of GRPO is grpo_step(), its six parts in their order.
"""

import random
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path

import peft
import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from torch._dynamo.exc import TorchDynamoException
from transformers import GlmImageForConditionalGeneration, T5EncoderModel, set_seed

from decoder import DecoderGRPO, repeat_for_steps
from grpo import GRPO, GRPOSettings, NotFinite, set_advantages
from rewards import combine, score, weighted_sum, weights_of
from runtime import UserError, checkpoints, ranks
from runtime.data import load_data, readable_loading
from runtime.gpu import CapturedForward, keep_rope_tables, place, plan
from runtime.int8 import round_linears
from runtime.log import Phases, Record
from runtime.metrics import reward_metrics
from runtime.rescue import failing_together, rescued, resume_command
from runtime.settings import claim_folder, parse_settings, print_start

LORA_TARGETS = {
    "codes": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],  # in the language model only
    "decoder": ["to_q", "to_k", "to_v", "to_out.0"],  # the attention of every block
}
SHOWN = 3  # of training and held out each: prompts in before-after.png, and pictures of each
# The codes of a group draw from its seed itself, see seed_of_step; all else draws far from there. No run of 1,000 steps
# with a --seed below 1,000 comes near an evaluation's.
SEEDS = {"evaluation": 2**29, "held out": 2**29 + 2**20, "paths": 2**30, "noise": 2**31}

# ---- GLM-Image: prompts in, pictures out ----------------------------------------------------------------------------


def encode_prompt(processor, prompt, height, width):
    """A prompt as the policy reads it, and the 3-D positions of everything it reads and writes.

    GLM-Image writes a preview of about 256 codes first, then the picture proper, one code per 32x32 pixels; both row by
    row. Positions are (temporal, height, width). Text counts up on all three; a grid keeps the time of its start s and
    spreads over (s + row, s + column); what follows starts at s + the longer side.

    Returns: prompt_ids (L,), position_ids (3, L+T), T. Height and width are multiples of 32.
    """
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]]
    size = {"target_h": height, "target_w": width}
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=size
    )
    prompt_ids = inputs["input_ids"][0]  # (L,)
    start = len(prompt_ids)
    positions = [torch.arange(start).expand(3, -1)]
    for _, rows, columns in inputs["image_grid_thw"].flip(0).tolist():  # listed large first, written preview first
        grid = torch.cartesian_prod(torch.tensor([0]), torch.arange(rows), torch.arange(columns)).T  # (3, rows*columns)
        positions.append(start + grid)
        start += max(rows, columns)
    positions = torch.cat(positions, dim=1)  # (3, L+T)
    return prompt_ids, positions, positions.shape[1] - len(prompt_ids)


@dataclass
class PictureSettings:
    """How pictures are painted."""

    height: int  # pixels
    width: int
    decode_steps: int  # denoising steps
    guidance_scale: float
    guidance_steps: int | None  # guided are the first so many, or all
    micro_batch_size: int  # pictures at a time


def picture_settings(settings, deployed=False):
    """How a run paints: quickly in training, `deployed` in an evaluation."""
    painter = settings.decode_steps, settings.guidance_scale, settings.guidance_steps
    if deployed:
        painter = settings.eval_decode_steps, settings.eval_guidance_scale, None
    return PictureSettings(settings.height, settings.width, *painter, settings.micro_batch_size)


def decode_images(pipe, prompt, tokens, pictures, seed):
    """Paint a group: (G, T) tokens of one prompt -> G PIL images. pictures: PictureSettings.

    One starting noise for the whole group: its pictures then differ by the policy's choices alone. One prompt per
    batch: glyph embeddings of different prompts would be padded, and the decoder does not mask the padding.
    """
    rows, columns, scale = pictures.height // 32, pictures.width // 32, pipe.vae_scale_factor
    # The decoder is not shown the preview: that is what the policy looks at as it writes the picture proper. A code
    # stands for 32x32 pixels, the decoder wants one per 16x16.
    large = tokens[:, -rows * columns :].view(-1, rows, columns)
    prior = large.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)  # (G, 4*rows*columns)
    shape = 1, pipe.transformer.config.in_channels, pictures.height // scale, pictures.width // scale
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + SEEDS["noise"]))

    def end_guidance(pipe, step, *_):
        if step + 1 == pictures.guidance_steps:
            pipe._guidance_scale = 1.0  # which the pipeline reads anew in every denoising step
        return {}

    images = []
    for batch in prior.split(pictures.micro_batch_size):
        images += pipe(
            prompt=[prompt] * len(batch), prior_token_ids=batch.to(pipe.transformer.device),
            latents=noise.expand(len(batch), -1, -1, -1), height=pictures.height, width=pictures.width,
            num_inference_steps=pictures.decode_steps, guidance_scale=pictures.guidance_scale,
            callback_on_step_end=end_guidance,
        ).images  # fmt: skip
    return images


def paint(run, prompt, tokens, pictures, num_paintings, seed):
    """Paint each code sequence (G, T) of a prompt K times: G*K images, and the decoder's denoising steps on the way.

    A single painting is made by the stock sampler, which draws nothing: there are no steps to learn from.
    """
    if num_paintings == 1:
        return decode_images(run.pipe, prompt, tokens, pictures, seed), []
    decode = lambda pipe, codes: decode_images(pipe, prompt, codes, pictures, seed)
    generator = torch.Generator().manual_seed(seed + SEEDS["paths"])
    return run.decoder.sample(decode, tokens, num_paintings, generator)


# ---- what learns ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run works with."""

    pipe: GlmImagePipeline  # the stock pipeline without its language model: it paints
    policy: GRPO  # trains the language model, which writes the codes
    decoder: DecoderGRPO | None  # trains the pipeline's transformer, if that learns
    phase: Phases


def learners_of(policy, decoder):
    """What learns, by the names that checkpoints have for it."""
    return {"codes": policy} | ({} if decoder is None else {"decoder": decoder})


def painters(pipe):
    """The models that paint."""
    return pipe.text_encoder, pipe.transformer, pipe.vae


def load(settings, device, **modules):
    """The stock pipeline, on the CPU: its weights are mapped from the files, so that several processes share them.

    modules: parts of it that are there already, by their names.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if version("diffusers").startswith(("0.40.", "0.41.")):
        raise UserError("diffusers 0.40 and 0.41 paint GLM-Image wrong (they drop its timesteps): take 0.42.1 or later")
    with readable_loading(settings.model):
        return GlmImagePipeline.from_pretrained(settings.model, dtype=dtype, use_safetensors=True, **modules)


def outline(settings, device):
    """What place() will be given, policy first, as tensors that have sizes and no content: made of a few kB of config files."""
    classes = {"vision_language_encoder": GlmImageForConditionalGeneration, "text_encoder": T5EncoderModel}
    classes |= {"transformer": GlmImageTransformer2DModel, "vae": AutoencoderKL}
    modules = {}
    with readable_loading(settings.model), torch.device("meta"):
        for name, kind in classes.items():
            if hasattr(kind, "config_class"):  # of transformers, not of diffusers
                made = kind(kind.config_class.from_pretrained(settings.model, subfolder=name))
            else:
                made = kind.from_config(kind.load_config(settings.model, subfolder=name))
            modules[name] = made.to(torch.bfloat16)
    pipe, policy, _ = build(load(settings, device, **modules), settings, torch.device("meta"))
    return [policy.model, *painters(pipe)]


def add_adapter(module, name, settings):
    """The module with a LoRA adapter, float32 even over a bfloat16 base, and the reference, see GRPO.

    The adapter is a fresh one, and the reference the module without it; or it is that of --adapter, which then is the
    reference too. name: "codes" or "decoder".
    """
    alpha = settings.lora_alpha or 2 * settings.lora_rank
    lora = peft.LoraConfig(r=settings.lora_rank, lora_alpha=alpha, target_modules=LORA_TARGETS[name])
    model = peft.get_peft_model(module, lora)
    if settings.adapter is None or not checkpoints.start_from(settings.adapter, name, model):
        return model, None
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, partial(having_weights, trained, [p.detach().clone() for p in trained])


@contextmanager
def having_weights(parameters, weights):
    """Within it the parameters have these weights."""
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight.to(parameter.device)
        yield
    finally:
        for parameter, weight in zip(parameters, own, strict=True):
            parameter.data = weight


def adamw(model, lr):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)


def build(pipe, settings, device, home=None):
    """Splits the stock pipeline into painter, policy trainer and, if it learns, decoder trainer.

    All still on the CPU; it is runtime.gpu.place that moves them. Only what --base int8 rounds goes to `home` at once,
    if that is given: the host never holds it.
    """
    language_model = pipe.vision_language_encoder
    language_model.model.visual = language_model.model.vqmodel = None  # they read pictures
    pipe = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    pipe.set_progress_bar_config(disable=True)
    keep_rope_tables(pipe.transformer)
    if settings.base == "int8":  # embeddings, head, norms, VAE and text encoder stay as they are
        round_linears(language_model.model.language_model.layers, home)
        round_linears(pipe.transformer.transformer_blocks, home)
    for module in painters(pipe):
        module.requires_grad_(False)
    if device.type != "cpu":
        language_model.activation_checkpointing_enable()  # recompute activations instead of keeping them
        pipe.vae.enable_slicing()  # one picture at a time: the VAE takes more memory than all the rest, and little time

    set_seed(settings.seed)  # the adapters' start
    model, reference = add_adapter(language_model, "codes", settings)
    compiled = settings.compile == "yes" or (settings.compile == "auto" and device.type == "cuda")
    num_new_tokens = encode_prompt(pipe.processor, "", settings.height, settings.width)[2]
    forward = CapturedForward(model, num_new_tokens) if compiled else None
    codes = slice(0, pipe.transformer.config.prior_vq_quantizer_codebook_size)
    algorithm = GRPOSettings(**{field.name: getattr(settings, field.name) for field in fields(GRPOSettings)})
    policy = GRPO(model, adamw(model, settings.lr), algorithm, codes, forward, reference)
    if settings.train == "codes" and not (settings.adapter and checkpoints.has_adapter(settings.adapter, "decoder")):
        return pipe, policy, None

    model, reference = add_adapter(pipe.transformer, "decoder", settings)  # pipe.transformer now contains it
    if settings.train == "codes":
        model.requires_grad_(False)
        return pipe, policy, None
    if device.type != "cpu":
        pipe.transformer.enable_gradient_checkpointing()
    drawn = {"noise_level": settings.noise_level, "guidance_scale": settings.guidance_scale}
    decoder = DecoderGRPO(model, adamw(model, settings.decoder_lr), algorithm, pipe, **drawn, reference=reference)
    return pipe, policy, decoder


# ---- one step of GRPO: sample, paint and score, advantages, reference, loss, update ----------------------------------


@dataclass
class Rollout:
    """What was sampled for N prompts: G code sequences for each, K paintings of each sequence."""

    groups: list  # N Groups, of grpo.py
    denoising_steps: list  # N*G times those of a path, or none where nothing was drawn
    images: list  # N*G*K PIL images, prompt after prompt, sequence after sequence
    raw_rewards: dict  # {name: (N*G*K,)}


def rollout(run, pictures, rewards, prompts, targets, seed, num_sequences, num_paintings=1):
    """The first two parts of a step; all there is to an evaluation.

    pictures: PictureSettings. rewards: {name: (function, weight)}. targets: N of anything a reward compares with, or
    None. seed: fixes all draws. run.phase(name, *models) measures, and before that brings the models to the GPU if they
    take turns there.
    """
    with run.phase("sample", run.policy.model), failing_together(prompts):  # 1. sample G code sequences per prompt
        encoded = [encode_prompt(run.pipe.processor, prompt, pictures.height, pictures.width) for prompt in prompts]
        groups = run.policy.sample(encoded, num_sequences, seed)  # N

    images = []
    denoising_steps = []
    with run.phase("decode", *painters(run.pipe)), failing_together(prompts):  # 2. paint each of them K times ...
        for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            painted, steps = paint(run, prompt, group.tokens, pictures, num_paintings, seed + i)
            if not all(step.old_logprobs.isfinite().all() for step in steps):
                raise NotFinite([i])
            images += painted
            denoising_steps += steps
    with run.phase("score"), failing_together(prompts):  # ... and score every picture
        raw_rewards = score(rewards, images, prompts, targets)
    return Rollout(groups, denoising_steps, images, raw_rewards)


def grpo_step(run, settings, rewards, prompts, targets, seed):
    """The six parts of a step. N prompts, G code sequences for each, K paintings of each.

    K is 1 unless the decoder learns; G is 1 where it learns alone. Returns the Rollout and the metrics.
    """
    G, K = settings.sequences, settings.paintings
    rolled = rollout(run, picture_settings(settings), rewards, prompts, targets, seed, G, K)  # 1 and 2
    metrics = {}

    if G > 1:
        # 3. advantages: codes have the mean reward of their paintings, and are compared among the G of a prompt
        means = {name: values.view(-1, K).nanmean(1) for name, values in rolled.raw_rewards.items()}  # {name: (N*G,)}
        set_advantages(rolled.groups, combine(means, weights_of(rewards), G, settings.combine))
        with run.phase("reference", run.policy.model):
            run.policy.add_reference(rolled.groups)  # 4. log-probs of these codes under the model before training
        with run.phase("update", run.policy.model):
            metrics |= run.policy.update(rolled.groups)  # 5. the loss of each micro-batch, and 6. the update

    if K > 1:
        # 3. to 6. for the decoder: its paintings are compared among the K of the same codes
        combined = combine(rolled.raw_rewards, weights_of(rewards), K, settings.combine)
        set_advantages(rolled.denoising_steps, repeat_for_steps(combined, rolled.denoising_steps))
        with run.phase("decoder reference", *painters(run.pipe)):
            run.decoder.add_reference(rolled.denoising_steps)
        with run.phase("decoder update", *painters(run.pipe)):
            updated = run.decoder.update(rolled.denoising_steps)
        metrics |= {f"decoder/{name}": value for name, value in updated.items()}

    entropy = -torch.stack([group.old_logprobs for group in rolled.groups]).mean().item()  # an unbiased estimate of it
    return rolled, metrics | {"entropy": entropy}


# ---- what a step trains on ------------------------------------------------------------------------------------------


def load_run(settings, device, turns):
    """The models where they belong, with what trains them; and the step they are at, of the run that is resumed.

    turns: whether policy and painters take turns on the device.
    """
    try:
        home = None if turns else device
        pipe, policy, decoder = build(load(settings, device), settings, device, home)
        offload = place([policy.model, *painters(pipe)], device, policy.forward, turns)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no memory for the weights ({reason}); --offload yes spares the GPU, no the host") from None
    done = 0
    if settings.resume is not None:
        done = checkpoints.load(Path(settings.resume), learners_of(policy, decoder))
    return Run(pipe, policy, decoder, Phases(device, settings.steps, done, offload)), done


def prompt_indices(step, settings, count):
    """Which prompts a step trains on: every line once per epoch, reshuffled. A function of the seed, not of history.

    Each rank takes its share of the step's prompts.
    """
    groups = settings.prompts_per_step * ranks.count()
    epochs = [divmod(step * groups + i, count) for i in ranks.shard(groups)]
    return [random.Random(f"{settings.seed} {epoch}").sample(range(count), count)[i] for epoch, i in epochs]


def seed_of_step(step, settings):
    """The seed of this rank's first group; those that follow count up, on through all ranks."""
    return (settings.seed * 1_000_003 + step) * 1_000 + ranks.rank() * settings.prompts_per_step


# ---- judging --------------------------------------------------------------------------------------------------------


def evaluate(run, settings, data, prompts, seed, stop=None):
    """Paint the first prompts as deployed, from the same seeds each time: only what was learned makes a difference.

    stop: an evaluation that ends early when asked to, and returns None. Otherwise returns the metrics over all ranks,
    and of the first prompts (prompt, some pictures, their rewards).
    """
    count = min(settings.eval_count, len(prompts.texts))
    size = settings.group_size
    scored = []
    shown = []  # (row, prompt, pictures)
    for rows in batches_of_rank(count, settings.prompts_per_step):  # as many at once as in training
        texts, targets = prompts.take([row % len(prompts.texts) for row in rows])
        set_seed(rows[0])
        pictures = picture_settings(settings, deployed=True)
        rolled = rollout(run, pictures, data.rewards | data.judges, texts, targets, seed + rows[0], size)
        scored.append(rolled.raw_rewards)
        groups = zip(rows, texts, torch.arange(len(rolled.images)).split(size), strict=True)
        shown += [(row, text, [rolled.images[i] for i in own[:SHOWN]]) for row, text, own in groups if row < SHOWN]
        if stop is not None and any(ranks.gather(stop.received)):
            return None
    of_ranks = ranks.gather((scored, shown))
    parts = [part for scored, _ in of_ranks for part in scored]
    raw_rewards = {name: torch.cat([part[name] for part in parts])[: count * size] for name in parts[0]}  # (count*G,)
    total = weighted_sum({name: raw_rewards[name] for name in data.rewards}, weights_of(data.rewards), size)
    metrics = reward_metrics(raw_rewards, total, size) | {"images": count * size, "prompts": count}
    shown = [of_prompt for _, shown in of_ranks for of_prompt in shown if of_prompt[0] < count]
    return metrics, [(text, images, total[row * size :][: len(images)].tolist()) for row, text, images in shown]


def batches_of_rank(count, size):
    """This rank's share of `count` prompts as lists of rows, `size` at a time.

    Padded, so that every rank makes as many calls; the surplus is dropped from the results.
    """
    padded = -(-count // ranks.count()) * ranks.count()
    return [rows.tolist() for rows in torch.tensor(ranks.shard(padded)).split(size)]


def judge(run, settings, data, record, stop=None):
    """Evaluate on prompts of training and on held-out ones, unless that was done before the run was resumed."""
    if record.evaluations and record.evaluations[-1]["step"] == record.done:
        return
    known = evaluate(run, settings, data, data.prompts, SEEDS["evaluation"], stop)
    new = known and evaluate(run, settings, data, data.held_out, SEEDS["held out"], stop)
    if new:
        record.evaluation(known, new)


# ---- the run --------------------------------------------------------------------------------------------------------


def train(settings):
    """The whole run: prepare, loop, end."""
    started = time.time()
    device = ranks.device()
    with claim_folder(settings) as out:
        turns = plan(partial(outline, device=device), settings, device)  # by sizes alone, before anything is downloaded
        data = load_data(settings)
        print_start(settings, out, device, len(data.prompts.texts), len(data.held_out.texts))
        run, begun = load_run(settings, device, turns)
        learners = learners_of(run.policy, run.decoder)
        with closing(run.phase.bar), rescued(Record(out, settings, run.phase, learners, begun)) as record:
            record.save()
            if begun == 0 or due(begun, settings.eval_every):
                judge(run, settings, data, record, record.stop)
            for step in range(begun, settings.steps):
                if any(
                    ranks.gather(record.stop.received)
                ):  # together, or the others would wait for the one that stopped
                    break
                # Every draw of a step starts from the step's seed, a reward's own too: no random state needs saving.
                seed = seed_of_step(step, settings)
                set_seed(seed % 2**32)
                texts, targets = data.prompts.take(prompt_indices(step, settings, len(data.prompts.texts)))
                rolled, metrics = grpo_step(run, settings, data.rewards, texts, targets, seed)
                record.step(step + 1, texts, rolled, weights_of(data.rewards), metrics)
                if due(step + 1, settings.save_every) or due(step + 1, settings.eval_every):
                    record.save()
                if due(step + 1, settings.eval_every):
                    judge(run, settings, data, record)
            record.save()
            if record.done < settings.steps:
                record.write(f"saved; go on with: {resume_command(out)}")
            stopped = any(ranks.gather(record.stop.received))
            if settings.steps > 0 and not (stopped and record.done == begun):  # without a step nothing is new
                judge(run, settings, data, record)
                record.end()
    print(f"{record.done} steps, {time.time() - started:.0f} s; what it leaves is in {out}")


def due(step, every):
    return every > 0 and step % every == 0


def main(arguments=None):
    """train(), with what the user can mend as one line and exit code 2, whichever rank it happened on."""
    try:
        ranks.join()
        train(parse_settings(arguments))
        ranks.leave()
        return 0
    except KeyboardInterrupt:  # before the first step: there is nothing to save yet
        return 130
    except UserError as error:
        ranks.print_error(error)
    except TorchDynamoException as error:
        ranks.print_error(f"torch.compile failed ({str(error).strip().splitlines()[0]}); --compile no does without")
    return 2


if __name__ == "__main__":
    sys.exit(main())
