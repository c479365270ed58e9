"""Mistakes of docs/worth.md as they are often made, beside what grpo.py and rewards.py do."""

import numpy as np
import pytest
import torch
import world

import rewards
from grpo import compute_advantages, compute_grpo_loss


def logits_and_reference():
    torch.manual_seed(0)
    logits, ref = torch.randn(2, 6, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(0)


def expected_gradient(loss_of, logits, ref):
    """Of loss_of(log pi, log ref) per token, on samples from pi: exactly, by summing over all
    ids."""
    logp = logits.log_softmax(0)  # (V,)
    losses = [loss_of(*both) for both in zip(logp.view(-1, 1, 1), ref.view(-1, 1, 1))]
    return torch.autograd.grad((logp.exp().detach() * torch.stack(losses)).sum(), logits)[0]  # (V,)


def test_a_kl_term_of_log_ratios_has_no_gradient():
    """log pi - log ref estimates the KL without bias, and as a loss term does nothing; k3 pulls to
    the reference."""
    given = logits_and_reference()
    log_ratio = lambda logp, ref: (logp - ref).sum()
    k3 = lambda logp, ref: compute_grpo_loss(logp, logp.detach(), torch.zeros(1), ref, kl_coef=1)[0]
    assert expected_gradient(log_ratio, *given).norm() < 1e-12
    assert expected_gradient(k3, *given).norm() > 0.3


def test_an_entropy_bonus_of_log_probs_has_no_gradient():
    """Minus the log-prob estimates the entropy without bias, and as a bonus does nothing; as an
    advantage, A - c log pi_old, it adds the gradient of c times the entropy."""
    logits, ref = logits_and_reference()
    log_prob = lambda logp, ref: logp.sum()
    advantages = lambda logp, ref: compute_grpo_loss(logp, logp.detach(), -logp[0].detach())[0]
    logp = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logp.exp() * logp).sum(), logits)  # of minus the entropy
    assert expected_gradient(log_prob, logits, ref).norm() < 1e-12 and wanted.norm() > 0.3
    torch.testing.assert_close(expected_gradient(advantages, logits, ref), wanted)


def test_zscores_in_float32_make_advantages_of_equal_rewards():
    equal = np.full(8, 9.9, dtype=np.float32)
    total = np.float32(0)
    for reward in equal:
        total += reward
    centred = equal - total / np.float32(8)
    # The mean is off by its last bit.
    assert 0.4 < np.abs(centred / (centred.std(ddof=1) + 1e-6)).max() < 1
    assert not compute_advantages(torch.from_numpy(equal), 8).any()


def test_the_loss_of_fresh_samples_is_zero_and_its_gradient_is_not():
    torch.manual_seed(0)
    new = torch.randn(8, 5, requires_grad=True)
    advantages = compute_advantages(torch.rand(8), 8)
    loss, _ = compute_grpo_loss(new, new.detach(), advantages)
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert new.grad.norm() > 0.1


def test_a_ratio_of_means_over_prompt_and_codes_hides_that_the_policy_moved():
    """Every code is 1.5 times as likely. Over a prompt three times as long the mean is 1.11;
    nothing is clipped."""
    old = torch.zeros(1, 10)
    new = torch.full((1, 10), 1.5).log()
    prompt = torch.zeros(1, 30)  # its log-probs are of no interest, and differ little
    mean_ratio = (torch.cat([prompt, new], 1).mean(1) - torch.cat([prompt, old], 1).mean(1)).exp()
    assert mean_ratio.item() == pytest.approx(1.5**0.25) and mean_ratio < 1.2
    _, metrics = compute_grpo_loss(new, old, torch.ones(1), clip_range=0.2)
    assert metrics["clip_fraction"] == pytest.approx(1) and metrics["ratio_mean"] == pytest.approx(
        1.5
    )


def test_mse_alone_prefers_a_blank_picture_to_a_wrong_one():
    """Of one object: nothing at all against the right shape in another colour, and against the
    object elsewhere."""
    blank = world.draw((None,) * 4)
    colours = []
    places = []
    for shape, colour in world.SPRITES:
        scenes = [((shape, other), None, None, None) for other in world.COLOURS if other != colour]
        scenes += [
            tuple((shape, colour) if i == place else None for i in range(4)) for place in (1, 2, 3)
        ]
        target = world.draw(((shape, colour), None, None, None))
        images = [blank, *map(world.draw, scenes)]
        empty, *values = rewards.mse(images, [target] * 9).tolist()
        preferred = [empty > value for value in values]
        colours += preferred[:5]
        places += preferred[5:]
    assert (sum(colours), len(colours)) == (30, 180)
    assert (sum(places), len(places)) == (108, 108)
