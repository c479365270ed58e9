"""What a run leaves: a line for each step, numbers in .jsonl files, pictures."""

import json
import math
import os
import warnings
from itertools import chain

import numpy as np
import torch
from PIL import Image

from rewards import combine, split_spec
from runtime import checkpoints, counted, format_number, ranks, short_name
from runtime.pictures import LABELS, draw_curves, draw_grid
from runtime.rescue import StopRequest

SAMPLE_EVERY = 10  # steps between group-*.png
SHOWN = 4  # pictures of a prompt that an evaluation keeps
PROMPTS = 8  # that before-after.png shows at most
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

    hashed: see read_inputs in data.py. trainers: see checkpoints.save. done: steps made so far.
    When a run is resumed, records of later steps are removed first, as is a line that a kill cut
    short. What learns more than the policy extends it, see examples/train_decoder.py.
    """

    line = LINE
    columns = 8  # pictures in a row of group-*.png

    def __init__(self, out, settings, hashed, clock, trainers, done):
        self.out = out
        self.settings = settings
        self.hashed = hashed
        self.clock = clock
        self.trainers = trainers
        self.done = done
        self.weights = split_spec(settings.reward)
        self.judge = next(iter(split_spec(settings.eval_reward)), None)
        self.writes = ranks.rank() == 0
        self.records = {name: read_jsonl(out / f"{name}.jsonl", done) for name in FILES}
        if self.writes:
            with checkpoints.writing(out):
                for name, records in self.records.items():
                    (out / f".{name}.jsonl").write_text(as_lines(records))
                    os.replace(out / f".{name}.jsonl", out / f"{name}.jsonl")
                (out / "settings.json").write_text(
                    json.dumps(checkpoints.saved(settings), indent=2)
                )
        self.stop = StopRequest()
        self.keep(done)

    def append(self, name, records):
        """To a .jsonl file, with None for NaN, which JSON does not have."""
        records = json.loads(json.dumps(records), parse_constant=lambda name: None)
        self.records[name] += records
        if self.writes:
            with checkpoints.writing(self.out), open(self.out / f"{name}.jsonl", "a") as file:
                file.write(as_lines(records))

    def write(self, line):
        self.clock.bar.write(line)

    def step(self, done, prompts, batch, metrics):
        """Writes a step's line and numbers, and every SAMPLE_EVERY steps a group's pictures."""
        self.done = done
        rewards = named(batch.raw_rewards, self.weights, len(batch.images) // len(prompts))
        metrics |= self.reward_metrics(rewards) | self.clock.read()
        self.append("metrics", [{"step": done, **ranks.mean(metrics)}])
        groups = [
            {"step": done, "line": prompt.line, "prompt": prompt.text}
            | {name: values[i].tolist() for name, values in rewards.items()}
            for i, prompt in enumerate(prompts)
        ]
        self.append("groups", [*chain(*ranks.gather(groups))])
        self.keep(done)
        self.clock.bar.update()
        self.write(format_step(self.settings.steps, self.records["metrics"][-1], self.line))
        shows = done % SAMPLE_EVERY == 0 or done in (1, self.settings.steps) or self.stop.received
        if self.writes and shows:
            with checkpoints.writing(self.out):
                self.draw_group(prompts, batch, rewards["reward"])

    def reward_metrics(self, rewards):
        """What a step's rewards, {name: (N, G)}, say of its groups."""
        return reward_metrics(rewards)

    def draw_group(self, prompts, batch, rewards):
        """group-*.png: the group whose rewards differ most. rewards: (N, G)."""
        i = rewards.nan_to_num().std(1).argmax().item()
        images = batch.images[i * rewards.shape[1] :]
        cells = [
            (image, f"reward {format_number(reward)}\nadvantage {advantage:+.2f}", False)
            for image, reward, advantage in zip(images, rewards[i].tolist(), batch.advantages(i))
        ]
        rows = [("", cells[k : k + self.columns]) for k in range(0, len(cells), self.columns)]
        given = prompts[i].given() | {"target": prompts[i].target}
        beside = [(picture, name, False) for name, picture in given.items() if picture]
        rows[0] = prompts[i].text, beside + rows[0][1]
        draw_grid(f"step {self.done}", rows).save(self.out / f"group-{self.done:06d}.png")

    def draw_curves(self):
        metrics, evaluations = self.records["metrics"], self.records["evaluation"]
        panels = {}
        for name in shown_names(evaluations[-1]["training"]):
            panels[name] = [[(each["step"], each.get(name)) for each in metrics]]
            for row in ("training", "held out"):
                panels[name].append([(each["step"], each[row][name][0]) for each in evaluations])
        draw_curves(panels, self.out / "reward.png")

    def evaluation(self, training, held_out):
        """Writes an evaluation's numbers and table, and pictures of some held-out prompts.

        training, held_out: ([Prompt], [(raw rewards {name: (G,)}, G pictures)]).
        """
        record = {"step": self.done}
        for name, (prompts, results) in {"training": training, "held out": held_out}.items():
            raw = {key: torch.cat([each[key] for each, _ in results]) for key in results[0][0]}
            rewards = named(raw, self.weights, len(results[0][1]))  # at last the held-out prompts'
            record |= evaluation_metrics(name, rewards, [prompt.type for prompt in prompts])
        # Without a judge that says 1 or 0 no picture is known to be wrong.
        verdicts = raw.get(self.judge, torch.ones(rewards["reward"].shape)).nan_to_num(1)
        is_wrong = (verdicts == 0) & (verdicts.frac() == 0).all()
        wrong = is_wrong.view_as(rewards["reward"])  # (N, G)
        # Chosen once, before training.
        first = (self.records["evaluation"] or [record])[0]
        record["rows"] = first.get("rows") or rows_to_show(prompts, wrong)
        self.append("evaluation", [record])
        sides = [each for each in self.records["evaluation"] if each["step"] in (0, self.done)]
        ends = self.done >= self.settings.steps or self.stop.received
        by_type = self.judge or next(iter(self.weights))
        self.write(evaluation_table(sides, by_type if ends else None))
        if self.writes:
            images = [images for _, images in results]
            with checkpoints.writing(self.out):
                self.draw_evaluation(record["rows"], prompts, images, rewards["reward"], wrong)
                self.draw_curves()

    def draw_evaluation(self, rows, prompts, images, rewards, wrong):
        """evaluation/STEP/: the pictures of some prompts, and a sheet of all these.

        before-after.png: the sheet of the evaluation before training, if it is there, and this one.
        """
        folder = self.folder(self.done)
        folder.mkdir(parents=True, exist_ok=True)
        shown = []
        for i, row in enumerate(rows, 1):
            cells = [(picture, name, False) for name, picture in prompts[row].given().items()]
            for j, image in enumerate(images[row][:SHOWN]):
                image.save(folder / f"{i}-{j + 1}.png")
                caption = f"reward {format_number(rewards[row, j])}"
                cells.append((image, caption, wrong[row, j]))
            shown.append((prompts[row].text, cells))
        title = f"after {counted(self.done, 'step')}" if self.done else "before"
        corner = f"red frame:\n{short_name(self.judge)} is 0" if wrong.any() else ""
        sheet = draw_grid(title, shown, corner)
        sheet.save(folder / "sheet.png")
        before = self.folder(0) / "sheet.png"
        if self.done and before.exists():
            sides = np.asarray(Image.open(before)), np.asarray(sheet)[:, LABELS - 24 :]
            sheet = Image.fromarray(np.hstack(sides))
        sheet.save(self.out / "before-after.png")

    def folder(self, step):
        return self.out / "evaluation" / f"{step:06d}"

    # ---- a checkpoint, and the end ---------------------------------------------------------------

    def keep(self, step):
        """What was learned up to a step, to be saved even if the next one breaks off midway."""
        self.whole = step, checkpoints.copied(self.trainers) if self.writes else {}

    def save(self):
        """The last whole step."""
        if self.writes and self.settings.steps > 0:  # a run that only evaluates needs no checkpoint
            state = {"settings": checkpoints.saved(self.settings), **self.hashed}
            checkpoints.save(self.out, *self.whole, state)

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
        for name, trainer in self.trainers.items():
            checkpoints.save_adapter(trainer.model, self.out / name)

    def finish(self):
        self.stop.end()


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
    rewards = {"reward": combine(raw_rewards, weights, group_size)}
    for name, values in raw_rewards.items():
        short = f"reward/{short_name(name)}"
        rewards[f"reward/{name}" if short in rewards else short] = values
    return {name: values.view(-1, group_size) for name, values in rewards.items()}


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


