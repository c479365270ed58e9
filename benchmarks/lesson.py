"""Fills docs/lesson.html, a page that opens by double click, and paints its still for the README.

    python benchmarks/lesson.py         prints what the updates of part 3 do to the best picture
    python train.py --model tiny-glm-image --eval-every 1 --out runs/1
    python benchmarks/lesson.py runs/1  fills the page

Parts 1 and 2 estimate, as their reader changes the rewards. On fresh samples the loss is -1/(G T)
sum_i A_i log p(picture i). To first order a plain gradient step of size s adds s sum_i A_i push_i
to the log-prob of a code. push_i, over G T, is the inner product of two gradients: of that
log-prob, and of log p(picture i). Part 3 records updates, part 4 a run. The still needs Chromium.
"""

import base64
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import torch
from make import make_codebook
from PIL import Image
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import train
from benchmarks import command, losses
from benchmarks.best_of import CSV, curve
from benchmarks.film import evaluations
from benchmarks.variants import BEFORE
from grpo import set_advantages
from rewards import parse_rewards
from runtime.data import Prompt
from runtime.jsonl import read_jsonl

PAGE, STILL = ROOT / "docs" / "lesson.html", ROOT / "assets" / "lesson.png"
GROUPS = [  # caption, seed: four rewards; as in the notebook; one picture, four times
    ("a purple cross and a yellow triangle", 7),
    ("a black triangle and a red circle", 3),
    ("a circle left of a ring", 10),
]
SIZE = 0.3  # of the step of parts 1 and 2
UPDATES = 6  # of part 3, on the first group
VARIANTS = {  # {a loss of losses.py, or the plain one: its settings}
    "GRPO": {},
    "no clip": {"clip_range": 1e9},
    "DAPO's two clip ranges": {},
    "CISPO": {},
    "GSPO": {},
}
OPTIMISERS = {  # by SGD's rate its first update moves the best picture as far as AdamW's
    "AdamW": {"lr": 5e-5},
    "AdamW without momentum": {"lr": 5e-5, "betas": (0, 0.99)},
    "SGD": {"lr": 0.065},
}
PICTURES = {}  # {as base64: its number}


