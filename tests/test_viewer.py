"""viewer/: the sheet, the curves and the page of a run, from its files alone."""

import json
import runpy
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image, ImageFont

import viewer
from runtime.record import Record, as_lines
from viewer import RunFiles
from viewer.page import draw_curves, draw_page, error_of, panel, state
from viewer.sheets import draw_grid, font_for

RED, BLUE = (250, 0, 0), (0, 0, 250)


# ---- sheets --------------------------------------------------------------------------------------


def columns_of(sheet, colour, top, bottom):
    """Where in a stretch of rows a colour is: first and last column."""
    found = (np.asarray(sheet)[top:bottom] == colour).all(-1).any(0).nonzero()[0]
    return found.min(), found.max()


def test_a_grid_shows_every_picture_in_its_place():
    square, wide = Image.new("RGB", (50, 50), RED), Image.new("RGB", (100, 50), BLUE)
    rows = [("first prompt", [[(square, "1.0", False), (wide, "", False)], [(square, "", False)]])]
    rows.append(("second " * 50, [[(wide, "", True)], []]))
    sheet = draw_grid(["before", "after"], rows)
    top, half = 56, 56 + (sheet.height - 56) // 2
    # Labels stand before them.
    second = 288 + 2 * 152 + 24  # block, after a gap
    assert columns_of(sheet, RED, top, half) == (288, second + 144 - 1)
    assert columns_of(sheet, BLUE, top, half) == (288 + 144 + 8, 288 + 144 + 8 + 144 - 1)
    # Below the first.
    assert columns_of(sheet, BLUE, half, sheet.height) == (288, 288 + 144 - 1)
    blue = (np.asarray(sheet)[:half] == BLUE).all(-1).any(1).sum()
    assert blue == 72  # its shape is kept
    dark = np.asarray(sheet.convert("L")) < 128
    assert dark[:40, 288:340].any() and dark[:40, second : second + 50].any()  # the headings
    assert dark[half:, :280].any() and not dark[half + 144 :, :280].any()  # a long label is cut
    # A frame around the second.
    assert sheet.getpixel((286, half + 20)) == (0xD0, 0x20, 0x30) != sheet.getpixel((286, 90))
    plain = draw_grid(["title"], [("", [[(square, "", False)]])])
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


# ---- a run ---------------------------------------------------------------------------------------


def numbers(mean, error=None):
    rewards = {"reward": [mean, error], "reward/f": [mean, error]}
    return {"prompts": 2, "images": 4} | rewards


ODD = "<b>two</b> 'circles' & \"a\" ring"


@pytest.fixture
def made(tmp_path):
    """The folder of a run of two steps on two ranks: its reward rises, and a judge falls."""
    out = tmp_path / "a run"
    out.mkdir()
    picture, writer = Image.new("RGB", (32, 32), RED), SimpleNamespace(out=out, writes=True)
    shown = {"prompt": ODD, "type": "odd", "reward/kind": [1, 0]}
    evaluations = []
    for step, mean in ((0, 0.2), (2, 0.8)):
        place = f"evaluation/{step:06d}/1"
        of_type = numbers(mean, 0.1) | {"reward/kind": [1 - mean, None]}
        of_step = {"step": step, "judge": "kind", "adapter": None}
        of_step |= {**of_type, "types": {"odd": of_type}}
        rewards = {"reward": [mean, mean], "reward/f": [mean, mean]}
        saved = Record.save_pictures(writer, place, [picture] * 2, {"source": picture})
        evaluations.append(of_step | {"shown": [shown | rewards | saved]})
    groups = []
    for step in (1, 2):
        place = f"groups/{step:06d}/1"
        beside = {"target": picture}
        saved = Record.save_pictures(writer, place, [picture] * 2, beside, small=True)
        group = {"step": step, "prompt": ODD, "reward": [0.0, 1.0], "advantage": [-0.71, 0.71]}
        groups += [group | saved, {**group, "prompt": "elsewhere"}]
    mean = {"reward": 0.5, "reward/f": 0.5, "reward_std": 0.5, "kl": 0.1}
    metrics = [{"step": step, **mean} for step in (1, 2)]
    settings = {"steps": 2, "reward": "f", "lr": 1e-4, "versions": {"torch": "2"}}
    settings |= {"model": "models/tiny", "prompts": "p.txt", "eval_prompts": "q.txt"}
    settings |= {"eval_reward": "kind", "adapter": None, "script": "train.py"}
    settings |= {"not_default": ["lr"]}
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


