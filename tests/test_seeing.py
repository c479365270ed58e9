"""The program of docs/copying.md that trains a model that sees, on a tiny random Qwen2-VL."""

import re
import runpy

import numpy as np
import pytest
import torch
from conftest import ROOT
from peft import PeftModel
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)

from grpo import Group, set_advantages

END, START, IMAGE, STOP, VIDEO = range(256, 261)  # after the bytes
SPECIAL = ["<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for part in messages[0]['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}:"
)


class Processor(Qwen2VLProcessor):
    """Remembers what it returned. It needs no torchvision, as it has no processor of videos."""

    def check_argument_for_proper_class(self, name, given):
        pass

    def apply_chat_template(self, *given, **options):
        self.made.append(inputs := super().apply_chat_template(*given, **options))
        return inputs


def tiny_processor():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=SPECIAL[0])
    size = {"shortest_edge": 64, "longest_edge": 1024}
    pictures = Qwen2VLImageProcessorPil(patch_size=4, size=size)
    processor = Processor(pictures, tokenizer, None, chat_template=TEMPLATE)
    processor.made = []
    return processor


def tiny_model():
    """Random and sharp. Its picture is 2 x 2 or 2 x 3 tokens."""
    text = {
        "vocab_size": 261,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": [2, 1, 1],
        },
        "bos_token_id": None,
        "eos_token_id": END,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision | {"mlp_ratio": 2, "initializer_range": 0.3},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(config).eval()


def blocks():
    page = (ROOT / "docs" / "copying.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the page's program, and lines after it; returns the names it defines."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0)
    for name, width in (("cat", 16), ("dog", 16), ("street", 24)):
        picture = Image.fromarray(pixels.integers(0, 256, (16, width, 3), dtype=np.uint8))
        picture.save(f"{name}.jpg")
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda name: tiny_processor())
    given = lambda name, dtype: tiny_model()
    monkeypatch.setattr(Qwen2VLForConditionalGeneration, "from_pretrained", given)

    def run(after=""):
        (code,) = (block for block in blocks() if "class Sees" in block)
        (tmp_path / "page.py").write_text(code + after)
        return runpy.run_path(str(tmp_path / "page.py"))

    return run


def by_transformers(model, inputs, tokens):
    """Log-probs (G, T) of the stock model, which reads the picture with the whole sequence and
    makes its own positions."""
    G, T = tokens.shape
    after = torch.zeros(G, T, dtype=torch.long)
    repeat = lambda name: inputs[name].repeat(G, *[1] * (inputs[name].ndim - 1))
    with torch.no_grad():
        logits = model(
            input_ids=torch.cat([repeat("input_ids"), tokens], 1),
            mm_token_type_ids=torch.cat([repeat("mm_token_type_ids"), after], 1),
            pixel_values=repeat("pixel_values"),
            image_grid_thw=repeat("image_grid_thw"),
        ).logits
    logp = logits[:, -T - 1 : -1].log_softmax(-1)
    return logp.gather(-1, tokens[..., None])[..., 0]


def sampled(names, size=4):
    """Groups of the page's prompts, which have different lengths. No answer ends early."""
    names["trainer"].settings.end_ids = None
    groups = names["trainer"].sample(names["prompts"], size, 0)
    set_advantages(groups, torch.arange(2.0 * size))
    return groups


@torch.no_grad()
def reread(names, group, prompt=None):
    """The log-probs of a group's tokens after its prompt, or after another."""
    ids, positions, _ = prompt or (group.prompt_ids, group.position_ids, None)
    group = Group(ids, positions, group.tokens, group.old_logprobs)
    return names["trainer"].logprobs(group, torch.arange(len(group.tokens)))


def check(names, groups, model):
    """Recomputed log-probs are those of the stock model."""
    for group, inputs in zip(groups, names["processor"].made, strict=True):
        # At a sampled image token the stock model would look for a picture.
        rows = (group.tokens != IMAGE).all(1)
        assert rows.sum() > 1
        expected = by_transformers(model, inputs, group.tokens[rows])
        torch.testing.assert_close(reread(names, group)[rows], expected, atol=1e-4, rtol=0)


def test_its_log_probs_are_those_of_the_stock_model(run):
    """Before an update and after it, also with the adapter as it was saved."""
    names = run()
    groups = sampled(names)
    check(names, groups, names["base"])
    assert all(group.old_logprobs.std() > 0.3 for group in groups)  # flat would hide a fault
    names["trainer"].add_reference(groups)
    metrics = names["trainer"].update(groups)
    assert 0 < metrics["mean_logprob_gap"] < 1e-5 and metrics["kl"] == pytest.approx(0, abs=1e-6)
    for group in groups:
        moves = (reread(names, group) - group.old_logprobs).mean(1)
        assert (moves * group.advantages).mean() > 0.01  # towards the better answers
    ups = [p for name, p in names["model"].named_parameters() if "lora_B" in name]
    assert all(p.any() for p in ups)  # none is where no gradient comes
    names["model"].save_pretrained("adapter")
    check(names, groups, names["base"])
    check(names, groups, PeftModel.from_pretrained(tiny_model(), "adapter").eval())


def test_it_sees_the_picture(run):
    names = run()
    group, _ = sampled(names)
    found = {}
    for name in ("cat", "dog"):
        found[name] = reread(names, group, names["encode"](f"{name}.jpg", "What is this?"))
    torch.testing.assert_close(found["cat"], group.old_logprobs, atol=1e-4, rtol=0)
    assert ((found["dog"] - found["cat"]).abs().mean(1) > 0.1).all()


def test_a_sampled_image_token_is_a_word(run):
    names = run()
    names["trainer"].allowed_ids = slice(IMAGE - 1, IMAGE + 2)
    groups = sampled(names)
    assert all((group.tokens == IMAGE).sum() > 8 for group in groups)
    names["trainer"].add_reference(groups)
    assert 0 < names["trainer"].update(groups)["mean_logprob_gap"] < 1e-5


def test_features_may_be_emptied_before_each_step(run):
    names = run()
    groups = sampled(names)
    names["sees"].features = names["sees"].features[:0]
    street = names["encode"]("street.jpg", "How many cars are there?")
    cat = names["encode"]("cat.jpg", "What is this?")
    assert len(names["sees"].features) == 6 + 4
    for group, prompt in zip(groups, [cat, street], strict=True):
        found = reread(names, group, prompt)
        torch.testing.assert_close(found, group.old_logprobs, atol=1e-4, rtol=0)


def test_the_loop_of_the_first_program_trains_it(run, capsys):
    (loop,) = re.findall(r"^for step.*", blocks()[0], re.MULTILINE | re.DOTALL)
    run(loop.replace("range(20)", "range(2)"))
    lines = re.findall(r"reward -\S+, \d+% ended, gap \de-0[6-9]", capsys.readouterr().out)
    assert len(lines) == 2
