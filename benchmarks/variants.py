"""What each part of GRPO is worth: training runs of the tiny model with one part changed.

    python benchmarks/variants.py [--jobs 2]

variants.csv has a line per run and evaluation. This makes the runs that are missing there, hours of
work that may be broken off, then prints the tables and draws the figure from that file alone. An
edit is one of docs/copying.md, named by its first words; flags are those of train.py.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import check
import make
import world

import train

CSV = ROOT / "benchmarks" / "variants.csv"
OUT = ROOT / "runs" / "variants"
SEEDS = range(3)
MOVING = ("two", "counting", "position", "binding")  # kinds: the other two are right before
PICTURES = 16  # of each held-out caption
HARD = {"steps": 160, "lr": 1e-4}  # of the harder start
COLUMNS = ["start", "variant", "seed", "step", "pictures", *world.KINDS, "clean", "objects", "nats"]
EDIT = re.compile(r"^\| ?(.*?) \| `(.+?)` \| (?:`(.+?)`|nothing) \|$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(def (\w+)\(.*?)^```", re.MULTILINE | re.DOTALL)
GAMED = "--reward tiny-glm-image/check.py:many --lr 2e-3 --warmup-steps 0 --steps 12 --kl-coef"

# start | variant | what it is compared with | edit | flags
VARIANTS = f"""
hard | default | rewards shuffled within each group | |
hard | rewards shuffled within each group | before training | Rewards shuffled |
hard | no KL | default | | --kl-coef 0
hard | no std | no KL | Dr. GRPO | --kl-coef 0
hard | no baseline | no KL | REINFORCE, without | --kl-coef 0
hard | a constant baseline, 1 | no KL | REINFORCE with | --kl-coef 0
hard | the batch's mean and std | no KL | The batch's | --kl-coef 0
hard | the best of each group, as it is (RAFT) | no KL | RAFT | --kl-coef 0
hard | the right pictures (supervised) | no KL | Given answers | --kl-coef 0
hard | a reward of 1 or 0 | no KL | | --kl-coef 0 --reward tiny-glm-image/check.py:right
hard | 32 groups of 2 | no KL | | --kl-coef 0 --prompts-per-step 32 --group-size 2
hard | 8 groups of 8 | no KL | | --kl-coef 0 --prompts-per-step 8 --group-size 8
hard | 4 groups of 16 | no KL | | --kl-coef 0 --prompts-per-step 4 --group-size 16
hard | groups without spread drawn again | no KL | DAPO's dynamic | --kl-coef 0
hard | 4 iterations | no KL | | --kl-coef 0 --iterations 4
hard | 4 iterations, no clip | 4 iterations | | --kl-coef 0 --iterations 4 --clip-range 1e9
hard | 4 iterations, two clip ranges | 4 iterations | DAPO's two | --kl-coef 0 --iterations 4
hard | 4 iterations, GSPO | 4 iterations | GSPO | --kl-coef 0 --iterations 4 --clip-range 3e-3
shipped | default | rewards shuffled within each group | |
shipped | rewards shuffled within each group | before training | Rewards shuffled |
shipped | no baseline, no std | default | REINFORCE, without |
shipped | no KL | default | | --kl-coef 0
shipped | no baseline, no std, no KL | no KL | REINFORCE, without | --kl-coef 0
shipped | the best of each group, as it is (RAFT) | no KL | RAFT | --kl-coef 0
shipped | the right pictures (supervised) | no KL | Given answers | --kl-coef 0
gamed | no KL | | | {GAMED} 0
gamed | KL 0.2 | no KL | | {GAMED} 0.2
gamed | KL 1 | no KL | | {GAMED} 1
"""


class Variant(NamedTuple):
    start: str  # "hard", "shipped"; "gamed": as shipped, with a reward that can be gamed
    name: str
    reference: str = ""  # the variant that differs in one part
    edit: str = ""
    flags: str = ""


def variants():
    rows = VARIANTS.strip().split("\n")
    return [Variant(*(cell.strip() for cell in row.split("|"))) for row in rows]


# ---- runs ----------------------------------------------------------------------------------------


def edited(name):
    """{file: its text after the edit of docs/copying.md whose name begins so}; without one none."""
    page = (ROOT / "docs" / "copying.md").read_text("utf-8")
    files = {file: (ROOT / file).read_text("utf-8") for file in ("grpo.py", "train.py")}
    edits = {}
    for recipe, old, new in EDIT.findall(page):
        edits.setdefault(recipe or [*edits][-1], []).append((old, new))
    (chosen,) = (
        [edit for recipe, edit in edits.items() if recipe.startswith(name)] if name else [[]]
    )
    for old, new in chosen:
        (file,) = [file for file in files if old in files[file]]
        before, after = files[file].split(old)  # it stands there once
        text = before + new + after
        for code in [code for code, name in BLOCK.findall(page) if f"{name}(" in new]:
            text = text.replace("\ndef rollout(", f"\n{code}\n\ndef rollout(")
        files[file] = text
    return files


def lines_of(variant, seed):
    """Trains a variant; returns its lines of the file, one per checkpoint but that of the start."""
    torch.set_num_threads(1)
    out = OUT / f"{re.sub('[^a-z0-9]+', '-', ' '.join(variant[:2]).lower())}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", "runs", "test*")
    shutil.copytree(ROOT, out / "project", ignore=ignored)
    for file, text in edited(variant.edit).items():
        (out / "project" / file).write_text(text, encoding="utf-8")
    model = start_of(variant.start)
    flags = f"--eval-count 1 --eval-every 0 --save-every 10 {variant.flags} --seed {seed}"
    call = [sys.executable, "train.py", "--model", model, *flags.split(), "--out", out / "run"]
    with open(out / "log", "w") as log:
        paths = {"cwd": out / "project", "stdout": log, "stderr": log}
        subprocess.run(call, check=True, start_new_session=True, **paths)
    groups = [json.loads(line) for line in (out / "run" / "groups.jsonl").read_text().splitlines()]
    log = (out / "log").read_text()
    lines = []
    for checkpoint in sorted((out / "run" / "checkpoints").glob("*[1-9]*")):
        step = int(checkpoint.name)
        rewards = [next(iter(row["rewards"].values())) for row in groups if row["step"] <= step]
        again = re.findall(r"drawn again: (\d+)", log.partition(f"\nstep {step}/")[0])
        pictures = sum(map(len, rewards)) + sum(map(int, again))
        row = {"start": variant.start, "variant": variant.name, "seed": seed, "step": step}
        lines.append(row | {"pictures": pictures} | judged(model, checkpoint))
    shutil.rmtree(out)
    return lines


def judged(model, adapter=None):
    """Shares of the held-out captions' pictures, with the sampler and the decoder as deployed."""
    flags = ["--model", str(model), *(["--adapter", str(adapter)] if adapter else [])]
    settings = train.parse_settings(flags)
    with contextlib.redirect_stdout(None):
        prompts, held_out, _ = train.read_inputs(settings)
        data = train.load_data(settings, prompts, held_out)
        run, _ = train.load_run(settings, data, torch.device("cpu"), None)
    sampling = replace(train.sampling_of(settings)[1], sequences=PICTURES)
    right, clean, objects, nats = [], [], [], []
    for first in range(0, len(held_out), 16):
        some = held_out.take(range(first, first + 16))
        batch = train.rollout(run, sampling, data.judges, some, train.SEEDS["held out"] + first)
        of_right, of_clean = batch.raw_rewards.values()
        right += of_right.view(-1, PICTURES).mean(1).tolist()
        clean += of_clean.tolist()
        objects += (4 * check.many(batch.images)).tolist()
        nats += [-group.old_logprobs.mean().item() for group in batch.groups]
    kinds = np.array(held_out.kinds)
    shares = {kind: np.array(right)[kinds == kind].mean() for kind in world.KINDS}
    shares |= {"clean": np.mean(clean), "objects": np.mean(objects), "nats": np.mean(nats)}
    return {name: f"{share:.5f}" for name, share in shares.items()}


