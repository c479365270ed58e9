"""What breaks a run off: the last whole step is saved, and the user reads how to continue."""

import os
import signal
from contextlib import contextmanager, suppress

from runtime import UserError, checkpoints, ranks


@contextmanager
def rescued(record):
    """Whatever breaks a run off, its last whole step is saved."""
    try:
        yield
        record.finish()
    except Exception:
        with suppress(UserError):  # a full disk: the checkpoint before stays
            record.save_whole_step()
        if checkpoints.find(record.out):
            hint = checkpoints.how_to_continue(record.out)
            record.write(f"stopped in the phase '{record.clock.name}'; {hint}")
        raise


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
