"""The losses of benchmarks/losses.py, edited into a copy to the letter: against the papers."""

import pytest
import torch
from conftest import build_run, perturb, prompts_of, shorten, tiny_settings
from test_zoo import EQUAL, LENGTH, llama

from benchmarks import losses
from grpo import compute_advantages
from rewards import Reward
from test_grpo import NAN, exact_kl, trainer, with_adapter

RECIPES = ["GRPO", "Dr. GRPO", "DAPO's token mean", "DAPO's two clip ranges", "GSPO"]
RECIPES += ["old = new.detach()", "REINFORCE", "No baseline"]
RECIPES += ["REINFORCE++", "REINFORCE++-baseline", "RLOO", "CISPO", "GPG", "KL in all groups", "k2"]
RECIPES += ["k3 times the ratio"]
UNDIVIDED = ("Dr. GRPO", "REINFORCE", "RLOO", "GPG")
# The sum of an answer's log-probs, where GRPO has their mean.
SUMMED = ("Dr. GRPO", "REINFORCE", "RLOO")
TOKEN_MEANS = (
    "DAPO's token mean",
    "DAPO's two clip ranges",
    "CISPO",
    "GPG",
    "REINFORCE++-baseline",
)
REWARDS = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0, 3.0, 1.0, 0.0])


moved_on_purpose = pytest.mark.filterwarnings("ignore:mean_logprob_gap", "ignore:kl is above 0")


def rewards_of(name):
    """(8,), of two groups; the second of equal rewards where that is what matters."""
    return REWARDS.clone().index_fill(0, torch.arange(4, 8), 1) if "all groups" in name else REWARDS


def paper(name, model, groups, kl_coef=0.1):
    """The gradient of the loss as the papers write it, over all sequences at once, padded by their
    masks."""
    terms, masks = [], []
    for group, rewards in zip(groups, rewards_of(name).split(4)):
        ids = torch.cat([group.prompt_ids.expand(4, -1), group.tokens], dim=1)
        logprobs = model(input_ids=ids).logits[:, -LENGTH - 1 : -1].log_softmax(-1)
        new = logprobs.gather(-1, group.tokens[..., None])[..., 0]  # (4, T)
        over = REWARDS if name == "REINFORCE++" else rewards
        baseline = 0 if name in ("REINFORCE", "No baseline") else over.mean()
        advantages = (rewards - baseline)[:, None]
        if name == "RLOO":  # each less the mean of the others
            others = torch.stack([torch.cat([rewards[:i], rewards[i + 1 :]]) for i in range(4)])
            advantages = (rewards - others.mean(1))[:, None]
        if name == "REINFORCE++-baseline":
            over = torch.cat([own - own.mean() for own in REWARDS.split(4)])
        if name not in UNDIVIDED:
            advantages = advantages / (over.std() + 1e-6)
        log_ratio = new - group.old_logprobs
        if name == "GSPO":  # the geometric mean of a sequence's ratios, for all of its tokens
            lengths = group.mask.sum(1, keepdim=True)
            log_ratio = ((log_ratio * group.mask).sum(1, keepdim=True) / lengths).expand(-1, LENGTH)
        if name == "old = new.detach()":
            log_ratio = new - new.detach()
        ratio = log_ratio.exp()
        low, high = {"DAPO's two clip ranges": (0.2, 0.28), "GSPO": (3e-4, 4e-4)}.get(
            name, (0.2, 0.2)
        )
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        if name == "CISPO":  # eq. 4, without a lower bound
            gain = ratio.clamp(max=1.2).detach() * advantages * new
        if name == "GPG":
            gain = advantages * new
        log_ref = group.ref_logprobs - new
        k3 = log_ref.exp() - log_ref - 1
        kl = {"k2": log_ref.square() / 2, "k3 times the ratio": ratio * k3}.get(name, k3)
        terms.append(kl_coef * kl - gain)
        masks.append(group.mask)
    terms, mask = torch.cat(terms), torch.cat(masks)
    if name in TOKEN_MEANS:
        loss = (terms * mask).sum() / mask.sum()
    elif name in SUMMED:
        loss = (terms * mask).sum() / LENGTH / len(mask)
    else:
        loss = ((terms * mask).sum(1) / mask.sum(1)).mean()
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def prepared(name):
    """A trainer with an edit, and two groups of ragged masks from before its policy moved.

    Micro-batches are of 3 samples and of 1.
    """
    module = losses.module(name)
    settings = {"micro_batch_size": 3, "kl_coef": 0.1}
    run = trainer(
        with_adapter(llama()), lr=1.0, module=module, max_grad_norm=float("inf"), **settings
    )
    groups = run.sample([(ids, None, LENGTH) for ids in EQUAL], 4, 0)
    module.set_advantages(groups, rewards_of(name))
    for group, lengths in zip(groups, ([8, 3, 5, 1], [2, 1, 2, 4])):
        group.mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).float()
    run.add_reference(groups)
    perturb(run.model, 0.2)
    return run, groups


