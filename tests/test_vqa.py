"""The reward vqa on a tiny random vision-language model: its log-odds against transformers' generate(), means by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
)

import rewards

TEMPLATE = (
    "{% for message in messages %}User:{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
LEMONS = "Exactly five ripe lemons in a row on a pale blue kitchen table, nothing else on it."  # of prompts/train.txt


def build_tokenizer(words):
    special = ["<pad>", "<end>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    special += [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = len(special) + len(alphabet) + 30
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([words] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # without a token for padding


def tiny_model(folder, words="Yes Yes yes yes No No no no", template=TEMPLATE):
    """A random Idefics3, the class of SmolVLM-Instruct, with its processor, saved as the hub has them."""
    tokenizer = build_tokenizer(words)
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=template)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "initializer_range": 0.2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    text = {**layers, **ids, "vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = Idefics3Config(
        text_config={"model_type": "llama", **text},
        vision_config={**layers, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    model.lm_head.weight.data.mul_(4)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("vlm"))


def pictures(*shapes, mode="RGB"):
    pixels = np.random.default_rng(0)
    return [Image.fromarray(pixels.integers(0, 256, (*shape, 3), dtype=np.uint8)).convert(mode) for shape in shapes]


def by_generate(folder, image, question):
    """Log-odds of one question about one picture, without padding, from the scores that generate() returns."""
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": question + " Please answer Yes or No."}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[[image.convert("RGB")]], return_tensors="pt")
    options = {"output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
    (scores,) = model.generate(**inputs, max_new_tokens=1, do_sample=False, **options).scores  # (1, V)
    chances = scores[0].double().softmax(-1)
    sums = []
    for spellings in (("Yes", "yes", " Yes", " yes"), ("No", "no", " No", " no")):
        first = {processor.tokenizer(spelling, add_special_tokens=False).input_ids[0] for spelling in spellings}
        sums.append(sum(chances[i].item() for i in first))
    return np.log(sums[0] / sums[1])


def whole(prompt):
    return f'Does this image show "{prompt}"?'


# ---- log-odds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_log_odds_equal_those_of_generate(folder, monkeypatch, at_once):
    """Whatever the batch and its padding; questions and pictures of several sizes and modes side by side."""
    monkeypatch.setattr(rewards, "AT_ONCE", at_once)
    ((vqa, _),) = rewards.parse_rewards(f"vqa={folder}").values()
    images = [*pictures((64, 64), (48, 80)), *pictures((33, 17), mode="L"), *pictures((64, 64), mode="RGBA")]
    prompts = ["a cat", "a very long prompt " * 5, "x", "a cat"]
    found = rewards.score({"vqa": (vqa, 1.0)}, images, prompts, None)["vqa"]
    expected = [by_generate(folder, image, whole(prompt)) for image, prompt in zip(images, prompts, strict=True)]
    assert np.std(expected) > 0.2 and found.dtype == torch.float32, "a test that tells pictures and prompts apart"
    torch.testing.assert_close(found.double(), torch.tensor(expected), atol=1e-4, rtol=0)
    assert abs(found).max() > 1.05, "log-odds are no probabilities"


def test_the_reward_is_the_mean_over_the_questions_and_the_whole_prompt(folder):
    """Of a prompt with questions beside one without."""
    ((vqa, _),) = rewards.parse_rewards(f"vqa={folder}").values()
    one, two = pictures((64, 64), (64, 64))
    found = vqa([one, two, one], [LEMONS, LEMONS, "no questions about this"], None)
    rows = {json.loads(line)["prompt"]: json.loads(line)["questions"] for line in rewards.QUESTIONS.open()}
    asked = [whole(LEMONS), *rows[LEMONS]]
    assert len(asked) == 7
    for value, image in zip(found[:2].tolist(), (one, two), strict=True):
        assert value == pytest.approx(np.mean([by_generate(folder, image, question) for question in asked]), abs=1e-4)
    assert found[2].item() == pytest.approx(by_generate(folder, one, whole("no questions about this")), abs=1e-4)
    assert found.isfinite().all() and not found.requires_grad


def test_own_questions_for_own_prompts(folder, tmp_path):
    """As the README tells: a file of one's own, in a reward of one's own."""
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a cat", "questions": ["Is it black?"]}\n\n', encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        f"from rewards import Vqa\n\nasked = Vqa({folder!r}, questions={str(tmp_path / 'mine.jsonl')!r})\n"
    )
    (image,) = pictures((64, 64))
    found = rewards.score(rewards.parse_rewards(f"{tmp_path}/mine.py:asked"), [image], ["a cat"], None)["mine.py:asked"]
    expected = np.mean([by_generate(folder, image, question) for question in (whole("a cat"), "Is it black?")])
    assert found.item() == pytest.approx(expected, abs=1e-4)


def test_spellings_that_begin_alike_count_once():
    """A tokenizer of single letters: "Yes" begins with Y, " Yes" with a space, which is no answer."""
    letters = build_tokenizer("a b c d e")
    as_text = lambda word: sorted(letters.convert_ids_to_tokens(rewards.answer_ids(letters, word)))
    assert as_text("yes") == ["Y", "y"] and as_text("no") == ["N", "n"]
    whole_words = build_tokenizer("Yes yes No no")
    found = whole_words.convert_ids_to_tokens(rewards.answer_ids(whole_words, "no"))
    assert len(found) == len(set(found)) >= 3 and all("n" in token.lower() for token in found)
    lower = build_tokenizer("yes no")
    lower.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    assert lower.convert_ids_to_tokens(rewards.answer_ids(lower, "yes")) == ["yes"], "all four are one"


def test_the_model_is_lent_the_gpu_and_given_back(folder, monkeypatch):
    ((vqa, _),) = rewards.parse_rewards(f"vqa={folder}").values()
    lent, lend_gpu = [], rewards.lend_gpu
    monkeypatch.setattr(rewards, "lend_gpu", lambda model: lent.append(model) or lend_gpu(model))
    vqa(pictures((64, 64)), [LEMONS], None)
    assert lent == [vqa.model] and next(vqa.model.parameters()).device.type == "cpu" and torch.is_grad_enabled()


# ---- what cannot be asked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("no template", "no chat template"),
        ("no answer", "no tokens for yes and no"),
        ("no questions", "questions.jsonl"),
        ("bad questions", "JSONDecodeError"),
        ("unlisted questions", "have to be a list"),
        ("empty", "Unrecognized model in"),
    ],
)
def test_a_model_that_cannot_be_asked_is_one_line(tmp_path, monkeypatch, broken, words):
    if broken != "empty":
        tiny_model(tmp_path, template=None if broken == "no template" else TEMPLATE)
    if broken == "no answer":
        monkeypatch.setattr(rewards, "answer_ids", lambda tokenizer, word: [])
    if "questions" in broken:
        make = lambda model: rewards.Vqa(model, tmp_path / "questions.jsonl")
        monkeypatch.setitem(rewards.REWARDS, "vqa", (make, {"model": "hub/id"}))
        if broken == "bad questions":
            Path(tmp_path / "questions.jsonl").write_text("{")
        if broken == "unlisted questions":
            Path(tmp_path / "questions.jsonl").write_text('{"prompt": "a", "questions": "Is it?"}\n\n')
    with pytest.raises(ValueError, match=f"cannot load reward 'vqa' .*{words}") as caught:
        rewards.parse_rewards(f"vqa={tmp_path}")
    assert "\n" not in str(caught.value) and f"{tmp_path} has to hold files like those of the model" in str(
        caught.value
    )
