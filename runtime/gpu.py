"""What a GPU needs: whether policy and decoder have to take turns on it, and the step of one token as a CUDA graph."""

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from torch.nn.functional import pad
from transformers import StaticCache

from grpo import Offload
from runtime import UserError, ranks
from runtime.settings import changed

LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}  # files of a control group
PROCESS = 4e9  # bytes of host memory for all but the weights: CUDA's libraries, pictures


# ---- what fits ------------------------------------------------------------------------------------------------------


def plan(needed, meta_models, settings, device):
    """How the models take turns on the device; also decides settings.micro_batch_size where that is "auto".

    None: they all stay. Otherwise the frozen weights wait on the host: "pinned", in page-locked memory; "mapped", where
    so much cannot be locked: as they were loaded, those in bfloat16 mapped from their files. All ranks decide alike.

    This comes before anything is downloaded, so it works by sizes: meta_models: (settings, device) -> the policy and the
    models that paint, without data. needed: (models, settings) -> bytes, see glm_image/memory.py.
    """
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{name} has no bfloat16: take a GPU of the Ampere series or newer")
    free, host = free_memory(device)
    models = meta_models(settings, device)
    bytes_for = lambda size: needed(models, changed(settings, micro_batch_size=size))
    # With both flags given, GPU memory is not checked.
    limit = math.inf if "auto" not in (settings.micro_batch_size, settings.offload) else free
    sizes = [settings.micro_batch_size]
    if sizes == ["auto"]:
        sizes = sorted({min(size, largest_micro_batch(settings)) for size in (1, 2, 4, 8)}, reverse=True)

    def fits(turns, size):
        together, turn, weights, paths = bytes_for(size)
        held = paths + (weights if turns and settings.base == "int8" else 0)  # these weights are in no file
        return (turn if turns else together) <= limit and held <= host

    may_turn = {"auto": (False, True), "no": (False,), "yes": (True,)}[settings.offload]
    options = [(turns, size) for turns in may_turn for size in sizes]  # staying comes first, then large micro-batches
    chosen = next((option for option in options if fits(*option)), None)
    turns, size = chosen or (True, sizes[-1])
    together, turn, weights, paths = bytes_for(size)
    more = f", and {paths / 1e9:.1f} of the host for the decoder's paths" if paths else ""
    reason = (
        f"with micro-batches of {size} (--micro-batch-size {settings.micro_batch_size}) policy, decoder and rewards need "
        f"{together / 1e9:.1f} GB of the GPU, or {turn / 1e9:.1f} in turns and {weights / 1e9:.1f} of page-locked host "
        f"memory{more}; free are {free / 1e9:.1f} GB of the GPU and {host / 1e9:.1f} of the host"
    )
    if chosen is None:
        raise UserError(f"too little memory: {reason}; docs/memory.md has the flags for each card")
    settings.micro_batch_size = size
    pinned = weights + paths <= host
    words = "take turns" + ("" if pinned else ", more slowly: so much cannot be page-locked") if turns else "both stay"
    print(f"memory: {reason}: they {words} (--offload {settings.offload})")
    return ("pinned" if pinned else "mapped") if turns else None


def largest_micro_batch(settings):
    return max(settings.group_size, settings.paintings)  # micro-batches are cut from one group


def free_memory(device):
    """Bytes that are free on the GPU, and on the host for the weights of one process; the least of all ranks."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free = min(free, torch.cuda.get_per_process_memory_fraction(device) * total)
    host = max(0, host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - PROCESS)
    # All ranks have asked before the first takes any.
    return tuple(map(min, zip(*ranks.gather((free, host)), strict=True)))


def host_memory(groups="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """Bytes of host memory that are free, at most what the control groups of this process (a container's) leave."""
    there = [psutil.virtual_memory().available]
    with suppress(OSError):  # not on Linux
        for line in Path(own).read_text().splitlines():  # 0::/PATH or, of version 1, NUMBER:memory:/PATH
            _, kind, path = line.split(":", 2)
            folder = Path(groups, kind, path.lstrip("/"))
            for each in (folder, *folder.parents):
                for limit, used in LIMITS.items():
                    with suppress(OSError, ValueError):  # not there, or no limit: "max"
                        left = int((each / limit).read_text()) - int((each / used).read_text())
                        # Files that were read count as used, but give way; the last line counts subgroups too.
                        files = re.findall(r"(?m)^(?:total_)?inactive_file (\d+)", (each / "memory.stat").read_text())
                        there.append(left + int(files[-1]))
    return min(there)


def place(models, device, forward, turns):
    """All models to the device for good, or an Offload if they take turns. forward: the captured step, or None."""
    if turns is None:
        for model in models:
            model.to(device)
        return None
    # Else each tensor is rounded up to a power of two, 37.9 GB in place of 32.9, to be used again, which none is.
    allocator = torch._C._accelerator_getAllocatorSettings(), "pinned_max_round_threshold_mb:1"
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, allocator)))
    release = forward.release if forward else lambda: None
    try:
        return Offload(models, device, release, pin=turns == "pinned")
    except torch.AcceleratorError as error:  # from cudaHostAlloc: systems such as WSL2 lock 1 to 4 GB
        reason = str(error).strip().split("\n")[0]
        print(f"memory: no more can be page-locked ({reason}): the other weights are copied up more slowly")
        return Offload(models, device, release, pin=False)


