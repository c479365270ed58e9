"""Numbers of steps and evaluations, and how they are printed; docs/numbers.md explains each."""

import math
import warnings

import numpy as np
import torch

from rewards import combine

LINE = {  # parts of a step's line, see format_step
    # Of examples/train_decoder.py.
    "decoder/kl": "decoder kl {:.4f}",
    "decoder/reward_std": "decoder +- {:.3f}",
    "decoder/grad_norm": "decoder norm {:.3f}",
    "decoder/groups_without_spread": "decoder: {:.0%} without spread",
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
    rewards = {"reward": combine(raw_rewards, weights, group_size, "sum"), **rewards}
    return {name: values.view(-1, group_size) for name, values in rewards.items()}


def reward_metrics(rewards, paintings=1):
    """Of each reward the mean, and the mean standard deviation within a group.

    rewards: {name: (N, G)}. NaN, where a reward does not apply, is left out. paintings: see
    Rollout; of more than one, what is said of groups is said of their means.
    """
    if paintings > 1:
        nested = {name: x.double().unflatten(1, (-1, paintings)) for name, x in rewards.items()}
        of_each = reward_metrics({"reward": nested["reward"].flatten(0, 1)})
        of_means = reward_metrics({name: x.nanmean(2) for name, x in nested.items()})
        unscored = of_each["unscored"]
        return of_means | {"decoder/reward_std": of_each["reward_std"], "unscored": unscored}
    metrics = {"unscored": rewards["reward"].isnan().double().mean().item()}
    for name, values in rewards.items():
        std = name.replace("reward", "reward_std", 1)
        with warnings.catch_warnings(action="ignore"):  # of groups in which no reward applies
            stds = np.nanstd(values.double(), 1, ddof=1)
            metrics |= {name: values.nanmean().item(), std: float(np.nanmean(stds))}
    return metrics


# ---- of an evaluation ----------------------------------------------------------------------------


def evaluation_metrics(rewards, types):
    """{"prompts": N, "images": N*G, reward: [mean, standard error], "types": {type: the same}}.

    The errors are over prompts: pictures of one prompt are not independent. "mean of types" is the
    plain mean of the types whatever their sizes, like GenEval's overall score (Ghosh et al. 2023);
    of a lone type there is neither. rewards: {reward: (N, G)}. types: N.
    """
    whole, of_types = means_and_errors(rewards), {}
    for kind in dict.fromkeys(types) if len({*types}) > 1 else ():
        rows = [each == kind for each in types]
        of_types[kind] = means_and_errors({name: x[rows] for name, x in rewards.items()})
    if of_types:
        mean = dict(whole)
        for reward in rewards:
            pairs = [each[reward] for each in of_types.values()]
            pairs = torch.tensor(pairs, dtype=torch.double)  # (types, 2)
            means, errors = pairs[~pairs[:, 0].isnan()].T  # none, if it applies to no prompt
            mean[reward] = [means.mean().item(), (errors.norm() / len(errors)).item()]
        of_types["mean of types"] = mean
    return whole | {"types": of_types}


def means_and_errors(rewards):
    shape = rewards["reward"].shape
    numbers = {"prompts": shape[0], "images": shape.numel()}
    with warnings.catch_warnings(action="ignore"):  # of prompts to which no reward applies
        for name, values in rewards.items():
            means = np.nanmean(values.double(), 1)  # (N,)
            error = np.nanstd(means, ddof=1) / (~np.isnan(means)).sum() ** 0.5
            numbers[name] = [values.nanmean().item(), float(error)]
    return numbers


# ---- as people read them -------------------------------------------------------------------------


def format_step(steps, numbers, epochs_per_step=0):
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
    shown = {name: form for name, form in LINE.items() if numbers.get(name)}
    return " | ".join([*words, *(form.format(numbers[name]) for name, form in shown.items())])


def sides(evaluations):
    """{heading: evaluation}: that before training, and the last; or that of a lone adapter."""
    first, last = evaluations[0], evaluations[-1]
    before = last["adapter"] or "before"
    heading = lambda step: f"after {counted(step, 'step')}" if step else before
    return {heading(each["step"]): each for each in (first, last)}


def evaluation_table(evaluations):
    """A title and lines of Markdown: see evaluation_rows."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in evaluation_rows(evaluations)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in rows]
    words = "mean +- standard error over prompts (docs/numbers.md)"
    return "\n".join([f"{evaluation_title(evaluations)}: {words}", *lines])


def evaluation_title(evaluations):
    """What the last one has judged, and of how many steps before it."""
    last = evaluations[-1]
    prompts, (moved, steps) = last["prompts"], last.get("moved", (0, 0))
    group = counted(last["images"] // prompts, "picture")
    title = f"{counted(prompts, 'held-out prompt')} x {group}"
    return title + f" ({moved} of the last {steps} steps moved the policy)" * (moved < steps)


def evaluation_rows(evaluations):
    """The last evaluation beside that before training: rows of cells, a head first.

    There is a row for each reward, and for the judge a row for each type of prompts, too.
    """
    columns, last = sides(evaluations), evaluations[-1]
    judge = judge_of(last)
    rows = [["reward", *columns]]
    for name in shown_names(last):
        cells = [with_error(*each[name]) for each in columns.values()]
        rows.append([name.removeprefix("reward/"), *cells])
        for of_type in last["types"] if name == judge else ():
            cells = [with_error(*each["types"][of_type][name]) for each in columns.values()]
            rows.append([f"- {of_type}", *cells])
    return rows


def judge_of(evaluation):
    """The reward that judges: the first of --eval-reward, else what is trained."""
    judge = evaluation["judge"]
    return f"reward/{judge}" if judge else shown_names(evaluation)[0]


def best_earlier_evaluation(evaluations):
    """The step of the evaluation that the judge likes best, and words for both; or None.

    Only where it is above the last by more than its standard error.
    """
    judge = judge_of(evaluations[-1])
    numbers = [(*each[judge], each["step"]) for each in evaluations]
    known = [each for each in numbers if None not in each]
    if numbers[-1] not in known:
        return None
    (mean, error, step), (now, *_) = max(known), numbers[-1]
    words = f"{judge.removeprefix('reward/')} was highest after {counted(step, 'step')}"
    words += f": {with_error(mean, error)}, now {format_number(now)}"
    return (step, words) if mean - error > now else None


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
