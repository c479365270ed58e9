"""Rewards: functions that look at pictures and say how good they are.

A reward is `f(images, prompts, targets) -> float tensor (N,)`: higher is better, NaN is "does not
apply". It gets N PIL images, the N prompts that they were painted for, and N PIL images that they
should resemble (None where there is none). Do not change the pictures: other rewards see them too.
With a parameter `group_size` it is told how many images in a row have the same prompt, to compare
them with one another. If it has a method `applies(prompt)`, a run says at its start for how many
prompts that is False.
Add yours to REWARDS, further down in this file, or keep it in a file of your own and name it on the
command line:

    python train.py --reward lpips:0.4,ssim:0.2,text:0.3,aesthetic:0.1    # a weight left out is 1
    python train.py --reward my_rewards.py:blueness      # runs that file: use only files you trust
    python train.py --reward clip=path/to/folder:0.5     # weights from a folder, not downloaded

Make a reward `async def` if it waits, as for a judge behind HTTP (docs/rewards.md). It is then
asked about the pictures of each prompt while the next are painted. All such calls share one event
loop in a thread of its own, so what computes belongs in `await asyncio.to_thread(...)`: off the
GPU, where the decoder is at work, and without torch's random numbers, which could come in any
order.

The order of calls: check_rewards, before anything loads; parse_rewards, which loads each reward
once; in a step Scoring.add for the pictures of each prompt, then Scoring.values; combine, which
makes the values one number per picture.

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
import threading
import unicodedata
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from transformers import CLIPModel, CLIPProcessor
from transformers.utils import cached_file

from grpo import centre_groups
from runtime import StepFailed, UserError

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


@contextmanager
def lend_gpu(model):
    """Lends the GPU, if any, to a model while it scores: policy and decoder need the memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    homes = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, home in homes:
            tensor.data = home.to(device)
        with torch.no_grad():
            yield device
    finally:
        # The copies are dropped: weights that have not changed need no way back.
        for tensor, home in homes:
            tensor.data = home


# Written out here because the usual packages need torchvision, of which they use only five
# convolutions of AlexNet.
class Lpips(torch.nn.Module):
    """Negative LPIPS 0.1, 0 for a perfect copy (Zhang et al. 2018, eq. 1), from 32x32 pixels on."""

    def __init__(self, alexnet, heads):
        super().__init__()
        alexnet, heads = _weights(alexnet, "alexnet-owt-7be5be79.pth"), _weights(heads, "alex.pth")
        layers = [f"features.{n}" for n in (0, 3, 6, 8, 10)]
        self.kernels = torch.nn.ParameterList(alexnet[f"{layer}.weight"] for layer in layers)
        self.biases = torch.nn.ParameterList(alexnet[f"{layer}.bias"] for layer in layers)
        heads = [heads[f"lin{n}.model.1.weight"] for n in range(5)]  # (1, channels, 1, 1)
        self.heads = torch.nn.ParameterList(heads)

    def forward(self, images, prompts, targets):
        with lend_gpu(self) as device:
            measure = lambda a, b: -self.distance(a.to(device), b.to(device))
            return against_targets(measure, images, targets)

    def distance(self, a, b):
        """(3, H, W) twice, values in 0..1 -> scalar: weighted differences of unit features."""
        constants = torch.tensor([[-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]])
        shift, scale = constants.to(a).view(2, 3, 1, 1)
        x = (torch.stack([a, b]) * 2 - 1 - shift) / scale
        total = 0
        for n, (kernel, bias, head) in enumerate(zip(self.kernels, self.biases, self.heads)):
            x = F.max_pool2d(x, 3, stride=2) if n in (1, 2) else x
            sizes = {"stride": (4, 1, 1, 1, 1)[n], "padding": (2, 2, 1, 1, 1)[n]}
            x = F.conv2d(x, kernel, bias, **sizes).relu()  # (2, C, h, w)
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
    """Fewest letters to insert, delete, replace until `text` contains `pattern` (Sellers 1980)."""
    row = [0] * (len(text) + 1)  # it may start anywhere ...
    for i, letter in enumerate(pattern):
        above, row = row, [i + 1]
        for j, other in enumerate(text):
            row.append(min(above[j] + (letter != other), above[j + 1] + 1, row[j] + 1))
    return min(row)  # ... and end anywhere