# ---- the step of one token ------------------------------------------------------------------------------------------------


class CapturedForward:
    """The model's forward for one new token as a CUDA graph, to hand to generate_with_logprobs as `forward`.

    Python launches some thousand small kernels per token; a graph is a single launch. It repeats the same kernels on
    the same addresses, so all that a step reads or writes stays in place: ids, positions, mask, and a cache of fixed
    size whose unused end is masked. The adapter stays attached: bfloat16 weights would lose most of a small one.

    Captured by hand: torch.compile(mode="reduce-overhead") records anew whenever offloading has moved the weights, and
    cannot give its memory back; transformers' static generate() breaks off in GLM-Image's positions, once per token.
    """

    ROOM = 256  # tokens: a cache is made for a multiple of this, so that it also serves prompts a little longer

    def __init__(self, model, num_new_tokens):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # the adapter lives in its layers
        self.forward = base.forward
        self.config = base.config
        self.num_new_tokens = num_new_tokens
        self.size = 0
        self.stream = None
        self.cache = None
        self.release()

    def release(self):
        """Forget the graph, for the weights that it reads have left the GPU, and free the cache."""
        self.graph = self.logits = self.cache = self.ids = None

    def __call__(self, input_ids, attention_mask, position_ids, past_key_values, **options):
        if past_key_values is not self.cache:  # that of the prompts, which the model has just read
            self._start(input_ids, attention_mask, position_ids, past_key_values)
        self.ids[: len(input_ids)].copy_(input_ids)
        self.positions[..., : len(input_ids), :].copy_(position_ids)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        return SimpleNamespace(logits=self.logits[: len(input_ids)], past_key_values=self.cache)

    def _start(self, input_ids, attention_mask, position_ids, prompts):
        """Copy the prompts' cache into the fixed one, which is made anew if it is too small, and capture the step."""
        rows = len(input_ids)
        length = prompts.get_seq_length()
        device = input_ids.device
        if self.cache is None or rows > len(self.ids) or length + self.num_new_tokens > self.size:
            self.release()
            self.size = max(self.size, -(-(length + self.num_new_tokens) // self.ROOM) * self.ROOM)
            self.cache = StaticCache(self.config, max_cache_len=self.size)
            self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.positions = torch.zeros(*position_ids.shape[:-2], rows, 1, dtype=torch.long, device=device)
            self.mask = torch.ones(rows, self.size, dtype=torch.bool, device=device)
        self.cache.reset()
        for i, layer in enumerate(prompts.layers):  # missing rows are padded: a new shape is captured anew
            fill = (0, 0, 0, 0, 0, 0, 0, len(self.ids) - rows)
            self.cache.update(pad(layer.keys, fill), pad(layer.values, fill), i)
        self.mask.fill_(True)
        if attention_mask is not None:
            self.mask[:rows, : length + 1].copy_(attention_mask[:, 0, 0])
        if self.graph is None and device.type == "cuda":
            self._capture(length)

    def _step(self):
        self.logits = self.forward(
            input_ids=self.ids, attention_mask=self.mask, position_ids=self.positions, past_key_values=self.cache,
            use_cache=True, logits_to_keep=1,
        ).logits  # fmt: skip

    def _capture(self, length):
        """First the step runs three times uncaptured on a side stream, so that workspaces are not captured.

        Never two live graphs on one side stream: destroying one would free the other's workspace.
        """
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
                self._rewind(length)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):  # NCCL has own threads
                self._step()
        except RuntimeError as error:  # the end of a capture that has failed hides why
            for cause in map(str, (error, error.__context__)):
                if "out of memory" in cause:
                    raise torch.OutOfMemoryError(cause) from None
            raise
        self.graph = graph
        self._rewind(length)

    def _rewind(self, length):
        """Back to the end of the prompts: what the trial steps wrote beyond it will be written over."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
