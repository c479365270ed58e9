"""What the pages tell a user to paste does what they say."""

import re
import runpy
import tempfile
from pathlib import Path

import torch
from conftest import ROOT, TINY, painted, tiny_settings
from diffusers import GlmImagePipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from glm_image.model import encode_prompt


def run_code(page, word):
    """Runs the first block of Python on a page that contains a word; returns the names it
    defines."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    file = Path(tempfile.mkdtemp(), "block.py")
    file.write_text(next(block for block in blocks if word in block))
    return runpy.run_path(file)


def outputs(pipe):
    """What both models make of a prompt: the logits of the first code, and the latents of a picture
    of another."""
    settings = tiny_settings("--height 32 --width 32 --decode-steps 2")
    ids, positions, _ = encode_prompt(pipe.processor, "three circles", 32, 32)
    start = {"input_ids": ids[None], "position_ids": positions[:, None, : len(ids)]}
    with torch.no_grad():
        logits = pipe.vision_language_encoder(**start, logits_to_keep=1).logits
    return logits, painted(pipe, "three circles", torch.tensor([[5]]), settings, 0)[0]


def test_merged_adapters_do_what_adapters_do(quick, tmp_path):
    reward = ["--reward", str(ROOT / "examples" / "my_reward.py:blueness")]
    assert quick("--train both --steps 1 --decode-steps 2 --out runs/1", *reward) == 0
    # A step moves them too little to be seen.
    for file in tmp_path.glob("runs/1/*adapter/*.safetensors"):
        weights = {name: torch.randn_like(weight) / 10 for name, weight in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})
    (tmp_path / "tiny-glm-image").symlink_to(TINY)

    plain = GlmImagePipeline.from_pretrained("tiny-glm-image", dtype=torch.float32)
    base = outputs(plain)
    plain.vision_language_encoder.load_adapter("runs/1/adapter")
    plain.transformer.load_lora_adapter("runs/1/decoder-adapter", prefix=None, use_safetensors=True)
    with_adapters = outputs(plain)
    run_code("memory.md", "merge_and_unload")
    merged = GlmImagePipeline.from_pretrained("merged", dtype=torch.float32)
    for before, expected, found in zip(base, with_adapters, outputs(merged), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        assert (expected - before).abs().max() > 0.1
    modules = (merged.vision_language_encoder, merged.transformer)
    assert not [
        name for module in modules for name, _ in module.named_parameters() if "lora" in name
    ]


def test_a_win_rate_compares_within_a_group():
    win_rate = run_code("rewards.md", "win_rate")["win_rate"]
    images = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green", "white")]
    shares = win_rate(images * 2, ["a"] * 8, None, group_size=4)
    assert shares.tolist() == [0, 0.75, 0.25, 0.5] * 2
