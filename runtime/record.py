"""What a run leaves: a line for each step, numbers in .jsonl files, pictures."""

import json
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
from tqdm import tqdm

from rewards import UserError, combine, weights_of
from runtime import checkpoints, ranks
from runtime.errors import StopRequest, readable

SAMPLE_EVERY = 10  # steps between group-*.png
FILES = "metrics", "groups", "evaluation"  # .jsonl
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
    """The files of a run in `out`, which the first rank writes, and its lines on the screen.

    data: see data.py. trainers: see checkpoints.save. done: steps made so far.
    When a run is resumed, records of later steps are removed first, as is a line that a kill cut
    short. What learns more than the policy extends it, see examples/train_decoder.py.
    """

    line = LINE
    columns = 8  # pictures in a row of group-*.png

    def __init__(self, out, settings, data, machine, trainers, done):
        self.out = out
        self.settings = settings
        self.hashed = data.hashed
        self.machine = machine
        self.trainers = trainers
        self.done = done
        self.weights = weights_of(data.rewards)
        self.judge = next(iter(data.judges), None)
        self.writes = ranks.rank() == 0
        self.records = {name: read_jsonl(out / f"{name}.jsonl", done) for name in FILES}
        if self.writes:
            with checkpoints.writing(out):
                for name, records in self.records.items():
                    (out / f".{name}.jsonl").write_text(as_lines(records))
                    os.replace(out / f".{name}.jsonl", out / f"{name}.jsonl")
                about = checkpoints.saved(settings) | {"versions": checkpoints.versions()}
                (out / "settings.json").write_text(json.dumps(about, indent=2))
                if settings.steps > 0 and not settings.resume:
                    started = checkpoints.find_adapters(settings.adapter)
                    checkpoints.copy_adapters(started, out / "start")
        self.tracker = None
        if self.writes and settings.tracker != "none":
            with readable(f"start --tracker {settings.tracker}"):
                self.tracker = start_tracker(settings.tracker, out)
                self.tracker.store_init_configuration(checkpoints.saved(settings))
        self.stop = StopRequest()
        self.keep(done)

    def append(self, name, records):
        """To a .jsonl file, with None for NaN, which JSON does not have."""
        records = json.loads(json.dumps(records), parse_constant=lambda name: None)
        self.records[name] += records
        if self.writes:
            with checkpoints.writing(self.out), open(self.out / f"{name}.jsonl", "a") as file:
                file.write(as_lines(records))

    def track(self, numbers):
        """{name: number or None} to the tracker, if there is one."""
        if self.tracker is not None:
            with self.optional(f"send numbers to {self.settings.tracker}"):
                known = {name: number for name, number in numbers.items() if number is not None}
                self.tracker.log(known, step=self.done)

    @contextmanager
    def optional(self, what):
        """A run does not end for a curve, or a tracker."""
        try:
            with readable(what):
                yield
        except UserError as error:
            self.write(f"warning: {error}")

    write = staticmethod(tqdm.write)  # a line, above the bars

    def step(self, done, prompts, rollout, metrics):
        """Writes a step's line and numbers, and every SAMPLE_EVERY steps a group's pictures."""
        self.done = done
        rewards = named(rollout.raw_rewards, self.weights, len(rollout.images) // len(prompts))
        of_ranks = ranks.gather(rewards)
        of_all = {name: torch.cat([each[name] for each in of_ranks]) for name in rewards}
        timings = self.machine.read()
        metrics |= self.reward_metrics(of_all) | timings | speeds(rollout, timings)
        self.append("metrics", [{"step": done, **ranks.mean(metrics)}])
        self.track(self.records["metrics"][-1])
        groups = [
            {"step": done, "line": prompt.line, "prompt": prompt.text}
            | {name: values[i].tolist() for name, values in rewards.items()}
            for i, prompt in enumerate(prompts)
        ]
        self.append("groups", [*chain(*ranks.gather(groups))])
        self.keep(done)
        self.machine.bar.update()
        self.write(format_step(self.settings.steps, self.records["metrics"][-1], self.line))
        if self.writes and (done % SAMPLE_EVERY == 0 or done == 1 or self.ends):
            with checkpoints.writing(self.out):
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
        draw_grid(f"step {self.done}", rows).save(self.out / f"group-{self.done:06d}.png")

    def draw_evaluation(self, rows, prompts, pictures, rewards, wrong):
        """evaluation/STEP/: pictures of some prompts, and a sheet of them all.

        before-after.png: the sheet of the evaluation before training, if it is there, and this one.
        pictures, wrong: {row: of each picture}. rewards: (N, G).
        """
        if not self.writes:
            return
        folder, first = (self.out / "evaluation" / f"{step:06d}" for step in (self.done, 0))
        with checkpoints.writing(self.out):
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
            sheet.save(self.out / "before-after.png")
        if find_spec("matplotlib") is not None:
            with self.optional("draw reward.png"):
                records = self.records["metrics"], self.records["evaluation"]
                draw_curves(*records, self.out / "reward.png")
        elif self.ends:
            self.write("no curves are drawn (reward.png): pip install matplotlib")

    # ---- a checkpoint, and the end ---------------------------------------------------------------

    def keep(self, step):
        """What was learned up to a step, to be saved even if the next one breaks off midway."""
        self.whole = step, checkpoints.copied(self.trainers) if self.writes else {}

    def save(self):
        """The last whole step."""
        if self.writes and self.settings.steps > 0:  # a run that only evaluates needs no checkpoint
            state = {"settings": checkpoints.saved(self.settings), **self.hashed}
            state["versions"] = checkpoints.versions()
            evaluated = {each["step"] for each in self.records["evaluation"]}
            checkpoints.save(self.out, *self.whole, state, evaluated)

    def how_to_continue(self, diverged=False):
        """In words; nothing if there is no checkpoint. diverged: in the step after the last."""
        return checkpoints.how_to_continue(self.out, self.done if diverged else None)

    def end(self):
        """What was learned, for other programs to load; a warning if that is nothing."""
        metrics = self.records["metrics"]
        if not any(x != 0 for each in metrics for name, x in each.items() if "grad_norm" in name):
            self.write(
                "warning: nothing was learned: no group had unequal rewards; use another reward, "
                "a higher --temperature or larger groups"
            )
        if self.writes:
            with checkpoints.writing(self.out):
                self.save_adapters()

    def save_adapters(self):
        """Those of the last checkpoint, which has just been saved."""
        last = checkpoints.find(self.out)[-1]
        checkpoints.copy_adapters({name: last / name for name in self.trainers}, self.out)

    def finish(self):
        self.stop.end()
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
        own = {"name": file.read_text(), "resume": "allow"}
        own |= {"id": own["name"]} if name == "wandb" else {}
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name]("grpo-glm-image", **own)
    tracker.start()
    return tracker


