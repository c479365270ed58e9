"""Fills docs/lesson.html, a page that opens by double click, and paints its still for the README.

    python train.py --model tiny-glm-image --eval-every 1 --out runs/1
    python benchmarks/lesson.py runs/1

On fresh samples the loss is -1/(G T) sum_i A_i log p(picture i). To first order a plain gradient
step of size s adds s sum_i A_i push_i to the log-prob of a code. push_i, over G T, is the inner
product of two gradients: of that log-prob, and of log p(picture i). The still needs Chromium.
"""

import base64
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import torch
from make import make_codebook
from PIL import Image

import train
from benchmarks.best_of import CSV, curve
from benchmarks.film import evaluations
from benchmarks.variants import BEFORE
from rewards import parse_rewards
from runtime.data import Prompt
from runtime.record import read_jsonl

PAGE, STILL = ROOT / "docs" / "lesson.html", ROOT / "assets" / "lesson.png"
GROUPS = [  # caption, seed: four rewards; as in the notebook; one picture, four times
    ("a purple cross and a yellow triangle", 7),
    ("a black triangle and a red circle", 3),
    ("a circle left of a ring", 10),
]
PICTURES = {}  # {as base64: its number}


def number_of(image):
    file = io.BytesIO()
    image.quantize(16, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return PICTURES.setdefault(base64.b64encode(file.getvalue()).decode(), len(PICTURES))


def group_of(run, settings, text, seed):
    """A group before training, and its choices: where top-p has left more codes than one."""
    policy, prompts, functions = run.policy, [Prompt(text)], parse_rewards(settings.reward)
    groups = policy.sample(run.glm_image.encode(prompts, settings), 4, seed)
    images, raw_rewards = train.paint_and_score(run, settings, functions, prompts, groups, seed)
    (group,), (rewards,) = groups, raw_rewards.values()
    of_pictures = gradients(policy, policy.logprobs(group, torch.arange(4)).mean(1) / 4)
    choices = {}  # {the codes before a choice: it}; pictures that begin alike share a choice
    for i, codes in enumerate(group.tokens.tolist()):
        for t in (group.nucleus[i].sum(-1) > 1).nonzero().flatten().tolist():
            if (before := tuple(codes[:t])) not in choices:
                options = options_of(policy, group, i, t, of_pictures)
                choices[before] = {"place": t, "options": options}
    known = {"caption": text, "rewards": rewards.tolist(), "choices": [*choices.values()]}
    return known | {"pictures": [*map(number_of, images)]}


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


def film_of(run):
    """What each evaluation of a run has painted of some held-out captions, and the shares."""
    frames = []
    for _, share, rows in evaluations(run):
        cells = [[(number_of(x), int(is_correct)) for x, is_correct in own] for _, own in rows]
        frames.append({"share": round(share, 4), "rows": cells})
    flat = [step["groups_without_spread"] for step in read_jsonl(Path(run, "metrics.jsonl"))]
    return {"captions": [caption for caption, _ in rows], "frames": frames, "flat": flat}


def main(folder):
    settings = train.parse_settings(["--model", "tiny-glm-image"])
    run = train.Run.load(settings, None, torch.device("cpu"), None)
    data = {"groups": [group_of(run, settings, *each) for each in GROUPS]}
    rows = [*csv.DictReader(CSV.read_text().splitlines())]
    runs = [[row for row in rows if row["run"] == run] for run in (BEFORE, "default run, seed 0")]
    before, after = ([round(share, 4) for share, _ in curve(run)] for run in runs)
    data |= {"size": 0.3, "best": {"before": before, "after": after[0]}}  # size of the step
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
    main(*sys.argv[1:])
