"""What a run says of itself: a line for each step, its numbers, its pictures."""

import math
import os
import secrets
import warnings
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rewards import combine, weights_of
from runtime import ranks
from runtime.errors import optional, readable, say, writing
from runtime.pictures import save_pictures
from runtime.resume import portable
from runtime.words import format_number, shown_names, with_error

LINE = {  # parts of a step's line, see format_step
    "skipped": "SKIPPED: the gradient was not finite",
    "groups_without_spread": "{:.0%} without spread",
    "unscored": "{:.0%} unscored",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.4f}",
    "mean_logprob_gap": "gap {:.0e}",
    "grad_norm": "norm {:.3f}",
    "clip_fraction": "{:.1%} clipped",
    "seconds": "{:.1f}s",
    "gpu_gb": "{:.1f} GB",
}


class Record:
    """The numbers and pictures of a run, in its folder, and its lines on the screen.

    folder: a RunFolder. stop: a StopRequest. Scripts that train more than the policy subclass
    Record, as examples/train_decoder.py does.
    """

    line = LINE

    def __init__(self, folder, settings, data, machine, stop, tracker, done):
        """tracker: see tracked. done: steps made so far."""
        self.folder = folder
        self.settings = settings
        self.machine = machine
        self.stop = stop
        self.done = done
        self.weights = weights_of(data.rewards)
        self.judged_by = next(iter(data.judges), None)
        prompts = settings.prompts_per_step * ranks.count()
        self.epochs_per_step = prompts / len(data.prompts)
        self.tracker = tracker

    def track(self, numbers):
        """{name: number or None} to the tracker, if there is one."""
        if self.tracker is not None:
            with optional(f"send numbers to {self.settings.tracker}"):
                known = {name: number for name, number in numbers.items() if number is not None}
                self.tracker.log(known, step=self.done)

    def track_picture(self, file):
        """A picture to the tracker, if both are there."""
        if self.tracker is not None and file.exists():
            with optional(f"send {file.name} to {self.settings.tracker}"):
                log_picture(self.tracker, self.settings.tracker, file, self.done)

    write = staticmethod(say)

    def step(self, done, rollout, metrics):
        """Writes a step's line, its numbers, and the pictures of the first rank's groups."""
        self.done = done
        prompts = rollout.prompts
        group_size = len(rollout.images) // len(prompts)
        rewards = with_weighted_sum(rollout.raw_rewards, self.weights, group_size)
        of_ranks = ranks.gather(rewards)
        of_all = {name: torch.cat([each[name] for each in of_ranks]) for name in rewards}
        timings = self.machine.read()
        metrics |= self.reward_metrics(of_all) | timings | speeds(rollout, timings)
        self.folder.append("metrics", [{"step": done, **ranks.mean(metrics)}])
        self.track(self.folder.records["metrics"][-1])
        groups = [
            {"step": done, "line": prompt.line, "prompt": prompt.text}
            | {name: values[i].tolist() for name, values in rewards.items()}
            | {"advantage": rollout.advantages(i).tolist()}
            | self.save_group(i, prompt, rollout.images[i * group_size : (i + 1) * group_size])
            for i, prompt in enumerate(prompts)
        ]
        self.folder.append("groups", [*chain(*ranks.gather(groups))])
        self.folder.keep(done)
        self.machine.bar.update()
        numbers = self.folder.records["metrics"][-1]
        self.write(format_step(self.settings.steps, numbers, self.line, self.epochs_per_step))

    def save_group(self, i, prompt, images):
        """Of a step's group i; nothing on other ranks than the first."""
        if not self.folder.writes:
            return {}
        place = f"groups/{self.done:06d}/{i + 1}"
        beside = prompt.given() | {"target": prompt.target}
        with writing(self.folder.out):
            return save_pictures(self.folder.out, place, images, beside, small=True)

    @property
    def ends(self):
        """Whether no step is to come."""
        return self.done >= self.settings.steps or self.stop.received

    def reward_metrics(self, rewards):
        """What a step's rewards, {name: (N, G)}, say of its groups."""
        return reward_metrics(rewards)

    def warn_of_nothing(self):
        """A warning if nothing was learned."""
        metrics = self.folder.records["metrics"]
        # Of both halves, if both learn.
        all_of = lambda word: [x for each in metrics for name, x in each.items() if word in name]
        if not any(x != 0 for x in all_of("grad_norm")):
            higher = f"a higher {self.settings.spread} or larger groups"
            why = f"no group had unequal rewards; use another reward, {higher}"
            if any(x < 1 for x in all_of("groups_without_spread")):
                why = f"the samples of a group were alike, though not their rewards; use {higher}"
            if all(each["unscored"] == 1 for each in metrics):
                why = "no reward applied to any picture; use another reward, or other prompts"
            self.write(f"warning: nothing was learned: {why}")


