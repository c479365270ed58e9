"""What a GPU needs: whether policy and decoder have to take turns on it, and the step of one token as a CUDA graph."""

from types import SimpleNamespace

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from runtime import ranks


def working_memory(settings):
    """Bytes to leave beside GLM-Image's weights, from what benchmarks/memory.py computes."""
    tokens = 320 + settings.height * settings.width // 32**2  # prompt, preview and picture
    cache = 41e3 * settings.prompts_per_step * settings.group_size * tokens  # of all sequences sampled side by side
    activations = 0.8e6 * tokens  # of a sequence in a training pass
    if settings.train != "codes":  # of a picture in the decoder's, a token for 16x16 pixels, with guidance twice
        painting = 0.37e6 * settings.height * settings.width // 16**2 * (2 if settings.guidance_scale > 1 else 1)
        activations = max(activations, painting)
    return cache + activations * settings.micro_batch_size + 3e9  # the VAE's or, at other times, gaps between tensors


def needs_offload(settings, device, modules):
    """Whether policy and decoder have to take turns on the GPU; printed, with the reason. All ranks decide alike."""
    if device.type == "cpu":
        return False
    torch.cuda.empty_cache()  # reward models have been there and back
    weights = sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))
    free, total = torch.cuda.mem_get_info(device)
    free = min(ranks.gather(min(free, torch.cuda.get_per_process_memory_fraction(device) * total)))
    work = working_memory(settings)
    offload = {"yes": True, "no": False, "auto": weights + work > free}[settings.offload]
    print(
        f"memory: {weights / 1e9:.1f} GB of weights, {work / 1e9:.1f} GB to work in, {free / 1e9:.1f} GB free on the "
        f"GPU: policy and decoder {'take turns on it' if offload else 'both stay on it'} (--offload {settings.offload})"
    )
    return offload


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
    cannot give its memory back; transformers' static generate() breaks off in GLM-Image's positions, once a token.

    num_new_tokens: of every sequence. compile: let torch.compile fuse the small kernels first, which takes a C compiler
    and, once, a minute or more.
    """

    ROOM = 256  # the cache's size is a multiple of this, so that few sizes are too small for the next prompts

    def __init__(self, model, num_new_tokens, compile=True):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # the adapter lives in its layers
        if compile:
            base.config.get_text_config()._attn_implementation = "grouped"
        self.forward = torch.compile(base.forward, dynamic=False) if compile else base.forward
        self.config, self.num_new_tokens, self.size, self.stream = base.config, num_new_tokens, 0, None
        self.release()

    def release(self):
        """Forget the graph, because the weights it reads are about to leave the GPU, and free the cache."""
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
        rows, length, device = len(input_ids), prompts.get_seq_length(), input_ids.device
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
            self.mask[:rows, : length + 1].copy_(attention_mask)
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
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):  # NCCL has its own threads
            self._step()
        self.graph = graph
        self._rewind(length)

    def _rewind(self, length):
        """Back to the end of the prompts: what the trial steps wrote beyond it will be written over."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
