"""The specification of grpo.py. Each part is first worked out by hand; then it meets the formula,
autograd, and transformers' own generate().

    pytest test_grpo.py  # no network, no GPU, under a minute on one core

Copy it with grpo.py: it needs nothing else of this repository. The text model that learns here is
also the lab of docs/exercises.md: learn().
"""

import math
import os
import runpy
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

import grpo
from grpo import (
    Group,
    NotFinite,
    Offload,
    _log_distribution,
    _nucleus,
    _warn_of,
    compute_advantages,
    compute_grpo_loss,
    generate_with_logprobs,
    get_per_token_logprobs,
    mask_through_end,
    set_advantages,
)

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # several threads on matrices this small only wait for one another

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",  # of one library about another
    # Adapters are moved on purpose; see tests/test_zoo.py.
    "ignore:(mean_logprob_gap|kl is above 0|rewards differ|the gradient)",
)
NAN = math.nan


# ---- 3. advantages -------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [list, np.array, np.float32, torch.tensor])
def test_advantages_by_hand(numbers):
    advantages = compute_advantages(numbers([1, 2, 3, 6]), 4)
    std = ((4 + 1 + 0 + 9) / 3) ** 0.5  # of 1, 2, 3, 6 with mean 3: unbiased, over G - 1
    assert advantages.tolist() == pytest.approx([-2 / std, -1 / std, 0, 3 / std], abs=1e-6)
    assert advantages.dtype == torch.float32
    std, eps = 2**0.5, 1.0  # of 0 and 2
    advantages = compute_advantages(numbers([0, 2]), 2, eps)
    assert advantages.tolist() == pytest.approx([-1 / (std + eps), 1 / (std + eps)])
    neighbours = numbers([1e6, 1e6 + 0.0625])  # in float32 their mean is one of them
    assert compute_advantages(neighbours, 2).tolist() == pytest.approx([-1 / std, 1 / std], 1e-4)


def test_advantages_leave_nan_out():
    rewards = [0, NAN, 4] + [NAN, NAN, NAN] + [NAN, 5, NAN] + [7, NAN, 7]
    z = 2 / 8**0.5  # of 4, among 0 and 4
    advantages = compute_advantages(torch.tensor(rewards), 3).tolist()
    assert advantages == pytest.approx([-z, 0, z] + [0] * 9, abs=1e-5)


@pytest.mark.parametrize("reward", [9.9, 0.1, -1e-3, 1e6])
def test_equal_rewards_get_exactly_zero(reward):
    """The mean may be off by an ulp, which would be all the spread there is. In float64 the mean of
    float32 numbers is exact; of three numbers that are float64 it is not."""
    assert compute_advantages(torch.full((16,), reward), 8).tolist() == [0] * 16
    with_nan = torch.tensor([reward, NAN, reward, reward], dtype=torch.float64)
    assert compute_advantages(with_nan, 4).tolist() == [0] * 4


@pytest.mark.parametrize("seed", range(5))
def test_advantages_know_neither_zero_nor_unit_nor_order(seed):
    torch.manual_seed(seed)
    rewards, unit, order = torch.randn(3, 6), torch.rand(3, 1) + 0.1, torch.randperm(6)
    advantages = lambda rewards: compute_advantages(rewards.flatten(), 6).view(3, 6)
    expected = advantages(rewards)
    torch.testing.assert_close(advantages(unit * rewards + seed), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(advantages(rewards[:, order]), expected[:, order])


def test_rewards_meet_their_own_samples():
    """Prompt after prompt; and no more of them than there are samples, nor fewer."""
    groups = [Group(None, None, None, old_logprobs=torch.zeros(4, 2)) for _ in range(2)]
    rewards = torch.tensor([1, NAN, 3, 5, 0, 0, 0, 8])  # means 3 and 2, std 2 and 4
    set_advantages(groups, rewards)
    assert groups[0].advantages.tolist() == pytest.approx([-1, 0, 0, 1], abs=1e-5)
    assert groups[1].advantages.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)
    for wrong in (rewards[:4], torch.cat([rewards, rewards[:4]])):
        with pytest.raises(ValueError):
            set_advantages(groups, wrong)


# ---- 5. loss -------------------------------------------------------------------------------------


def test_loss_by_hand():
    """Two samples of two tokens. Ratios 1.5, 0.9 | 0.5, 1.1; advantages 2, -1; clip 0.2; KL 0.1."""
    new = torch.tensor([[1.5, 0.9], [0.5, 1.1]]).log().requires_grad_()
    ref = torch.tensor([[1.5, 1.8], [0.5, 1.1]]).log()
    given = [x.requires_grad_() for x in (torch.zeros(2, 2), torch.tensor([2.0, -1.0]), ref)]
    loss, metrics = compute_grpo_loss(new, *given, kl_coef=0.1)
    # 1.5 is clipped for a good sample, 0.5 for a bad one.
    policy_loss = -(2 * 1.2 + 2 * 0.9 - 0.8 - 1.1) / 4
    kl = (2 - math.log(2) - 1) / 4  # only the second token differs: ref / new = 2
    expected = {"loss": policy_loss + 0.1 * kl, "policy_loss": policy_loss, "kl": kl}
    gaps = [abs(math.log(ratio)) for ratio in (1.5, 0.9, 0.5, 1.1)]  # from old log-probs of 0
    expected |= {"mean_logprob_gap": sum(gaps) / 4, "max_logprob_gap": math.log(2)}
    assert metrics == pytest.approx({**expected, "clip_fraction": 0.5, "ratio_mean": 1.0}, abs=1e-6)
    assert loss.item() == metrics["loss"]
    loss.backward()
    # d(-r A)/d(log r) = -r A / 4 unless clipped; d k3 / d(log new) = 1 - ref/new
    by_hand = [0, -0.9 * 2 / 4 + 0.1 * (1 - 2) / 4, 0, 1.1 / 4]
    assert new.grad.flatten().tolist() == pytest.approx(by_hand, abs=1e-6)
    assert all(fixed.grad is None for fixed in given)


@pytest.mark.parametrize(
    "ratio, advantage, gradient",
    [
        (1.3, 1.0, 0),  # good and likelier by 30%: clipped
        (1.3, -1.0, 1.3),
        (0.7, 1.0, -0.7),
        (0.7, -1.0, 0),  # bad and rarer by 30%: clipped
        (1.1, 1.0, -1.1),
        (0.9, -1.0, 0.9),
    ],
)
def test_clipping_acts_on_the_right_side(ratio, advantage, gradient):
    new = torch.tensor([[ratio]]).log().requires_grad_()
    loss, metrics = compute_grpo_loss(new, torch.zeros(1, 1), torch.tensor([advantage]))
    loss.backward()
    assert new.grad.item() == pytest.approx(gradient)
    assert metrics["clip_fraction"] == (gradient == 0)
    assert math.isnan(metrics["kl"])  # there is no reference


