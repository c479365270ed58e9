"""What a long run needs beside the algorithm: settings, prompts, ranks, files, a GPU's memory."""

import math
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import diffusers
import torch
import transformers

from rewards import UserError

# PEFT's about transformers: nothing a user can act on.
warnings.filterwarnings("ignore", category=FutureWarning)
# The adapter's products stay float32 on purpose.
warnings.filterwarnings("ignore", message="TensorFloat32")
# It warns of modules to keep in float32 where there are none.
diffusers.utils.logging.set_verbosity_error()


def disable_progress_bars():
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


if not sys.stderr.isatty():  # in a file or a notebook each redrawing of a bar would be a line
    disable_progress_bars()

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def readable(what, hint=""):
    """What is wrong with a file becomes one line: "cannot WHAT (REASON)HINT"."""
    try:
        yield
    except Exception as error:  # each library that reads files has its own
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"cannot {what} ({reason}){hint}") from error


def out_of_memory(error):
    """Whether the GPU's memory has run out. CUDA, cuBLAS and Triton have their own words for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = "out of memory", "STATUS_ALLOC_FAILED"
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def format_number(value):
    if value is None or math.isnan(value):  # no image had this reward
        return "none"
    return f"{value:.0e}" if 0 < abs(value) < 5e-4 else f"{value:.3f}"


def counted(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short_name(name):
    """As people read it: 'reward/clip=a/folder' -> 'clip', 'reward/a/my.py:f' -> 'my.py:f'."""
    return name.removeprefix("reward/").partition("=")[0].split("/")[-1]
