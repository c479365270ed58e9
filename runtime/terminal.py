"""The user at the terminal: lines of a run, and its errors as one line each."""

import atexit
import os
import signal
import sys
from contextlib import contextmanager, suppress
from functools import wraps

import torch
from tqdm import tqdm

from grpo import NotFinite
from inputs import UserError
from runtime import ranks


def option(name):
    """A setting as its flag."""
    return f"--{name.replace('_', '-')}"


def say(line):
    """Prints a line at once, above the bars. Nothing of a run depends on the screen."""
    try:
        tqdm.write(line)
        print(end="", flush=True)  # a program may have set sys.stdout to None
    except OSError:  # Ctrl-C ends the tee of `| tee log`, too
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


@contextmanager
def optional(what):
    """A page, a picture or a tracker that fails is a warning."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        say(f"warning: cannot {what} ({error})")


def print_start(settings, device, data):
    """What runs where, and how much there is to do."""
    name = f"CPU in float32, threads: {torch.get_num_threads()} (OMP_NUM_THREADS)"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    say(f"device: {name}\nmodel: {settings.model}; --model FOLDER_OR_ID chooses another")
    groups = settings.prompts_per_step * ranks.count()
    prompts = f"prompts: {len(data.prompts)}, held out: {len(data.held_out)}"
    say(f"a step: {groups} x {settings.group_size} pictures; {prompts}")


def out_of_memory(error):
    """Whether the GPU's memory has run out. CUDA, cuBLAS and Triton have their own words for it."""
    words = "out of memory", "STATUS_ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def exit_code(main):
    """Wraps a program: 2 after an error that the user can fix, 130 after Ctrl-C, else its own."""

    @wraps(main)
    def program(*arguments):
        with suppress(AttributeError):  # a notebook's has no code page
            # A type of prompts may be in Chinese where the code page has no such letters.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            with ranks.joined():
                return main(*arguments)
        except KeyboardInterrupt:
            return 130
        except (UserError, NotFinite) as error:
            message = error
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            message = (
                f"out of GPU memory ({str(error).splitlines()[0]}): try --offload yes and a lower "
                "--micro-batch-size; or start again with --base int8, or a lower "
                "--prompts-per-step or --group-size"
            )
        print(f"error: {message}", file=sys.stderr)
        return 2

    return program


def leave(code):
    """Ends the program with the exit code of its main(), after Ctrl-C by the signal.

    A shell ends its loop over runs only if the program died of the signal. Python's own way, an
    uncaught KeyboardInterrupt, ends with 1 where a handler of atexit executes a string.
    """
    if code == 130 and os.name == "posix":
        atexit.register(die)
    sys.exit(code)


def die():
    """Of Ctrl-C, once all other handlers of atexit have run."""
    atexit.unregister(die)
    try:
        atexit._run_exitfuncs()
        print(end="", flush=True)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