def test_the_ratio_is_an_importance_weight():
    """Samples of pi_old, summed as often as it draws them, have the mean of A over those of pi."""
    torch.manual_seed(0)
    logits, old = torch.randn(6, requires_grad=True), torch.randn(6).log_softmax(0)
    pi, advantages = logits.log_softmax(0), torch.randn(6)
    of_each = zip(pi.view(6, 1, 1), old.view(6, 1, 1), advantages.view(6, 1), old.exp())
    unbounded = [compute_grpo_loss(*x, clip_range=1e9)[0] * often for *x, often in of_each]
    total, expected = sum(unbounded), -(pi.exp() * advantages).sum()
    assert total.item() == pytest.approx(expected.item())
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (total, expected)]
    torch.testing.assert_close(*gradients)


def test_loss_averages_each_sample_then_samples():
    """A short answer counts as much as a long one. All ratios are 1.1. What is masked may hold any
    number: 0 x NaN is NaN."""
    new = torch.full((3, 4), math.log(1.1), requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    old = torch.zeros(3, 4).where(mask > 0, NAN)
    ref = torch.full((3, 4), math.log(1.1)).where(mask > 0, math.inf)
    advantages = torch.tensor([[1.0], [5.0], [9.0]]).where(mask > 0, NAN)  # one per token
    loss, metrics = compute_grpo_loss(new, old, advantages, ref, mask, kl_coef=0.1)
    assert loss.item() == pytest.approx(-1.1 * (1 + 5 + 0) / 3) and metrics["kl"] == 0
    assert metrics["mean_logprob_gap"] == pytest.approx(math.log(1.1) * 2 / 3)
    loss.backward()
    by_hand = [-1.1 / 12] * 4 + [-1.1 * 5 / 3, 0, 0, 0] + [0] * 4
    assert new.grad.flatten().tolist() == pytest.approx(by_hand)


def exact_kl(loss_of):
    """Of a distribution of 6, by summing over all that it can draw, each as often as it does.

    Returns the mean of metrics["kl"], KL(pi || ref), and the gradients of the loss, of
    KL(pi || ref) and of KL(ref || pi)."""
    torch.manual_seed(0)
    logits, ref = torch.randn(6, requires_grad=True), torch.randn(6).log_softmax(0)
    pi, value, total = logits.log_softmax(0), 0, 0
    for new, fixed in zip(pi.view(6, 1, 1), ref.view(6, 1, 1)):  # the only token of a sample
        loss, metrics = loss_of(new, new.detach(), torch.zeros(1), fixed, kl_coef=1.0)
        value += new.exp().item() * metrics["kl"]
        total += new.exp().item() * loss
    terms = total, (pi.exp() * (pi - ref)).sum(), (ref.exp() * (ref - pi)).sum()
    gradients = [torch.autograd.grad(term, logits, retain_graph=True)[0] for term in terms]
    return value, terms[1].item(), *gradients


def test_k3_has_the_value_and_the_gradient_that_the_comment_claims():
    value, expected, gradient, _, of_reverse = exact_kl(compute_grpo_loss)
    assert value == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(gradient, of_reverse, atol=1e-5, rtol=0)


def test_k3_near_zero_is_never_negative():
    """In float32, exp(x) - x - 1 is below 0 for a fifth of these x, and its mean 190 times k3's."""
    x = 1e-5 * torch.randn(300, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(1, 1)
    loss = lambda ref: compute_grpo_loss(zero, zero, torch.zeros(1), ref.view(1, 1), kl_coef=1.0)
    k3 = torch.stack([loss(ref)[0] for ref in x])
    assert k3.min() >= 0
    assert k3.mean().item() == pytest.approx(x.double().square().mean().item() / 2, rel=0.01)


# ---- texts that end ------------------------------------------------------------------------------


def test_mask_through_end_by_hand():
    tokens = torch.tensor([[5, 7, 3, 7], [7, 7, 9, 3], [3, 9, 5, 7], [3, 5, 5, 9], [5, 5, 5, 5]])
    assert mask_through_end(tokens, (7, 9)).tolist() == [
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
    ]
    assert mask_through_end(tokens, 9).sum(1).tolist() == [4, 3, 2, 4, 4]


# ---- 1 and 4. one distribution, from which both sampling and recomputing take log-probs ----------


@pytest.mark.parametrize(
    "top_p, expected",
    [
        (0.4, [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]),
        (0.6, [[0, 1, 0, 1], [1, 0, 0, 0], [1, 0, 1, 0]]),  # the id that crosses the border is in
        (0.9, [[1, 1, 0, 1], [1, 0, 1, 1], [1, 0, 1, 1]]),
    ],
)
def test_nucleus_by_hand(top_p, expected):
    p = [[0.15, 0.5, 0.05, 0.3], [0.7, 0.04, 0.16, 0.1], [0.42, 0.05, 0.45, 0.08]]
    assert _nucleus(torch.tensor(p).log(), top_p).int().tolist() == expected


def test_distribution_by_hand():
    logits = math.log(2) * torch.tensor([[9.0, 0.0, 2.0, 4.0]])  # divided by 2: 1, 2, 4 in ids 1..3
    everything = _log_distribution(logits, slice(1, 4), 2.0).exp()
    assert everything.flatten().tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    kept = torch.tensor([[False, True, True]])
    nucleus = _log_distribution(logits, slice(1, 4), 2.0, kept).exp()
    assert nucleus.flatten().tolist() == pytest.approx([0, 1 / 3, 2 / 3])


def test_distribution_of_bfloat16_logits_is_in_float32():
    logits = torch.tensor([3, 1.1, -2.3, 0.4]).bfloat16()
    found, expected = (_log_distribution(x, slice(0, 4), 0.9) for x in (logits, logits.float()))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class Bigram:
    """After a token the same comes with 1/2, the next with 1/3, the one after that with 1/6."""

    device = torch.device("cpu")

    def __init__(self, cache=()):
        self.cache = cache

    def __call__(self, input_ids, **_):
        table = torch.tensor([[3.0, 2, 1], [1, 3, 2], [2, 1, 3]]).log()
        return SimpleNamespace(logits=table[input_ids], past_key_values=self.cache)


def test_logprobs_by_hand():
    ids = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 2]])  # a prompt of two, then two samples
    logprobs = get_per_token_logprobs(Bigram(), ids, 2)
    by_hand = [1 / 3, 1 / 2, 1 / 2, 1 / 6]
    assert logprobs.exp().flatten().tolist() == pytest.approx(by_hand)
    # An id that is not allowed has any number: it is masked.
    for allowed, other, by_hand in (
        (slice(1, 3), 2, [2 / 3, 3 / 5, 1 / 3]),
        (slice(0, 2), 3, [2 / 5, 3 / 4, 3 / 5]),
    ):
        logprobs = get_per_token_logprobs(Bigram(), ids, 2, allowed_ids=allowed).flatten()
        found = logprobs[[i for i in range(4) if i != other]].exp().tolist()
        assert found == pytest.approx(by_hand)


@pytest.mark.parametrize("seed", range(3))
def test_temperature_divides_differences_of_log_probs(seed):
    """Of all ids after a random prompt."""
    torch.manual_seed(seed)
    prompt, ids, model = torch.randint(50, (5,)), torch.arange(50)[:, None], text_model()
    plain, other = (reread(model, prompt, ids, temperature=x) for x in (1.0, 0.3 + seed))
    torch.testing.assert_close((other - other[0]) * (0.3 + seed), plain - plain[0])


