"""CLIP and its relatives: fit to the prompt, and what people prefer."""

import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import CLIPModel, CLIPProcessor

from inputs import download
from reward_models import CHINESE, SMALL, lend_gpu, load_pretrained, load_weights


@functools.cache  # clip and aesthetic share one
def _clip(model, processor):
    clip = load_pretrained(CLIPModel, model, torch.float32)
    folder = download(processor, *SMALL)
    return clip, CLIPProcessor.from_pretrained(folder, trust_remote_code=False)


class Clip:
    """Cosine of picture and prompt, in -1..1 (Radford et al. 2021). Prompts are cut at 77 tokens.

    PickScore (Kirstain et al. 2023) and HPS v2 (Wu et al. 2023) are this with other weights, up to
    a constant factor. All three only know English, so Chinese prompts get NaN, unless the model is
    from a folder.
    """

    def __init__(self, model, processor):
        self.model, self.processor = _clip(model, processor)
        self.reads_chinese = Path(model).is_dir()

    def __call__(self, images, prompts):
        reads = lambda prompt: self.reads_chinese or CHINESE.search(prompt) is None
        read = torch.tensor([reads(prompt) for prompt in prompts])
        return F.cosine_similarity(*self.embed(images, prompts)).where(read, math.nan)

    def embed(self, images, prompts):
        """Unit vectors of pictures and prompts, (N, D) both."""
        fit = {"padding": True, "truncation": True, "max_length": 77}
        inputs = self.processor(text=list(prompts), images=list(images), return_tensors="pt", **fit)
        with lend_gpu(self.model) as device:
            output = self.model(**inputs.to(device))
        return output.image_embeds.cpu(), output.text_embeds.cpu()


class Aesthetic(Clip):
    """LAION's predictor, about 1..10: linear layers on CLIP's vector (Schuhmann et al. 2022)."""

    def __init__(self, clip, head):
        super().__init__(clip, clip)
        self.reads_chinese = True  # it reads no prompt
        weights = load_weights(head, "aesthetic-model.pth")
        # There are gaps in their numbers: dropout, which only training has.
        names = sorted({int(key.split(".")[1]) for key in weights})
        self.layers = [(weights[f"layers.{n}.weight"], weights[f"layers.{n}.bias"]) for n in names]

    def __call__(self, images):
        x, _ = self.embed(images, [""] * len(images))
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
        return x.squeeze(1)
