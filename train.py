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
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from torch._dynamo.exc import TorchDynamoException
from transformers import GlmImageForConditionalGeneration, T5EncoderModel, set_seed

from decoder import DecoderGRPO, repeat_for_steps
from grpo import GRPO, GRPOSettings, NotFinite, set_advantages
from rewards import begin_scoring, combine, score, weighted_sum, weights_of
from runtime import UserError, checkpoints, counted, ranks
from runtime.adapters import adamw, add_adapter, has_adapter
from runtime.data import load_data, pictures_of, read_inputs, readable_loading
from runtime.gpu import CapturedForward, keep_one_source, keep_rope_tables, place, plan
from runtime.int8 import round_linears
from runtime.log import Phases, Record
from runtime.metrics import reward_metrics, spreads
from runtime.rescue import failing_together, rescued, resume_command
from runtime.settings import TINY, claim_folder, parse_settings, print_start

LORA_TARGETS = {
    "codes": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],  # in the language model only
    "decoder": ["to_q", "to_k", "to_v", "to_out.0"],  # the attention of every block
}
SHOWN = 3  # in before-after.png: prompts per set (training, held out), pictures per prompt
# The codes of a group draw from its seed itself, see seed_of_step; all else draws far from there. No run of 1,000 steps
# with a --seed below 1,000 comes near an evaluation's.
SEEDS = {"evaluation": 2**29, "held out": 2**29 + 2**20, "paths": 2**30, "noise": 2**31}

# ---- GLM-Image: prompts in, pictures out ----------------------------------------------------------------------------