def read_jsonl(path, last_step=math.inf):
    """The records in a file, up to a step. Damaged lines are left out."""
    records = []
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records += [record] if record["step"] <= last_step else []
        except (ValueError, LookupError, TypeError):
            if number < len(lines):  # else a kill has cut it short
                print(f"warning: line {number} of {path} is damaged, and left out")
    return records


def as_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


# ---- numbers -------------------------------------------------------------------------------------


def named(raw_rewards, weights, group_size):
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


def format_step(steps, numbers, parts):
    """The line of a step: what is 0 or was not measured is left out."""
    reward = with_error(numbers["reward"], numbers["reward_std"])
    words = [f"step {numbers['step']}/{steps}", f"reward {reward}"]
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

    names = shown_names(evaluations[-1]["training"])
    figure = Figure((4 * len(names), 3), layout="constrained")
    (row,) = figure.subplots(1, len(names), squeeze=False)
    for axes, name in zip(row, names):
        curves = [[(each["step"], each.get(name)) for each in metrics]]
        for prompts in ("training", "held out"):
            curves.append([(each["step"], each[prompts][name][0]) for each in evaluations])
        for (label, colour), points in zip(CURVES.items(), curves):
            points = np.array(points, float).reshape(-1, 2)  # (steps, 2), NaN for None
            axes.plot(*points.T, ".-", color=colour, label=label)
        low, high = axes.dataLim.intervaly
        if 0 <= low and high <= 1:  # a share, at its true size
            axes.set_ylim(-0.05, 1.05)
        axes.set(title=name.removeprefix("reward/"), xlabel="step")
    row[0].legend()
    figure.savefig(file)
