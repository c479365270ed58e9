"""What a GPU needs: whether policy and decoder have to take turns on it, and the step of one token
as a CUDA graph."""

import gc
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo import Offload
from rewards import AT_ONCE, split_spec
from runtime import UserError, ranks
from runtime.settings import changed

LIMITS = {
    "memory.max": "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}  # files of a control group
PROCESS = (
    4e9  # bytes of host memory for all but the weights: CUDA's libraries, the compiler, pictures
)


# ---- what fits -----------------------------------------------------------------------------------


def plan(needed, meta_models, settings, device):
    """How the models take turns on the device; also decides settings.micro_batch_size where that is
    "auto".

    None: they all stay. Otherwise the frozen weights wait on the host: "pinned", in page-locked
    memory; "mapped", where so much cannot be locked: as they were loaded, those in bfloat16 mapped
    from their files. All ranks decide alike.

    This comes before anything is downloaded, so it works by sizes. meta_models: (settings, device)
    -> the policy and the models that paint, without data. needed: (models, settings) -> bytes, see
    glm_image/memory.py.
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
        largest = max(
            settings.group_size, settings.paintings
        )  # micro-batches are cut from one group
        sizes = sorted({min(size, largest) for size in (1, 2, 4, 8)}, reverse=True)

    def fits(turns, size):
        together, turn, weights, paths = bytes_for(size)
        held = paths + (
            weights if turns and settings.base == "int8" else 0
        )  # these weights are in no file
        return (turn if turns else together) <= limit and held <= host

    may_turn = {"auto": (False, True), "no": (False,), "yes": (True,)}[settings.offload]
    options = [
        (turns, size) for turns in may_turn for size in sizes
    ]  # staying comes first, then large micro-batches
    chosen = next((option for option in options if fits(*option)), None)
    turns, size = chosen or (True, sizes[-1])
    together, turn, weights, paths = bytes_for(size)
    more = f", and {paths / 1e9:.1f} of the host for the decoder's paths" if paths else ""
    reason = (
        f"with micro-batches of {size} (--micro-batch-size {settings.micro_batch_size}) policy, decoder and rewards "
        f"need {together / 1e9:.1f} GB of the GPU, or {turn / 1e9:.1f} in turns and {weights / 1e9:.1f} of page-locked host "
        f"memory{more}; free are {free / 1e9:.1f} GB of the GPU and {host / 1e9:.1f} of the host"
    )
    if chosen is None:
        raise UserError(f"too little memory: {reason}; docs/memory.md has the flags for each card")
    settings.micro_batch_size = size
    pinned = weights + paths <= host
    words = (
        "take turns" + ("" if pinned else ", more slowly: so much cannot be page-locked")
        if turns
        else "both stay"
    )
    print(f"memory: {reason}: they {words} (--offload {settings.offload})")
    return ("pinned" if pinned else "mapped") if turns else None


def free_memory(device):
    """Bytes that are free on the GPU, and on the host for the weights of one process; the least of
    all ranks."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    free = min(free, torch.cuda.get_per_process_memory_fraction(device) * total)
    host = max(0, host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - PROCESS)
    # All ranks have asked before the first takes any.
    return tuple(map(min, zip(*ranks.gather((free, host)), strict=True)))


def host_memory(groups="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """Bytes of host memory that are free, at most what the control groups of this process (a
    container's) leave."""
    there = [psutil.virtual_memory().available]
    with suppress(OSError):  # not on Linux
        for line in (
            Path(own).read_text().splitlines()
        ):  # 0::/PATH or, of version 1, NUMBER:memory:/PATH
            _, kind, path = line.split(":", 2)
            folder = Path(groups, kind, path.lstrip("/"))
            for each in (folder, *folder.parents):
                for limit, used in LIMITS.items():
                    with suppress(OSError, ValueError):  # not there, or no limit: "max"
                        left = int((each / limit).read_text()) - int((each / used).read_text())
                        # Files that were read count as used, but give way; the last line counts
                        # subgroups too.
                        files = re.findall(
                            r"(?m)^(?:total_)?inactive_file (\d+)",
                            (each / "memory.stat").read_text(),
                        )
                        there.append(left + int(files[-1]))
    return min(there)


def place(models, device, forward, turns):
    """All models to the device for good, or an Offload if they take turns. forward: the captured
    step, or None."""
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
    except (
        torch.AcceleratorError
    ) as error:  # from cudaHostAlloc: systems such as WSL2 lock 1 to 4 GB
        reason = str(error).strip().split("\n")[0]
        print(
            f"memory: no more can be page-locked ({reason}): the other weights are copied up more slowly"
        )
        return Offload(models, device, release, pin=False)


CLIP_L = 1.71e9, 18e6, math.inf
CLIP_H = 3.95e9, 22e6, math.inf
SMOLVLM = (
    4.5e9,
    0.35e9,
    AT_ONCE,
)  # a picture of 17 tiles; a language model without a cache is below its vision tower
NEEDED = {  # bytes: weights, work on each picture that is seen at once; and how many those are at most
    "lpips": (0.01e9, 0.13e9, 1),
    "clip": CLIP_L,
    "aesthetic": CLIP_L,
    "pickscore": CLIP_H,
    "hps": CLIP_H,
    "vqa": SMOLVLM,
    "edit": SMOLVLM,
}


def scoring_memory(spec, pictures):
    """Bytes of the GPU that the rewards of a spec need while they score so many pictures, one after
    another.

    Weights in a folder of the user's count as large as its files; a reward in a file of the user's
    counts 0.
    """
    needed = [0]
    for source, _ in split_spec(spec):
        name, _, folder = source.partition("=")
        weights, work, most = NEEDED.get(name, (0, 0, 0))
        files = (
            sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) if folder else 0
        )
        needed.append((files or weights) + work * min(pictures, most))
    return max(needed)


# ---- frozen weights as 8-bit integers, half the memory of bfloat16: --base int8 ------------------


class Int8Linear(torch.nn.Linear):
    """A linear layer whose weights (out, in) are int8 times a scale for each row: off by half a
    scale at most."""

    def forward(self, x):
        # The scale comes before the product. If it came after, torch.compile would replace both by
        # a kernel for int8, _weight_int8pack_mm, which on CUDA has one thread per output and reads
        # weights very slowly (pytorch 190529).
        return linear(x, self.weight * self.scale[:, None], self.bias)


@torch.no_grad()
def round_linears(module, device=None):
    """Makes an Int8Linear of every linear layer in `module`, one by one: weights mapped from a file
    are read only here.

    device: where the rounded weights go; None: they stay where they are.
    """
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            weight = layer.weight.to(device or layer.weight.device)  # (out, in)
            scale = (
                (weight.float().abs().amax(dim=1) / 127).clamp(min=1e-12).to(weight.dtype)
            )  # (out,)
            rounded = (weight.float() / scale.float()[:, None]).round().to(torch.int8)
            layer.weight = torch.nn.Parameter(rounded, requires_grad=False)
            layer.scale = torch.nn.Buffer(scale)
            layer.__class__ = Int8Linear


# ---- the step of one token -----------------------------------------------------------------------


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of one new token: query heads (B, H, 1, D) sharing one of K key-value heads become
    rows of one query.

    transformers does the same, but not while compiling: there it copies the cache H / K times, 16
    for GLM-Image.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    rows = query.view(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, K, H / K, D)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(query.shape).transpose(1, 2), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class CapturedForward:
    """The model's forward for one new token as a CUDA graph, to hand to generate_with_logprobs as
    `forward`.

    Python launches some thousand small kernels per token; a graph is a single launch. It repeats
    the same kernels on the same addresses, so all that a step reads or writes stays in place: ids,
    positions, mask, and a cache of fixed size whose unused end is masked. The adapter stays
    attached: bfloat16 weights would lose most of a small one.

    Captured by hand: torch.compile(mode="reduce-overhead") records anew whenever offloading has
    moved the weights, and cannot give its memory back; transformers' static generate() breaks off
    in GLM-Image's positions, once per token.

    compile: let torch.compile fuse the small kernels first, which takes a C compiler and, once, a
    minute or more.
    """

    ROOM = 256  # tokens: a cache is made for a multiple of this, so that it also serves prompts a little longer

    def __init__(self, model, num_new_tokens, compile=True):
        base = (
            model.get_base_model() if hasattr(model, "get_base_model") else model
        )  # the adapter lives in its layers
        if compile:
            base.config.get_text_config()._attn_implementation = "grouped"
        self.forward = torch.compile(base.forward, dynamic=False) if compile else base.forward
        self.config = base.config
        self.num_new_tokens = num_new_tokens
        self.size = 0
        self.stream = None
        self.cache = None
        self.release()

    def release(self):
        """Forget the graph, for the weights that it reads have left the GPU, and free the cache."""
        held = self.cache is not None
        self.graph = self.logits = self.cache = self.ids = None
        if held:
            gc.collect()  # torch.compile keeps the cache with which it traced in a reference cycle: 1 GB

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
        """Copy the prompts' cache into the fixed one, which is made anew if it is too small, and
        capture the step."""
        rows = len(input_ids)
        length = prompts.get_seq_length()
        device = input_ids.device
        if self.cache is None or rows > len(self.ids) or length + self.num_new_tokens > self.size:
            self.release()
            self.size = max(self.size, -(-(length + self.num_new_tokens) // self.ROOM) * self.ROOM)
            self.cache = StaticCache(self.config, max_cache_len=self.size)
            self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.positions = torch.zeros(
                *position_ids.shape[:-2], rows, 1, dtype=torch.long, device=device
            )
            self.mask = torch.ones(rows, self.size, dtype=torch.bool, device=device)
        self.cache.reset()
        for i, layer in enumerate(
            prompts.layers
        ):  # rows that are missing are filled up: a new shape is captured anew
            fill = (0, 0, 0, 0, 0, 0, 0, len(self.ids) - rows)
            self.cache.update(pad(layer.keys, fill), pad(layer.values, fill), i)
        self.mask.fill_(True)
        if attention_mask is not None:
            self.mask[:rows, : length + 1].copy_(attention_mask[:, 0, 0])
        if self.graph is None and device.type == "cuda":
            self._capture(length)

    def _step(self):
        self.logits = self.forward(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits

    def _capture(self, length):
        """Record a step. It is first run in earnest, on a side stream, for what happens once:
        compilation, workspaces.

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
            with torch.cuda.graph(
                graph, stream=self.stream, capture_error_mode="thread_local"
            ):  # NCCL has own threads
                self._step()
        except RuntimeError as error:  # the end of a capture that has failed hides why
            for cause in map(str, (error, error.__context__)):
                if "out of memory" in cause:
                    raise torch.OutOfMemoryError(cause) from None
            raise
        self.graph = graph
        self._rewind(length)

    def _rewind(self, length):
        """Back to the end of the prompts: what the trial steps wrote beyond it will be written
        over."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
