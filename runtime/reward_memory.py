"""How much of the GPU the built-in rewards need, before anything is downloaded."""

import math
from pathlib import Path

from rewards import AT_ONCE, split_spec

CLIP_L = 1.71e9, 18e6, math.inf
CLIP_H = 3.95e9, 22e6, math.inf
SMOLVLM = 4.5e9, 0.35e9, AT_ONCE  # a picture of 17 tiles; a language model without a cache is below its vision tower
NEEDED = {  # bytes: weights, work on each picture that is seen at once; and how many those are at most
    "lpips": (0.01e9, 0.13e9, 1), "clip": CLIP_L, "aesthetic": CLIP_L, "pickscore": CLIP_H, "hps": CLIP_H,
    "vqa": SMOLVLM, "edit": SMOLVLM,
}  # fmt: skip


def scoring_memory(spec, pictures):
    """Bytes of the GPU that the rewards of a spec need while they score so many pictures, one after another.

    Weights in a folder of the user's count as large as its files; a reward in a file of the user's counts 0.
    """
    needed = [0]
    for source, _ in split_spec(spec):
        name, _, folder = source.partition("=")
        weights, work, most = NEEDED.get(name, (0, 0, 0))
        files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) if folder else 0
        needed.append((files or weights) + work * min(pictures, most))
    return max(needed)
