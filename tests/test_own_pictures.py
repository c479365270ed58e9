"""Prompts and pictures of one's own: read as every viewer shows them, made to size, and named where
they do not fit."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from runtime import UserError
from runtime.data import read_pictures, read_prompts, say_repeated

WHITE = (255, 255, 255)
RED = (255, 0, 0)


def read(folder, *pictures, edit=False, size=(64, 64), **options):
    """The pictures (name, PIL image) as a run gets them, as targets or as sources, one prompt for
    each."""
    (folder / "prompts.txt").write_text("make it blue\n" * (len(pictures) or 1))
    (folder / "own").mkdir(exist_ok=True)
    for name, image in pictures:
        image.save(folder / "own" / name, **options)
    if edit:
        return read_pictures(folder / "own", "source", len(pictures), size)
    return read_prompts(folder / "prompts.txt", folder / "own", size).targets


def refusal(folder, count=1):
    """The line with which these pictures are refused, where there are so many prompts."""
    (folder / "prompts.txt").write_text("make it blue\n" * count)
    with pytest.raises(UserError) as raised:
        read_prompts(folder / "prompts.txt", folder / "own", (64, 64))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "orientation, turn", [(6, Image.Transpose.ROTATE_90), (3, Image.Transpose.ROTATE_180)]
)
def test_a_photo_from_a_phone_stands_upright(tmp_path, orientation, turn):
    """Stored on its side, with a note in its EXIF how to turn it: the red stripe is at the top."""
    shown = Image.new("RGB", (300, 400), "white")
    ImageDraw.Draw(shown).rectangle((0, 0, 300, 100), fill="red")
    exif = Image.Exif()
    exif[0x0112] = orientation
    (image,) = read(tmp_path, ("1.png", shown.transpose(turn)), size=(256, 256), exif=exif)
    assert image.getpixel((image.width - 3, 3)) == image.getpixel((3, 3)) == RED
    assert image.getpixel((3, image.height - 3)) == WHITE


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_see_through_is_white(tmp_path, mode):
    """A red disc on black that nobody sees, in any of the ways to store that; and half transparent
    red is pink."""
    disc = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    ImageDraw.Draw(disc).ellipse((16, 16, 48, 48), fill=(255, 0, 0, 255))
    half = Image.new("RGBA", (64, 64), (255, 0, 0, 128))
    (first, second, third) = read(
        tmp_path, ("1.png", disc.convert(mode)), ("2.png", disc), ("3.png", half)
    )
    assert first.mode == "RGB" and first.getpixel((2, 2)) == second.getpixel((2, 2)) == WHITE
    assert second.getpixel((32, 32)) == RED
    assert np.abs(np.subtract(third.getpixel((5, 5)), (255, 127, 127))).max() <= 1


def test_more_than_eight_bits_are_refused(tmp_path):
    (tmp_path / "own").mkdir()
    Image.fromarray(np.array([[0, 65535]], dtype=np.uint16)).save(tmp_path / "own" / "1.png")
    assert "own/1.png cannot be read: it has more than 8 bits per colour" in refusal(tmp_path)


@pytest.mark.parametrize("edit", [False, True])
def test_pictures_are_made_to_size_as_they_are_read(tmp_path, monkeypatch, edit):
    """One after the other, or 256 photos of 12 megapixels would take 13 GB."""
    seen = []
    for holder, name in ((Image, "open"), (Image.Image, "resize")):
        function = getattr(holder, name)
        noted = lambda *values, name=name, function=function, **more: (
            seen.append(name) or function(*values, **more)
        )
        monkeypatch.setattr(holder, name, noted)
    read(tmp_path, *[(f"{i}.png", Image.new("RGB", (300, 300))) for i in range(3)], edit=edit)
    assert seen == ["open", "resize"] * 3


def test_what_is_no_picture_is_left_out(tmp_path):
    """What a Mac leaves beside each file, what an iPhone makes, what Pillow cannot read."""
    read(tmp_path, ("1.png", Image.new("RGB", (32, 32))), ("2.JPG", Image.new("RGB", (32, 32))))
    for name in ("._1.png", "3.HEIC", "notes.pdf", "film.mpg", "Thumbs.db"):
        (tmp_path / "own" / name).write_bytes(b"no picture")
    (tmp_path / "own" / "x.png").mkdir()
    assert len(read_prompts(tmp_path / "prompts.txt", tmp_path / "own", (64, 64)).targets) == 2
    words = f"{tmp_path}/own has 2 pictures (not read: 3.HEIC, Thumbs.db, film.mpg) for 3 prompts"
    assert refusal(tmp_path, count=3) == f"{words}; give one each, sorted by name"


def test_pictures_are_sorted_as_people_count(tmp_path):
    """Whatever the case. A superscript two is a digit to Python but no number; "٣" is one that
    sorts among letters."""
    names = ("10.png", "2.png", "²1.png", "٣1.png", "C.png", "b.png", "A.png")
    pictures = read(
        tmp_path, *((name, Image.new("RGB", (64, 64), (i, 0, 0))) for i, name in enumerate(names))
    )
    assert [picture.getpixel((0, 0))[0] for picture in pictures] == [1, 0, 6, 5, 4, 2, 3]


def test_a_picture_that_cannot_be_read_is_named_in_one_line(tmp_path, monkeypatch):
    read(tmp_path, ("1.png", Image.effect_noise((64, 64), 90)))
    file = tmp_path / "own" / "1.png"
    whole = file.read_bytes()
    words = f"the target picture {file} cannot be read: "
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        assert refusal(tmp_path).startswith(
            f"{words}Image size (4096 pixels) exceeds limit of 2000 pixels"
        )
    broken = whole.replace(b"IDAT", b"IDBT")
    for damaged in (whole[:100], b"no picture", broken):
        file.write_bytes(damaged)
        assert refusal(tmp_path).startswith(words)


def test_blanks_in_a_row_are_one_and_repeated_prompts_are_counted(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a ring\na\tring\nan  egg\na ring\n")
    prompts = read_prompts(tmp_path / "prompts.txt", None)
    assert prompts.texts == ["a ring", "a ring", "an egg", "a ring"]
    say_repeated(prompts, f"{tmp_path}/prompts.txt")
    assert capsys.readouterr().out == f"{tmp_path}/prompts.txt: 2 prompts stood there before\n"


def test_prompts_end_at_line_feeds_only(tmp_path):
    """Not at the other characters that str.splitlines knows, as in text from web pages."""
    odd = ["line\u2028separator", "form\x0cfeed", "file\x1cseparator", "next\x85line"]
    (tmp_path / "prompts.txt").write_bytes(
        "\r\n".join(["\ufeffa circle", *odd, "", "\u200b", "a cross"]).encode()
    )
    assert read_prompts(tmp_path / "prompts.txt", None).texts == ["a circle", *odd, "a cross"]
