"""Numbers of steps and evaluations; docs/numbers.md explains each."""

import warnings

import numpy as np
import torch

from rewards import combine

# ---- of a step -----------------------------------------------------------------------------------


def with_weighted_sum(raw_rewards, weights, group_size):
    """{"reward": their weighted sum (N, G), "reward/NAME": each of them (N, G)}, from (N*G,)."""
    rewards = {f"reward/{name}": values for name, values in raw_rewards.items()}
    rewards = {"reward": combine(raw_rewards, weights, group_size, "sum"), **rewards}
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
