"""Shows what a run has painted and learned, from the files in its folder.

    python -m viewer runs/1

Writes before-after.png, and index.html, a page of all of it. train.py calls show() after each
evaluation.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from runtime import folder
from runtime.numbers import format_number, sides
from runtime.record import read_jsonl
from viewer.page import draw_page
from viewer.sheets import draw_grid


@dataclass
class RunFiles:
    """What a run has written so far."""

    out: Path
    settings: dict
    metrics: list  # of each step, {name: number or None}
    groups: dict  # {step: of each prompt its rewards, advantages and pictures}
    evaluations: list
    saved: int  # steps that --resume need not make again
    is_running: bool

    def before_after(self):
        """The prompts that evaluations show: [(prompt, its type, [its pictures of each side])].

        A picture is (file, caption, whether it is wrong). Wrong is what the judge gives 0, if it
        says nothing but 1 and 0 of all that is shown.
        """
        judge = f"reward/{self.evaluations[-1]['judge']}"
        shown = [side["shown"] for side in sides(self.evaluations).values()]
        verdicts = {x for side in shown for prompt in side for x in prompt.get(judge, [])}
        judges = 0 in verdicts and verdicts <= {0, 1, None}
        rows = []
        for prompts in zip(*shown):
            blocks = []
            for prompt in prompts:
                block = [(file, name, False) for name, file in prompt["beside"].items()]
                for j, (file, reward) in enumerate(zip(prompt["pictures"], prompt["reward"])):
                    wrong = judges and prompt[judge][j] == 0
                    block.append((file, f"reward {format_number(reward)}", wrong))
                blocks.append(block)
            rows.append((prompts[-1]["prompt"], prompts[-1]["type"], blocks))
        return rows


def read(out):
    """What a run has written into its folder."""
    out = Path(out)
    settings = json.loads((out / "settings.json").read_text("utf-8"))
    metrics, groups, evaluations = (read_jsonl(out / f"{name}.jsonl") for name in folder.RECORDS)
    settings["steps"] = max(settings["steps"], len(metrics))  # it may be resumed with fewer
    of_steps = {each["step"]: [] for each in metrics}
    for group in groups:
        if group["step"] in of_steps:  # a run that resumes has rewritten the metrics first
            of_steps[group["step"]].append(group)
    state = folder.steps_saved(out), folder.is_running(out)
    return RunFiles(out, settings, metrics, of_steps, evaluations, *state)


def show(out):
    """Draws the run in a folder, which has an evaluation already."""
    run = read(out)
    opened = lambda block: [
        (Image.open(run.out / file, formats=["PNG"]), *words) for file, *words in block
    ]
    rows = [(prompt, [*map(opened, blocks)]) for prompt, _, blocks in run.before_after()]
    framed = any(wrong for _, blocks in rows for block in blocks for *_, wrong in block)
    sheet = draw_grid([*sides(run.evaluations)], rows, "red frame:\nwrong" if framed else "")
    sheet.save(run.out / "before-after.png")
    (run.out / "index.html").write_text(draw_page(run), "utf-8")