# ---- a text model that learns: the lab of docs/exercises.md --------------------------------------

SHORT, LONG = torch.tensor([9, 8]), torch.tensor([5, 6, 7, 3, 4])
PROMPTS = {"one": LONG, "two": SHORT}


def text_model(**settings):
    """A random Llama whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **settings,
    )
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(8)
    return model


def with_adapter(model, size=0.0, **settings):
    """`size` above 0: the adapter has moved, so that policy and reference differ."""
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "gate_up_proj", "up_proj"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings))
    if size > 0:
        perturb(model, size)
    return model


def perturb(model, size):
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size)


def trainer(
    model=None,
    optimizer=torch.optim.SGD,
    lr=0.1,
    allowed_ids=slice(0, None),
    token_forward=None,
    module=grpo,
    **settings,
):
    """`module`: grpo.py, or a copy with another loss."""
    model = model or with_adapter(text_model())
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    settings = module.GRPOSettings(**settings)
    return module.GRPO(model, optimizer, settings, allowed_ids, token_forward)


def likes_low_ids(groups):
    """A reward with spread: the share of tokens below 25, and a little for the first id."""
    tokens = torch.cat([group.tokens for group in groups])  # (N*G, T)
    return (tokens < 25).float().mean(1) + tokens[:, 0] * 1e-3


def roll_out(run, *names, seed=0, size=4, rewards=likes_low_ids, length=6):
    """1 to 3: groups with their advantages."""
    groups = run.sample([(PROMPTS[name], None, length) for name in names], size, seed)
    set_advantages(groups, rewards(groups))
    return groups


def step(run, *names, **given):
    """A whole step, as train.py makes it."""
    groups = roll_out(run, *names, **given)
    run.add_reference(groups)
    return groups, run.update(groups)


def learn(seed=0, rewards=likes_low_ids, steps=30, size=8, length=6, lr=2e-2, **settings):
    """Trains the text model in about a second: {"reward" or metric: its value at each step}."""
    run, seen = trainer(optimizer=torch.optim.AdamW, lr=lr, **settings), []
    for i in range(steps):
        drawn = {"seed": 100_000 * seed + 10 * i, "size": size, "length": length}
        groups, metrics = step(run, "one", "two", rewards=rewards, **drawn)
        seen.append(metrics | {"reward": rewards(groups).mean().item()})
    return {name: np.array([each[name] for each in seen]) for name in seen[0]}


def test_training_raises_the_reward():
    reward = learn(steps=20, micro_batch_size=8)["reward"]
    assert reward[-5:].mean() > reward[:5].mean() + 0.1


# ---- 6. update, against the formula (a reader of docs/exercises.md skips formula()) --------------

METRICS = (
    "loss",
    "policy_loss",
    "kl",
    "clip_fraction",
    "ratio_mean",
    "mean_logprob_gap",
    "max_logprob_gap",
)
NAMES = {*METRICS, "grad_norm", "skipped", "groups_without_spread"}


def adapter_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def formula(model, groups, kl_coef, temperature):
    """The loss in a few lines, over all samples at once, and what the metrics should say."""
    total, learned = 0, []

    def logprobs(group):
        ids = torch.cat([group.prompt_ids.expand(len(group.tokens), -1), group.tokens], 1)
        logits = model(input_ids=ids).logits[:, -7:-1] / temperature  # T is 6
        logp = logits.masked_fill(~group.nucleus, -torch.inf).log_softmax(-1)
        return logp.gather(-1, group.tokens[..., None])[..., 0]

    for group in groups:
        if not group.advantages.any():
            continue  # but it counts among the groups
        mask = torch.ones(group.tokens.shape) if group.mask is None else group.mask
        mean = lambda x, mask=mask: ((x * mask).sum(1) / mask.sum(1).clamp(1)).mean()
        new, old, A = logprobs(group), group.old_logprobs, group.advantages.view(5, -1)
        with torch.no_grad(), model.disable_adapter():
            ref = logprobs(group)
        ratio, k3 = (new - old).exp(), (ref - new).exp() - (ref - new) - 1
        gain = torch.minimum(ratio * A, ratio.clamp(0.7, 1.3) * A)
        cut = ((ratio > 1.3) & (A > 0)) | ((ratio < 0.7) & (A < 0))
        gap, loss = (new - old).abs() * mask, kl_coef * k3 - gain
        total = total + mean(loss) / len(groups)
        means = [mean(x).item() for x in (loss, -gain, k3, cut, ratio, gap)]
        learned.append([*means, gap.max().item()])
    metrics = dict(zip(METRICS, np.mean(learned, axis=0)))
    return total, metrics | {"max_logprob_gap": max(row[-1] for row in learned)}


@pytest.mark.parametrize("size, masked", [(5, False), (1, False), (2, True), (3, True)])
def test_gradient_equals_autograd_of_the_formula_for_every_micro_batch_size(size, masked):
    """And for another order of the groups. Three groups of five, one of them constant; 2 and 3 do
    not divide 5. SGD: the change is the gradient."""

    def rewards(groups):
        values = likes_low_ids(groups)
        values[12] = NAN  # a sample without a reward is no reason to leave its group out
        return torch.cat([values[:5], torch.ones(5), values[10:]])

    model = with_adapter(text_model(), 0.3)
    settings = {"kl_coef": 0.1, "clip_range": 0.3, "temperature": 1.3, "top_p": 0.9}
    run = trainer(model, lr=1.0, micro_batch_size=size, **settings)
    groups = roll_out(run, "one", "two", "one", seed=size, size=5, rewards=rewards)
    if masked:  # with holes; one text does not count at all
        groups[0].mask = torch.rand(5, 6).round().tril(-1)
        groups[0].advantages = torch.randn(5, 6)  # per token
    run.add_reference(groups)
    perturb(model, 0.6)  # ratios other than 1, some of them clipped
    total, expected = formula(model, groups, 0.1, 1.3)
    before = adapter_of(model)
    gradients = torch.autograd.grad(total, run.parameters)
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    assert 0 < expected["clip_fraction"] < 1 and (norm > 1) == masked
    if masked:
        run.settings.max_grad_norm = norm / 3  # else the default, 1: the gradient is left alone
    for p in run.parameters:
        p.grad = torch.ones_like(p)  # left behind by an update that failed
    expected |= {"grad_norm": norm, "skipped": 0, "groups_without_spread": 1 / 3}
    assert run.update(groups[::-1]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for (name, p), g in zip(adapter_of(model).items(), gradients, strict=True):
        expected = g / 3 if masked else g
        torch.testing.assert_close(before[name] - p, expected, atol=1e-5, rtol=1e-3)
    assert all(p.grad is None for p in run.parameters)  # no memory until the next update


@pytest.mark.parametrize(
    "iterations, processes, number", [(1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 2, 3), (1, 4, 3)]
)
def test_each_mini_batch_is_a_step_of_the_formula_over_its_own_groups(
    iterations, processes, number
):
    """The second and the third group have equal rewards, and count. Several processes, each with
    its share of the groups, make the steps of one process."""

    def rewards(groups):
        values = likes_low_ids(groups)
        return torch.cat([values[:5], torch.ones(10), values[15:]])

    def prepared(**settings):
        model = with_adapter(text_model(), 0.3)
        settings |= {"kl_coef": 0.1, "clip_range": 0.3, "temperature": 1.3, "top_p": 0.9}
        settings |= {"micro_batch_size": 2}
        run = trainer(model, lr=1.0, max_grad_norm=math.inf, **settings)
        groups = roll_out(run, "one", "two", "one", "two", size=5, rewards=rewards)
        groups[0].mask = (torch.arange(6) < torch.tensor([[6], [1], [3], [0], [2]])).float()
        run.add_reference(groups)
        perturb(model, 0.3)
        return run, groups

    run, groups = prepared()
    parts = [[*range(4)[i::number]] for i in range(number)]
    parts = [part for part in parts if {0, 3} & {*part}] * iterations  # some have a spread
    for part in parts:
        loss, _ = formula(run.model, [groups[i] for i in part], 0.1, 1.3)
        gradients = torch.autograd.grad(loss, run.parameters)
        with torch.no_grad():
            for p, gradient in zip(run.parameters, gradients):
                p -= gradient

    # A process that fails must not leave the others waiting for ever.
    barrier, sent = threading.Barrier(processes, timeout=60), {}

    def average(tensors):
        assert {tensor.dtype for tensor in tensors} == {torch.float32}  # Apple has no doubles
        sent[threading.get_ident()] = [tensor.clone() for tensor in tensors]
        barrier.wait()
        for i, tensor in enumerate(tensors):
            tensor.copy_(sum(each[i] for each in sent.values()) / processes)
        barrier.wait()

    each = [prepared(mini_batches=number, iterations=iterations) for _ in range(processes)]
    share = len(groups) // processes
    with ThreadPoolExecutor() as pool:
        for i, (found, groups) in enumerate(each):
            found.average, found.rank = average, i
            each[i] = found, pool.submit(found.update, groups[share * i : share * (i + 1)])
    for found, metrics in each:
        metrics.result()
        assert found.steps == len(parts)
        for one, other in zip(run.parameters, found.parameters, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("case", ["no spread", "all clipped", "not a number", "overflow"])
def test_what_teaches_nothing_gives_no_step(case):
    """Not even Adam's momentum may move the adapter."""
    run, steps = trainer(optimizer=torch.optim.AdamW), []
    step(run, "one")
    run.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before, (group,) = adapter_of(run.model), roll_out(run, "one", seed=1)
    if case == "no spread":
        group.advantages.zero_()
    elif case == "all clipped":  # the gradient is there, and exactly 0
        group.old_logprobs -= group.advantages.sign()[:, None]
    elif case == "not a number":
        group.old_logprobs[0] = NAN
    else:
        hook = run.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    metrics = run.update([group])
    if case == "overflow":
        hook.remove()
    if case == "no spread":
        with warnings.catch_warnings(action="error"):
            assert run.update([group, group])["grad_norm"] == 0  # no reason for a warning
    skipped = case in ("not a number", "overflow")
    assert (metrics["skipped"], metrics["grad_norm"], steps, run.steps) == (skipped, 0, [], 1)
    assert metrics["groups_without_spread"] == (case == "no spread")
    assert all(math.isnan(metrics[name]) for name in METRICS) == (case == "no spread")
    assert all(torch.equal(p, before[name]) for name, p in adapter_of(run.model).items())
    assert step(run, "one", seed=2)[1]["grad_norm"] > 0  # and nothing of it is left behind
    assert all(p.isfinite().all() for p in run.parameters)


