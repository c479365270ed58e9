"""What a step of GLM-Image at full size needs of a GPU's memory, computed without one.

    python benchmarks/memory.py [--base int8] [--edits]

Runs models of the released sizes over tensors that have a shape but no content, and adds up what is
alive. What learns reads by the trainer's own passes; of sampling and painting only what makes the
peak is repeated. The card's context, gaps between tensors, and rewards where they take more than
the VAE (runtime/gpu.py), come on top.
"""

import argparse
import json
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GlmImageConfig, GlmImageForConditionalGeneration

from glm_image.decoder import DenoisingStep
from glm_image.memory import vae_workspace
from glm_image.model import build as build_trainers
from glm_image.model import painting_models
from grpo import Group, _sample_token
from runtime.gpu import CapturedForward
from runtime.settings import TINY, parse_settings

META = torch.device("meta")
SIZE, PROMPTS, GROUP, MICRO_BATCHES = (
    1024,
    4,
    4,
    (1, 2, 4),
)  # what the table is for: pixels, square; a run's defaults
TEXT, GLYPHS = 60, 16  # tokens of a prompt; both are small beside a picture's
PARTS = {  # what has weights, made from its sizes in released.json
    "vision_language_encoder": lambda sizes: GlmImageForConditionalGeneration(
        GlmImageConfig(**sizes)
    ),
    "transformer": lambda sizes: GlmImageTransformer2DModel(**sizes),
    "text_encoder": lambda sizes: transformers.T5EncoderModel(transformers.T5Config(**sizes)),
    "vae": lambda sizes: AutoencoderKL(**sizes),
}


def build(base="bfloat16"):
    """What learns of the released sizes, set up as train.py does it for a GPU: codes, with what
    paints, and decoder."""
    pipe = GlmImagePipeline.from_pretrained(
        TINY, dtype=torch.float32
    )  # for its tokenizers and scheduler
    sizes = json.loads(Path(__file__).with_name("released.json").read_text())  # see README.md
    with META:
        modules = {
            name: make(sizes[name]).to(torch.bfloat16).eval() for name, make in PARTS.items()
        }
    settings = parse_settings(
        ["--model", "released sizes", "--compile", "no", "--train", "both", "--base", base]
    )
    pipe, codes, decoder = build_trainers(
        GlmImagePipeline(**pipe.components | modules), settings, META
    )
    codes.decoder_modules = painting_models(pipe)
    for model in (codes.model, *codes.decoder_modules):
        model.to(META)
    return codes, decoder


def tensors(modules):
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def gigabytes(tensors):
    return sum(tensor.nbytes for tensor in tensors) / 1e9


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is active, and remembers the
    most."""

    def __init__(self, modules):  # these are there already and not counted
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in tensors(modules)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device == META:
                storage = tensor.untyped_storage()
                size = -(-storage.nbytes() // 512) * 512  # CUDA's allocator rounds up
                if storage._cdata not in self.known:
                    self._change(storage._cdata, size)
                    weakref.finalize(storage, self._change, storage._cdata, -size)
        return result

    def _change(self, key, size):
        self.known ^= {key}  # it comes, or it goes
        self.now += size
        self.peak = max(self.peak, self.now)


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """A GPU's attention keeps no matrix of scores; the one of content-free tensors would, so it is
    told to use that."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


@contextmanager
def measured(found, name, models, learner=None):
    """found[name] becomes the peak within, in GB beside the models, for a learner with its
    adapter's gradients."""
    attends = patch("torch.nn.functional.scaled_dot_product_attention", attention)
    stays = patch("torch.Tensor.cpu", lambda tensor: tensor)  # without content it cannot move
    with META, Alive(models) as alive, attends, stays, torch.set_grad_enabled(learner is not None):
        for parameter in learner.parameters if learner else []:
            parameter.grad = torch.zeros_like(parameter)  # that of the micro-batches before
        yield
    found[name] = alive.peak / 1e9


def sample(codes, forward, rows, prompt, length):
    """generate_with_logprobs, but of its tokens only the first two and the last."""
    options = (
        codes.sampling_args["allowed_ids"],
        codes.settings.temperature,
        codes.settings.top_p,
        [None] * PROMPTS,
    )
    ids = torch.zeros(PROMPTS, prompt, dtype=torch.long)
    positions = torch.zeros(3, PROMPTS, prompt, dtype=torch.long)
    output = codes.model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1)
    positions = torch.zeros(3, rows, 1, dtype=torch.long)
    output.past_key_values.reorder_cache(positions[0, :, 0])
    drawn = [_sample_token(output.logits[:, -1][positions[0, :, 0]], *options)]
    output = forward(drawn[0][0], None, positions, output.past_key_values)
    drawn += [[torch.empty_like(x) for x in drawn[0]] for _ in range(length - 2)]
    output = forward(drawn[0][0], None, positions, output.past_key_values)
    drawn.append(_sample_token(output.logits[:, -1], *options))


