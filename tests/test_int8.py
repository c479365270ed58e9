"""A base rounded to 8 bits: how far off it is, that only the frozen weights are, and that all else
works with it."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from conftest import adapter_of, build_run, records, resume, seeded, tiny_settings
from torch.nn.functional import linear

from glm_image.model import add_adapter, encode_prompt
from grpo import get_per_token_logprobs
from runtime.int8 import Int8Linear, round_linears


def rounded_pair(dtype, bias=True):
    torch.manual_seed(0)
    exact = torch.nn.Linear(64, 32, bias=bias)
    exact.weight.data[3] *= 1000  # a row of its own scale
    exact.weight.data[5] = 0
    rounded = torch.nn.Sequential(copy.deepcopy(exact).to(dtype))
    round_linears(rounded)
    return exact.to(dtype), rounded[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_off_by_half_a_step_of_its_row_at_most(dtype):
    exact, rounded = rounded_pair(dtype)
    assert (
        rounded.weight.dtype == torch.int8
        and rounded.scale.dtype == dtype
        and not rounded.weight.requires_grad
    )
    # Or it would not move with the weights.
    assert dict(rounded.named_buffers()).keys() == {"scale"}
    weight, scale = exact.weight.float(), rounded.scale.float()[:, None]
    assert ((rounded.weight * scale - weight).abs() <= scale / 2 * 1.0001).all()
    torch.testing.assert_close(scale[:, 0], weight.abs().amax(1) / 127, rtol=1e-2, atol=1e-11)
    assert (
        rounded.weight.abs().amax(1) == torch.tensor([127] * 32).where(torch.arange(32) != 5, 0)
    ).all()


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_multiplies_by_what_was_rounded(bias):
    """To the bit: the scale comes before the product. Behind it, torch.compile would take a kernel
    slow on CUDA."""
    _, rounded = rounded_pair(torch.float32, bias)
    x = torch.randn(2, 7, 64, requires_grad=True)
    dense = rounded.weight.float() * rounded.scale[:, None]
    assert torch.equal(rounded(x), linear(x, dense, rounded.bias))
    (gradient,) = torch.autograd.grad(rounded(x).sum(), x)
    torch.testing.assert_close(gradient, dense.sum(0).expand_as(x), atol=1e-3, rtol=1e-5)


def test_only_layers_and_blocks_are_rounded_and_the_adapter_stays_float32():
    run = build_run(tiny_settings("--base int8 --train both"))
    base = run.policy.model.get_base_model()
    rounded = {
        name
        for part in (
            base,
            run.model.pipe.transformer,
            run.model.pipe.text_encoder,
            run.model.pipe.vae,
        )
        for name, module in part.named_modules()
        if isinstance(module, Int8Linear)
    }
    # What the adapter is added to.
    assert any(name.endswith("mlp.down_proj.base_layer") for name in rounded)
    assert all(".layers." in name or "transformer_blocks." in name for name in rounded)
    within = [
        *base.model.language_model.layers.modules(),
        *run.model.pipe.transformer.transformer_blocks.modules(),
    ]
    plain = [module for module in within if type(module) is torch.nn.Linear]
    assert all(module.weight.requires_grad for module in plain)  # all others are the adapters'
    for learner in (run.policy, run.decoder):
        trained = [p for p in learner.model.parameters() if p.requires_grad]
        assert trained and all(p.dtype == torch.float32 for p in trained)


def test_with_the_adapter_off_it_is_the_rounded_base_to_the_bit(pipe):
    """In bfloat16, too; log-probs (of -20) are off by as little as bfloat16 is."""
    ids, positions, _ = encode_prompt(pipe.processor, "a red circle", 64, 32)
    codes = torch.randint(256, (2, 10), generator=seeded(0))
    ids, positions = torch.cat([ids.expand(2, -1), codes], 1), positions[:, : len(ids) + 10]
    logprobs = lambda model: get_per_token_logprobs(
        model, ids, 10, position_ids=positions, allowed_ids=slice(0, 256)
    )

    for dtype, off in ((torch.float32, 0.05), (torch.bfloat16, 0.3)):
        own = copy.deepcopy(pipe.vision_language_encoder).to(dtype)
        with torch.no_grad():
            exact = logprobs(pipe.vision_language_encoder)
            round_linears(own.model.language_model.layers)
            reference = logprobs(own)
        assert 0 < (reference - exact).abs().mean() < off
        model, _ = add_adapter(own, "codes", 16)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.data.normal_(0, 0.02, generator=seeded(1))
        with torch.no_grad(), model.disable_adapter():
            assert torch.equal(logprobs(model), reference)
        logprobs(model).sum().backward()
        assert not torch.equal(logprobs(model), reference)
        assert all(
            p.grad.isfinite().all() and p.grad.any() and p.grad.dtype == torch.float32
            for p in trained
        )


def test_a_run_on_a_rounded_base_learns_resumes_and_is_judged_on_the_exact_one(quick, capsys):
    flags = ["--base", "int8", "--temperature", "4"]
    assert quick(*flags, "--steps 2 --save-every 1 --out whole") == 0
    shutil.copytree("whole", "parts")
    shutil.rmtree("parts/checkpoints/000002")
    assert resume("parts", "--base bfloat16") == 2
    assert "--base bfloat16 (was int8)" in capsys.readouterr().err
    assert resume("parts") == 0
    assert adapter_of("parts") == adapter_of("whole")
    assert records("parts/metrics.jsonl") == records("whole/metrics.jsonl")
    # The reference is the rounded base.
    assert records("whole/metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-6)

    assert '"base": "int8"' in Path("whole/adapter/settings.json").read_text()
    for base in ("int8", "bfloat16"):
        assert quick("--adapter whole --steps 0 --base", base, "--out", f"judged-{base}") == 0
    rounded, exact = (
        records(f"judged-{base}/evaluation.jsonl")[0] for base in ("int8", "bfloat16")
    )
    assert (
        rounded["reward"] == pytest.approx(exact["reward"], abs=0.05)
        and rounded["reward"] != exact["reward"]
    )
