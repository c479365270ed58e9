"""Sheets of pictures, as PNG files: before-after.png, evaluation/STEP/sheet.png, group-*.png."""

import textwrap
from contextlib import suppress
from statistics import pstdev

from PIL import Image, ImageDraw, ImageFont, ImageOps

from runtime.words import counted, format_number
from viewer.run import is_wrong

EVERY = 10  # steps between group-*.png, besides the first step and those that are evaluated
CELL, LABELS, LETTERS = 144, 288, 24  # pixels: twice their size on a page
RED = "#d02030"
# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallbackFull.ttf",
    "PingFang.ttc",
    "msyh.ttc",
)


def draw_sheets(run):
    """Writes the sheets of a Run. A sheet that is newer than its pictures stays."""
    sheets = {}  # {step: the file of its sheet}
    for evaluation in run.evaluations:
        if shown := evaluation.get("shown"):
            step = evaluation["step"]
            sheets[step] = f"evaluation/{step:06d}/sheet.png"
            if is_missing(run, sheets[step], shown[0]):
                run.write(sheets[step], draw_evaluation(run, evaluation).save)
    if sheets:
        run.write("before-after.png", before_after(run, sheets).save)
    for step, groups in run.groups_of_steps().items():
        painted = [group for group in groups if group.get("pictures")]
        if painted and (step == 1 or step % EVERY == 0 or step in sheets):
            group = max(painted, key=spread)
            if is_missing(run, f"group-{step:06d}.png", group):
                run.write(f"group-{step:06d}.png", draw_group(run, group).save)


def is_missing(run, sheet, shown):
    """Whether a sheet is not drawn yet, or is older than its pictures, if these are still there."""
    sheet, picture = run.out / sheet, run.out / shown["pictures"][0]
    if not picture.exists():
        return False
    return not sheet.exists() or sheet.stat().st_mtime < picture.stat().st_mtime


def before_after(run, sheets):
    """The sheet of the evaluation before training, if there is one, beside the last: the labels
    once."""
    last = run.open(sheets[max(sheets)])
    if 0 not in sheets or max(sheets) == 0:
        return last
    return side_by_side(run.open(sheets[0]), last.crop((LABELS - 24, 0, *last.size)))


def side_by_side(left, right):
    both = Image.new("RGB", (left.width + right.width, max(left.height, right.height)), "white")
    both.paste(left, (0, 0))
    both.paste(right, (left.width, 0))
    return both


def draw_evaluation(run, evaluation):
    """The prompts that an evaluation shows, a row each; what the judge calls wrong has a frame."""
    rows = []
    for shown in evaluation["shown"]:
        cells = cells_beside(run, shown)
        for j, (place, reward) in enumerate(zip(shown["pictures"], shown["reward"])):
            caption = f"reward {format_number(reward)}"
            cells.append((run.open(place), caption, is_wrong(evaluation, shown, j)))
        rows.append((shown["prompt"], cells))
    step = evaluation["step"]
    framed = any(frame for _, cells in rows for *_, frame in cells)
    corner = f"red frame:\n{evaluation['judge']} is 0" if framed else ""
    return draw_grid(f"after {counted(step, 'step')}" if step else "before", rows, corner)


def draw_group(run, group):
    """A group of a step, with the advantages of its pictures."""
    cells = []
    for place, reward, advantage in zip(group["pictures"], group["reward"], group["advantage"]):
        caption = f"reward {format_number(reward)}\nadvantage {advantage:+.2f}"
        cells.append((run.open(place), caption, False))
    rows = [("", cells[k : k + run.columns]) for k in range(0, len(cells), run.columns)]
    rows[0] = group["prompt"], cells_beside(run, group) + rows[0][1]
    corner = "the group whose\nrewards differ most"
    return draw_grid(f"step {group['step']}", rows, corner)


def cells_beside(run, shown):
    """The source or target of a prompt."""
    return [(run.open(place), name, False) for name, place in shown["beside"].items()]


def spread(group):
    """The standard deviation of a group's rewards, where they are known."""
    return pstdev([reward for reward in group["reward"] if reward is not None] or [0])


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
