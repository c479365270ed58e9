"""Shows what a run has painted and learned, from the files in its folder.

    python -m viewer runs/1

Writes before-after.png, and index.html, a page of all of it. train.py calls show() after each
evaluation.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from runtime.folder import RECORDS, read_jsonl
from runtime.numbers import format_number
from viewer.page import draw_page
from viewer.sheets import draw_grid


@dataclass
class Run:
    """What a run has written so far."""

    out: Path
    settings: dict
    metrics: list  # of each step, {name: number or None}
    groups: list  # of each step's prompts: rewards, advantages and pictures
    evaluations: list

    @property
    def sides(self):
        """The evaluation before training and the last; or the last alone."""
        first, last = self.evaluations[0], self.evaluations[-1]
        return [first, last] if first["step"] == 0 < last["step"] else [last]

    def before_after(self):
        """The prompts that evaluations show: [(prompt, [(file, caption, whether it is wrong)])].

        Wrong is what the judge gives 0, if it says nothing but 1 and 0 of all that is shown.
        """
        judge = f"reward/{self.evaluations[-1]['judge']}"
        shown = [side["shown"] for side in self.sides]
        verdicts = {x for side in shown for prompt in side for x in prompt.get(judge, [])}
        judges = 0 in verdicts and verdicts <= {0, 1, None}
        rows = []
        for of_sides in zip(*shown):
            cells = [(file, name, False) for name, file in of_sides[-1]["beside"].items()]
            for side, prompt in zip(self.sides, of_sides):
                for j, (file, reward) in enumerate(zip(prompt["pictures"], prompt["reward"])):
                    caption = f"step {side['step']}: {format_number(reward)}"
                    cells.append((file, caption, judges and prompt[judge][j] == 0))
            rows.append((of_sides[-1]["prompt"], cells))
        return rows


def read(out):
    """The Run in a folder, as far as it has come."""
    out = Path(out)
    settings = json.loads((out / "settings.json").read_text())
    return Run(out, settings, *(read_jsonl(out / f"{name}.jsonl") for name in RECORDS))


def show(out):
    """Draws the run in a folder, which has an evaluation already."""
    run = read(out)
    rows = [
        (prompt, [(Image.open(run.out / file), *words) for file, *words in cells])
        for prompt, cells in run.before_after()
    ]
    draw_grid("reward below; red frame: wrong", rows).save(run.out / "before-after.png")
    (run.out / "index.html").write_text(draw_page(run), encoding="utf-8")
