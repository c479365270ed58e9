"""Rewards: functions that look at pictures and say how good they are.

A reward is `f(images, prompts, targets) -> float tensor (N,)`: higher is better, NaN is "does not
apply". It gets N PIL images, the N prompts that they were painted for, and N PIL images that they
should resemble (None where there is none), or None. With a parameter `sources` it also gets the N
PIL images that they are edits of, or None.
Add yours to REWARDS, further down in this file, or keep it in a file of your own and name it on the
command line:

    python train.py --reward lpips:0.4,ssim:0.2,text:0.3,aesthetic:0.1    # a weight left out is 1
    python train.py --reward my_rewards.py:blueness      # runs that file: use only files you trust
    python train.py --reward clip=path/to/folder:0.5     # weights from a folder, not from the network

Make a reward `async def` if it waits, as for a judge behind HTTP (examples/my_reward.py). It is
then asked about the pictures of each prompt while the next are painted. All such calls share one
event loop in a thread of its own, so what computes belongs in `await asyncio.to_thread(...)`: off
the GPU, where the decoder is at work, and without torch's random numbers, which could come in any
order.

The order of calls: parse_rewards loads each reward, once. In a step, begin_scoring starts the
`async def` ones for each prompt; score calls the others for all prompts, then waits. Both go
through call_reward, which turns an error into one line, and with_its_arguments, which calls your
function with copies. combine makes them one number per picture.

Models load once, when named, from where REWARDS says. With NAME=FOLDER, that folder must hold all
files of the row.
"""

import asyncio
import functools
import inspect
import json
import math
import re
import runpy
import sys
import sysconfig
import textwrap
import threading
import traceback
import unicodedata
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from transformers import CLIPModel, CLIPProcessor
from transformers.utils import cached_file

from grpo import centre_groups

# ---- likeness to a target ------------------------------------------------------------------------


class NoTargets(ValueError):
    """A reward compares with pictures, and the run has none."""