# ---- trackers ------------------------------------------------------------------------------------


@contextmanager
def tracked(settings, out):
    """Yields the tracker of --tracker, or None. The first rank has it.

    It starts before the models load: if it cannot, that is an error, which leaves nothing in the
    folder `out`. Whatever fails later is a warning.
    """
    if settings.tracker == "none" or ranks.rank() > 0:
        yield None
        return
    with readable(f"start --tracker {settings.tracker}"):
        tracker = start_tracker(settings.tracker, out)
        tracker.store_init_configuration(portable(vars(settings)))
    try:
        yield tracker
    finally:
        with optional(f"finish {settings.tracker}"):
            tracker.finish()


def log_picture(tracker, name, file, step):
    """tracker: see start_tracker. name: its --tracker."""
    pixels = np.asarray(Image.open(file, formats=["PNG"]).convert("RGB"))  # (height, width, 3)
    if name == "trackio":
        import trackio

        tracker.log({file.stem: trackio.Image(pixels)}, step=step)
    else:
        layout = {"dataformats": "NHWC"} if name == "tensorboard" else {}
        tracker.log_images({file.stem: pixels[None]}, step=step, **layout)


def start_tracker(name, out):
    """One of accelerate's trackers. A resumed run goes on in the same run of it."""
    from accelerate import PartialState, tracking  # seconds to import

    PartialState()
    if name == "tensorboard":
        tracker = tracking.TensorBoardTracker("tensorboard", logging_dir=out)
        tracker.start()
        return tracker
    run = tracker_id(out)
    project, options = "grpo-glm-image", {"name": run, "resume": "allow"}
    if name == "wandb":
        project = os.environ.get("WANDB_PROJECT", project)
        options |= {"id": run, "name": os.environ.get("WANDB_NAME", run)}
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **options)
    tracker.start()
    # With its place: so a copy of the folder is told from a folder that has moved.
    (out / "tracker-id").write_text(f"{run}\n{out.resolve()}\n")
    return tracker


def tracker_id(out):
    """What a run is called in a tracker: a new name for a new run, and for a copy of its folder."""
    read = lambda folder: (folder / "tracker-id").read_text().split("\n")
    with suppress(OSError):
        run, *place = read(out)
        original = Path(*place[:1])
        if not (original / "tracker-id").exists() or original.samefile(out):
            return run
        if read(original)[0] != run:
            return run
    return f"{out.resolve().name}-{secrets.token_hex(4)}"


# ---- numbers -------------------------------------------------------------------------------------


def with_weighted_sum(raw_rewards, weights, group_size):
    """{"reward": their weighted sum (N, G), "reward/NAME": each of them (N, G)}, from (N*G,)."""
    rewards = {f"reward/{name}": values for name, values in raw_rewards.items()}
    rewards = {"reward": combine(raw_rewards, weights, group_size), **rewards}
    return {name: values.view(-1, group_size) for name, values in rewards.items()}


def speeds(rollout, timings):
    """To compare with docs/memory.md: codes per second of one picture, as all are sampled side by
    side, and pictures per second in painting, each counted once however many samples share it.
    """
    seconds = lambda name: timings.get(f"seconds/{name}", math.nan)
    return {
        "codes_per_second": rollout.groups[0].tokens.shape[1] / seconds("sample"),
        "pictures_per_second": len({id(image) for image in rollout.images}) / seconds("paint"),
    }


def reward_metrics(rewards):
    """Of each reward the mean, and the mean standard deviation within a group.

    rewards: {name: (N, G)}. NaN, where a reward does not apply, is left out.
    """
    metrics = {"unscored": rewards["reward"].isnan().double().mean().item()}
    for name, values in rewards.items():
        std = name.replace("reward", "reward_std", 1)
        with warnings.catch_warnings(action="ignore"):  # of groups in which no reward applies
            stds = np.nanstd(values.double(), 1, ddof=1)
            metrics |= {name: values.nanmean().item(), std: float(np.nanmean(stds))}
    return metrics


# ---- lines ---------------------------------------------------------------------------------------


def format_step(steps, numbers, parts, epochs_per_step=0):
    """The line of a step: what is 0 or was not measured is left out.

    A run that trains on its prompts more than once also says how often so far.
    """
    reward = with_error(numbers["reward"], numbers["reward_std"])
    epoch = f", epoch {numbers['step'] * epochs_per_step:.1f}" * (steps * epochs_per_step > 1)
    words = [f"step {numbers['step']}/{steps}{epoch}", f"reward {reward}"]
    names = shown_names(numbers)
    for name in names if len(names) > 1 else ():
        if name != "reward":
            words.append(f"{name.removeprefix('reward/')} {format_number(numbers[name])}")
    shown = {name: form for name, form in parts.items() if numbers.get(name)}
    return " | ".join([*words, *(form.format(numbers[name]) for name, form in shown.items())])