def test_a_step_that_fails_midway_counts():
    """It has moved some weights: the work must not be made again."""

    def fail(*given):
        raise torch.OutOfMemoryError

    run = trainer()
    groups = roll_out(run, "one")
    run.optimizer.register_step_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        run.update(groups)
    assert run.steps == 1


def test_the_norm_is_the_mean_over_the_iterations_that_made_a_step(monkeypatch):
    run = trainer(iterations=3)
    groups = roll_out(run, "one")
    monkeypatch.setattr(run, "step", iter([0.25, math.nan, 0.75]).__next__)
    with pytest.warns(UserWarning, match="NaN or infinite"):
        metrics = run.update(groups)
    assert (metrics["grad_norm"], metrics["skipped"]) == (0.5, pytest.approx(1 / 3))


def test_the_gap_is_of_the_first_step_with_a_group_that_teaches():
    """Of the mini-batches the first has no spread, and the third comes after a step."""
    run = trainer(lr=5.0, mini_batches=3)
    groups = roll_out(run, "one", "two", "one")
    groups[0].advantages.zero_()
    with warnings.catch_warnings(action="error"):
        metrics = run.update(groups)
    assert 0 < metrics["mean_logprob_gap"] < 1e-5 and metrics["ratio_mean"] != pytest.approx(1)


def test_clipping_acts_from_the_second_iteration():
    """Metrics are means over the iterations; the gaps are measured before the policy moves."""
    run = lambda **more: trainer(with_adapter(text_model(), 0.3), lr=5.0, kl_coef=0.1, **more)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "mean_logprob_gap")
        _, twice = step(run(iterations=2), "one", "two")
    again = run()
    groups, first = step(again, "one", "two")
    second = again.update(groups)
    assert first["clip_fraction"] == 0 < second["clip_fraction"]
    gaps = {name: first[name] for name in ("mean_logprob_gap", "max_logprob_gap")}
    assert 0 < gaps["mean_logprob_gap"] < gaps["max_logprob_gap"] < 1e-4
    means = {name: (first[name] + second[name]) / 2 for name in first}
    assert twice == pytest.approx(means | gaps, rel=1e-4, abs=1e-6)


def test_reference_is_the_base_without_gradient_and_skipped_where_nothing_needs_it(monkeypatch):
    model = with_adapter(text_model(), 0.3)
    run = trainer(model, kl_coef=0.1, micro_batch_size=3)
    constant = lambda groups: torch.cat([likes_low_ids(groups)[:8], torch.ones(4)])
    *with_spread, equal = groups = roll_out(run, "one", "two", "one", rewards=constant)
    run.add_reference(groups)
    assert equal.ref_logprobs is None
    for group in with_spread:
        expected = reread(text_model(), group.prompt_ids, group.tokens)  # never adapted
        assert not group.ref_logprobs.requires_grad
        torch.testing.assert_close(group.ref_logprobs, expected, atol=1e-5, rtol=0)

    run.settings.kl_coef = 0.0
    unused = lambda *_: pytest.fail("a reference pass that nothing uses")
    monkeypatch.setattr(run, "logprobs", unused)
    run.add_reference(groups)


def test_another_reference_may_be_given():
    """Here the policy itself. Its weights learn, yet no gradient flows through the reference."""
    run = trainer(with_adapter(text_model(), 0.3), kl_coef=0.1)
    other = grpo.GRPO(run.model, run.optimizer, run.settings, reference=nullcontext)
    groups, metrics = step(other, "one", "two")
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert not any(group.ref_logprobs.requires_grad for group in groups)


