"""Rewards: functions that look at pictures and say how good they are.

A reward is `f(images, prompts, targets) -> float tensor (N,)`: higher is better, NaN is "does not apply". `images` are N
PIL images, `prompts` the N prompts they were painted for, `targets` N PIL images they should resemble (None where there
is none), or None. Register yours with @reward, or keep it in a file of your own and name it on the command line:

    python train.py --reward lpips:0.4,ssim:0.2,text:0.3,aesthetic:0.1    # a weight left out is 1
    python train.py --reward my_rewards.py:blueness      # runs that file: use only files you trust
    python train.py --reward clip=path/to/folder:0.5     # weights from a folder, not from the network

    mse, ssim, lpips           likeness to the target: in pixels, in local structure, in what AlexNet sees
    text                       whether an OCR reads the words that the prompt puts in quotes
    clip, pickscore, hps       fit to the prompt: CLIP, and two CLIPs tuned to people's choices
    aesthetic                  how pretty people find it, whatever the prompt

Models load once, when named; the table MODELS says from where. A folder given in their place holds all files of its row:
for aesthetic, those of the CLIP model with aesthetic-model.pth among them.
"""

import functools
import importlib.util
import math
import re
import unicodedata
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn import ParameterList
from transformers import CLIPModel, CLIPProcessor
from transformers.utils import cached_file

from grpo import compute_advantages

REWARDS = {}


def reward(function):
    """Register a reward under its own name."""
    REWARDS[function.__name__] = function
    return function


# ---- likeness to a target ------------------------------------------------------------------------------------------


class NoTargets(ValueError):
    """A reward compares with target pictures and there are none."""


class RewardError(ValueError):
    """A reward failed, or is not a number one can learn from; the message names it and the prompt."""


def to_tensor(image, size=None):
    """A PIL image as (3, height, width) float32 in 0..1, resized to `size` (width, height) if it differs."""
    image = image.convert("RGB")
    if size is not None and image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def compare(name, measure, images, targets):
    """`measure` of each image and its target, as tensors of the image's size: (N,), NaN where the target is None."""
    if targets is None:
        raise NoTargets(f"reward '{name}' compares with target pictures: give a folder of them with --targets")
    pairs = zip(images, targets, strict=True)
    return torch.tensor([math.nan if b is None else measure(to_tensor(a), to_tensor(b, a.size)) for a, b in pairs])


@reward
def mse(images, prompts, targets):
    """Negative mean squared error, pixels in 0..1: 0 for a perfect copy, -1 at worst."""
    return compare("mse", lambda a, b: -(a - b).square().mean(), images, targets)


@reward
def ssim(images, prompts, targets):
    """Structural similarity in -1..1, 1 for a perfect copy (Wang et al. 2004, eq. 13): see ssim_map."""
    return compare("ssim", lambda a, b: ssim_map(a, b).mean(), images, targets)


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


@contextmanager
def working(model):
    """Lends the GPU, if there is one, to a model while it scores: policy and decoder need the memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model.to(device)
        with torch.no_grad():
            yield device
    finally:
        model.to("cpu")


class Lpips(torch.nn.Module):
    """Negative LPIPS 0.1, 0 for a perfect copy (Zhang et al. 2018, eq. 1). Needs sides of 32 pixels or more.

    Written out, for the usual packages need torchvision and use nothing of it but five convolutions of AlexNet.
    """

    def __init__(self, alexnet, heads):
        super().__init__()
        alexnet, heads = _state_dict(alexnet, "alexnet-owt-7be5be79.pth"), _state_dict(heads, "alex.pth")
        self.kernels = ParameterList(alexnet[f"features.{n}.weight"] for n in (0, 3, 6, 8, 10))
        self.biases = ParameterList(alexnet[f"features.{n}.bias"] for n in (0, 3, 6, 8, 10))
        self.heads = ParameterList(heads[f"lin{n}.model.1.weight"] for n in range(5))  # (1, channels, 1, 1)

    def forward(self, images, prompts, targets):
        with working(self) as device:
            return compare("lpips", lambda a, b: -self.distance(a.to(device), b.to(device)), images, targets)

    def distance(self, a, b):
        """(3, H, W) and (3, H, W), values in 0..1 -> scalar, 0 or more: weighted differences of unit-length features."""
        shift, scale = torch.tensor([[-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]]).to(a).view(2, 3, 1, 1)
        x, total = (torch.stack([a, b]) * 2 - 1 - shift) / scale, 0
        for n, (kernel, bias, head) in enumerate(zip(self.kernels, self.biases, self.heads, strict=True)):
            if n in (1, 2):
                x = F.max_pool2d(x, 3, stride=2)
            x = F.conv2d(x, kernel, bias, stride=(4, 1, 1, 1, 1)[n], padding=(2, 2, 1, 1, 1)[n]).relu()  # (2, C, h, w)
            unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
            total += F.conv2d((unit[:1] - unit[1:]).square(), head).mean()
        return total


def _state_dict(source, file):
    if source.startswith("https://"):
        return torch.hub.load_state_dict_from_url(source, map_location="cpu", check_hash=True, weights_only=True)
    return torch.load(Path(source) / file, map_location="cpu", weights_only=True)


# ---- text in the picture -------------------------------------------------------------------------------------------

# What GLM-Image's pipeline takes for text to paint (get_glyph_texts), except that a single quote beside a letter is an
# apostrophe: in scripts that have them, Latin to Hebrew. In Chinese a quote touches letters too.
LETTER = r"[0-9A-Za-z\u00c0-\u05ff]"
SINGLE = rf"(?<!{LETTER})'((?:[^']|(?<={LETTER})'(?={LETTER}))*)'(?!{LETTER})"
QUOTES = (SINGLE, "“([^“”]*)”", '"([^"]*)"', "「([^「」]*)」")


def quoted(prompt):
    """The strings that a prompt puts in quotes: 'a', “a”, "a" and 「a」."""
    return [text for pattern in QUOTES for text in re.findall(pattern, prompt)]


def letters_and_digits(text):
    """What is left of a text when width, case, spaces and punctuation do not count."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def infix_distance(pattern, text):
    """Fewest letters to insert, delete or replace until `pattern` stands somewhere in `text` (Sellers 1980)."""
    row = [0] * (len(text) + 1)  # it may start anywhere ...
    for i, letter in enumerate(pattern):
        above, row = row, [i + 1]
        for j, other in enumerate(text):
            row.append(min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1))
    return min(row)  # ... and end anywhere


