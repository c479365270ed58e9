"""Pictures to look at: grids with captions."""

import functools
import textwrap
from contextlib import suppress
from itertools import accumulate

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

from runtime import counted, format_number, short_name
from runtime.report import shown_names, yes_or_no

GAP = 24  # pixels

CURVES = {
    "step": ("mean of a step", "#aaaaaa"),
    "training": ("evaluation: training prompts", "#2060c0"),
    "held_out": ("evaluation: held-out prompts", "#d02030"),
}
WRONG = "#d02030"  # a frame; a right picture needs none
# Fonts of the system, if it has one of these: Pillow's own font has no Chinese.
CHINESE_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "wqy-microhei.ttc",
    "DroidSansFallbackFull.ttf",
    "PingFang.ttc",
    "msyh.ttc",
)


def font_for(text, size):
    return chinese_font(size) if max(text, default="") > "\u2e80" else ImageFont.load_default(size)


@functools.cache
def chinese_font(size):
    for name in CHINESE_FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    tqdm.write("warning: no Chinese font, so captions show boxes; try: apt install fonts-noto-cjk")
    return ImageFont.load_default(size)


def draw_grid(rows, title, cell=192, size=15):
    """Rows of pictures as one sheet.

    rows: a list of (label, [(image, caption), ...]); None among those is a gap, a third entry the
    colour of a frame.
    """
    font = ImageFont.load_default(size)
    small = ImageFont.load_default(12)
    captions = any(each and each[1] for _, cells in rows for each in cells)
    width, height = cell + 8, cell + size + (45 if captions else 15)
    places = [
        [0, *accumulate(GAP if each is None else width for each in cells)] for _, cells in rows
    ]
    widest = max([font.getlength(title) + 8, *(ends[-1] for ends in places)])
    head = 2 * size
    sheet = Image.new("RGB", (int(widest) + GAP, len(rows) * height + head), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 6), title, "black", font)
    for r, (label, cells) in enumerate(rows):
        top = head + r * height
        # A long one ends where the sheet does.
        pen.text((8, top), label, "black", font_for(label, size))
        top += size + 8
        for left, each in zip(places[r], cells):
            if each is not None:
                image, caption, *frame = each
                image = ImageOps.contain(image, (cell, cell))
                if frame:
                    corner = 10 + left + image.width, top + 2 + image.height
                    pen.rectangle((5 + left, top - 3, *corner), frame[0])
                sheet.paste(image, (8 + left, top))
                caption = textwrap.fill(textwrap.shorten(caption, cell // 3), cell // 6)
                pen.multiline_text((8 + left, top + 4 + cell), caption, "black", small, spacing=2)
    return sheet


def save_grid(path, rows, title):
    sheet = draw_grid(rows, title)
    sheet.save(path)
    return sheet


def save_before_after(out, before, after):
    """Held-out prompts before training and after, from the same seeds and noise.

    Which ones: see rows_to_show in report.py. Where a judge says yes or no, wrong pictures are
    framed. before, after: records of evaluation.jsonl; before may be None.
    """
    sides = {"before": before, "after": after} if before else {"after": after}
    judges = [judges for record in sides.values() for *_, judges in record["shown"]]
    names = judges[0] if judges else ()
    judge = yes_or_no({name: [x for each in judges for x in each[name]] for name in names})
    rows = []
    for i in range(len(after.get("rows", {}).get("", ())), len(after["shown"])):  # held out
        cells = []
        for label, record in sides.items():
            prompt, rewards, judges = record["shown"][i]
            folder = out / "evaluation" / f"{record['step']:06d}"
            given = [] if cells else sorted(folder.glob(f"{i + 1}-[a-z]*.png"))
            cells += [(Image.open(file), file.stem.partition("-")[2]) for file in given]
            cells += [None] if cells else []
            for j, reward in enumerate(rewards):
                file = folder / f"{i + 1}-{j + 1}.png"
                if file.exists():  # or a user has made room
                    words = "" if judge else f"{label}, {format_number(reward)}"
                    frame = [WRONG] if judge and judges[judge][j] == 0 else []
                    cells.append((Image.open(file), words, *frame))
        rows.append((prompt, cells))
    title = f"held out, {' and '.join(sides)} {counted(after['step'], 'step')}"
    title += f"; framed: wrong, says {short_name(judge)}" if judge else ""
    half = len(rows) if len(rows) < 4 else -(-len(rows) // 2)
    parts = {title: rows[:half], "": [*rows[half:], ("", [])][:half]}
    columns = [draw_grid(part, words, 96, 24) for words, part in parts.items() if rows[half:]]
    sheet = Image.fromarray(np.hstack(columns)) if columns else draw_grid(rows, title, 96, 24)
    sheet.save(out / "before-after.png")
    return sheet


def save_curves(path, metrics, evaluations):
    """A panel for each reward, entropy and KL, over the steps. What only judges has evaluations
    alone, see CURVES."""
    names = [name for record in (*evaluations, *metrics) for name in shown_names(record)]
    of_kl = [name for record in metrics for name in record if name.endswith("/kl")]
    names += [name for name in ("entropy", "kl", *of_kl) if points(metrics, name)]
    names = list(dict.fromkeys(names))
    sheet = Image.new("RGB", (min(len(names), 3) * 640, -(-len(names) // 3) * 400 + 60), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (text, colour) in enumerate(CURVES.values()):
        pen.text((20 + i * 400, 10), text, colour, ImageFont.load_default(24))
    for i, name in enumerate(names):
        curves = [points(metrics, name)]
        curves += [points(evaluations, key) for key in (name, f"held_out/{name}")]
        draw_panel(pen, i % 3 * 640 + 126, i // 3 * 400 + 110, name, curves)
    # Halved, for smooth lines.
    sheet.resize((sheet.width // 2, sheet.height // 2), Image.Resampling.BOX).save(path)


def points(records, name):
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def draw_panel(pen, left, top, name, curves):
    """A panel of save_curves, 500x240 pixels. curves: for each of CURVES its points (step,
    value)."""
    font = ImageFont.load_default(24)
    steps, values = zip(*([point for curve in curves for point in curve] or [(1, 0)]))
    low, high = min(values), max(max(values), min(values) + 1e-6)
    if name.startswith("reward") and 0 <= low <= high <= 1:  # a share, at its true size
        low, high = 0, 1
    pen.text((left, top - 40), short_name(name.replace("/kl", " kl")), "black", font)
    pen.line([(left, top), (left, top + 240), (left + 500, top + 240)], "#999999", 2)
    for i in range(4):
        value = f"{high - (high - low) * i / 3:.2g}"
        pen.text((left - 10, top + 80 * i), value, "#666666", font, anchor="rm")
    pen.text((left + 500, top + 250), f"step {max(steps)}", "#666666", font, anchor="rt")
    for (kind, (_, colour)), curve in zip(CURVES.items(), curves):
        places = [
            (left + 500 * s / max(*steps, 1), top + 240 * (high - v) / (high - low))
            for s, v in curve
        ]
        if places:
            pen.line(places, colour, 3 if kind == "step" else 6, joint="curve")
        if kind in ("training", "held_out") or len(places) == 1:
            for x, y in places:
                pen.ellipse((x - 8, y - 8, x + 8, y + 8), fill=colour)
