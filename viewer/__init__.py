"""Shows what a run has painted and learned, from the files in its folder.

    python -m viewer runs/1

Writes before-after.png and other sheets, curves.svg, and index.html, a page of all of it. train.py
calls show() after each evaluation. Needs Pillow alone.
"""

from viewer.curves import draw_curves
from viewer.page import draw_page
from viewer.run import read
from viewer.sheets import draw_sheets


def show(out):
    """Draws the run in a folder, as far as it has come. CannotShow if there is nothing to see."""
    run = read(out)
    draw_sheets(run)
    for name, text in {"curves.svg": draw_curves(run), "index.html": draw_page(run)}.items():
        run.write(name, lambda file, text=text: file.write_text(text, encoding="utf-8"))
