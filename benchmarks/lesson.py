"""Fills docs/lesson.html, a page that opens by double click, from a run: its line of data.

    python train.py --model tiny-glm-image --eval-every 1 --out runs/1
    python benchmarks/lesson.py runs/1

The page answers for any rewards. On fresh samples the loss is -1/(G T) sum_i A_i log p(picture i),
so a plain gradient step of size s adds s sum_i A_i push_i to the log-prob of a code, to first
order. push_i is the inner product of two gradients, over G T: of that log-prob, and of log p(picture
i). Where Chromium is installed, the still of the README is painted too.
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
from make import make_codebook
from PIL import Image

import train
from rewards import load_from_file, parse_rewards
from runtime.data import Prompt, evenly, read_prompts
from runtime.log import read_jsonl
from runtime.settings import TINY

PAGE, STILL = ROOT / "docs" / "lesson.html", ROOT / "assets" / "lesson.png"
BEST_OF = ROOT / "benchmarks" / "best-of.csv"
GROUPS = [  # caption, seed
    ("a purple cross and a yellow triangle", 7),  # four rewards
    ("a black triangle and a red circle", 3),  # as in the notebook
    ("a circle left of a ring", 10),  # one picture, four times
]
SIZE = 0.3  # of the gradient step
G = torch.arange(4)
PICTURES = {}  # {as base64: its number}


def number_of(image):
    file = io.BytesIO()
    image.quantize(16, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return PICTURES.setdefault(base64.b64encode(file.getvalue()).decode(), len(PICTURES))


def group_of(text, seed, settings):
    """A group before training, and its choices: where top-p has left more codes than one."""
    run = train.Run.load(settings, None, torch.device("cpu"), None)
    policy, prompts = run.policy, [Prompt(text)]
    (group,) = policy.sample(run.glm_image.encode(prompts, settings), len(G), seed)
    rewards = parse_rewards(settings.reward)
    images, raw_rewards = train.paint_and_score(run, settings, rewards, prompts, [group], seed)
    of_pictures = gradients(policy, policy.logprobs(group, G).sum(1)) / group.tokens.numel()
    first_with = {}  # {the codes before a choice: a picture}; those that begin alike share it
    for i, codes in enumerate(group.tokens.tolist()):
        for t in (group.nucleus[i].sum(-1) > 1).nonzero().flatten().tolist():
            first_with.setdefault(tuple(codes[:t]), i)
    return {
        "caption": text,
        "rewards": next(iter(raw_rewards.values())).tolist(),
        "pictures": [number_of(image) for image in images],
        "choices": [
            {
                "place": len(before),
                "options": options_of(policy, group, i, len(before), of_pictures),
            }
            for before, i in first_with.items()
        ],
    }


def options_of(policy, group, i, t, of_pictures):
    """The codes that could have been sampled at place t of picture i, the likeliest first."""
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
        options.append(option | {"by": by, "patch": number_of(patch(row[t]))})
    return sorted(options, key=lambda option: -option["p"])


def gradients(policy, logprobs):
    """Of each of n log-probs: (n, parameters)."""
    rows = [torch.autograd.grad(x, policy.parameters, retain_graph=True) for x in logprobs]
    return torch.stack([torch.cat([each.flatten() for each in row]) for row in rows])


def patch(code):
    """The 4x4 mean colours that a code stands for."""
    colours = (make_codebook()[code].view(3, 4, 4) + 1) * 127.5
    return Image.fromarray(colours.round().byte().permute(1, 2, 0).numpy())


def film_of(folder, settings):
    """What each evaluation has painted of some held-out captions, and the shares."""
    correct = load_from_file(f"{TINY}/check.py:correct")
    evaluations, steps = (read_jsonl(folder / f"{x}.jsonl") for x in ("evaluation", "metrics"))
    held_out = evenly(read_prompts(settings, "eval_"), settings.eval_count)
    captions = [held_out[row].text for row in evaluations[0]["rows"]]
    frames = []
    for record in evaluations:
        files, rows = folder / "evaluation" / f"{record['step']:06d}", []
        for i, text in enumerate(captions, 1):
            images = [Image.open(files / f"{i}-{j}.png") for j in range(1, 5)]
            rows.append([*zip(map(number_of, images), correct(images, [text] * 4).tolist())])
        share = record["held out, mean of types"]["reward/check.py:correct"][0]
        frames.append({"share": round(share, 4), "rows": rows})
    flat = [step["groups_without_spread"] for step in steps]
    return {"captions": captions, "frames": frames, "flat": flat}


def best_of(rows, k):
    """The chance that of k pictures one at least is correct: the mean of the types."""
    types = {}
    for row in rows:  # 1 - C(n-c, k) / C(n, k), with c of n = 64 correct (arXiv:2107.03374)
        chance = 1 - comb(64 - int(row["correct"]), k) / comb(64, k)
        types.setdefault(row["type"], []).append(chance)
    return mean(map(mean, types.values()))


def main(folder):
    settings = train.parse_settings(["--model", TINY])
    data = {"size": SIZE, "groups": [group_of(*each, settings) for each in GROUPS]}
    data["film"] = film_of(Path(folder), settings)
    rows = [*csv.DictReader(BEST_OF.read_text().splitlines())]
    before = [row for row in rows if row["run"] == "before training"]
    after = [row for row in rows if row["run"].startswith("default run")][: len(before)]  # seed 0
    data["best"] = {
        "before": [best_of(before, 2**i) for i in range(7)],
        "after": best_of(after, 1),
        "never": sum(row["correct"] == "0" for row in before),
    }
    line = "const DATA = " + json.dumps(data | {"pictures": [*PICTURES]}, separators=(",", ":"))
    page = re.sub("^const DATA = .*$", lambda _: line, PAGE.read_text(), flags=re.MULTILINE)
    PAGE.write_text(page)
    if shutil.which("chromium"):
        flags = "--headless --no-sandbox --hide-scrollbars --window-size=900,560"
        address = [f"--screenshot={STILL}", f"{PAGE.as_uri()}#credit"]
        subprocess.run(["chromium", *flags.split(), *address], check=True)
        Image.open(STILL).convert("RGB").quantize(64).save(STILL, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
