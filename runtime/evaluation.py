"""What was learned: training and held-out prompts, painted from the same seeds each time."""

import shlex
import warnings
from copy import copy
from dataclasses import replace

import numpy as np
import torch

from runtime import ranks
from runtime.data import evenly
from runtime.errors import writing
from runtime.pictures import save_pictures
from runtime.record import with_weighted_sum
from runtime.words import counted, format_number, shown_names, with_error

# Prompt i of an evaluation has seed SEEDS[...] + i. Training with --seed 0 needs 536,870 steps to
# reach these seeds. Training with another --seed never reaches them: see seed_of_step.
SEEDS = {"training": 2**29, "held out": 2**29 + 2**20}
PROMPTS, SHOWN = 8, 4  # held-out prompts that are shown at most, and pictures of each


def seed_of_step(step, seed, prompts_per_step):
    """The seed of this rank's first group; the groups after it count up, on through all ranks."""
    return (seed * 1_000_003 + step) * 1_000 + ranks.rank() * prompts_per_step


def evaluate(run, settings, data, record, stop=None):
    """Judge pictures of training and held-out prompts, unless this step's are judged already.

    Leaves numbers, a table, and pictures of some held-out prompts. stop: a StopRequest; once it is
    received, this ends early and leaves nothing.
    """
    evaluations = record.folder.records["evaluation"]
    if record.done in [each["step"] for each in evaluations]:
        return
    sets = sets_of(settings, data)
    rewards = data.rewards | data.judges
    numbers, shares, raw_of_sets = {"step": record.done}, [], []
    sizes = [*map(len, sets.values())]
    record.write(f"evaluating {counted(sum(sizes), 'prompt')}")
    with run.machine.counting("prompt", sum(-(-size // ranks.count()) for size in sizes)):
        for name, prompts in sets.items():
            raw, pictures = {}, {}
            scored = score_prompts(run, settings, rewards, prompts, SEEDS[name], stop, shares)
            shown = range(count_to_show(prompts))
            for row, of_row, images in scored:
                raw[row] = of_row
                if row in shown:  # pictures of all prompts would take gigabytes
                    pictures[row] = images[:SHOWN]
            raw = of_all_ranks(raw)
            if len(raw) < len(prompts):  # stopped
                return
            columns = {key: torch.cat([each[key] for each in raw.values()]) for key in rewards}
            raw_of_sets.append(columns)
            values = with_weighted_sum(columns, record.weights, settings.group_size)
            numbers |= evaluation_metrics(name, values, [prompt.type for prompt in prompts])
    run.machine.read()  # its time is no part of a step

    # From here on of the held-out prompts.
    numbers["judge"] = record.judged_by
    numbers["shown"] = save_shown(record, prompts, of_all_ranks(pictures), values)
    record.folder.append("evaluation", [numbers])
    of_sets = {f"{name}/{key}": numbers[name][key][0] for name in sets for key in values}
    record.track({name: None if np.isnan(mean) else mean for name, mean in of_sets.items()})
    by_type = record.judged_by or next(iter(record.weights))
    record.write(evaluation_table(evaluations, by_type if record.ends else None))
    if record.ends and (best := best_earlier_evaluation(evaluations, by_type)):
        step, words = best
        folder = shlex.quote(str(record.folder.out / "checkpoints" / f"{step:06d}"))
        record.write(f"held out, {words}; to go on from there: --adapter {folder}")
    if len(evaluations) == 1:
        warn_of_dead_rewards(record, raw_of_sets)
    warn_of_other_ids(record, shares)


def sets_of(settings, data):
    """{"training", "held out": Prompts to judge}; without steps nothing is trained on."""
    sets = {"training": data.prompts} if settings.steps > 0 else {}
    sets["held out"] = data.held_out
    return {name: evenly(prompts, settings.eval_count) for name, prompts in sets.items()}


def score_prompts(run, settings, rewards, prompts, seed, stop=None, shares=None):
    """Yields, of each prompt of this rank, its row, raw rewards {name: (G,)} and G pictures.

    stop: a StopRequest; once it is received, nothing more comes. shares: a list that gets
    share_of_other_ids() of some prompts.
    """

    def make(settings, rewards, some, seed):
        deployed = settings.for_evaluation()
        with run.machine.phase("sample", run.policy.model):
            groups = run.policy.sample(
                run.glm_image.encode(some, deployed), deployed.group_size, seed
            )
            others = [share_of_other_ids(run.policy, group) for group in groups[:4]]
        return *run.paint_and_score(deployed, rewards, some, groups, seed), others

    # On a CPU a pass costs much and a row of it little: fewer, larger passes.
    at_once = settings.prompts_per_step * (4 if run.machine.device.type == "cpu" else 1)
    for rows in ranks.batches(len(prompts), at_once):
        if stop is not None and any(ranks.gather(stop.received)):
            return
        some = [prompts[row % len(prompts)] for row in rows]
        given = run, settings, rewards, some, seed + rows[0]
        images, raw_rewards, others = run.machine.attempt(make, *given)
        if shares is not None:
            shares += others
        run.machine.bar.update(len(some))
        for i, row in enumerate(rows):
            group = slice(i * settings.group_size, (i + 1) * settings.group_size)
            if row < len(prompts):  # else it is padding
                yield row, {name: x[group] for name, x in raw_rewards.items()}, images[group]


def of_all_ranks(rows):
    """{row: value} of this rank -> of all, in order."""
    return {row: value for own in ranks.gather(rows) for row, value in own.items()}


# ---- which pictures are shown --------------------------------------------------------------------


def count_to_show(prompts):
    """How many of the first prompts are shown: the first of each type, or the first few.

    prompts: in the order of evenly(), which begins with the first of each type.
    """
    types = {prompt.type for prompt in prompts}
    return min(len(types) if len(types) > 1 else len(prompts), PROMPTS)


def save_shown(record, prompts, pictures, values):
    """What is known of the prompts that are shown: [{"prompt", "type", "pictures", rewards}].

    pictures: {row: SHOWN images}. values: {name of a reward: (N, G)}.
    """
    if not record.folder.writes:
        return []
    with writing(record.folder.out):
        return [
            {"prompt": prompts[row].text, "type": prompts[row].type}
            | {name: of_all[row, :SHOWN].tolist() for name, of_all in values.items()}
            | save_pictures(
                record.folder.out,
                f"evaluation/{record.done:06d}/{row + 1}",
                images,
                prompts[row].given(),
            )
            for row, images in pictures.items()
        ]


# ---- numbers and table ---------------------------------------------------------------------------


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


def evaluation_table(evaluations, by_type=None):
    """Lines of Markdown, a row for each reward: the last evaluation, beside that before training.

    by_type: the reward that gets a row for each type of prompts, too.
    """
    last = evaluations[-1]
    records = [each for each in evaluations if each["step"] in (0, last["step"])]
    sets = [name for name in SEEDS if name in last]
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
    for reward in shown_names(last["held out"]):
        table.append(row(reward.removeprefix("reward/"), reward))
        if reward == f"reward/{by_type}":
            table += [row(f"- {each}", reward, f", {each}") for each in types]
    widths = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * width for width in widths])
    lines = [f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in table]
    title = f"evaluation after {counted(last['step'], 'step')}"
    title += ", before -> after" if len(records) > 1 else ""
    return "\n".join([f"{title}: mean +- standard error over prompts (docs/numbers.md)", *lines])


def best_earlier_evaluation(evaluations, reward):
    """The step of the evaluation whose held-out reward is highest, and words for both; or None.

    Only where it is above the last by more than its standard error.
    """
    name = f"reward/{reward}"
    scored = [each for each in evaluations if None not in each["held out"].get(name, [None])]
    if not scored or scored[-1] is not evaluations[-1]:
        return None
    best, last = max(scored, key=lambda each: each["held out"][name][0]), scored[-1]
    (mean, error), (now, _) = best["held out"][name], last["held out"][name]
    words = f"{reward} was highest after {counted(best['step'], 'step')}"
    words += f": {with_error(mean, error)}, now {format_number(now)}"
    return (best["step"], words) if mean - error > now else None


def warn_of_dead_rewards(record, raw_of_sets):
    """A warning for each reward that is NaN for all pictures, or equal for all and to be learned.

    raw_of_sets: [{name: (N*G,)}].
    """
    for name in raw_of_sets[0]:
        values = torch.cat([of_set[name] for of_set in raw_of_sets])
        known = values[~values.isnan()].unique()
        pictures = f"all {counted(len(values), 'picture')} of this evaluation"
        if len(known) == 0:
            record.write(f"warning: reward {name!r} is NaN (does not apply) for {pictures}")
        elif len(known) == 1 and record.weights.get(name) and not record.ends:
            same = f"gives {format_number(known.item())} to {pictures}"
            record.write(f"warning: reward {name!r} {same}: equal rewards teach nothing")


# ---- deployed as trained? ------------------------------------------------------------------------


@torch.no_grad()
def share_of_other_ids(policy, group):
    """The chance that a picture of generate() has an id that is no code, without top-p.

    Training draws from the codes alone, so that other ids are in no loss and no KL term. generate()
    draws from all ids but those that its config suppresses. From the first sample: log p(o_t) among
    these less log p(o_t) among the codes is log p(any code), whatever o_t. The mean of
    prod_t p(any code) over samples is the chance of codes alone.
    """
    generating, first = copy(policy), torch.tensor([0])
    generating.allowed_ids = slice(0, None)
    drawn = torch.ones(policy.model.lm_head.out_features, dtype=torch.bool)
    drawn[policy.model.generation_config.suppress_tokens or []] = False
    of_all = replace(group, nucleus=drawn.expand(*group.tokens.shape, -1))
    of_codes = replace(group, nucleus=None)
    log_codes = generating.logprobs(of_all, first) - policy.logprobs(of_codes, first)  # (1, T)
    return -log_codes.sum().expm1().item()


def warn_of_other_ids(record, shares):
    """shares: of some prompts, see share_of_other_ids."""
    if shares and (mean := sum(shares) / len(shares)) > 1e-3:
        what = f"in {mean:.1%} of pictures the stock pipeline would draw an id that is no code"
        hint = "suppress these ids: docs/memory.md, After the run"
        record.write(f"warning: {what} (without top-p), and fail; {hint}")
