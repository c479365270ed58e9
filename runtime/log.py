"""What a run leaves: a line for each step, numbers in .jsonl files, pictures, a tracker."""

import json
import math
import os
import shutil
import warnings
from contextlib import suppress
from itertools import chain

import numpy as np
import torch
from accelerate import PartialState, tracking
from PIL import Image

from rewards import combine, split_spec
from runtime import checkpoints, counted, format_number, ranks, short_name
from runtime.pictures import CELL, draw_curves, draw_grid
from runtime.rescue import StopRequest

SAMPLE_EVERY = 10  # steps between group-*.png
SHOWN = 4  # pictures of a prompt that an evaluation keeps
PROMPTS = 8  # that before-after.png shows at most
SETS = {"": "training", "held_out/": "held-out"}  # {prefix of an evaluation's numbers: of what}
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

    hashes: see read_inputs in data.py. trainers: see checkpoints.save. done: steps made so far.
    When a run is resumed, records of later steps are removed first, as is a line that a kill cut
    short. What learns more than the policy extends it, see examples/train_decoder.py.
    """

    line = LINE
    columns = 8  # pictures in a row of group-*.png

    def __init__(self, out, settings, hashes, clock, trainers, done):
        self.out = out
        self.settings = settings
        self.hashes = hashes
        self.trainers = trainers
        self.clock = clock
        self.begun = self.done = done
        self.weights = dict(split_spec(settings.reward))
        self.writes = ranks.rank() == 0
        self.metrics = read_jsonl(out / "metrics.jsonl", done)
        self.evaluations = read_jsonl(out / "evaluation.jsonl", done)
        groups = read_jsonl(out / "groups.jsonl", done)
        ranks.gather(None)  # all ranks have read the files that the first one now writes
        self.replace("metrics", self.metrics)
        self.replace("evaluation", self.evaluations)
        self.replace("groups", groups)
        self.tracker = None
        if self.writes:
            saved = checkpoints.saved(settings)
            with checkpoints.writing(out):
                (out / "settings.json").write_text(json.dumps(saved, indent=2) + "\n")
            if settings.tracker != "none":
                self.tracker = start_tracker(settings.tracker, saved, out)
        self.stop = StopRequest()
        self.optimizer_steps = self.count_optimizer_steps()  # up to the end of the last step

    def count_optimizer_steps(self):
        return [trainer.steps for trainer in self.trainers.values()]

    def write(self, line):
        self.clock.bar.write(line)

    def track(self, values):
        if self.tracker is not None:
            numbers = {name: x for name, x in values.items() if isinstance(x, float)}
            self.tracker.log(numbers, step=self.done)

    def append(self, name, *records):
        """To a .jsonl file."""
        if self.writes:
            with checkpoints.writing(self.out), open(self.out / f"{name}.jsonl", "a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def replace(self, name, records):
        """A .jsonl file, at once: a kill leaves the old one."""
        if self.writes:
            unfinished = self.out / f".{name}.jsonl"
            with checkpoints.writing(self.out):
                unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
                os.replace(unfinished, self.out / f"{name}.jsonl")

    def step(self, done, prompts, batch, metrics):
        """Writes a step's line and numbers, and every SAMPLE_EVERY steps a group's pictures."""
        self.done = done
        self.optimizer_steps = self.count_optimizer_steps()
        rewards = named(batch.raw_rewards, self.weights, len(batch.images) // len(prompts))
        metrics |= self.reward_metrics(rewards)
        metrics["unscored"] = rewards["reward"].isnan().double().mean().item()
        numbers = without_nan({"step": done, **ranks.mean(metrics | self.clock.read())})
        self.metrics.append(numbers)
        self.append("metrics", numbers)
        records = group_records(done, prompts, batch.raw_rewards)
        self.append("groups", *chain(*ranks.gather(records)))
        self.track(numbers)
        self.clock.bar.update()
        self.write(format_step(self.settings.steps, numbers, self.line))
        more = self.settings.steps - done
        if done == self.begun + 1 and more:
            minutes = f"{more * numbers['seconds'] / 60:.1f} minutes, without evaluations"
            self.write(f"{counted(more, 'more step')} will take about {minutes}")
        shows = done == 1 or done % SAMPLE_EVERY == 0 or not more or self.stop.received
        if self.writes and shows:
            with checkpoints.writing(self.out):
                self.draw_group(prompts, batch, rewards["reward"])
                self.draw_curves()

    def reward_metrics(self, rewards):
        """What a step's rewards, {name: (N, G)}, say of its groups."""
        return reward_metrics(rewards)

    def draw_group(self, prompts, batch, rewards):
        """group-*.png: the first group in which rewards differ. rewards: (N, G)."""
        known = rewards.nan_to_num()
        i = (known.amax(1) > known.amin(1)).int().argmax().item()
        cells = []
        images = batch.images[i * rewards.shape[1] :]
        for image, reward, advantage in zip(images, rewards[i].tolist(), batch.advantages(i)):
            words = f"reward {format_number(reward)}\nadvantage {advantage:+.2f}"
            cells.append((image, words, False))
        rows = [("", cells[k : k + self.columns]) for k in range(0, len(cells), self.columns)]
        beside = prompts[i].given() | {"target": prompts[i].target}
        rows[0][1][:0] = [(picture, name, False) for name, picture in beside.items() if picture]
        sheet = draw_grid(f"step {self.done}: {prompts[i].text}", rows)
        sheet.save(self.out / f"group-{self.done:06d}.png")

    def draw_curves(self):
        names = shown_names((self.evaluations or self.metrics)[-1])
        draw_curves(self.metrics, self.evaluations, names).save(self.out / "reward.png")

    def evaluation(self, training, held_out):
        """Writes an evaluation's numbers and lines, and pictures of some held-out prompts.

        training, held_out: ([Prompt], [(raw rewards {name: (G,)}, G pictures)]).
        """
        record = {"step": self.done}
        for prefix, (prompts, results) in zip(SETS, (training, held_out)):
            raw = {name: torch.cat([each[name] for each, _ in results]) for name in results[0][0]}
            rewards = named(raw, self.weights, len(results[0][1]))
            numbers = evaluation_metrics(rewards, [prompt.type for prompt in prompts])
            record |= {prefix + name: value for name, value in without_nan(numbers).items()}
        self.track({f"evaluation/{name}": x for name, x in record.items()})
        self.evaluations.append(record)
        # Chosen once, before training.
        rows = self.evaluations[0].get("rows")
        record["rows"] = rows or rows_to_show(*held_out, self.settings.frame_by)
        self.append("evaluation", record)
        self.print_evaluation()
        if self.writes:
            with checkpoints.writing(self.out):
                self.draw_evaluation(*held_out, record["rows"])
                self.draw_curves()

    def print_evaluation(self):
        """The last one, beside that before training unless its record was deleted."""
        records = [record for record in self.evaluations if record["step"] in (0, self.done)]
        sides = ", before -> after" if len(records) > 1 else ""
        ends = self.done >= self.settings.steps or self.stop.received
        for prefix, name in SETS.items():
            words = f"evaluation after {counted(self.done, 'step')}, {name} prompts{sides}"
            self.write(f"{words}: {summary(prefix, *records)}")
            types = [record.get(f"{prefix}types") for record in records]
            if ends and all(types):
                self.write(types_table(name, *types))

    def draw_evaluation(self, prompts, results, rows):
        """evaluation/STEP/: the pictures of some prompts, and a sheet of all these."""
        folder = self.folder(self.done)
        folder.mkdir(parents=True, exist_ok=True)
        judge = self.settings.frame_by
        shown = []
        for i, row in enumerate(rows, 1):
            rewards, images = results[row]
            wrong = rewards[judge] < 0.5 if judge else [False] * len(images)
            total = combine(rewards, self.weights, len(images))
            cells = [(picture, name, False) for name, picture in prompts[row].given().items()]
            for j, image in enumerate(images[:SHOWN]):
                image.save(folder / f"{i}-{j + 1}.png")
                cells.append((image, "" if judge else f"reward {total[j]:.3f}", wrong[j]))
            shown.append((prompts[row].text, cells))
        title = f"after {counted(self.done, 'step')}" if self.done else "before"
        corner = f"red frame: not correct,\nsays {short_name(judge)}" if judge else ""
        # At twice the size of a page's column.
        draw_grid(title, shown, corner, CELL, 24).save(folder / "sheet.png")

    def folder(self, step):
        return self.out / "evaluation" / f"{step:06d}"

    def save(self):
        if self.writes and self.settings.steps > 0:  # a run that only evaluates needs no checkpoint
            state = {"settings": checkpoints.saved(self.settings), "inputs": self.hashes}
            checkpoints.save(self.out, self.done, self.trainers, state)

    def save_whole_step(self):
        """After an error. What has moved in a step that did not end is not saved."""
        if self.optimizer_steps == self.count_optimizer_steps():
            self.save()

    def end(self):
        """The adapters and before-after.png; a warning if nothing was learned."""
        norms = {x for each in self.metrics for name, x in each.items() if "grad_norm" in name}
        if norms == {0} and not any(each["skipped"] for each in self.metrics):
            self.write(
                "warning: nothing was learned: no group had unequal rewards; use another reward, "
                "a higher --temperature or larger groups"
            )
        if self.writes:
            with checkpoints.writing(self.out):
                self.draw_before_after()
                for folder in self.save_adapters():
                    for file in ("settings.json", "evaluation.jsonl", "before-after.png"):
                        shutil.copy(self.out / file, folder)

    def draw_before_after(self):
        """The sheet of the evaluation before training, if it is still there, and of the last."""
        files = [self.folder(step) / "sheet.png" for step in (0, self.done)]
        sheets = [np.asarray(Image.open(file)) for file in files if file.exists()]
        sheets[1:] = [sheet[:, 2 * CELL - 24 :] for sheet in sheets[1:]]  # without labels
        Image.fromarray(np.hstack(sheets)).save(self.out / "before-after.png")

    def save_adapters(self):
        """What was learned, for other programs to load: the folders."""
        folder = self.out / "adapter"
        checkpoints.save_adapter(self.trainers["."].model, folder)
        return [folder]

    def finish(self):
        self.stop.end()
        if self.tracker is not None:
            self.tracker.finish()


