"""Logging: a line, numbers and pictures for each step."""

import json
from itertools import chain
from pathlib import Path

import torch

from glm_image.adapters import adapters_in, export_adapters
from rewards import weights_of
from runtime import folder, ranks
from runtime.numbers import (
    best_earlier_evaluation,
    evaluation_metrics,
    evaluation_table,
    format_step,
    reward_metrics,
    with_weighted_sum,
)
from runtime.terminal import say

SIDE = 256  # pixels of a side of a training picture at most, since a run saves thousands of them


class Record:
    """The numbers and pictures of a run, in its folder, and its lines on the screen.

    The first rank writes.
    """

    def __init__(self, out, settings, data, run, tracker, done):
        """out: the folder. tracker: a Tracker, or None. done: steps made; others are dropped."""
        self.out = out
        self.settings = settings
        self.trainers = run.trainers
        self.tracker = tracker
        self.done = done
        self.writes = ranks.rank() == 0
        self.weights = weights_of(data.rewards)
        self.judged_by = next(iter(data.judges), None)
        prompts = settings.prompts_per_step * ranks.count()
        self.epochs_per_step = prompts / len(data.prompts)
        self.records = {}
        for name in folder.RECORDS:
            file = self.out / f"{name}.jsonl"
            self.records[name] = [each for each in read_jsonl(file) if each["step"] <= done]
            if self.writes:
                cut(file, len(self.records[name]))

    def append(self, name, records):
        """To a .jsonl file, with None for NaN, which JSON does not have."""
        records = json.loads(json.dumps(records), parse_constant=lambda name: None)
        self.records[name] += records
        if self.writes:
            with open(self.out / f"{name}.jsonl", "a", encoding="utf-8") as file:
                file.write(as_lines(records))

    def add(self, done, rollout, metrics):
        """Writes a step's numbers and the first rank's pictures, its checkpoint, and its line."""
        self.done = done
        group_size = len(rollout.images) // len(rollout.prompts)
        rewards = with_weighted_sum(rollout.raw_rewards, self.weights, group_size)
        of_ranks = ranks.gather(rewards)
        of_all = {name: torch.cat([each[name] for each in of_ranks]) for name in rewards}
        # Mean entropy per code, in nats: an unbiased estimate from the samples.
        entropy = -torch.stack([group.old_logprobs for group in rollout.groups]).mean().item()
        metrics |= {"entropy": entropy} | reward_metrics(of_all, rollout.paintings)
        self.append("metrics", [{"step": done, **ranks.mean(metrics)}])
        numbers = self.records["metrics"][-1]
        if self.tracker is not None:
            self.tracker.log(numbers, done)
        groups = [self.group(i, rollout, rewards) for i in range(len(rollout.prompts))]
        self.append("groups", [*chain(*ranks.gather(groups))])
        # After the records: a kill between the two leaves records that a resumed run makes again.
        if done % self.settings.save_every == 0:
            self.save()
        say(format_step(self.settings.steps, numbers, self.epochs_per_step))

    def group(self, i, rollout, rewards):
        """The record of the i-th group of a step, whose pictures are saved."""
        prompt, place = rollout.prompts[i], f"groups/{self.done:06d}/{i + 1}"
        numbers = {name: values[i].tolist() for name, values in rewards.items()}
        images = rollout.images[i * len(numbers["reward"]) :][: len(numbers["reward"])]
        beside = {"source": prompt.source, "target": prompt.target}
        return {
            "step": self.done,
            "line": prompt.line,
            "prompt": prompt.text,
            **numbers,
            "advantage": rollout.advantages[i].tolist(),
            **self.save_pictures(place, images, beside, small=True),
        }

    def save(self):
        """The checkpoint of the last step, unless it is there."""
        if self.writes and self.done > self.saved:
            evaluated = {each["step"] for each in self.records["evaluation"]}
            folder.save(self.out, self.done, self.trainers, self.settings.model, evaluated)

    @property
    def saved(self):
        """Steps that a resumed run need not make again."""
        return folder.steps_saved(self.out)

    def evaluation(self, prompts, pictures, values):
        """Writes an evaluation's numbers, and pictures of some of its prompts; prints its table.

        prompts: N held-out ones. pictures: {row: images} of those that are shown. values: {name of
        a reward: (N, G)}.
        """
        evaluations = self.records["evaluation"]
        before = max((each["step"] for each in evaluations), default=0)
        since = [each for each in self.records["metrics"] if each["step"] > before]
        norms = [[each[name] for name in each if name.endswith("grad_norm")] for each in since]
        place = f"evaluation/{self.done:06d}"
        shown = [
            {"prompt": prompts[row].text, "type": prompts[row].type}
            | {name: of_all[row, : len(images)].tolist() for name, of_all in values.items()}
            | self.save_pictures(f"{place}/{row + 1}", images, {"source": prompts[row].source})
            for row, images in pictures.items()
        ]
        numbers = {"step": self.done, **evaluation_metrics(values, [x.type for x in prompts])}
        numbers |= {"judge": self.judged_by, "moved": (sum(map(any, norms)), len(since))}
        numbers["adapter"] = self.settings.adapter if self.settings.steps == 0 else None
        self.append("evaluation", [numbers | {"shown": shown}])
        if self.tracker is not None:
            last = evaluations[-1]
            self.tracker.log({f"held out/{name}": last[name][0] for name in values}, self.done)
        say(evaluation_table(evaluations))
        if best := best_earlier_evaluation(evaluations):
            step, words = best
            place = Path(self.settings.out, "checkpoints", f"{step:06d}")
            say(f"held out, {words}" + f"; to go on from there: --adapter {place}" * (step > 0))

    def save_pictures(self, place, images, beside, small=False):
        """The G pictures of a prompt, and what stands beside them, to place-*, by the first rank.

        Args:
            place: such as "groups/000001/3", of the third prompt of a step.
            images: G PIL images.
            beside: {name: a picture or None}, such as the target.
            small: as JPEG files of at most SIDE pixels a side, in place of PNG files.

        Returns {"pictures": G files, "beside": {name: file}}, named as in the folder `out`.
        """
        if not self.writes:
            return {}
        (self.out / place).parent.mkdir(parents=True, exist_ok=True)

        def save(name, picture):
            file = f"{place}-{name}.{'jpg' if small else 'png'}"
            picture = picture.convert("RGB")  # a copy
            if small:
                picture.thumbnail((SIDE, SIDE))
            picture.save(self.out / file, quality=90)  # a PNG file has none
            return file

        return {
            "pictures": [save(number, picture) for number, picture in enumerate(images, 1)],
            "beside": {name: save(name, picture) for name, picture in beside.items() if picture},
        }

    def export(self):
        """The adapters of the newest checkpoint, for other programs and people to load."""
        if self.writes and self.saved:
            from runtime.model_card import write_cards  # training needs nothing of it

            adapters = adapters_in(folder.newest(self.out))
            export_adapters(adapters, self.out)
            write_cards(self, adapters)


# ---- .jsonl files --------------------------------------------------------------------------------


def read_jsonl(path):
    """The records in a file. A line without an end was cut short by a kill, and does not count."""
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def as_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def cut(file, count):
    """Leaves the first lines of a file, in place: a kill cannot lose them."""
    with open(file, "a+b") as lines:
        lines.seek(0)
        lines.truncate(sum(len(lines.readline()) for _ in range(count)))
