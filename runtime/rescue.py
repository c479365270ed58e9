"""What breaks a run off: the last whole step is saved, and the user reads one line."""

import os
import shlex
import signal
from contextlib import contextmanager, suppress

from grpo import NotFinite
from runtime import UserError, checkpoints, out_of_memory, ranks


def exit_code(run):
    """What run() returns; 2 after an error that the user can fix, on whichever rank."""
    try:
        with ranks.joined():
            return run()
    except KeyboardInterrupt:  # before the first step: there is nothing to save yet
        return 130
    except (UserError, NotFinite) as error:
        ranks.print_error(error)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        ranks.print_error(
            f"out of GPU memory ({reason}): try --offload yes and a lower --micro-batch-size; or "
            "start again with --base int8, or a lower --prompts-per-step or --group-size"
        )
    return 2


@contextmanager
def rescued(record):
    """Whatever breaks a run off, a second signal too, its last whole step is saved.

    But not where the policy has diverged: with the same settings it would diverge again.
    """
    try:
        yield
        record.finish()
    except BaseException as error:
        if isinstance(error, NotFinite):
            # The policy as it was after this step.
            before = [each for each in checkpoints.find(record.out) if int(each.name) < record.done]
            start = before and f"--adapter {shlex.quote(str(before[-1]))}"
            hint = start and f"start a new run from an earlier step with a lower --lr: {start}"
        else:
            with suppress(UserError):  # a full disk: the checkpoint before stays
                record.save()
            hint = checkpoints.find(record.out) and checkpoints.how_to_continue(record.out)
        if hint:
            record.write(f"stopped in the phase '{record.phase.name}'; {hint}")
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