def evaluation_metrics(name, rewards, types):
    """{name: its numbers}, and if there are several types of prompts "NAME, TYPE": those of each.

    Numbers are {"prompts": N, "images": N*G, reward: [mean, standard error]}. The errors are over
    prompts: pictures of one prompt are not independent. "mean of types" is the plain mean of the
    types whatever their sizes, like GenEval's overall score (Ghosh et al. 2023). rewards: {reward:
    (N, G)}. types: N.
    """
    metrics = {name: means_and_errors(rewards)}
    if len({*types}) == 1:
        return metrics
    for kind in dict.fromkeys(types):
        own = [each == kind for each in types]
        of_kind = {reward: values[own] for reward, values in rewards.items()}
        metrics[f"{name}, {kind}"] = means_and_errors(of_kind)
    whole, *kinds = metrics.values()
    mean = metrics[f"{name}, mean of types"] = dict(whole)
    for reward in rewards:
        pairs = torch.tensor([each[reward] for each in kinds], dtype=torch.double)  # (types, 2)
        means, errors = pairs[~pairs[:, 0].isnan()].T  # none, if it applies to no prompt
        mean[reward] = [means.mean().item(), (errors.norm() / len(errors)).item()]
    return metrics


def means_and_errors(rewards):
    shape = rewards["reward"].shape
    numbers = {"prompts": shape[0], "images": shape.numel()}
    with warnings.catch_warnings(action="ignore"):  # as above
        for name, values in rewards.items():
            means = np.nanmean(values.double(), 1)  # (N,)
            error = np.nanstd(means, ddof=1) / (~np.isnan(means)).sum() ** 0.5
            numbers[name] = [values.nanmean().item(), float(error)]
    return numbers


