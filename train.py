"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a CPU.

    python train.py --group-size 4  # 4 is the default
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/. It
makes the steps of examples/pictures.py, and adds what long runs need: checkpoints, several rewards
and GPUs, models that take turns on a small GPU. grpo_step() is one step of GRPO, its six parts in
their order; loop() is the run. Scripts in examples/ give train() a step, or a model, of their own.

What to expect of the tiny model, in a minute and a half of one CPU core. A line per step:

    step 5/10, epoch 0.7 | reward 0.973 +- 0.045 | 75% without spread | kl 0.0005 | entropy 0.0012
    | gap 1e-08 | norm 0.009 | 4.3s

On the held-out captions the mean reward rises from 0.721 to 0.985. The number after +- is the
reward's standard deviation within a group. A group without spread, all rewards equal, teaches
nothing. docs/numbers.md says what each number means, and what is normal.
"""

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import devices
from devices import cpu
from glm_image.adapters import adapters_in
from glm_image.model import GlmImage, load
from grpo import GRPO, set_advantages
from rewards import combine, score, weights_of
from runtime import folder, ranks
from runtime.clock import Clock
from runtime.data import load_rewards, prompt_indices, read_inputs, seed_of_step
from runtime.evaluation import judge
from runtime.numbers import counted
from runtime.record import Record
from runtime.settings import parse_settings
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
    images, raw_rewards = run.paint_and_score(settings, rewards, prompts, groups, seed)
    reward = combine(raw_rewards, weights_of(rewards), group_size, settings.combine)
    set_advantages(groups, reward)  # 3. advantages: z-scores within each group
    trainer.add_reference(groups)  # 4. recompute the log-probs: adapter off
    metrics = trainer.update(groups)  # 4. adapter on; 5. the clipped loss; 6. AdamW

    advantages = [group.advantages for group in groups]
    return Rollout(prompts, groups, images, raw_rewards, advantages), metrics


@dataclass
class Rollout:
    """What a step has made, for its record."""

    prompts: list  # N
    groups: list  # N
    images: list  # N*G PIL images
    raw_rewards: dict  # {name: (N*G,)}
    advantages: list  # N times (G,)
    paintings: int = 1  # of each sample; more in examples/train_decoder.py, and then G counts all


# ---- what a step works with ----------------------------------------------------------------------


@dataclass
class Run:
    """Models, trainers, clock and memory of one run."""

    glm_image: GlmImage  # all models
    trainer: GRPO  # of its language model, the policy: it samples
    trainers: dict  # {folder of an adapter: its trainer}, of what learns
    clock: Clock  # what the run is at
    memory: cpu.Memory  # trainers and models tell it what they begin; on a GPU it moves models

    def paint_and_score(self, settings, rewards, prompts, groups, seed):
        """N*G PIL images, prompt after prompt, and their raw rewards {name: (N*G,)}."""
        # Equal codes and the same noise make equal pictures: each picture is painted once.
        codes, which = zip(*(group.tokens.unique(dim=0, return_inverse=True) for group in groups))
        latents = [
            self.glm_image.paint(prompt, of_prompt, settings, seed + i)
            for i, (prompt, of_prompt) in enumerate(zip(prompts, codes, strict=True))
        ]
        painted = [self.glm_image.to_images(x, settings.micro_batch_size) for x in latents]
        images = [pictures[k] for pictures, rows in zip(painted, which) for k in rows]
        self.memory.begin("score")  # no model is named: the GPU is free for the rewards
        return images, score(rewards, images, prompts)

    @classmethod
    def load(cls, settings, plan=None, adapters=None, kind=GlmImage, pipe=None, lr=None):
        """The models where the plan wants them, and the trainer.

        plan: None: on the CPU. adapters: as for prepare_training. kind: of the models. pipe: the
        stock pipeline, if it is loaded already. lr: of the policy, None: that of the settings.
        """
        plan = plan or cpu.plan(settings, torch.device("cpu"))
        device, backend = plan.device, devices.backend(plan.device.type)
        clock = Clock(device)
        memory = backend.Memory(plan, clock)
        glm_image = kind(pipe or load(settings.model, device), memory.begin)
        if plan.base == "int8":
            from glm_image.weights import round_weights

            # Straight to the GPU, so that the host never holds them.
            round_weights(glm_image, None if plan.waiting else device)
        glm_image.prepare_training(settings, device, adapters)
        trainer = backend.Trainer(
            glm_image.language_model,
            adamw(glm_image.language_model, lr or settings.lr),
            settings,
            allowed_ids=glm_image.codes(),
            token_forward=backend.token_forward(glm_image, settings, plan.base),
            reference=glm_image.reference,
            average=ranks.average,
            begin=memory.begin,
        )
        memory.place(glm_image.parts, trainer.token_forward.release)
        return cls(glm_image, trainer, {"adapter": trainer}, clock, memory)


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


def train(settings, plan, data, *, script, load_run=Run.load, make_step=grpo_step):
    """The whole run: prepare, loop, end. Returns the exit code: 130 if Ctrl-C ended it early.

    script: its file, which alone resumes the run. load_run: (settings, plan, adapters) -> Run.
    make_step: as grpo_step.
    """
    began = time.time()
    print_start(settings, plan.device, data)
    with folder.begun(settings, plan.base, script, data) as begun:
        out, settings = begun
        load_rewards(settings, data)
        folder.compare_modules(out, settings, data)
        with tracked(settings, out) as tracker:
            run = load_run(settings, plan, adapters_in(out / "start"))
            done = folder.load(out, run.trainers)  # steps
            record = Record(out, settings, data, run, tracker, done)
            code = 130  # after Ctrl-C; steps before it are saved
            with suppress(KeyboardInterrupt):
                loop(run, make_step, settings, data, record)
                code = 0
            record.export()
    took = f"{counted(record.saved, 'step')}, {time.time() - began:.0f} s"
    page = Path(settings.out, "index.html")
    look = f"; look at {page}" if page.exists() else ""
    say(f"{took}; output folder: {settings.out}{look}")
    if code:
        say(f"continue with --resume {settings.out}")
        draw(record)  # the page says that the run was ended
    return code


def loop(run, make_step, settings, data, record):
    """The steps still to make, each saved, with evaluations."""
    steps = range(record.done, settings.steps)
    for step in run.clock.count("step", steps, settings.steps, record.done):
        if step == 0 or (settings.eval_every > 0 and step % settings.eval_every == 0):
            evaluate(run, settings, data, record)
        seed = seed_of_step(step, settings.seed, settings.prompts_per_step)
        warm_up(run.trainers, settings.warmup_steps, step)
        prompts = [data.prompts[i] for i in prompt_indices(step, settings, len(data.prompts))]
        rollout, metrics = run.memory.attempt(make_step, run, settings, data.rewards, prompts, seed)
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


@exit_code
def main(arguments=None):
    settings = parse_settings(arguments)
    plan = devices.plan(settings)  # before any download
    return train(settings, plan, read_inputs(settings), script=__file__)


if __name__ == "__main__":
    leave(main())
