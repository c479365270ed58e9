"""The film at the head of the README: what each evaluation of a run has painted.

python train.py --group-size 4 --eval-every 1 --out runs/film
python benchmarks/film.py runs/film assets/before-after.gif
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image, ImageDraw, ImageFont

from runtime.log import read_jsonl

SIZE = 560, 425  # of a sheet of four captions
SHARE = "reward/check.py:correct"


def frame(run, record):
    sheet = Image.open(Path(run, "evaluation", f"{record['step']:06d}", "sheet.png")).resize(SIZE)
    share = record["held out, mean of types"][SHARE][0]
    words = f"all held-out captions: {share:.0%} correct"
    ImageDraw.Draw(sheet).text((550, 5), words, "black", ImageFont.load_default(15), anchor="ra")
    return side_by_side(sheet)


def side_by_side(sheet):
    """Two captions beside two others: the sheet half as high, for the width of a page."""
    top, row, label, pictures = 42, 95, 150, 176  # of a sheet of SIZE
    width, height = sheet.width - pictures + label, top + 2 * row
    columns = Image.new("RGB", (2 * width, height), "white")
    for source in ((0, 0, label, height), (pictures, 0, sheet.width, height)):
        columns.paste(sheet.crop(source), (min(source[0], label), 0))
        below = source[0], height, source[2], height + 2 * row
        columns.paste(sheet.crop(below), (width + min(source[0], label), top))
    return columns


def main(run, file):
    sheets = [frame(run, record) for record in read_jsonl(Path(run, "evaluation.jsonl"))]
    palette = sheets[-1].quantize(128)  # one for all: what stays the same is stored once
    frames = [sheet.quantize(palette=palette, dither=Image.Dither.NONE) for sheet in sheets]
    milliseconds = [2000, *[400] * (len(frames) - 2), 4000]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
