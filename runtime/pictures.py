"""How pictures are laid out: of a step, of an evaluation, and the curves of a run."""

import textwrap
from contextlib import suppress

from PIL import Image, ImageDraw, ImageFont, ImageOps

from runtime import short_name

CELL, LABELS, LETTERS = 144, 288, 24  # pixels: twice of what they are on a page
RED, BLUE, GREY = "#d02030", "#2060c0", "#888888"
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


def draw_curves(panels):
    """panels: {name of a reward: its curves in steps, training and held-out evaluations}.

    A curve is [(step, value or None)].
    """
    sheet = Image.new("RGB", (640 * len(panels) + 200, 420), "white")
    pen = ImageDraw.Draw(sheet)
    pen.font = font_for("")
    legend = "grey: steps; evaluations: blue: training prompts, red: held-out prompts"
    pen.text((16, 384), legend, "black")
    for left, (name, curves) in zip(range(120, sheet.width, 640), panels.items()):
        last = max(step for curve in curves for step, _ in curve) or 1
        curves = [[point for point in curve if point[1] is not None] for curve in curves]
        values = [value for curve in curves for _, value in curve]
        low, high = min(values, default=0), max(values, default=1)
        if 0 <= low and high <= 1:  # a share, at its true size
            low, high = 0, 1
        pen.text((left, 8), short_name(name), "black")
        pen.line([(left, 60), (left, 340), (left + 480, 340)], GREY, 2)
        pen.text((left - 12, 60), f"{high:.3g}", "black", anchor="rm")
        pen.text((left - 12, 340), f"{low:.3g}", "black", anchor="rm")
        pen.text((left + 480, 348), f"step {last}", "black", anchor="rt")
        for colour, curve in zip((GREY, BLUE, RED), curves):
            x = [left + 480 * step / last for step, _ in curve]
            y = [340 - 280 * (value - low) / (high - low or 1) for _, value in curve]
            pen.line([*zip(x, y)], colour, 4)
            if len(curve) == 1:  # which no line shows
                pen.circle((x[0], y[0]), 6, colour)
    return sheet.reduce(2)  # for smooth lines
