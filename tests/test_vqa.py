"""The reward vqa on a tiny random vision-language model: log-odds against transformers' generate(),
values by hand."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from conftest import prompts_of
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
from reward_models import vqa as vqa_module
from reward_models.vqa import QUESTIONS, Vqa, answer_ids
from rewards import parse_rewards

TEMPLATE = (
    "{% for message in messages %}User:{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Of prompts/train.txt.
LEMONS = "Exactly five ripe lemons in a row on a pale blue kitchen table, nothing else on it."
TEA = "一张茶馆的木质招牌，上面写着「清风明月共此一壶茶」。"


def build_tokenizer(words):
    special = ["<pad>", "<end>", "<image>", "<fake_token_around_image>", "<end_of_utterance>"]
    special += ["<global-img>"]
    special += [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = len(special) + len(alphabet) + 30
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([words] * 20, trainer)
    # Without a token for padding.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tiny_model(folder):
    """A random Idefics3, the class of SmolVLM-Instruct, with its processor, saved as the hub has
    them."""
    tokenizer = build_tokenizer("Yes Yes yes yes No No no no")
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    layers["initializer_range"] = 0.2
    text = {**layers, "vocab_size": len(tokenizer), "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 1, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = Idefics3Config(
        text_config={"model_type": "llama", **text},
        vision_config={**layers, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
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
    return [
        Image.fromarray(pixels.integers(0, 256, (*shape, 3), dtype=np.uint8)).convert(mode)
        for shape in shapes
    ]


@functools.cache
def load(folder):
    return [auto.from_pretrained(folder) for auto in (AutoModelForImageTextToText, AutoProcessor)]


def by_generate(folder, shown, question):
    """Log-odds of one question about a picture, or a list of them, without padding, from the scores
    that generate() returns."""
    model, processor = load(folder)
    shown = shown if isinstance(shown, list) else [shown]
    question += " Please answer Yes or No."
    content = [*[{"type": "image"}] * len(shown), {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(
        text=[text], images=[[image.convert("RGB") for image in shown]], return_tensors="pt"
    )
    options = {"output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
    (scores,) = model.generate(
        **inputs, max_new_tokens=1, do_sample=False, **options
    ).scores  # (1, V)
    chances = scores[0].double().softmax(-1)
    first = lambda word: processor.tokenizer(word, add_special_tokens=False).input_ids[0]
    chance = lambda *words: chances[[*{*map(first, words)}]].sum().item()
    return np.log(chance("Yes", "yes", " Yes", " yes") / chance("No", "no", " No", " no"))


def whole(prompt):
    return f'Does this image show "{prompt}"?'


def bounded(odds):
    """Independent of the source: the root of P against the sum of the roots of P and 1 - P."""
    yes, no = math.sqrt(1 / (1 + math.exp(-odds))), math.sqrt(1 / (1 + math.exp(odds)))
    return yes / (yes + no)


def with_odds(monkeypatch, vqa, odds):
    """Makes the model answer `odds`: a number, or a function of the image and the question."""
    each = odds if callable(odds) else lambda image, question: odds
    monkeypatch.setattr(
        vqa, "log_odds", lambda asked, device: torch.tensor([float(each(*one)) for one in asked])
    )


def row_file(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# ---- one question --------------------------------------------------------------------------------


def loaded(folder):
    (reward,) = parse_rewards(f"vqa={folder}").values()
    return reward.load()


@pytest.mark.parametrize("at_once", [1, 8])
def test_log_odds_equal_those_of_generate(folder, monkeypatch, at_once):
    """Whatever the batch and its padding; questions and pictures of several sizes and modes side by
    side."""
    monkeypatch.setattr(vqa_module, "AT_ONCE", at_once)
    vqa = loaded(folder).function
    images = [
        *pictures((64, 64), (48, 80)),
        *pictures((33, 17), mode="L"),
        *pictures((64, 64), mode="RGBA"),
    ]
    prompts = ["a cat", "a very long prompt" * 5, "x", "a cat"]
    reward = rewards.Reward("vqa", 1.0, vqa)
    found = rewards.score({"vqa": reward}, images, prompts_of(*prompts))["vqa"]
    expected = [by_generate(folder, image, whole(prompt)) for image, prompt in zip(images, prompts)]
    # A test that tells pictures and prompts apart.
    assert np.std(expected) > 0.2 and found.dtype == torch.float32
    torch.testing.assert_close(
        2 * found.double().logit(), torch.tensor(expected), atol=1e-4, rtol=0
    )


def test_a_question_is_bounded_so_that_an_easy_one_does_not_outweigh_a_hard_one(
    folder, monkeypatch
):
    """The numbers of the docstring."""
    vqa = Vqa(folder)
    one = lambda odds: with_odds(monkeypatch, vqa, odds) or vqa([None], ["a cat"]).item()
    for odds in (-30, -2, 0, 0.5, 9):
        assert one(odds) == pytest.approx(bounded(odds), abs=1e-6)
    differences = one(9) - one(5), one(2) - one(-2)
    assert differences == pytest.approx((0.06, 0.46), abs=0.005)
    assert one(-300) == 0 and one(300) == 1  # of a floor and a ceiling
    assert one(16) > one(12)  # and still apart where P is 1 to five digits


# ---- their mean ----------------------------------------------------------------------------------


def test_the_reward_is_the_mean_over_the_questions_the_foils_and_the_whole_prompt(folder):
    """Of a prompt with questions beside one without; a foil counts by the log-odds of no."""
    vqa = loaded(folder).function
    one, two = pictures((64, 64), (64, 64))
    alone = "no questions about this"
    found = vqa([one, two, one], [LEMONS, LEMONS, alone])
    (row,) = (json.loads(line) for line in QUESTIONS.open() if json.loads(line)["prompt"] == LEMONS)
    assert len(row["questions"]) == 6 and len(row["foils"]) == 1
    for value, image in zip(found[:2].tolist(), (one, two)):
        asked = (whole(LEMONS), *row["questions"])
        values = {each: bounded(by_generate(folder, image, each)) for each in asked}
        for foil in row["foils"]:
            values[foil] = bounded(-by_generate(folder, image, foil))
        assert value == pytest.approx(np.mean([*values.values()]), abs=1e-4)
        answers = vqa.answers(image, LEMONS)
        assert [*answers] == [*values] and answers == pytest.approx(values, abs=1e-4)
    expected = bounded(by_generate(folder, one, whole(alone)))
    assert found[2].item() == pytest.approx(expected, abs=1e-4)
    assert found.isfinite().all() and not found.requires_grad


def test_who_says_yes_to_everything_gains_nothing_from_a_question_and_its_foil(
    folder, monkeypatch, tmp_path
):
    path = row_file(
        tmp_path / "q.jsonl", {"prompt": TEA, "questions": ["Is it red?"], "foils": ["Is it blue?"]}
    )
    monkeypatch.setattr(rewards, "SMOLVLM", folder)  # which leaves these two alone
    vqa = Vqa(folder, path)
    for odds in (-7, 0, 3, 12):
        with_odds(monkeypatch, vqa, odds)
        assert vqa([None], [TEA]).item() == pytest.approx(0.5)
    with_odds(monkeypatch, vqa, lambda image, question: 4 if "red" in question else -4)
    assert vqa([None], [TEA]).item() == pytest.approx(bounded(4))


# ---- what is asked of which prompt ---------------------------------------------------------------


def test_what_a_prompt_quotes_is_not_nested_in_the_same_quotes(folder):
    (question,) = Vqa(folder).about("A sign that says \"Mind the step\" and 'Thank you'.")
    assert question == whole("A sign that says 'Mind the step' and 'Thank you'.")


def test_a_model_of_english_is_not_asked_in_chinese(folder, monkeypatch, tmp_path):
    """NaN, and only there, unless there are questions, or the model is another."""
    (image,) = pictures((64, 64))
    assert Vqa(folder)([image], [TEA]).isfinite().all()
    monkeypatch.setattr(rewards, "SMOLVLM", folder)
    vqa = Vqa(folder)
    assert vqa([image] * 3, [TEA, "a cat", TEA]).isnan().tolist() == [True, False, True]
    assert vqa([image] * 2, [TEA, TEA]).isnan().all() and vqa.answers(image, TEA) == {}
    path = row_file(tmp_path / "q.jsonl", {"prompt": TEA, "questions": ["Is there a sign?"]})
    assert list(Vqa(folder, path).answers(image, TEA)) == ["Is there a sign?"]
    assert rewards.REWARDS["vqa"][1] == {"model": "HuggingFaceTB/SmolVLM-Instruct"}


# ---- spellings, memory ---------------------------------------------------------------------------


def test_spellings_that_begin_alike_count_once():
    """A tokenizer of single letters: "Yes" begins with Y, " Yes" with a space, which is no
    answer."""

    def starts(tokenizer, word):
        return sorted(tokenizer.convert_ids_to_tokens(answer_ids(tokenizer, word)))

    letters, whole_words, lower = map(build_tokenizer, ("a b c d e", "Yes yes No no", "yes no"))
    assert starts(letters, "yes") == ["Y", "y"] and starts(letters, "no") == ["N", "n"]
    found = starts(whole_words, "no")
    assert len(found) == len(set(found)) >= 3 and all("n" in token.lower() for token in found)
    steps = [normalizers.Strip(), normalizers.Lowercase()]
    lower.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    assert starts(lower, "yes") == ["yes"]  # all four are one


def test_the_model_is_lent_the_gpu_and_given_back(folder, monkeypatch):
    vqa = loaded(folder).function
    lent, caches, lend_gpu = [], [], vqa_module.lend_gpu
    vqa.model.register_forward_hook(lambda *given: caches.append(given[2].past_key_values))
    monkeypatch.setattr(vqa_module, "lend_gpu", lambda model: lent.append(model) or lend_gpu(model))
    vqa(pictures((64, 64)), [LEMONS])
    assert lent == [vqa.model] and caches and not any(caches)  # nothing would read them
