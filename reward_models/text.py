"""Text in the picture, read by OCR."""

import math
import re
import unicodedata

import torch
from PIL import Image

# The quotation marks between which GLM-Image's pipeline finds text to paint (get_glyph_texts),
# except that a single one beside a letter is an apostrophe in scripts that have apostrophes, Latin
# to Hebrew; in Chinese, quotes touch letters.
LETTER = r"[0-9A-Za-z\u00c0-\u05ff]"
SINGLE = rf"(?<!{LETTER})'((?:[^']|(?<={LETTER})'(?={LETTER}))*)'(?!{LETTER})"
QUOTES = (SINGLE, "“([^“”]*)”", '"([^"]*)"', "「([^「」]*)」")


def quoted(prompt):
    """The strings that a prompt puts in quotes: 'a', “a”, "a" and 「a」."""
    return [text for pattern in QUOTES for text in re.findall(pattern, prompt)]


def letters_and_digits(text):
    """What is left of a text when width, case, spaces and punctuation do not count."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def infix_distance(pattern, text):
    """Fewest letters to insert, delete, replace until `text` contains `pattern` (Sellers 1980)."""
    row = [0] * (len(text) + 1)  # it may start anywhere ...
    for i, letter in enumerate(pattern):
        above, row = row, [i + 1]
        for j, other in enumerate(text):
            row.append(min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1))
    return min(row)  # ... and end anywhere


class Text:
    """Share of the quoted letters and digits that an OCR reads, 0..1; NaN where none are quoted.

    Each string counts 1 - distance / length, weighted by its length. Text that nobody asked for
    costs nothing. The OCR runs on the CPU.
    """

    def __init__(self):
        from rapidocr import RapidOCR  # pip install rapidocr onnxruntime

        # Three times faster.
        fast = {"Global.use_cls": False, "Det.limit_type": "max", "Det.limit_side_len": 736}
        for kind in ("intra", "inter"):
            fast[f"EngineConfig.onnxruntime.{kind}_op_num_threads"] = 1
        self.ocr = RapidOCR(params={"Global.log_level": "error", **fast})
        self.ocr(Image.new("RGB", (64, 64)))  # it loads its models with the first picture

    def __call__(self, images, prompts):
        return torch.tensor([self.accuracy(image, quoted(p)) for image, p in zip(images, prompts)])

    def accuracy(self, image, strings):
        wanted = [letters_and_digits(string) for string in strings]
        if not any(wanted):
            return math.nan
        lines = self.ocr(image.convert("RGB")).txts or ()
        read = letters_and_digits("".join(lines))  # a string may run over lines
        return 1 - sum(infix_distance(string, read) for string in wanted) / sum(map(len, wanted))
