"""Prompts and pictures of one's own: made to size, in order, and named where they do not fit."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import QUICK, error_from, prompts_of, records, resume
from PIL import Image, ImageDraw

from inputs.prompts import read_file, read_pictures

WHITE = (255, 255, 255)
RED = (255, 0, 0)
LIME = (0, 255, 0)


def read(folder, *pictures, size=(64, 64), **options):
    """The pictures (name, PIL image) as a run gets them."""
    for name, image in pictures:
        image.save(folder / name, **options)
    return targets(folder, prompts_of(*"x" * len(pictures)), size=size)


def targets(folder, prompts, file="", size=(64, 64)):
    width, height = size
    settings = SimpleNamespace(prompts=str(file), targets=folder and str(folder))
    vars(settings).update(width=width, height=height)
    return read_pictures(prompts, "target", settings)


def refusal(folder, count=1):
    """The line with which these pictures are refused, where there are so many prompts."""
    return error_from(targets, folder, prompts_of(*"x" * count))


def test_a_photo_from_a_phone_stands_upright(tmp_path):
    """Stored on its side, with a note in its EXIF how to turn it: the red stripe is at the top."""
    shown = Image.new("RGB", (300, 400), "white")
    ImageDraw.Draw(shown).rectangle((0, 0, 300, 100), fill="red")
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = shown.transpose(Image.Transpose.ROTATE_90)
    (image,) = read(tmp_path, ("1.png", stored), size=(256, 256), exif=exif)
    assert image.getpixel((image.width - 3, 3)) == image.getpixel((3, 3)) == RED
    assert image.getpixel((3, image.height - 3)) == WHITE


def test_what_is_see_through_is_white(tmp_path):
    """A red disc on black that nobody sees, in all ways to store that; and half transparent red is
    pink."""
    disc = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    ImageDraw.Draw(disc).ellipse((16, 16, 48, 48), fill=(255, 0, 0, 255))
    stored = [disc, disc.convert("LA"), disc.convert("P"), Image.new("RGBA", (64, 64), "#ff000080")]
    *discs, half = read(tmp_path, *((f"{i}.png", image) for i, image in enumerate(stored)))
    assert all(image.getpixel((2, 2)) == WHITE for image in discs)
    assert discs[0].getpixel((32, 32)) == RED
    assert np.abs(np.subtract(half.getpixel((5, 5)), (255, 127, 127))).max() <= 1


def test_the_middle_of_another_shape_is_cut_out(tmp_path):
    wide = Image.new("RGB", (300, 100), "white")
    wide.paste("red", (90, 0, 210, 100))
    (image,) = read(tmp_path, ("1.png", wide))
    assert image.size == (64, 64) and image.getcolors() == [(64 * 64, RED)]


def test_there_is_one_picture_for_each_prompt(tmp_path):
    """But for what a Mac leaves beside each file."""
    read(tmp_path, ("1.png", Image.new("RGB", (32, 32))), ("2.JPG", Image.new("RGB", (32, 32))))
    (tmp_path / "._1.png").write_bytes(b"no picture")
    assert len(targets(tmp_path, prompts_of(*"xx"))) == 2
    assert refusal(tmp_path, count=3) == f"{tmp_path} has 2 target pictures for 3 prompts"


def test_pictures_are_sorted_as_people_count(tmp_path):
    """And as file browsers do, without regard to case."""
    names = "A10.png", "a2.png", "b1.png", "a2-10.png", "a2-9.png", "C.png"
    drawn = ((name, Image.new("RGB", (64, 64), (i, 0, 0))) for i, name in enumerate(names))
    order = [names[picture.getpixel((0, 0))[0]] for picture in read(tmp_path, *drawn)]
    assert order == ["a2-9.png", "a2-10.png", "a2.png", "A10.png", "b1.png", "C.png"]


def write_rows(file, *names):
    """A .jsonl file whose rows name these targets, or None."""
    rows = [{"prompt": "x"} | ({"target": name} if name else {}) for name in names]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_name_their_pictures(tmp_path):
    """In the folder that is given, or beside their file; one picture may go with several. They come
    before a folder's order, and before a function."""
    file, drawn = tmp_path / "rows.jsonl", tmp_path / "drawn.py"
    code = "from PIL import Image\ndef green():\n    return [Image.new('RGB', (9, 9), 'lime')]"
    drawn.write_text(code)
    (photos := tmp_path / "photos").mkdir()
    for folder, colour in ((photos, "red"), (tmp_path, "white")):
        Image.new("RGB", (90, 90), colour).save(folder / "a.png")
        Image.new("RGB", (90, 90), "black").save(folder / "b.png")

    def found(folder, *names):
        write_rows(file, *names)
        pictures = targets(folder, read_file(file), file)
        return [picture and picture.getpixel((63, 63)) for picture in pictures]

    black, names = (0, 0, 0), ("b.png", None, "a.png", "b.png")
    assert found(photos, *names) == [black, None, RED, black]
    assert found(None, *names) == [black, None, WHITE, black]
    assert found("none", *names) == [None] * 4 and found(None, None) == [None]
    assert found(None, "photos/a.png") == found(photos, str(photos / "a.png")) == [RED]
    assert found(photos, None, None) == [RED, black]  # in order
    assert found(f"{drawn}:green", "a.png") == [WHITE] and found(f"{drawn}:green", None) == [LIME]
    for folder, place in ((None, tmp_path), (photos, photos)):
        line = error_from(found, folder, "a.png", None, "c.png")
        assert line.startswith(f"cannot read the picture {place / 'c.png'} in line 3 of {file} (")


