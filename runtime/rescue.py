"""What breaks a run off: the last whole step is saved, and the user reads how to continue."""

import os
import signal
from contextlib import contextmanager

from grpo import NotFinite
from runtime import StepFailed, UserError, checkpoints, out_of_memory, ranks


@contextmanager
def rescued(record):
    """Whatever breaks a run off, its last whole step is saved; what a user can fix is one line."""
    hint = checkpoints.how_to_continue(record.out) if record.settings.steps else "start it again"
    try:
        yield
        record.finish()
    except StepFailed as error:
        record.save_whole_step()
        raise type(error)(f"{error}; once that is fixed, {hint}") from None
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
    """A GPU too small for the weights, or for the weights of a reward, becomes one line."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the weights do not fit into GPU memory ({reason}); try --offload yes"
        ) from None


@contextmanager
def naming(prompts):
    """NotFinite, which has a prompt's number, becomes a line with its text."""
    try:
        yield
    except NotFinite as error:
        names = ", ".join(repr(prompts[i].text) for i in error.args[0])
        raise StepFailed(
            f"the log-probs sampled for {names} are not finite: damaged weights, a GPU kernel that "
            "fails, or too high a learning rate: then start again with a lower --lr"
        ) from None


class StopRequest:
    """Ctrl-C or SIGTERM: finish the step, save and evaluate; in the first evaluation, only save.

    A second signal quits.
    """

    def __init__(self):
        self.received = False
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.receive) for number in numbers}

    def end(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, *_):
        # By os.write: print may have been interrupted by this very signal.
        os.write(2, b"\nstopping: what has begun will be finished and saved\n")
        self.received = True
        if ranks.count() == 1:  # torchrun passes on what the terminal has sent already
            self.end()
