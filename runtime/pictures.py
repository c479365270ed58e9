"""How pictures are laid out: of a step, of an evaluation, and the curves of a run."""

import textwrap
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

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
            picture = ImageOps.contain(picture, (CELL, CELL))
            if framed:
                frame = left - 3, top - 3, left + picture.width + 3, top + picture.height + 3
                sheet.paste(RED, frame)
            sheet.paste(picture, (left, top))
            pen.text((left, top + CELL), caption, "black", font_for(caption, 17))
    return sheet


def font_for(text, size=LETTERS):
    for name in CHINESE_FONTS if max(text, default="") > "\u2e80" else ():
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)


def draw_curves(panels, file):
    """Curves of a run over its steps, a panel for each reward; none where matplotlib is missing.

    panels: {name of a reward: its curves in steps, training and held-out evaluations}. A curve is
    [(step, value or None)].
    """
    if find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure((4 * len(panels), 3), layout="constrained")
    (row,) = figure.subplots(1, len(panels), squeeze=False)
    for axes, (name, curves) in zip(row, panels.items()):
        for label, colour, curve in zip(CURVES, CURVES.values(), curves):
            points = np.array(curve, float).reshape(-1, 2)  # (steps, 2), NaN for None
            axes.plot(*points.T, ".-", color=colour, label=label)
        low, high = axes.dataLim.intervaly
        if 0 <= low and high <= 1:  # a share, at its true size
            axes.set_ylim(-0.05, 1.05)
        axes.set(title=name.removeprefix("reward/"), xlabel="step")
    row[0].legend()
    figure.savefig(file)
