"""What breaks a run off: the last whole step is saved, on all ranks alike, and the user reads how
to go on."""

import shlex
import sys
from contextlib import contextmanager

import torch
from torch._dynamo.exc import TorchDynamoException

from grpo import NotFinite
from rewards import RewardError
from runtime import StepFailed, UserError, ranks


@contextmanager
def failing_together(prompts):
    """A failure on one rank is one on all, before the policy of any has moved: they save the same
    whole step."""
    failure = None
    try:
        yield
    except RewardError as error:
        failure = str(error)
    except NotFinite as error:
        names = ", ".join(repr(prompts[i]) for i in error.args[0])
        failure = (
            f"the log-probs sampled for {names} are not finite: damaged weights, a GPU kernel that fails, or "
            "too high a --lr or --decoder-lr, which has ruined the adapter: then start anew with a lower one"
        )
    for rank, message in enumerate(ranks.gather(failure)):
        if message is not None:
            raise StepFailed(
                message if rank == ranks.rank() else f"stopped because rank {rank} has failed"
            )


def how_to_go_on(out):
    again = (
        "the same torchrun command and"
        if ranks.count() > 1
        else f"python {shlex.quote(sys.argv[0])}"
    )
    return f"go on with: {again} --resume {shlex.quote(str(out))}"


@contextmanager
def rescued(record):
    """Whatever breaks a step off: the last whole step is saved, and an error that the user can fix
    is one line."""
    hint = how_to_go_on(record.out) if record.settings.steps else "start it again"
    try:
        with (
            ranks.readable_collectives()
        ):  # those of an update: its gradients are averaged over the ranks
            yield record
            record.finish()
    except StepFailed as error:
        record.save_whole_step()
        raise UserError(f"{error}; once that is fixed, {hint}" if record.done else error) from None
    except UserError:
        raise
    except TorchDynamoException as error:  # --resume alone would fail again
        record.save_whole_step()
        raise UserError(
            f"torch.compile failed ({' '.join(str(error).split())[:120]}); try --compile no"
        ) from None
    except torch.OutOfMemoryError:
        record.save_whole_step()
        raise UserError(
            f"out of GPU memory in the phase '{record.phase.name}'; {hint}, also with --offload yes or a lower "
            "--micro-batch-size; start anew with a lower --prompts-per-step or --group-size"
        ) from None
    except Exception:  # not an error that the user can fix: the traceback is shown
        record.save_whole_step()
        record.write(f"stopped by an error; {hint}")
        raise
