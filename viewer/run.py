"""Reads a run's folder, while the run goes on or later."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from runtime.jsonl import RECORDS, read_jsonl


class CannotShow(Exception):
    """A line for the user."""


@dataclass
class Run:
    """What a run has written so far."""

    out: Path
    settings: dict
    metrics: list  # of each step, {name: number or None}
    groups: list  # of each step's prompts: rewards, advantages and pictures
    evaluations: list

    @property
    def steps(self):
        """How many steps have been made."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def last(self):
        """The last evaluation."""
        return self.evaluations[-1]

    @property
    def sides(self):
        """The evaluation before training and the last; or the last alone."""
        before = self.evaluations[0]
        return [before, self.last] if before["step"] == 0 < self.last["step"] else [self.last]

    @property
    def judge(self):
        """The first reward that only judges, as evaluations name it, or None."""
        return f"reward/{self.last['judge']}" if self.last.get("judge") else None

    @property
    def types(self):
        """The types of prompts in the last evaluation, and "mean of types"; [] without types."""
        return [*dict.fromkeys(key.partition(", ")[2] for key in self.last if ", " in key)]

    @property
    def columns(self):
        """How many pictures of a group stand in a row: with --train both, those of equal codes."""
        both = self.settings.get("train") == "both"
        return self.settings["paintings"] if both else 8

    def groups_of_steps(self):
        """{step: its groups}."""
        steps = {}
        for group in self.groups:
            steps.setdefault(group["step"], []).append(group)
        return steps

    def open(self, name):
        """A picture in the run's folder, which may come from a stranger."""
        # No other formats: for some of them Pillow starts another program.
        return Image.open(self.out / name, formats=["PNG", "JPEG"])

    def write(self, name, save):
        """A file in the run's folder, by save(path); whoever reads it never finds half of it."""
        unfinished = (self.out / name).with_name(f".{os.getpid()}-{Path(name).name}")
        save(unfinished)
        os.replace(unfinished, self.out / name)


def read(out):
    """The Run in a folder. CannotShow if there is none, or nothing to see yet."""
    out = Path(out)
    if not (out / "settings.json").exists():
        raise CannotShow(f"no run is in {out}: name the folder of a run, such as runs/1")
    try:
        settings = json.loads((out / "settings.json").read_text())
        records = [read_jsonl(out / f"{name}.jsonl") for name in RECORDS]
    except (OSError, ValueError) as error:
        raise CannotShow(f"cannot read the run in {out} ({error})") from error
    if not records[-1]:
        raise CannotShow(f"the run in {out} has no evaluation yet: ask again when it has one")
    return Run(out, settings, *records)


def mean_of(values):
    """The mean of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def is_wrong(evaluation, shown, j):
    """Whether the judge says 0 of picture j of a prompt that is shown.

    Only if the judge says nothing but 1 and 0 of all pictures that are shown.
    """
    judge = f"reward/{evaluation['judge']}"
    verdicts = [value for each in evaluation["shown"] for value in each.get(judge, [])]
    return {*verdicts} <= {0, 1, None} and judge in shown and shown[judge][j] == 0
