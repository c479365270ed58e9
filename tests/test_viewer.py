"""viewer/: the sheets, the curves and the page of a run, from its files alone."""

import os

import numpy as np
from PIL import Image, ImageFont

from runtime.pictures import save_pictures
from viewer.run import Run, is_wrong
from viewer.sheets import draw_grid, draw_sheets, font_for

SHEET = "evaluation/000000/sheet"
RED, BLUE, GREEN = (250, 0, 0), (0, 0, 250), (0, 120, 0)


# ---- sheets --------------------------------------------------------------------------------------


def columns_of(sheet, colour, top, bottom):
    """Where in a stretch of rows a colour is: first and last column."""
    found = (np.asarray(sheet)[top:bottom] == colour).all(-1).any(0).nonzero()[0]
    return found.min(), found.max()


def test_a_grid_shows_every_picture_in_its_place():
    square, wide = Image.new("RGB", (50, 50), RED), Image.new("RGB", (100, 50), BLUE)
    rows = [("first prompt", [(square, "1.0", False), (wide, "", False)])]
    rows.append(("second " * 50, [(wide, "", True)]))
    sheet = draw_grid("title", rows, "corner")
    top, half = 72, 72 + (sheet.height - 72) // 2
    # Labels stand before them.
    assert columns_of(sheet, RED, top, half) == (288, 288 + 144 - 1)
    assert columns_of(sheet, BLUE, top, half) == (288 + 144 + 8, 288 + 144 + 8 + 144 - 1)
    # Below the first.
    assert columns_of(sheet, BLUE, half, sheet.height) == (288, 288 + 144 - 1)
    blue = (np.asarray(sheet)[:half] == BLUE).all(-1).any(1).sum()
    assert blue == 72  # its shape is kept
    dark = np.asarray(sheet.convert("L")) < 128
    # The corner, the title.
    assert dark[:30, :280].any() and dark[:40, 288:340].any()
    assert dark[half:, :280].any() and not dark[half + 144 :, :280].any()  # a long label is cut
    # A frame around the second.
    assert sheet.getpixel((286, half + 20)) == (0xD0, 0x20, 0x30) != sheet.getpixel((286, 90))
    plain = draw_grid("title", [("", [(square, "", False)])])
    assert plain.height < half  # no room for captions where there are none


def test_chinese_is_written_in_a_font_that_has_it(monkeypatch):
    """The first of the system's; where there is none, and for all else, Pillow's."""
    stock = ImageFont.truetype
    here = ["wqy-microhei.ttc"]

    def truetype(name, size, **options):
        if name in here or not isinstance(name, str):  # Pillow's
            return (name, size) if name in here else stock(name, size, **options)
        raise OSError

    monkeypatch.setattr(ImageFont, "truetype", truetype)
    assert font_for("招牌", 15) == ("wqy-microhei.ttc", 15)
    here.clear()
    for text in ("招牌", "a sign", ""):
        assert isinstance(font_for(text, 15), ImageFont.FreeTypeFont)


def made_up(out, colours):
    """A run whose evaluations, {step: colour}, show two pictures of a prompt."""
    evaluations = []
    for step, colour in colours.items():
        images = [Image.new("RGB", (32, 32), colour)] * 2
        shown = save_pictures(out, f"evaluation/{step:06d}/1", images, {})
        shown |= {"prompt": "label", "reward": [1.0, None]}
        evaluations.append({"step": step, "judge": None, "shown": [shown]})
    return Run(out, {}, [], [], evaluations)


def test_before_and_after_stand_side_by_side(tmp_path):
    """The labels once. Where the pictures before are lost, what comes after stands alone."""
    draw_sheets(made_up(tmp_path, {0: RED}))
    first, shown = (Image.open(tmp_path / f"{name}.png") for name in (SHEET, "before-after"))
    assert shown.tobytes() == first.tobytes()
    draw_sheets(made_up(tmp_path, {0: RED, 3: BLUE, 7: GREEN}))
    sheet = Image.open(tmp_path / "before-after.png")
    before, after = (columns_of(sheet, colour, 0, sheet.height) for colour in (RED, GREEN))
    assert before == (288, 288 + 144 + 7 + 144) and after[0] == before[1] + 1 + 8 + 24
    draw_sheets(made_up(tmp_path, {7: GREEN}))
    sheet = Image.open(tmp_path / "before-after.png")
    assert columns_of(sheet, GREEN, 0, sheet.height) == before


def test_a_sheet_is_drawn_again_if_its_pictures_are_newer(tmp_path):
    draw_sheets(made_up(tmp_path, {0: RED}))
    sheet = tmp_path / f"{SHEET}.png"
    os.utime(sheet, (1, 1))
    draw_sheets(run := made_up(tmp_path, {0: BLUE}))
    assert columns_of(Image.open(sheet), BLUE, 0, 999)[0] == 288
    drawn = sheet.stat().st_mtime_ns
    draw_sheets(run)
    assert sheet.stat().st_mtime_ns == drawn


def test_a_frame_needs_a_judge_that_says_1_or_0_alone():
    one, other = {"reward/mine": [0, 1]}, {"reward/mine": [None, 0]}

    def framed(*values, judge="mine"):
        evaluation = {"judge": judge, "shown": [one, other, {"reward/mine": [*values]}]}
        return [is_wrong(evaluation, shown, j) for shown in (one, other) for j in (0, 1)]

    assert framed(1, 1) == [True, False, False, True]
    assert not any(framed(1, 0.5)) and not any(framed(1, 1, judge=None))


def test_groups_are_drawn_of_some_steps_and_of_each_the_one_with_most_spread(tmp_path):
    groups = []
    for step in (1, 2, 3, 10, 11):
        for i, rewards in enumerate(([1, 1, None], [0, 1, 0.5], [0.2, 0.4, 0.3])):
            images = [Image.new("RGB", (400, 200), (RED, BLUE, GREEN)[i])] * 3
            saved = save_pictures(tmp_path, f"groups/{step:06d}/{i}", images, {}, small=True)
            group = {"step": step, "prompt": "p", "reward": rewards, "advantage": [0.0, 1.0, -1.0]}
            groups.append(group | saved)
        groups.append({"step": step, "prompt": "of another rank", "reward": [0, 9, 0]})
    run = made_up(tmp_path, {0: RED, 2: RED})
    run.groups = groups
    draw_sheets(run)
    names = sorted(file.name for file in tmp_path.glob("group-*"))
    assert names == [f"group-{step:06d}.png" for step in (1, 2, 10)]
    sheet = np.asarray(Image.open(tmp_path / names[0]).convert("RGB")).astype(int)
    assert np.abs(sheet[72 + 36, 288 + 72] - BLUE).max() < 9  # JPEG
    assert Image.open(tmp_path / groups[0]["pictures"][0]).size == (256, 128)


# ---- curves --------------------------------------------------------------------------------------
