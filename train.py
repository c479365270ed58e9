"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a laptop.

    python train.py --group-size 4
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/; --model chooses. The
algorithm is in grpo.py, the rewards are in rewards.py, the settings in runtime/settings.py. Here a prompt becomes token
ids and positions, sampled codes become pictures, and one step of GRPO is grpo_step(), its six parts in their order.
"""

import argparse
import os
import random
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import peft
import torch
from diffusers import GlmImagePipeline
from PIL import Image
from safetensors import SafetensorError
from torch._dynamo.exc import TorchDynamoException
from transformers import set_seed
from transformers.utils import cached_file

from decoder import DecoderGRPO, repeat_for_moves
from grpo import GRPO, NotFinite, set_advantages
from rewards import RewardError, combine, parse_rewards, score, split_spec, weights_of
from runtime import UserError, checkpoints, ranks
from runtime.gpu import CapturedForward, keep_rope_tables, place
from runtime.log import Clock, Record, StopRequest, check_tracker
from runtime.metrics import format_step, reward_metrics, step_metrics
from runtime.prompts import read_prompts
from runtime.settings import TINY, choose_out, parse_settings, print_start, sizes

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]  # in the language model only
DECODER_LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]  # the attention of every block
SHOWN = 3  # of training and held out each: prompts in before-after.png, and pictures of each
EVAL_SEED, HELD_OUT_SEED = 2**29, 2**29 + 2**20  # no run of 1,000 steps with a --seed below 1,000 draws from these
MAX_SKIPPED = 5  # steps in a row without a finite gradient before the run gives up

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
    # The decoder is not shown the preview: that is what the policy looks at as it writes the picture proper. A code
    # stands for 32x32 pixels, the decoder wants one for 16x16.
    large = tokens[:, -rows * columns :].view(-1, rows, columns)
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


def paint(run, prompts, groups, settings, seed):
    """Paint each code sequence of all groups K times: the images, prompt after prompt, and the decoder's moves.

    Unless the decoder learns its moves are the stock ones, of which there is nothing to keep, and K is 1.
    """
    images, moves = [], []
    for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        if settings.train in ("decoder", "both"):
            painted, path = run.decoder.paint(decode_images, prompt, group.tokens, sizes(settings)[1], seed + i)
            images, moves = images + painted, moves + path
            if not all(move.old_logprobs.isfinite().all() for move in path):
                raise NotFinite([i])
        else:
            images += decode_images(run.pipe, prompt, group.tokens, settings, seed + i)
    return images, moves


# ---- what learns ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run works with."""

    pipe: GlmImagePipeline  # the stock pipeline without its language model: it paints
    codes: GRPO  # the language model, which writes the codes
    decoder: DecoderGRPO | None  # the pipeline's transformer, if it learns
    clock: Clock


def painters(pipe):
    """The models that paint."""
    return pipe.text_encoder, pipe.transformer, pipe.vae


@contextmanager
def readable_loading(settings):
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        reason, mend = str(error).strip().split("\n")[0], f"give --model a folder with a GLM-Image pipeline, or {TINY}"
        raise UserError(f"cannot load {settings.model} ({reason}); {mend}") from None


def load(settings, device):
    """The stock pipeline, on the CPU: its weights are mapped from the files, so that several processes share them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if version("diffusers").startswith(("0.40.", "0.41.")):
        raise UserError("diffusers 0.40 and 0.41 paint GLM-Image wrong (they drop its timesteps): take 0.42.1 or later")
    with readable_loading(settings):
        return GlmImagePipeline.from_pretrained(settings.model, dtype=dtype, use_safetensors=True)


def add_adapter(module, targets, settings, lr):
    """The module with a fresh adapter, float32 even over a bfloat16 base, and the adapter's optimizer."""
    lora = peft.LoraConfig(r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules=targets)
    model = peft.get_peft_model(module, lora)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)


