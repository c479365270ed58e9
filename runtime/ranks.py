"""Several GPUs: torchrun starts one process (a rank) for each, with prompts of its own."""

import math
import os
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from inputs import UserError

# What other launchers say of their processes. Each would train alone, all on one GPU.
LAUNCHERS = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"


@contextmanager
def joined():
    """Within it the processes that torchrun started work together; the first prints.

    When one of them fails, torchrun ends the others: with a checkpoint of every step nothing is
    lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # NCCL connects when it is first used: where the models are on the CPU it never is.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        # A rank may wait for another's whole update, or for its download.
        dist.init_process_group(backend, timeout=timedelta(hours=3))
        if rank() > 0:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif any(int(os.environ.get(name, "1")) > 1 for name in LAUNCHERS):
        raise UserError(f"{' or '.join(LAUNCHERS)} is above 1: start processes by torchrun")
    yield
    if count() > 1:
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def count():
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(number):
    """The range of indices, out of `number`, that this rank takes; together they take all once."""
    return range(rank() * number // count(), (rank() + 1) * number // count())


def gather(value):
    """The values of all ranks, in order."""
    values = [value] * count()
    if count() > 1:
        dist.all_gather_object(values, value)
    return values


def average(tensors):
    """In place, over all ranks."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)


def mean(metrics):
    """{name: number or NaN} -> its mean over the ranks that have it.

    For peaks of memory and max_ gaps it is the largest.
    """
    merged = {}
    per_rank = gather(metrics)
    for name in metrics:
        values = [each[name] for each in per_rank if not math.isnan(each[name])] or [math.nan]
        largest = name.endswith("max_logprob_gap") or name.startswith("gpu_gb")
        merged[name] = max(values) if largest else sum(values) / len(values)
    return merged