def rows_to_show(prompts, wrong):
    """The rows of the first prompts of each type that have no correct picture.

    If all have one, or there is no judge, the first of each type. wrong: (N, G).
    """
    rows = wrong.all(1).nonzero().flatten().tolist()
    first = {}
    for row in rows or range(len(prompts)):
        first.setdefault(prompts[row].type or row, row)
    return list(first.values())[:PROMPTS]


# ---- lines ---------------------------------------------------------------------------------------


def format_step(steps, numbers, parts):
    """The line of a step: what is 0 or was not measured is left out."""
    reward = with_error(numbers["reward"], numbers["reward_std"])
    words = [f"step {numbers['step']}/{steps}", f"reward {reward}"]
    names = shown_names(numbers)
    for name in names if len(names) > 1 else ():
        if name != "reward":
            words.append(f"{short_name(name)} {format_number(numbers[name])}")
    shown = {name: form for name, form in parts.items() if numbers.get(name)}
    return " | ".join([*words, *(form.format(numbers[name]) for name, form in shown.items())])


def shown_names(numbers):
    """The names of rewards, without their weighted sum where that is a lone reward of weight 1."""
    names = [name for name in numbers if f"{name}/".startswith("reward/")]
    return names[1:] if len(names) > 1 and numbers[names[0]] == numbers[names[1]] else names


def with_error(mean, error):
    """'0.692 +- 0.031'."""
    return format_number(mean) + ("" if error is None else f" +- {format_number(error)}")


def evaluation_table(records, by_type=None):
    """Lines of Markdown, a row for each reward; records: one evaluation, or two.

    by_type: the reward that gets a row for each type of prompts, too.
    """
    last = records[-1]
    sets = "training", "held out"
    types = dict.fromkeys(name.partition(", ")[2] for name in last if ", " in name)

    def row(label, reward, end=""):
        """Of each set, or of its prompts of a type."""
        cells = []
        for name in sets:
            sides = [each[name + end][reward] for each in records if name + end in each]
            cells.append(" -> ".join(with_error(*side) for side in sides))
        return [label, *cells]

    table = [["reward"]]
    for name in sets:
        prompts, images = last[name]["prompts"], last[name]["images"]
        group = counted(images // prompts, "picture")
        table[0].append(f"{name}: {counted(prompts, 'prompt')} x {group}")
    for reward in shown_names(last["training"]):
        table.append(row(short_name(reward), reward))
        if by_type and reward in (f"reward/{by_type}", f"reward/{short_name(by_type)}"):
            table += [row(f"- {each}", reward, f", {each}") for each in types]
    widths = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * width for width in widths])
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in table]
    title = f"evaluation after {counted(last['step'], 'step')}"
    title += ", before -> after" if len(records) > 1 else ""
    return "\n".join([f"{title}: mean +- standard error over prompts (docs/numbers.md)", *lines])
