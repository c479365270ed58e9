"""Mistakes of docs/mistakes.md as they are often made, beside what grpo.py and rewards.py do."""

import re

import torch
import world
from conftest import ROOT

import rewards
from grpo import compute_grpo_loss


def test_the_page_names_tests():
    """In each row but one; and as many rows as its title says."""
    page = (ROOT / "docs" / "mistakes.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    named = [row[4].strip("`") for row in rows if row[4] != "Test"]
    files = [ROOT / "test_grpo.py", *(ROOT / "tests").glob("test_*.py")]
    tests = [
        name
        for file in files
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    ]
    assert [name for name in named if not any(name in test for test in tests)] == ["-"]
    assert page.startswith(f"# {len(named)} mistakes ")


def test_the_mean_of_log_probs_has_no_gradient():
    """As a KL term, log pi - log ref, or as an entropy bonus it does nothing, though its value is
    correct. As an advantage, A - c log pi_old, it adds the gradient of c times the entropy."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)  # (V,)

    def gradient(loss_of):
        """Its expectation over samples from pi: exactly, by summing over all ids."""
        losses = torch.stack([loss_of(each) for each in logp.view(-1, 1, 1)])
        mean = (logp.exp().detach() * losses).sum()
        return torch.autograd.grad(mean, logits, retain_graph=True)[0]

    as_advantage = lambda logp: compute_grpo_loss(logp, logp.detach(), -logp[0].detach())[0]
    entropy = -(logp.exp() * logp).sum()
    (wanted,) = torch.autograd.grad(-entropy, logits, retain_graph=True)
    assert gradient(torch.sum).norm() < 1e-12 and wanted.norm() > 0.3
    torch.testing.assert_close(gradient(as_advantage), wanted)


def test_log_probs_of_another_temperature_leave_a_gradient_where_all_samples_are_equally_good():
    """Old and new agree, so the ratio is 1. But the mean of grad log p is 0 only over samples of
    that p."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    sampled = logits / 0.9
    often = sampled.softmax(0).detach()  # (V,)

    def gradient(logits_of_loss):
        logp = logits_of_loss.log_softmax(0).view(-1, 1, 1)
        losses = [compute_grpo_loss(x, x.detach(), torch.ones(1, dtype=x.dtype)) for x in logp]
        assert all(metrics["ratio_mean"] == 1 for _, metrics in losses)
        mean = (often * torch.stack([loss for loss, _ in losses])).sum()
        return torch.autograd.grad(mean, logits, retain_graph=True)[0]

    assert gradient(sampled).norm() < 1e-12
    torch.testing.assert_close(gradient(logits), logits.softmax(0).detach() - often)
    assert gradient(logits).norm() > 0.01


def test_labels_changed_in_place_count_prompts_and_padding():
    """Through the view that is made ready for gather(). Here the mask divides, and padding that it
    leaves out changes nothing."""
    labels = torch.tensor([[-100, -100, 3, 4, 5], [-100, 6, 7, -100, -100]])
    mask = (labels != -100).float()
    targets = labels[:, 1:]
    targets[targets == -100] = 0
    assert mask.sum() == 5 and (labels != -100).sum() == 8

    torch.manual_seed(0)
    new, old = torch.randn(2, 2, 5)
    loss = lambda T: compute_grpo_loss(new[:, :T], old[:, :T], torch.ones(2), mask=mask[:, :T])[0]
    mask[0, 3:] = 0
    torch.testing.assert_close(loss(5), loss(3))


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
