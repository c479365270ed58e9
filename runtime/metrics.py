"""The numbers of a step: rewards over groups, and the line that shows them. Pure functions."""

import math

import torch

from rewards import combine
from runtime import format_number

PARTS = {  # of the line of a step, in order of weight
    "kl": "kl {:.4f}", "entropy": "entropy {:.2f}",
    "grad_norm": "norm {:.2f}", "unscored": "{:.0%} unscored", "groups_without_spread": "{:.0%} without spread",
    "clip_fraction": "{:.1%} clipped", "mean_logprob_gap": "gap {:.0e}", "decoder/kl": "decoder kl {:.4f}",
    "decoder/grad_norm": "decoder norm {:.3f}",
}  # fmt: skip


def weights_of(rewards):
    return {name: weight for name, (_, weight) in rewards.items()}


def total_rewards(rollout, rewards):
    """The weighted sum of a group's raw rewards, for people: (G,). What is maximised may be another, see --combine."""
    return combine({name: rollout.raw_rewards[name] for name in rewards}, weights_of(rewards))


def reward_metrics(rollouts, rewards):
    """The mean over all pictures, and the mean of the groups' spreads, of each raw reward and of their weighted sum.

    NaN, a picture to which a reward does not apply, is left out; where nothing is left the metric is NaN.
    """
    table = {"reward": [total_rewards(rollout, rewards) for rollout in rollouts]}
    table |= {f"reward/{name}": [rollout.raw_rewards[name] for rollout in rollouts] for name in rollouts[0].raw_rewards}
    metrics = {}
    for name, groups in table.items():
        groups = [group[~group.isnan()] for group in groups]
        spreads = [group.std().item() for group in groups if len(group) > 1]
        metrics[name] = torch.cat(groups).mean().item()
        metrics[name.replace("reward", "reward_std", 1)] = sum(spreads) / len(spreads) if spreads else math.nan
    return metrics


def step_metrics(rollouts, rewards):
    """What the rollouts of a step say before any update."""
    totals = torch.cat([total_rewards(rollout, rewards) for rollout in rollouts])
    groups = len(rollouts[0].advantages) > 1  # else one code sequence a prompt, which only the decoder learns from
    return reward_metrics(rollouts, rewards) | {
        "unscored": totals.isnan().double().mean().item(),
        "groups_without_spread": sum(not r.advantages.any() for r in rollouts) / len(rollouts) if groups else math.nan,
        # -log p of a sample is an unbiased estimate of the entropy of p. It falls before pictures lose variety.
        "entropy": -torch.cat([rollout.old_logprobs for rollout in rollouts]).mean().item(),
    }


def format_step(step, metrics, settings):
    """The line of a step, in 120 columns: what is 0 or was not measured is left out, and what finds no more room."""
    groups = {prefix: {} for prefix in ("reward", "seconds", "gpu_gb")}
    for name, value in metrics.items():
        prefix, _, rest = name.partition("/")
        if rest and prefix in groups and not math.isnan(value):
            groups[prefix][rest] = value
    raw, seconds, peaks = groups.values()
    longest = sorted(seconds, key=seconds.get, reverse=True)[:2]
    line = f"step {step}/{settings.steps} | reward {format_number(metrics['reward'])}"
    line += "" if math.isnan(metrics["reward_std"]) else f" +- {metrics['reward_std']:.3f}"
    parts = ["SKIPPED: the gradient was not finite"] if metrics["skipped"] else []
    parts += [", ".join(f"{name} {value:.3f}" for name, value in raw.items())] if raw else []
    parts += [f"{sum(seconds.values()):.1f}s ({', '.join(f'{name} {seconds[name]:.1f}' for name in longest)})"]
    parts += [f"{max(peaks.values()):.1f} GB"] if peaks else []
    parts += [style.format(metrics[name]) for name, style in PARTS.items() if metrics.get(name, 0) > 0]
    for part in parts:
        line += f" | {part}" if len(line) + len(part) + 3 <= 120 else ""
    return line
