"""What a step of GLM-Image at full size needs of a GPU's memory, computed without one.

    python benchmarks/memory.py [--edits]

Runs models of the released sizes over tensors that have a shape but no content, and adds up what is alive. Reference
and update are the trainer's own passes; of sampling, painting and the decoder's update only what makes the peak is
repeated here. Exact for the tensors: a GPU adds the workspace of cuDNN, which is counted for the VAE (see vae_workspace), its
own context (about half a gigabyte) and what its allocator leaves unused between them. What rewards need is that of
runtime/reward_memory.py.
"""

import argparse
import math
import sys
import weakref
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm_image.decoder import gaussian_step, log_density
from glm_image.memory import needed, vae_workspace
from glm_image.model import build as build_trainers
from glm_image.model import painting_models
from grpo import _sample_token, get_per_token_logprobs
from runtime.gpu import CapturedForward
from runtime.reward_memory import scoring_memory
from runtime.settings import TINY, parse_settings

META = torch.device("meta")
PROMPT, GLYPHS = 60, 16  # tokens; both are small beside a picture's
BLOCK = 512  # the allocator of CUDA rounds up to blocks of this many bytes
NOTE = """\
Peaks in 10^9 bytes. Taking turns: policy, decoder or rewards on the GPU; both: nothing moves, and rewards come on top.
The update's peak is that of a layer's backward pass, beside the gradients so far: with the logits of one token in place
of all it is the same. Decoder update: with --train decoder or both, its turn on the GPU; and with both there.
"""


# ---- the released sizes ---------------------------------------------------------------------------------------------