def to_tensor(image, size=None):
    """A PIL image as (3, height, width) float32 in 0..1, resized to `size` (width, height) if its
    own differs."""
    image = image.convert("RGB").resize(size or image.size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def against_targets(name, measure, images, targets, kind="target"):
    """`measure` of each image and its target, as tensors of the image's size: (N,), NaN where the
    target is None."""
    if targets is None:
        flags = {"target": "--targets, or --eval-targets", "source": "--sources, or --eval-sources"}
        advice = f"give {flags[kind]}, a folder, or a reward that needs none, such as examples/my_reward.py:blueness"
        raise NoTargets(f"reward '{name}' compares with {kind} pictures: {advice}")
    pairs = zip(images, targets, strict=True)
    return torch.tensor(
        [math.nan if b is None else measure(to_tensor(a), to_tensor(b, a.size)) for a, b in pairs]
    )


def mse(images, prompts, targets):
    """Negative mean squared error, pixels in 0..1: 0 for a perfect copy, -1 at worst."""
    return against_targets("mse", lambda a, b: -(a - b).square().mean(), images, targets)


def ssim(images, prompts, targets):
    """Structural similarity in -1..1, 1 for a perfect copy (Wang et al. 2004, eq. 13): see
    ssim_map."""
    return against_targets("ssim", lambda a, b: ssim_map(a, b).mean(), images, targets)


def keep(images, prompts, targets, sources):
    """Structural similarity to the picture that was edited. A small weight keeps a model from
    repainting all of it."""
    return against_targets("keep", lambda a, b: ssim_map(a, b).mean(), images, sources, "source")


def ssim_map(a, b):
    """Local similarity of mean, contrast and structure under a Gaussian window of 11x11 pixels,
    sigma 1.5.

    (3, H, W) and (3, H, W), values in 0..1 -> (3, H-10, W-10): only where the whole window lies
    inside. A flat patch is judged by its mean alone, so a blank picture scores on the background
    and nowhere else.
    """
    x = torch.arange(11, dtype=a.dtype) - 5
    window = (-(x**2) / (2 * 1.5**2)).softmax(0).expand(3, 1, 1, 11)
    maps = torch.stack(
        [a, b, a * a, b * b, a * b]
    )  # (5, 3, H, W), blurred along rows, then along columns
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = F.conv2d(
        F.conv2d(maps, window, groups=3), window.mT, groups=3
    )
    var_a, var_b, covariance = mean_aa - mean_a**2, mean_bb - mean_b**2, mean_ab - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2  # the paper's K1, K2 for a range of 1
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return luminance * (2 * covariance + c2) / (var_a + var_b + c2)


@contextmanager
def lend_gpu(model):
    """Lends the GPU, if there is one, to a model while it scores: policy and decoder need the
    memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    homes = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, home in homes:
            tensor.data = home.to(device)
        with torch.no_grad():
            yield device
    finally:
        for (
            tensor,
            home,
        ) in homes:  # the copies are dropped: weights that have not changed need no way back
            tensor.data = home


# Written out here because the usual packages need torchvision, of which they use only five
# convolutions of AlexNet.
class Lpips(torch.nn.Module):
    """Negative LPIPS 0.1, 0 for a perfect copy (Zhang et al. 2018, eq. 1). Needs sides of 32 pixels
    or more."""

    def __init__(self, alexnet, heads):
        super().__init__()
        alexnet, heads = _weights(alexnet, "alexnet-owt-7be5be79.pth"), _weights(heads, "alex.pth")
        self.kernels = torch.nn.ParameterList(
            alexnet[f"features.{n}.weight"] for n in (0, 3, 6, 8, 10)
        )
        self.biases = torch.nn.ParameterList(
            alexnet[f"features.{n}.bias"] for n in (0, 3, 6, 8, 10)
        )
        self.heads = torch.nn.ParameterList(
            heads[f"lin{n}.model.1.weight"] for n in range(5)
        )  # (1, channels, 1, 1)

    def forward(self, images, prompts, targets):
        with lend_gpu(self) as device:
            return against_targets(
                "lpips", lambda a, b: -self.distance(a.to(device), b.to(device)), images, targets
            )

    def distance(self, a, b):
        """(3, H, W) and (3, H, W), values in 0..1 -> scalar, 0 or more: weighted differences of
        unit features."""
        shift, scale = (
            torch.tensor([[-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]]).to(a).view(2, 3, 1, 1)
        )
        x = (torch.stack([a, b]) * 2 - 1 - shift) / scale
        total = 0
        for n, (kernel, bias, head) in enumerate(
            zip(self.kernels, self.biases, self.heads, strict=True)
        ):
            x = F.max_pool2d(x, 3, stride=2) if n in (1, 2) else x
            x = F.conv2d(
                x, kernel, bias, stride=(4, 1, 1, 1, 1)[n], padding=(2, 2, 1, 1, 1)[n]
            ).relu()  # (2, C, h, w)
            unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
            total += F.conv2d((unit[:1] - unit[1:]).square(), head).mean()
        return total


def _weights(source, file):
    if source.startswith("https://"):
        return torch.hub.load_state_dict_from_url(
            source, map_location="cpu", check_hash=True, weights_only=True
        )
    return torch.load(cached_file(source, file), map_location="cpu", weights_only=True)


# ---- text in the picture -------------------------------------------------------------------------

# The quotation marks between which GLM-Image's pipeline finds text to paint (get_glyph_texts),
# except that a single one beside a letter is an apostrophe in scripts that have apostrophes, Latin
# to Hebrew; in Chinese, quotes touch letters.
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
    """Fewest letters to insert, delete or replace until `pattern` stands somewhere in `text`
    (Sellers 1980)."""
    row = [0] * (len(text) + 1)  # it may start anywhere ...
    for i, letter in enumerate(pattern):
        above, row = row, [i + 1]
        for j, other in enumerate(text):
            row.append(min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1))
    return min(row)  # ... and end anywhere


class Text:
    """Share of the quoted letters and digits that an OCR reads, in 0..1; NaN where the prompt
    quotes none.

    Each string counts 1 - distance / length, weighted by its length. Text that nobody asked for
    costs nothing. The OCR runs on the CPU, in a thread, while the decoder paints.
    """

    def __init__(self):
        from rapidocr import RapidOCR

        fast = {
            "Global.use_cls": False,
            "Det.limit_type": "max",
            "Det.limit_side_len": 736,
        }  # three times faster
        fast |= {
            f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")
        }
        self.ocr = RapidOCR(params={"Global.log_level": "error", **fast})
        self.ocr(Image.new("RGB", (64, 64)))  # it loads its models with the first picture
        self.turn = asyncio.Lock()  # it keeps state while it reads

    async def __call__(self, images, prompts, targets):
        async with self.turn:
            return await asyncio.to_thread(self.accuracies, images, prompts)

    def accuracies(self, images, prompts):
        return torch.tensor(
            [self.accuracy(image, quoted(p)) for image, p in zip(images, prompts, strict=True)]
        )

    def accuracy(self, image, strings):
        wanted = [letters_and_digits(string) for string in strings]
        if not any(wanted):
            return math.nan
        read = letters_and_digits(
            "".join(self.ocr(image.convert("RGB")).txts or ())
        )  # a string may run over lines
        return 1 - sum(infix_distance(string, read) for string in wanted) / sum(map(len, wanted))


# ---- CLIP and its relatives ----------------------------------------------------------------------


CHINESE = re.compile("[\u4e00-\u9fff]")


def _pretrained(kind, source, dtype):
    model, report = kind.from_pretrained(
        source, dtype=dtype, weights_only=True, output_loading_info=True
    )
    if report["missing_keys"]:  # which transformers fills with noise
        raise ValueError(f"{source} lacks {min(report['missing_keys'])}")
    return model


@functools.cache  # clip and aesthetic share one
def _clip(model, processor):
    return _pretrained(CLIPModel, model, torch.float32), CLIPProcessor.from_pretrained(processor)


class Clip:
    """Cosine of picture and prompt, in -1..1 (Radford et al. 2021). Prompts are cut at 77 tokens.

    PickScore (Kirstain et al. 2023) and HPS v2 (Wu et al. 2023) are this with other weights, up to
    a constant factor. All three only know English, so Chinese prompts get NaN, unless the model is
    from a folder.
    """

    def __init__(self, model, processor):
        self.model, self.processor = _clip(model, processor)
        self.reads_chinese = Path(model).is_dir()

    def __call__(self, images, prompts, targets):
        read = torch.tensor(
            [self.reads_chinese or CHINESE.search(prompt) is None for prompt in prompts]
        )
        return F.cosine_similarity(*self.embed(images, prompts)).where(read, math.nan)

    def embed(self, images, prompts):
        """Unit vectors of pictures and prompts, (N, D) both."""
        fit = {"padding": True, "truncation": True, "max_length": 77}
        inputs = self.processor(text=list(prompts), images=list(images), return_tensors="pt", **fit)
        with lend_gpu(self.model) as device:
            output = self.model(**inputs.to(device))
        return output.image_embeds.cpu(), output.text_embeds.cpu()


class Aesthetic(Clip):
    """LAION's aesthetic predictor, about 1..10: linear layers on CLIP's picture vector (Schuhmann
    et al. 2022)."""

    def __init__(self, clip, head):
        super().__init__(clip, clip)
        self.reads_chinese = True  # it reads no prompt
        weights = _weights(head, "aesthetic-model.pth")
        numbers = sorted(
            {int(key.split(".")[1]) for key in weights}
        )  # gaps: dropout, which only training has
        self.layers = [
            (weights[f"layers.{n}.weight"], weights[f"layers.{n}.bias"]) for n in numbers
        ]

    def __call__(self, images, prompts, targets):
        x, _ = self.embed(images, prompts)
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
        return x.squeeze(1)


# ---- questions to a vision-language model --------------------------------------------------------

SMOLVLM = "HuggingFaceTB/SmolVLM-Instruct"
QUESTIONS = Path(__file__).parent / "prompts" / "questions.jsonl"
AT_ONCE = 8  # pictures per forward pass; a picture counts once per question


class Vqa:
    """How sure a vision-language model is of the right answers about a picture, in 0..1: the mean
    over the questions.

    Every prompt gets the question whether the picture shows it (VQAScore, Lin et al. 2024), and
    those that a file has for it, each about one thing: questions that a right picture answers by
    yes, and foils that it answers by no ("Is the carrot orange?" for a purple one), or any picture
    would please a model that agrees with everything.

    A question counts sigmoid(odds / 2), where odds are the log-odds of the right answer. Raw
    log-odds would pay as much for making a sure answer surer (+5 to +9) as for correcting a wrong
    one (-2 to +2); the sigmoid pays .06 and .46. log P has no floor: one question that no picture
    passes would rule the mean. The odds are halved because P itself, which Soft-TIFA (Kamath et al.
    2025) averages, is near 0 or 1 for most pictures, and equal rewards teach nothing.

    model: folder or hub id of an AutoModelForImageTextToText with a chat template. questions: see
    read_questions. SmolVLM only knows English, so Chinese prompts get NaN unless the file has
    (English) questions for them.
    """

    def __init__(self, model, questions=QUESTIONS):
        self.questions = read_questions(questions)
        self.reads_chinese = model != SMOLVLM
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        self.model = _pretrained(transformers.AutoModelForImageTextToText, model, dtype)
        self.processor = transformers.AutoProcessor.from_pretrained(model)
        tokenizer = self.processor.tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.yes = answer_ids(tokenizer, "yes")
        self.no = answer_ids(tokenizer, "no")
        if self.processor.chat_template is None or not (self.yes and self.no):
            raise ValueError(
                "it cannot be asked: it has no chat template, or no tokens for yes and no"
            )

    def __call__(self, images, prompts, targets):
        return self.means([[image] for image in images], prompts)

    def means(self, shown, prompts):
        """N lists of pictures shown together, N prompts -> (N,) float32: NaN where nothing is
        asked."""
        return torch.stack([values.mean() for values in self.values(shown, prompts)])

    def answers(self, image, prompt):
        """{question: value in 0..1} for one picture, to look at: near 1 if the picture is right,
        for foils too."""
        (values,) = self.values([[image]], [prompt])
        return dict(zip(self.about(prompt), values.tolist(), strict=True))

    def about(self, prompt):
        """{question: 1 where a right picture answers yes, -1 where it answers no}, the general one
        first."""
        prompt = prompt.strip()
        own = self.questions.get(prompt, {})
        if CHINESE.search(prompt) and not self.reads_chinese:
            return own
        unnested = prompt.replace('"', "'")  # the question puts the whole prompt in double quotes
        return {f'Does this image show "{unnested}"?': 1} | own

    def values(self, shown, prompts):
        """N lists of pictures shown together, N prompts -> N of (questions,) float32 on the CPU, in
        0..1."""
        about = [self.about(prompt) for prompt in prompts]
        asked = [
            (pictures, question)
            for pictures, each in zip(shown, about, strict=True)
            for question in each
        ]
        size = AT_ONCE // len(shown[0])
        with preparing_once(self.processor.image_processor), lend_gpu(self.model) as device:
            odds = [
                self.log_odds(asked[at : at + size], device) for at in range(0, len(asked), size)
            ]
        signs = torch.tensor([float(sign) for each in about for sign in each.values()])
        return (
            (signs * torch.cat([torch.zeros(0), *odds]) / 2).sigmoid().split(list(map(len, about)))
        )

    def log_odds(self, asked, device):
        """B of (pictures, question) -> (B,) float32 on the CPU, from the first token of each
        answer, in one pass."""

        def chat(shown, question):
            words = [{"type": "image"}] * len(shown)
            words.append({"type": "text", "text": f"{question} Please answer Yes or No."})
            return self.processor.apply_chat_template(
                [{"role": "user", "content": words}], add_generation_prompt=True
            )

        inputs = self.processor(
            text=[chat(*each) for each in asked],
            images=[shown for shown, _ in asked],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        options = {
            "logits_to_keep": 1,
            "use_cache": False,
        }  # a cache would take 2.4 GB, and nothing reads it
        logits = (
            self.model(**inputs.to(device, self.model.dtype), **options).logits[:, -1].float()
        )  # (B, V)
        return (logits[:, self.yes].logsumexp(-1) - logits[:, self.no].logsumexp(-1)).cpu()


class Edit(Vqa):
    """How sure a vision-language model is that a picture was edited as asked, and nothing else was,
    in 0..1.

    It sees source and result in one chat and gets two questions (Edit-R1, Li et al. 2025, asks for
    a grade). The mean of their values, see Vqa: a picture left as it was gets half.
    """

    def __call__(self, images, prompts, targets, sources):
        if sources is None:
            raise NoTargets("reward 'edit' judges edits: give --sources, or another reward")
        return self.means(list(zip(sources, images, strict=True)), prompts)

    def about(self, prompt):
        if CHINESE.search(prompt) and not self.reads_chinese:
            return {}
        done = prompt.strip().replace('"', "'")
        return {
            f'Has the first picture been changed as asked: "{done}"?': 1,
            "Is everything else in the second picture as it was in the first?": 1,
        }


@contextmanager
def preparing_once(processor):
    """Makes an image processor prepare each picture once, not once per question: SmolVLM's cuts it
    into 17 tiles.

    Pictures of several sizes are prepared together as before, because they are padded to one size.
    """
    preprocess = processor.preprocess
    prepared = {}  # {ids of the pictures shown together: BatchFeature}

    def once(images, **options):  # B lists of pictures shown together
        if len({picture.size for shown in images for picture in shown}) > 1:
            return preprocess(images, **options)
        rows = []
        for shown in images:
            ids = tuple(map(id, shown))
            prepared[ids] = prepared.get(ids) or preprocess([shown], **options)
            rows.append(prepared[ids])
        join = lambda parts: (
            torch.cat(parts)
            if torch.is_tensor(parts[0])
            else [row for part in parts for row in part]
        )
        return type(rows[0])({name: join([row[name] for row in rows]) for name in rows[0]})

    processor.preprocess = once
    try:
        yield
    finally:
        processor.preprocess = preprocess


def answer_ids(tokenizer, word):
    """The ids of tokens that an answer may begin with, each once; a space alone begins no
    answer."""
    spellings = [word.title(), word, f" {word.title()}", f" {word}"]
    ids = {tokenizer(spelling, add_special_tokens=False).input_ids[0] for spelling in spellings}
    return sorted(i for i in ids if word.startswith(tokenizer.decode([i]).strip().lower() or " "))


def read_questions(path):
    """{prompt: {question: 1, foil: -1}} from lines {"prompt": "...", "questions": ["...?"],
    "foils": ["...?"]}."""
    found = {}
    for line in filter(None, Path(path).read_text(encoding="utf-8-sig").split("\n")):
        row = json.loads(line)
        signs = dict.fromkeys(row["questions"], 1) | dict.fromkeys(row.get("foils", []), -1)
        found.setdefault(row["prompt"].strip(), {}).update(signs)
    return found


# ---- from the command line to one number per picture ---------------------------------------------

CLIP_L = "openai/clip-vit-large-patch14"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
ALEXNET = "https://download.pytorch.org/models/alexnet-owt-7be5be79.pth"
LPIPS_HEADS = (
    "https://github.com/richzhang/PerceptualSimilarity/raw/master/lpips/weights/v0.1/alex.pth"
)
REWARDS = {  # name: a function, or what to make and where its weights come from unless NAME=FOLDER says otherwise
    "mse": mse,
    "ssim": ssim,
    "keep": keep,
    "lpips": (Lpips, {"alexnet": ALEXNET, "heads": LPIPS_HEADS}),
    "text": (Text, {}),
    "clip": (Clip, {"model": CLIP_L, "processor": CLIP_L}),
    "pickscore": (Clip, {"model": "yuvalkirstain/PickScore_v1", "processor": CLIP_H}),
    "hps": (Clip, {"model": "adams-story/HPSv2-hf", "processor": CLIP_L}),
    "aesthetic": (Aesthetic, {"clip": CLIP_L, "head": "trl-lib/ddpo-aesthetic-predictor"}),
    "vqa": (Vqa, {"model": SMOLVLM}),
    "edit": (Edit, {"model": SMOLVLM}),
}


def split_spec(spec):
    """'ssim:1,clip=folder:0.5' -> [("ssim", 1.0), ("clip=folder", 0.5)]: each reward's source and
    weight."""
    found = []
    for item in filter(None, (part.strip() for part in spec.split(","))):
        source = item
        weight = 1.0
        head, _, last = item.rpartition(":")
        with suppress(
            ValueError
        ):  # if it is no number it belongs to the name, as does a function called inf
            source, weight = (item, 1.0) if head.endswith(".py") else (head or item, float(last))
        found.append((source, weight))
    return found


def parse_rewards(spec):
    """'ssim:1,clip=folder:0.5' -> {"ssim": (function, 1.0), "clip=folder": (function, 0.5)}: named
    as written.

    Raises ValueError, in one line, for a reward that is unknown, named twice or cannot be loaded,
    and a wrong weight.
    """
    rewards = {}
    for source, weight in split_spec(spec):
        if not torch.tensor(weight).isfinite():
            raise ValueError(f"the weight of reward {source!r} is {weight}")
        if source in rewards:
            raise ValueError(f"reward {source!r} is named twice")
        name, _, folder = source.partition("=")
        if isinstance(REWARDS.get(name), tuple):  # only models take a folder
            rewards[source] = _load_model(name, folder), weight
        else:
            rewards[source] = REWARDS.get(source) or _load_from_file(source), weight
    if not rewards:
        raise ValueError(f"no reward in {spec!r}; known rewards: {', '.join(sorted(REWARDS))}")
    return rewards


def _load_model(name, folder):
    make, sources = REWARDS[name]
    if folder and not (sources and Path(folder).is_dir()):
        raise ValueError(
            f"reward '{name}' " + (f"finds no folder {folder}" if sources else "takes no folder")
        )
    try:
        return make(**{part: folder or source for part, source in sources.items()})
    except (
        Exception
    ) as error:  # no network, half a download, weights of something else: the same advice helps
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        parts = " and ".join(f"the {part} of {source}" for part, source in sources.items())
        advice = (
            f"put {parts} in a folder: {name}=FOLDER"
            if parts
            else "pip install rapidocr onnxruntime"
        )
        advice = f"{folder} has to hold files like those of {parts}" if folder else advice
        raise ValueError(f"cannot load reward '{name}' ({reason}); {advice}") from error


def _load_from_file(name):
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(
            f"unknown reward {name!r}; known: {', '.join(sorted(REWARDS))}; your own: file.py:function"
        )
    places = (
        Path(path),
        Path(__file__).parent / path,
    )  # named from this project's folder, it is found from any other
    file = next(filter(Path.is_file, places), None)
    if file is None:
        raise ValueError(f"the reward file {path} does not exist")
    sys.path.append(str(file.resolve().parent))  # so that it can import the files beside it
    try:
        names = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the reward file {path} cannot be loaded: {in_one_line(error)}"
        ) from error
    if function not in names or not callable(names[function]):
        raise ValueError(f"{path} has no function {function!r}")
    return names[function]


def in_one_line(error):
    """'ZeroDivisionError: division by zero (my_reward.py, line 12)': the innermost line that is in
    no library."""
    libraries = "<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), __file__
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)
    ]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".splitlines()[0] + place


class RewardError(ValueError):
    """A reward failed, or gave values that nothing can be learned from; the message names it and
    the prompts."""


def score(rewards, images, prompts, targets, sources=None, begun=None):
    """The raw values of each reward, {name: (N*M,)}. Raises what call_reward raises.

    images: M for each of the N prompts, prompt after prompt. targets, sources: N, or None. begun:
    what `begin_scoring` returned for these pictures, prompt after prompt; None: rewards that are
    `async def` begin here, with all of them.
    """
    begun = begun or [begin_scoring(rewards, images, prompts, targets, sources)]
    values = {}
    for name, (function, _) in rewards.items():
        if name not in begun[0]:
            call = functools.partial(
                with_its_arguments, function, images, prompts, targets, sources
            )
            values[name] = call_reward(name, call, images, prompts)
    values |= {name: torch.cat([part[name]() for part in begun]) for name in begun[0]}
    return {name: values[name] for name in rewards}


def begin_scoring(rewards, images, prompts, targets, sources=None):
    """Starts the rewards that are `async def`: {name: a function that waits for call_reward's
    answer, (N*M,)}."""

    async def call(
        function,
    ):  # with_its_arguments is in here so that a wrong signature is the reward's error, too
        try:
            return await with_its_arguments(function, images, prompts, targets, sources)
        except (
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # would end the loop, and all would wait for ever
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    begun = {}
    for name, (function, _) in rewards.items():
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__):
            future = asyncio.run_coroutine_threadsafe(call(function), event_loop())
            begun[name] = functools.partial(call_reward, name, future.result, images, prompts)
    return begun


@functools.cache
def event_loop():
    """Runs the rewards that are `async def`, in a thread of its own: the caller paints on.

    Two of them that hold torch.no_grad() across an `await` may leave gradients off, in a thread
    that never trains.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def call_reward(name, call, images, prompts):
    """The values of a reward: (N,) float32 on the CPU, NaN where it does not apply.

    call: returns the reward's own answer about these images and prompts. Raises NoTargets, or
    RewardError for a reward that raised, is infinite or is not one number per picture.
    """
    try:
        with torch.no_grad():  # or advantages would carry a reward model's graph
            values = torch.as_tensor(call(), dtype=torch.float32).detach().cpu()
    except (NoTargets, torch.OutOfMemoryError):  # the trainer knows what helps
        raise
    except (Exception, SystemExit) as error:
        names = textwrap.shorten(", ".join(map(repr, dict.fromkeys(prompts))), 200)
        advice = (
            "; give NaN, not None, where it does not apply"
            if "number, not NoneType" in str(error)
            else ""
        )
        raise RewardError(
            f"reward '{name}' failed for {names}: {in_one_line(error)}{advice}"
        ) from error
    if values.shape != (len(images),):
        raise RewardError(
            f"reward '{name}' gave shape {tuple(values.shape)} for {len(images)} images"
        )
    for i in values.isinf().nonzero().flatten().tolist():
        prompt = prompts[i * len(prompts) // len(images)]
        raise RewardError(
            f"reward '{name}' is {values[i].item()} for image {i} (prompt: {prompt!r})"
        )
    return values


def with_its_arguments(function, images, prompts, targets, sources):
    """Calls a reward with copies, which it may draw on or sort: the prompt, target and source of
    each image.

    It gets sources only if it has a parameter of this name.
    """
    copied = lambda x: x.copy() if isinstance(x, Image.Image) else x
    of_each = lambda given: (
        given and [copied(x) for x in given for _ in range(len(images) // len(given))]
    )
    named = (
        {"sources": of_each(sources)} if "sources" in inspect.signature(function).parameters else {}
    )
    return function(of_each(images), of_each(prompts), of_each(targets), **named)


def weights_of(rewards):
    return {name: weight for name, (_, weight) in rewards.items()}


def combine(raw_rewards, weights, group_size=1, how="sum"):
    """Several rewards as one, (N,) float32: the weighted sum of those that apply, NaN for an image
    to which none does.

    raw_rewards: {name: (N,) float}, NaN where one does not apply; prompt after prompt, `group_size`
    each. weights: {name: float} of those that count. how: "sum" adds the values as they are, so the
    reward with the largest spread rules; "zscore" first turns each into its z-score within its
    group, so that the weights alone decide. Training maximises what --combine names; the sum is
    what is printed. Where a reward applies to part of a group, a missing value counts as the
    group's mean: it neither helps nor harms.

    Raises ValueError for an unknown `how`, or values that do not form groups.
    """
    if how not in ("sum", "zscore"):
        raise ValueError(f"rewards are combined by sum or zscore, not {how!r}")
    values = torch.stack([raw_rewards[name] for name in weights])  # (R, N)
    applies = ~values.isnan()
    if how == "zscore":
        groups = [centre_groups(row, group_size) for row in values]
        values = torch.stack(
            [(centred / (std + 1e-6)).nan_to_num(0).flatten().float() for centred, std in groups]
        )
    else:
        means = (
            values.view(len(values), -1, group_size)
            .nanmean(-1)
            .repeat_interleave(group_size, dim=1)
        )  # (R, N)
        values = values.where(applies, means).nan_to_num(0)
    weight = torch.tensor([*weights.values()]).unsqueeze(1)  # (R, 1)
    return (weight * values).sum(0).where(applies.any(0), math.nan)