@torch.no_grad()
def read_sources(pipe, sources, device):
    """Give each Source its codes, by the model's own vision tower and quantiser."""
    model = pipe.vision_language_encoder
    for source in sources:
        model.model.visual.to(device)
        model.model.vqmodel.to(device)
        inputs = pipe.processor.image_processor(source.image, return_tensors="pt").to(device)
        grid = inputs["image_grid_thw"]  # (1, 3)
        if grid.tolist() != [[1, source.image.height // 32, source.image.width // 32]]:
            raise UserError(f"the model reads a picture of {source.image.size} pixels as {grid.tolist()[0][1:]} codes, "
                            "not one for 32x32: choose another --height and --width")  # fmt: skip
        features = model.get_image_features(inputs["pixel_values"], grid).pooler_output
        source.codes = model.get_image_tokens(features).cpu()


def encode_prompt(processor, prompt, height, width, source=None):
    """A prompt as the policy reads it, and the 3-D positions of everything it reads and writes.

    GLM-Image writes a preview of about 256 codes first, then the picture proper, one code per 32x32 pixels; both row by
    row. To edit a picture it reads that one's codes before the text, and writes no preview. Positions are (temporal,
    height, width). Text counts up on all three; a grid keeps the time of its start s and spreads over (s + row,
    s + column); what follows starts at s + the longer side.

    Args:
        height, width: of the picture to be written, multiples of 32.
        source: the Source to edit, with its codes, or None.

    Returns: prompt_ids (L,), position_ids (3, L+T), T.
    """
    content = [{"type": "text", "text": prompt}]
    if source is not None:
        content.insert(0, {"type": "image", "image": source.image})
    inputs = processor.apply_chat_template(
        [[{"role": "user", "content": content}]], tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )  # fmt: skip
    prompt_ids = inputs["input_ids"][0]  # (L,)
    grids = inputs["image_grid_thw"].tolist()
    token = [1, 1, 1]  # a token of text is a grid of one
    parts = [token] * len(prompt_ids) + grids[::-1]  # listed large first, written preview first
    if source is not None:
        begin = prompt_ids.tolist().index(processor.image_token_id)
        end = begin + len(source.codes)
        prompt_ids[begin:end] = source.codes
        parts = [token] * begin + grids[:1] + [token] * (len(prompt_ids) - end) + grids[1:]

    positions = []
    start = 0
    for _, rows, columns in parts:
        grid = torch.cartesian_prod(torch.tensor([0]), torch.arange(rows), torch.arange(columns)).T  # (3, rows*columns)
        positions.append(start + grid)
        start += max(rows, columns)
    positions = torch.cat(positions, dim=1)  # (3, L+T)
    return prompt_ids, positions, positions.shape[1] - len(prompt_ids)


@dataclass
class PictureSettings:
    """How pictures are made."""

    height: int  # pixels
    width: int
    decode_steps: int  # denoising steps
    decode_window: int | None  # consecutive steps made stochastic when the decoder learns; None: all but the last
    guidance_scale: float
    guidance_steps: int | None  # guide only the first few; None: all
    micro_batch_size: int  # pictures painted at a time
    sample_batch: int | None  # prompts whose codes are sampled at a time; None: all


def picture_settings(settings, deployed=False):
    """How a run paints: quickly in training, `deployed` in an evaluation."""
    if deployed:
        steps, guidance, guided = settings.eval_decode_steps, settings.eval_guidance_scale, None
    else:
        steps, guidance, guided = settings.decode_steps, settings.guidance_scale, settings.guidance_steps
    batches = settings.micro_batch_size, settings.sample_batch
    return PictureSettings(settings.height, settings.width, steps, settings.decode_window, guidance, guided, *batches)


def for_decoder(codes):
    """(B, rows, columns) -> (B, 4*rows*columns): from one code per 32x32 pixels to one per 16x16, for the decoder."""
    return codes.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)


def decode_images(pipe, prompt, tokens, pictures, seed, source=None):
    """Paint a group: (G, T) tokens of one prompt -> G PIL images. pictures: PictureSettings. source: what they edit.

    One starting noise for the whole group: its pictures then differ by the policy's choices alone. One prompt per
    batch: glyph embeddings of different prompts would be padded, and the decoder does not mask the padding.
    """
    rows = pictures.height // 32
    columns = pictures.width // 32
    scale = pipe.vae_scale_factor
    device = pipe.transformer.device
    # The decoder is not shown the preview: that is what the policy looks at as it writes the picture proper.
    prior = for_decoder(tokens[:, -rows * columns :].view(-1, rows, columns))  # (G, 4*rows*columns)
    edited = {}  # what the pipeline wants of the source, of each picture
    if source is not None:
        size = source.image.height // 16, source.image.width // 16
        codes = for_decoder(source.codes.view(1, size[0] // 2, size[1] // 2))[0].to(device)
        edited = {"image": [source.image], "prior_token_image_ids": codes}
        edited["source_image_grid_thw"] = torch.tensor([[1, *size]])
    shape = 1, pipe.transformer.config.in_channels, pictures.height // scale, pictures.width // scale
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + SEEDS["noise"]))

    def end_guidance(pipe, step, *_):
        if step + 1 == pictures.guidance_steps:
            pipe._guidance_scale = 1.0  # which the pipeline reads anew in every denoising step
        return {}

    images = []
    for batch in prior.split(pictures.micro_batch_size):
        images += pipe(
            prompt=[prompt] * len(batch), prior_token_ids=batch.to(device),
            **{name: [value] * len(batch) for name, value in edited.items()},
            latents=noise.expand(len(batch), -1, -1, -1), height=pictures.height, width=pictures.width,
            num_inference_steps=pictures.decode_steps, guidance_scale=pictures.guidance_scale,
            callback_on_step_end=end_guidance,
        ).images  # fmt: skip
    return images


def paint(run, prompt, tokens, pictures, num_paintings, seed, source=None):
    """Paint each code sequence (G, T) of a prompt K times: G*K images, and the decoder's denoising steps on the way.

    A single painting is made by the stock sampler, which draws nothing: there are no steps to learn from.
    """
    if num_paintings == 1:
        return decode_images(run.pipe, prompt, tokens, pictures, seed, source), []
    decode = lambda pipe, codes: decode_images(pipe, prompt, codes, pictures, seed)
    generator = torch.Generator().manual_seed(seed + SEEDS["paths"])
    count = pictures.decode_window or pictures.decode_steps - 1
    first = random.Random(seed).randrange(pictures.decode_steps - count)
    return run.decoder.sample(decode, tokens, num_paintings, generator, range(first, first + count))


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
    if settings.sources and Path(settings.model).resolve() == Path(TINY):
        dtype = torch.float32  # in bfloat16 its vision tower reads a third of the codes wrong
    if version("diffusers").startswith(("0.40.", "0.41.")):
        raise UserError("diffusers 0.40 and 0.41 paint GLM-Image wrong (they drop its timesteps): take 0.42.1 or later")
    with readable_loading(settings.model):
        return GlmImagePipeline.from_pretrained(settings.model, dtype=dtype, use_safetensors=True, **modules)


def outline(settings, device):
    """What place() will get, policy first, as tensors without data, built from a few kB of config files."""
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


def build(pipe, settings, device, home=None):
    """Splits the stock pipeline into painter, policy trainer and, if it learns, decoder trainer.

    All still on the CPU; it is runtime.gpu.place that moves them. Only what --base int8 rounds goes to `home` at once,
    if that is given: the host never holds it.
    """
    language_model = pipe.vision_language_encoder
    language_model.model.visual = language_model.model.vqmodel = None  # they read sources, see read_sources
    pipe = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    pipe.set_progress_bar_config(disable=True)
    keep_rope_tables(pipe.transformer)
    keep_one_source(pipe.transformer)
    if settings.base == "int8":  # embeddings, head, norms, VAE and text encoder stay as they are
        round_linears(language_model.model.language_model.layers, home)
        round_linears(pipe.transformer.transformer_blocks, home)
    for module in painters(pipe):
        module.requires_grad_(False)
    if device.type != "cpu":
        language_model.activation_checkpointing_enable()  # recompute activations instead of keeping them
        pipe.vae.enable_slicing()  # one picture at a time: the VAE takes more memory than all the rest, and little time

    set_seed(settings.seed)  # the adapters' start
    model, reference = add_adapter(language_model, "codes", LORA_TARGETS["codes"], settings)
    compiled = settings.compile == "yes" or (settings.compile == "auto" and device.type == "cuda")
    num_new_tokens = encode_prompt(pipe.processor, "", settings.height, settings.width)[2]
    if settings.sources:
        num_new_tokens = settings.height * settings.width // 32**2  # no preview
    forward = CapturedForward(model, num_new_tokens) if compiled else None
    codes = slice(0, pipe.transformer.config.prior_vq_quantizer_codebook_size)
    algorithm = GRPOSettings(**{field.name: getattr(settings, field.name) for field in fields(GRPOSettings)})
    policy = GRPO(model, adamw(model, settings.lr, settings.warmup_steps), algorithm, codes, forward, reference)
    if settings.train == "codes" and not (settings.adapter and has_adapter(settings.adapter, "decoder")):
        return pipe, policy, None

    # From here on pipe.transformer contains the adapter.
    model, reference = add_adapter(pipe.transformer, "decoder", LORA_TARGETS["decoder"], settings)
    if settings.train == "codes":
        model.requires_grad_(False)
        return pipe, policy, None
    if device.type != "cpu":
        pipe.transformer.enable_gradient_checkpointing()
    optimizer = adamw(model, settings.decoder_lr, settings.warmup_steps)
    drawn = {"noise_level": settings.noise_level, "guidance_scale": settings.guidance_scale}
    decoder = DecoderGRPO(model, optimizer, algorithm, pipe, **drawn, reference=reference)
    return pipe, policy, decoder


# ---- one step of GRPO: sample, paint and score, advantages, reference, loss, update ----------------------------------


@dataclass
class Rollout:
    """What was sampled for N prompts: G code sequences for each, K paintings of each sequence."""

    groups: list  # N Groups, of grpo.py
    denoising_steps: list  # N*G times those of a path, or none where nothing was drawn
    images: list  # N*G*K PIL images, prompt after prompt, sequence after sequence
    raw_rewards: dict  # {name: (N*G*K,)}
    sources: list | None = None  # N PIL images that these were to edit


def rollout(run, pictures, rewards, prompts, targets, seed, num_sequences, num_paintings=1, sources=None):
    """The first two parts of a step; all there is to an evaluation.

    pictures: PictureSettings. rewards: {name: (function, weight)}. targets: N of anything a reward compares with, or
    None. seed: fixes all draws. sources: N Sources to edit, or None. run.phase(name, *models) measures, and before that
    brings the models to the GPU if they take turns there.
    """
    edited = sources or [None] * len(prompts)
    groups = []  # N
    with run.phase("sample", run.policy.model):  # 1. sample G code sequences per prompt
        for rows in torch.arange(len(prompts)).split(pictures.sample_batch or len(prompts)):
            batch = [(prompts[i], edited[i]) for i in rows]
            with failing_together([prompt for prompt, _ in batch]):
                size = pictures.height, pictures.width
                encoded = [encode_prompt(run.pipe.processor, prompt, *size, source) for prompt, source in batch]
                groups += run.policy.sample(encoded, num_sequences, seed + rows[0].item())

    originals = pictures_of(sources)
    images = []
    denoising_steps = []
    pending = []  # of each prompt, the rewards that are scored while the next is painted
    with run.phase("decode", *painters(run.pipe)), failing_together(prompts):  # 2. paint each of them K times ...
        for i, (prompt, source, group) in enumerate(zip(prompts, edited, groups, strict=True)):
            painted, steps = paint(run, prompt, group.tokens, pictures, num_paintings, seed + i, source)
            if not all(step.old_logprobs.isfinite().all() for step in steps):
                raise NotFinite([i])
            run.phase.painted()
            images += painted
            denoising_steps += steps
            target = targets and [targets[i]]
            original = originals and [originals[i]]
            pending.append(begin_scoring(rewards, painted, [prompt], target, original))
    with run.phase("score"), failing_together(prompts):  # ... and score every picture
        raw_rewards = score(rewards, images, prompts, targets, originals, pending)
    return Rollout(groups, denoising_steps, images, raw_rewards, originals)


def grpo_step(run, settings, rewards, prompts, targets, seed, sources=None):
    """The six parts of a step. N prompts, G code sequences for each, K paintings of each.

    K is 1 unless the decoder learns; G is 1 where it learns alone. Returns the Rollout and the metrics.
    """
    G, K = settings.sequences, settings.paintings
    rolled = rollout(run, picture_settings(settings), rewards, prompts, targets, seed, G, K, sources)  # 1 and 2
    metrics = {}

    if G > 1:
        # 3. advantages: codes have the mean reward of their paintings, and are compared among the G of a prompt
        means = {name: values.view(-1, K).nanmean(1) for name, values in rolled.raw_rewards.items()}  # {name: (N*G,)}
        set_advantages(rolled.groups, combine(means, weights_of(rewards), G, settings.combine))
        with run.phase("reference", run.policy.model):
            run.policy.add_reference(rolled.groups)  # 4. log-probs of these codes under the reference
        with run.phase("update", run.policy.model):
            metrics |= run.policy.update(rolled.groups)  # 4. under the policy, 5. the loss, and 6. the update

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


def load_run(settings, data, device, turns):
    """The models where they belong, with what trains them; and the step they are at, of the run that is resumed.

    turns: whether policy and painters take turns on the device.
    """
    try:
        pipe = load(settings, device)
        read_sources(pipe, [*(data.prompts.sources or ()), *(data.held_out.sources or ())], device)
        pipe, policy, decoder = build(pipe, settings, device, home=None if turns else device)
        offload = place([policy.model, *painters(pipe)], device, policy.forward, turns)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no memory for the weights ({reason}); try --offload yes (GPU full) or no (host)") from None
    done = 0
    if settings.resume is not None:
        done = checkpoints.load(Path(settings.resume), learners_of(policy, decoder))
    return Run(pipe, policy, decoder, Phases(device, settings.steps, done, offload)), done


def prompt_indices(step, settings, prompts, records=(), weights=None):
    """Which prompts a step trains on, by --order; each rank takes its share.

    shuffled, file: every line once per epoch, reshuffled or as in the file: a function of the seed and the step.
    spread: drawn in proportion to `spreads`, none twice in a step: a function of groups.jsonl (`records`) as well.
    """
    count = len(prompts)
    groups = settings.prompts_per_step * ranks.count()
    if settings.order == "spread":
        drawn = random.Random(f"{settings.seed} {step}")
        # The smallest of exponential variables with these rates: successive draws without replacement.
        times = [drawn.expovariate(spread) for spread in spreads(prompts, records, weights)]
        order = sorted(range(count), key=lambda i: times[i])
        return [order[i % count] for i in ranks.shard(groups)]
    epochs = [divmod(step * groups + i, count) for i in ranks.shard(groups)]
    if settings.order == "file":
        return [i for _, i in epochs]
    return [random.Random(f"{settings.seed} {epoch}").sample(range(count), count)[i] for epoch, i in epochs]


def seed_of_step(step, settings):
    """The seed of this rank's first group; those that follow count up, on through all ranks."""
    return (settings.seed * 1_000_003 + step) * 1_000 + ranks.rank() * settings.prompts_per_step


# ---- judging --------------------------------------------------------------------------------------------------------


def evaluate(run, settings, data, prompts, seed, stop=None):
    """Paint the first prompts as deployed, from the same seeds each time: only what was learned makes a difference.

    stop: StopRequest; once received, this ends early and returns None. Otherwise returns the metrics over all ranks,
    and of the first prompts (prompt, some pictures, their rewards, the picture they edit or None).
    """
    count = min(settings.eval_count, len(prompts.texts))
    size = settings.group_size
    scored = []
    shown = []  # (row, prompt, source, pictures)
    for rows in batches_of_rank(count, settings.prompts_per_step):  # as many at once as in training
        texts, targets, sources = prompts.take([row % len(prompts.texts) for row in rows])
        set_seed(rows[0])
        pictures = picture_settings(settings, deployed=True)
        rewards = data.rewards | data.judges
        rolled = rollout(run, pictures, rewards, texts, targets, seed + rows[0], size, sources=sources)
        scored.append(rolled.raw_rewards)
        own = torch.arange(len(rolled.images)).split(size)
        for row, text, source, group in zip(rows, texts, rolled.sources or [None] * len(texts), own, strict=True):
            if row < SHOWN:
                shown.append((row, text, source, [rolled.images[i] for i in group[:SHOWN]]))
        if stop is not None and any(ranks.gather(stop.received)):
            return None
    of_ranks = ranks.gather((scored, shown))
    parts = [part for scored, _ in of_ranks for part in scored]
    raw_rewards = {name: torch.cat([part[name] for part in parts])[: count * size] for name in parts[0]}  # (count*G,)
    total = weighted_sum({name: raw_rewards[name] for name in data.rewards}, weights_of(data.rewards), size)
    metrics = reward_metrics(raw_rewards, total, size) | {"images": count * size, "prompts": count}
    shown = [of_prompt for _, shown in of_ranks for of_prompt in shown if of_prompt[0] < count]
    own = total.split(size)
    return metrics, [(text, images, own[row][: len(images)].tolist(), source) for row, text, source, images in shown]


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
    of_rank = [-(-min(settings.eval_count, len(p.texts)) // ranks.count()) for p in (data.prompts, data.held_out)]
    with run.phase.evaluation(sum(of_rank)):
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
        prompts, held_out, inputs = read_inputs(settings)
        turns = plan(partial(outline, device=device), settings, device)  # by sizes alone, before anything is downloaded
        print_start(settings, out, device, len(prompts.texts), len(held_out.texts))
        data = load_data(settings, prompts, held_out)
        run, begun = load_run(settings, data, device, turns)
        learners = learners_of(run.policy, run.decoder)
        weights = weights_of(data.rewards)
        with closing(run.phase.bar), rescued(Record(out, settings, inputs, run.phase, learners, begun)) as record:
            record.save()
            if begun == 0 or due(begun, settings.eval_every):
                judge(run, settings, data, record, record.stop)
            record.stop.follows = b"this step is finished, saved and evaluated"
            for step in range(begun, settings.steps):
                if any(ranks.gather(record.stop.received)):  # together, or the others would wait for one that stopped
                    break
                # Every draw of a step starts from the step's seed, a reward's own too: no random state needs saving.
                seed = seed_of_step(step, settings)
                set_seed(seed % 2**32)
                rows = prompt_indices(step, settings, data.prompts.texts, record.groups, weights)
                texts, targets, sources = data.prompts.take(rows)
                rolled, metrics = grpo_step(run, settings, data.rewards, texts, targets, seed, sources)
                record.step(step + 1, texts, rolled, weights, metrics)
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
    more = "; already complete: raise --steps for more" if 0 < begun == settings.steps else ""
    print(f"{counted(record.done, 'step')}, {time.time() - started:.0f} s{more}; what it leaves is in {out}")


def due(step, every):
    return every > 0 and step % every == 0


def main(arguments=None):
    """train(), but errors the user can fix end in one line and exit code 2, on whichever rank."""
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
        ranks.print_error(f"torch.compile failed ({str(error).strip().splitlines()[0]}); try --compile no")
    return 2


if __name__ == "__main__":
    sys.exit(main())
