"""Mistakes of docs/mistakes.md as they are often made, beside what grpo.py and rewards.py do."""

import torch
import world

import rewards
from grpo import compute_grpo_loss


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
