"""Pictures to look at: grids with captions."""

import functools
import textwrap
from contextlib import suppress
from itertools import accumulate

from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

from runtime import counted, format_number, reward_names, short_name

GAP = 24  # pixels

CURVES = {"step": ("mean of a step", "#aaaaaa"), "training": ("evaluation: training prompts", "#2060c0")}
CURVES["held_out"] = ("evaluation: held-out prompts", "#d02030")


# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = ("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "DroidSansFallbackFull.ttf", "PingFang.ttc", "msyh.ttc")


def font_for(text, size):
    return chinese_font(size) if max(text, default="") > "\u2e80" else ImageFont.load_default(size)


@functools.cache
def chinese_font(size):
    for name in CHINESE_FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    tqdm.write("warning: this system has no Chinese font, so captions show boxes; try: apt install fonts-noto-cjk")
    return ImageFont.load_default(size)


def fitting(text, font, width):
    """The text, or as much of its start as is no wider than `width` pixels."""
    if font.getlength(text) <= width:
        return text
    return next(text[:n] for n in range(len(text), -1, -1) if font.getlength(text[:n] + " ...") <= width) + " ..."


def save_grid(path, rows, title, cell=192):
    """Rows of pictures as one PNG. Returns the sheet.

    rows: a list of (label, [(image, caption), ...]); None among those is a gap.
    """
    font = ImageFont.load_default(15)
    small = ImageFont.load_default(12)
    width, height = cell + 8, cell + 60
    places = [[0, *accumulate(GAP if each is None else width for each in cells)] for _, cells in rows]
    widest = max(font.getlength(title) + 8, *(ends[-1] for ends in places))
    sheet = Image.new("RGB", (int(widest) + 8, len(rows) * height + 30), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 6), title, "black", font)
    for r, (label, cells) in enumerate(rows):
        top = 30 + r * height
        own = font_for(label, 15)
        pen.text((8, top), fitting(label, own, sheet.width - 16), "black", own)
        for left, each in zip(places[r], cells):
            if each is not None:
                image, caption = each
                sheet.paste(ImageOps.contain(image, (cell, cell)), (8 + left, top + 20))
                caption = textwrap.fill(textwrap.shorten(caption, 2 * cell // 7), cell // 7)
                pen.multiline_text((8 + left, top + 22 + cell), caption, "black", small, spacing=2)
    sheet.save(path)
    return sheet


def save_before_after(out, before, after):
    """Groups of the first prompts, before training and after: same prompts, seeds and noise, side by side.

    before, after: records of evaluation.jsonl; without one of before only what is after is shown.
    """
    sides = {"before": before, "after": after} if before else {"after": after}
    rows = []
    for i, (prompt, _) in enumerate(after["shown"]):
        cells = []
        source = out / "evaluation" / f"{after['step']:06d}" / f"{i + 1}-source.png"
        if source.exists():
            cells.append((Image.open(source), "to edit"))
        for label, record in sides.items():
            cells += [None] if cells else []
            for j, reward in enumerate(record["shown"][i][1]):
                file = out / "evaluation" / f"{record['step']:06d}" / f"{i + 1}-{j + 1}.png"
                if file.exists():  # or a user has made room
                    cells.append((Image.open(file), f"{label}, {format_number(reward)}"))
        rows.append((prompt, cells))
    steps = counted(after["step"], "step")
    title = f"{' and '.join(sides)} {steps}, same seeds and noise; training prompts, then held-out ones"
    return save_grid(out / "before-after.png", rows, title, cell=112)


def save_curves(path, metrics, evaluations):
    """A panel for each reward, entropy and KL, over the steps. What only judges has evaluations alone, see CURVES."""
    names = dict.fromkeys(name for record in (*evaluations, *metrics) for name in reward_names(record))
    watched = ("entropy", "kl", "decoder/kl")
    names |= dict.fromkeys(name for name in watched if any(record.get(name) is not None for record in metrics))
    font = ImageFont.load_default(24)  # drawn at twice the size, for smooth lines
    side = 640
    height = 400
    sheet = Image.new("RGB", (min(len(names), 3) * side, -(-len(names) // 3) * height + 60), "white")
    pen = ImageDraw.Draw(sheet)
    for x, (text, colour) in enumerate(CURVES.values()):
        pen.text((80 + 420 * x, 14), text, colour, font)
    for i, name in enumerate(names):
        left, top = i % 3 * side + 110, i // 3 * height + 110
        records = {"step": metrics, "training": evaluations, "held_out": evaluations}
        curves = {
            kind: [(record["step"], record[key]) for record in records[kind] if record.get(key) is not None]
            for kind, key in (("step", name), ("training", name), ("held_out", f"held_out/{name}"))
        }
        values = [value for points in curves.values() for _, value in points] or [0]
        low, high = min(values), max(max(values), min(values) + 1e-6)
        last = max([step for points in curves.values() for step, _ in points] or [1])
        pen.text((left, top - 40), short_name(name.replace("decoder/", "decoder ")), "black", font)
        pen.line([(left, top), (left, top + 240), (left + 500, top + 240)], "#999999", 2)
        for value, y in ((high, top), (low, top + 240)):
            pen.text((left - 10, y), f"{value:.3g}", "#666666", font, anchor="rm")
        pen.text((left + 500, top + 250), f"step {last}", "#666666", font, anchor="rt")
        for kind, points in curves.items():
            colour = CURVES[kind][1]
            places = [(left + 500 * s / max(last, 1), top + 240 * (high - v) / (high - low)) for s, v in points]
            if not places:
                continue
            pen.line(places, colour, 3 if kind == "step" else 6, joint="curve")
            if kind != "step":
                for x, y in places:
                    pen.ellipse((x - 8, y - 8, x + 8, y + 8), fill=colour)
    sheet.resize((sheet.width // 2, sheet.height // 2), Image.Resampling.BOX).save(path)