def decoder_inputs(size, pictures):
    return {
        "hidden_states": torch.zeros(pictures, 16, size // 8, size // 8).bfloat16(),
        "timestep": torch.zeros(pictures),
        "encoder_hidden_states": torch.zeros(pictures, GLYPHS, 1472).bfloat16(),
        "prior_token_id": torch.zeros(pictures, (size // 16) ** 2, dtype=torch.long),
        "prior_token_drop": torch.zeros(0, dtype=torch.long),
        **{name: torch.zeros(pictures, 2).bfloat16() for name in ("target_size", "crop_coords")},
    }


def peaks(codes, decoder, size, group, micro_batch, edits=False):
    """Gigabytes beside the weights at the peak of each phase; and of the sampler's cache, which
    stays if none moves."""
    policy = codes.model
    _, transformer, vae = codes.decoder_modules
    large = (size // 32) ** 2
    prompt, length = (TEXT + large, large) if edits else (TEXT, 256 + large)
    forward = CapturedForward(policy, length, compile=False)
    found = {}
    phase = lambda name, learner=None: measured(
        found, name, [policy, *codes.decoder_modules], learner
    )
    policy.eval()
    with phase("sample"):
        sample(codes, forward, PROMPTS * group, prompt, length)
    with phase("paint"):
        cache = GlmImageKVCache(num_layers=30)
        for _ in range(2 if edits else 0):  # a source for each picture, of which one copy is kept
            vae.encode(torch.zeros(1, 3, size, size).bfloat16())
            cache.set_mode("write")
            transformer(**decoder_inputs(size, 1), kv_caches=cache)
        cache.set_mode("read" if edits else None)
        latents = transformer(**decoder_inputs(size, micro_batch), kv_caches=cache).sample
    with phase("VAE"):
        vae.decode(latents[:1])  # one picture at a time, see build in glm_image/model.py
    found["VAE"] += vae_workspace(size**2) / 1e9
    rows = range(micro_batch)
    if not edits:
        with phase("decoder update", learner=decoder):  # by one denoising step, guided
            x = torch.zeros(latents.shape)
            decoder.logprobs(
                DenoisingStep(x, x, x, (0.8, 0.6), [decoder_inputs(size, 1)] * 2), rows
            ).sum().backward()
    nucleus = torch.ones(
        micro_batch, length, codes.sampling_args["allowed_ids"].stop, dtype=torch.bool
    )
    ids = torch.zeros(micro_batch, prompt + length, dtype=torch.long)
    positions = torch.zeros(3, prompt + length, dtype=torch.long)
    with phase("update", learner=codes):
        policy.train()
        codes.logprobs(
            Group(ids[0, :prompt], positions, ids[:, prompt:], None, nucleus), rows
        ).sum().backward()
    return found, gigabytes(x for layer in forward.cache.layers for x in (layer.keys, layer.values))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--base", default="bfloat16", choices=("bfloat16", "int8"), help="the frozen weights"
    )
    parser.add_argument(
        "--edits",
        action="store_true",
        help="of pictures of the same size, instead of painting anew",
    )
    options = parser.parse_args()
    codes, decoder = build(options.base)
    frozen = [
        [x for x in tensors([model]) if not x.requires_grad]
        for model in (codes.model, *codes.decoder_modules)
    ]
    policy, glyphs, painter, vae = map(gigabytes, frozen)
    weights = policy + glyphs + painter + vae
    print(
        f"GB: policy {policy:.1f}, what paints {weights - policy:.1f}\nlearns  micro-batch  in turns  all stay"
    )
    painters = glyphs + painter + (vae if options.edits else 0)
    there = {
        "paint": painters,
        "VAE": vae,
        "decoder update": painters,
    }  # in turns; in other phases the policy
    for micro_batch in MICRO_BATCHES:
        work, cache = peaks(codes, decoder, SIZE, GROUP, micro_batch, options.edits)
        own = work.pop("decoder update", 0)
        kept = 3 * gigabytes(codes.parameters)  # with the two moments of Adam
        for learns in ("codes",) if options.edits else ("codes", "both"):
            turns = max(peak + there.get(name, policy) for name, peak in work.items()) + kept
            stay = cache + max(work.values()) + kept + weights
            print(f"{learns:6}{micro_batch:>13}{turns:>10.1f}{stay:>10.1f}", flush=True)
            work["decoder update"] = own
            kept += 3 * gigabytes(decoder.parameters)


if __name__ == "__main__":
    main()
