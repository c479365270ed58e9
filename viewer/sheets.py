"""A sheet of pictures in rows, such as before-after.png."""

import textwrap
from contextlib import suppress

from PIL import Image, ImageDraw, ImageFont, ImageOps

CELL, LABELS, TOP = 144, 288, 56  # pixels: twice their size on a page
RED = "#d02030"
# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = "NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "PingFang.ttc", "msyh.ttc"


def draw_grid(title, rows):
    """Rows of pictures under a title, with labels on the left, as a PIL image.

    rows: [(label, [(picture, caption, whether it has a red frame)])].
    """
    lines = max(len(caption.splitlines()) for _, cells in rows for _, caption, _ in cells)
    height = CELL + 8 + 20 * lines
    width = LABELS + (CELL + 8) * max(len(cells) for _, cells in rows)
    sheet = Image.new("RGB", (width, TOP + height * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((LABELS, 8), title, "black", font_for(title))
    for top, (label, cells) in zip(range(TOP, sheet.height, height), rows):
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


def font_for(text, size=24):
    for name in CHINESE_FONTS if max(text, default="") > "\u2e80" else ():
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)