def test_a_run_whose_rows_name_their_pictures_and_its_resume(quick):
    """A row without a target has no score. The pictures stay where they are: of the file there is a
    copy, and its own has gone."""
    Path("own").mkdir()
    Path("targets").rename("own/pictures")
    write_rows("own/rows.jsonl", None, "pictures/2.png", "pictures/2.png", None)
    flags = "--prompts own/rows.jsonl --eval-prompts own/rows.jsonl --order file"
    usual = [word for word in QUICK if word not in ("--targets", "--eval-targets", "targets")]
    for steps, out in ((2, "whole"), (1, "run")):
        assert quick(flags, "--steps", steps, "--out", out, usual=usual) == 0
    Path("own/rows.jsonl").unlink()
    assert resume("run --steps 2") == 0
    assert records("run/metrics.jsonl") == records("whole/metrics.jsonl")
    first, second = records("run/metrics.jsonl")
    assert first["unscored"] == 1 and second["unscored"] == 0
    beside = [group["beside"] for group in records("run/groups.jsonl")]
    assert [[*each] for each in beside] == [[], ["target"]]


def test_a_file_for_which_pillow_starts_another_program_is_refused(tmp_path, monkeypatch):
    start = lambda *given, **more: pytest.fail("it was started")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    read(tmp_path, ("1.png", Image.new("RGB", (9, 9))))
    Image.new("RGB", (9, 9)).save(tmp_path / "1.png", "EPS")
    assert "1.png (cannot identify image file" in refusal(tmp_path)


def test_a_picture_that_cannot_be_read_is_named_in_one_line(tmp_path, monkeypatch):
    read(tmp_path, ("1.png", Image.effect_noise((64, 64), 90)))
    file = tmp_path / "1.png"
    file.write_bytes(file.read_bytes()[:100])
    assert refusal(tmp_path).startswith(f"cannot read the picture {file} (")


def test_prompts_are_a_line_each(tmp_path):
    """Lines end at line feeds only, not where str.splitlines ends a line, as in text from web
    pages. White space of any type is one space. A line names the type of the prompts below it."""
    lines = ["\ufeffa ring", "a \u3000 ring\u00a0", "# kindred spirits", "line\u2028separator", ""]
    lines += ["#  type:\u00a0two  words ", "an\tegg", "#comment", "'so'", "#type:eggs", "1 egg"]
    (tmp_path / "prompts.txt").write_bytes("\r\n".join(lines).encode())
    assert [(x.text, x.type, x.line) for x in read_file(tmp_path / "prompts.txt")] == [
        ("a ring", "other", 1),
        ("a ring", "other", 2),
        ("line separator", "other", 4),
        ("an egg", "two words", 7),
        ("'so'", "two words", 9),
        ("1 egg", "eggs", 11),
    ]
    (tmp_path / "prompts.txt").write_text("a\n# b\n")
    assert read_file(tmp_path / "prompts.txt")[0].type is None  # there is one type, without a name
