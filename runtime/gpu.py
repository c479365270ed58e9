"""A GPU that models share: what fits on it, which of them are on it; and a clock."""

import math
import os
import re
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from grpo import Offload
from rewards import AT_ONCE, split_spec
from runtime import UserError, counted, ranks

# Files of a control group.
LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
FILES = re.compile(r"(?m)^(?:total_)?inactive_file (\d+)")  # in memory.stat
PROCESS = 4e9  # bytes of host memory beside weights: CUDA's libraries, the compiler, pictures


# ---- how long things take, and which models are on the GPU ---------------------------------------


class Clock:
    """with clock("paint"): the block is timed, and on a GPU the peak of its memory measured.

    The progress bar, in a terminal, shows what is at work; it counts steps, or prompts within
    evaluation().
    """

    def __init__(self, device):
        self.device = device
        self.name = ""
        self.timings = {}
        self.layout = {"dynamic_ncols": True}
        self.layout["disable"] = ranks.rank() > 0 or not sys.stderr.isatty()
        self.bar = self.steps = tqdm(disable=True)  # until there is something to count

    def begin(self, steps, done=0):
        """From here on the bar counts steps, `done` of which are already made."""
        if steps > 0:
            self.bar = self.steps = tqdm(total=steps, initial=done, unit="step", **self.layout)

    def close(self):
        self.steps.close()

    @contextmanager
    def __call__(self, name):
        self.name = name
        start = time.perf_counter()
        cuda = self.device.type == "cuda"
        self.bar.set_description_str(name)
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if cuda:
            torch.cuda.synchronize(self.device)  # or the clock would stop while it is at work
            peak = torch.cuda.max_memory_allocated(self.device) / 1e9
            self.timings[f"gpu_gb/{name}"] = max(peak, self.timings.get(f"gpu_gb/{name}", 0))
        seconds = time.perf_counter() - start
        self.timings[f"seconds/{name}"] = self.timings.get(f"seconds/{name}", 0) + seconds

    @contextmanager
    def evaluation(self, prompts):
        """The block is no part of a step, nor is its time. prompts: how many are evaluated here."""
        if not sys.stderr.isatty():
            self.bar.write(f"evaluating {counted(prompts, 'prompt')}")
        words = {"unit": "prompt", "postfix": "evaluation", "leave": False}
        with tqdm(total=prompts, **words, **self.layout) as self.bar:
            yield
        self.bar = self.steps
        self.bar.unpause()
        self.read()

    def painted(self):  # another prompt
        if self.bar is not self.steps:
            self.bar.update()

    def read(self):
        """Since the last call: seconds/PHASE and, on a GPU, gpu_gb/PHASE, its peak memory."""
        timings, self.timings = self.timings, {}
        return timings


def place(models, device, forward, turns):
    """All models to the device for good, or an Offload if they take turns.

    forward: the captured step, or None. turns: see plan.
    """
    if turns is None:
        for model in models:
            model.to(device)
        return None
    # Else each tensor is rounded up to a power of two, 37.9 GB in place of 32.9, to be used again,
    # which none is.
    allocator = torch._C._accelerator_getAllocatorSettings(), "pinned_max_round_threshold_mb:1"
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, allocator)))
    release = forward.release if forward else lambda: None
    try:
        return Offload(models, device, release, pin=turns == "pinned")
    except torch.AcceleratorError as error:  # from cudaHostAlloc: WSL2 locks 1 to 4 GB
        reason = str(error).strip().split("\n")[0]
        print(f"memory: no more can be page-locked ({reason}): the rest is copied up more slowly")
        return Offload(models, device, release, pin=False)


# ---- what fits -----------------------------------------------------------------------------------


