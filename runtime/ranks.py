"""Several GPUs: a launcher starts one process (a rank) for each, with prompts of its own."""

import math
import os
import sys
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from rewards import UserError

FAILED = "this rank has failed"  # what it gathers in place of a value


class OtherFailed(UserError):
    """Another rank has failed, or has gone."""


@contextmanager
def joined():
    """Within it the processes of a launcher work together, if there are any: the first prints.

    When a process fails, the others fail at their next gather.
    """
    if dist.is_torchelastic_launched() or launched_otherwise():
        # A rank may wait for another's whole update, or for its download.
        timeout = timedelta(hours=3)
        # NCCL connects when it is first used: where the models are on the CPU it never is.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timeout)
        if rank() > 0:
            sys.stdout = open(os.devnull, "w", errors="replace")  # noqa: SIM115
    try:
        yield
    except OtherFailed:
        raise
    except Exception:
        with suppress(OtherFailed):
            gather(FAILED)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


# What launchers call the number of their processes.
SIZES = "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"


def launched_otherwise():
    """Whether several processes were started, but not by torchrun: by Kubernetes, srun, mpirun.

    UserError where they do not know one another. Each would train alone, on the same GPU.
    """
    given = os.environ
    sizes = {name: given[name] for name in SIZES if name in given}
    if "SLURM_PROCID" not in given:  # a shell of salloc, in which no srun runs
        sizes.pop("SLURM_NTASKS", None)
    name, size = next(iter(sizes.items()), (None, "1"))
    if size == "1":
        return False
    needed = "RANK", "WORLD_SIZE", "MASTER_ADDR"
    if missing := [each for each in needed if each not in given]:
        raise UserError(
            f"{name} is {size}, but {missing[0]} is not set: start the processes by torchrun, or "
            f"give each {', '.join(needed)} and LOCAL_RANK; for a single process unset {name}"
        )
    gpus = max(1, torch.cuda.device_count())
    given.setdefault("MASTER_PORT", "29500")
    given.setdefault("LOCAL_RANK", str(int(given["RANK"]) % gpus))
    given.setdefault("LOCAL_WORLD_SIZE", str(min(int(given["WORLD_SIZE"]), gpus)))
    place = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    print(
        f"rank {given['RANK']} of {given['WORLD_SIZE']} waits for the others at {place}", flush=True
    )
    return True


def device(wanted):
    """This rank's GPU; or the CPU, with a single thread unless OMP_NUM_THREADS says otherwise.

    For matrices as small as the tiny model's a second thread gains nothing, and beside a busy
    program it costs a lot. wanted: "auto", "cpu" or "cuda". UserError for a GPU that will not do.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not has_gpu):
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        return torch.device("cpu")
    if not has_gpu:
        raise UserError("--device cuda: torch finds no GPU that it can use")
    if dist.is_initialized():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if too_old := gpu_without_bfloat16():
        instead = "use an Ampere GPU or newer, or --model tiny-glm-image --device cpu"
        raise UserError(f"{too_old} has no bfloat16: {instead}")
    return torch.device("cuda", torch.cuda.current_device())


def gpu_without_bfloat16():
    """The name of this rank's GPU if it is older than Ampere, else None."""
    return torch.cuda.get_device_name() if torch.cuda.get_device_capability() < (8, 0) else None


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def count():
    return dist.get_world_size() if dist.is_initialized() else 1


def shard(number):
    """The range of indices, out of `number`, that this rank takes; together they take all once."""
    return range(rank() * number // count(), (rank() + 1) * number // count())


def batches(number, size):
    """This rank's share of `number` rows as lists of at most `size`.

    Rows from `number` on are padding, so that every rank makes the same number of calls.
    """
    rows = shard(-(-number // count()) * count())
    return [list(rows[i : i + size]) for i in range(0, len(rows), size)]


def gather(value):
    """The values of all ranks, in order. OtherFailed if one of them has failed, or has gone."""
    if count() == 1:
        return [value]
    answers = [None] * count()
    try:
        dist.all_gather_object(answers, value)
    except RuntimeError:  # from gloo: another process has ended
        answers = [FAILED]
    if FAILED in answers:
        raise OtherFailed("another rank has failed, was killed, or its machine ran out of memory")
    return answers


def average(tensors):
    """In place, over all ranks. OtherFailed if one of them has failed.

    Gradients go by NCCL, where a rank that has failed keeps the others waiting for ever; so they
    gather first, by gloo. The policy has not moved yet: all ranks stop at the same step.
    """
    if count() > 1:
        gather(None)
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
