"""Several GPUs: torchrun starts one process (a rank) for each, with prompts of its own, and ends
all if one fails."""

import math
import os
import sys
from contextlib import contextmanager
from datetime import timedelta

import diffusers
import torch
import torch.distributed as dist
import transformers

from runtime import StepFailed, UserError


def join():
    """Meet the other processes that torchrun has started, if it has. Only the first rank prints and
    writes."""
    if not dist.is_torchelastic_launched():
        return
    local = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    if 0 < gpus <= local:
        raise UserError(f"this machine has {gpus} GPUs, so --nproc-per-node can be {gpus} at most")
    if gpus:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if gpus else None
    # A rank whose groups have no spread waits for another's whole update, and one may download
    # slower than another. A rank that died keeps nobody waiting: torchrun ends the others at once.
    timeout = timedelta(hours=3)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo", device_id=device, timeout=timeout
    )
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        transformers.utils.logging.disable_progress_bar()
        diffusers.utils.logging.disable_progress_bar()


def device():
    """This rank's GPU; or the CPU, with a single thread unless OMP_NUM_THREADS says otherwise.

    For matrices as small as the tiny model's a second thread gains nothing, and beside a busy
    program it costs a lot.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()


def print_error(message):
    """The line that a user reads. With several ranks it starts a line: another's progress bar may
    stand on this one."""
    print("error:" if count() == 1 else f"\nerror: rank {rank()}:", message, file=sys.stderr)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def count():
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(number):
    """The range of indices, out of `number`, that this rank takes; all ranks together take each of
    them once."""
    return range(rank() * number // count(), (rank() + 1) * number // count())


def batches(number, size):
    """This rank's share of `number` rows as lists of at most `size`. Rows from `number` on are
    padding, so that every rank makes the same number of calls."""
    rows = shard(-(-number // count()) * count())
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


@contextmanager
def readable_collectives():
    """The error of a collective that another rank does not join becomes one line."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(
            error
        ):  # gloo's errors have no class of their own
            gone = "another rank has gone: it failed, was killed, or its machine ran out of memory; see above"
            raise StepFailed(gone) from None
        raise


def gather(value):
    """The values of all ranks, in order."""
    values = [value] * count()
    if dist.is_initialized():
        with readable_collectives():
            dist.all_gather_object(values, value)
    return values


def mean(metrics):
    """{name: number or NaN} -> its mean over the ranks that have it; for peaks of memory and max_
    gaps, the largest."""
    merged = {}
    per_rank = gather(metrics)
    for name in metrics:
        values = [metrics[name] for metrics in per_rank if not math.isnan(metrics[name])]
        largest = name.removeprefix("decoder/") == "max_logprob_gap" or name.startswith("gpu_gb/")
        merged[name] = (
            (max(values) if largest else sum(values) / len(values)) if values else math.nan
        )
    return merged