def start_of(name):
    return OUT / "hard-start" if name == "hard" else ROOT / "tiny-glm-image"


def make_hard_start():
    """The shipped policy misread for longer, by words that are never the right ones."""
    torch.set_num_threads(1)
    shipped, folder = start_of("shipped"), start_of("hard")
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(shipped, unfinished)
    part = unfinished / "vision_language_encoder"
    policy = transformers.GlmImageForConditionalGeneration.from_pretrained(part)
    torch.manual_seed(3)
    parts = make.build_processor(), make.make_codebook()
    make.train_policy(policy, *parts, **HARD, misreads=True, same=False)
    policy.save_pretrained(part)
    unfinished.rename(folder)


def make_missing(jobs):
    """The runs that the file has no lines of: each is appended when it is done."""
    os.environ["OMP_NUM_THREADS"] = "1"
    OUT.mkdir(parents=True, exist_ok=True)
    there = {(row["start"], row["variant"], row["seed"]) for row in read()}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        if not start_of("hard").exists():
            pool.submit(make_hard_start).result()
        futures = {}
        for start in ("hard", "shipped"):
            if (start, "before training", 0) not in there:
                row = {"start": start, "variant": "before training", "seed": 0, "step": 0}
                futures[pool.submit(judged, start_of(start))] = row | {"pictures": 0}
        for seed, variant in itertools.product(SEEDS, variants()):
            if (variant.start, variant.name, seed) not in there:
                futures[pool.submit(lines_of, variant, seed)] = None
        for future in as_completed(futures):
            row = futures[future]
            append(future.result() if row is None else [row | future.result()])


