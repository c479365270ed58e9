"""What a run trains on and what judges it: which prompts a step has, and the rewards."""

import random
from contextlib import nullcontext
from dataclasses import dataclass

from PIL import Image

from inputs import UserError, forget_modules, load_from_file, readable
from inputs.prompts import read_prompts
from rewards import check_parameters, parse_rewards, score, weights_of
from runtime import ranks
from runtime.terminal import say


def prompt_indices(step, settings, count):
    """Which of `count` prompts a step trains on: each once per epoch, shuffled unless --order file.

    A function of the seed and the step alone, so that a resumed run needs no state. Each rank takes
    its share.
    """
    groups = settings.prompts_per_step * ranks.count()
    places = [divmod(step * groups + i, count) for i in ranks.shard(groups)]  # (epoch, place in it)
    if settings.order == "file":
        return [place for _, place in places]
    shuffled = {
        epoch: random.Random(f"{settings.seed} {epoch}").sample(range(count), count)
        for epoch in {epoch for epoch, _ in places}
    }
    return [shuffled[epoch][place] for epoch, place in places]


def seed_of_step(step, seed, prompts_per_step):
    """The seed of this rank's first group; the groups after it count up, on through all ranks."""
    return (seed * 1_000_003 + step) * 1_000 + ranks.rank() * prompts_per_step


@dataclass
class Data:
    """What a run trains on, and what judges it."""

    prompts: list
    held_out: list
    rewards: dict  # {name: Reward}
    judges: dict  # rewards that nothing is trained to please

    def own(self):
        """The rewards in files of the user's."""
        return [each for each in (self.rewards | self.judges).values() if each.own]


def read_inputs(settings, read=read_prompts):
    """The Data of a run, its rewards not yet loaded.

    read: (settings, "" or "eval_") -> [Prompt]. Raises UserError for files and names that are
    wrong, before anything loads.
    """
    forget_modules()
    prompts, held_out = read(settings), read(settings, "eval_")
    specs = settings.reward, settings.eval_reward
    rewards, judges = map(parse_rewards, specs)
    if not any(weights_of(rewards).values()):
        raise UserError("--reward names nothing to train on: give a reward with a weight")
    for name in rewards.keys() & judges.keys():
        if rewards[name].source != judges[name].source:
            raise UserError(f"--reward and --eval-reward have two rewards named {name!r}")
        judges[name] = rewards[name]  # it loads once
    for some, of_file in ((rewards, prompts), (judges, held_out)):
        # A reward gets None where a row lacks what others have.
        columns = dict.fromkeys(name for prompt in of_file for name in prompt.row)
        for prompt in of_file:
            prompt.row = {name: prompt.row.get(name) for name in columns}
        likeness = {"mse", "ssim", "lpips"} & some.keys()
        if likeness and not any(prompt.target for prompt in of_file):
            raise UserError(f"reward {min(likeness)!r} needs --targets, or --eval-targets")
    data = Data(prompts, held_out, rewards, judges)
    for each in data.own():
        load_from_file(each.source)
    known, new = ({prompt.identity() for prompt in some} for some in (prompts, held_out))
    if common := len(known & new):
        say(f"warning: {common} of the {len(new)} held-out prompts are also training prompts")
    return data


def load_rewards(settings, data):
    """Loads the rewards, before the model, and tries them on blank pictures.

    What cannot work fails now, not in an hour.
    """
    rewards = data.rewards | data.judges
    say(f"loading the rewards {', '.join(rewards)}")
    blank = [Image.new("RGB", (settings.width, settings.height))] * 2
    for name, reward in rewards.items():
        hint = "; docs/rewards.md says what it needs, and how to load it from a folder"
        # A bug in the user's own file is its traceback.
        with nullcontext() if reward.own else readable(f"load the reward {name}", hint):
            reward.load()
        if settings.steps > 0 and name in data.rewards:
            check_parameters(reward, data.prompts[0].row, settings.prompts)
        check_parameters(reward, data.held_out[0].row, settings.eval_prompts)
        score({name: reward}, blank, data.held_out[:1])
