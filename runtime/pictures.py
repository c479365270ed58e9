"""How pictures are laid out: of a step, of an evaluation, and the curves of a run."""

import textwrap
from contextlib import suppress

from PIL import Image, ImageDraw, ImageFont, ImageOps

from runtime import format_number, short_name

RED, BLUE, GREY = "#d02030", "#2060c0", "#888888"
# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallbackFull.ttf",
    "PingFang.ttc",
    "msyh.ttc",
)


def draw_group(prompt, images, rewards, advantages, title, columns):
    """The pictures that a step has painted for a prompt, after those that came with the prompt.

    images, rewards, advantages: G of each, `columns` in a row.
    """
    beside = prompt.given() | {"target": prompt.target}
    cells = [
        (image, f"reward {format_number(reward)}\nadvantage {advantage:+.2f}", False)
        for image, reward, advantage in zip(images, rewards, advantages, strict=True)
    ]
    rows = [("", cells[i : i + columns]) for i in range(0, len(cells), columns)]
    rows[0][1][:0] = [(picture, name, False) for name, picture in beside.items() if picture]
    return draw_grid(title, rows)


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
    sheet = Image.new("RGB", (320 * len(names) + 100, 210), "white")
    pen = ImageDraw.Draw(sheet)
    last = max(record["step"] for record in (*metrics, *evaluations))
    legend = "grey: steps; evaluations: blue: training prompts, red: held-out prompts"
    pen.text((8, 192), legend, "black", ImageFont.load_default(12))
    for i, name in enumerate(names):
        curves = {
            GREY: points(metrics, name),
            BLUE: points(evaluations, name),
            RED: points(evaluations, f"held_out/{name}"),
        }
        values = [value for curve in curves.values() for _, value in curve] or [0]
        low, high = min(values), max(values)
        left = 320 * i + 60
        pen.text((left, 4), short_name(name), "black", ImageFont.load_default(14))
        pen.line([(left, 30), (left, 170), (left + 240, 170)], GREY)
        pen.text((left - 6, 30), f"{high:.3g}", "black", anchor="rm")
        pen.text((left - 6, 170), f"{low:.3g}", "black", anchor="rm")
        pen.text((left + 240, 174), f"step {last}", "black", anchor="rt")
        for colour, curve in curves.items():
            places = [
                (left + 240 * step / (last or 1), 170 - 140 * (value - low) / (high - low or 1))
                for step, value in curve
            ]
            pen.line(places, colour, 2)
            for place in places:
                pen.circle(place, 3, colour)
    return sheet


def points(records, name):
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]