# ---- the file ------------------------------------------------------------------------------------


def read():
    if not CSV.exists():
        return []
    with open(CSV, newline="") as file:
        rows = list(csv.DictReader(file))
    words = ("start", "variant")
    rows = [{k: v if k in words else float(v) for k, v in row.items()} for row in rows]
    return sorted(rows, key=lambda row: row["seed"])


def append(rows):
    new = not CSV.exists()
    with open(CSV, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*row.values(), flush=True)


# ---- tables and figure ---------------------------------------------------------------------------


class Comparisons(NamedTuple):
    """Of the variants of a start after some steps with their references, paired by seed."""

    shares: dict  # name: (seeds,), held-out pictures that are right, mean of the kinds
    differences: dict  # name: of the means
    error: float  # a difference's, one for all
    threshold: float  # from which a difference is told apart


def seeds_of(rows, start, name, step, kinds=world.KINDS):
    found = [row for row in rows if (row["start"], row["variant"]) == (start, name)]
    return np.array([np.mean([row[x] for x in kinds]) for row in found if row["step"] in (0, step)])


def compare(rows, start, step=20):
    """Dunnett's threshold, simulated for as many comparisons with these references: without any
    true difference, 5 tables in 100 have one above it."""
    pairs = {each.name: each.reference for each in variants() if each.start == start}
    names = list(dict.fromkeys([*pairs, *pairs.values()]))
    shares = {name: seeds_of(rows, start, name, step) for name in names}
    draws = np.random.default_rng(0).normal(size=(20_000, len(names), len(SEEDS)))
    draws[:, [len(shares[name]) == 1 for name in names]] = 0  # the model before training
    chance = dict(zip(names, draws.swapaxes(0, 1)))
    found = np.array([shares[name] - shares[reference] for name, reference in pairs.items()])
    drawn = np.array([chance[name] - chance[reference] for name, reference in pairs.items()])
    error, errors = (
        np.sqrt(x.var(axis=-1, ddof=1).mean(axis=0) / len(SEEDS)) for x in (found, drawn)
    )
    largest = np.abs(drawn.mean(axis=-1)).max(axis=0) / errors
    means = dict(zip(pairs, found.mean(axis=-1)))
    return Comparisons(shares, means, error, error * np.quantile(largest, 0.95))