def plan(needed, sizes_of, settings, prompt_bytes, device):
    """How the models take turns on the device; decides settings.micro_batch_size if that is "auto".

    None: they all stay. Otherwise the frozen weights wait on the host: "pinned", in page-locked
    memory; "mapped", where so much cannot be locked: as they were loaded, those in bfloat16 mapped
    from their files. All ranks decide alike.

    This comes before anything is downloaded, so it works by sizes. sizes_of: (settings, device) ->
    the policy and the models that paint, without data. needed: see glm_image/memory.py.
    prompt_bytes: of the longest prompt.
    """
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{name} has no bfloat16: take a GPU of the Ampere series or newer")
    free, host = free_memory(device)
    models = sizes_of(settings, device)
    # With both flags given, GPU memory is not checked.
    limit = math.inf if "auto" not in (settings.micro_batch_size, settings.offload) else free
    sizes = [settings.micro_batch_size]
    if sizes == ["auto"]:  # micro-batches are cut from one group
        sizes = sorted({min(size, settings.group_size) for size in (1, 2, 4, 8)})[::-1]
    may_turn = {"auto": (False, True), "no": (False,), "yes": (True,)}[settings.offload]
    # Staying comes first, then large micro-batches.
    for turns, size in [(turns, size) for turns in may_turn for size in sizes]:
        together, turn, weights, paths = needed(models, settings, size, prompt_bytes)
        unfiled = weights if turns and settings.base == "int8" else 0  # these are in no file
        fits = (turn if turns else together) <= limit and paths + unfiled <= host
        if fits:
            break
    more = f", and {paths / 1e9:.1f} of the host for the decoder's paths" if paths else ""
    reason = (
        f"with micro-batches of {size} (--micro-batch-size {settings.micro_batch_size}) policy, "
        f"decoder and rewards need {together / 1e9:.1f} GB of the GPU, or {turn / 1e9:.1f} in turns"
        f" and {weights / 1e9:.1f} of page-locked host memory{more}; free are {free / 1e9:.1f} GB "
        f"of the GPU and {host / 1e9:.1f} of the host"
    )
    if not fits:
        raise UserError(f"too little memory: {reason}; docs/memory.md has the flags for each card")
    settings.micro_batch_size = size
    if not turns:
        print(f"memory: {reason}: they both stay (--offload {settings.offload})")
        return None
    pinned = weights + paths <= host
    slower = "" if pinned else ", more slowly: so much cannot be page-locked"
    print(f"memory: {reason}: they take turns{slower} (--offload {settings.offload})")
    return "pinned" if pinned else "mapped"


def free_memory(device):
    """Bytes free on the GPU, and on the host for one process' weights; the least of all ranks."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free = min(free, torch.cuda.get_per_process_memory_fraction(device) * total)
    host = max(0, host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - PROCESS)
    # All ranks have asked before the first takes any.
    return tuple(map(min, zip(*ranks.gather((free, host)))))


def host_memory(groups="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """Bytes of host memory that are free, at most what this process' control groups leave."""
    there = [psutil.virtual_memory().available]
    with suppress(OSError):  # not on Linux
        lines = Path(own).read_text().splitlines()
        for line in lines:  # 0::/PATH or, of version 1, NUMBER:memory:/PATH
            _, kind, path = line.split(":", 2)
            folder = Path(groups, kind, path.lstrip("/"))
            for each in (folder, *folder.parents):
                for limit, used in LIMITS.items():
                    with suppress(OSError, ValueError):  # not there, or no limit: "max"
                        left = int((each / limit).read_text()) - int((each / used).read_text())
                        # Files that were read count as used, but give way; the last line counts
                        # subgroups too.
                        cached = FILES.findall((each / "memory.stat").read_text())
                        there.append(left + int(cached[-1]))
    return min(there)


CLIP_L = 1.71e9, 18e6, math.inf
CLIP_H = 3.95e9, 22e6, math.inf
SMOLVLM = 4.5e9, 0.35e9, AT_ONCE  # a picture of 17 tiles; its language model is below its tower
NEEDED = {  # bytes: weights, work on each picture seen at once; and how many those are at most
    "lpips": (0.01e9, 0.13e9, 1),
    "clip": CLIP_L,
    "aesthetic": CLIP_L,
    "pickscore": CLIP_H,
    "hps": CLIP_H,
    "vqa": SMOLVLM,
}


def scoring_memory(spec, pictures):
    """Bytes of the GPU that the rewards of a spec need, one after another, for so many pictures.

    Weights in a folder of the user's count as large as its files; a reward in a file of the user's
    counts 0.
    """
    needed = [0]
    for source, _ in split_spec(spec):
        name, _, folder = source.partition("=")
        weights, work, most = NEEDED.get(name, (0, 0, 0))
        files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors") if folder)
        needed.append((files or weights) + work * min(pictures, most))
    return max(needed)
