"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a CPU.

    python train.py --group-size 4  # 4 is the default
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/. It
makes the steps of examples/pictures.py, and adds what long runs need: checkpoints, several rewards
and GPUs, models that take turns on a small GPU. grpo_step() is one step of GRPO, its six
parts in their order; loop() is the run. Scripts in examples/ reuse loop() with a subclass of Run.

What to expect of the tiny model, in a minute and a half of one CPU core. A line per step:

    step 5/10, epoch 0.7 | reward 0.973 +- 0.045 | 75% without spread | kl 0.0005 | entropy 0.0012
    | gap 1e-08 | norm 0.009 | 4.3s

The mean reward rises from 0.592 to 0.992. Its standard deviation within a group, after +-, falls.
A group without spread, all rewards equal, teaches nothing. docs/numbers.md says what each number
means, and what is normal.
"""

import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import devices
from devices import cpu
from glm_image.model import GlmImage, load
from grpo import GRPO, set_advantages
from inputs import ROOT
from inputs.prompts import read_prompts
from rewards import combine, score, weights_of
from runtime import folder, ranks
from runtime.clock import Clock
from runtime.data import load_rewards, prompt_indices, read_inputs, seed_of_step
from runtime.evaluation import judge
from runtime.numbers import counted
from runtime.record import Record
from runtime.settings import Settings, parse_settings
from runtime.terminal import exit_code, leave, optional, print_start, say

# ---- one step of GRPO: sample, paint and score, advantages, reference, loss, update --------------


def grpo_step(run, settings, rewards, prompts, seed):
    """One step of GRPO, its six parts in their order.

    rewards: {name: Reward}. prompts: N. seed: for sampling and painting. Returns the
    Rollout and the metrics, {name: number}.
    """
    trainer, group_size = run.trainer, settings.group_size  # trainer: a GRPO, see grpo.py

    # 1. sample a group for each prompt
    encoded = run.glm_image.encode(prompts, settings)  # N x (prompt_ids, position_ids, T)
    groups = trainer.sample(encoded, group_size, seed)
    # 2. paint and score; several rewards become one number per picture
    images, raw_rewards = paint_and_score(run, settings, rewards, prompts, groups, seed)
    reward = combine(raw_rewards, weights_of(rewards), group_size, settings.combine)
    set_advantages(groups, reward)  # 3. advantages: z-scores within each group
    trainer.add_reference(groups)  # 4. recompute the log-probs: adapter off
    metrics = trainer.update(groups)  # 4. adapter on; 5. the clipped loss; 6. AdamW

    advantages = [group.advantages for group in groups]
    return Rollout(prompts, groups, images, raw_rewards, advantages), metrics


def paint_and_score(run, settings, rewards, prompts, groups, seed):
    """N*G PIL images, prompt after prompt, and their raw rewards {name: (N*G,)}."""
    # Equal codes and the same noise make equal pictures: each picture is painted once.
    codes, which = zip(*(group.tokens.unique(dim=0, return_inverse=True) for group in groups))
    latents = [
        run.glm_image.paint(prompt, of_prompt, settings, seed + i)
        for i, (prompt, of_prompt) in enumerate(zip(prompts, codes, strict=True))
    ]
    painted = [run.glm_image.to_images(x, settings.micro_batch_size) for x in latents]
    images = [pictures[k] for pictures, rows in zip(painted, which) for k in rows]
    run.memory.begin("score")  # no model is named: the GPU is free for the rewards
    return images, score(rewards, images, prompts)


@dataclass
class Rollout:
    """What a step has made, for its record."""

    prompts: list  # N
    groups: list  # N
    images: list  # N*G PIL images
    raw_rewards: dict  # {name: (N*G,)}
    advantages: list  # N times (G,)


# ---- what a step works with ----------------------------------------------------------------------


@dataclass
class Run:
    """The models, and what trains them."""

    glm_image: GlmImage  # all models
    trainer: GRPO  # of its language model, the policy
    clock: Clock  # what the run is at
    memory: cpu.Memory  # trainer and models tell it what they begin; on a GPU it moves models

    # What the scripts in examples/ replace. loop() calls step, evaluate() calls paint_and_score.
    Settings = Settings
    Record = Record
    Model = GlmImage
    step = grpo_step
    paint_and_score = paint_and_score
    read_prompts = staticmethod(read_prompts)

    @classmethod
    def load(cls, settings, data=None, plan=None, adapters=None, pipe=None):
        """The models where the plan wants them, and the trainer.

        data: for a subclass that needs it. plan: None: on the CPU. adapters: as for
        prepare_training. pipe: the stock pipeline, if it is loaded already.
        """
        plan = plan or cpu.plan(cls.Model, settings, torch.device("cpu"))
        device, backend = plan.device, devices.backend(plan.device.type)
        clock = Clock(device)
        memory = backend.Memory(plan, clock)
        glm_image = cls.Model(pipe or load(settings.model, device), memory.begin)
        if plan.base == "int8":
            from glm_image.weights import round_weights

            # Straight to the GPU, so that the host never holds them.
            round_weights(glm_image, None if plan.waiting else device)
        glm_image.prepare_training(settings, device, adapters)
        trainer = backend.Trainer(
            glm_image.language_model,
            adamw(glm_image.language_model, settings.lr),
            settings,
            allowed_ids=glm_image.codes(),
            token_forward=backend.token_forward(glm_image, settings, plan.base),
            reference=glm_image.reference,
            average=ranks.average,
            begin=memory.begin,
        )
        memory.place(glm_image.parts, trainer.token_forward.release)
        return cls(glm_image, trainer, clock, memory)

    @property
    def trainers(self):
        """{folder of its adapter: its trainer}."""
        return {"adapter": self.trainer}


def tracked(settings, out):
    """A context with the Tracker of --tracker on the first rank, else with None."""
    if settings.tracker == "none" or ranks.rank() > 0:
        return nullcontext()
    from runtime.trackers import started  # imported only with a tracker

    return started(settings, out)


def adamw(model, rate=1e-3):
    """AdamW over the adapter of a model. rate: after the warm-up."""
    # eps: gradients can be as small as 5e-9 per weight; torch's 1e-8 would cut steps to a third.
    learned = {"params": [p for p in model.parameters() if p.requires_grad], "initial_lr": rate}
    return torch.optim.AdamW([learned], rate, betas=(0.9, 0.99), eps=1e-15, weight_decay=0.0)


def warm_up(trainers, warmup_steps, step):
    """The rate rises over the first steps; it follows from the step, so --resume needs no state."""
    for trainer in trainers.values():
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1, (step + 1) / (warmup_steps + 1))


# ---- the run -------------------------------------------------------------------------------------


def train(settings, run_class=Run):
    """The whole run: prepare, loop, end. Returns the exit code: 130 if Ctrl-C ended it early."""
    began = time.time()
    plan = devices.plan(run_class.Model, settings)  # before any download
    data = read_inputs(settings, run_class.read_prompts)
    print_start(settings, plan.device, data)
    script = script_of(run_class)
    with folder.begun(settings, plan.base, script, data) as (out, settings):  # noqa: PLR1704
        load_rewards(settings, data)
        with tracked(settings, out) as tracker:
            run = run_class.load(settings, data, plan, folder.adapters_in(out / "start"))
            done = folder.load(out, run.trainers)  # steps
            record = run.Record(out, settings, data, run, tracker, done)
            code = 130  # after Ctrl-C; steps before it are saved
            with suppress(KeyboardInterrupt):
                loop(run, settings, data, record)
                code = 0
            record.export(run.glm_image)
    took = f"{counted(record.saved, 'step')}, {time.time() - began:.0f} s"
    page = Path(settings.out, "index.html")
    look = f"; look at {page}" if page.exists() else ""
    say(f"{took}; output folder: {settings.out}{look}")
    if code:
        say(f"continue with --resume {settings.out}")
        draw(record)  # the page says that the run was ended
    return code


def script_of(run_class):
    """The file that a class stands in: a run that it made is resumed by that file alone."""
    file = Path(getattr(sys.modules[run_class.__module__], "__file__", "a notebook")).resolve()
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)


def loop(run, settings, data, record):
    """The steps still to make, each saved, with evaluations."""
    steps = range(record.done, settings.steps)
    for step in run.clock.count("step", steps, settings.steps, record.done):
        if step == 0 or (settings.eval_every > 0 and step % settings.eval_every == 0):
            evaluate(run, settings, data, record)
        seed = seed_of_step(step, settings.seed, settings.prompts_per_step)
        warm_up(run.trainers, settings.warmup_steps, step)
        prompts = [data.prompts[i] for i in prompt_indices(step, settings, len(data.prompts))]
        rollout, metrics = run.memory.attempt(
            run.step, run.trainers, settings, data.rewards, prompts, seed
        )
        record.add(step + 1, rollout, metrics | run.clock.read())
        del rollout  # it leaves the memory before the next step makes its own
    evaluate(run, settings, data, record)


def evaluate(run, settings, data, record):
    """A checkpoint, its evaluation, and then all that people look at."""
    record.save()
    judge(run, settings, data, record)
    draw(record)
    if record.tracker is not None:
        with optional("log the pictures"):
            record.tracker.log_picture(record.out / "before-after.png", record.done)


def draw(record):
    """index.html and before-after.png, once there is an evaluation."""
    if record.writes and record.records["evaluation"]:
        from viewer import show  # training needs nothing of it

        with optional("show the run"):
            show(record.out)


def main(arguments=None, run_class=Run):
    kind = run_class.Settings, script_of(run_class)
    return exit_code(lambda: train(parse_settings(arguments, *kind), run_class))


if __name__ == "__main__":
    leave(main())