def build(pipe, settings, device):
    """Of a stock pipeline: what paints, what writes codes, with a fresh adapter, and the decoder if it learns.

    All still on the CPU; it is runtime.gpu.place that moves them.
    """
    policy = pipe.vision_language_encoder
    policy.model.visual = policy.model.vqmodel = None  # they read pictures
    pipe = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    pipe.set_progress_bar_config(disable=True)
    keep_rope_tables(pipe.transformer)
    for module in painters(pipe):
        module.requires_grad_(False)
    if device.type != "cpu":
        policy.activation_checkpointing_enable()  # recompute activations instead of keeping them
        pipe.vae.enable_slicing()  # one picture at a time: the VAE takes more memory than all the rest, and little time

    set_seed(settings.seed)  # the adapters' start
    policy, optimizer = add_adapter(policy, LORA_TARGETS, settings, settings.lr)
    compiled = settings.compile == "yes" or (settings.compile == "auto" and device.type == "cuda")
    num_new_tokens = encode_prompt(pipe.processor, "", settings.height, settings.width)[2]
    forward = CapturedForward(policy, num_new_tokens) if compiled else None
    codes_only = slice(0, pipe.transformer.config.prior_vq_quantizer_codebook_size)
    codes, decoder = GRPO(policy, optimizer, settings, codes_only, forward), None

    if settings.train in ("decoder", "both"):
        adapted = add_adapter(pipe.transformer, DECODER_LORA_TARGETS, settings, settings.decoder_lr)
        decoder = DecoderGRPO(*adapted, settings, pipe)  # pipe.transformer now contains the adapter
        if device.type != "cpu":
            pipe.transformer.enable_gradient_checkpointing()
    return pipe, codes, decoder


# ---- one step of GRPO: sample, paint and score, advantages, reference, loss, update ----------------------------------


def grpo_step(run, settings, rewards, prompts, targets, seed):
    """The six parts of a step. N prompts, G code sequences for each, K paintings of each: 1, unless the decoder learns.

    settings.train: what learns; "nothing" does in an evaluation. rewards: {name: (function, weight)}. targets: N of
    anything a reward compares with, or None. seed: fixes all draws. clock(phase, *models) measures, and before that
    brings the models to the GPU if they take turns there. Returns the N*G*K images, their raw rewards and the metrics.
    """
    codes, decoder, clock, weights, metrics = run.codes, run.decoder, run.clock, weights_of(rewards), {}
    G, K = sizes(settings)

    with clock("sample", codes.model), failing_together(prompts):  # 1. sample G code sequences for each prompt
        encoded = [encode_prompt(run.pipe.processor, prompt, settings.height, settings.width) for prompt in prompts]
        groups = codes.sample(encoded, G, seed)  # N

    with clock("decode", *painters(run.pipe)), failing_together(prompts):  # 2. paint each of them K times ...
        images, moves = paint(run, prompts, groups, settings, seed)  # N*G*K
    with clock("score"), failing_together(prompts):  # ... and score every picture
        raw_rewards = score(rewards, images, prompts, targets)  # {name: (N*G*K,)}

    if settings.train in ("codes", "both"):
        # 3. advantages: codes have the mean reward of their paintings, and are compared among the G of a prompt
        means = {name: values.view(-1, K).nanmean(1) for name, values in raw_rewards.items()}  # {name: (N*G,)}
        set_advantages(groups, combine(means, weights, G, settings.combine))
        with clock("reference", codes.model):
            codes.add_reference(groups)  # 4. log-probs of these codes under the model before training
        with clock("update", codes.model):
            metrics |= codes.update(groups)  # 5. the loss of each micro-batch, and 6. the update

    if settings.train in ("decoder", "both"):
        # 3. to 6. for the decoder: its paintings are compared among the K of the same codes
        set_advantages(moves, repeat_for_moves(combine(raw_rewards, weights, K, settings.combine), moves))
        with clock("decoder reference", *painters(run.pipe)):
            decoder.add_reference(moves)
        with clock("decoder update", *painters(run.pipe)):
            metrics |= {f"decoder/{name}": value for name, value in decoder.update(moves).items()}
    entropy = -torch.stack([group.old_logprobs for group in groups]).mean().item()  # an unbiased estimate of it
    return images, raw_rewards, metrics | {"entropy": entropy}


class StepFailed(UserError):
    """A step could not be made; the policy has not moved in it."""


@contextmanager
def failing_together(prompts):
    """What fails on one rank fails on all, before any of them has moved: they save the same whole step."""
    failure = None
    try:
        yield
    except RewardError as error:
        failure = str(error)
    except NotFinite as error:
        names = ", ".join(repr(prompts[i]) for i in error.args[0])
        failure = (
            f"the log-probs sampled for {names} are not finite: damaged weights, a GPU kernel that fails, or "
            "too high a --lr or --decoder-lr, which has ruined the adapter: then start anew with a lower one"
        )
    for rank, message in enumerate(ranks.gather(failure)):
        if message is not None:
            raise StepFailed(message if rank == ranks.rank() else f"stopped because rank {rank} has failed")


# ---- what a step trains on ------------------------------------------------------------------------------------------


