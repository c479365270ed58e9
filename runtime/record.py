"""What a run says of itself: a line for each step, its numbers, pictures."""

import math
import os
import secrets
import textwrap
import warnings
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import chain

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps

from rewards import UserError, combine, weights_of
from runtime import ranks
from runtime.errors import readable, say, writing
from runtime.resume import portable

SAMPLE_EVERY = 10  # steps between group-*.png
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
    columns = 8  # pictures in a row of group-*.png

    def __init__(self, folder, settings, data, machine, stop, done):
        """done: steps made so far."""
        self.folder = folder
        self.settings = settings
        self.machine = machine
        self.stop = stop
        self.done = done
        self.weights = weights_of(data.rewards)
        self.judge = next(iter(data.judges), None)
        prompts = settings.prompts_per_step * ranks.count()
        self.epochs_per_step = prompts / len(data.prompts)
        self.tracker = None
        if folder.writes and settings.tracker != "none":
            with readable(f"start --tracker {settings.tracker}"):
                self.tracker = start_tracker(settings.tracker, folder.out)
                self.tracker.store_init_configuration(portable(vars(settings)))

    def track(self, numbers):
        """{name: number or None} to the tracker, if there is one."""
        if self.tracker is not None:
            with self.optional(f"send numbers to {self.settings.tracker}"):
                known = {name: number for name, number in numbers.items() if number is not None}
                self.tracker.log(known, step=self.done)

    @contextmanager
    def optional(self, what):
        """A curve or a tracker that fails is a warning."""
        try:
            with readable(what):
                yield
        except UserError as error:
            self.write(f"warning: {error}")

    write = staticmethod(say)

    def step(self, done, prompts, rollout, metrics):
        """Writes a step's line and numbers, and every SAMPLE_EVERY steps a group's pictures."""
        self.done = done
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
            for i, prompt in enumerate(prompts)
        ]
        self.folder.append("groups", [*chain(*ranks.gather(groups))])
        self.folder.keep(done)
        self.machine.bar.update()
        numbers = self.folder.records["metrics"][-1]
        self.write(format_step(self.settings.steps, numbers, self.line, self.epochs_per_step))
        if self.folder.writes and (done % SAMPLE_EVERY == 0 or done == 1 or self.ends):
            with writing(self.folder.out):
                self.draw_group(prompts, rollout, rewards["reward"])

    @property
    def ends(self):
        """Whether no step is to come."""
        return self.done >= self.settings.steps or self.stop.received

    def reward_metrics(self, rewards):
        """What a step's rewards, {name: (N, G)}, say of its groups."""
        return reward_metrics(rewards)

    def draw_group(self, prompts, rollout, rewards):
        """group-*.png: the group whose rewards differ most. rewards: (N, G)."""
        i = rewards.nan_to_num().std(1).argmax().item()
        images = rollout.images[i * rewards.shape[1] :]
        cells = [
            (image, f"reward {format_number(reward)}\nadvantage {advantage:+.2f}", False)
            for image, reward, advantage in zip(images, rewards[i].tolist(), rollout.advantages(i))
        ]
        rows = [("", cells[k : k + self.columns]) for k in range(0, len(cells), self.columns)]
        given = prompts[i].given() | {"target": prompts[i].target}
        beside = [(picture, name, False) for name, picture in given.items() if picture]
        rows[0] = prompts[i].text, beside + rows[0][1]
        draw_grid(f"step {self.done}", rows).save(self.folder.out / f"group-{self.done:06d}.png")

    def draw_evaluation(self, rows, prompts, pictures, rewards, wrong):
        """evaluation/STEP/: pictures of some prompts, and a sheet of them all.

        before-after.png: the sheet of the evaluation before training, if it is there, and this one.
        pictures, wrong: {row: of each picture}. rewards: (N, G).
        """
        if not self.folder.writes:
            return
        folder, first = (self.folder.out / "evaluation" / f"{step:06d}" for step in (self.done, 0))
        with writing(self.folder.out):
            folder.mkdir(parents=True, exist_ok=True)
            shown = []
            for i, row in enumerate(rows, 1):
                cells = [(picture, name, False) for name, picture in prompts[row].given().items()]
                for j, picture in enumerate(pictures[row]):
                    picture.save(folder / f"{i}-{j + 1}.png")
                    caption = f"reward {format_number(rewards[row, j])}"
                    cells.append((picture, caption, wrong[row][j]))
                shown.append((prompts[row].text, cells))
            title = f"after {counted(self.done, 'step')}" if self.done else "before"
            framed = any(frame for _, cells in shown for *_, frame in cells)
            corner = f"red frame:\n{self.judge} is 0" if framed else ""
            sheet = draw_grid(title, shown, corner)
            sheet.save(folder / ".sheet.png")
            os.replace(folder / ".sheet.png", folder / "sheet.png")  # later evaluations read it
            if self.done and (first / "sheet.png").exists():
                sides = Image.open(first / "sheet.png"), np.asarray(sheet)[:, LABELS - 24 :]
                sheet = Image.fromarray(np.hstack(sides))
            sheet.save(self.folder.out / "before-after.png")
        if find_spec("matplotlib") is not None:
            with self.optional("draw reward.png"):
                records = self.folder.records["metrics"], self.folder.records["evaluation"]
                draw_curves(*records, self.folder.out / "reward.png")
        elif self.ends:
            self.write("no curves are drawn (reward.png): pip install matplotlib")

    def warn_of_nothing(self):
        """A warning if nothing was learned."""
        metrics = self.folder.records["metrics"]
        if not any(x != 0 for each in metrics for name, x in each.items() if "grad_norm" in name):
            self.write(
                "warning: nothing was learned: no group had unequal rewards; use another reward, "
                f"a higher {self.settings.spread} or larger groups"
            )

    def finish(self):
        if self.tracker is not None:
            self.tracker.finish()


