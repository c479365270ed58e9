"""Rewards: functions that look at pictures and say how good they are.

A reward is `f(images, prompts, targets) -> B numbers`: higher is better, NaN is "does not apply".
It gets B PIL images, the B prompts that they were painted for, and B PIL images that they should
resemble (None where there is none). All are its own copies. With a parameter `group_size` it is
told how many images in a row have the same prompt, to compare them with one another. Other
parameters name columns of the prompts (docs/rewards.md). If it has a method `applies(prompt)`, a
run prints at its start how many prompts it does not apply to. It may be `async def`, as for a judge
behind HTTP.
Add yours to REWARDS, further down in this file, or keep it in a file of your own and name it on the
command line:

    python train.py --reward lpips:0.4,ssim:0.2,text:0.3,aesthetic:0.1    # a weight left out is 1
    python train.py --reward my_rewards.py:blueness      # runs that file: use only files you trust
    python train.py --reward clip=path/to/folder:0.5     # weights from a folder, not downloaded

The order of calls: parse_rewards; check, before anything loads; load, once; in a step score, then
combine, which makes the values one number per picture.

Rewards that are models are in reward_models/. Each loads once, when named, from where REWARDS
says. With NAME=FOLDER, that folder must hold all files of the row.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from grpo import centre_groups
from runtime import foreign


class UserError(Exception):
    """An error that the user can fix: shown as one line, exit code 2."""


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


def mse(images, prompts, targets):
    """Negative mean squared error, pixels in 0..1: 0 for a perfect copy, -1 at worst."""
    return against_targets(lambda a, b: -(a - b).square().mean(), images, targets)


def ssim(images, prompts, targets):
    """Structural similarity, at most 1, for a perfect copy (Wang et al. 2004, eq. 13): ssim_map."""
    return against_targets(lambda a, b: ssim_map(a, b).mean(), images, targets)


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


def variety(images, prompts, targets, group_size):
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


# ---- from the command line to one number per picture ---------------------------------------------

CLIP_L = "openai/clip-vit-large-patch14"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
ALEXNET = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
LPIPS_HEADS = (
    "https://github.com/richzhang/PerceptualSimilarity/raw/master/lpips/weights/v0.1/alex.pth"
)
SMOLVLM = "HuggingFaceTB/SmolVLM-Instruct"
TINY_JUDGE = Path(__file__).resolve().parent / "tiny-glm-image" / "check.py"


# Name: a function; its file, which is run when it is named; or a class, imported when it is named,
# and where its weights come from without NAME=FOLDER.
REWARDS = {
    "mse": mse,
    "ssim": ssim,
    "lpips": ("reward_models.lpips:Lpips", {"alexnet": ALEXNET, "heads": LPIPS_HEADS}),
    "text": ("reward_models.text:Text", {}),
    "clip": ("reward_models.clip:Clip", {"model": CLIP_L, "processor": CLIP_L}),
    "pickscore": (
        "reward_models.clip:Clip",
        {"model": "yuvalkirstain/PickScore_v1", "processor": CLIP_H},
    ),
    "hps": (
        "reward_models.clip:Clip",
        {"model": "adams-story/HPSv2-hf", "processor": CLIP_L},
    ),
    "aesthetic": (
        "reward_models.clip:Aesthetic",
        {"clip": CLIP_L, "head": "trl-lib/ddpo-aesthetic-predictor"},
    ),
    "vqa": ("reward_models.vqa:Vqa", {"model": SMOLVLM}),
    "variety": variety,
    # For captions of the tiny model.
    "facts": f"{TINY_JUDGE}:facts",
    "correct": f"{TINY_JUDGE}:correct",
    "clean": f"{TINY_JUDGE}:clean",
    "near": f"{TINY_JUDGE}:near",
    "many": f"{TINY_JUDGE}:many",
}


@dataclass
class Reward:
    """What an item of --reward names, NAME[=FOLDER][:WEIGHT] or my_file.py:function[:WEIGHT]."""

    source: str  # the item without its weight
    weight: float = 1.0
    function: Callable | None = None  # once it is loaded
    own: dict = field(default_factory=dict)  # see apart

    def check(self, target):
        """UserError for what can be known to be wrong before anything loads, or is downloaded.

        target: of the first prompt.
        """
        name, _, folder = self.source.partition("=")
        if folder and not Path(folder).is_dir():
            raise UserError(f"reward {name!r} finds no folder {folder}")
        if name not in REWARDS:
            find_file(self.source)
        if name in ("mse", "ssim", "lpips") and target is None:
            raise UserError(f"reward {name!r} needs --targets, or --eval-targets")

    @property
    def file(self):
        """The file in which it is a function, or None."""
        place = str(REWARDS.get(self.source, self.source))
        return find_file(place) if ".py:" in place else None

    def load(self):
        """Once. A class is made an object, without arguments."""
        if self.function is None:
            name, _, folder = self.source.partition("=")
            function = REWARDS.get(name, self.source)
            file = self.file
            self.own = foreign.CHANGES.setdefault(file or self.source, {})
            with foreign.apart(self.own):
                if file:  # absolute, for its code may have changed the working directory
                    function = load_from_file(f"{file}:{function.rpartition(':')[2]}")
                elif isinstance(function, tuple):
                    function = load_model(name, folder, *function)
                self.function = function() if inspect.isclass(function) else function
        return self

    def __call__(self, /, *given, **more):
        with foreign.apart(self.own):
            return foreign.call(self.function, *given, **more)

    def applies(self, prompt):
        with foreign.apart(self.own):
            return getattr(self.function, "applies", lambda prompt: True)(prompt)

    def asks_for(self, *given):
        """See foreign.py. UserError if it cannot be called like that."""
        try:
            return foreign.asks_for(self.function, *given)
        except TypeError as error:
            words = f"cannot be called as docs/rewards.md says: {error}"
            raise UserError(f"{self.source} {words}") from None


def parse_rewards(spec, others=()):
    """'ssim,clip=folder:0.5' -> {"ssim": Reward("ssim"), "clip": Reward("clip=folder", 0.5)}.

    'none' -> {}. The names are what people read, 'my.py:f' for 'a/my.py:f'. A second reward of one
    name, here or among others, {name: Reward}, has more of its source for a name.
    """
    rewards = {}
    for item in spec.split(","):
        if item.strip() not in ("", "none"):
            number = r"-?\d*\.?\d+(?:e-?\d+)?"
            source, weight = re.fullmatch(rf"\s*(.+?)(?::({number}))?\s*", item).groups()
            source = re.sub("(^|=)~(?=/)", rf"\1{Path.home()}", source)
            if source in [each.source for each in rewards.values()]:
                raise UserError(f"reward {source!r} is named twice: give it one weight")
            parts = source.partition("=")[0].split("/")
            weight = float(weight or 1)
            if not abs(weight) < 1e30:
                raise UserError(f"reward {source!r}: the weight {weight} is too large")
            names = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]
            known = {name: each.source for name, each in {**dict(others), **rewards}.items()}
            name = next((each for each in names if known.get(each, source) == source), source)
            rewards[name] = Reward(source, weight)
    return rewards


def load_model(name, folder, make, sources):
    """UserError, in one line, whatever is wrong: no network, half a download, other weights."""
    try:
        return resolve_name(make)(**{part: folder or source for part, source in sources.items()})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        files = f" ({', '.join(sources.values())})" if sources else ""
        raise UserError(f"cannot load reward {name!r}{files}: {reason}") from error


def find_file(name):
    """The file of my_file.py:function, which is also found beside this one."""
    path = name.rpartition(":")[0]
    if not path.endswith(".py"):
        known = f"known: {', '.join(sorted(REWARDS))}; your own: file.py:function"
        if "/" in name:
            known = "a path ends in .py:function, and has no comma, which ends a reward"
        raise UserError(f"unknown reward {name!r}; {known}")
    file = Path(path) if Path(path).is_file() else Path(__file__).parent / path
    if not file.is_file():
        raise UserError(f"the file {path} does not exist")
    return file.resolve()


def load_from_file(name):
    """my_file.py:function, as a function. The file runs once."""
    file = find_file(name)
    try:
        module = foreign.load_module(file)
    except ModuleNotFoundError as error:
        missing = f"pip install {error.name}, or put {error.name}.py beside it"
        raise UserError(f"cannot run {file} ({error}): {missing}") from error
    function = name.rpartition(":")[2]
    if not hasattr(module, function):
        raise UserError(f"{file} has no function {function!r}")
    return getattr(module, function)


@torch.no_grad()
def score(rewards, images, prompts, targets=None, **more):
    """The raw values of each reward, {name: (N*G,) float32}, NaN where it does not apply.

    Args:
        rewards: {name: Reward}.
        images: N*G PIL images, prompt after prompt.
        prompts, targets: N of each, as all that `more` has for rewards with such parameters.

    Raises UserError for infinity, or what is not a number per picture, and what a reward raises.
    """
    group_size = len(images) // len(prompts)  # G
    columns = {"prompts": prompts, "targets": targets or [None] * len(prompts), **more}
    values = {}
    for name, reward in rewards.items():
        # Copies: what a reward does to them, no other reward sees.
        copies = {"images": [deepcopy(image) for image in images]}
        for key, column in columns.items():
            copies[key] = [deepcopy(x) for x in column for _ in range(group_size)]
        given = [copies.pop(key) for key in ("images", "prompts", "targets")]
        answer = reward(*given, **copies, group_size=group_size)
        try:
            numbers = as_numbers(answer)
        except (TypeError, ValueError, RuntimeError):
            wanted = f"return {len(images)} numbers, one per picture"
            gave = foreign.shortened(answer)
            raise UserError(f"reward {name!r} gave {gave}: {wanted}") from None
        shape, expected = tuple(numbers.shape), (len(images),)
        if shape != expected:
            raise UserError(f"reward {name!r} gave shape {shape}, not {expected}")
        if numbers.isinf().any():
            i = numbers.isinf().nonzero()[0].item()
            prompt = prompts[i // group_size]
            raise UserError(f"reward {name!r} is infinite for image {i}, of {prompt!r}")
        values[name] = numbers
    return values


def as_numbers(answer):
    """A tensor, or numbers of any type, as float32 on the CPU. None is NaN."""
    if isinstance(answer, torch.Tensor):
        # A copy: the reward may use its own tensor again.
        return answer.detach().float().cpu().clone()
    if isinstance(answer, dict | set | str):  # their order, or digits, would be the scores
        raise TypeError("no sequence of numbers")
    numbers = []
    for x in answer:
        if np.ndim(x) > 0:
            raise TypeError("a list in place of a number")
        numbers.append(math.nan if x is None else float(x))
    return torch.tensor(numbers).float()


def weights_of(rewards):
    return {name: reward.weight for name, reward in rewards.items()}


def combine(rewards, weights, group_size=1, how="sum"):
    """Several rewards as one, (N*G,) float32: the weighted sum of those that apply to a sample.

    Args:
        rewards: {name: (N*G,) float}. Where one does not apply it is NaN, and counts as the mean of
            its group: it neither helps nor harms. A sample to which none applies gets NaN.
        weights: {name: float}. A reward with weight 0 does not count.
        how: "sum" adds the values as they are, so the reward with the largest spread rules;
            "zscore" first turns each into its z-score within its group, so weights alone decide.
            Where z-scores cancel, the sum is exactly 0.

    Raises ValueError for an unknown `how`, RuntimeError for values that do not form groups.
    """
    if how not in ("sum", "zscore"):
        raise ValueError(f"rewards are combined by sum or zscore, not {how!r}")
    weights = {name: weight for name, weight in weights.items() if weight}
    values = torch.stack([rewards[name] for name in weights]).double()  # (R, N*G)
    weight = torch.tensor([*weights.values()], dtype=values.dtype).unsqueeze(1)  # (R, 1)
    applies = ~values.isnan()
    if how == "zscore":  # not compute_advantages: another loss may edit that
        groups = [centre_groups(row, group_size) for row in values]
        scores = [centred / std.where(std > 0, 1) for centred, std in groups]
        values = torch.stack(scores).flatten(1)
    else:
        means = values.view(len(values), -1, group_size).nanmean(-1)  # (R, N)
        values = values.where(applies, means.repeat_interleave(group_size, dim=1))
    total = (weight * values.nan_to_num(0)).sum(0)  # (N*G,)
    if how == "zscore":
        # Where z-scores cancel, rounding is left, which advantages would make as large as any
        # spread. Rewards are float32: 21.3 and 21.8 are known to 3e-6 of their std.
        of_groups = total.view(-1, group_size)
        of_groups[of_groups.abs().amax(1) < 1e-5 * weight.abs().sum()] = 0
    return total.where(applies.any(0), math.nan).float()
