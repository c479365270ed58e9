"""Fills docs/lesson.html, a page that opens by double click: its line of data, from a run.

    python train.py --model tiny-glm-image --eval-every 1 --out runs/1
    python benchmarks/lesson.py runs/1

On fresh samples the loss is -1/(G T) sum_i A_i log p(picture i), so a plain gradient step of size s
adds s sum_i A_i push_i to the log-prob of a code, to first order. push_i is an inner product, over
G T: of that log-prob's gradient, and of the gradient of log p(picture i). With it the page answers
for any rewards. Where Chromium is installed, the still of the README is painted too.
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
from math import comb
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import torch
from check import correct
from make import make_codebook
from PIL import Image

import train
from rewards import parse_rewards
from runtime.data import Prompt, evenly, read_prompts
from runtime.log import read_jsonl
from runtime.settings import TINY

PAGE, STILL = ROOT / "docs" / "lesson.html", ROOT / "assets" / "lesson.png"
BEST_OF = ROOT / "benchmarks" / "best-of.csv"
GROUPS = [  # caption, seed: four rewards; as in the notebook; one picture, four times
    ("a purple cross and a yellow triangle", 7),
    ("a black triangle and a red circle", 3),
    ("a circle left of a ring", 10),
]
SIZE = 0.3  # of the gradient step
G = torch.arange(4)
PICTURES = {}  # {as base64: its number}


def number_of(image):
    file = io.BytesIO()
    image.quantize(16, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return PICTURES.setdefault(base64.b64encode(file.getvalue()).decode(), len(PICTURES))


def group_of(settings, text, seed):
    """A group before training, and its choices: where top-p has left more codes than one."""
    run = train.Run.load(settings, None, torch.device("cpu"), None)
    policy, prompts, rewards = run.policy, [Prompt(text)], parse_rewards(settings.reward)
    (group,) = policy.sample(run.glm_image.encode(prompts, settings), len(G), seed)
    images, raw_rewards = train.paint_and_score(run, settings, rewards, prompts, [group], seed)
    of_pictures = gradients(policy, policy.logprobs(group, G).sum(1)) / group.tokens.numel()
    choices = {}  # {the codes before a choice: it}; pictures that begin alike share a choice
    for i, codes in enumerate(group.tokens.tolist()):
        for t in (group.nucleus[i].sum(-1) > 1).nonzero().flatten().tolist():
            if (before := tuple(codes[:t])) not in choices:
                options = options_of(policy, group, i, t, of_pictures)
                choices[before] = {"place": t, "options": options}
    names = {"caption": text, "rewards": next(iter(raw_rewards.values())).tolist()}
    return names | {"pictures": [*map(number_of, images)], "choices": [*choices.values()]}


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


def film_of(settings, folder):
    """What each evaluation of a run has painted of some held-out captions, and the shares."""
    evaluations, steps = (read_jsonl(folder / f"{x}.jsonl") for x in ("evaluation", "metrics"))
    held_out = evenly(read_prompts(settings, "eval_"), settings.eval_count)
    captions, frames = [held_out[row].text for row in evaluations[0]["rows"]], []
    for record in evaluations:
        files, rows = folder / "evaluation" / f"{record['step']:06d}", []
        for i, text in enumerate(captions, 1):
            images = [Image.open(files / f"{i}-{j}.png") for j in range(1, 5)]
            judged = correct(images, [text] * 4).int().tolist()
            rows.append([*zip(map(number_of, images), judged)])
        share = record["held out, mean of types"]["reward/check.py:correct"][0]
        frames.append({"share": round(share, 4), "rows": rows})
    flat = [step["groups_without_spread"] for step in steps]
    return {"captions": captions, "frames": frames, "flat": flat}


def best_of(rows, k):
    """The chance that of k pictures one at least is correct, from 64: the mean of the types."""
    types = {}
    for row in rows:  # arXiv:2107.03374
        chance = 1 - comb(64 - int(row["correct"]), k) / comb(64, k)
        types.setdefault(row["type"], []).append(chance)
    return mean(map(mean, types.values()))


def main(folder):
    settings = train.parse_settings(["--model", TINY])
    data = {"size": SIZE, "groups": [group_of(settings, *each) for each in GROUPS]}
    rows = [*csv.DictReader(BEST_OF.read_text().splitlines())]
    before = [row for row in rows if row["run"] == "before training"]
    after = [row for row in rows if row["run"].startswith("default run")][: len(before)]  # seed 0
    data["best"] = {"before": [best_of(before, 2**i) for i in range(7)], "after": best_of(after, 1)}
    data["best"]["never"] = sum(row["correct"] == "0" for row in before)
    data |= {"film": film_of(settings, Path(folder)), "pictures": [*PICTURES]}
    line = "const DATA = " + json.dumps(data, separators=(",", ":"))
    page = re.sub("^const DATA = .*$", lambda _: line, PAGE.read_text(), flags=re.MULTILINE)
    PAGE.write_text(page)
    if shutil.which("chromium"):
        flags = "--headless --no-sandbox --hide-scrollbars --window-size=900,560"
        where = [f"--screenshot={STILL}", f"{PAGE.as_uri()}#credit"]
        subprocess.run(["chromium", *flags.split(), *where], check=True)
        Image.open(STILL).convert("RGB").quantize(64).save(STILL, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
