"""Weights that are in no file: sizes before a download, random ones, int8."""

import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from torch.nn.functional import linear
from transformers import GlmImageForConditionalGeneration, T5EncoderModel

from glm_image.model import GlmImage, load, read_config, readable_loading

PARTS = {  # of the pipeline, those with weights
    "vision_language_encoder": GlmImageForConditionalGeneration,
    "text_encoder": T5EncoderModel,
    "transformer": GlmImageTransformer2DModel,
    "vae": AutoencoderKL,
}


# ---- sizes ---------------------------------------------------------------------------------------


def sizes(settings, base, device):
    """The models of a GlmImage without data: from a few kB of config files."""
    glm_image = GlmImage(load_sizes(settings.model, device))
    if base == "int8":
        round_weights(glm_image)
    glm_image.prepare_training(settings, torch.device("meta"))
    return glm_image.parts


def load_sizes(model, device):
    """The stock pipeline on the meta device, from its config files."""
    modules = {}
    with readable_loading(model), torch.device("meta"):
        for name in PARTS:
            part = without_weights(name, read_config(model, name))
            modules[name] = part.to(torch.bfloat16)
    return load(model, device, **modules)


def without_weights(name, config):
    """A part of the pipeline with random weights. config: {name: value}, as in its config.json."""
    part = PARTS[name]
    if hasattr(part, "config_class"):  # from transformers, not from diffusers
        return part(part.config_class.from_dict(config))
    return part.from_config(config)


# ---- int8: frozen weights in half the memory of bfloat16 -----------------------------------------


class Int8Linear(torch.nn.Linear):
    """A linear layer of int8 weights (out, in) times a scale per row: off by half a scale."""

    def forward(self, x):
        # The scale comes before the product. If it came after, torch.compile would replace both by
        # a kernel for int8, _weight_int8pack_mm, which on CUDA has one thread per output and reads
        # weights very slowly (pytorch 190529).
        return linear(x, self.weight * self.scale[:, None], self.bias)


def round_weights(glm_image, device=None):
    """Most weights of a GlmImage, before it has an adapter.

    Embeddings, head, norms, VAE and text encoder stay as they are. device: see round_linears.
    """
    round_linears(glm_image.language_model.model.language_model.layers, device)
    round_linears(glm_image.pipe.transformer.transformer_blocks, device)


@torch.no_grad()
def round_linears(module, device=None):
    """Makes an Int8Linear of every linear layer in `module`, one by one.

    Weights mapped from a file are read only here. device: where the rounded weights go; None: they
    stay where they are.
    """
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            weight = layer.weight.to(device or layer.weight.device)  # (out, in)
            largest = weight.float().abs().amax(dim=1)
            scale = (largest / 127).clamp(min=1e-12).to(weight.dtype)  # (out,)
            rounded = (weight.float() / scale.float()[:, None]).round().to(torch.int8)
            layer.weight = torch.nn.Parameter(rounded, requires_grad=False)
            layer.scale = torch.nn.Buffer(scale)
            layer.__class__ = Int8Linear
