"""Numbers of steps and evaluations, and how people read them; docs/numbers.md explains each."""

import math
import warnings

import numpy as np
import torch

from rewards import combine

LINE = {  # parts of a step's line, see format_step
    "skipped": "SKIPPED: the gradient was not finite",
    "groups_without_spread": "{:.0%} without spread",
    "unscored": "{:.0%} unscored",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.4f}",
    "mean_logprob_gap": "gap {:.0e}",
    "grad_norm": "norm {:.3f}",
    "clip_fraction": "{:.1%} clipped",
    "seconds": "{:.1f}s",
    "gpu_gb": "{:.1f} GB",
}


# ---- of a step -----------------------------------------------------------------------------------


def with_weighted_sum(raw_rewards, weights, group_size):
    """{"reward": their weighted sum (N, G), "reward/NAME": each of them (N, G)}, from (N*G,)."""
    rewards = {f"reward/{name}": values for name, values in raw_rewards.items()}
    rewards = {"reward": combine(raw_rewards, weights, group_size), **rewards}
    return {name: values.view(-1, group_size) for name, values in rewards.items()}


def reward_metrics(rewards):
    """Of each reward the mean, and the mean standard deviation within a group.

    rewards: {name: (N, G)}. NaN, where a reward does not apply, is left out.
    """
    metrics = {"unscored": rewards["reward"].isnan().double().mean().item()}
    for name, values in rewards.items():
        std = name.replace("reward", "reward_std", 1)
        with warnings.catch_warnings(action="ignore"):  # of groups in which no reward applies
            stds = np.nanstd(values.double(), 1, ddof=1)
            metrics |= {name: values.nanmean().item(), std: float(np.nanmean(stds))}
    return metrics


def format_step(steps, numbers, parts, epochs_per_step=0):
    """The line of a step: what is 0 or was not measured is left out.

    A run that trains on its prompts more than once also says how often so far.
    """
    reward = with_error(numbers["reward"], numbers["reward_std"])
    epoch = f", epoch {numbers['step'] * epochs_per_step:.1f}" * (steps * epochs_per_step > 1)
    words = [f"step {numbers['step']}/{steps}{epoch}", f"reward {reward}"]
    names = shown_names(numbers)
    for name in names if len(names) > 1 else ():
        if name != "reward":
            words.append(f"{name.removeprefix('reward/')} {format_number(numbers[name])}")
    shown = {name: form for name, form in parts.items() if numbers.get(name)}
    return " | ".join([*words, *(form.format(numbers[name]) for name, form in shown.items())])


# ---- of an evaluation ----------------------------------------------------------------------------


def evaluation_metrics(name, rewards, types):
    """{name: its numbers}, and if there are several types of prompts "NAME, TYPE": those of each.

    Numbers are {"prompts": N, "images": N*G, reward: [mean, standard error]}. The errors are over
    prompts: pictures of one prompt are not independent. "mean of types" is the plain mean of the
    types whatever their sizes, like GenEval's overall score (Ghosh et al. 2023). rewards: {reward:
    (N, G)}. types: N.
    """
    metrics = {name: means_and_errors(rewards)}
    if len({*types}) == 1:
        return metrics
    for kind in dict.fromkeys(types):
        rows = [each == kind for each in types]
        of_kind = {reward: values[rows] for reward, values in rewards.items()}
        metrics[f"{name}, {kind}"] = means_and_errors(of_kind)
    whole, *kinds = metrics.values()
    mean = metrics[f"{name}, mean of types"] = dict(whole)
    for reward in rewards:
        pairs = torch.tensor([each[reward] for each in kinds], dtype=torch.double)  # (types, 2)
        means, errors = pairs[~pairs[:, 0].isnan()].T  # none, if it applies to no prompt
        mean[reward] = [means.mean().item(), (errors.norm() / len(errors)).item()]
    return metrics


def means_and_errors(rewards):
    shape = rewards["reward"].shape
    numbers = {"prompts": shape[0], "images": shape.numel()}
    with warnings.catch_warnings(action="ignore"):  # of prompts to which no reward applies
        for name, values in rewards.items():
            means = np.nanmean(values.double(), 1)  # (N,)
            error = np.nanstd(means, ddof=1) / (~np.isnan(means)).sum() ** 0.5
            numbers[name] = [values.nanmean().item(), float(error)]
    return numbers


def best_earlier_evaluation(evaluations, reward):
    """The step of the evaluation whose held-out reward is highest, and words for both; or None.

    Only where it is above the last by more than its standard error.
    """
    numbers = [(*each["held out"][f"reward/{reward}"], each["step"]) for each in evaluations]
    known = [each for each in numbers if None not in each]
    if numbers[-1] not in known:
        return None
    (mean, error, step), (now, *_) = max(known), numbers[-1]
    words = f"{reward} was highest after {counted(step, 'step')}"
    words += f": {with_error(mean, error)}, now {format_number(now)}"
    return (step, words) if mean - error > now else None


def evaluation_table(evaluations):
    """Lines of Markdown, a row for each reward: the last evaluation, beside that before training.

    The judge, or the reward if there is none, gets a row for each type of prompts, too.
    """
    last = evaluations[-1]
    records = [each for each in evaluations if each["step"] in (0, last["step"])]
    sets = [name for name in ("training", "held out") if name in last]
    types = dict.fromkeys(name.partition(", ")[2] for name in last if ", " in name)

    def row(label, reward, end=""):
        """Of each set, or of its prompts of a type."""
        cells = []
        for name in sets:
            sides = [each[name + end][reward] for each in records if name + end in each]
            cells.append(" -> ".join(with_error(*side) for side in sides))
        return [label, *cells]

    table = [["reward"]]
    for name in sets:
        prompts, images = last[name]["prompts"], last[name]["images"]
        group = counted(images // prompts, "picture")
        table[0].append(f"{name}: {counted(prompts, 'prompt')} x {group}")
    rewards = shown_names(last["held out"])
    judge = f"reward/{last['judge']}" if last["judge"] else rewards[0]
    for reward in rewards:
        table.append(row(reward.removeprefix("reward/"), reward))
        if reward == judge:
            table += [row(f"- {each}", reward, f", {each}") for each in types]
    widths = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * width for width in widths])
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in table]
    title = f"evaluation after {counted(last['step'], 'step')}"
    title += ", before -> after" if len(records) > 1 else ""
    moved, steps = last.get("moved", (0, 0))
    if moved < steps:
        title += f" ({moved} of the last {steps} steps moved the policy)"
    return "\n".join([f"{title}: mean +- standard error over prompts (docs/numbers.md)", *lines])


# ---- in words ------------------------------------------------------------------------------------


def shown_names(numbers):
    """The names of rewards, without their weighted sum where that is a lone reward of weight 1."""
    names = [name for name in numbers if f"{name}/".startswith("reward/")]
    return names[1:] if len(names) > 1 and numbers[names[0]] == numbers[names[1]] else names


def with_error(mean, error):
    """'0.692 +- 0.031'."""
    return format_number(mean) + ("" if error is None else f" +- {format_number(error)}")


def format_number(value):
    if value is None or math.isnan(value):  # no image had this reward
        return "none"
    return f"{value:.0e}" if 0 < abs(value) < 5e-4 else f"{value:.3f}"


def counted(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
