"""The forward pass for one new token as a CUDA graph, and the attention that it compiles."""

import gc
from types import SimpleNamespace

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of a token: heads (B, H, 1, D) that share one of K keys become rows of one query.

    transformers does the same, but not while compiling: there it copies the cache H / K times, 16
    for GLM-Image.
    """
    if query.shape[2] > 1:
        inputs = module, query, key, value, attention_mask
        return sdpa_attention_forward(*inputs, scaling=scaling, **options)
    rows = query.view(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, K, H / K, D)
    output = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(query.shape).transpose(1, 2), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class CapturedForward:
    """A model's forward for one new token, to hand to generate_with_logprobs as `forward`.

    Python launches some thousand small kernels per token; a graph is a single launch. It repeats
    the same kernels on the same addresses, so all that a step reads or writes stays in place: ids,
    positions, mask, and a cache of fixed size whose unused end is masked. The adapter stays
    attached: bfloat16 weights would lose most of a small one.

    Captured by hand: torch.compile(mode="reduce-overhead") records anew whenever offloading has
    moved the weights, and cannot give its memory back; transformers' static generate() breaks off
    in GLM-Image's positions, once per token.

    rows: sequences side by side; for more the step is captured anew. compile: let torch.compile
    fuse the small kernels first, which takes a C compiler and, once, a minute or more.
    """

    ROOM = 256  # tokens: a cache has a multiple of this, to serve prompts a little longer as well

    def __init__(self, model, num_new_tokens, rows=1, compile=True):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if compile:
            base.config.get_text_config()._attn_implementation = "grouped"
        self.forward = torch.compile(base.forward, dynamic=False) if compile else base.forward
        self.config = base.config
        self.num_new_tokens = num_new_tokens
        self.rows = rows
        self.size = 0
        self.stream = None
        self.cache = None
        self.release()

    def release(self):
        """Forget the graph, for the weights that it reads have left the GPU, and free the cache."""
        traced = self.cache is not None
        self.graph = self.logits = self.cache = self.ids = None
        if traced:  # torch.compile keeps the cache with which it traced in a reference cycle: 1 GB
            gc.collect()

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
        """Copy the prompts' cache into the fixed one, and capture the step.

        The fixed one is made anew if it is too small. Rows that are missing are filled up, for a
        new shape would be captured anew.
        """
        rows = len(input_ids)
        length = prompts.get_seq_length()
        device = input_ids.device
        size = length + self.num_new_tokens
        if self.cache is None or rows > self.rows or size > self.size:
            self.release()
            self.rows = max(self.rows, rows)
            self.size = max(self.size, -(-size // self.ROOM) * self.ROOM)
            self.cache = StaticCache(self.config, max_cache_len=self.size)
            self.ids = torch.zeros(self.rows, 1, dtype=torch.long, device=device)
            axes = *position_ids.shape[:-2], self.rows, 1
            self.positions = torch.zeros(axes, dtype=torch.long, device=device)
            self.mask = torch.ones(self.rows, self.size, dtype=torch.bool, device=device)
        self.cache.reset()
        fill = (0, 0, 0, 0, 0, 0, 0, self.rows - rows)
        for i, layer in enumerate(prompts.layers):
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
        """Record a step, after trials on a side stream: for compilation, and for workspaces.

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
        mode = "thread_local"  # NCCL has threads of its own
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
                self._step()
        except RuntimeError as error:  # the end of a capture that has failed hides why
            for cause in map(str, (error, error.__context__)):
                if "out of memory" in cause:
                    raise torch.OutOfMemoryError(cause) from None
            raise
        self.graph = graph
        self._rewind(length)

    def _rewind(self, length):
        """Back to the end of the prompts: what the trials wrote beyond it will be written over."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
