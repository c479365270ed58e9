"""What was learned: training and held-out prompts, painted from the same seeds each time."""

from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from runtime import ranks
from runtime.data import evenly
from runtime.gpu import retry_with_room
from runtime.log import SHOWN

# Prompt i of an evaluation has seed SEEDS[...] + i. Training with --seed 0 needs 536,870 steps to
# reach these seeds. Training with another --seed never reaches them: see seed_of_step.
SEEDS = {"training": 2**29, "held out": 2**29 + 2**20}


def seed_of_step(step, seed, prompts_per_step):
    """The seed of this rank's first group; the groups after it count up, on through all ranks."""
    return (seed * 1_000_003 + step) * 1_000 + ranks.rank() * prompts_per_step


def evaluate(run, settings, data, record, stop=None):
    """Judge pictures of training and held-out prompts, unless this step's are judged already.

    stop: a StopRequest; once it is received, this ends early and leaves nothing.
    """
    if record.done in [each["step"] for each in record.records["evaluation"]]:
        return
    sets = [evenly(each, settings.eval_count) for each in (data.prompts, data.held_out)]
    rewards = data.rewards | data.judges
    shares = []
    with run.clock.evaluation(sum(-(-len(prompts) // ranks.count()) for prompts in sets)):
        given = zip(sets, SEEDS.values(), (0, SHOWN))  # of training prompts no picture is shown
        results = [judge(run, settings, rewards, *each, stop, shares) for each in given]
    if all(results):
        record.evaluation(*zip(sets, results))
        warn_of_other_ids(record, shares)


def judge(run, settings, rewards, prompts, seed, keep=None, stop=None, shares=None):
    """For each prompt its raw rewards {name: (G,)} and its pictures; None once stopped.

    keep: how many of its G pictures, as hundreds of prompts fill a host's memory; None: all.
    shares: a list that gets share_of_other_ids() of some prompts of this rank.
    """

    def make(some, seed):
        own = settings.for_evaluation()
        with run.phase("sample", run.policy.model):
            groups = run.policy.sample(run.glm_image.encode(some, own), own.group_size, seed)
            others = [share_of_other_ids(run.policy, group) for group in groups[:4]]
        return *run.paint_and_score(own, rewards, some, groups, seed), others

    # On a CPU a pass costs much and a row of it little: fewer, larger passes.
    at_once = settings.prompts_per_step * (4 if run.clock.device.type == "cpu" else 1)
    results = []
    for rows in ranks.batches(len(prompts), at_once):
        if stop is not None and any(ranks.gather(stop.received)):
            return None
        some = [prompts[row % len(prompts)] for row in rows]
        make_some = partial(make, some)
        images, raw_rewards, others = retry_with_room(make_some, run, settings, seed + rows[0])
        if shares is not None:
            shares += others
        run.clock.bar.update(len(some))
        for i in range(0, len(images), settings.group_size):
            group = slice(i, i + settings.group_size)
            own = {name: x[group] for name, x in raw_rewards.items()}
            results.append((own, images[group][:keep]))
    return [*chain(*ranks.gather(results))][: len(prompts)]  # without the padding


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
