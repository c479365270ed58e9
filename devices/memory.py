"""A GPU that models share: what fits, how they take turns on it, and where memory runs out."""

import gc
import os
import re
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

import psutil
import torch
from packaging.version import Version
from transformers import set_seed

from devices.cpu import Plan
from glm_image.weights import sizes
from grpo import Offload
from inputs import UserError
from runtime import ranks
from runtime.terminal import out_of_memory, say

# By default torch rounds page-locked blocks up to powers of two so that it can reuse them: 37.9 GB
# for 32.9 GB of weights. Nothing is reused here. torch reads the setting at its first allocation,
# under the older name first; before 2.13 it does not know the setting, and would raise an error.
OLDER_NAME = "PYTORCH_CUDA_ALLOC_CONF"
ALLOC_CONF = OLDER_NAME if OLDER_NAME in os.environ else "PYTORCH_ALLOC_CONF"
if Version(torch.__version__) >= Version("2.13"):
    user_conf = os.environ.get(ALLOC_CONF, "")
    os.environ[ALLOC_CONF] = f"pinned_max_round_threshold_mb:1,{user_conf}".rstrip(",")

# Bytes that the work of most steps takes beside the largest model, and beside all of them.
ALONE, TOGETHER = 4e9, 8e9
PROCESS = 4e9  # bytes of host memory beside weights: CUDA's libraries, the compiler, pictures


class Memory:
    """Where the weights of a run are: all models stay on the GPU, or they take turns.

    plan: see plan(). clock: measures what moves, too.
    """

    def __init__(self, plan, clock):
        self.device = plan.device
        self.waiting = plan.waiting
        self.clock = clock
        self.offload = None  # an Offload where models take turns

    def place(self, models, release):
        """To the GPU, or to where they wait for their turn.

        models: all of the run, as they were loaded. release: called when weights leave the GPU, or
        memory runs out: see CapturedForward.
        """
        self.models = models
        self.release = release
        tensors = [x for model in models for x in (*model.parameters(), *model.buffers())]
        # Where the weights were loaded: mapped from files, they take no host memory there.
        self.homes = [(tensor, tensor.data) for tensor in tensors]
        if self.waiting:
            self.take_turns(pin=self.waiting == "pinned")
        else:
            for tensor, home in self.homes:
                tensor.data = home.to(self.device)  # Module.to() would replace the buffers

    def begin(self, phase, *models):
        """Before a phase that runs these models they come to the GPU, where they take turns."""
        if self.offload is not None and phase != self.clock.phase:
            self.clock.begin("move")
            self.offload.all_but(*models)
        self.clock.begin(phase)

    def take_turns(self, pin=None):
        """pin: whether frozen weights wait in page-locked host memory; None: if it has the room."""
        if pin is None:
            pin = sum(home.nbytes for _, home in self.homes) <= room_of_host()
        for tensor, home in self.homes:
            if not tensor.requires_grad:
                tensor.data = home.cpu()  # weights in int8 have gone straight to the GPU
        self.homes = []
        try:
            self.offload = Offload(self.models, self.device, self.release, pin)
        except RuntimeError as error:  # from cudaHostAlloc: WSL2 locks 1 to 4 GB
            reason = shorten(str(error), 200)
            say(f"memory: page-locking stopped ({reason}): the rest moves more slowly")
            self.offload = Offload(self.models, self.device, self.release, pin=False)

    def can_take_turns(self):
        """Whether they do not yet, and the host has room for the weights that are in no file."""
        unfiled = sum(home.nbytes for _, home in self.homes if home.device == self.device)
        return self.offload is None and unfiled <= room_of_host()

    def attempt(self, work, run, settings, rewards, prompts, seed):
        """Returns work(run, settings, rewards, prompts, seed); its draws start from the seed.

        If GPU memory runs out, this makes room and calls `work` again, which computes the same, but
        for rounding. The error ends the run if no more room can be made, if an optimizer has moved
        weights already, or with several ranks: a rank alone cannot repeat a collective.
        """
        count_steps = lambda: sum(trainer.steps for trainer in run.trainers.values())
        before = count_steps()
        while True:
            set_seed(seed % 2**32)
            try:
                return work(run, settings, rewards, prompts, seed)
            except RuntimeError as error:
                if not out_of_memory(error) or ranks.count() > 1 or count_steps() > before:
                    raise
                turns = settings.offload != "no" and self.can_take_turns()
                if not turns and settings.micro_batch_size == 1:
                    raise
            # Only here, after the handler: until its end the error holds the tensors of its frames.
            self.release()
            gc.collect()
            torch.cuda.empty_cache()
            if turns:
                self.take_turns()
                change = "the models take turns"
            else:
                settings.micro_batch_size //= 2
                change = f"--micro-batch-size is {settings.micro_batch_size}"
            full = f"memory: the GPU is full in the phase '{self.clock.phase}'"
            say(f"{full}: from here on {change}")
            self.clock.read()  # a try that failed is no part of a step