def load_rewards(flag, settings, prompts):
    """The rewards that a flag names, tried on two blank pictures: what cannot work fails now, not in an hour."""
    blank = [Image.new("RGB", (settings.width, settings.height))] * 2
    try:
        rewards = parse_rewards(getattr(settings, flag))
        score(rewards, blank, *prompts.take([0]))
    except (ValueError, torch.OutOfMemoryError) as error:
        tried = " (tried on two blank pictures)" if isinstance(error, RewardError) else ""
        raise UserError(f"--{flag.replace('_', '-')}: {str(error).strip().splitlines()[0]}{tried}") from None
    return rewards


def prompt_indices(step, settings, count):
    """Which prompts a step trains on: every line once an epoch, reshuffled. A function of the seed, not of history.

    Each rank takes its share of the step's prompts.
    """
    groups = settings.prompts_per_step * ranks.count()
    epochs = [divmod(step * groups + i, count) for i in ranks.shard(groups)]
    return [random.Random(f"{settings.seed} {epoch}").sample(range(count), count)[i] for epoch, i in epochs]


def seed_of_step(step, settings):
    """The seed of this rank's first group; those that follow count up, on through all ranks."""
    return (settings.seed * 1_000_003 + step) * 1_000 + ranks.rank() * settings.prompts_per_step


# ---- judging --------------------------------------------------------------------------------------------------------


