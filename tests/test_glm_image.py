"""GLM-Image in grpo.py: its positions and codes, against the stock pipeline and transformers' own
generate()."""

import copy
import os
import re
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, seeded
from make import NUM_CODES
from PIL import Image

from glm_image.model import encode_prompt
from grpo import generate_with_logprobs, set_advantages
from test_grpo import oracle, reread, trainer, with_adapter

CODES = slice(0, NUM_CODES)
RED, BLUE = "a red circle on a pink background", "a blue cross"  # of two lengths


def glm_prompts(pipe, *texts, size=(128, 128), length=None):
    """Ids, positions and T of some prompts; a `length` keeps the first tokens only, which saves
    time."""
    ids, positions, counts = zip(*(encode_prompt(pipe.processor, text, *size) for text in texts))
    length = length or counts[0]
    return ids, [p[:, : len(i) + length] for i, p in zip(ids, positions)], length


def glm_inputs(pipe, prompt, height, width):
    """What the stock pipeline hands to generate()."""
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]]
    return pipe.processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )


def test_glm_image_is_of_use_without_the_trainer(tmp_path, monkeypatch):
    """The program of docs/copying.md, in a folder with what it asks to copy."""
    page = (ROOT / "docs" / "copying.md").read_text()
    (code,) = re.findall(r"## GLM-Image without the trainer.*?```python\n(.*?)```", page, re.DOTALL)
    for name in ("glm_image", "inputs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "grpo.py", tmp_path)
    (tmp_path / TINY.name).symlink_to(TINY)
    (tmp_path / "program.py").write_text(code)
    alone = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    run = [sys.executable, "program.py"]
    done = subprocess.run(run, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pictures = [np.asarray(Image.open(tmp_path / f"{i}.png")) for i in range(4)]
    assert all(picture.shape == (128, 128, 3) and picture.std() > 5 for picture in pictures)
    assert any((picture != pictures[0]).any() for picture in pictures)


def test_glm_image_equals_generate(pipe):
    """A wide picture: an exchange of rows and columns shows. Its prompt is padded, beside a longer
    one."""
    model, size = pipe.vision_language_encoder, (64, 128)
    ids, positions, length = glm_prompts(pipe, BLUE, RED, size=size)
    how = {"allowed_ids": CODES, "temperature": 6.0}
    tokens, logprobs, nucleus = generate_with_logprobs(
        model,
        ids,
        length,
        num_samples=2,
        position_ids=positions,
        top_p=0.9,
        generators=[seeded(10), seeded(11)],
        **how,
    )
    assert tokens.shape == logprobs.shape == (4, length)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert len(tokens.unique(dim=0)) == 4  # a group of copies teaches nothing
    expected = oracle(model, glm_inputs(pipe, BLUE, *size), tokens[:2], nucleus[:2], **how)
    # generate() has just left its own grid in the model: reading again must not pick that up.
    how |= {"position_ids": positions[0], "nucleus": nucleus[:2]}
    for found in (logprobs[:2], reread(model, ids[0], tokens[:2], **how)):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_reading_again_has_to_know_how_it_was_sampled(pipe):
    """The silent trap, above all of positions: without them the same call runs, and is wrong by
    nats."""
    model, how = pipe.vision_language_encoder, {"allowed_ids": CODES, "temperature": 3.0}
    (ids,), places, T = glm_prompts(pipe, RED, length=60)
    sampling = {"position_ids": places, "top_p": 0.7, "generators": [seeded(0)], **how}
    tokens, logprobs, nucleus = generate_with_logprobs(model, [ids], T, **sampling)
    how |= {"position_ids": places[0], "nucleus": nucleus}
    without = {name: {k: v for k, v in how.items() if k != name} for name in how}
    without["allowed_ids"]["nucleus"] = None  # it is as wide as there are codes
    gap = lambda told: (reread(model, ids, tokens, **told) - logprobs).abs().max()
    gaps = {name: gap(told) for name, told in without.items()}
    assert gaps["position_ids"] > 1 and min(gaps.values()) > 0.1


def test_before_the_first_update_ratio_is_one_and_kl_zero(pipe):
    """Positions and codes, too, reach reading again and the reference."""
    settings = {"kl_coef": 0.1, "top_p": 0.7, "temperature": 3.0, "micro_batch_size": 3}
    ids, places, length = glm_prompts(pipe, RED, BLUE, length=24)
    model = with_adapter(copy.deepcopy(pipe.vision_language_encoder))
    run = trainer(model, allowed_ids=CODES, **settings)
    groups = run.sample([*zip(ids, places, [length] * 2)], 4, 0)
    set_advantages(groups, torch.arange(8.0))
    run.add_reference(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        metrics = run.update(groups)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert 0 < metrics["mean_logprob_gap"] < metrics["max_logprob_gap"] < 2e-4
