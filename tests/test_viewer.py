"""viewer/: the sheets, the curves and the page of a run, from its files alone."""

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image, ImageFont

from runtime.jsonl import as_lines
from runtime.pictures import save_pictures
from viewer.__main__ import main
from viewer.curves import evaluation_points, panel, scale, step_points, ticks
from viewer.page import draw_page, gamed
from viewer.run import Run, is_wrong, read
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
    shutil.rmtree(tmp_path / "groups")  # to free the disk
    draw_sheets(run)
    assert sorted(file.name for file in tmp_path.glob("group-*")) == names


# ---- curves --------------------------------------------------------------------------------------


def numbers(mean, error=None):
    return {"prompts": 2, "reward": [mean, error], "reward/f": [mean, error]}


def test_points_have_their_errors():
    """Of a step the standard error over its groups, of which one has no reward."""
    groups = [
        {"step": step, "reward/f": rewards}
        for step, of_step in {1: ([0, 1], [1, 1], [None, None], [0, None]), 2: ([1, 1],)}.items()
        for rewards in of_step
    ]
    metrics = [{"step": 1, "reward/f": 0.6}, {"step": 2, "reward/f": None}]
    evaluations = [
        {"step": 0, "held out": numbers(0.5, 0.1)},
        {"step": 2, "held out": numbers(0.7)},
    ]
    run = Run(Path(), {}, metrics, groups, evaluations)
    error = np.std([0.5, 1, 0], ddof=1) / 3**0.5
    assert step_points(run, "reward/f") == [(1, 0.6, pytest.approx(error)), (2, None, None)]
    assert evaluation_points(run, "held out", "reward/f") == [(0, 0.5, 0.1), (2, 0.7, None)]
    assert evaluation_points(run, "training", "reward/f") == []  # with --steps 0


def test_a_panel_has_every_point_in_its_place():
    """A share on 0 to 1, though an error bar passes 1: it is cut."""
    steps = [(1, 0.5, 0.1), (4, None, None), (10, 1.0, 0.2)]
    svg = ElementTree.fromstring(panel("a < b", {"step": steps, "held out": [(0, 0.0, 0.1)]}))
    assert svg.find("text").text == "a < b"
    places = [(float(x.get("cx")), float(x.get("cy"))) for x in svg.iter("circle")]
    left, right, top, bottom = 44, 320 - 12, 26, 190 - 24
    middle = (top + bottom) / 2
    assert places == [(left + (right - left) / 10, middle), (right, top), (left, bottom)]
    titles = [x.find("title").text for x in svg.iter("circle")]
    assert titles[0] == "steps, step 1: 0.500 +- 0.100" and "held-out prompts, step 0" in titles[2]
    (band,) = [x.get("points").split() for x in svg.iter("polygon")]
    ends = [float(point.split(",")[1]) for point in band]
    tenth = (bottom - top) / 10
    assert ends == [middle - tenth, top, pytest.approx(top + 2 * tenth), middle + tenth]


@pytest.mark.parametrize(
    "values, expected",
    [
        ([0.2, 0.9], (0, 1)),
        ([0.01, 0.04], (0, 0.05)),
        ([20, 21], (19, 22)),
        ([7, 7], (0, 7)),
        ([-7], (-7.5, -6.5)),
        ([-1, 0.5], (-2, 1.5)),
        ([], (0, 1)),
    ],
)
def test_an_axis_fits_its_values(values, expected):
    error = {0.01: 0.01, 20: 1, -1: 1}.get(values[0] if values else None, 0)
    ends = [value + side * error for value in values for side in (-1, 1)]
    low, high = scale(values, ends)
    assert (low, high) == pytest.approx(expected)
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 7 and low <= marks[0] + 1e-9 and marks[-1] <= high + 1e-9


# ---- the page ------------------------------------------------------------------------------------

ODD = "<b>two</b> 'circles' & \"a\" ring"


@pytest.fixture
def made(tmp_path):
    """The folder of a run of two steps on two ranks: its reward rises, and a judge falls."""
    out = tmp_path / "a run"
    out.mkdir()
    picture = Image.new("RGB", (32, 32), RED)
    shown = {"prompt": ODD, "type": "odd", "reward/kind": [1, 0]}
    evaluations = []
    for step, mean in ((0, 0.2), (2, 0.8)):
        place = f"evaluation/{step:06d}/1"
        of_step = {"step": step, "judge": "kind"}
        for name in ("training", "held out", "held out, odd", "training, odd"):
            of_step[name] = numbers(mean, 0.1) | {"reward/kind": [1 - mean, None]}
        rewards = {"reward": [mean, mean], "reward/f": [mean, mean]}
        saved = save_pictures(out, place, [picture] * 2, {"source": picture})
        evaluations.append(of_step | {"shown": [shown | rewards | saved]})
    groups = []
    for step in (1, 2):
        place = f"groups/{step:06d}/1"
        saved = save_pictures(out, place, [picture] * 2, {"target": picture}, small=True)
        group = {"step": step, "prompt": ODD, "reward": [0.0, 1.0], "advantage": [-0.71, 0.71]}
        groups += [group | saved, {**group, "prompt": "elsewhere"}]
    metrics = [{"step": step, "reward": 0.5, "reward/f": 0.5, "kl": 0.1} for step in (1, 2)]
    settings = {"steps": 2, "reward": "f", "lr": 1e-4, "versions": {"torch": "2"}, "inputs": {}}
    (out / "settings.json").write_text(json.dumps(settings))
    for name, records in (("metrics", metrics), ("groups", groups), ("evaluation", evaluations)):
        (out / f"{name}.jsonl").write_text(as_lines(records))
    return out


