"""The records of a run: the files that it leaves, the lines that it prints, a tracker."""

import json
import math
import os
import shutil
from contextlib import suppress

import numpy as np
import torch
from accelerate import PartialState, tracking

from rewards import combine, split_spec
from runtime import checkpoints, counted, format_number, ranks, report, without_nan
from runtime.pictures import save_before_after, save_curves, save_grid
from runtime.rescue import StopRequest

SAMPLE_EVERY = 10  # steps between group-*.png


class Record:
    """The files of a run in `out`. Only the first rank writes.

    hashes: see read_inputs in data.py. trainers: see checkpoints.save. done: steps made so far.
    When a run is resumed, records of later steps are removed first, as is a line that a kill cut
    short. What learns more than the policy extends it, see examples/train_decoder.py.
    """

    parts, alarms = report.PARTS, report.ALARMS  # of a step's line
    row = 8  # pictures in a row of group-*.png
    learners = report.LEARNERS

    def __init__(self, out, settings, hashes, clock, trainers, done):
        self.out = out
        self.settings = settings
        self.hashes = hashes
        self.trainers = trainers
        self.clock = clock
        self.done = done
        self.weights = dict(split_spec(settings.reward))
        self.judges = [name for name, _ in split_spec(settings.eval_reward) if name != "none"]
        # Training maximises z-scores, which say nothing across evaluations, and their raw sum is
        # something else.
        by_judge = self.judges and settings.combine == "zscore"
        self.best_by = f"reward/{self.judges[0]}" if by_judge else "reward"
        self.writes = ranks.rank() == 0
        names = ("evaluation", "metrics", "groups")
        before = {name: read_jsonl(out / f"{name}.jsonl", done) for name in names}
        self.evaluations = before["evaluation"]
        ranks.gather(None)  # all ranks have read the files that the first one now writes
        self.tracker = None
        if self.writes:
            with checkpoints.writing(out):
                written = json.dumps(checkpoints.saved(settings), indent=2)
                (out / "settings.json").write_text(written + "\n")
                for name, records in before.items():
                    write_jsonl(out / f"{name}.jsonl", records)
            self.tracker = start_tracker(settings.tracker, checkpoints.saved(settings), out)
        self.stop = StopRequest()
        self.optimizer_steps = self.count_optimizer_steps()  # up to the end of the last step

    def count_optimizer_steps(self):
        return [trainer.steps for trainer in self.trainers.values()]

    def write(self, line):
        self.clock.bar.write(line)

    def track(self, step, values):
        if self.tracker is not None:
            numbers = {name: x for name, x in values.items() if isinstance(x, float)}
            self.tracker.log(numbers, step=step)

    def track_picture(self, name, picture):
        layout = {"dataformats": "NHWC"} if self.settings.tracker == "tensorboard" else {}
        if self.settings.tracker in ("tensorboard", "wandb"):
            self.tracker.log_images({name: np.asarray(picture)[None]}, step=self.done, **layout)

    def step(self, done, prompts, batch, metrics):
        """Writes a step's line and metrics, and every SAMPLE_EVERY steps its pictures."""
        self.done = done
        self.optimizer_steps = self.count_optimizer_steps()
        total = combine(batch.raw_rewards, self.weights, len(batch.images) // len(prompts))
        metrics |= self.reward_metrics(batch, total)
        metrics |= {"unscored": total.isnan().double().mean().item()}
        metrics = ranks.mean(metrics | self.clock.read())
        numbers = without_nan(metrics)
        per_rank = ranks.gather(report.group_records(done, prompts, batch.raw_rewards))
        if self.writes:
            with checkpoints.writing(self.out):
                append_jsonl(self.out / "metrics.jsonl", {"step": done, **numbers})
                groups = [group for groups in per_rank for group in groups]
                append_jsonl(self.out / "groups.jsonl", *groups)
        self.track(done, numbers)
        self.clock.bar.set_postfix_str(f"reward {numbers['reward'] or 0:.3f}")
        self.clock.bar.update()
        self.write(report.format_step(done, self.settings.steps, metrics, self.parts, self.alarms))
        last = done in (1, self.settings.steps) or self.stop.received
        if self.writes and (last or done % SAMPLE_EVERY == 0):
            self.group(prompts, batch, total.view(len(prompts), -1))

    def reward_metrics(self, batch, total):
        """What a step's rewards say of its groups. total: of each picture, (N*G,)."""
        return report.reward_metrics(batch.raw_rewards, total, self.settings.group_size)

    def group(self, prompts, batch, rewards):
        """Pictures of the first group with spread: their rewards and advantages; targets beside.

        rewards: (N, G).
        """
        spread = [len(group.unique()) > 1 for group in rewards.nan_to_num()]
        i = spread.index(True) if any(spread) else 0
        count = rewards.shape[1]
        pairs = zip(rewards[i].tolist(), batch.advantages(i).tolist())
        words = [f"reward {format_number(reward)}, advantage {a:+.2f}" for reward, a in pairs]
        cells = list(zip(batch.images[i * count : (i + 1) * count], words))
        rows = [("", cells[k : k + self.row]) for k in range(0, count, self.row)]
        beside = [(picture, name) for name, picture in prompts[i].given().items()]
        if prompts[i].target:
            beside.append((prompts[i].target, "target"))
        gap = [None] if beside else []
        rows[0] = prompts[i].text, [*beside, *gap, *rows[0][1]]
        with checkpoints.writing(self.out):
            picture = save_grid(self.out / f"group-{self.done:06d}.png", rows, f"step {self.done}")
            self.curves()
        self.track_picture("group", picture)

    def evaluation(self, sets):
        """sets: {"" or "held_out/": ([Prompt], [(raw rewards {name: (G,)}, G pictures)])}."""
        record = {"step": self.done}
        shown = []
        rows = (self.before() or {}).get("rows", {})  # of the first evaluation
        for prefix, (prompts, results) in sets.items():
            metrics, raw_rewards, total = self.judged(prompts, results)
            record |= {prefix + name: value for name, value in without_nan(metrics).items()}
            answers = {name: without_nan(raw_rewards[name].tolist()) for name in self.judges}
            size = len(results[0][1])
            if prefix not in rows:
                rows[prefix] = report.rows_to_show(prompts, answers, size)
            for row in rows[prefix]:
                own = slice(row * size, (row + 1) * size)
                judges = {name: values[own][: report.SHOWN] for name, values in answers.items()}
                rewards = without_nan(total[own][: report.SHOWN].tolist())
                images = results[row][1][: report.SHOWN]
                shown.append((prompts[row].text, rewards, judges, images, prompts[row].given()))
        self.track(self.done, {f"evaluation/{name}": x for name, x in record.items()})
        record |= {"rows": rows, "shown": [row[:3] for row in shown]}
        self.evaluations.append(record)
        before = self.before()
        records = (record,) if before in (None, record) else (before, record)
        steps = counted(self.done, "step")
        for prefix, name in report.PROMPTS.items():
            compared = f"{name} prompts" + (", before -> after" if len(records) > 1 else "")
            summary = report.summary(prefix, *records)
            self.write(f"evaluation after {steps}, {compared}: {summary}")
        table = report.kinds_table(*records)
        if table and (self.done >= self.settings.steps or self.stop.received):
            self.write("\n".join(table))
        if self.writes:
            with checkpoints.writing(self.out):
                folder = self.out / "evaluation" / f"{self.done:06d}"
                folder.mkdir(parents=True, exist_ok=True)
                for i, (*_, images, given) in enumerate(shown, 1):
                    for name, image in given.items():
                        image.save(folder / f"{i}-{name}.png")
                    for j, image in enumerate(images, 1):
                        image.save(folder / f"{i}-{j}.png")
                append_jsonl(self.out / "evaluation.jsonl", record)
                self.curves()

    def judged(self, prompts, results):
        """Metrics, raw rewards {name: (N*G,)} and their combination (N*G,)."""
        size = len(results[0][1])
        names = results[0][0]
        raw_rewards = {name: torch.cat([rewards[name] for rewards, _ in results]) for name in names}
        total = combine(raw_rewards, self.weights, size)
        kinds = [prompt.kind for prompt in prompts]
        metrics = report.evaluation_metrics(raw_rewards, total, size, kinds)
        return metrics, raw_rewards, total

    def curves(self):
        metrics = read_jsonl(self.out / "metrics.jsonl")
        save_curves(self.out / "reward.png", metrics, self.evaluations)

    def before(self):  # None if its line was deleted
        return next((record for record in self.evaluations if record["step"] == 0), None)

    def save(self):
        if self.writes and self.settings.steps > 0:  # a run that only evaluates needs no checkpoint
            state = {"settings": checkpoints.saved(self.settings), "inputs": self.hashes}
            checkpoints.save(self.out, self.done, self.trainers, state)

    def save_whole_step(self):
        """After an error. What has moved in a step that did not end is not saved."""
        if self.optimizer_steps == self.count_optimizer_steps():
            self.save()

    def end(self):
        """The adapters and before-after.png; warns if nothing, or less than before, was learned."""
        best, words = report.best_step(self.evaluations, self.best_by)
        if words:
            self.write(f"warning: {words}; that adapter is in {self.out}/checkpoints/{best:06d}")
        metrics = read_jsonl(self.out / "metrics.jsonl")
        for name, of in self.learners.items():
            if reason := report.why_nothing_was_learned(metrics, *of):
                self.write(f"warning: the {name} learned nothing: {reason}")
        if not self.writes:
            return
        with checkpoints.writing(self.out):
            picture = save_before_after(self.out, self.before(), self.evaluations[-1])
            for folder in self.save_adapters():
                for file in ("settings.json", "evaluation.jsonl", "before-after.png"):
                    shutil.copy(self.out / file, folder)
        self.track_picture("before_after", picture)

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
    """One of accelerate's trackers, or None. A resumed run is another run of the same name."""
    if kind == "none":
        return None
    PartialState()
    name = f"{out.resolve().parent.name}-{out.name}"
    place = {"logging_dir": out} if kind == "tensorboard" else {"name": name}
    tracker = tracking.LOGGER_TYPE_TO_CLASS[kind]("grpo-glm-image", **place)
    tracker.start()
    tracker.store_init_configuration(configuration)
    return tracker


def append_jsonl(path, *records):
    with open(path, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_jsonl(path, last_step=math.inf):
    """The records up to a step. A line cut short by a kill, and all after it, are left out."""
    records = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in path.read_text().splitlines():
            records.append(json.loads(line))
    return [record for record in records if record["step"] <= last_step]


def write_jsonl(path, records):
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(unfinished, path)
