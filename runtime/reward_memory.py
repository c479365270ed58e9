"""How much of the GPU rewards need: the built-in ones before anything is downloaded, your own once they are loaded."""

import inspect
import math
from contextlib import suppress
from pathlib import Path

import torch

from rewards import AT_ONCE, split_spec

CLIP_L = 1.71e9, 18e6, math.inf
CLIP_H = 3.95e9, 22e6, math.inf
SMOLVLM = 4.5e9, 0.35e9, AT_ONCE  # a picture of 17 tiles; a language model without a cache is below its vision tower
NEEDED = {  # bytes: weights, work on each picture that is seen at once; and how many those are at most
    "lpips": (0.01e9, 0.13e9, 1), "clip": CLIP_L, "aesthetic": CLIP_L, "pickscore": CLIP_H, "hps": CLIP_H,
    "vqa": SMOLVLM, "edit": SMOLVLM,
}  # fmt: skip


def scoring_memory(spec, pictures):
    """Bytes of the GPU that the rewards of a spec need while they score so many pictures together, one after another.

    They leave it when they have scored, see lend_gpu. Weights in a folder of the user's count as large as its files; a
    reward in a file of the user's counts 0: see modules_of.
    """
    needed = [0]
    for source, _ in split_spec(spec):
        name, _, folder = source.partition("=")
        weights, work, most = NEEDED.get(name, (0, 0, 0))
        files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) if folder else 0
        needed.append((files or weights) + work * min(pictures, most))
    return max(needed)


def own_memory(rewards):
    """Bytes of the most that a reward of the user's own, loaded by now, holds in models beside the GPU; says so.

    rewards: {name: (function, weight)}. What is on the GPU already is not counted: it is no longer free.
    """
    needed = [0]
    for name, (function, _) in rewards.items():
        if ".py:" in name:
            models = [parameter for module in modules_of(function) for parameter in module.parameters()]
            needed.append(sum(parameter.nbytes for parameter in models if not parameter.is_cuda))
            print(f"{name}: as far as can be seen, its models take {needed[-1] / 1e9:.1f} GB while it scores")
    return max(needed)


def modules_of(function):
    """The torch modules that a reward holds, where they can be seen: what its code names, its attributes, and theirs."""
    held = [function, *getattr(function, "__dict__", {}).values()]
    with suppress(TypeError):  # not written in Python
        names = inspect.getclosurevars(function if inspect.isroutine(function) else type(function).__call__)
        held += [*names.nonlocals.values(), *names.globals.values()]
    held += [value for each in held for value in getattr(each, "__dict__", {}).values()]
    return list({id(each): each for each in held if isinstance(each, torch.nn.Module)}.values())
