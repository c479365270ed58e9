"""Rewards: functions that look at pictures and say how good they are.

A reward returns one number per picture: higher is better, None or NaN is "does not apply". It is
called by keyword, and gets what it has parameters for, with **kwargs all of it:

    images       B PIL images, prompt after prompt
    prompts      the B prompts that they were painted for
    targets      B PIL images that they should resemble, None where there is none
    group_size   how many pictures in a row have the same prompt, to compare them
    ...          a list of B for each column of the prompts (docs/rewards.md)

It may be `async def`. Add yours to REWARDS, further down in this file, or keep it in a file of your
own and name it on the command line:

    python train.py --reward lpips:0.4,ssim:0.2,text:0.3,aesthetic:0.1    # a weight left out is 1
    python train.py --reward my_rewards.py:blueness      # runs that file: use only files you trust
    python train.py --reward clip=path/to/folder:0.5     # weights from a folder, not downloaded

The order of calls: load, once; in a step score, then combine, which makes the values one number per
picture.

Rewards that are models are in reward_models/. Each loads once, when named, from where REWARDS
says. With NAME=FOLDER, that folder must hold all files of the row.
"""

import asyncio
import inspect
import itertools
import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import PureWindowsPath
from pkgutil import resolve_name

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from grpo import centre_groups
from inputs import ROOT, UserError, load_from_file

# ---- likeness to a target ------------------------------------------------------------------------


