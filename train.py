"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a CPU.

    python train.py --group-size 4
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/.
grpo_step() is one step of GRPO, its six parts in their order; evaluate() judges; loop() is the run.
examples/train_decoder.py and examples/train_edits.py make the same run with another Run.
"""

import math
import signal
import sys
import time
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial

if __name__ == "__main__":  # Ctrl-C in the seconds that the imports take: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from glm_image.model import GlmImage, check_version, load, token_forward
from grpo import GRPO, GRPOSettings, NotFinite, set_advantages
from rewards import combine, score, weights_of
from runtime import UserError, checkpoints, counted, out_of_memory, ranks
from runtime.data import (
    evenly,
    for_rewards,
    load_data,
    prompt_indices,
    read_inputs,
    read_prompts,
)
from runtime.forward import CheckedGRPO
from runtime.gpu import Clock, Placement, place, plan, retry_with_room
from runtime.log import Record
from runtime.rescue import rescued
from runtime.settings import Settings, parse_settings, print_start

# ---- one step of GRPO: sample, paint and score, advantages, reference, loss, update --------------


def grpo_step(run, settings, rewards, prompts, seed):
    """One step of GRPO, its six parts in their order.

    rewards: {name: (function, weight)}. prompts: N of them. seed: of sampling and painting. Returns
    the Batch and {name: number}.
    """
    policy, group_size = run.policy, settings.group_size  # policy: a GRPO, see grpo.py

    run.offload_all_but(policy.model)  # on a small GPU the other models leave
    with run.clock("sample"):  # 1. sample a group of code sequences for each prompt
        encoded = run.model.encode(prompts, settings)  # (ids, positions, T) of each
        groups = policy.sample(encoded, group_size, seed)

    # 2. paint and score; several rewards become one number per picture
    images, raw_rewards = paint_and_score(run, settings, rewards, prompts, groups, seed)
    reward = combine(raw_rewards, weights_of(rewards), group_size, settings.combine)

    set_advantages(groups, reward)  # 3. advantages: z-scores within each group

    run.offload_all_but(policy.model)
    with run.clock("reference"):  # 4. recompute the log-probs: the reference's, LoRA adapter off
        policy.add_reference(groups)
    with run.clock("update"):  # and the policy's, with gradient; 5. the clipped loss; 6. AdamW
        metrics = policy.update(groups)

    return Batch(groups, images, raw_rewards), metrics | {"entropy": entropy(groups)}


def paint_and_score(run, settings, rewards, prompts, groups, seed):
    """N*G PIL images, prompt after prompt, and their raw rewards {name: (N*G,)}."""
    images = []
    for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        # Equal codes make equal pictures: each is painted once.
        codes, which = group.tokens.unique(dim=0, return_inverse=True)
        run.offload_all_but(*run.model.painters)
        with run.clock("paint"):
            latents = run.model.paint(prompt, codes, settings, seed + i)
        run.offload_all_but(run.model.vae)  # alone, as it takes the most memory
        with run.clock("vae"):
            painted = run.model.to_images(latents, settings.micro_batch_size)
        run.clock.painted()
        images += [painted[k] for k in which]
    run.offload_all_but()  # the GPU is for the rewards' models
    with run.clock("score"):
        return images, score(rewards, images, **for_rewards(prompts))


def entropy(groups):
    """Mean entropy per code, in nats: an unbiased estimate from the samples."""
    return -torch.stack([group.old_logprobs for group in groups]).mean().item()


@dataclass
class Batch:
    """What a step has made, for its record."""

    groups: list  # N
    images: list  # N*G PIL images
    raw_rewards: dict  # {name: (N*G,)}

    def advantages(self, i):
        """The advantages of the pictures of prompt i, (G,)."""
        return self.groups[i].advantages


# ---- what a step works with ----------------------------------------------------------------------


@dataclass
class Run:
    """The models, what trains them, and the GPU that they may have to share."""

    model: GlmImage  # the whole pipeline
    policy: GRPO  # trains its language model
    clock: Clock
    placement: Placement | None  # None: on a CPU

    # What the scripts in examples/ override; loop() calls step.
    Settings = Settings
    Record = Record
    Model = GlmImage
    step = grpo_step
    read_prompts = staticmethod(read_prompts)

    @classmethod
    def load(cls, settings, data, device, turns, pipe=None):
        """The models on the device, and the policy's trainer.

        turns: None, "pinned" or "mapped", see plan in gpu.py. pipe: the stock pipeline, if it is
        loaded already.
        """
        model = cls.Model(pipe or load(settings.model, device))
        model.prepare_training(settings, device, home=None if turns else device)
        policy = CheckedGRPO(  # GRPO; on a GPU it checks the captured step by its first samples
            model.language_model,
            adamw(model.language_model),
            algorithm(settings),
            allowed_ids=model.codes(),
            forward=token_forward(model, settings, device),
            reference=model.reference,
            meet=ranks.meet,
        )
        return cls(model, policy, Clock(device), place(model.parts, device, policy.forward, turns))

    @property
    def trainers(self):
        """{folder of its adapter: what learns}."""
        return {"adapter": self.policy}

    def offload_all_but(self, *models):
        """CPU offload: these come to the GPU, the others go, if it is too small for all of them."""
        if self.placement is not None:
            with self.clock("move"):
                self.placement.all_but(*models)

    def set_learning_rates(self, settings, step):
        set_learning_rate(self.policy, settings.lr, settings.warmup_steps, step)


def algorithm(settings):
    return GRPOSettings(
        micro_batch_size=settings.micro_batch_size,
        iterations=settings.iterations,
        clip_range=settings.clip_range,
        kl_coef=settings.kl_coef,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )


def adamw(model):
    """Over the adapter of a model; see set_learning_rate."""
    # eps: gradients here can be as small as 5e-9 per weight; with torch's 1e-8 nothing would move.
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, betas=(0.9, 0.99), eps=1e-15, weight_decay=0.0)


def set_learning_rate(trainer, rate, warmup_steps, step):
    """The rate rises over the first steps; it follows from the step, so --resume needs no state."""
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate * min(1, (step + 1) / (warmup_steps + 1))


# ---- judging -------------------------------------------------------------------------------------

# An evaluation counts its seeds up from these, one per prompt. Training (seed_of_step) takes 1,000
# seeds per step, and its seeds go up by 10^9 per --seed: within 500,000 steps no seed is used for
# both.
SEEDS = {"training": 2**29, "held out": 2**29 + 2**20}


def seed_of_step(step, seed, prompts_per_step):
    """The seed of this rank's first group; the groups after it count up, on through all ranks."""
    return (seed * 1_000_003 + step) * 1_000 + ranks.rank() * prompts_per_step


