"""Prompts and pictures of one's own: made to size, in order, and named where they do not fit."""

import numpy as np
import pytest
from conftest import error_from
from PIL import Image, ImageCms, ImageDraw

from runtime import data
from runtime.data import read_file, read_pictures

WHITE = (255, 255, 255)
RED = (255, 0, 0)


def read(folder, *pictures, size=(64, 64), **options):
    """The pictures (name, PIL image) as a run gets them."""
    for name, image in pictures:
        image.save(folder / name, **options)
    return read_pictures(str(folder), "target", len(pictures), size)


def refusal(folder, count=1):
    """The line with which these pictures are refused, where there are so many prompts."""
    return error_from(read_pictures, str(folder), "target", count, (64, 64))


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


def test_pictures_are_made_to_size_as_they_are_read(tmp_path, monkeypatch):
    """One after the other, or 256 photos of 12 megapixels would take 13 GB."""
    seen = []
    read_picture = lambda *given: seen.append("read") or Image.new("RGB", (300, 300))
    monkeypatch.setattr(data, "read_picture", read_picture)
    monkeypatch.setattr(data.ImageOps, "fit", lambda *given: seen.append("fit"))
    read(tmp_path, *[(f"{i}.png", Image.new("RGB", (9, 9))) for i in range(3)])
    assert seen == ["read", "fit"] * 3


def test_there_is_one_picture_for_each_prompt(tmp_path):
    """But for what a Mac leaves beside each file."""
    read(tmp_path, ("1.png", Image.new("RGB", (32, 32))), ("2.JPG", Image.new("RGB", (32, 32))))
    (tmp_path / "._1.png").write_bytes(b"no picture")
    assert len(read_pictures(str(tmp_path), "target", 2, (64, 64))) == 2
    assert refusal(tmp_path, count=3) == f"{tmp_path} has 2 pictures for 3 prompts"


def test_pictures_are_sorted_as_people_count(tmp_path):
    """And as file browsers do, without regard to case."""
    names = "A10.png", "a2.png", "b1.png", "a2-10.png", "a2-9.png", "C.png"
    drawn = ((name, Image.new("RGB", (64, 64), (i, 0, 0))) for i, name in enumerate(names))
    order = [names[picture.getpixel((0, 0))[0]] for picture in read(tmp_path, *drawn)]
    assert order == ["a2-9.png", "a2-10.png", "a2.png", "A10.png", "b1.png", "C.png"]


def test_16_bits_of_grey_are_grey(tmp_path):
    """A ramp over all of them, which Pillow's convert would make white."""
    ramp = np.linspace(0, 2**16 - 1, 64).round().astype(np.uint16)
    (image,) = read(tmp_path, ("1.png", Image.fromarray(np.tile(ramp, (64, 1)))))
    assert np.abs(np.asarray(image)[5, :, 0] - np.linspace(0, 255, 64)).max() <= 1


def test_colours_are_what_the_profile_in_a_file_says(tmp_path):
    """In one that exchanges the primaries red and green; a damaged one is none."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace(b"gXYZ", b"tmp!").replace(b"rXYZ", b"gXYZ").replace(b"tmp!", b"rXYZ")
    red = Image.new("RGBA", (64, 64), "red")
    pictures = [(f"{mode}.png", red.convert(mode)) for mode in ("RGB", "RGBA", "P")]
    for profile, colour in ((swapped, (0, 255, 0)), (srgb, RED), (b"damaged", RED)):
        for picture in read(tmp_path, *pictures, icc_profile=profile):
            assert picture.getpixel((5, 5)) == colour


def test_a_file_for_which_pillow_starts_another_program_is_refused(tmp_path, monkeypatch):
    start = lambda *given, **more: pytest.fail("it was started")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    read(tmp_path, ("1.png", Image.new("RGB", (9, 9))))
    Image.new("RGB", (9, 9)).save(tmp_path / "1.png", "EPS")
    assert "1.png cannot be read as PNG, JPEG or WebP: " in refusal(tmp_path)


def test_a_picture_that_cannot_be_read_is_named_in_one_line(tmp_path, monkeypatch):
    read(tmp_path, ("1.png", Image.effect_noise((64, 64), 90)))
    file = tmp_path / "1.png"
    words = f"the target picture {file} cannot be read as PNG, JPEG or WebP: "
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        assert refusal(tmp_path).startswith(f"{words}Image size (4096 pixels) exceeds limit")
    file.write_bytes(file.read_bytes()[:100])
    assert refusal(tmp_path).startswith(words)


def test_prompts_are_what_can_be_seen(tmp_path):
    """They end at line feeds only, not where str.splitlines ends a line, as in text from web pages.
    Joiners within a word or an emoji stay, and what ends a flag."""
    lines = ["\ufeffa ring", "a\tring", "a \u200b\u3000 ring\u00a0\ufeff", r"\# 1", "# a note"]
    lines += ["line\u2028separator", "form\x0cfeed", "next\x85line", *"\u200d\u2060\u200e\u3164"]
    lines += ["\u200b \ufeff", "", "\ufeff#\u200b ty\u2060pe\uff1a\u00a0eggs\u200e", "an  egg"]
    kept = ["می\u200cخواهم", "👩\u200d🚀", "🏴\U000e0067\U000e0062\U000e007f", "❤\ufe0f"]
    (tmp_path / "prompts.txt").write_bytes("\r\n".join(lines + kept).encode())
    found = [(each.text, each.type, each.line) for each in read_file(tmp_path / "prompts.txt")]
    others = ["a ring"] * 3 + ["# 1", None, "line separator", "form feed", "next line"]
    expected = [(text, "other", i) for i, text in enumerate(others, 1) if text]
    assert found == expected + [(x, "eggs", i) for i, x in enumerate(["an egg", *kept], 16)]