class Text:
    """Share of the quoted letters and digits that an OCR reads, in 0..1; NaN where the prompt quotes none.

    Each string counts 1 - distance / length, weighted by its length. Text that nobody asked for costs nothing.
    """

    def __init__(self):
        from rapidocr import RapidOCR

        # Three times faster than the defaults.
        fast = {"Global.use_cls": False, "Det.limit_type": "max", "Det.limit_side_len": 736}
        fast |= {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        self.ocr = RapidOCR(params={"Global.log_level": "error", **fast})
        self.ocr(Image.new("RGB", (64, 64)))  # only a picture makes it load its models

    def __call__(self, images, prompts, targets):
        return torch.tensor([self.accuracy(image, quoted(p)) for image, p in zip(images, prompts, strict=True)])

    def accuracy(self, image, strings):
        wanted = [letters_and_digits(string) for string in strings]
        length = sum(map(len, wanted))
        if length == 0:
            return math.nan
        lines = self.ocr(image.convert("RGB")).txts or ()  # top to bottom: a string may run over several
        read = letters_and_digits("".join(lines))
        return 1 - sum(infix_distance(string, read) for string in wanted) / length


# ---- CLIP and its relatives ----------------------------------------------------------------------------------------


@functools.cache  # clip and aesthetic share one
def _clip(model, processor):
    clip, report = CLIPModel.from_pretrained(model, dtype=torch.float32, weights_only=True, output_loading_info=True)
    if report["missing_keys"]:  # transformers fills them with noise and goes on
        raise ValueError(f"{model} lacks {min(report['missing_keys'])}")
    return clip, CLIPProcessor.from_pretrained(processor)


class Clip:
    """Cosine of picture and prompt, in -1..1 (Radford et al. 2021). Prompts are cut at 77 tokens.

    PickScore (Kirstain et al. 2023) and HPS v2 (Wu et al. 2023) are this with other weights, up to a constant factor.
    """

    def __init__(self, model, processor):
        self.model, self.processor = _clip(model, processor)

    def __call__(self, images, prompts, targets):
        pictures, texts = self.embed(images, prompts)
        return (pictures * texts).sum(1)

    def embed(self, images, prompts):
        """Unit vectors of pictures and prompts, (N, D) both."""
        fit = {"padding": True, "truncation": True, "max_length": 77}
        inputs = self.processor(text=list(prompts), images=list(images), return_tensors="pt", **fit)
        with working(self.model) as device:
            output = self.model(**inputs.to(device))
        return output.image_embeds.cpu(), output.text_embeds.cpu()


class Aesthetic(Clip):
    """LAION's aesthetic predictor, about 1..10: linear layers on CLIP's picture vector (Schuhmann et al. 2022)."""

    def __init__(self, clip, head):
        super().__init__(clip, clip)
        weights = torch.load(cached_file(head, "aesthetic-model.pth"), map_location="cpu", weights_only=True)
        numbers = sorted({int(key.split(".")[1]) for key in weights})  # gaps: dropout, which only training has
        self.layers = [(weights[f"layers.{n}.weight"], weights[f"layers.{n}.bias"]) for n in numbers]

    def __call__(self, images, prompts, targets):
        x, _ = self.embed(images, prompts)
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
        return x.squeeze(1)


# ---- from the command line to one number a picture -----------------------------------------------------------------

CLIP_L, CLIP_H = "openai/clip-vit-large-patch14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
ALEXNET = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
LPIPS_HEADS = "https://github.com/richzhang/PerceptualSimilarity/raw/master/lpips/weights/v0.1/alex.pth"
MODELS = {  # name: what to make, and where its weights come from unless NAME=FOLDER says otherwise
    "lpips": (Lpips, {"alexnet": ALEXNET, "heads": LPIPS_HEADS}),
    "text": (Text, {}),
    "clip": (Clip, {"model": CLIP_L, "processor": CLIP_L}),
    "pickscore": (Clip, {"model": "yuvalkirstain/PickScore_v1", "processor": CLIP_H}),
    "hps": (Clip, {"model": "adams-story/HPSv2-hf", "processor": CLIP_L}),
    "aesthetic": (Aesthetic, {"clip": CLIP_L, "head": "trl-lib/ddpo-aesthetic-predictor"}),
}


def parse_rewards(spec):
    """'ssim:1,clip=folder:0.5' or 'my_file.py:function:2' -> {name: (function, weight)}.

    Raises:
        ValueError: an unknown reward, one named twice, a weight that is not a number, a file or function that does not
            exist, a package or weights that are missing.
    """
    rewards = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        *head, last = item.split(":")
        try:
            weight, source = (float(last), ":".join(head)) if head else (1.0, item)
        except ValueError:
            weight, source = 1.0, item
        kind, _, folder = source.partition("=")
        name = kind if kind in MODELS else source
        if not math.isfinite(weight):
            raise ValueError(f"the weight of reward {name!r} is {weight}")
        if name in rewards:
            raise ValueError(f"reward {name!r} is named twice")
        rewards[name] = (_load_model(name, folder) if name in MODELS else _load_function(name), weight)
    if not rewards:
        raise ValueError(f"no reward in {spec!r}; known rewards: {', '.join(sorted(REWARDS | MODELS))}")
    return rewards


def _load_model(name, folder):
    make, sources = MODELS[name]
    if folder and not (sources and Path(folder).is_dir()):
        raise ValueError(f"reward '{name}' " + (f"finds no folder {folder}" if sources else "takes no folder"))
    try:
        return make(**{part: folder or source for part, source in sources.items()})
    except Exception as error:  # no network, half a download, weights of something else: mended alike
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        parts = " and ".join(f"the {part} of {source}" for part, source in sources.items())
        mend = f"put {parts} in a folder: --reward {name}=FOLDER" if parts else "pip install rapidocr onnxruntime"
        raise ValueError(f"cannot load reward '{name}' ({reason}); {mend}") from error


def _load_function(name):
    if name in REWARDS:
        return REWARDS[name]
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        known = ", ".join(sorted(REWARDS | MODELS))
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
    """Judge every picture by every reward: their weighted sum (N,), see combine, and the raw values {name: (N,)}.

    Raises:
        NoTargets: a reward compares with targets and there are none.
        RewardError: a reward raised, is infinite, or is not one number a picture.
    """
    parts = {}
    for name, (function, _) in rewards.items():
        values = _judge(name, function, images, prompts, targets)
        if values.shape != (len(images),):
            raise RewardError(f"reward '{name}' gave shape {tuple(values.shape)} for {len(images)} images")
        for i in values.isinf().nonzero().flatten().tolist():
            raise RewardError(f"reward '{name}' is {values[i].item()} for image {i} (prompt: {prompts[i]!r})")
        parts[name] = values
    return combine(parts, {name: weight for name, (_, weight) in rewards.items()}), parts


def _judge(name, function, images, prompts, targets):
    try:
        return torch.as_tensor(function(images, prompts, targets), dtype=torch.float32).cpu()
    except (NoTargets, torch.OutOfMemoryError):
        raise
    except Exception as error:
        about = f"prompt {prompts[0]!r}"
        if len(images) > 1:  # a batch fails as a whole; judged alone, the culprit shows
            for i in range(len(images)):
                _judge(name, function, images[i : i + 1], prompts[i : i + 1], targets and targets[i : i + 1])
            about = f"{len(images)} images together"
        raise RewardError(f"reward '{name}' failed for {about}: {type(error).__name__}: {error}") from error


def combine(parts, weights, group_size=1, how="sum"):
    """Several rewards as one: the weighted sum of those that apply to an image.

    Args:
        parts: {name: (N,) float}, NaN where a reward does not apply; prompt after prompt, `group_size` images each.
        weights: {name: float}.
        how: "sum" adds the values as they are, so the reward with the largest spread rules; "zscore" first turns each
            into its z-score within its group (see compute_advantages), so that the weights alone decide.

    Returns:
        (N,) float32, NaN for an image to which no reward applies.

    Raises:
        ValueError: an unknown `how`, or values that do not form groups.
    """
    if how not in ("sum", "zscore"):
        raise ValueError(f"rewards are combined by sum or zscore, not {how!r}")
    values = torch.stack(list(parts.values()))  # (R, N)
    applies = ~values.isnan()
    if how == "zscore":
        values = torch.stack([compute_advantages(row, group_size) for row in values])
    weight = torch.tensor([weights[name] for name in parts]).unsqueeze(1)  # (R, 1)
    return (weight * values).where(applies, 0).sum(0).where(applies.any(0), math.nan)