def start_tracker(kind, configuration, out):
    """One of accelerate's trackers. A resumed run is another run of the same name."""
    PartialState()
    place = {"logging_dir": out} if kind == "tensorboard" else {"name": out.name}
    tracker = tracking.LOGGER_TYPE_TO_CLASS[kind]("grpo-glm-image", **place)
    tracker.start()
    tracker.store_init_configuration(configuration)
    return tracker


def read_jsonl(path, last_step=math.inf):
    """The records up to a step. A line cut short by a kill, and all after it, are left out."""
    records = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in path.read_text().splitlines():
            records.append(json.loads(line))
    return [record for record in records if record["step"] <= last_step]


# ---- numbers -------------------------------------------------------------------------------------


def without_nan(record):
    """With None for NaN, which JSON does not have."""
    return json.loads(json.dumps(record), parse_constant=lambda name: None)


def named(raw_rewards, weights, group_size):
    """{"reward": their weighted sum (N, G), "reward/NAME": each of them (N, G)}, from (N*G,)."""
    rewards = {"reward": combine(raw_rewards, weights, group_size)}
    for name, short in short_names(raw_rewards).items():
        rewards[f"reward/{short}"] = raw_rewards[name]
    return {name: values.view(-1, group_size) for name, values in rewards.items()}


