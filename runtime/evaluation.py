"""Evaluation: pictures of held-out prompts, painted from the same seeds each time."""

import torch

from inputs.prompts import choose
from runtime import ranks
from runtime.numbers import counted, with_weighted_sum
from runtime.terminal import say

# Prompt i of an evaluation has seed SEED + i. Training with --seed 0 needs 537,919 steps to reach
# these seeds. Training with another --seed never reaches them: see seed_of_step in data.py.
SEED = 2**29 + 2**20
PROMPTS_SHOWN, PICTURES_SHOWN = 8, 4  # at most, and of each


def judge(run, settings, data, record):
    """Judges pictures of the held-out prompts, unless this step's are judged already."""
    if record.done in [each["step"] for each in record.records["evaluation"]]:
        return
    prompts = choose(data.held_out, settings.eval_count)
    rewards = data.rewards | data.judges
    shown = range(count_to_show(prompts))
    raw, pictures = {}, {}
    say(f"evaluating {counted(len(prompts), 'prompt')}")
    scored = score_prompts(run, settings, rewards, prompts)
    for row, of_row, images in run.clock.count("prompt", scored, len(ranks.shard(len(prompts)))):
        raw[row] = of_row
        if row in shown:  # pictures of all prompts would take gigabytes
            pictures[row] = images[:PICTURES_SHOWN]
    run.clock.read()  # its time is no part of a step
    raw = of_all_ranks(raw)
    columns = {name: torch.cat([each[name] for each in raw.values()]) for name in rewards}
    values = with_weighted_sum(columns, record.weights, settings.group_size)
    record.evaluation(prompts, of_all_ranks(pictures), values)


def score_prompts(run, settings, rewards, prompts, seed=SEED):
    """Yields, of each prompt of this rank, its row, raw rewards {name: (G,)} and G pictures."""
    # On a CPU a pass costs much and a row of it little: fewer, larger passes.
    at_once = settings.prompts_per_step * (4 if run.clock.device.type == "cpu" else 1)
    own = ranks.shard(len(prompts))
    for first in own[::at_once]:
        some = prompts[first : min(first + at_once, own.stop)]
        images, raw_rewards = run.memory.attempt(
            sample_and_score, run, settings, rewards, some, seed + first
        )
        for i in range(len(some)):
            group = slice(i * settings.group_size, (i + 1) * settings.group_size)
            yield first + i, {name: x[group] for name, x in raw_rewards.items()}, images[group]


def sample_and_score(run, settings, rewards, prompts, seed):
    """N*G images of N prompts, and their raw rewards, as the model is used after training."""
    settings = settings.for_evaluation()
    encoded = run.glm_image.encode(prompts, settings)
    groups = run.trainer.sample(encoded, settings.group_size, seed)
    return run.paint_and_score(settings, rewards, prompts, groups, seed)


def of_all_ranks(rows):
    """{row: value} of this rank -> of all, in order."""
    return {row: value for own in ranks.gather(rows) for row, value in own.items()}


# ---- which pictures are shown --------------------------------------------------------------------


def count_to_show(prompts):
    """How many of the first prompts are shown: the first of each type, or the first few.

    prompts: in the order of evenly(), which begins with the first of each type.
    """
    types = {prompt.type for prompt in prompts}
    return min(len(types) if len(types) > 1 else len(prompts), PROMPTS_SHOWN)
