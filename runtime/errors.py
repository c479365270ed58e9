"""What breaks a run off, signals too: whole steps are saved, and the user reads one line."""

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from grpo import NotFinite
from rewards import UserError
from runtime import ranks


def option(name):
    """A setting as its flag."""
    return f"--{name.replace('_', '-')}"


def say(line):
    """Prints a line, above the bars; no run ends because its terminal, or a pipe, was closed."""
    try:
        tqdm.write(line)
        print(end="", flush=True)  # a program may have set sys.stdout to None
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def readable(what, hint=""):
    """What is wrong with a file becomes one line: "cannot WHAT (REASON)HINT"."""
    try:
        yield
    except Exception as error:  # each library that reads files has its own
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"cannot {what} ({reason}){hint}") from error


@contextmanager
def optional(what):
    """A page, a picture or a tracker that fails is a warning."""
    try:
        with readable(what):
            yield
    except UserError as error:
        say(f"warning: {error}")


@contextmanager
def writing(out):
    """A full disk, a deleted folder or missing rights become one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {out}: {error}") from None


def out_of_memory(error):
    """Whether the GPU's memory has run out. CUDA, cuBLAS and Triton have their own words for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = "out of memory", "STATUS_ALLOC_FAILED"
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def exit_code(run):
    """What run() returns; 2 after an error that the user can fix, on whichever rank."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # a notebook has other streams
            stream.reconfigure(errors="replace")  # a character that the console's code page lacks
    try:
        with ranks.joined():
            return run()
    except KeyboardInterrupt:  # before the first step: there is nothing to save yet
        return 130
    except (UserError, NotFinite) as error:
        message = error
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        message = (
            f"out of GPU memory ({str(error).splitlines()[0]}): try --offload yes and a lower "
            "--micro-batch-size; or start again with --base int8, or a lower --prompts-per-step or "
            "--group-size"
        )
    # With several ranks it starts a line: another's progress bar may stand on this one.
    start = "error:" if ranks.count() == 1 else f"\nerror: rank {ranks.rank()}:"
    print(f"{start} {message}", file=sys.stderr)
    with suppress(UserError):
        # When a rank ends, torchrun kills the others: first all save their step and print.
        ranks.gather(None)
    return 2


@contextmanager
def rescued(record, folder):
    """Whatever breaks a run off, a second signal too, its last whole step is saved.

    But not where the policy has diverged: with the same settings it would diverge again.
    """
    try:
        yield
    except BaseException as error:
        diverged = isinstance(error, NotFinite)
        if not diverged:
            with suppress(UserError):  # a full disk: the checkpoint before stays
                folder.save()
        if hint := folder.how_to_continue(record.done if diverged else None):
            record.write(f"stopped in the phase '{record.machine.name}'; {hint}")
        raise


class StopRequest:
    """Within it Ctrl-C, SIGTERM and SIGHUP (a terminal that closes) save the whole steps at once.

    The step at hand is then finished, saved and evaluated; in the first evaluation a signal only
    ends it. A second signal quits.
    """

    def __init__(self, save):
        """save: called when a signal comes; SIGKILL may follow seconds later."""
        self.save = save
        self.received = False
        self.before = {}  # {signal: handler}

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():  # Python hands it no signals
            return
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self.before[number] = signal.signal(number, self.receive)

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, *_):
        again = b" (again: stop now)" * (ranks.count() == 1)
        with suppress(OSError):  # the terminal may be closed
            # By os.write: print may have been interrupted by this very signal.
            os.write(2, b"\nstopping: the step at hand will be finished" + again + b"\n")
        self.received = True
        if ranks.count() == 1:  # torchrun passes on what the terminal has sent already
            self.__exit__()
        with suppress(UserError):  # a full disk: the checkpoint before stays
            self.save()
