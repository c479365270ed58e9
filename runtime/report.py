"""The numbers of a step and of an evaluation, and the lines that show them. Pure functions."""

import math

import torch

from runtime import counted, format_number, reward_names, short_name, without_nan

PARTS = {  # parts of a step's line
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.4f}",
    "mean_logprob_gap": "gap {:.0e}",
    "grad_norm": "norm {:.3f}",
    "clip_fraction": "{:.1%} clipped",
    "seconds": "{:.1f}s",
    "gpu_gb": "{:.1f} GB",
}
ALARMS = {
    "skipped": "SKIPPED: the gradient was not finite",
    "groups_without_spread": "{:.0%} without spread",
    "unscored": "{:.0%} unscored",
}
# {what learns: the name of its gradient's norm, and the flags that make samples differ}
LEARNERS = {"policy": ("grad_norm", "--temperature or --top-p")}
SHOWN = 4  # pictures of a prompt that an evaluation keeps; and prompts, if they have no kinds
PROMPTS = {"": "training", "held_out/": "held-out"}  # {prefix of an evaluation's numbers: of what}


def reward_metrics(raw_rewards, combined, group_size):
    """Of the combined and each raw reward: the mean, a group's mean spread (std) and mean best.

    raw_rewards: {name: (N*G,)}, combined: (N*G,), group after group. NaN, where a reward does not
    apply, is left out.
    """
    metrics = {}
    for name, values in {"": combined, **raw_rewards}.items():
        name = name and f"/{name}"
        groups = values.double().view(-1, group_size)  # (N, G)
        count = (~groups.isnan()).sum(1)
        squares = (groups - groups.nanmean(1, keepdim=True)).square().nansum(1)
        stds = (squares / (count - 1)).sqrt()[count > 1]  # unbiased
        bests = groups.nan_to_num(-math.inf).amax(1)[count > 0]
        metrics[f"reward{name}"] = values.nanmean().item()
        metrics[f"reward_std{name}"] = stds.mean().item()
        metrics[f"reward_best{name}"] = bests.mean().item()
    return metrics


def evaluation_metrics(raw_rewards, combined, group_size, kinds=None):
    """Those of reward_metrics with standard errors, and in "kinds" the same per kind of prompt.

    An error is that of the mean over prompts: pictures of one prompt are not independent. "mean of
    the kinds" is their plain mean whatever their sizes, like GenEval's overall score (Ghosh et al.
    2023). kinds: (N,) strings, or None.
    """
    count = len(combined) // group_size
    metrics = reward_metrics(raw_rewards, combined, group_size)
    metrics |= {"images": len(combined), "prompts": count}
    for name, values in {"": combined, **raw_rewards}.items():
        means = values.double().view(count, group_size).nanmean(1)  # (N,)
        means = means[~means.isnan()]
        variance = (means - means.mean()).square().sum() / (len(means) - 1)
        metrics[error_name(f"reward/{name}".strip("/"))] = (variance / len(means)).sqrt().item()
    if len(set(kinds or ())) < 2:
        return metrics
    parts = {}
    for kind in dict.fromkeys(kinds):
        own = torch.tensor([each == kind for each in kinds]).repeat_interleave(group_size)  # (N*G,)
        raw = {name: values[own] for name, values in raw_rewards.items()}
        parts[kind] = evaluation_metrics(raw, combined[own], group_size)
    mean = {"prompts": count}
    for name in reward_names(metrics):
        pairs = [(part[name], part[error_name(name)]) for part in parts.values()]
        pairs = torch.tensor(pairs, dtype=torch.float64)  # (kinds, 2)
        means, errors = pairs[~pairs[:, 0].isnan()].T
        mean |= {name: means.mean().item(), error_name(name): (errors.norm() / len(errors)).item()}
    return metrics | {"kinds": parts | {"mean of the kinds": mean}}


def yes_or_no(answers):
    """The first judge that says nothing but 1 and 0, or None, where it does not apply.

    answers: {name: numbers or None}. Returns its name, or None.
    """
    for name, values in answers.items():
        if set(values) - {None} and set(values) <= {0, 1, None}:
            return name
    return None


def rows_to_show(prompts, answers, size):
    """The prompts of an evaluation whose pictures are kept: rows.

    Of those that have no right picture the first of each kind; if a judge of yes or no finds none
    so, the first of each kind. answers: {judge: (N*G,) of 1, 0 or None}.
    """
    kinds = [prompt.kind for prompt in prompts]
    has_kinds = kinds[0] is not None
    kinds = kinds if has_kinds else range(len(prompts))
    judge = yes_or_no(answers)
    groups = zip(*[iter(answers[judge])] * size) if judge else []
    wrong = [row for row, group in enumerate(groups) if set(group) == {0}]
    first = {}
    for row in wrong or range(len(prompts)):
        first.setdefault(kinds[row], row)
    return list(first.values())[: None if has_kinds else SHOWN]


def error_name(name):
    """The name of a mean's standard error: reward/ssim -> reward_error/ssim."""
    return name.replace("reward", "reward_error", 1)