def to_tensor(image, size=None):
    """A PIL image as (3, height, width) float32 in 0..1, of `size` (width, height) if given."""
    image = image.convert("RGB").resize(size or image.size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def against_targets(measure, images, targets):
    """`measure` of each image and its target, tensors of one size: (N,), NaN where that is None."""
    values = [
        math.nan if target is None else measure(to_tensor(image), to_tensor(target, image.size))
        for image, target in zip(images, targets)
    ]
    return torch.tensor(values)


def mse(images, targets):
    """Negative mean squared error, pixels in 0..1: 0 for a perfect copy, -1 at worst."""
    return against_targets(lambda a, b: -(a - b).square().mean(), images, targets)


def ssim(images, targets):
    """Structural similarity, at most 1, for a perfect copy (Wang et al. 2004, eq. 13): ssim_map."""
    return against_targets(lambda a, b: ssim_map(a, b).mean(), images, targets)


def keep(images, sources):
    """Structural similarity of an edit to its source: with a small weight it keeps the rest."""
    return ssim(images, sources)


def ssim_map(a, b):
    """Local similarity of mean, contrast and structure, under a Gaussian of 11x11 pixels.

    Its sigma is 1.5. (3, H, W) and (3, H, W), values in 0..1 -> (3, H-10, W-10): only where the
    whole window lies inside. A flat patch is judged by its mean alone, so a blank picture scores on
    the background and nowhere else.
    """
    x = torch.arange(11, dtype=a.dtype) - 5
    window = (-(x**2) / (2 * 1.5**2)).softmax(0).expand(3, 1, 1, 11)
    maps = torch.stack([a, b, a * a, b * b, a * b])  # (5, 3, H, W)
    blurred = F.conv2d(F.conv2d(maps, window, groups=3), window.mT, groups=3)  # rows, then columns
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = blurred
    var_a, var_b, covariance = mean_aa - mean_a**2, mean_bb - mean_b**2, mean_ab - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2  # the paper's K1, K2 for a range of 1
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return luminance * (2 * covariance + c2) / (var_a + var_b + c2)


# ---- variety -------------------------------------------------------------------------------------


def variety(images, group_size):
    """1 less the mean SSIM to the other pictures of the group: 0 where all are equal.

    Pictures are first shrunk to 256 pixels a side at most: 28 pairs of 1024 x 1024 take long.
    """
    values = []
    for group in torch.stack([small_tensor(image) for image in images]).split(group_size):
        small, which = group.unique(dim=0, return_inverse=True)  # equal pictures are compared once
        alike = torch.eye(len(small))
        for i, j in itertools.combinations(range(len(small)), 2):
            alike[i, j] = alike[j, i] = ssim_map(small[i], small[j]).mean()
        values.append((group_size - alike[which][:, which].sum(1)) / (group_size - 1))
    return torch.cat(values)


def small_tensor(image):
    shrink = max(1, max(image.size) / 256)
    return to_tensor(image, tuple(round(side / shrink) for side in image.size))


# ---- from a name to one number per picture -------------------------------------------------------

ALEXNET = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
LPIPS_HEADS = (
    "https://github.com/richzhang/PerceptualSimilarity/raw/master/lpips/weights/v0.1/alex.pth"
)
CLIP = "reward_models.clip:Clip"
CLIP_L = "openai/clip-vit-large-patch14"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
AESTHETIC = {"clip": CLIP_L, "head": "trl-lib/ddpo-aesthetic-predictor"}
SMOLVLM = "HuggingFaceTB/SmolVLM-Instruct"
TINY_JUDGE = ROOT / "tiny-glm-image" / "check.py"


# Name: a function; its file, which is run when it is named; or a class, imported when it is named,
# and where its weights come from without NAME=FOLDER.
REWARDS = {
    "mse": mse,
    "ssim": ssim,
    "lpips": ("reward_models.lpips:Lpips", {"alexnet": ALEXNET, "heads": LPIPS_HEADS}),
    "text": ("reward_models.text:Text", {}),
    "clip": (CLIP, {"model": CLIP_L, "processor": CLIP_L}),
    "pickscore": (CLIP, {"model": "yuvalkirstain/PickScore_v1", "processor": CLIP_H}),
    "hps": (CLIP, {"model": "adams-story/HPSv2-hf", "processor": CLIP_L}),
    "aesthetic": ("reward_models.clip:Aesthetic", AESTHETIC),
    "vqa": ("reward_models.vqa:Vqa", {"model": SMOLVLM}),
    "edit": ("reward_models.vqa:Edit", {"model": SMOLVLM}),
    "keep": keep,
    "variety": variety,
}
for name in ("facts", "correct", "clean", "near", "many"):  # for captions of the tiny model
    REWARDS[name] = f"{TINY_JUDGE}:{name}"


@dataclass
class Reward:
    """What an item of --reward names, NAME[=FOLDER][:WEIGHT] or my_file.py:function[:WEIGHT]."""

    source: str  # the item without its weight
    weight: float = 1.0
    function: Callable | None = None  # once it is loaded

    @property
    def own(self):
        """The file of the user's that it is in, or ""."""
        return self.source.rpartition(":")[0] if ".py:" in self.source else ""

    def load(self):
        """Once. A class is made an object, without arguments."""
        if self.function is None:
            name, _, folder = self.source.partition("=")
            function = self.source if self.own else REWARDS[name]
            if isinstance(function, str):
                function = load_from_file(function)
            elif isinstance(function, tuple):
                make, sources = function
                sources = {part: folder or source for part, source in sources.items()}
                function = resolve_name(make)(**sources)
            self.function = function() if inspect.isclass(function) else function
        return self

    @property
    def parameters(self):
        # A torch module has those of its forward.
        function = getattr(self.function, "forward", self.function)
        return inspect.signature(function).parameters.values()

    def __call__(self, **given):
        """With all that is given, if it takes **kwargs; else with what it has parameters for."""
        if all(each.kind != each.VAR_KEYWORD for each in self.parameters):
            given = {each.name: given[each.name] for each in self.parameters if each.name in given}
        answer = self.function(**given)
        return RUNNER.run(answer) if inspect.iscoroutine(answer) else answer


# One event loop for all calls: a client that a reward keeps is bound to the loop of its first.
RUNNER = asyncio.Runner()


def parse_rewards(spec):
    """'ssim,clip=folder:0.5' -> {"ssim": Reward("ssim"), "clip": Reward("clip=folder", 0.5)}.

    'none' -> {}. The names are what people read, 'my.py:f' for 'a/my.py:f'; each has one reward.
    UserError for what can be known to be wrong before anything loads.
    """
    rewards = {}
    for item in spec.split(","):
        if item.strip() not in ("", "none"):
            number = r"-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?"
            source, weight = re.fullmatch(rf"\s*(.+?)(?::({number}))?\s*", item).groups()
            name, reward = source.partition("=")[0], Reward(source, float(weight or 1))
            if reward.own:
                name = PureWindowsPath(source).name
            elif name not in REWARDS:
                known = f"known: {', '.join(sorted(REWARDS))}; your own: file.py:function"
                raise UserError(f"unknown reward {name!r}; {known}")
            if name in rewards:
                raise UserError(f"two rewards are named {name!r}: rename or leave out one of them")
            rewards[name] = reward
    return rewards


def check_parameters(reward, columns, file):
    """UserError if it has a parameter that prompts of a file, with these columns, do not fill.

    One with a default may be left out.
    """
    known = "images", "prompts", "targets", "group_size", *columns
    for each in reward.parameters:
        any_number = each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        if each.default is each.empty and not any_number and each.name not in known:
            words = f"reward {reward.source!r} asks for {each.name!r}; for prompts of {file} "
            raise UserError(f"{words}there are {', '.join(known)} (docs/rewards.md)")


@torch.no_grad()
def score(rewards, images, prompts):
    """The raw values of each reward, {name: (N*G,) float32}, NaN where it does not apply.

    Args:
        rewards: {name: Reward}.
        images: N*G PIL images, prompt after prompt.
        prompts: N Prompts (inputs/prompts.py): text, target, and in row what else rewards may get.

    Raises UserError for infinity, or what is not a number per picture, and what a reward raises.
    """
    group_size = len(images) // len(prompts)  # G
    of_prompts = [{**each.row, "prompts": each.text, "targets": each.target} for each in prompts]
    rows = [row for row in of_prompts for _ in range(group_size)]
    given = {name: [row[name] for row in rows] for name in rows[0]} | {"images": images}
    values = {}
    for name, reward in rewards.items():
        # Copies: no other reward sees what one does to its pictures, such as image.thumbnail().
        copies = {key: [deepcopy(x) for x in column] for key, column in given.items()}
        answer = reward(**copies | {"group_size": group_size})
        try:
            numbers = [math.nan if x is None else float(x) for x in answer]
            # A reward's file may have set another default.
            values[name] = torch.tensor(numbers, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):  # of no list, or of what is no number
            values[name] = torch.tensor(math.inf)
        if values[name].shape != (len(images),) or values[name].isinf().any():
            wanted = f"{len(images)} finite numbers, one per picture"
            answer = " ".join(str(answer).split())
            raise UserError(f"reward {name!r} has to return {wanted}, not {answer:.60}")
    return values


def weights_of(rewards):
    return {name: reward.weight for name, reward in rewards.items()}


def combine(rewards, weights, group_size, how=None):
    """Several rewards as one, (N*G,) float32: the weighted sum of those that apply to a sample.

    Args:
        rewards: {name: (N*G,) float}. Where one does not apply it is NaN, and counts as the mean of
            its group: it neither helps nor harms. A sample to which none applies gets NaN.
        weights: {name: float}. A reward with weight 0 does not count.
        how: "sum" adds the values as they are, so the reward with the largest spread rules;
            "zscore" first turns each into its z-score within its group, so weights alone decide.
            Where z-scores cancel, the sum is exactly 0. None: "zscore" for several.
    """
    weights = {name: weight for name, weight in weights.items() if weight}
    how = how or ("zscore" if len(weights) > 1 else "sum")
    weight = torch.tensor([*weights.values()], dtype=torch.double)[:, None, None]  # (R, 1, 1)
    values = torch.stack([rewards[name] for name in weights]).double()  # (R, N*G)
    applies, groups = ~values.isnan(), values.unflatten(1, (-1, group_size))  # (R, N, G)
    if how == "sum":
        means = groups.nanmean(-1, keepdim=True)  # (R, N, 1)
        total = (weight * groups.where(~groups.isnan(), means).nan_to_num(0)).sum(0)  # (N, G)
    else:  # not by compute_advantages: another loss may edit that
        pairs = [centre_groups(row, group_size) for row in values]
        scores = torch.stack([centred / std.where(std > 0, 1) for centred, std in pairs])
        total = (weight * scores.nan_to_num(0)).sum(0)  # (N, G)
        # Where z-scores cancel, rounding is left, which advantages would make as large as any
        # spread. Rewards are float32: 21.3 and 21.8 are known to 3e-6 of their std.
        total[total.abs().amax(1) < 1e-5 * weight.abs().sum()] = 0
    total = total.flatten()
    return total.where(applies.any(0), math.nan).float()