class Text:
    """Share of the quoted letters and digits that an OCR reads, 0..1; NaN where none are quoted.

    Each string counts 1 - distance / length, weighted by its length. Text that nobody asked for
    costs nothing. The OCR runs on the CPU, in a thread, while the decoder paints.
    """

    def __init__(self):
        from rapidocr import RapidOCR

        # Three times faster.
        fast = {"Global.use_cls": False, "Det.limit_type": "max", "Det.limit_side_len": 736}
        for kind in ("intra", "inter"):
            fast[f"EngineConfig.onnxruntime.{kind}_op_num_threads"] = 1
        self.ocr = RapidOCR(params={"Global.log_level": "error", **fast})
        self.ocr(Image.new("RGB", (64, 64)))  # it loads its models with the first picture
        self.turn = asyncio.Lock()  # it keeps state while it reads

    def applies(self, prompt):
        return any(map(letters_and_digits, quoted(prompt)))

    async def __call__(self, images, prompts, targets):
        async with self.turn:
            return await asyncio.to_thread(self.accuracies, images, prompts)

    def accuracies(self, images, prompts):
        return torch.tensor([self.accuracy(image, quoted(p)) for image, p in zip(images, prompts)])

    def accuracy(self, image, strings):
        wanted = [letters_and_digits(string) for string in strings]
        if not any(wanted):
            return math.nan
        lines = self.ocr(image.convert("RGB")).txts or ()
        read = letters_and_digits("".join(lines))  # a string may run over lines
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

    def applies(self, prompt):
        return self.reads_chinese or CHINESE.search(prompt) is None

    def __call__(self, images, prompts, targets):
        read = torch.tensor([self.applies(prompt) for prompt in prompts])
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
        weights = _weights(head, "aesthetic-model.pth")
        # There are gaps in their numbers: dropout, which only training has.
        names = sorted({int(key.split(".")[1]) for key in weights})
        self.layers = [(weights[f"layers.{n}.weight"], weights[f"layers.{n}.bias"]) for n in names]

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
    """How sure a vision-language model is of the right answers about a picture, 0..1: their mean.

    Every prompt gets the question whether the picture shows it (VQAScore, Lin et al. 2024), and
    those that a file has for it, each about one thing: questions that a right picture answers by
    yes, and foils that it answers by no ("Is the carrot orange?" for a purple one), or any picture
    would please a model that agrees with everything.

    A question counts sigmoid(odds / 2), where odds are the log-odds of the right answer. Raw log-
    odds would pay as much for making a sure answer surer (+5 to +9) as for correcting a wrong one
    (-2 to +2); the sigmoid pays .06 and .46. log P has no floor: one question that no picture
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
            missing = "no chat template, or no tokens for yes and no"
            raise ValueError(f"it cannot be asked: it has {missing}")

    def applies(self, prompt):
        return bool(self.about(prompt))

    def __call__(self, images, prompts, targets):
        return self.means([[image] for image in images], prompts)

    def means(self, shown, prompts):
        """N lists of pictures shown together, N prompts -> (N,) float32, NaN if none is asked."""
        return torch.stack([values.mean() for values in self.values(shown, prompts)])

    def answers(self, image, prompt):
        """{question: value in 0..1} for a picture, to look at: near 1 if right, for foils too."""
        (values,) = self.values([[image]], [prompt])
        return dict(zip(self.about(prompt), values.tolist()))

    def about(self, prompt):
        """{question: 1 if a right picture answers yes, -1 if no}, the general one first."""
        prompt = prompt.strip()
        own = self.questions.get(prompt, {})
        if CHINESE.search(prompt) and not self.reads_chinese:
            return own
        unnested = prompt.replace('"', "'")  # the question puts the whole prompt in double quotes
        return {f'Does this image show "{unnested}"?': 1} | own

    def values(self, shown, prompts):
        """N lists of pictures shown together, N prompts -> N of (questions,) float32, in 0..1."""
        about = [self.about(prompt) for prompt in prompts]
        asked = [(pictures, question) for pictures, each in zip(shown, about) for question in each]
        size = AT_ONCE // len(shown[0])
        with preparing_once(self.processor.image_processor), lend_gpu(self.model) as device:
            starts = range(0, len(asked), size)
            odds = [self.log_odds(asked[at : at + size], device) for at in starts]
        signs = torch.tensor([float(sign) for each in about for sign in each.values()])
        values = (signs * torch.cat([torch.zeros(0), *odds]) / 2).sigmoid()
        return values.split(list(map(len, about)))

    def log_odds(self, asked, device):
        """B of (pictures, question) -> (B,) float32, of an answer's first token, in one pass."""

        def chat(shown, question):
            words = [{"type": "image"}] * len(shown)
            words.append({"type": "text", "text": f"{question} Please answer Yes or No."})
            messages = [{"role": "user", "content": words}]
            return self.processor.apply_chat_template(messages, add_generation_prompt=True)

        inputs = self.processor(
            text=[chat(*each) for each in asked],
            images=[shown for shown, _ in asked],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        inputs = inputs.to(device, self.model.dtype)
        # A cache would take 2.4 GB, and nothing reads it.
        output = self.model(**inputs, logits_to_keep=1, use_cache=False)
        logits = output.logits[:, -1].float()  # (B, V)
        return (logits[:, self.yes].logsumexp(-1) - logits[:, self.no].logsumexp(-1)).cpu()


@contextmanager
def preparing_once(processor):
    """Makes an image processor prepare each picture once, not once per question.

    SmolVLM's cuts it into 17 tiles. Pictures of several sizes are prepared together as before,
    because they are padded to one size.
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
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        for name, parts in columns.items():
            tensors = torch.is_tensor(parts[0])
            columns[name] = torch.cat(parts) if tensors else [x for part in parts for x in part]
        return type(rows[0])(columns)

    processor.preprocess = once
    try:
        yield
    finally:
        processor.preprocess = preprocess


def answer_ids(tokenizer, word):
    """The ids of tokens that an answer may begin with, each once; a space alone begins none."""
    spellings = [word.title(), word, f" {word.title()}", f" {word}"]
    ids = {tokenizer(spelling, add_special_tokens=False).input_ids[0] for spelling in spellings}
    return sorted(i for i in ids if word.startswith(tokenizer.decode([i]).strip().lower() or " "))


def read_questions(path):
    """{prompt: {question: 1, foil: -1}} of lines {"prompt": "", "questions": [], "foils": []}."""
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
# Name: a function; or what to make, and where its weights come from without NAME=FOLDER.
REWARDS = {
    "mse": mse,
    "ssim": ssim,
    "lpips": (Lpips, {"alexnet": ALEXNET, "heads": LPIPS_HEADS}),
    "text": (Text, {}),
    "clip": (Clip, {"model": CLIP_L, "processor": CLIP_L}),
    "pickscore": (Clip, {"model": "yuvalkirstain/PickScore_v1", "processor": CLIP_H}),
    "hps": (Clip, {"model": "adams-story/HPSv2-hf", "processor": CLIP_L}),
    "aesthetic": (Aesthetic, {"clip": CLIP_L, "head": "trl-lib/ddpo-aesthetic-predictor"}),
    "vqa": (Vqa, {"model": SMOLVLM}),
}


def split_spec(spec):
    """'ssim:1,clip=folder:0.5' -> [("ssim", 1.0), ("clip=folder", 0.5)]; 'none' -> []."""
    pairs = []
    for item in spec.split(","):
        if item.strip() not in ("", "none"):
            name, weight = re.fullmatch(r"\s*(.+?)(?::(-?\d*\.?\d+))?\s*", item).groups()
            pairs.append((name, float(weight or 1)))
    return pairs


def check_rewards(spec, given):
    """UserError for what can be known to be wrong before anything loads, or is downloaded.

    given: see Scoring.add.
    """
    for source, _ in split_spec(spec):
        name, _, folder = source.partition("=")
        if folder and not Path(folder).is_dir():
            raise UserError(f"reward {name!r} finds no folder {folder}")
        if name not in REWARDS:
            find_file(source)
        if name in ("mse", "ssim", "lpips") and given["targets"][0] is None:
            raise UserError(f"reward {name!r} needs --targets, or --eval-targets")


def parse_rewards(spec):
    """'ssim:1,clip=folder:0.5' -> {"ssim": (function, 1.0), "clip=folder": (function, 0.5)}."""
    rewards = {}
    for source, weight in split_spec(spec):
        name, _, folder = source.partition("=")
        function = REWARDS.get(name) or load_from_file(source)
        if isinstance(function, tuple):
            function = load_model(name, folder, *function)
        rewards[source] = function, weight
    return rewards


def load_model(name, folder, make, sources):
    """UserError, in one line, whatever is wrong: no network, half a download, other weights."""
    try:
        return make(**{part: folder or source for part, source in sources.items()})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        files = f" ({', '.join(sources.values())})" if sources else ""
        raise UserError(f"cannot load reward {name!r}{files}: {reason}") from error


def find_file(name):
    """The file of my_file.py:function, which is also found beside this one."""
    path = name.rpartition(":")[0]
    if not path.endswith(".py"):
        known = ", ".join(sorted(REWARDS))
        raise UserError(f"unknown reward {name!r}; known: {known}; your own: file.py:function")
    file = Path(path) if Path(path).is_file() else Path(__file__).parent / path
    if not file.is_file():
        raise UserError(f"the file {path} does not exist")
    return file


def load_from_file(name):
    """my_file.py:function, as a function."""
    file = find_file(name)
    sys.path.append(str(file.resolve().parent))  # so that it can import the files beside it
    names = runpy.run_path(str(file))
    function = name.rpartition(":")[2]
    if function not in names:
        raise UserError(f"{file} has no function {function!r}")
    return names[function]


class Scoring:
    """What rewards say of pictures, which may come prompt by prompt while the next are painted."""

    def __init__(self, rewards):
        self.rewards = rewards  # {name: (function, weight)}
        self.images = []
        self.given = {}
        self.started = {name: [] for name in rewards}  # answers of those that are `async def`

    def add(self, images, **given):
        """M images of each of some prompts; those rewards that are `async def` begin with them.

        given: prompts, targets and what else a reward may have a parameter for, an entry per
        prompt.
        """
        self.group_size = len(images) // len(given["prompts"])  # M
        self.images += images
        for name, column in given.items():
            given[name] = [x for x in column for _ in range(self.group_size)]
            self.given[name] = self.given.get(name, []) + given[name]
        for name, (function, _) in self.rewards.items():
            if any(map(inspect.iscoroutinefunction, (function, function.__call__))):
                answer = self.ask(function, images, given)
                self.started[name].append(asyncio.run_coroutine_threadsafe(answer, event_loop()))

    def ask(self, function, images, given):
        more = {**given, "group_size": self.group_size}
        usual = more.pop("prompts"), more.pop("targets")
        wanted = more.keys() & inspect.signature(function).parameters.keys()
        return function(images, *usual, **{name: more[name] for name in wanted})

    @torch.no_grad()
    def values(self):
        """The raw values of each reward, {name: (N*M,) float32}, NaN where it does not apply.

        StepFailed for infinity, or what is not a number per picture; else what a reward raised.
        """
        values = {}
        for name, (function, _) in self.rewards.items():
            answers = [future.result() for future in self.started[name]]
            answers = answers or [self.ask(function, self.images, self.given)]
            values[name] = torch.hstack([torch.as_tensor(x).float().cpu() for x in answers])
            shape, expected = tuple(values[name].shape), (len(self.images),)
            if shape != expected:
                raise StepFailed(f"reward {name!r} gave shape {shape}, not {expected}")
            for i in values[name].isinf().nonzero().flatten().tolist():
                prompt = self.given["prompts"][i]
                raise StepFailed(f"reward {name!r} is infinite for image {i}, of {prompt!r}")
        return values


@functools.cache
def event_loop():
    """Runs the rewards that are `async def`, in a thread of its own: the caller paints on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def score(rewards, images, prompts, targets=None, **more):
    """The raw values of each reward, {name: (N*M,)}, of pictures that are all there."""
    scoring = Scoring(rewards)
    scoring.add(images, prompts=prompts, targets=targets or [None] * len(prompts), **more)
    return scoring.values()


def weights_of(rewards):
    return {name: weight for name, (_, weight) in rewards.items()}


def combine(rewards, weights, group_size=1, how="sum"):
    """Several rewards as one, (N*G,) float32: the weighted sum of those that apply to a sample.

    Args:
        rewards: {name: (N*G,) float}. Where one does not apply it is NaN, and counts as the mean of
            its group: it neither helps nor harms. A sample to which none applies gets NaN.
        weights: {name: float} of those that count.
        how: "sum" adds the values as they are, so the reward with the largest spread rules;
            "zscore" first turns each into its z-score within its group, so weights alone decide.

    Raises ValueError for an unknown `how`, or values that do not form groups.
    """
    if how not in ("sum", "zscore"):
        raise ValueError(f"rewards are combined by sum or zscore, not {how!r}")
    values = torch.stack([rewards[name] for name in weights])  # (R, N*G)
    applies = ~values.isnan()
    if how == "zscore":
        groups = [centre_groups(row, group_size) for row in values]
        scores = [(centred / (std + 1e-6)).nan_to_num(0) for centred, std in groups]
        values = torch.stack(scores).flatten(1).float()
    else:
        means = values.view(len(values), -1, group_size).nanmean(-1)  # (R, N)
        values = values.where(applies, means.repeat_interleave(group_size, dim=1)).nan_to_num(0)
    weight = torch.tensor([*weights.values()]).unsqueeze(1)  # (R, 1)
    return (weight * values).sum(0).where(applies.any(0), math.nan)