def with_error(record, name, form="{:.3f}"):
    """'0.692 +- 0.031', the reward of this name with its standard error, if it has one."""
    error = record.get(error_name(name))
    if record[name] is None or error is None:
        return format_number(record[name])
    return f"{form} +- {form}".format(record[name], error)


def shown_names(record, prefix=""):
    """Its rewards, without their weighted sum where that is a lone reward of weight 1."""
    names = reward_names(record, prefix)
    return names[1:] if len(names) > 1 and record[names[0]] == record[names[1]] else names


def summary(prefix, *records):
    """'ssim 0.692 +- 0.031 -> 0.864 +- 0.020, ... (64 images: 16 prompts x 4)', of evaluations."""
    parts = []
    for name in shown_names(records[-1], prefix):
        values = " -> ".join(with_error(record, name) for record in records)
        parts.append(f"{short_name(name)} {values}")
    images = records[0][f"{prefix}images"]
    prompts = records[0][f"{prefix}prompts"]
    number = f"{counted(prompts, 'prompt')} x {images // prompts}"
    return f"{', '.join(parts)} ({images} images: {number})"


def kinds_table(*records):
    """Lines of Markdown, a row per kind, with cells such as '0.41 +- 0.05 -> 0.72 +- 0.04'."""
    lines = []
    for prefix, heading in PROMPTS.items():
        parts = [record.get(f"{prefix}kinds") for record in records]
        if not all(parts):
            continue
        names = shown_names(parts[-1]["mean of the kinds"])
        rows = [[heading, "prompts", *map(short_name, names)]]
        for kind, last in parts[-1].items():
            row = [kind, str(last["prompts"])]
            for name in names:
                row.append(" -> ".join(with_error(part[kind], name, "{:.2f}") for part in parts))
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows)]
        rows.insert(1, ["-" * width for width in widths])
        lines += ["", *(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)]
    return lines


def best_step(evaluations, reward="reward"):
    """The first step whose adapter did best on held-out prompts.

    On those of training if no reward applied to these. Also words for how much better than at the
    end, empty if that is within the standard error of the difference.
    """
    held_out = all(record[f"held_out/{reward}"] is not None for record in evaluations)
    name, key = ("held-out", f"held_out/{reward}") if held_out else ("training", reward)
    records = [record for record in evaluations if record[key] is not None]
    if not records:
        return 0, ""
    best = max(records, key=lambda record: record[key])
    now = records[-1]
    error = math.hypot(*(record.get(error_name(key)) or 0 for record in (best, now)))
    if best[key] - now[key] <= max(error, 0.0005):
        return best["step"], ""
    higher = f"{short_name(reward)} was higher after {counted(best['step'], 'step')}"
    values = f"{with_error(best, key)}, than at the end, {with_error(now, key)}"
    return best["step"], f"on {name} prompts {higher}, {values}"


def group_records(step, prompts, raw_rewards):
    """The lines of groups.jsonl: each group's prompt, its line in the file, its rewards."""
    rewards = {
        name: without_nan(values.view(len(prompts), -1).tolist())
        for name, values in raw_rewards.items()
    }
    records = []
    for i, prompt in enumerate(prompts):
        own = {name: groups[i] for name, groups in rewards.items()}
        records.append({"step": step, "line": prompt.line, "prompt": prompt.text, "rewards": own})
    return records


def format_step(step, steps, metrics, parts=PARTS, alarms=ALARMS):
    """The line of a step: what is 0 or was not measured is left out."""
    of = lambda prefix: {name: x for name, x in metrics.items() if name.startswith(prefix)}
    raw = {name: x for name, x in of("reward/").items() if not math.isnan(x)}
    seconds = sum(of("seconds/").values())
    metrics = metrics | {"seconds": seconds, "gpu_gb": max([0, *of("gpu_gb/").values()])}
    line = f"step {step}/{steps} | reward {format_number(metrics['reward'])}"
    line += "" if math.isnan(metrics["reward_std"]) else f" +- {metrics['reward_std']:.3f}"
    shown = lambda styles: [
        style.format(metrics[name]) for name, style in styles.items() if metrics.get(name, 0) > 0
    ]
    rewards = []
    if any(x != metrics["reward"] for x in raw.values()):  # not a lone reward of weight 1
        rewards = [", ".join(f"{short_name(name)} {x:.3f}" for name, x in raw.items())]
    return " | ".join([line, *shown(alarms), *rewards, *shown(parts)])


def why_nothing_was_learned(records, norm, draws):
    """Why no step has moved what learns; None if one has.

    norm: the name of its gradient's norm. draws: the flags that make samples differ.
    """
    if not records or any(record.get(norm) for record in records):  # None: it was skipped
        return None
    if all(record["unscored"] == 1 for record in records):
        return "no reward applied to any picture; see what your prompts need for it"
    if all(record["skipped"] for record in records):
        return "no gradient was finite; take a lower learning rate"
    advice = f"a reward that tells a prompt's pictures apart, a higher {draws}, or larger groups"
    return f"in no group did one picture score higher than another; take {advice}"