def evaluate(run, settings, rewards, prompts, seed, stop=None):
    """Paint the prompts from the same seeds each time: only what was learned makes a difference.

    As the model is used after training: eval_decode_steps, eval_guidance_scale. stop: StopRequest;
    once received, this ends early and returns None. Otherwise returns, for each prompt in their
    order, its raw rewards {name: (G,)} and its G pictures.
    """
    group_size = settings.group_size
    # A CPU's passes cost more for their number than for their rows: fewer and larger ones.
    at_once = settings.prompts_per_step * (4 if run.clock.device.type == "cpu" else 1)
    results = {}
    for rows in ranks.batches(len(prompts), at_once):
        some = [prompts[row % len(prompts)] for row in rows]
        make = partial(judge, run, settings, rewards, some, seed + rows[0])
        images, raw_rewards = retry_with_room(make, run, settings, rows[0])
        for i, row in enumerate(rows):
            group = slice(i * group_size, (i + 1) * group_size)
            results[row] = {name: x[group] for name, x in raw_rewards.items()}, images[group]
        if stop is not None and any(ranks.gather(stop.received)):
            return None
    results = {row: result for part in ranks.gather(results) for row, result in part.items()}
    return [results[row] for row in range(len(prompts))]


def judge(run, settings, rewards, prompts, seed):
    """The pictures of these prompts and their raw rewards; see evaluate."""
    settings = copy(settings)  # not replace(), which would check them as those of a step
    settings.decode_steps = settings.eval_decode_steps
    settings.guidance_scale = settings.eval_guidance_scale
    run.offload_all_but(run.policy.model)
    with run.clock("sample"):
        groups = run.policy.sample(run.model.encode(prompts, settings), settings.group_size, seed)
    return paint_and_score(run, settings, rewards, prompts, groups, seed)