def test_a_reference_that_would_learn_too_is_refused():
    """All weights learn, and there is no adapter to disable."""
    with pytest.raises(ValueError, match="the reference must be a frozen copy"):
        step(trainer(text_model(), kl_coef=0.1), "one")


def test_dropout_is_off_in_every_part():
    """An earlier update or the caller may have left the model in train mode."""
    model = with_adapter(text_model(attention_dropout=0.5), lora_dropout=0.5)
    run = trainer(model, kl_coef=0.1)
    model.train()
    groups = roll_out(run, "one", "two")
    model.train()
    run.add_reference(groups)
    model.train()
    metrics = run.update(groups)
    assert metrics["mean_logprob_gap"] < 1e-4 and metrics["kl"] == pytest.approx(0, abs=1e-6)


def test_the_kl_is_looked_at_before_the_first_step_alone():
    """A run that continues with its optimizer has moved from the reference already."""
    model = with_adapter(text_model(), 0.3)
    run = trainer(model, torch.optim.AdamW, kl_coef=0.1)
    with pytest.warns(UserWarning, match="kl is above 0 at the start"):
        step(run, "one")
    again = trainer(model, kl_coef=0.1)
    again.optimizer = run.optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert step(again, "one", seed=1)[1]["kl"] > 0.01
        assert step(run, "one", seed=2)[1]["kl"] > 0.01


def test_a_tiny_update_moves_the_adapter_and_not_the_bf16_base():
    """PEFT keeps the adapter in float32: 5e-6 on top of 0.02 is below what bf16 can hold."""
    model = with_adapter(text_model().to(torch.bfloat16))
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    for p in model.parameters():
        if p.requires_grad:
            assert p.dtype == torch.float32
            p.data.fill_(0.02)
    step(trainer(model, optimizer=torch.optim.Adam, lr=5e-6, kl_coef=0.1), "one", "two")
    assert all(2e-6 < (p - 0.02).abs().max() < 8e-6 for p in adapter_of(model).values())
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)


def test_gradient_checkpointing_is_awake_in_training_and_changes_nothing():
    """A layer then runs twice in training, but once in sampling, where its cache is needed."""
    found = []
    for passes in (1, 2):
        base, calls = text_model(), []
        if passes == 2:  # before PEFT, which then lets gradients into the frozen layers
            base.activation_checkpointing_enable()
        base.model.layers[0].mlp.register_forward_pre_hook(lambda *_, to=calls: to.append(1))
        run = trainer(with_adapter(base), lr=1.0, kl_coef=0.1)
        # The second step begins in training mode.
        found.append([step(run, "one", "two", seed=seed)[1] for seed in (0, 1)])
        assert len(calls) == 2 * (6 + 2 + 2 * passes)  # of sampling, reference, and update
    for plain, checkpointed in zip(*found):
        assert checkpointed == pytest.approx(plain, abs=1e-5)


# ---- 1 and 4, against transformers' generate() ---------------------------------------------------


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def reread(model, ids, tokens, **shaping):
    """The log-probs (G, T) of a group's tokens, by teacher forcing."""
    with torch.no_grad():
        return get_per_token_logprobs(
            model, torch.cat([ids.expand(len(tokens), -1), tokens], 1), tokens.shape[1], **shaping
        )


def oracle(model, inputs, tokens, nucleus, allowed_ids, temperature):
    """Log-probs of `tokens` (G, T) by the raw logits of transformers' own generate(), one prompt
    alone and unpadded."""
    length = inputs["input_ids"].shape[1]

    def force(input_ids, scores):  # walk along the tokens, whatever the model thinks of them
        step = input_ids.shape[1] - length
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, step : step + 1], 0.0)

    batch = {k: v.repeat(len(tokens), *[1] * (v.ndim - 1)) for k, v in inputs.items()}
    out = model.generate(
        **batch,
        max_new_tokens=tokens.shape[1],
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([force]),
        eos_token_id=None,
    )
    assert torch.equal(out.sequences[:, length:], tokens)
    logits = torch.stack(out.logits, dim=1)[..., allowed_ids].float() / temperature  # (G, T, V)
    assert nucleus.shape == logits.shape and nucleus.dtype == torch.bool
    assert logits.softmax(-1).where(nucleus, 0).sum(-1).min() > 0.9 - 1e-4  # top-p
    logits = logits.masked_fill(~nucleus, -torch.inf)
    drawn = tokens.unsqueeze(-1) - allowed_ids.start
    return logits.log_softmax(-1).gather(-1, drawn).squeeze(-1)


IDS = slice(3, 45)  # that may be sampled: not its first one, nor its last


def test_sampling_equals_generate():
    """A prompt is padded beside a longer one."""
    model, how = text_model(), {"allowed_ids": IDS, "temperature": 6.0}
    tokens, logprobs, nucleus = generate_with_logprobs(
        model, [SHORT, LONG], 12, num_samples=2, top_p=0.9, generators=seeded(10, 11), **how
    )
    assert tokens.shape == logprobs.shape == (4, 12)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert len(tokens.unique(dim=0)) == 4  # a group of copies teaches nothing
    for i, prompt in enumerate([SHORT, LONG]):
        rows = slice(2 * i, 2 * i + 2)
        inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}
        expected = oracle(model, inputs, tokens[rows], nucleus[rows], **how)
        again = reread(model, prompt, tokens[rows], nucleus=nucleus[rows], **how)
        for found in (logprobs[rows], again):
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_reading_again_has_to_know_how_it_was_sampled():
    """The silent trap."""
    model, how = text_model(), {"allowed_ids": IDS, "temperature": 3.0}
    sampling = {"top_p": 0.7, "generators": seeded(0), **how}
    tokens, logprobs, nucleus = generate_with_logprobs(model, [LONG], 12, **sampling)
    how["nucleus"] = nucleus
    without = {name: {k: v for k, v in how.items() if k != name} for name in how}
    without["allowed_ids"]["nucleus"] = None  # it is as wide as there are ids
    gap = lambda told: (reread(model, LONG, tokens, **told) - logprobs).abs().max()
    assert gap(how) < 2e-4 and min(map(gap, without.values())) > 0.1


class Places(Bigram):
    """It draws by time, row and column alone, whatever the ids are."""

    def __call__(self, position_ids, **_):
        time, row, column = position_ids
        return super().__call__((time + 2 * row + column) % 3)


def test_positions_reach_sampling_and_every_pass():
    """Of a picture's codes, or of any model that is told its positions; one prompt is padded."""
    run = trainer(with_adapter(text_model()))
    run.model = Places()
    run.model.eval = lambda: None
    places = [torch.randint(9, (3, len(ids) + 6)) for ids in (LONG, SHORT)]
    groups = run.sample([(LONG, places[0], 6), (SHORT, places[1], 6)], 4, 0)
    for group, (time, row, column) in zip(groups, places):
        before = ((time + 2 * row + column) % 3)[-7:-1]  # the places that predict the T tokens
        by_hand = Bigram()(before).logits.log_softmax(-1).expand(4, 6, 3)
        by_hand = by_hand.gather(-1, group.tokens[..., None])[..., 0]
        for found in (group.old_logprobs, run.logprobs(group, torch.arange(4))):
            torch.testing.assert_close(found, by_hand)