def pipeline():
    """One of the released sizes, without data, and with the tiny pipeline's tokenizers and scheduler."""
    pipe = GlmImagePipeline.from_pretrained(TINY, dtype=torch.float32)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    # The vision tower is cut down to a layer: it is left behind before anything runs.
    config = transformers.GlmImageConfig(text_config={"rope_parameters": rope}, vision_config={"depth": 1})
    byt5 = {"d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6, "vocab_size": 384}
    byt5 = transformers.T5Config(**byt5, feed_forward_proj="gated-gelu")  # the encoder of ByT5-small
    # 16 latent channels and a factor of 8 are GLM-Image's; the channels of the blocks are taken from CogView4's.
    blocks = {"block_out_channels": (128, 512, 1024, 1024), "layers_per_block": 3, "mid_block_add_attention": False}
    blocks |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    latents = {"latent_channels": 16, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    latents |= {"use_quant_conv": False, "use_post_quant_conv": False}

    torch.set_default_dtype(torch.bfloat16)
    with META:
        policy = transformers.GlmImageForConditionalGeneration(config)  # 8.9 B parameters
        # 6.9 B; the defaults of the class, 64 heads of 40, would be a model of 2.9 B.
        decoder = GlmImageTransformer2DModel(num_layers=30, num_attention_heads=32, attention_head_dim=128)
        text_encoder = transformers.T5EncoderModel(byt5)  # 0.2 B
        vae = AutoencoderKL(**blocks, **latents)
    torch.set_default_dtype(torch.float32)
    made = {"vision_language_encoder": policy, "transformer": decoder, "text_encoder": text_encoder, "vae": vae}
    return GlmImagePipeline(**pipe.components | {name: module.eval() for name, module in made.items()})


# ---- peaks ----------------------------------------------------------------------------------------------------------


def tensors(modules):
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def gigabytes(tensors):
    return sum(tensor.nbytes for tensor in tensors) / 1e9


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is active, and remembers the most.

    Those of `modules` are there already and not counted.
    """

    def __init__(self, modules):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in tensors(modules)}

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


def build(base="bfloat16"):
    """What learns of the released sizes, set up as train.py does it for a GPU: codes, with what paints, and decoder."""
    settings = parse_settings(["--model", "released sizes", "--compile", "no", "--train", "both", "--base", base])
    pipe, codes, decoder = build_trainers(pipeline(), settings, META)
    for model in (codes.model, *painting_models(pipe)):
        model.to(META)
    # As a whole run's, beside what GRPO itself is told.
    return SimpleNamespace(**vars(codes) | {"settings": settings}, decoder_modules=painting_models(pipe)), decoder


@contextmanager
def measured(found, name, models, learner=None):
    """found[name] becomes the peak within, in gigabytes beside the models, for a learner with its adapter's gradients."""
    parameters = learner.optimizer.param_groups[0]["params"] if learner else []
    attends = patch("torch.nn.functional.scaled_dot_product_attention", attention)
    with META, Alive(models) as alive, attends, torch.set_grad_enabled(learner is not None):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # that of the micro-batches before
        yield
    found[name] = alive.peak / 1e9
    for parameter in parameters:
        parameter.grad = None


def read_prompts(policy, rows, length):
    ids = torch.zeros(rows, length, dtype=torch.long)
    positions = torch.zeros(3, rows, length, dtype=torch.long)
    return policy(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1), positions


def sample(codes, forward, rows, prompt, length):
    """generate_with_logprobs, but of its tokens only the first two and the last."""
    options = codes.sampling_args["allowed_ids"], codes.settings.temperature, codes.settings.top_p
    draw = lambda output: _sample_token(output.logits[:, -1], *options, [None] * codes.settings.prompts_per_step)
    codes.model.eval()
    output, positions = read_prompts(codes.model, rows, prompt)
    drawn = [draw(output)]
    output = forward(drawn[0][0], None, positions[..., :1], output.past_key_values)
    drawn += [[torch.empty_like(x) for x in drawn[0]] for _ in range(length - 2)]
    output = forward(drawn[0][0], None, positions[..., :1], output.past_key_values)
    drawn.append(draw(output))


def velocity(transformer, size, pictures, mode=None, cache=None):
    """What the decoder predicts, (pictures, 16, size / 8, size / 8). mode: what it does with the cache of a source."""
    cache = cache or GlmImageKVCache(num_layers=30)
    cache.set_mode(mode)
    return transformer(
        torch.zeros(pictures, 16, size // 8, size // 8).bfloat16(),
        encoder_hidden_states=torch.zeros(pictures, GLYPHS, 1472).bfloat16(),
        prior_token_id=torch.zeros(pictures, (size // 16) ** 2, dtype=torch.long),
        prior_token_drop=torch.zeros(0, dtype=torch.long),
        timestep=torch.zeros(pictures),
        target_size=torch.zeros(pictures, 2).bfloat16(),
        crop_coords=torch.zeros(pictures, 2).bfloat16(),
        kv_caches=cache,
    ).sample


def paint_edits(transformer, vae, size, pictures):
    source = torch.zeros(1, 3, size, size).bfloat16()
    cache = GlmImageKVCache(num_layers=30)
    for _ in range(2):  # for each picture, of which one copy is kept
        vae.encode(source)
        velocity(transformer, size, 1, "write", cache)
    velocity(transformer, size, pictures, "read", cache)


def update_decoder(transformer, size, pictures, settings):
    """By one denoising step, guided: with and without the codes."""
    v = velocity(transformer, size, pictures)
    unguided = velocity(transformer, size, pictures)
    v = unguided + settings.guidance_scale * (v - unguided)
    x = torch.zeros_like(v, dtype=torch.float32)
    return log_density(x, *gaussian_step(x, v.float(), 0.8, 0.6, settings.noise_level)).sum().backward()


def peaks(codes, decoder, size, group, micro_batch, edits=False):
    """Gigabytes beside the weights at the peak of each phase; and of the sampler's cache, which stays if none moves.

    edits: of pictures of the same size, whose codes are part of the prompt.
    """
    policy = codes.model
    _, transformer, vae = codes.decoder_modules
    rows = codes.settings.prompts_per_step * group
    large = (size // 32) ** 2
    prompt, length = (PROMPT + large, large) if edits else (PROMPT, 256 + large)
    forward = CapturedForward(policy, length, compile=False)
    found = {}
    phase = partial(measured, found, models=[policy, *codes.decoder_modules])

    if edits:  # in the next step, beside the sampler's cache
        with phase("prompts"):
            read_prompts(policy, rows, prompt)
    with phase("sample"):
        sample(codes, forward, rows, prompt, length)
    with phase("paint"):
        if edits:
            paint_edits(transformer, vae, size, micro_batch)
        latents = velocity(transformer, size, micro_batch)
    with phase("VAE"):
        vae.decode(latents[:1])  # one picture at a time, see build in glm_image/model.py
    found["VAE"] += vae_workspace(size**2) / 1e9
    if not edits:
        with phase("decoder update", learner=decoder):
            update_decoder(transformer, size, micro_batch, codes.settings)

    ids = torch.zeros(micro_batch, prompt + length, dtype=torch.long, device=META)
    inputs = {"position_ids": torch.zeros(3, prompt + length, dtype=torch.long, device=META), **codes.sampling_args}
    nucleus = torch.ones(micro_batch, length, inputs["allowed_ids"].stop, dtype=torch.bool)  # on the CPU, as in a Group
    with phase("reference"), policy.disable_adapter():
        get_per_token_logprobs(policy, ids, length, nucleus=nucleus, **inputs)
    for name, scored in (("update", length), ("of one token", 1)):
        with phase(name, learner=codes):
            policy.train()
            get_per_token_logprobs(policy, ids, scored, nucleus=nucleus[:, -scored:], **inputs).sum().backward()
    return found, gigabytes(x for layer in forward.cache.layers for x in (layer.keys, layer.values))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024], help="pixels, square (default: 512 1024)")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8], help="group sizes (default: 4 8)")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)")
    parser.add_argument("--base", default="bfloat16", choices=("bfloat16", "int8"), help="the frozen weights")
    parser.add_argument("--rewards", default="pickscore:1,clip:1,hps", help="(default: those of a run)")
    parser.add_argument("--edits", action="store_true", help="of pictures of the same size, instead of painting anew")
    options = parser.parse_args()
    codes, decoder = build(options.base)
    adapter, own = (gigabytes(learner.optimizer.param_groups[0]["params"]) for learner in (codes, decoder))
    base = gigabytes(tensors([codes.model])) - adapter
    painters = gigabytes(tensors(codes.decoder_modules)) - own
    adapter, own = 3 * adapter, 3 * own  # and the two of Adam
    print(f"policy {base:.1f} GB, adapter with its optimiser state {adapter:.2f} GB, ", end="")
    print(f"decoder {painters:.1f} GB, its own adapter {own:.2f} GB")
    locked = needed([codes.model, *codes.decoder_modules], codes.settings)[2]
    print(f"host memory for taking turns {locked / 1e9:.1f} GB\n{NOTE}")
    names = ["sample", "paint", "score", "reference", "update", "of one token"]
    leaves = {"paint": painters, "score": 0}  # what stays while models take turns; the policy, in all other phases
    header = "".join(f"{name:>14}" for name in [*names, "taking turns"])
    print(f"{'size':>5}{'group':>6}{'micro-batch':>12}{header}{'both':>8}{'decoder update':>16}{'both':>8}")
    for size, group, micro_batch in product(options.sizes, options.groups, options.micro_batch_sizes):
        work, cache = peaks(codes, decoder, size, group, micro_batch, options.edits)
        work["paint"] = max(work["paint"], work.pop("VAE"))
        own_update = work.pop("decoder update", math.nan)  # NaN: it does not learn from edits
        work["score"] = scoring_memory(options.rewards, codes.settings.prompts_per_step * group) / 1e9
        turns = [work[name] + adapter + leaves.get(name, base) for name in names]
        beside = [value for name, value in work.items() if name != "sample"]  # whose own cache that is
        both = max(work["sample"], cache + max(beside)) + adapter + painters + base
        learning = own_update + adapter + own + painters
        both_learning = max(both + own, cache + learning + base)
        cells = "".join(f"{value:>14.1f}" for value in [*turns, max(turns)])
        print(f"{size:>5}{group:>6}{micro_batch:>12}{cells}{both:>8.1f}{learning:>16.1f}{both_learning:>8.1f}")


if __name__ == "__main__":
    main()
