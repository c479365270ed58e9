"""What a GPU needs: whether policy and decoder have to take turns on it, and the step of one token as a CUDA graph."""

import functools
import math
import os
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo import Offload
from runtime import UserError, ranks

LIMITS = "memory.max", "memory.limit_in_bytes"  # files of a control group
GAPS = 2.5e9  # bytes: the card's context and its kernels, Adam's moments, what lies unused between tensors
CAST = 0.5e9  # of an int8 base: a layer's weights as the 16 bits in which they are multiplied
SMALLER = [  # what to try where a run does not fit
    {"micro_batch_size": "auto"}, {"base": "int8"}, {"train": "codes"}, {"base": "int8", "train": "codes"},
    {"height": 512, "width": 512}, {"base": "int8", "height": 512, "width": 512},
]  # fmt: skip


# ---- what fits ------------------------------------------------------------------------------------------------------


def working_memory(settings):
    """Bytes to leave beside GLM-Image's weights, from what benchmarks/memory.py computes.

    Three numbers: where both models stay on the GPU, in the policy's turn on it, in the painters' turn.
    """
    pixels = settings.height * settings.width
    rows = (settings.sample_batch or settings.prompts_per_step) * settings.group_size  # sampled side by side
    size = min(settings.micro_batch_size, largest_micro_batch(settings))
    tokens = 320 + pixels // 32**2  # prompt, preview and picture
    if settings.sources:
        tokens += pixels // 32**2 - 256  # their codes, and no preview
    room = (tokens // CapturedForward.ROOM + 1) * CapturedForward.ROOM
    cache = 41e3 * room * rows
    nucleus = 17e3 * tokens * rows  # of all tokens drawn
    reading = 0.37e6 * (64 + pixels // 32**2) * rows if settings.sources else 0  # prompts with their sources' codes
    cast = CAST if settings.base == "int8" else 0
    update = 0.8e6 * tokens * size + cast
    painting = 3.1e3 * pixels  # by the VAE, one picture at a time
    if settings.train in ("decoder", "both"):  # its training pass, one token per 16x16 pixels, with guidance twice
        passes = 2 if settings.guidance_scale > 1 else 1
        painting = max(painting, 0.37e6 * pixels // 16**2 * size * passes + cast)
    sampling = cache + max(nucleus, reading)
    return max(sampling, cache + max(update, painting)) + GAPS, max(sampling, update) + GAPS, painting + GAPS


def largest_micro_batch(settings):
    return max(settings.group_size, settings.paintings)  # micro-batches are cut from one group


def memory_needed(models, settings):
    """Bytes of the GPU where all models stay on it, of the GPU where they take turns, and then of the host.

    models: the policy, then those that paint; with or without content.
    """
    trained = 0
    frozen = []
    for model in models:
        tensors = [*model.parameters(), *model.buffers()]
        trained += sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        frozen.append([tensor.nbytes for tensor in tensors if not tensor.requires_grad])
    policy = sum(frozen[0])
    painters = sum(map(sum, frozen[1:]))
    together, sampling, painting = working_memory(settings)
    locked = sum(1 << (size - 1).bit_length() for sizes in frozen for size in sizes)  # it comes in powers of two
    locked *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return policy + painters + trained + together, max(policy + sampling, painters + painting) + trained, locked


def choose(needed, settings, free, host):
    """What fits: (whether to take turns, size of micro-batches), or None. Staying is best, then large micro-batches.

    needed: settings -> as memory_needed. Who gives both --offload and --micro-batch-size decides about the GPU alone.
    """
    sizes = [settings.micro_batch_size]
    if sizes == ["auto"]:
        sizes = sorted({min(size, largest_micro_batch(settings)) for size in (1, 2, 4, 8)}, reverse=True)
    elif settings.offload != "auto":
        free = math.inf
    for turns in {"auto": (False, True), "no": (False,), "yes": (True,)}[settings.offload]:
        for size in sizes:
            together, turn, locked = needed(changed(settings, micro_batch_size=size))
            if (turn <= free and locked <= host) if turns else together <= free:
                return turns, size
    return None


def changed(settings, **values):
    return Namespace(**{**vars(settings), **values})


def plan(outline, settings, device):
    """Whether policy and painters take turns on the device; decides settings.micro_batch_size where that is "auto".

    Prints both, with the reason; all ranks decide alike. outline: settings -> the policy and those that paint, without
    content, for this comes before anything is loaded. Raises UserError if nothing fits, which names what would.
    """
    if device.type != "cuda":
        return False
    torch.cuda.empty_cache()
    free, size = torch.cuda.mem_get_info(device)
    free = min(ranks.gather(min(free, torch.cuda.get_per_process_memory_fraction(device) * size)))
    host = min(ranks.gather(host_memory()))  # all have asked before the first takes any
    of_base = functools.cache(lambda base: outline(changed(settings, base=base)))
    needed = lambda settings: memory_needed(of_base(settings.base), settings)
    chosen = choose(needed, settings, free, host)
    turns, size = chosen or (True, 1 if settings.micro_batch_size == "auto" else settings.micro_batch_size)
    together, turn, locked = needed(changed(settings, micro_batch_size=size))
    reason = (
        f"with micro-batches of {size} (--micro-batch-size {settings.micro_batch_size}) policy and decoder need "
        f"{together / 1e9:.1f} GB of the GPU, or {turn / 1e9:.1f} in turns and {locked / 1e9:.1f} of page-locked host "
        f"memory; free are {free / 1e9:.1f} GB of the GPU and {host / 1e9:.1f} of the host"
    )
    if chosen is None:
        free_choice = changed(settings, micro_batch_size="auto", offload="auto")
        fitting = (flags for flags in SMALLER if choose(needed, changed(free_choice, **flags), free, host))
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in next(fitting, {}).items())
        raise UserError(f"too little memory: {reason}; {f'{flags} would fit' if flags else 'nothing smaller fits'}")
    settings.micro_batch_size = size
    print(f"memory: {reason}: they {'take turns' if turns else 'both stay'} (--offload {settings.offload})")
    return turns


def host_memory(groups="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """Bytes of host memory that are free, at most what the control groups of this process (a container's) allow."""
    there = [psutil.virtual_memory().available]
    with suppress(OSError):  # not on Linux
        for line in Path(own).read_text().splitlines():  # 0::/PATH or, of version 1, NUMBER:memory:/PATH
            _, kind, path = line.split(":", 2)
            folder = Path(groups, kind, path.lstrip("/"))
            for file in [each / name for each in (folder, *folder.parents) for name in LIMITS]:
                with suppress(OSError, ValueError):  # not there, or no limit: "max"
                    there.append(int(file.read_text()))
    return min(there)


def place(models, device, forward, turns):
    """All models to the device for good, or an Offload if they take turns on it, which is returned.

    forward: the captured step, or None.
    """
    if turns:
        return Offload(models, device, forward.release if forward else lambda: None)
    for model in models:
        model.to(device)
    return None


# ---- what costs time ------------------------------------------------------------------------------------------------


def keep_rope_tables(transformer):
    """The decoder makes the tables of its positions on the CPU, in every pass, and would copy them in every block."""
    tables = {}

    def hook(rope, inputs, made):
        key = inputs[0].shape[2:], inputs[0].device
        if key not in tables:
            tables[key] = [table.to(inputs[0].device) for table in made]
        return tables[key]

    transformer.rope.register_forward_hook(hook)


def keep_one_source(transformer):
    """The pipeline keeps a source's keys and values for every picture of a batch, 2.0 GB each at 1024x1024.

    Here all of a batch edit one source: before it is written anew, the copy before is dropped. The cache spreads one
    over the batch.
    """

    def hook(module, inputs, options):
        cache = options.get("kv_caches")
        if cache is not None and cache[0].mode == "write":
            cache.clear()
            cache.set_mode("write")

    transformer.register_forward_pre_hook(hook, with_kwargs=True)


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of one new token: query heads that share a key-value head become the rows of one query.

    query (B, H, 1, D), key and value (B, K, S, D), mask (B, 1, 1, S) -> (B, 1, H, D). transformers does the same, but
    not while compiling: there it copies the cache H / K times (16, for GLM-Image) for every token.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows = query.view(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, K, H / K, D)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(query.shape).transpose(1, 2), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class CapturedForward:
    """The model's forward for one new token as a CUDA graph, to hand to generate_with_logprobs as `forward`.

    Python launches some thousand small kernels a token, one by one; a graph is a single launch. It repeats the same
    kernels on the same addresses, so all that a step reads or writes stays in place: ids, positions, mask, and a cache
    of fixed size whose unused end is masked. The adapter stays attached: merged into bfloat16 weights most of its
    update would be rounded away. On a CPU there is no graph, only the fixed cache.

    Captured by hand: torch.compile(mode="reduce-overhead") records anew whenever offloading has moved the weights, and
    cannot give its memory back; transformers' static generate() breaks off in GLM-Image's positions, once per token.

    num_new_tokens: of every sequence. compile: let torch.compile fuse the small kernels first, which takes a C compiler
    and, once, a minute or more.
    """

    ROOM = 256  # tokens: a cache is made for a multiple of this, so that it also serves prompts a little longer

    def __init__(self, model, num_new_tokens, compile=True):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # the adapter lives in its layers
        if compile:
            base.config.get_text_config()._attn_implementation = "grouped"
        self.forward = torch.compile(base.forward, dynamic=False) if compile else base.forward
        self.config = base.config
        self.num_new_tokens = num_new_tokens
        self.size = 0
        self.stream = None
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
        for i, layer in enumerate(prompts.layers):  # rows that are missing are filled up: a new shape is captured anew
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
        """Record a step. It is first run in earnest, on a side stream, for what happens once: compilation, workspaces.

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