def test_exactly_t_codes_even_when_the_model_wants_to_stop():
    model = text_model()
    wants = torch.zeros(50).index_fill(0, torch.tensor([2]), 100)  # its end
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + wants)
    tokens, logprobs, _ = generate_with_logprobs(model, [LONG], 30, allowed_ids=slice(3, 50))
    assert tokens.shape == (1, 30) and tokens.min() >= 3
    assert logprobs.min() > -30  # not charged for the ids that were ruled out


def test_samples_follow_the_distribution():
    """20,000 samples of two tokens after 0. Of 1/2, 1/3, 1/6 a top-p of 0.7 keeps the first two."""
    tokens, _, _ = generate_with_logprobs(
        Bigram(), [torch.tensor([0])], 2, num_samples=20_000, top_p=0.7, generators=seeded(0)
    )
    counts = Counter(map(tuple, tokens.tolist()))
    frequency = {pair: count / 20_000 for pair, count in counts.items()}
    by_hand = {(0, 0): 0.6 * 0.6, (0, 1): 0.6 * 0.4, (1, 1): 0.4 * 0.6, (1, 2): 0.4 * 0.4}
    assert frequency == pytest.approx(by_hand, abs=0.015)


# ---- the sampler ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [70, 80, 90])
def test_group_i_depends_on_its_prompt_and_on_seed_plus_i_alone(seed):
    """A neighbour removed or exchanged changes the padding, and with it nothing but rounding."""
    torch.manual_seed(seed)
    one, *others = [torch.randint(50, (length,)) for length in (5, 2, 4)]
    forwards, model = [], with_adapter(text_model(), 0.3)
    count = lambda **inputs: forwards.append(1) or model(**inputs)
    shaping = {"temperature": 3.0, "top_p": 0.9, "allowed_ids": slice(0, 45)}
    run, prompts = trainer(model, token_forward=count, **shaping), [one, *others, one]
    sample = lambda seed, *ids: run.sample([(each, None, 12) for each in ids], 3, seed)
    together = sample(seed, *prompts)
    assert len(forwards) == 11  # for all tokens but the first
    alone = [sample(seed + i, ids)[0] for i, ids in enumerate(prompts)]
    for group, other in [*zip(together, alone), *zip(together[1:], sample(seed + 1, *others))]:
        for name in ("prompt_ids", "tokens", "nucleus"):
            assert torch.equal(getattr(group, name), getattr(other, name))
        torch.testing.assert_close(group.old_logprobs, other.old_logprobs, atol=2e-4, rtol=0)
    # The same prompt twice makes two groups.
    assert not torch.equal(together[0].tokens, together[3].tokens)


def test_prompts_of_texts_are_lists_of_ids():
    """As a tokenizer gives them, or tensors; a tuple says the same, with positions."""
    run = trainer()
    tuples = run.sample([(ids, None, 6) for ids in (LONG, SHORT)], 3, 0)
    for prompts in ([LONG.tolist(), SHORT.tolist()], (LONG, SHORT)):
        for one, other in zip(tuples, run.sample(prompts, 3, 0, max_new_tokens=6), strict=True):
            assert torch.equal(one.prompt_ids, other.prompt_ids)
            assert torch.equal(one.tokens, other.tokens)


def test_metrics_of_several_processes_are_those_of_one():
    """Whatever share of its groups each has learned from: a mean of means is not enough."""
    names = ["loss", "policy_loss", "kl", "clip_fraction", "ratio_mean"]
    names += ["mean_logprob_gap", "max_logprob_gap"]
    report = lambda size, value: (size, {name: value * i for i, name in enumerate(names)})
    mine, others = [report(4, 0.5), report(2, 2.0)], [[report(3, -1.0)], []]
    run, seen = trainer(), []
    whole = run.mean_metrics([*mine, *others[0]])
    run.average = lambda tensors: seen.append(tensors[0].clone())
    for own in others:
        run.mean_metrics(own)
    run.average = lambda tensors: tensors[0].add_(sum(seen)).div_(3)
    own = run.mean_metrics(mine)
    assert own.pop("max_logprob_gap") == 12 == whole.pop("max_logprob_gap")
    assert own == pytest.approx(whole)
    assert whole["kl"] == pytest.approx(2 * (4 * 0.5 + 2 * 2 - 3) / 9)


