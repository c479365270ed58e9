"""What breaks a run off: the last whole step is saved, and the user reads how to go on."""

import os
import shlex
import signal
import sys
from contextlib import contextmanager

import torch

from grpo import NotFinite
from rewards import RewardError
from runtime import StepFailed, UserError, out_of_memory, ranks


def how_to_go_on(out):
    again = f"python {shlex.quote(sys.argv[0])}"
    if ranks.count() > 1:
        again = "the same torchrun command and"
    return f"go on with: {again} --resume {shlex.quote(str(out))}"


@contextmanager
def rescued(record):
    """An error that the user can fix becomes one line; all ranks save the last whole step."""
    hint = how_to_go_on(record.out) if record.settings.steps else "start it again"
    try:
        with ranks.together():
            yield
            record.finish()
    except (StepFailed, RewardError) as error:
        record.save_whole_step()
        raise UserError(f"{error}; once that is fixed, {hint}" if record.done else error) from None
    except UserError:
        raise
    except Exception as error:
        record.save_whole_step()
        if out_of_memory(error):
            raise UserError(
                f"out of GPU memory in the phase '{record.clock.name}'; {hint}, with --offload yes "
                "and a lower --micro-batch-size; or start again with --base int8, or a lower "
                "--prompts-per-step or --group-size"
            ) from None
        # Not an error that the user can fix: the traceback is shown.
        record.write(f"stopped by an error; {hint}")
        raise


@contextmanager
def loading():
    """A GPU or a host too small for the weights becomes one line."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"no memory for the weights ({reason}); try --offload yes") from None


@contextmanager
def naming(prompts):
    """NotFinite, which has a prompt's number, becomes a line with its text."""
    try:
        yield
    except NotFinite as error:
        names = ", ".join(repr(prompts[i].text) for i in error.args[0])
        raise StepFailed(
            f"the log-probs sampled for {names} are not finite: damaged weights, a GPU kernel that "
            "fails, or too high a learning rate: then start anew with a lower one"
        ) from None


class StopRequest:
    """Ctrl-C or SIGTERM: finish the step, save, evaluate; before the first step, only leave.

    A second signal quits.
    """

    def __init__(self):
        self.received = False
        self.follows = b"the first evaluation is aborted"
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.receive) for number in numbers}

    def end(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, *_):
        if not self.received:  # by os.write: print may have been interrupted by this very signal
            again = b"; press again to quit now" if ranks.count() == 1 else b""
            os.write(2, b"\nasked to stop: " + self.follows + again + b"\n")
        self.received = True
        if ranks.count() == 1:  # torchrun passes on what the terminal has sent already
            self.end()