# ---- what fits -----------------------------------------------------------------------------------


def plan(settings, device):
    """The base of a run, and how its models share the GPU.

    `waiting` is None if all models fit together. Otherwise they take turns, and it says where
    frozen weights wait: "pinned" (page-locked host memory) or "mapped" (the files they were loaded
    from, if the host cannot lock that much). All ranks plan the same.

    This runs before anything is downloaded, so it knows the sizes of the weights alone. If a step
    needs more memory beside them, Memory.attempt makes room.
    """
    connect(device)
    free, host = free_memory(device)
    for base in ["bfloat16", "int8"] if settings.base == "auto" else [settings.base]:
        weights = [frozen_bytes(model) for model in sizes(settings, base, device)]
        together, largest = sum(weights), max(weights)
        if with_work(largest, ALONE) <= free:
            break
    fits = with_work(together, TOGETHER) <= free
    turns = {"auto": not fits, "yes": True, "no": False}[settings.offload]
    pinned = together <= host
    reason = (
        f"{together / 1e9:.1f} GB of weights (--base {base}), the largest model "
        f"{largest / 1e9:.1f}; {free / 1e9:.1f} GB of GPU memory and {host / 1e9:.1f} GB of host "
        "memory are free"
    )
    # Weights in int8 are in no file: in turns the host has to hold them.
    unheld = turns and base == "int8" and not pinned
    if with_work(largest if turns else together, ALONE) > free or unheld:
        hints = "docs/memory.md says what each card can hold; --model tiny-glm-image fits any"
        raise UserError(f"too little memory: {reason}; {hints}")
    words = "take turns on the GPU" if turns else "all stay on the GPU"
    slower = ", more slowly: the host cannot page-lock that much" if turns and not pinned else ""
    say(f"memory: {reason}: the models {words}{slower} (--offload {settings.offload})")
    # So that torch raises an error. Windows and WSL2 would lend host memory, and slow down.
    torch.cuda.set_per_process_memory_fraction(free / torch.cuda.mem_get_info(device)[1], device)
    waiting = "pinned" if pinned else "mapped"
    return Plan(device, base, waiting if turns else None)


def connect(device):
    """NCCL connects now, not after the first evaluation."""
    if ranks.count() > 1:
        ranks.average([torch.zeros(1, device=device)])


def frozen_bytes(model):
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in tensors if not tensor.requires_grad)


def with_work(weights, work):
    """Bytes, with what work takes beside the weights; it is less for a small model."""
    return weights + min(weights, work)


def free_memory(device):
    """Bytes free on the GPU, and on the host for one process' weights; the least of all ranks."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free = min(free, torch.cuda.get_per_process_memory_fraction(device) * total)
    # All ranks have asked before the first takes any.
    return tuple(map(min, zip(*ranks.gather((free, room_of_host())))))


def room_of_host():
    """Bytes of host memory for the weights of one process."""
    return max(0, host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - PROCESS)


def host_memory(group=Path("/sys/fs/cgroup")):
    """Bytes of host memory that are free, at most what the limit of a container leaves."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # not there, or no limit: "max"
        read = lambda name: (group / f"memory.{name}").read_text("utf-8")
        limit, used = int(read("max")), int(read("current"))
        # Files that were read count as used, but give way.
        cached = re.search(r"(?m)^inactive_file (\d+)", read("stat"))
        free = min(free, limit - used + int(cached[1]))
    return free