def table(rows, start):
    """Lines of docs/worth.md."""
    after = compare(rows, start)
    lines = ["| Variant | pictures | after 10 steps | 20 | the four | compared with | difference |"]
    lines.append("|---" * 7 + "|")
    for _, name, reference, *_ in [each for each in variants() if each.start == start]:
        shares = [seeds_of(rows, start, name, 10), after.shares[name]]
        shares.append(seeds_of(rows, start, name, 20, MOVING))
        pictures = [row["pictures"] for row in rows if row["variant"] == name and row["step"] == 20]
        cells = [name, f"{np.mean(pictures):.0f}", *(f"{each.mean():.1%}" for each in shares)]
        difference = after.differences[name]
        mark = "**" if abs(difference) > after.threshold else ""
        lines.append(f"| {' | '.join([*cells, reference])} | {mark}{100 * difference:+.1f}{mark} |")
    lines.append(
        f"\nStandard error of a difference {after.error:.1%}; told apart (bold) from "
        f"{after.threshold:.1%} on; a true difference of {after.threshold + 0.84 * after.error:.1%} "
        "is found 8 times in 10."
    )
    return "\n".join(lines)


def table_of_gamed(rows):
    lines = ["| KL | reward | right | clean |", "|---|---|---|---|"]
    for _, name, *_ in [each for each in variants() if each.start == "gamed"]:
        columns = (["objects"], world.KINDS, ["clean"])
        objects, right, clean = (seeds_of(rows, "gamed", name, 12, each).mean() for each in columns)
        lines.append(f"| {name} | {objects / 4:.2f} | {right:.0%} | {clean:.0%} |")
    return "\n".join(lines)


def draw(rows, file, start="hard"):
    """Shares after 10 steps (grey) and 20 (with error; seeds as points), by outcome."""
    after = compare(rows, start)
    order = sorted(after.shares, key=lambda name: -after.shares[name].mean())
    top, bottom, font = 60, 60 + 44 * len(order), ImageFont.load_default(24)
    sheet = Image.new("RGB", (1760, bottom + 60), "white")
    pen = ImageDraw.Draw(sheet)
    error = after.error / np.sqrt(2)
    title = (
        "right after 10 steps (grey) and 20 (points: seeds; blue, red: above, below its reference)"
    )
    pen.text((30, 30), title, "#555555", font, anchor="lm")

    def place(share):
        return 700 + 2100 * (share - 0.5)

    for tick in np.arange(0.5, 1.01, 0.1):
        pen.line((place(tick), top, place(tick), bottom), "#e4e4e4", 2)
        pen.text((place(tick), bottom + 25), f"{tick:.0%}", "#555555", font, anchor="mm")
    for y, name in enumerate(order):
        y = top + 22 + 44 * y
        mean, difference = after.shares[name].mean(), after.differences.get(name, 0)
        told = abs(difference) > after.threshold
        colour = ("#2d6cae" if difference > 0 else "#c62828") if told else "#444444"
        pen.text((680, y), name, "black", font, anchor="rm")
        if len(after.shares[name]) > 1:
            pen.circle((place(seeds_of(rows, start, name, 10).mean()), y), 7, "#bbbbbb")
            pen.line((place(mean - error), y, place(mean + error), y), colour, 4)
        pen.circle((place(mean), y), 11, colour)
        for share in after.shares[name]:
            pen.circle((place(share), y), 4, "white", colour, 2)
    sheet.resize((880, sheet.height // 2), Image.Resampling.LANCZOS).save(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    make_missing(parser.parse_args().jobs)
    rows = read()
    for start in ("hard", "shipped"):
        print(f"\n{table(rows, start)}")
    print(f"\n{table_of_gamed(rows)}")
    draw(rows, OUT / "variants.png")


if __name__ == "__main__":
    main()
