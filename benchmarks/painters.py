"""How cheaply a group may be painted before its rewards rank differently.

    python benchmarks/painters.py --model tiny-glm-image --reward facts,near --eval-decode-steps 30
    python benchmarks/painters.py          # GLM-Image with its default rewards, on a GPU

Takes the flags of train.py. It samples the groups of one step, once, and paints the same codes by
several painters: fewer denoising steps, guidance in all of them, in the first half or in none. Each
painter's advantages are compared with the advantages by an evaluation's painter
(--eval-decode-steps, --eval-guidance-scale). The ceiling is that painter with another noise: what
differs there is chance, and no painter has to do better.
"""

import sys
from copy import copy
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import train
from grpo import compute_advantages
from rewards import combine, weights_of
from runtime import ranks
from runtime.data import evenly, load_data, read_inputs
from runtime.gpu import plan
from runtime.settings import option

STEPS = 12, 8, 6, 4, 3, 2, 1
OTHER_NOISE = 1000  # added to the seed


def painters(settings):
    """Settings of each painter, the cheapest first: (passes of the decoder, flags, settings)."""
    found = []
    for steps in STEPS:
        scale = settings.guidance_scale
        for guided in {steps, steps // 2, 0} if scale > 1 else {0}:
            flags = {"decode_steps": steps, "guidance_scale": scale if guided else 1.0}
            flags |= {"guidance_steps": guided} if 0 < guided < steps else {}
            own = copy(settings)
            vars(own).update({"guidance_steps": None} | flags)
            words = " ".join(f"{option(name)} {value}" for name, value in flags.items())
            found.append((steps + guided, words, own))
    return sorted(found, key=lambda each: each[:2])


def painted(run, settings, rewards, prompts, groups, seed):
    """{reward: advantages (N*G,)} of what a painter makes of the groups; seconds per picture."""
    run.phase.read()
    _, raw = train.paint_and_score(run, settings, rewards, prompts, groups, seed)
    timings = run.phase.read()
    number = sum(len(group.tokens.unique(dim=0)) for group in groups)
    size = settings.group_size
    if len(raw) > 1:
        raw = raw | {"all": combine(raw, weights_of(rewards), size, settings.combine)}
    advantages = {
        name: compute_advantages(values, size).double().numpy() for name, values in raw.items()
    }
    return advantages, (timings["seconds/paint"] + timings["seconds/vae"]) / number


def agreement(one, other):
    """Correlation of advantages, its standard error, and the share of equal signs.

    Over the pictures that either painter gives an advantage. NaN if there are none.
    """
    told = (one != 0) | (other != 0)
    with np.errstate(invalid="ignore"):
        r = (one @ other) / np.sqrt((one @ one) * (other @ other))
        return r, (1 - r**2) / np.sqrt(told.sum()), np.mean((np.sign(one) == np.sign(other))[told])


def main(*arguments):
    settings = train.parse_settings(arguments)
    device = ranks.device(settings.device)
    prompts, held_out, _ = read_inputs(settings, train.Run.read_prompts)
    turns = plan(train.Run.Model.sizes, settings, device)
    data = load_data(settings, prompts, held_out)
    run = train.Run.load(settings, data, device, turns)
    prompts, seed = evenly(data.prompts, settings.prompts_per_step), settings.seed
    with run.phase("sample", run.policy.model):
        encoded = run.glm_image.encode(prompts, settings)
        groups = run.policy.sample(encoded, settings.group_size, seed)

    given = data.rewards, prompts, groups
    best, seconds = painted(run, settings.for_evaluation(), *given, seed)
    other, _ = painted(run, settings.for_evaluation(), *given, seed + OTHER_NOISE)
    ceiling = {name: agreement(best[name], other[name]) for name in best}
    titles = "painter", "seconds per picture", *(f"{name}: r, signs" for name in best)
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")

    def show(words, seconds, agreements):
        cells = [f"{r:.3f} +- {error:.3f}, {signs:.0%}" for r, error, signs in agreements.values()]
        print(f"| {' | '.join([words, f'{seconds:.2f}', *cells])} |", flush=True)

    show("an evaluation's, with another noise", seconds, ceiling)
    within = None
    for _, words, own in painters(settings):
        advantages, seconds = painted(run, own, *given, seed)
        found = {name: agreement(best[name], advantages[name]) for name in best}
        show(words, seconds, found)
        least = {name: r - error - 1e-6 for name, (r, error, _) in ceiling.items()}
        reached = all(found[name][0] >= least[name] for name in best)
        within = within or (reached and words)
    print(f"the cheapest painter within reach of the ceiling: {within or 'none'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