class Page(HTMLParser):
    """The words of a page, the files that it names, and what stays open."""

    def __init__(self, out):
        super().__init__()
        self.words, self.files, self.open = [], [], []
        self.feed((out / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.files += [unquote(value) for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_shows_the_run_and_names_files_that_are_there(made, capsys):
    assert main([str(made)]) == 0
    assert f"look at {made / 'index.html'}" in capsys.readouterr().out
    page = Page(made)
    assert not page.open and ODD in page.words
    assert page.files and all((made / file).is_file() for file in page.files)
    for file in ("evaluation/000002/1-2.png", "evaluation/000000/1-source.png"):
        assert file in page.files
    for file in ("groups/000001/1-2.jpg", "groups/000002/1-target.jpg"):
        assert file in page.files
    words = " ".join(page.words)
    for expected in ("2 of 2 steps", "0.200 ± 0.100 → 0.800 ± 0.100", "-0.71", "+0.71", "0.0001"):
        assert expected in words
    assert "step 2: reward 0.500, 0 of 2 groups without spread" in words
    assert "A red frame: kind is 0." in words and "elsewhere" in words
    assert "KL to the reference" in words
    text = (made / "index.html").read_text()
    assert ODD.partition(" ")[0] not in text  # no mark-up of its own
    assert text.count('class="wrong"') == 2 and "http" not in text.replace("http-equiv", "")
    assert {"before-after.png", "curves.svg", "group-000001.png"} <= set(os.listdir(made))
    assert not [*made.rglob(".*")]
    ElementTree.parse(made / "curves.svg")


def test_what_is_gamed(made):
    """The reward rose by more than its error, and a judge fell."""
    run = read(made)
    text = gamed(run)
    assert "reward rose, kind fell" in text and "kind fell. Is that harm?" in text
    assert text.count("<figure") == 1 and "1-2.png" in text  # the first has a judge of 1
    assert "reward 0.200 → 0.800<br>kind 0.500 → 0.000" in text
    for each in run.evaluations:
        each["held out"]["reward"][1] = 0.5  # its error
    assert "reward stayed within its error, kind fell" in gamed(run) and "No judge fell" in gamed(
        run
    )
    for each in run.evaluations:
        del each["held out"]["reward/kind"]
    assert "--eval-reward" in gamed(run)
    run.evaluations[0]["step"] = 1  # nothing is known from before training
    assert gamed(run) == ""


def test_a_page_of_a_long_run_has_some_of_its_steps(made):
    run = read(made)
    (group, *_) = run.groups
    run.groups = [group | {"step": step} for step in range(1, 402)]
    text = draw_page(run)
    assert text.count("<details") == 134 and "Of 401 steps one in 3" in text


def test_a_run_of_before_has_a_page(made):
    """Whose records name no pictures and no judge; and one without steps judges no training."""
    records = read(made).evaluations
    for each in records:
        del each["shown"], each["judge"]
    del records[0]["training"]
    (made / "evaluation.jsonl").write_text(as_lines(records[:1]))
    for name in ("metrics.jsonl", "groups.jsonl"):
        (made / name).unlink()
    assert main([str(made)]) == 0
    words = " ".join(Page(made).words)
    assert "0 of 2 steps" in words and "0.200 ± 0.100" in words and "before" not in words.lower()


def test_what_cannot_be_shown_is_one_line(made, capsys):
    """And nothing is written."""
    before = sorted(made.rglob("*"))
    for change, words in (
        (lambda: None, f"no run is in {made / 'nowhere'}: name the folder of a run"),
        ((made / "evaluation.jsonl").unlink, "has no evaluation yet"),
        (lambda: (made / "settings.json").write_text("{"), "cannot read the run"),
    ):
        change()
        assert main([str(made / "nowhere" if "nowhere" in words else made)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line
    assert {*made.rglob("*")} <= {*before}


def test_a_viewer_needs_pillow_alone():
    """Not torch, which takes seconds to import."""
    code = "import sys, viewer.__main__; print({'torch', 'numpy', 'PIL'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == "{'PIL'}\n"