def taken(run, update):
    """By how much each weight that learns goes down in an update."""
    learning = [p for p in run.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learning]
    metrics = update()
    return [b - p.detach() for b, p in zip(before, learning)], metrics


@moved_on_purpose
@pytest.mark.parametrize("name", RECIPES)
def test_an_edit_gives_the_loss_of_its_paper(name):
    run, groups = prepared(name)
    expected = paper(name, run.model, groups)
    gradient, metrics = taken(run, lambda: run.update(groups))
    for found, wanted in zip(gradient, expected):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-3)
    assert (metrics["clip_fraction"] == 0) == (name == "old = new.detach()")
    if name == "Dr. GRPO":
        plain, same_groups = prepared("GRPO")
        expected = plain.update(same_groups)
        for metric in ("ratio_mean", "kl", "mean_logprob_gap"):
            assert metrics[metric] == pytest.approx(expected[metric], rel=1e-5)  # means stay means


@pytest.mark.parametrize("name", [*SUMMED, *TOKEN_MEANS])
def test_of_one_length_sums_and_token_means_are_the_mean(name):
    """So for pictures these losses weigh each code as GRPO does."""
    new = torch.randn(3, 5, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss, _ = losses.module(name).compute_grpo_loss(new, new.detach(), advantages)
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(gradient, -advantages[:, None].expand(3, 5) / 15)


def test_k2_has_the_gradient_of_the_kl():
    """KL(pi || ref) (arXiv 2510.01555)."""
    _, _, gradient, expected, _ = exact_kl(losses.module("k2").compute_grpo_loss)
    torch.testing.assert_close(gradient, expected)


def test_k3_times_the_ratio_has_value_and_gradient_of_the_kl_after_a_step_too():
    """Of a distribution of 6, by summing over all that another one draws (DeepSeek-V3.2, eq. 7)."""
    loss_of = losses.module("k3 times the ratio").compute_grpo_loss
    torch.manual_seed(0)
    logits, old, ref = torch.randn(6, requires_grad=True), torch.randn(6), torch.randn(6)
    pi, old, ref = (each.log_softmax(0) for each in (logits, old, ref))
    value = total = 0
    for i in range(6):  # the only token of a sample
        new, before, fixed = (each[i].view(1, 1) for each in (pi, old, ref))
        loss, metrics = loss_of(new, before, torch.zeros(1), fixed, kl_coef=1.0)
        value += before.exp().item() * metrics["kl"]
        total += before.exp().item() * loss
    kl = (pi.exp() * (pi - ref)).sum()
    assert value == pytest.approx(kl.item(), abs=1e-5)
    found, expected = (torch.autograd.grad(x, logits, retain_graph=True) for x in (total, kl))
    torch.testing.assert_close(found, expected)


@moved_on_purpose
def test_gpg_takes_the_mean_over_groups_that_teach():
    """With one of two groups without spread the gradient is that of the other group alone."""
    run, groups = prepared("GPG")
    groups[1].advantages = torch.zeros(4)
    twice, _ = taken(run, lambda: run.update(groups))
    other, groups = prepared("GPG")
    once, _ = taken(other, lambda: other.update(groups[:1]))
    for found, wanted in zip(twice, once):
        torch.testing.assert_close(found, wanted)


@moved_on_purpose
def test_two_ranks_make_the_step_of_one_process():
    """Each has one of two groups, whose tokens differ in number. They average the number of tokens,
    then the gradients, then metrics twice."""
    sent = []

    def average(tensors):
        sent.append([tensor.clone() for tensor in tensors])
        if tensors[0].ndim == 0:
            tensors[0].copy_(tokens / 2)

    for i in range(2):
        run, groups = prepared("DAPO's token mean")
        expected = paper("DAPO's token mean", run.model, groups)
        tokens = sum(group.mask.sum() for group in groups)
        run.average = average
        run.update([groups[i]])
    numbers, gradients = zip(*(sent[i : i + 2] for i in (0, 4)))
    assert sum(number for (number,) in numbers) == tokens
    for one, other, wanted in zip(*gradients, expected, strict=True):
        torch.testing.assert_close((one + other) / 2, wanted, atol=1e-5, rtol=1e-3)


def test_a_group_of_equal_rewards_teaches_nothing_without_a_baseline_too():
    found = losses.module("No baseline").compute_advantages(torch.ones(8), 4)
    assert not found.any()


def test_raft_trains_on_the_best_of_each_group():
    """Where all are wrong, on none; of equal correct samples on the first."""
    rewards = torch.tensor([0, 1, 2, 5, 0, NAN, 1, 0, NAN, NAN, NAN, NAN, 0, 0, NAN, 0, 1, 1, 1, 1])
    found = losses.module("RAFT").compute_advantages(rewards, 4)
    assert found.tolist() == [0, 0, 0, 4, 0, 0, 4, 0] + [0] * 8 + [4, 0, 0, 0]


def test_shuffled_rewards_stay_in_their_group_and_go_by_luck():
    expected = compute_advantages(REWARDS, 4).view(2, 4)
    shuffle = losses.module("Rewards shuffled").compute_advantages
    torch.manual_seed(0)
    found = torch.stack([shuffle(REWARDS, 4).view(2, 4) for _ in range(500)])
    assert torch.equal(found.sort(-1)[0][0], expected.sort(-1)[0])
    assert found.mean(0).abs().max() < 0.2
    assert (found[:, 0].argmax(-1) != found[:, 1].argmax(-1)).any()  # each group by its own


@pytest.mark.parametrize("teaches", ["circle", "square"])
def test_other_prompts_take_the_place_of_groups_without_spread(monkeypatch, teaches):
    """Groups of a word teach. Prompts of three steps are waiting, then the step is filled up."""
    step = losses.module("DAPO's dynamic sampling", "train.py")
    shorten(monkeypatch.setattr)
    run = build_run(settings := tiny_settings("--height 32 --width 32 --group-size 2"))
    words = "a red circle", "a blue cross", "a red cross", "a red ring", "a blue circle", "a ring"
    prompts, calls, shown = prompts_of(*words), [], []

    def reward(images, prompts, targets):
        calls.append(prompts[::2])
        shown.extend(image.tobytes() for image in images)
        return [float(i % 2 and teaches in prompt) for i, prompt in enumerate(prompts)]

    how = run, settings, {"mine": Reward("mine", 1.0, reward)}, prompts
    groups = run.trainer.sample(run.glm_image.encode(prompts[:2], settings), 2, 3)
    kept, found, images, raw_rewards = step.filled(*how, groups, 3)
    with_circle = [list(words[:2]), *([word] for word in words[2:5])]
    assert calls == (
        with_circle if teaches == "circle" else [list(words[i : i + 2]) for i in (0, 2, 4)]
    )
    places = [0, 4] if teaches == "circle" else [0, 1]
    assert [prompt.text for prompt in kept] == [words[i] for i in places]
    assert [image.tobytes() for image in images] == [
        shown[2 * i + k] for i in places for k in (0, 1)
    ]
    assert raw_rewards["mine"].tolist() == [0, teaches == "circle"] * 2
    assert found[0] is groups[0] and run.clock.read()["drawn"] == 2 * (len(shown) // 2 - 2)
    encoded = run.glm_image.encode(prompts[places[1] :][:1], settings)
    (again,) = run.trainer.sample(encoded, 2, 3 + places[1])
    assert torch.equal(found[1].tokens, again.tokens)
