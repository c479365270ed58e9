"""What the pages tell a user to paste does what they say."""

import json
import re
import runpy
import shutil
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from conftest import ROOT, TINY, chat_inputs, painted, tiny_settings, write_reward
from diffusers import GlmImagePipeline
from make import NUM_CODES
from safetensors.torch import load_file, save_file

from glm_image.model import encode_prompt

SMALL = tiny_settings("--height 32 --width 32 --decode-steps 2")


def run_code(page, word):
    """Runs the first block of Python on a page that contains a word; returns the names it
    defines. page: in docs/, or another file."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    file = Path(tempfile.mkdtemp(), "block.py")
    file.write_text(next(block for block in blocks if word in block))
    return runpy.run_path(file)


def outputs(pipe):
    """What both models make of a prompt: the logits of the first code, and the latents of a picture
    of another."""
    ids, positions, _ = encode_prompt(pipe.processor, "three circles", 32, 32)
    start = {"input_ids": ids[None], "position_ids": positions[:, None, : len(ids)]}
    with torch.no_grad():
        logits = pipe.vision_language_encoder(**start, logits_to_keep=1).logits
    return logits, painted(pipe, "three circles", torch.tensor([[5]]), SMALL, 0)[0]


def drawn(pipe):
    """Ids that the stock pipeline's sampler draws."""
    inputs = chat_inputs(pipe.processor, "three circles", 32, 32)
    torch.manual_seed(0)
    ids = pipe.vision_language_encoder.generate(**inputs, max_new_tokens=24)
    return ids[:, inputs["input_ids"].shape[1] :]


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A copy of the tiny model that suppresses nothing; its end token is as likely as a common
    code."""
    folder = tmp_path_factory.mktemp("talkative") / TINY.name
    shutil.copytree(TINY, folder)
    encoder = folder / "vision_language_encoder"
    config = json.loads((encoder / "generation_config.json").read_text())
    del config["suppress_tokens"]
    (encoder / "generation_config.json").write_text(json.dumps(config))
    weights = load_file(encoder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[config["eos_token_id"]] = head[442]
    save_file(weights, encoder / "model.safetensors", {"format": "pt"})
    assert drawn(GlmImagePipeline.from_pretrained(folder)).shape[1] < 24
    return folder


def test_merged_adapters_do_what_adapters_do(quick, tmp_path, talkative):
    """And a merged model draws codes alone."""
    assert quick(*write_reward(""), "--train both --steps 1 --decode-steps 2 --out runs/1") == 0
    # A step moves them too little to be seen.
    for file in tmp_path.glob("runs/1/*adapter/*.safetensors"):
        weights = {name: torch.randn_like(weight) / 10 for name, weight in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})

    Path(TINY.name).symlink_to(talkative)  # as the page names it
    plain = GlmImagePipeline.from_pretrained(TINY.name, dtype=torch.float32)
    base = outputs(plain)
    plain.vision_language_encoder.load_adapter("runs/1/adapter")
    plain.transformer.load_lora_adapter("runs/1/decoder-adapter", prefix=None, use_safetensors=True)
    with_adapters = outputs(plain)
    run_code("after.md", "merge_and_unload")
    merged = GlmImagePipeline.from_pretrained("merged", dtype=torch.float32)
    for before, expected, found in zip(base, with_adapters, outputs(merged), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        assert (expected - before).abs().max() > 0.1
    modules = torch.nn.ModuleList([merged.vision_language_encoder, merged.transformer])
    assert not [name for name, _ in modules.named_parameters() if "lora" in name]
    codes = drawn(merged)
    assert codes.shape[1] == 24 and codes.max() < NUM_CODES


def test_the_cards_of_adapters_load_them(quick, tmp_path, monkeypatch, talkative):
    """Into the stock pipeline, which then draws codes alone."""
    reward = write_reward("return torch.arange(len(images)).float()")
    assert quick(*reward, "--train both --steps 1 --decode-steps 2 --out run") == 0
    monkeypatch.setattr(GlmImagePipeline, "__call__", pictures := MagicMock())
    for name in ("adapter", "decoder-adapter"):
        folder = tmp_path / "run" / name
        monkeypatch.chdir(folder)
        Path(TINY.name).symlink_to(talkative)
        pipe = run_code(folder / "README.md", "adapter = ")["pipe"]
        model = pipe.transformer if name == "decoder-adapter" else pipe.vision_language_encoder
        loaded = {key: x for key, x in model.named_parameters() if "lora_B" in key}
        trained = load_file("adapter_model.safetensors")
        trained = {key: x for key, x in trained.items() if "lora_B" in key}
        sums = [sorted(x.abs().sum().item() for x in own.values()) for own in (loaded, trained)]
        assert (
            sums[0] == pytest.approx(sums[1]) and len(loaded) == len(trained) and sum(sums[0]) > 0
        )
        files = [file for file in folder.iterdir() if file.suffix in (".json", ".safetensors")]
        assert len(files) > 2
        other = "decoder-adapter" if name == "adapter" else "adapter"
        assert (
            f"from 1 step of GRPO. Load `{other}` of the same run, too."
            in (folder / "README.md").read_text()
        )
    codes = drawn(pipe)
    assert codes.shape[1] == 24 and codes.max() < NUM_CODES
    of_call = pictures.call_args.kwargs
    assert (of_call["height"], of_call["num_inference_steps"]) == (32, 1)


def test_merging_needs_no_trained_decoder(one_step, talkative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/1").symlink_to(one_step)
    Path(TINY.name).symlink_to(talkative)
    run_code("after.md", "merge_and_unload")  # no HFValidationError
    assert Path("merged").is_dir()