@pytest.mark.parametrize(
    "file, text, words",
    [
        ("evaluation.jsonl", "", "there is no evaluation in"),  # it begins empty
        ("settings.json", '{"steps": 2}', "is a run of another version of this project: it has no"),
        ("settings.json", '{"steps"', "): copy the run again"),  # a copy that was cut short
    ],
)
def test_a_run_that_cannot_be_shown_is_one_line(made, monkeypatch, capsys, file, text, words):
    (made / file).write_text(text)
    monkeypatch.setattr(sys, "argv", ["viewer", str(made)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("viewer", run_name="__main__")
    assert words in capsys.readouterr().err


def test_a_page_shows_the_run_and_names_files_that_are_there(made, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["viewer", str(made)])
    runpy.run_module("viewer", run_name="__main__")
    assert capsys.readouterr().out == f"look at {made / 'index.html'}\n"
    page = Page(made)
    assert not page.open and ODD in page.words
    assert page.files and all((made / file).is_file() for file in page.files)
    for file in ("evaluation/000002/1-2.png", "evaluation/000002/1-source.png"):
        assert file in page.files
    for file in ("groups/000001/1-2.jpg", "groups/000002/1-target.jpg"):
        assert file in page.files
    words = " ".join(page.words)
    for expected in (
        "tiny, trained by GRPO: f",
        "its mean score “kind” was 0.800 (before), then 0.200 (after 2 steps)",
        "The run is complete: 2 of 2 steps.",
        "python train.py --config settings.json",
        "torch 2",
        "2 held-out prompts x 2 pictures: mean",
        "before after 2 steps",
        "0.200 ± 0.100 0.800 ± 0.100",
        "step 2/2 | reward 0.500 +- 0.500 | kl 0.1000",
        "-0.71",
        "+0.71",
        "0.0001",
    ):
        assert expected in words
    assert "elsewhere" in words and "- odd" in words
    text = (made / "index.html").read_text()
    assert ODD.partition(" ")[0] not in text  # no mark-up of its own
    assert text.count('class="wrong"') == 2 and "http" not in text
    assert Image.open(made / "before-after.png").width == 288 + 2 * (3 * 152 + 24)


def test_a_frame_needs_a_judge_that_says_1_or_0_alone(made):
    run = viewer.read(made)
    wrong = lambda: [x for *_, blocks in run.before_after() for cells in blocks for *_, x in cells]
    assert wrong() == [False, False, True] * 2  # the source comes first
    run.evaluations[0]["shown"][0]["reward/kind"][0] = 0.5
    assert not any(wrong())
    run.evaluations[1]["judge"] = None
    assert not any(wrong())


def test_a_sheet_speaks_of_frames_if_it_has_any(made):
    note = lambda: Image.open(made / "before-after.png").convert("L").crop((0, 0, 288, 56))
    viewer.show(made)
    assert note().getextrema()[0] < 128
    file = made / "evaluation.jsonl"
    file.write_text(file.read_text().replace('"judge": "kind"', '"judge": null'))
    viewer.show(made)
    assert note().getextrema() == (255, 255)


@pytest.mark.parametrize(
    "lines, steps, words, missing",
    [
        # It only evaluates.
        ({"metrics": 0, "groups": 0, "evaluation": 1}, 2, "0 of 2 steps", "<th>after"),
        # A resumed run rewrites its metrics before its groups.
        ({"metrics": 1}, 2, "1 of 2 steps", "step 2/2"),
        # It made more steps than it is asked for.
        ({}, 1, "2 of 2 steps", "1 of 1"),
    ],
)
def test_a_page_says_how_many_steps_its_run_has_made(made, lines, steps, words, missing):
    """lines: how many are left of a file. steps: that the run is asked for."""
    for name, count in lines.items():
        file = made / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))
    settings = (made / "settings.json").read_text()
    (made / "settings.json").write_text(settings.replace('"steps": 2', f'"steps": {steps}'))
    run = viewer.read(made)
    assert [*run.groups] == [each["step"] for each in run.metrics]
    text = draw_page(run)
    assert words in text and "0.200 ± 0.100" in text and "<th>before</th>" in text
    assert missing not in text