def test_samples_without_a_seed_take_the_next_ones(monkeypatch):
    """No two steps share one, and no two processes. A seed that is given changes nothing for the
    others, and an empty list of ends ends nothing."""
    run, prompts = trainer(), [(ids, None, 6) for ids in (LONG, SHORT)]
    steps = [run.sample(prompts, 3), trainer(end_ids=[]).sample(prompts, 3, 7)]
    steps.append(run.sample(prompts, 3))
    for name, answer in (("is_initialized", True), ("get_rank", 3)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    monkeypatch.setattr(grpo, "_check_process", lambda *given: None)
    steps.append(trainer().sample(prompts, 3))
    for groups, seed in zip(steps, (0, 7, 2, 3 * 2**24), strict=True):
        for group, same in zip(groups, run.sample(prompts, 3, seed), strict=True):
            assert torch.equal(group.tokens, same.tokens)
    firsts = [groups[0].tokens.tolist() for groups in steps]
    assert len({str(tokens) for tokens in firsts}) == 4


def test_each_prompt_is_read_once():
    """By as many rows as there are prompts, the cache then has a row per sample; only the last
    logits are computed."""
    model, seen = text_model(), []
    model.register_forward_hook(
        lambda module, _, given, output: seen.append(
            (*given["input_ids"].shape, *given["attention_mask"].shape, output.logits.shape[1])
        ),
        with_kwargs=True,
    )
    generate_with_logprobs(model, [LONG, SHORT, LONG[:4]], 3, num_samples=2, top_p=0.9)
    assert seen == [(3, 5, 3, 5, 1), (6, 1, 6, 6, 1), (6, 1, 6, 7, 1)]


class Waits(TorchDispatchMode):
    """Counts what makes the CPU wait for a GPU: a number for Python, places that a mask names."""

    count = 0

    def __torch_dispatch__(self, operation, types, given=(), options=None):
        aten, options = torch.ops.aten, options or {}
        places = given[1] if operation is aten.index.Tensor else []
        by_mask = any(each is not None and each.dtype == torch.bool for each in places)
        numbers = aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default
        self.count += by_mask or operation in numbers
        return operation(*given, **options)


@pytest.mark.parametrize(
    "prompts, end_ids, per_token",  # at most
    [
        ([[1, 2], [3, 4]], None, 0),
        # Where texts may end: which ones have, every 16 tokens.
        ([[1, 2], [3, 4]], 49, 3 / 16),
        # transformers asks once whether a mask has padding in it.
        ([[1, 2], [3]], None, 1),
    ],
)
def test_the_cpu_waits_for_no_token_of_prompts_of_one_length(prompts, end_ids, per_token):
    model, prompts, waits = text_model(), [*map(torch.tensor, prompts)], []
    shaping = {"num_samples": 3, "end_ids": end_ids, "allowed_ids": slice(0, 49)}  # none ends
    for length in (17, 33):
        with Waits() as seen:
            generate_with_logprobs(model, prompts, length, **shaping)
        waits.append(seen.count)
    assert (waits[1] - waits[0]) / 16 <= per_token


def test_a_kernel_that_answers_nan_to_padding_is_loud(monkeypatch):
    """Padding sees nothing: there a kernel of torch answers 0, and nothing else depends on it."""
    attend, blind = torch.nn.functional.scaled_dot_product_attention, []

    def attention(*given, attn_mask=None, **options):
        output = attend(*given, attn_mask=attn_mask, **options)
        if attn_mask is not None:
            unseeing = ~attn_mask.any(-1, keepdim=True)
            if not any(blind):  # the first layer: nothing is NaN yet
                assert (output.where(unseeing, 0) == 0).all()  # this kernel's answer
            blind.append(unseeing.any().item())
            output = output.masked_fill(unseeing, torch.nan)
        return output

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    generate_with_logprobs(text_model(), [LONG], 3)
    assert not any(blind)
    with pytest.raises(NotFinite):
        generate_with_logprobs(text_model(), [LONG, SHORT], 3)
    assert any(blind)


@pytest.mark.parametrize("ends, seed", [(tuple(range(1, 50, 9)), 3), ([0], 1), (0, 1)])
def test_sampling_goes_through_the_end_of_every_text(ends, seed):
    """What was sampled until then is what it would have been. That some end ids are allowed is
    enough; a single id may be a number, also 0, as transformers has it."""
    shaping = {"temperature": 2.0, "allowed_ids": slice(0, 45)}
    run, passes = trainer(end_ids=ends, **shaping), []
    run.model.register_forward_pre_hook(
        lambda module, _, given: passes.append(len(given["input_ids"])), with_kwargs=True
    )
    cat = lambda groups, name: torch.cat([getattr(group, name) for group in groups])
    groups, endless = (
        each.sample([(ids, None, 40) for ids in (LONG, SHORT)], 2, seed)
        for each in (run, trainer(**shaping))
    )
    tokens, logprobs, mask = (cat(groups, name) for name in ("tokens", "old_logprobs", "mask"))
    assert all(group.mask is None for group in endless)
    rows, ends = cat(endless, "tokens").tolist(), np.atleast_1d(ends)
    first = [next(t for t, token in enumerate(row) if token in ends) for row in rows]
    assert min(first) < 16 <= max(first) < 32
    # At every 16th token it looks; ended texts then leave the passes.
    assert passes == [2] + 15 * [4] + 16 * [sum(end >= 16 for end in first)]
    length = max(first) + 1
    assert mask.sum(1).tolist() == [end + 1 for end in first] and mask.shape[1] == length
    expected = cat(endless, "tokens")[:, :length]
    # Nothing stands after an end.
    assert torch.equal(tokens, expected.where(mask > 0, torch.tensor(ends[0])))
    logprobs, expected = logprobs[mask > 0], cat(endless, "old_logprobs")[:, :length][mask > 0]
    torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_pass_reads_no_further_than_what_counts(top_p):
    """Short samples share a micro-batch; each has the log-probs of a pass over all tokens."""
    run, lengths = trainer(end_ids=7, micro_batch_size=2, top_p=top_p), []
    (group,) = run.sample([(LONG, None, 12)], 5, 3)
    group.mask = torch.zeros(group.tokens.shape)
    for row, counting in enumerate(([0, 8], [2], [], [0, 1, 2], [5])):
        group.mask[row, counting] = 1  # through tokens 9, 3, none, 3 and 6; gaps change nothing
    run.model.register_forward_pre_hook(
        lambda module, _, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert [rows.tolist() for rows in run.micro_batches(group)] == [[2, 1], [3, 4], [0]]
    found = run.all_logprobs(group)
    assert lengths == [len(LONG) + end - 1 for end in (3, 6, 9)]
    expected = reread(run.model, LONG, group.tokens, nucleus=group.nucleus)
    counts = group.mask > 0
    torch.testing.assert_close(found[counts], expected[counts], atol=1e-5, rtol=0)
    assert found.shape == group.tokens.shape and (found[:, 9:] == 0).all()
    group.mask = None
    assert [rows.tolist() for rows in run.micro_batches(group)] == [[0, 1], [2, 3], [4]]


def test_before_the_first_update_ratio_is_one_and_kl_zero():
    """Whatever shapes the sampler's distribution reaches reading again too: ids, temperature and
    nucleus."""
    settings = {"kl_coef": 0.1, "top_p": 0.7, "temperature": 3.0, "micro_batch_size": 3}
    run = trainer(allowed_ids=IDS, **settings)
    groups = run.sample([(ids, None, 24) for ids in (LONG, SHORT)], 4, 0)
    set_advantages(groups, torch.arange(8.0))
    run.add_reference(groups)
    with warnings.catch_warnings(), torch.no_grad():  # whatever the caller has switched off
        warnings.simplefilter("error", UserWarning)
        metrics = run.update(groups)
    assert set(metrics) == NAMES
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == metrics["skipped"] == metrics["groups_without_spread"] == 0
    # A loss of 0 teaches: its gradient is not 0.
    assert metrics["loss"] == pytest.approx(0, abs=1e-6) and metrics["grad_norm"] > 0.01
    assert 0 < metrics["mean_logprob_gap"] < metrics["max_logprob_gap"] < 2e-4


# ---- one GPU for two models ----------------------------------------------------------------------


def test_a_prompt_on_the_gpu_comes_to_the_cpu_where_its_tokens_are():
    class Far(torch.Tensor):
        def cpu(self):
            return self.as_subclass(torch.Tensor)

    (group,) = trainer().sample([(LONG.as_subclass(Far), None, 2)], 2, 0)
    assert type(group.prompt_ids) is torch.Tensor


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="there is no Apple GPU")
def test_a_step_on_an_apple_gpu():
    _, metrics = step(trainer(with_adapter(text_model()).to("mps"), kl_coef=0.1), "one")
    assert metrics["mean_logprob_gap"] < 1e-3 and metrics["grad_norm"] > 0


def test_models_take_turns_on_the_gpu(monkeypatch):
    """With the CPU as the 'GPU', and a copy as pinned memory, the coming and going of weights can
    be watched."""
    policy, decoder = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).requires_grad_(False)
    policy.weight.requires_grad_(False)  # its bias learns
    policy.register_buffer("rope", torch.ones(3))
    x, learning = torch.ones(3), policy.bias.data_ptr()
    expected, evicted, emptied = (policy(x), decoder(x)), [], []

    def up():
        """Which of the two are on the GPU: all of their frozen weights or none."""
        gone = lambda pairs: {weight.data_ptr() != home.data_ptr() for weight, home in pairs}
        (of_policy,), (of_decoder,) = (gone(offload.homes[model]) for model in (policy, decoder))
        return of_policy, of_decoder

    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(up()))
    offload = Offload([policy, decoder], torch.device("cpu"), on_evict=lambda: evicted.append(up()))
    for models in ([policy], [policy], [decoder], [policy, decoder], [policy]):
        offload.all_but(*models)
        assert up() == (policy in models, decoder in models)
        decoder.weight.data += up()[1]  # of the copy, which is dropped
    # Rewards leave blocks behind, which are freed before weights are copied up.
    nothing, of_policy, of_decoder = (False, False), (True, False), (False, True)
    assert emptied == [nothing, of_policy, nothing, of_decoder, of_policy]
    assert evicted == [nothing, of_policy]  # only where something has left
    assert torch.equal(policy(x), expected[0]) and torch.equal(decoder(x), expected[1])
    assert policy.bias.data_ptr() == learning