def start_tracker(name, out):
    """One of accelerate's trackers. A resumed run goes on in the same run of it."""
    from accelerate import PartialState, tracking  # seconds to import

    PartialState()
    if name == "tensorboard":
        tracker = tracking.TensorBoardTracker("tensorboard", logging_dir=out)
    else:
        file = out / "tracker-id"
        if not file.exists():
            file.write_text(f"{out.resolve().name}-{secrets.token_hex(4)}")
        options = {"name": file.read_text(), "resume": "allow"}
        options |= {"id": options["name"]} if name == "wandb" else {}
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name]("grpo-glm-image", **options)
    tracker.start()
    return tracker


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


def shown_names(numbers):
    """The names of rewards, without their weighted sum where that is a lone reward of weight 1."""
    names = [name for name in numbers if f"{name}/".startswith("reward/")]
    return names[1:] if len(names) > 1 and numbers[names[0]] == numbers[names[1]] else names


def with_error(mean, error):
    """'0.692 +- 0.031'."""
    return format_number(mean) + ("" if error is None else f" +- {format_number(error)}")


def format_number(value):
    if value is None or math.isnan(value):  # no image had this reward
        return "none"
    return f"{value:.0e}" if 0 < abs(value) < 5e-4 else f"{value:.3f}"


def counted(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- pictures ------------------------------------------------------------------------------------

CELL, LABELS, LETTERS = 144, 288, 24  # pixels: twice their size on a page
RED = "#d02030"
CURVES = {"steps": "#888888", "training prompts": "#2060c0", "held-out prompts": RED}
# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallbackFull.ttf",
    "PingFang.ttc",
    "msyh.ttc",
)


def draw_grid(title, rows, corner=""):
    """Rows of pictures under a title, with labels on the left.

    rows: [(label, [(picture, caption, whether it has a red frame)])]. corner: the words above the
    labels.
    """
    lines = max(len(caption.splitlines()) for _, cells in rows for _, caption, _ in cells)
    height = CELL + 8 + 20 * lines
    width = LABELS + (CELL + 8) * max(len(cells) for _, cells in rows)
    sheet = Image.new("RGB", (width, 72 + height * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 2), corner, "black", font_for(corner, 18))
    pen.text((LABELS, 8), title, "black", font_for(title))
    for top, (label, cells) in zip(range(72, sheet.height, height), rows):
        font = font_for(label)
        letters = (LABELS - 32) * len(label) / max(1, font.getlength(label))
        words = textwrap.wrap(label, max(1, int(letters)))[:4]
        pen.text((8, top), "\n".join(words), "black", font)
        for left, (picture, caption, framed) in zip(range(LABELS, width, CELL + 8), cells):
            border = 3 * framed
            picture = ImageOps.expand(ImageOps.contain(picture, (CELL, CELL)), border, RED)
            sheet.paste(picture, (left - border, top - border))
            pen.text((left, top + CELL), caption, "black", font_for(caption, 17))
    return sheet


def font_for(text, size=LETTERS):
    for name in CHINESE_FONTS if max(text, default="") > "\u2e80" else ():
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)


def draw_curves(metrics, evaluations, file):
    """Curves of a run over its steps, a panel for each reward.

    metrics, evaluations: what is in the .jsonl files.
    """
    from matplotlib.figure import Figure

    names = shown_names(evaluations[-1]["held out"])
    figure = Figure((4 * len(names), 3), layout="constrained")
    (row,) = figure.subplots(1, len(names), squeeze=False)
    for axes, name in zip(row, names):
        curves = [[(each["step"], each.get(name)) for each in metrics]]
        for prompts in ("training", "held out"):
            judged = [each for each in evaluations if prompts in each]
            curves.append([(each["step"], each[prompts][name][0]) for each in judged])
        for (label, colour), points in zip(CURVES.items(), curves):
            points = np.array(points, float).reshape(-1, 2)  # (steps, 2), NaN for None
            axes.plot(*points.T, ".-", color=colour, label=label)
        low, high = axes.dataLim.intervaly
        if 0 <= low and high <= 1:  # a share, at its true size
            axes.set_ylim(-0.05, 1.05)
        axes.set(title=name.removeprefix("reward/"), xlabel="step")
    row[0].legend()
    figure.savefig(file)
