"""A base rounded to 8 bits: how far off it is, what is rounded, and that a run works with it."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import adapter_of, build_run, records, resume, tiny_settings
from torch.nn.functional import linear

from glm_image.weights import Int8Linear, round_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_off_by_half_a_step_of_its_row_at_most(dtype):
    """And the layer multiplies by these weights, to the bit. Were the scale applied behind the
    product, torch.compile would take a kernel that is slow on CUDA."""
    torch.manual_seed(0)
    exact = torch.nn.Linear(64, 32).to(dtype)
    exact.weight.data[3] *= 1000  # a row of its own scale
    exact.weight.data[5] = 0
    parent = torch.nn.Sequential(copy.deepcopy(exact))
    round_linears(parent)
    rounded = parent[0]
    assert rounded.weight.dtype == torch.int8 and not rounded.weight.requires_grad
    # A buffer: it moves with the weights.
    assert dict(rounded.named_buffers()).keys() == {"scale"} and rounded.scale.dtype == dtype
    weight, scale = exact.weight.float(), rounded.scale.float()[:, None]
    assert ((rounded.weight * scale - weight).abs() <= scale / 2 * 1.0001).all()
    full = torch.full((32,), 127).where(torch.arange(32) != 5, 0)
    assert torch.equal(rounded.weight.abs().amax(1).int(), full.int())

    x = torch.randn(2, 7, 64, dtype=dtype)
    assert torch.equal(rounded(x), linear(x, rounded.weight * rounded.scale[:, None], exact.bias))


def test_only_layers_and_blocks_are_rounded_and_the_adapter_stays_float32():
    run = build_run(tiny_settings("--base int8 --train both"))
    rounded = {
        name
        for part in run.glm_image.parts
        for name, module in part.named_modules()
        if isinstance(module, Int8Linear)
    }
    # What the adapter is added to.
    assert any(name.endswith("mlp.down_proj.base_layer") for name in rounded)
    assert all(".layers." in name or "transformer_blocks." in name for name in rounded)
    for trainer in (run.trainer, run.trainers["decoder-adapter"]):
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        assert trained and all(p.dtype == torch.float32 for p in trained)


def test_a_run_on_a_rounded_base_learns_resumes_and_is_judged_on_the_exact_one(judged, capsys):
    flags = ["--base", "int8", "--temperature", "4"]
    for run, steps in (("whole", 2), ("parts", 1)):
        assert judged(*flags, "--steps", steps, "--out", run) == 0
    assert resume("parts", "--base bfloat16") == 2
    assert "parts began with base int8 (now bfloat16)" in capsys.readouterr().err
    assert resume("parts", "--steps 2") == 0
    assert adapter_of("parts") == adapter_of("whole")
    assert records("parts/metrics.jsonl") == records("whole/metrics.jsonl")
    # The reference is the rounded base.
    assert records("whole/metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-6)

    assert '"base": "int8"' in Path("whole/settings.json").read_text()
    words = "In training and evaluation the base was rounded to int8."
    assert words in Path("whole/adapter/README.md").read_text()
    assert judged("--adapter whole --temperature 4 --steps 0 --base bfloat16 --out exact") == 0
    exact = records("exact/evaluation.jsonl")[0]["reward"][0]
    rounded = records("whole/evaluation.jsonl")[-1]["reward"][0]
    assert rounded == pytest.approx(exact, abs=0.05) and rounded != exact
