"""What a step of GLM-Image at full size needs of a GPU's memory, computed without one.

    python benchmarks/memory.py

Runs the trainer's own passes, on models of the released sizes, over tensors that have a shape but no content, and adds
up what is alive. Exact for the tensors, which is nearly all there is: a GPU adds its own context (about half a gigabyte)
and what its allocator leaves unused between them. benchmarks/glm_image.py measures the same on a GPU.
"""

import argparse
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from benchmarks.glm_image import pipeline
from grpo import FastSampler, _draw, get_per_token_logprobs

META = torch.device("meta")
PROMPT, GLYPHS = 60, 16  # tokens; both are small beside a picture's
PROMPTS_PER_STEP = 4  # train.py's default: that many groups are sampled side by side
CODES, BLOCK = 16_384, 512  # the allocator of CUDA rounds up to blocks of this many bytes


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is active, and remembers the most.

    Those of `modules` are there already and not counted.
    """

    def __init__(self, modules):
        super().__init__()
        self.now = self.peak = 0
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        self.known = {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device == META:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self.known.discard(key)
        self.now -= size


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A GPU's attention keeps no matrix of scores; the one of content-free tensors would, so it is told to use that."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


@contextmanager
def content_free():
    """The patches that operations without content need."""
    original = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = attention
    torch.set_default_dtype(torch.bfloat16)
    try:
        with META:
            yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
        torch.set_default_dtype(torch.float32)


def gigabytes(modules):
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers())) / 1e9


def build():
    """The policy with its adapter, and the decoder's parts, set up as train.py does for a GPU."""
    settings, _ = train.parse_settings(["--model", "released sizes"])
    policy, painter = train.split(pipeline(False, META), settings, torch.device("cuda"))
    return policy, [painter.text_encoder, painter.transformer, painter.vae]


def peaks(policy, painters, size, group, micro_batch):
    """Gigabytes beside the weights at the peak of each phase; and of the sampler's cache, which stays if nothing moves."""
    _, decoder, vae = painters
    grid = size // 32
    length = 256 + grid**2
    positions = torch.zeros(3, PROMPT + length, dtype=torch.long, device=META)
    shaping = {"position_ids": positions, "num_codes": CODES, "temperature": 0.9}
    sampler, found = FastSampler(policy, PROMPTS_PER_STEP, fixed=True), {}

    @contextmanager
    def phase(name):
        with content_free(), Alive([policy, *painters]) as alive:
            yield
        found[name] = alive.peak / 1e9

    with phase("sample"), torch.no_grad():
        policy.eval()
        prompts = [torch.zeros(PROMPT, dtype=torch.long)] * PROMPTS_PER_STEP
        logits, where = sampler._start(prompts, [positions] * PROMPTS_PER_STEP, length, group)
        ids, _, _ = _draw(logits, CODES, 0.9, 0.75, [None] * PROMPTS_PER_STEP)
        sampler._next(ids, where[..., :1])  # the tokens after it find everything in place
    with phase("decode"), torch.no_grad():
        latents = torch.zeros(micro_batch, 16, size // 8, size // 8, dtype=torch.float32)
        two = torch.zeros(micro_batch, 2)
        decoder(
            hidden_states=latents.bfloat16(), encoder_hidden_states=torch.zeros(micro_batch, GLYPHS, 1472),
            prior_token_id=torch.zeros(micro_batch, 4 * grid**2, dtype=torch.long),
            prior_token_drop=torch.zeros(0, dtype=torch.long), timestep=torch.zeros(micro_batch), target_size=two,
            crop_coords=two, kv_caches=GlmImageKVCache(num_layers=30),
        )  # fmt: skip
        vae.decode(latents.bfloat16())
    ids = torch.zeros(micro_batch, PROMPT + length, dtype=torch.long, device=META)
    nucleus = torch.zeros(micro_batch, length, CODES // 8, dtype=torch.uint8, device=META)
    with phase("reference"), torch.no_grad(), policy.disable_adapter():
        get_per_token_logprobs(policy, ids, length, nucleus=nucleus, **shaping)
    for name, scored in (("update", length), ("of one token", 1)):
        with phase(name):
            policy.train()
            get_per_token_logprobs(policy, ids, scored, nucleus=nucleus[:, -scored:], **shaping).sum().backward()
        policy.zero_grad()
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in sampler.cache.layers)
    return found, cache / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024], help="pixels, square (default: 512 1024)")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8], help="group sizes (default: 4 8)")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    options = parser.parse_args()
    policy, painters = build()
    trained = sum(p.nbytes for p in policy.parameters() if p.requires_grad) / 1e9
    base, painter, adapter = gigabytes([policy]) - trained, gigabytes(painters), 3 * trained  # and the two of Adam
    print(f"policy {base:.1f} GB, adapter with its optimiser state {adapter:.2f} GB, decoder {painter:.1f} GB")
    print(
        "Peaks in 10^9 bytes. Taking turns: policy or decoder on the GPU; both: neither moves. The update's peak is that"
    )
    print("of a layer's backward pass: with the logits of one token in place of all it is the same.\n")
    names = ["sample", "decode", "reference", "update", "of one token"]
    print(
        f"{'size':>5}{'group':>6}{'micro-batch':>12}"
        + "".join(f"{n:>14}" for n in names)
        + f"{'taking turns':>14}{'both':>8}"
    )
    for size in options.sizes:
        for group in options.groups:
            for micro_batch in options.micro_batch_sizes:
                work, cache = peaks(policy, painters, size, group, micro_batch)
                turns = [work[n] + adapter + (painter if n == "decode" else base) for n in names]
                both = max(work["sample"], cache + max(work.values())) + adapter + painter + base
                cells = "".join(f"{value:>14.1f}" for value in [*turns, max(turns)])
                print(f"{size:>5}{group:>6}{micro_batch:>12}{cells}{both:>8.1f}")


if __name__ == "__main__":
    main()