def test_each_part_begins_before_it_asks_where_the_model_is(monkeypatch):
    """An Offload then brings it: before, its weights are in host memory."""
    run, here = trainer(kl_coef=0.1), []
    meta = torch.device("meta")
    where = property(lambda model: torch.device("cpu") if here else meta)
    monkeypatch.setattr(type(run.model), "device", where, raising=False)
    run.begin = lambda part, model: here.append((part, model))
    groups = roll_out(run, "one", "two")
    assert here.pop() == ("sample", run.model)
    run.add_reference(groups)
    assert here.pop() == ("reference", run.model)
    metrics = run.update(groups)
    assert metrics["grad_norm"] > 0 and here == [("update", run.model)]


# ---- what would be silent (more in tests/test_zoo.py) --------------------------------------------


def loss_of(**given):
    zeros = {"old_logprobs": torch.zeros(2, 3), "advantages": torch.zeros(2)}
    return lambda: compute_grpo_loss(torch.zeros(2, 3), **zeros | given)


@pytest.mark.parametrize(
    "message, calls",
    [
        ("several T", [lambda: trainer().sample([(LONG, None, 6), (SHORT, None, 5)], 2, 0)]),
        (
            r'give a list of prompts, each a list of ids: tokenizer\(texts\)\["input_ids"\]',
            [
                lambda given=given: trainer().sample(given, 2, max_new_tokens=6)
                for given in (
                    "text",
                    ["text", "other"],
                    {"input_ids": [[5, 6]]},
                    [{"input_ids": [5, 6]}],
                    [{"role": "user", "content": "text"}],
                    [[5, 6], "text"],
                    [],
                    [[]],
                    [5, 6, 7],
                    [[[5, 6]]],
                    torch.stack([LONG, LONG]),  # padding would be read as text
                    LONG,
                    [LONG, SHORT[None]],
                    [LONG, SHORT[0]],
                    [(SHORT[None], None, 6)],
                    [LONG.float()],
                )
            ],
        ),
        (
            r"give max_new_tokens, or tuples \(prompt_ids, position_ids, T\)",
            [
                lambda given=given: trainer().sample(given, 2)
                for given in ([LONG], [[5, 6]], [(LONG, 6)], [(LONG, None, None)])
            ],
        ),
        # A lone sample has no baseline; infinity has no z-score.
        (
            r"give \(N\*G,\), G > 1, none infinite",
            [
                lambda rewards=rewards, size=size: compute_advantages(rewards, size)
                for rewards, size in (
                    ([1, 2, 3, 4], 1),
                    ([1, math.inf, 3, 4], 2),
                    ([1, 2, -math.inf, 4], 4),
                    ([[1, 2], [3, 4]], 2),
                )
            ],
        ),
        ("no past_key_values", [lambda: generate_with_logprobs(Bigram(None), [LONG * 0], 1)]),
        ("needs ref_logprobs", [loss_of(kl_coef=0.1)]),
        # It would be broadcast.
        (
            r"give \(B, T\)",
            [
                loss_of(**{name: torch.zeros(shape)})
                for name in ("old_logprobs", "ref_logprobs", "mask", "advantages")
                for shape in ((2, 1), (3,), (1, 3), (1,))
                if (name, shape) != ("advantages", (2, 1))  # as (2,)
            ],
        ),
    ],
)
def test_what_is_refused(message, calls):
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_log_probs_that_are_not_finite_are_an_error():
    spoil = lambda module, inputs, logits: logits.index_fill(0, torch.tensor([1]), NAN)
    model = text_model()
    model.lm_head.register_forward_hook(spoil)  # of one of two samples
    with pytest.raises(NotFinite, match="damaged weights"):
        generate_with_logprobs(model, [LONG, SHORT], 1)


def test_temperature_0_is_named_and_what_it_is_meant_for_works():
    """A text of the likeliest tokens."""
    with pytest.raises(NotFinite, match="temperature is 0; .* top_p to 1e-6"):
        generate_with_logprobs(text_model(), [LONG], 1, temperature=0)
    tokens, _, _ = generate_with_logprobs(model := text_model(), [LONG], 6, top_p=1e-6)
    assert torch.equal(model.generate(LONG[None], max_new_tokens=6, do_sample=False)[:, 5:], tokens)


EQUAL, UNEQUAL = (SimpleNamespace(old_logprobs=torch.tensor(x)) for x in ([[1], [1]], [[1], [2]]))


@pytest.mark.parametrize(
    "seen, sign",
    [
        ({"gap": 5e-4}, ""),
        ({"gap": 2e-3}, "mean_logprob_gap is above 0.001"),
        ({"gap": 5e-2, "dtype": torch.bfloat16}, ""),
        ({"gap": 2e-1, "dtype": torch.bfloat16}, "mean_logprob_gap is above 0.1"),
        ({"kl": 0.005, "at_start": True}, ""),
        ({"kl": 0.02, "at_start": True}, "the reference is not the model before training"),
        ({"kl": 0.02}, ""),
        ({"norms": [1.0, 0.0]}, ""),
        ({"norms": [0.0, 1.0]}, ""),
        ({"norms": [0.0, 0.0]}, "exactly 0: does the optimizer hold the active adapter"),
        ({"norms": [0.0], "groups": []}, ""),
        ({"norms": [0.0], "groups": [EQUAL, EQUAL]}, "exactly 0: equal samples"),
        ({"norms": [1.0, NAN]}, "no step was taken"),
    ],
)
def test_update_warns_of(seen, sign):
    """Rounding makes a gap of 4e-6 in float32, and of 0.05 in bfloat16."""

    def warn(gap=0, kl=0, at_start=False, norms=(1,), groups=(EQUAL, UNEQUAL), dtype=None):
        metrics = {"mean_logprob_gap": gap, "kl": kl}
        parts = torch.nn.Linear(1, 1, dtype=dtype), torch.nn.Linear(1, 1)  # base and adapter
        _warn_of(metrics, norms, at_start, groups, torch.nn.ModuleList(parts))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(**seen)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == bool(sign) and sign in "".join(messages)


def test_a_trainer_leaves_out_cudnns_attention_and_an_import_changes_nothing():
    torch.backends.cuda.enable_cudnn_sdp(True)
    runpy.run_path(grpo.__file__)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    trainer()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
