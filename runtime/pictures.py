"""How pictures are laid out: of a step, of an evaluation, and the curves of a run."""

import textwrap
from contextlib import suppress

from PIL import Image, ImageDraw, ImageFont, ImageOps

from runtime import short_name

CELL = 144  # of a picture in before-after.png, in pixels
RED, BLUE, GREY = "#d02030", "#2060c0", "#888888"
# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallbackFull.ttf",
    "PingFang.ttc",
    "msyh.ttc",
)


def draw_grid(title, rows, corner="", cell=192, size=15):
    """Rows of pictures under a title, with labels on the left, if there are any.

    rows: [(label, [(picture, caption, whether it has a frame)])]. corner: the words above the
    labels. cell, size: of a picture and of letters, in pixels.
    """
    margin = 2 * cell if any(label for label, _ in rows) else 8
    has_captions = any(caption for _, cells in rows for _, caption, _ in cells)
    height = cell + 8 + 2 * size * has_captions
    width = margin + (cell + 8) * max(len(cells) for _, cells in rows)
    sheet = Image.new("RGB", (width, 3 * size + height * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 2), corner, "black", font_for(corner, 0.8 * size))
    pen.text((margin, 8), title, "black", font_for(title, size))
    for row, (label, cells) in enumerate(rows):
        top = 3 * size + row * height
        font = font_for(label, size)
        letters = margin * len(label) / max(1, font.getlength(label))
        lines = textwrap.wrap(label, max(1, int(letters)))
        pen.text((8, top), "\n".join(lines[: cell // size - 1]), "black", font)
        for column, (picture, caption, framed) in enumerate(cells):
            left = margin + (cell + 8) * column
            picture = ImageOps.contain(picture, (cell, cell))
            if framed:
                frame = left - 3, top - 3, left + picture.width + 3, top + picture.height + 3
                sheet.paste(RED, frame)
            sheet.paste(picture, (left, top))
            pen.text((left, top + cell), caption, "black", font_for(caption, 0.8 * size))
    return sheet


def font_for(text, size):
    for name in CHINESE_FONTS if max(text, default="") > "\u2e80" else ():
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)


def draw_curves(metrics, evaluations, names):
    """A panel for each of the names. metrics, evaluations: the records in these files."""
    sheet = Image.new("RGB", (640 * len(names) + 200, 420), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(24)
    legend = "grey: steps; evaluations: blue: training prompts, red: held-out prompts"
    pen.text((16, 384), legend, "black", font)
    last = max(record["step"] for record in (*metrics, *evaluations))
    for i, name in enumerate(names):
        curves = {
            GREY: points(metrics, name),
            BLUE: points(evaluations, name),
            RED: points(evaluations, f"held_out/{name}"),
        }
        values = [value for curve in curves.values() for _, value in curve] or [0]
        low, high = min(values), max(values)
        left = 640 * i + 120
        pen.text((left, 8), short_name(name), "black", font)
        pen.line([(left, 60), (left, 340), (left + 480, 340)], GREY, 2)
        pen.text((left - 12, 60), f"{high:.3g}", "black", font, "rm")
        pen.text((left - 12, 340), f"{low:.3g}", "black", font, "rm")
        pen.text((left + 480, 348), f"step {last}", "black", font, "rt")
        for colour, curve in curves.items():
            places = [
                (left + 480 * step / (last or 1), 340 - 280 * (value - low) / (high - low or 1))
                for step, value in curve
            ]
            pen.line(places, colour, 4)
            for place in places:
                pen.circle(place, 6, colour)
    return sheet.reduce(2)  # for smooth lines


def points(records, name):
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]
