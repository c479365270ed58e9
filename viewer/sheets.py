"""A sheet of pictures in rows, such as before-after.png."""

import textwrap
from contextlib import suppress

from PIL import Image, ImageDraw, ImageFont, ImageOps

CELL, LABELS, TOP, GAP = 144, 288, 56, 24  # pixels: twice their size on a page
RED = "#d02030"
# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = "NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "PingFang.ttc", "msyh.ttc"


def draw_grid(headings, rows, note=""):
    """Blocks of pictures side by side, such as before and after, as a PIL image.

    headings: of the blocks. rows: [(label, blocks)], a block being [(picture, caption, whether it
    has a red frame)]. note: above the labels.
    """
    captions = [caption for _, blocks in rows for cells in blocks for _, caption, _ in cells]
    height = CELL + 8 + 20 * max(len(each.splitlines()) for each in captions)
    widths = [GAP + (CELL + 8) * max(map(len, column)) for column in zip(*(b for _, b in rows))]
    lefts = [LABELS + sum(widths[:i]) for i in range(len(widths))]
    sheet = Image.new("RGB", (LABELS + sum(widths), TOP + height * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 2), note, "black", font_for(note, 18))
    for left, heading in zip(lefts, headings):
        pen.text((left, 8), heading, "black", font_for(heading))
    for top, (label, blocks) in zip(range(TOP, sheet.height, height), rows):
        font = font_for(label)
        letters = (LABELS - 32) * len(label) / max(1, font.getlength(label))
        words = textwrap.wrap(label, max(1, int(letters)))[:4]
        pen.text((8, top), "\n".join(words), "black", font)
        for start, cells in zip(lefts, blocks):
            for i, (picture, caption, framed) in enumerate(cells):
                border, left = 3 * framed, start + (CELL + 8) * i
                picture = ImageOps.expand(ImageOps.contain(picture, (CELL, CELL)), border, RED)
                sheet.paste(picture, (left - border, top - border))
                pen.text((left, top + CELL), caption, "black", font_for(caption, 17))
    return sheet


def font_for(text, size=24):
    for name in CHINESE_FONTS if max(text, default="") > "\u2e80" else ():
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)