def evaluate_both(run, settings, data, record, stop=None):
    """Evaluate on training and held-out prompts, unless this step was evaluated already."""
    if any(each["step"] == record.done for each in record.records["evaluation"]):
        return
    known, new = (evenly(each, settings.eval_count) for each in (data.prompts, data.held_out))
    rewards = data.rewards | data.judges
    of_this_rank = sum(math.ceil(len(prompts) / ranks.count()) for prompts in (known, new))
    with run.clock.evaluation(of_this_rank):
        training = evaluate(run, settings, rewards, known, SEEDS["training"], stop)
        held_out = None
        if training:
            held_out = evaluate(run, settings, rewards, new, SEEDS["held out"], stop)
    if held_out:
        record.evaluation((known, training), (new, held_out))


# ---- the run -------------------------------------------------------------------------------------


def train(settings, run_class=Run):
    """The whole run: prepare, loop, end. Returns the exit code: 130 if a signal ended it early."""
    start = time.time()
    check_version()  # load() does too, but after the rewards have loaded
    device = ranks.device()
    prompts, held_out, hashed = read_inputs(settings, run_class.read_prompts)
    turns = plan(run_class.Model.sizes, settings, device)  # before anything is downloaded
    with checkpoints.claimed(settings.resume, settings.out) as out:
        print_start(settings, out, device, len(prompts), len(held_out))
        data = load_data(settings, prompts, held_out)
        run = run_class.load(settings, data, device, turns)
        begun = checkpoints.load(out, run.trainers) if settings.resume else 0
        record = run.Record(out, settings, hashed, run.clock, run.trainers, begun)
        with closing(run.clock), rescued(record):
            loop(run, settings, data, record, begun)
    more = "; already complete: raise --steps for more" if 0 < settings.steps <= begun else ""
    seconds = f"{time.time() - start:.0f} s{more}"
    print(f"{counted(record.done, 'step')}, {seconds}; output folder: {out}")
    return 130 if record.done < settings.steps else 0


def loop(run, settings, data, record, begun):
    """Steps from `begun` on, with evaluations and checkpoints. A signal ends it after a step."""
    record.save()
    if begun == 0 or due(begun, settings.eval_every):
        evaluate_both(run, settings, data, record, record.stop)
    run.clock.begin(settings.steps, begun)
    for step in range(begun, settings.steps):
        if any(ranks.gather(record.stop.received)):  # together, or others would wait for this rank
            break
        # All draws of a step, even those of a reward, start from the step's seed: no random state
        # needs saving.
        seed = seed_of_step(step, settings.seed, settings.prompts_per_step)
        run.set_learning_rates(settings, step)
        prompts = [data.prompts[i] for i in prompt_indices(step, settings, len(data.prompts))]
        one_step = partial(run.step, settings, data.rewards, prompts, seed)  # grpo_step
        batch, metrics = retry_with_room(one_step, run, settings, seed)
        record.step(step + 1, prompts, batch, metrics)
        del batch  # a decoder's denoising paths are gone before the next step makes its own
        if due(step + 1, settings.save_every) or due(step + 1, settings.eval_every):
            record.save()
        if due(step + 1, settings.eval_every):
            evaluate_both(run, settings, data, record)
    record.save()
    if record.done < settings.steps:
        record.write(f"saved; {checkpoints.how_to_continue(record.out)}")
    stopped = any(ranks.gather(record.stop.received))
    if settings.steps > 0 and not (stopped and record.done == begun):  # else there is nothing new
        evaluate_both(run, settings, data, record)
        record.end()


def due(step, every):
    return every > 0 and step % every == 0


def main(arguments=None, run_class=Run):
    """train(), but errors the user can fix end in one line and exit code 2, on whichever rank."""
    try:
        ranks.join()
        with ranks.together():
            code = train(parse_settings(arguments, run_class.Settings), run_class)
        ranks.leave()
        return code
    except KeyboardInterrupt:  # before the first step: there is nothing to save yet
        return 130
    except (UserError, NotFinite) as error:
        ranks.print_error(error)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        ranks.print_error(
            f"out of GPU memory ({reason}): try --offload yes and a lower --micro-batch-size; or "
            "start again with --base int8, or a lower --prompts-per-step or --group-size"
        )
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
