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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch
import train_decoder
import transformers
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GlmImageConfig, GlmImageForConditionalGeneration

from glm_image.decoder import DenoisingStep
from glm_image.editing import keep_one_source
from glm_image.memory import vae_workspace
from grpo import Group, _sample_token
from runtime.captured import CapturedForward
from runtime.settings import TINY

META = torch.device("meta")
# What the table is for: pixels, square; a run's defaults.
SIZE = 1024
PROMPTS = 4
GROUP = 4
MICRO_BATCHES = (1, 2, 4)
TEXT, GLYPHS = 60, 16  # tokens of a prompt; both are small beside a picture's
language_model = lambda sizes: GlmImageForConditionalGeneration(GlmImageConfig(**sizes))
PARTS = {  # what has weights, made from its sizes in released.json
    "vision_language_encoder": language_model,
    "transformer": lambda sizes: GlmImageTransformer2DModel(**sizes),
    "text_encoder": lambda sizes: transformers.T5EncoderModel(transformers.T5Config(**sizes)),
    "vae": lambda sizes: AutoencoderKL(**sizes),
}


def build(base="bfloat16"):
    """Trainers of the released sizes, set up as for a GPU, and the pipeline that paints."""
    pipe = GlmImagePipeline.from_pretrained(TINY)  # for its tokenizers and scheduler
    sizes = json.loads(Path(__file__).with_name("released.json").read_text())  # see README.md
    with META:
        modules = {name: make(sizes[name]).bfloat16().eval() for name, make in PARTS.items()}
    flags = f"--model sizes --compile no --train both --base {base}"
    settings = train_decoder.parse(flags.split(), train_decoder.PARTS.parser())
    pipe = GlmImagePipeline(**pipe.components | modules)
    run = train_decoder.load_run(settings, None, META, None, pipe)
    keep_one_source(pipe.transformer)
    return run.policy, run.decoder, run.model.pipe


def painting_models(pipe):
    return pipe.text_encoder, pipe.transformer, pipe.vae


def tensors(modules):
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def gigabytes(tensors):
    return sum(tensor.nbytes for tensor in tensors) / 1e9


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is active, and their most."""

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


def attention(query, key, value, attn_mask=None, is_causal=False, scale=None, **options):
    """A GPU's keeps no matrix of scores; that of tensors without content would."""
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, is_causal, scale=scale)[0]
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


@contextmanager
def measured(found, name, models, learner=None):
    """found[name] becomes the peak within, in GB beside the models.

    For a learner with its adapter's gradients.
    """
    attends = patch("torch.nn.functional.scaled_dot_product_attention", attention)
    stays = patch("torch.Tensor.cpu", lambda tensor: tensor)  # without content it cannot move
    with META, Alive(models) as alive, attends, stays, torch.set_grad_enabled(learner is not None):
        for parameter in learner.parameters if learner else []:
            parameter.grad = torch.zeros_like(parameter)  # that of the micro-batches before
        yield
    found[name] = alive.peak / 1e9


def sample(codes, forward, rows, prompt, length):
    """generate_with_logprobs, but of its tokens only the first two and the last."""
    settings = codes.settings
    options = codes.allowed_ids, settings.temperature, settings.top_p, [None] * PROMPTS
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


def peaks(codes, decoder, pipe, size, group, micro_batch, edits=False):
    """Gigabytes beside the weights at each phase's peak; of the sampler's cache, which may stay."""
    policy = codes.model
    _, transformer, vae = models = painting_models(pipe)
    large = (size // 32) ** 2
    prompt, length = (TEXT + large, large) if edits else (TEXT, 256 + large)
    forward = CapturedForward(policy, length, compile=False)
    found = {}
    phase = lambda name, learner=None: measured(found, name, [policy, *models], learner)
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
            step = DenoisingStep(x, x, x, (0.8, 0.6), [decoder_inputs(size, 1)] * 2)
            decoder.logprobs(step, rows).sum().backward()
    nucleus = torch.ones(micro_batch, length, codes.allowed_ids.stop, dtype=torch.bool)
    ids = torch.zeros(micro_batch, prompt + length, dtype=torch.long)
    positions = torch.zeros(3, prompt + length, dtype=torch.long)
    with phase("update", learner=codes):
        policy.train()
        sampled = Group(ids[0, :prompt], positions, ids[:, prompt:], None, nucleus)
        codes.logprobs(sampled, rows).sum().backward()
    return found, gigabytes(x for layer in forward.cache.layers for x in (layer.keys, layer.values))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--base", default="bfloat16", choices=("bfloat16", "int8"))
    words = "of pictures of the same size, instead of painting anew"
    parser.add_argument("--edits", action="store_true", help=words)
    options = parser.parse_args()
    codes, decoder, pipe = build(options.base)
    frozen = lambda model: [x for x in tensors([model]) if not x.requires_grad]
    sizes = [gigabytes(frozen(model)) for model in (codes.model, *painting_models(pipe))]
    policy, glyphs, painter, vae = sizes
    weights = sum(sizes)
    print(f"GB: policy {policy:.1f}, what paints {weights - policy:.1f}")
    print("learns  micro-batch  in turns  all stay")
    painters = glyphs + painter + (vae if options.edits else 0)
    # In turns; in other phases the policy.
    there = {"paint": painters, "VAE": vae, "decoder update": painters}
    for micro_batch in MICRO_BATCHES:
        work, cache = peaks(codes, decoder, pipe, SIZE, GROUP, micro_batch, options.edits)
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
