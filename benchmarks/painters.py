"""How cheaply a group may be painted before its rewards rank differently.

    python benchmarks/painters.py --model tiny-glm-image --reward facts,near --eval-decode-steps 30
    python benchmarks/painters.py          # GLM-Image with its default rewards, on a GPU

Takes the flags of train.py. The groups of one step are sampled once, and painted by several
painters: fewer denoising steps, guidance in all of them, in half or in none. Their advantages are
compared with those of an evaluation's painter. The ceiling is that painter with another noise.
"""

import sys
from copy import copy
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import train
from benchmarks.variants import markdown
from grpo import compute_advantages
from rewards import combine, weights_of
from runtime import ranks
from runtime.data import evenly, load_rewards, read_inputs
from runtime.errors import exit_code
from runtime.settings import option

STEPS = 12, 8, 6, 4, 3, 2, 1


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
    run.machine.read()
    _, raw = train.paint_and_score(run, settings, rewards, prompts, groups, seed)
    timings = run.machine.read()
    number, size = sum(len(x.tokens.unique(dim=0)) for x in groups), settings.group_size
    if len(raw) > 1:
        raw = raw | {"all": combine(raw, weights_of(rewards), size, settings.combine)}
    of = lambda values: compute_advantages(values, size).double().numpy()
    return {name: of(x) for name, x in raw.items()}, (
        timings["seconds/paint"] + timings["seconds/vae"]
    ) / number


def agreement(one, other):
    """Correlation of advantages other than 0, its standard error, and the share of equal signs."""
    told = (one != 0) | (other != 0)
    with np.errstate(invalid="ignore"):
        r = (one @ other) / np.sqrt((one @ one) * (other @ other))
        return (
            r,
            (1 - r**2) / np.sqrt(told.sum()),
            (np.sign(one) == np.sign(other))[told].sum() / told.sum(),
        )


def main(*arguments):
    settings = train.parse_settings(arguments)
    device = ranks.device(settings.device)
    data = read_inputs(settings, train.Run.read_prompts)
    waiting = train.backend_of(device).plan(train.Run.Model, settings, device)
    load_rewards(settings, data)
    run = train.Run.load(settings, data, device, waiting)
    prompts, seed = evenly(data.prompts, settings.prompts_per_step), settings.seed
    with run.machine.phase("sample", run.policy.model):
        encoded = run.glm_image.encode(prompts, settings)
        groups = run.policy.sample(encoded, settings.group_size, seed)
    given = data.rewards, prompts, groups
    best, seconds = painted(run, settings.for_evaluation(), *given, seed)
    other, _ = painted(run, settings.for_evaluation(), *given, seed + 1000)
    ceiling = {name: agreement(best[name], other[name]) for name in best}
    print(markdown(["painter", "seconds per picture", *(f"{x}: r, signs" for x in best)], []))

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
        within = within or (all(found[x][0] >= least[x] for x in best) and words)
    print(f"the cheapest painter within reach of the ceiling: {within or 'none'}")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(*sys.argv[1:])))
