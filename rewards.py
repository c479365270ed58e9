"""Rewards: functions that look at pictures and say how good they are.

A reward is `f(images, prompts, targets) -> float tensor (N,)`, higher is better. `images` are N PIL images, `prompts` the
N prompts they were painted for, `targets` N PIL images they should resemble, or None. Register yours with @reward, or
keep it in a file of your own and name it on the command line:

    python train.py --reward ssim:1,mse:0.5              # a weighted sum; a weight left out is 1
    python train.py --reward my_rewards.py:blueness      # runs that file: use only files you trust
"""

import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

REWARDS = {}


def reward(function):
    """Register a reward under its own name."""
    REWARDS[function.__name__] = function
    return function


# ---- pictures as tensors -------------------------------------------------------------------------------------------


def to_tensor(image, size=None):
    """A PIL image as (3, height, width) float32 in 0..1, resized to `size` (width, height) if it differs."""
    image = image.convert("RGB")
    if size is not None and image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def pairs(images, targets, name):
    """Each image beside its target, as tensors of the image's size."""
    if targets is None:
        raise ValueError(f"reward '{name}' compares with target pictures: give a folder of them with --targets")
    return [(to_tensor(image), to_tensor(target, image.size)) for image, target in zip(images, targets, strict=True)]


# ---- the rewards ---------------------------------------------------------------------------------------------------


@reward
def mse(images, prompts, targets):
    """Negative mean squared error, pixels in 0..1: 0 for a perfect copy, -1 at worst."""
    return torch.stack([-(a - b).square().mean() for a, b in pairs(images, targets, "mse")])


@reward
def ssim(images, prompts, targets):
    """Structural similarity in -1..1, 1 for a perfect copy (Wang et al. 2004, eq. 13): see ssim_map."""
    return torch.stack([ssim_map(a, b).mean() for a, b in pairs(images, targets, "ssim")])


def ssim_map(a, b):
    """Local similarity of mean, contrast and structure under a Gaussian window of 11x11 pixels, sigma 1.5.

    (3, H, W) and (3, H, W), values in 0..1 -> (3, H-10, W-10): only where the whole window lies inside. A flat patch is
    judged by its mean alone, so a blank picture scores on the background and nowhere else.
    """
    x = torch.arange(11, dtype=a.dtype) - 5
    window = (-(x**2) / (2 * 1.5**2)).exp()
    window = window / window.sum()

    def blur(image):
        image = F.conv2d(image.unsqueeze(1), window.view(1, 1, 11, 1))
        return F.conv2d(image, window.view(1, 1, 1, 11)).squeeze(1)

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b, covariance = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2, blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2  # the paper's K1, K2 for a range of 1
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return luminance * (2 * covariance + c2) / (var_a + var_b + c2)


# ---- from the command line to one number a picture -----------------------------------------------------------------


def parse_rewards(spec):
    """'ssim:1,mse:0.5' or 'my_file.py:function:2' -> {name: (function, weight)}.

    Raises:
        ValueError: an unknown reward, a weight that is not a number, a file or function that does not exist.
    """
    rewards = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        *head, last = item.split(":")
        try:
            weight, name = (float(last), ":".join(head)) if head else (1.0, item)
        except ValueError:
            weight, name = 1.0, item
        rewards[name] = (_load(name), weight)
        if not math.isfinite(weight):
            raise ValueError(f"the weight of reward {name!r} is {weight}")
    if not rewards:
        raise ValueError(f"no reward in {spec!r}; known rewards: {', '.join(sorted(REWARDS))}")
    return rewards


def _load(name):
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        known = ", ".join(sorted(REWARDS))
        raise ValueError(f"unknown reward {name!r}; known: {known}; your own: file.py:function, a weight after a colon")
    if not Path(path).is_file():
        raise ValueError(f"the reward file {path} does not exist")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise ValueError(f"the reward file {path} cannot be loaded: {error}") from None
    if not hasattr(module, function):
        raise ValueError(f"{path} has no function {function!r}")
    return getattr(module, function)


def score(rewards, images, prompts, targets):
    """Judge every picture by every reward: the weighted sum (N,), and the raw values {name: (N,)} for the log.

    Raises:
        ValueError: a reward that is NaN or infinite, or not one number a picture; it names the reward and the image.
    """
    parts = {}
    for name, (function, _) in rewards.items():
        values = torch.as_tensor(function(images, prompts, targets), dtype=torch.float32).cpu()
        if values.shape != (len(images),):
            raise ValueError(f"reward '{name}' gave shape {tuple(values.shape)} for {len(images)} images")
        for i in (~values.isfinite()).nonzero().flatten().tolist():
            raise ValueError(f"reward '{name}' is {values[i].item()} for image {i} (prompt: {prompts[i]!r})")
        parts[name] = values
    return sum(weight * parts[name] for name, (_, weight) in rewards.items()), parts
