"""Pictures to look at: grids with captions."""

import functools
import textwrap
from contextlib import suppress
from itertools import accumulate
from statistics import fmean

from PIL import Image, ImageDraw, ImageFont, ImageOps
from tqdm import tqdm

from runtime import counted, format_number, short_name
from runtime.report import shown_names

GAP = 24  # pixels

CURVES = {
    "step": ("mean of a step", "#aaaaaa"),
    "mean": ("its mean over {} steps", "#666666"),
    "training": ("evaluation: training prompts", "#2060c0"),
    "held_out": ("evaluation: held-out prompts", "#d02030"),
}
FRAMES = {1: "#20a040", 0: "#d02030"}  # right and wrong
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


def save_grid(path, rows, title, cell=192):
    """Rows of pictures as one PNG. Returns the sheet.

    rows: a list of (label, [(image, caption), ...]); None among those is a gap, a third entry the
    colour of a frame.
    """
    font = ImageFont.load_default(15)
    small = ImageFont.load_default(12)
    width, height = cell + 8, cell + 60
    places = [
        [0, *accumulate(GAP if each is None else width for each in cells)] for _, cells in rows
    ]
    widest = max(
        *(font.getlength(line) + 8 for line in title.split("\n")), *(ends[-1] for ends in places)
    )
    head = 30 + 20 * title.count("\n")
    sheet = Image.new("RGB", (int(widest) + 8, len(rows) * height + head), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((8, 6), title, "black", font)
    for r, (label, cells) in enumerate(rows):
        top = head + r * height
        pen.text(
            (8, top), label, "black", font_for(label, 15)
        )  # a long one ends where the sheet does
        for left, each in zip(places[r], cells):
            if each is not None:
                image, caption, *frame = each
                image = ImageOps.contain(image, (cell, cell))
                if frame:
                    pen.rectangle(
                        (5 + left, top + 20, 10 + left + image.width, top + 25 + image.height),
                        frame[0],
                    )
                sheet.paste(image, (8 + left, top + 23))
                caption = textwrap.fill(textwrap.shorten(caption, cell // 3), cell // 6)
                pen.multiline_text((8 + left, top + 27 + cell), caption, "black", small, spacing=2)
    sheet.save(path)
    return sheet


def save_before_after(out, before, after):
    """The first prompts of each kind, before training and after: same seeds and noise; right
    pictures framed green.

    before, after: records of evaluation.jsonl; before may be None.
    """
    sides = {"before": before, "after": after} if before else {"after": after}
    judge = yes_or_no(*sides.values())
    rows = []
    for i, (prompt, *_) in enumerate(after["shown"]):
        cells = []
        source = out / "evaluation" / f"{after['step']:06d}" / f"{i + 1}-source.png"
        if source.exists():
            cells.append((Image.open(source), "to edit"))
        for label, record in sides.items():
            cells += [None] if cells else []
            _, rewards, judges = record["shown"][i]
            for j, reward in enumerate(rewards):
                file = out / "evaluation" / f"{record['step']:06d}" / f"{i + 1}-{j + 1}.png"
                if file.exists():  # or a user has made room
                    frame = (
                        [FRAMES[judges[judge][j]]] if judge and judges[judge][j] is not None else []
                    )
                    cells.append((Image.open(file), f"{label}, {format_number(reward)}", *frame))
        rows.append((prompt, cells))
    title = f"{' and '.join(sides)} {counted(after['step'], 'step')}, same seeds and noise"
    title += "; training prompts, then held-out ones"
    title += f"\ngreen: right, red: wrong, says {short_name(judge)}" if judge else ""
    return save_grid(out / "before-after.png", rows, title, cell=112)


def yes_or_no(*records):
    """The first judge, if any, whose answers to all pictures shown are 1 or 0, or None where it
    does not apply."""
    answers = {}
    for *_, judges in (entry for record in records for entry in record["shown"]):
        for name, values in judges.items():
            answers.setdefault(name, set()).update(values)
    return next(
        (name for name, values in answers.items() if values - {None} and values <= {0, 1, None}),
        None,
    )


def save_curves(path, metrics, evaluations):
    """A panel for each reward, entropy and KL, over the steps. What only judges has evaluations
    alone, see CURVES."""
    names = [name for record in (*evaluations, *metrics) for name in shown_names(record)]
    names += [name for name in ("entropy", "kl", "decoder/kl") if points(metrics, name)]
    names = list(dict.fromkeys(names))
    window = max(5, len(metrics) // 8)  # steps
    sheet = Image.new("RGB", (min(len(names), 3) * 640, -(-len(names) // 3) * 400 + 100), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (text, colour) in enumerate(CURVES.values()):
        pen.text(
            (20 + i % 2 * 340, 10 + i // 2 * 36),
            text.format(window),
            colour,
            ImageFont.load_default(24),
        )
    for i, name in enumerate(names):
        steps = points(metrics, name)
        means = [
            (s, fmean(v for _, v in steps[max(0, n - window + 1) : n + 1]))
            for n, (s, _) in enumerate(steps)
        ]
        judged = [points(evaluations, key) for key in (name, f"held_out/{name}")]
        draw_panel(pen, i % 3 * 640 + 126, i // 3 * 400 + 150, name, [steps, means, *judged])
    sheet.resize((sheet.width // 2, sheet.height // 2), Image.Resampling.BOX).save(
        path
    )  # for smooth lines


def points(records, name):
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def draw_panel(pen, left, top, name, curves):
    """A panel of save_curves, 500x240 pixels. curves: for each of CURVES its points (step,
    value)."""
    font = ImageFont.load_default(24)
    steps, values = zip(*([point for curve in curves for point in curve] or [(1, 0)]), strict=True)
    low, high = min(values), max(max(values), min(values) + 1e-6)
    pen.text((left, top - 40), short_name(name.replace("decoder/", "decoder ")), "black", font)
    pen.line([(left, top), (left, top + 240), (left + 500, top + 240)], "#999999", 2)
    for value, y in ((high, top), (low, top + 240)):
        pen.text((left - 10, y), f"{value:.3g}", "#666666", font, anchor="rm")
    pen.text((left + 500, top + 250), f"step {max(steps)}", "#666666", font, anchor="rt")
    for (kind, (_, colour)), curve in zip(CURVES.items(), curves, strict=True):
        places = [
            (left + 500 * s / max(*steps, 1), top + 240 * (high - v) / (high - low))
            for s, v in curve
        ]
        if places:
            pen.line(places, colour, 3 if kind == "step" else 6, joint="curve")
        if kind in ("training", "held_out") or len(places) == 1:
            for x, y in places:
                pen.ellipse((x - 8, y - 8, x + 8, y + 8), fill=colour)
