"""The forward pass for one new token as a CUDA graph of a compiled step."""

import gc
from contextlib import suppress
from functools import wraps
from types import SimpleNamespace

import torch
from peft.tuners.lora import LoraLayer
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo import GRPO, NotFinite
from runtime.terminal import out_of_memory, say


def or_plain(function):
    """Wraps a compiled function. If compiling fails, it runs uncompiled from then on.

    A line says so, and nothing in this process is compiled after it.
    """

    @wraps(function)
    def call(*arguments, **options):
        try:
            return function(*arguments, **options)
        except Exception as error:  # no C compiler, no Triton: each has a class of its own
            if out_of_memory(error):
                raise
            torch.compiler.set_stance("force_eager")
            slower("torch.compile fails here", error, "the run continues without it")
        return function(*arguments, **options)

    return call


def slower(what, error, instead):
    reason = " ".join(str(error).split())[:150]
    say(f"{what} ({reason}): {instead}, more slowly")


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of a token: heads (B, H, 1, D) that share one of K keys become rows of one query.

    transformers does the same, but not while compiling: there it copies the cache H / K times, 16
    for GLM-Image. Two products and a softmax take 19 us per layer on an H100, the kernel of
    scaled_dot_product_attention 68: it has B*K queries to share out among 132 multiprocessors.
    """
    if query.shape[2] > 1 or attention_mask is None:
        inputs = module, query, key, value, attention_mask
        return sdpa_attention_forward(*inputs, scaling=scaling, **options)
    rows = query.view(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, K, H / K, D)
    scores = (rows @ key.transpose(-1, -2)).float() * scaling  # (B, K, H / K, size of the cache)
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
    return (weights.to(value.dtype) @ value).reshape(query.shape).transpose(1, 2), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class SummedLinear(torch.nn.Linear):
    """A linear layer of a LoRA adapter, whose product for one token is compiled as a sum.

    torch.compile fuses a sum with the operations around it. On an H100 a product of an adapter's A
    takes two kernels of 5 us each, and the sum one kernel of 2 us. A step of a token has 240.
    """

    def forward(self, x):
        if x.shape[1] > 1 or not torch.compiler.is_compiling():
            return super().forward(x)
        return (x.unsqueeze(-2) * self.weight).sum(-1)  # (B, 1, in) -> (B, 1, out)


def sum_products(model):
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for layer in (*module.lora_A.values(), *module.lora_B.values()):
                layer.__class__ = SummedLinear


class CapturedForward:
    """A model's forward for one new token, to hand to generate_with_logprobs as `token_forward`.

    Python launches some thousand small kernels per token; a graph is a single launch. It repeats
    the same kernels on the same addresses, so all that a step reads or writes stays in place: ids,
    positions, mask, and a cache of fixed size whose unused end is masked. The adapter stays
    attached: bfloat16 weights would lose most of a small one.

    Captured by hand: torch.compile(mode="reduce-overhead") records again whenever offloading has
    moved the weights, and cannot give its memory back; transformers' static generate() breaks off
    in GLM-Image's positions, once per token.

    rows: sequences side by side; for more the step is captured again. compile: let torch.compile
    fuse the small kernels first, which takes a minute or two, once. Where the step cannot be
    compiled or captured, it runs without, and a line says so.
    """

    ROOM = 256  # tokens: a cache has a multiple of this, to serve prompts a little longer as well

    def __init__(self, model, num_new_tokens, rows=1, compile=True):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.forward = base.forward
        if compile:
            base.config.get_text_config()._attn_implementation = "grouped"
            sum_products(base)
            self.forward = or_plain(torch.compile(base.forward, dynamic=False))
        self.config = base.config
        self.num_new_tokens = num_new_tokens
        self.rows = rows
        self.size = 0
        self.stream = None
        self.cache = None
        self.refused = False  # whether the step is not to be captured
        self.failed = []  # graphs whose capture failed
        self.release()

    def release(self):
        """Forget the graph, for the weights that it reads have left the GPU, and free the cache."""
        traced = self.cache is not None
        self.graph = self.logits = self.cache = self.ids = None
        if traced:  # torch.compile keeps the cache with which it traced in a reference cycle: 1 GB
            gc.collect()

    def simplify(self, reason):
        """From here on neither captured nor compiled."""
        self.release()
        self.refused = True
        torch.compiler.set_stance("force_eager")
        slower("the captured step is wrong here", reason, "it is neither captured nor compiled")

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

        The fixed one is replaced if it is too small. Rows that are missing are filled up, for a new
        shape would be captured again.
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
            self.ids = input_ids.new_zeros(self.rows, 1)
            self.positions = position_ids.new_zeros(*position_ids.shape[:-2], self.rows, 1)
            self.mask = torch.ones(self.rows, self.size, dtype=torch.bool, device=device)
        self.cache.reset()
        fill = [0] * 7 + [self.rows - rows]  # at the end of the first dimension
        for i, layer in enumerate(prompts.layers):
            self.cache.update(pad(layer.keys, fill), pad(layer.values, fill), i)
        self.mask.fill_(True)
        if attention_mask is not None:
            self.mask[:rows, : length + 1].copy_(attention_mask)
        if self.graph is None and not self.refused and device.type == "cuda":
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
        before = torch.cuda.current_stream()
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
                self._rewind(length)
        before.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # NCCL has threads of its own
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=mode):
                self._step()
            self.graph = graph
        except RuntimeError as error:  # whatever forbids it
            # The end of a failed capture leaves its own stream, and hides why the capture failed.
            torch.cuda.set_stream(before)
            cause = error.__context__ or error
            # Kept alive: torch's allocator may still refer to this graph.
            self.failed.append(graph)
            if out_of_memory(cause):
                raise cause  # to capture again with more room: Memory.attempt
            self.refused = True
            slower("a token's step cannot be a CUDA graph", cause, "its kernels start one by one")
        self._rewind(length)

    def _rewind(self, length):
        """Back to the end of the prompts: what the trials wrote beyond it will be written over."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)


class CheckedGRPO(GRPO):
    """GRPO that checks the captured step by its first samples.

    Their log-probs are recomputed in one pass. Where the two disagree, or the sampled ones are not
    finite, the step is neither captured nor compiled from then on, and the samples are drawn again.
    """

    checked = False

    def sample(self, *given, **named):
        if self.checked:
            return super().sample(*given, **named)
        gap = torch.inf
        with suppress(NotFinite), torch.no_grad():
            groups = super().sample(*given, **named)
            rows = self.micro_batches(groups[0])[0]  # one micro-batch
            gaps = self.logprobs(groups[0], rows) - groups[0].old_logprobs[rows]
            gap = gaps.abs().mean().item()
        self.checked = True  # not if memory has run out: the samples are then drawn again
        if gap <= 0.1:  # nats: bfloat16 rounds by less
            return groups
        self.token_forward.simplify(f"sampled and recomputed log-probs differ by {gap:.2f}")
        return super().sample(*given, **named)