def short_names(names):
    """{name: its short name, such as mine.py:blueness; the name where two share a short name}."""
    short = [short_name(name) for name in names]
    return {name: each if short.count(each) == 1 else name for name, each in zip(names, short)}


def reward_metrics(rewards):
    """Of each reward the mean, and the mean over groups of their std and of their best.

    rewards: {name: (N, G)}. NaN, where a reward does not apply, is left out.
    """
    metrics = {}
    with warnings.catch_warnings(action="ignore"):  # of groups in which no reward applies
        for name, values in rewards.items():
            groups = values.double().numpy()
            numbers = {
                "reward": values.nanmean().item(),
                "reward_std": np.nanmean(np.nanstd(groups, 1, ddof=1)),
                "reward_best": np.nanmean(np.nanmax(groups, 1)),
            }
            suffix = name.removeprefix("reward")
            metrics |= {part + suffix: float(x) for part, x in numbers.items()}
    return metrics


def evaluation_metrics(rewards, types=()):
    """Of each reward the mean and its standard error, and in "types" the same per type of prompt.

    "mean of the types" is their plain mean whatever their sizes, like GenEval's overall score
    (Ghosh et al. 2023). rewards: {name: (N, G)}. types: N.
    """
    metrics = means_and_errors(rewards)
    kinds = list(dict.fromkeys(types))
    if len(kinds) < 2:
        return metrics
    of_type = {kind: torch.tensor([each == kind for each in types]) for kind in kinds}
    parts = {
        kind: means_and_errors({name: values[own] for name, values in rewards.items()})
        for kind, own in of_type.items()
    }
    mean = {"prompts": metrics["prompts"]}
    for name in rewards:
        pairs = [(part[name], part[error_of(name)]) for part in parts.values()]
        pairs = torch.tensor(pairs, dtype=torch.float64)  # (types, 2)
        means, errors = pairs[~pairs[:, 0].isnan()].T
        mean |= {name: means.mean().item(), error_of(name): (errors.norm() / len(errors)).item()}
    return metrics | {"types": parts | {"mean of the types": mean}}