def number_of(image):
    file = io.BytesIO()
    image.quantize(16, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return PICTURES.setdefault(base64.b64encode(file.getvalue()).decode(), len(PICTURES))


def sampled(run, settings, text, seed):
    """A group before training, with its advantages, and what the page shows of it."""
    prompts = [Prompt(text)]
    functions = {name: reward.load() for name, reward in parse_rewards(settings.reward).items()}
    groups = run.policy.sample(run.glm_image.encode(prompts, settings), 4, seed)
    images, raw_rewards = train.paint_and_score(run, settings, functions, prompts, groups, seed)
    (rewards,) = raw_rewards.values()
    set_advantages(groups, rewards)
    known = {"caption": text, "rewards": rewards.tolist()}
    return groups[0], known | {"pictures": [*map(number_of, images)]}


def choices_of(policy, group):
    """Where top-p has left more codes than one."""
    of_pictures = gradients(policy, policy.logprobs(group, torch.arange(4)).mean(1) / 4)
    choices = {}  # {the codes before a choice: it}; pictures that begin alike share a choice
    for i, codes in enumerate(group.tokens.tolist()):
        for t in (group.nucleus[i].sum(-1) > 1).nonzero().flatten().tolist():
            if (before := tuple(codes[:t])) not in choices:
                options = options_of(policy, group, i, t, of_pictures)
                choices[before] = {"place": t, "options": options}
    return [*choices.values()]


def options_of(policy, group, i, t, of_pictures):
    """The n codes that could have been sampled at place t of picture i, the likeliest first."""
    codes = group.nucleus[i, t].nonzero().flatten()  # (n,)
    tokens = group.tokens[i].repeat(len(codes), 1)  # (n, T)
    tokens[:, t] = codes
    others = replace(group, tokens=tokens, nucleus=group.nucleus[i].expand(len(codes), -1, -1))
    logprobs = policy.logprobs(others, torch.arange(len(codes)))[:, t]  # (n,)
    pushes = gradients(policy, logprobs) @ of_pictures.T  # (n, G)
    options = []
    for logprob, push, row in zip(logprobs, pushes.tolist(), tokens):
        by = (group.tokens[:, : t + 1] == row[: t + 1]).all(1).nonzero().flatten().tolist()
        option = {"p": round(logprob.exp().item(), 5), "push": [round(x, 4) for x in push]}
        colours = (make_codebook()[row[t]].view(3, 4, 4) + 1) * 127.5
        patch = Image.fromarray(colours.round().byte().permute(1, 2, 0).numpy())
        options.append(option | {"by": by, "patch": number_of(patch)})
    return sorted(options, key=lambda option: -option["p"])


def gradients(policy, logprobs):
    """Of each of n log-probs: (n, parameters)."""
    rows = [torch.autograd.grad(x, policy.parameters, retain_graph=True) for x in logprobs]
    return torch.stack([torch.cat([each.flatten() for each in row]) for row in rows])


def updates_of(policy, group):
    """Updates of grpo.py, all on the same samples.

    codes: those that had a choice, each with its picture i, its place and p when it was sampled.
    ratios: {variant: {optimiser: the codes' ratios after 0 to 6 updates}}.
    """
    chosen = group.nucleus.sum(-1) > 1  # (G, T)
    ratios = {variant: {} for variant in VARIANTS}
    for variant, name in product(VARIANTS, OPTIMISERS):
        found = updated(policy, group, variant, name)
        ratios[variant][name] = [[round(x, 4) for x in row] for row in found[:, chosen].tolist()]
        times = found[:, group.advantages.argmax()].prod(1).tolist()
        print(f"{variant}, {name}: {' '.join(map('{:.2f}'.format, times))} times as likely")
    codes = [
        {"i": i, "place": t, "p": round(group.old_logprobs[i, t].exp().item(), 5)}
        for i, t in chosen.nonzero().tolist()
    ]
    return {"codes": codes, "ratios": ratios}


def updated(policy, group, variant, name):
    """The ratios of all codes after 0 to 6 updates, (7, G, T). The policy stays as it was."""
    grpo, start = losses.module(variant), parameters_to_vector(policy.parameters).detach()
    optimizer = torch.optim.SGD(policy.parameters) if name == "SGD" else train.adamw(policy.model)
    optimizer.param_groups[0] |= OPTIMISERS[name]
    given = {"temperature": policy.settings.temperature, "top_p": policy.settings.top_p}
    settings = grpo.GRPOSettings(**given, **VARIANTS[variant])
    trainer = grpo.GRPO(policy.model, optimizer, settings, policy.allowed_ids)
    rows, ratios = torch.arange(len(group.tokens)), [torch.ones_like(group.old_logprobs)]
    for _ in range(UPDATES):
        with warnings.catch_warnings(action="ignore"):  # of samples that are no longer fresh
            trainer.update([group])
        with torch.no_grad():
            ratios.append((trainer.logprobs(group, rows) - group.old_logprobs).exp())
    vector_to_parameters(start, policy.parameters)
    return torch.stack(ratios)


def film_of(run):
    """What each evaluation of a run has painted of some held-out captions, and the shares."""
    frames = []
    for _, share, rows in evaluations(run):
        cells = [[(number_of(x), int(is_correct)) for x, is_correct in own] for _, own in rows]
        frames.append({"share": round(share, 4), "rows": cells})
    flat = [step["groups_without_spread"] for step in read_jsonl(Path(run, "metrics.jsonl"))]
    return {"captions": [caption for caption, _ in rows], "frames": frames, "flat": flat}


def main(folder=None):
    settings = train.parse_settings(["--model", "tiny-glm-image"])
    run = train.Run.load(settings, None, torch.device("cpu"), None)
    pairs = [sampled(run, settings, *each) for each in GROUPS]
    updates = updates_of(run.policy, pairs[0][0])
    if folder is None:
        return
    groups = [known | {"choices": choices_of(run.policy, group)} for group, known in pairs]
    rows = [*csv.DictReader(CSV.read_text().splitlines())]
    runs = [[row for row in rows if row["run"] == run] for run in (BEFORE, "default run, seed 0")]
    before, after = ([round(share, 4) for share, _ in curve(run, "all")] for run in runs)
    data = {"size": SIZE, "groups": groups, "updates": updates}
    data |= {"best": {"before": before, "after": after[0]}}
    data |= {"film": film_of(folder), "pictures": [*PICTURES]}
    line = "const DATA = " + json.dumps(data, separators=(",", ":"))
    page = re.sub("^const DATA = .*$", lambda _: line, PAGE.read_text(), flags=re.MULTILINE)
    PAGE.write_text(page)
    if browser := shutil.which("chromium"):
        part = Path(folder, "still.html").resolve()  # part 2 alone
        part.write_text(page + "<style>body > :not(#maps, #detail) { display: none }</style>")
        flags = "--headless --no-sandbox --hide-scrollbars --window-size=992,582"
        command = [browser, *flags.split(), f"--screenshot={STILL}", part.as_uri()]
        subprocess.run(command, check=True)
        Image.open(STILL).convert("RGB").quantize().save(STILL, optimize=True)


if __name__ == "__main__":
    command.run(main, __doc__, "[RUN]")