def evaluate(run, settings, rewards, eval_rewards, prompts, seed, stop=None):
    """Paint the first prompts as deployed, from the same seeds each time: only what was learned makes a difference.

    `stop`: an evaluation that ends early when asked to, and returns None. Otherwise returns the metrics over all ranks,
    and of the first prompts (prompt, some pictures, their rewards).
    """
    deployed = {"train": "nothing", "decode_steps": settings.eval_decode_steps}
    deployed |= {"guidance_scale": settings.eval_guidance_scale}
    deployed = argparse.Namespace(**{**vars(settings), **deployed})
    count, size, scored, shown = min(settings.eval_count, len(prompts.texts)), settings.group_size, [], []
    few = min(size, SHOWN)
    even = -(-count // ranks.count()) * ranks.count()  # all ranks work equally long; what is too much is left out below
    for chunk in torch.tensor(ranks.shard(even)).split(settings.prompts_per_step):  # as many at once as in training
        first, (texts, targets) = chunk[0].item(), prompts.take((chunk % len(prompts.texts)).tolist())
        set_seed(first)
        images, raw_rewards, _ = grpo_step(run, deployed, rewards | eval_rewards, texts, targets, seed + first)
        scored.append(raw_rewards)
        shown += [(texts[i], images[i * size : i * size + few]) for i in range(min(SHOWN - first, len(texts)))]
        if stop is not None and any(ranks.gather(stop.received)):
            return None
    of_ranks = ranks.gather((scored, shown))
    parts = [part for scored, _ in of_ranks for part in scored]
    raw_rewards = {name: torch.cat([part[name] for part in parts])[: count * size] for name in parts[0]}  # (count*G,)
    combined = combine({name: raw_rewards[name] for name in rewards}, weights_of(rewards), size)
    shown = [of_prompt for _, shown in of_ranks for of_prompt in shown][:count]
    shown = [(*of_prompt, combined[i * size : i * size + few].tolist()) for i, of_prompt in enumerate(shown)]
    return reward_metrics(raw_rewards, combined, size) | {"images": count * size, "prompts": count}, shown


# ---- the run --------------------------------------------------------------------------------------------------------


def train(settings):
    """The whole run: what it needs, the loop, and its end."""
    started, device = time.time(), ranks.device()
    check_tracker(settings.tracker)
    with readable_loading(settings):
        cached_file(settings.model, "model_index.json")  # is it there? rewards take a while to load, it takes longer
    prompts = read_prompts(settings.prompts, settings.targets)
    held_out = read_prompts(settings.eval_prompts, settings.eval_targets)
    rewards = load_rewards("reward", settings, prompts)
    for one, other in ((prompts, held_out), (held_out, prompts)):
        if one.targets is None and other.targets is not None:  # likeness does not apply there
            one.targets = [None] * len(one.texts)
    eval_rewards = {} if settings.eval_reward in ("none", "") else load_rewards("eval_reward", settings, held_out)
    trained, judging = ({source for source, _ in split_spec(s)} for s in (settings.reward, settings.eval_reward))
    if len(rewards.keys() & eval_rewards.keys()) > len(trained & judging):  # one would take the other's place
        raise UserError("--eval-reward: another reward of that name is trained for; name another judge, or none")
    settings.combine = settings.combine or ("zscore" if len(rewards) > 1 else "sum")
    out = choose_out(settings)
    print_start(settings, device, len(prompts.texts), len(held_out.texts))
    try:
        pipe, codes, decoder = build(load(settings, device), settings, device)
        offload = place([codes.model, *painters(pipe)], settings, device, codes.forward)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no memory for the weights ({reason}); --offload yes spares the GPU, no the host") from None
    learners = {"": codes} | ({} if decoder is None else {"decoder": decoder})  # {folder in a checkpoint: what learns}
    begun = done = 0 if settings.resume is None else checkpoints.load(Path(settings.resume), learners)
    record, stop, moved, skipped = Record(out, settings, device, done, offload), StopRequest(), [], 0
    run = Run(pipe, codes, decoder, record.clock)
    for learner in learners.values():  # from here until its end a step is half made, and not to be saved
        learner.optimizer.register_step_post_hook(lambda *_: moved.append(True))

    def save():
        if ranks.rank() == 0 and settings.steps > 0:
            checkpoints.save(out, done, learners, settings, record.best_step())

    def evaluate_both(stop=None):
        if record.evaluations and record.evaluations[-1]["step"] == done:  # before it was resumed
            return
        known = evaluate(run, settings, rewards, eval_rewards, prompts, EVAL_SEED, stop)
        new = known and evaluate(run, settings, rewards, eval_rewards, held_out, HELD_OUT_SEED, stop)
        if new:
            record.evaluation(done, known, new)

    try:
        save()
        if done == 0 or settings.steps == 0 or due(done, settings.eval_every):
            evaluate_both(stop)
        for step in range(done, settings.steps):
            if any(ranks.gather(stop.received)):  # together, or the others would wait for the one that stopped
                break
            # Every draw of a step starts from the step's seed, a reward's own included: nothing random needs saving.
            seed, rows = seed_of_step(step, settings), prompt_indices(step, settings, len(prompts.texts))
            set_seed(seed % 2**32)
            texts, targets = prompts.take(rows)
            images, raw_rewards, metrics = grpo_step(run, settings, rewards, texts, targets, seed)
            done = step + 1
            moved.clear()
            metrics["skipped"] = metrics.get("skipped", 0) + metrics.get("decoder/skipped", 0)
            sequences, paintings = sizes(settings)
            # For people; what is maximised depends on --combine.
            combined = combine(raw_rewards, weights_of(rewards), sequences * paintings)
            metrics |= step_metrics(raw_rewards, combined, sequences, paintings)
            metrics = ranks.mean(metrics | record.clock.read())
            record.step(done, metrics, format_step(done, metrics, settings))
            if done in (1, settings.steps) or due(done, settings.sample_every) or stop.received:
                record.group(done, texts[0], images, combined, sequences, paintings)
            skipped = skipped + 1 if metrics["skipped"] >= 1 else 0
            if skipped == MAX_SKIPPED:
                raise UserError(
                    f"{skipped} steps in a row had no finite gradient; start anew with a lower --lr or --decoder-lr"
                )
            if due(done, settings.save_every) or due(done, settings.eval_every):
                save()
            if due(done, settings.eval_every):
                evaluate_both()

        save()
        stopped = any(ranks.gather(stop.received))
        if done < settings.steps:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            command = f"torchrun --nproc-per-node {here}" if ranks.count() > 1 else "python"
            command = "torchrun, with the same flags on every node," if ranks.count() > here else command
            record.clock.bar.write(f"saved; go on with: {command} train.py --resume {out}")
        if settings.steps > 0 and not (stopped and done == begun):  # where no step was made there is nothing to judge
            evaluate_both()
            record.end(learners, settings)
    except (torch.OutOfMemoryError, StepFailed) as error:
        if not moved:
            save()
        if isinstance(error, StepFailed):
            raise UserError(f"{error}; once mended, --resume {out} goes on" if settings.steps else error) from None
        raise UserError(
            f"out of GPU memory while at '{record.clock.phase}'; --resume {out} goes on, also with --offload yes or a "
            "lower --micro-batch-size; start anew with a lower --height and --width, or --group-size"
        ) from None
    finally:
        record.clock.bar.close()
    print(f"{done} steps, {time.time() - started:.0f} s; what it leaves is in {out}")


def due(step, every):
    return every > 0 and step % every == 0


def main(arguments=None):
    """train(), with what the user can mend as one line and exit code 2, whichever rank it happened on."""
    settings = None
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
    ranks.print_error(message)
    return 2


if __name__ == "__main__":
    sys.exit(main())