def means_and_errors(rewards):
    """The errors are over prompts: pictures of one prompt are not independent."""
    prompts, pictures = rewards["reward"].shape
    metrics = {"images": prompts * pictures, "prompts": prompts}
    with warnings.catch_warnings(action="ignore"):
        for name, values in rewards.items():
            means = np.nanmean(values.double().numpy(), 1)  # (N,)
            error = np.nanstd(means, ddof=1) / (~np.isnan(means)).sum() ** 0.5
            metrics |= {name: values.nanmean().item(), error_of(name): float(error)}
    return metrics


def error_of(name):
    return name.replace("reward", "reward_error", 1)


def group_records(step, prompts, raw_rewards):
    """The lines of groups.jsonl: each group's prompt, its line in the file, its rewards."""
    names = short_names(raw_rewards)
    groups = {names[name]: x.view(len(prompts), -1) for name, x in raw_rewards.items()}
    records = []
    for i, prompt in enumerate(prompts):
        rewards = {name: x[i].tolist() for name, x in groups.items()}
        place = {"step": step, "line": prompt.line, "prompt": prompt.text}
        records.append(without_nan(place | {"rewards": rewards}))
    return records


def rows_to_show(prompts, results, judge):
    """The rows of the first prompts of each type that have no correct picture.

    If all have one, or there is no judge, the first of each type. results: see Record.evaluation.
    """
    rows = range(len(prompts))
    wrong = [row for row in rows if judge and (results[row][0][judge] < 0.5).all()]
    first = {}
    for row in wrong or rows:
        first.setdefault(prompts[row].type or row, row)
    return list(first.values())[:PROMPTS]


# ---- lines ---------------------------------------------------------------------------------------


def format_step(steps, numbers, parts):
    """The line of a step: what is 0 or was not measured is left out."""
    words = [f"step {numbers['step']}/{steps}"]
    words.append(f"reward {with_error(numbers, 'reward', 'reward_std')}")
    names = shown_names(numbers)
    if len(names) > 1:
        names = [name for name in names if name != "reward"]
        each = [f"{short_name(name)} {format_number(numbers[name])}" for name in names]
        words.append(", ".join(each))
    shown = {name: form for name, form in parts.items() if numbers.get(name)}
    return " | ".join([*words, *(form.format(numbers[name]) for name, form in shown.items())])


def shown_names(record, prefix=""):
    """The names of rewards, without their weighted sum where that is a lone reward of weight 1."""
    names = [name for name in record if f"{name}/".startswith(f"{prefix}reward/")]
    return names[1:] if len(names) > 1 and record[names[0]] == record[names[1]] else names


def with_error(record, name, error=None):
    """'0.692 +- 0.031', the reward of this name with its standard error, if it has one."""
    values = [record[name], record[error or error_of(name)]]
    known = [
        f"{x:.3f}" if x == 0 or abs(x) >= 5e-4 else f"{x:.0e}" for x in values if x is not None
    ]
    return " +- ".join(known) or "none"


def compared(records, names):
    """For each name a cell such as '0.692 +- 0.031 -> 0.864 +- 0.020'."""
    return [" -> ".join(with_error(record, name) for record in records) for name in names]


def summary(prefix, *records):
    """'ssim 0.692 +- 0.031 -> 0.864 +- 0.020 (64 pictures: 16 prompts x 4)', of evaluations."""
    names = shown_names(records[-1], prefix)
    pairs = zip(map(short_name, names), compared(records, names))
    images, prompts = (records[0][f"{prefix}{name}"] for name in ("images", "prompts"))
    number = f"{images} pictures: {counted(prompts, 'prompt')} x {images // prompts}"
    return f"{', '.join(map(' '.join, pairs))} ({number})"


def types_table(heading, *types):
    """Lines of Markdown, a row for each type of prompt. types: of the evaluations."""
    names = shown_names(types[-1]["mean of the types"])
    rows = [[heading, "prompts", *map(short_name, names)]]
    for kind, numbers in types[-1].items():
        cells = compared([each[kind] for each in types], names)
        rows.append([kind, str(numbers["prompts"]), *cells])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)