def test_an_evaluation_of_an_adapter_names_it(made):
    run = viewer.read(made)
    run.evaluations = [run.evaluations[0] | {"adapter": "runs/1/checkpoints/000020"}]
    text = draw_page(run)
    assert "<th>runs/1/checkpoints/000020</th>" in text and "<th>before</th>" not in text


@pytest.mark.parametrize(
    "steps, judged, saved, running, words",
    [
        (2, 2, 2, False, "is complete: 2 of 2 steps."),
        (2, 0, 2, False, "was ended after 2 of 2 steps: --resume"),
        (1, 0, 0, False, "was ended after 1 of 2 steps, of which 0 are saved: --resume"),
        (1, 0, 1, True, "goes on: 1 of 2 steps when this page was drawn"),
    ],
)
def test_a_page_says_how_the_run_is(steps, judged, saved, running, words):
    """Complete is a run that was judged after its last step."""
    evaluations, metrics = [{"step": judged}], [{}] * steps
    run = RunFiles(None, {"steps": 2}, metrics, {}, evaluations, saved, running)
    assert state(run).startswith(f"The run {words}")


def test_a_run_that_goes_on_holds_its_lock(made):
    with FileLock(made / ".lock"):
        assert viewer.read(made).is_running
    assert not viewer.read(made).is_running


def test_a_page_of_many_steps_has_the_groups_of_some(made):
    run = viewer.read(made)
    run.metrics = [run.metrics[0] | {"step": step} for step in range(1, 401)]
    run.groups = {step: run.groups[1] for step in range(1, 401)}
    text = draw_page(run)
    assert text.count("<details") == 200 and "step 399/" in text and "step 400/" not in text


def test_a_panel_has_every_point_in_its_place(made):
    steps, judged = [(1, 0.5, 0.5), (4, None, None), (10, 1.0, None)], [(0, 0.25, 0.25)]
    curves = {"steps": steps, "held out": judged}
    svg = ElementTree.fromstring(f"<svg>{panel('a < b', curves)}</svg>")
    assert svg.find("text").text == "a < b"
    places = [(float(x.get("cx")), float(x.get("cy"))) for x in svg.iter("circle")]
    left, right, top, bottom = 48, 320 - 12, 26, 190 - 24
    middle = (top + bottom) / 2
    assert places == [(left + 26, middle), (right, top), (left, (middle + bottom) / 2)]
    titles = [x.find("title").text for x in svg.iter("circle")]
    assert titles == [
        "steps, step 1: 0.500 +- 0.500",
        "steps, step 10: 1.000",
        "held out, step 0: 0.250 +- 0.250",
    ]
    band, _ = [x.get("points") for x in svg.iter("polygon")]
    assert band == "74.0,26.0 308.0,26.0 308.0,26.0 74.0,166.0"  # once around
    share = panel("", {"held out": [(0, 0.98, 0.05), (1, 1.0, None)]})  # whose error passes 1
    assert ">1</text>" in share and ">1.2</text>" not in share and ">0.2</text>" in share
    band = ElementTree.fromstring(f"<svg>{share}</svg>").find(".//polygon").get("points")
    assert band.startswith("48.0,26.0 ")  # at the top of the panel, not above it
    groups = [{"f": [1, 2]}, {"f": [3, None]}, {"f": [4.5, 4.5]}, {"f": [None]}, {}]
    assert error_of(groups, "f") == pytest.approx(3**0.5 / 2)  # of means 1.5, 3 and 4.5
    found = ElementTree.fromstring(draw_curves(viewer.read(made)))
    assert [each.find("{*}text").text for each in found.findall("{*}svg")] == ["f", "kind", "kl"]
