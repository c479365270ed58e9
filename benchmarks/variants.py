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
PICTURES = 16  # of each held-out caption
HARD = {"steps": 160, "lr": 1e-4}  # of the harder start
COLUMNS = ["start", "variant", "seed", "step", "pictures", *world.KINDS, "clean", "objects", "nats"]
EDIT = re.compile(r"^\| ?(.*?) \| `(.+?)` \| (?:`(.+?)`|nothing) \|$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(def (\w+)\(.*?)^```", re.MULTILINE | re.DOTALL)
GAMED = "--reward tiny-glm-image/check.py:many --lr 2e-3 --warmup-steps 0 --steps 12 --kl-coef"

# start | variant | what it is compared with | edit | flags
VARIANTS = f"""
hard | default | | |
hard | rewards shuffled within each group | default | Rewards shuffled |
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
shipped | default | | |
shipped | rewards shuffled within each group | default | Rewards shuffled |
shipped | no baseline, no std | default | REINFORCE, without |
shipped | no KL | default | | --kl-coef 0
shipped | no baseline, no std, no KL | no KL | REINFORCE, without | --kl-coef 0
shipped | the best of each group, as it is (RAFT) | no KL | RAFT | --kl-coef 0
shipped | the right pictures (supervised) | no KL | Given answers | --kl-coef 0
gamed | no KL | | | {GAMED} 0
gamed | KL 0.2 | | | {GAMED} 0.2
gamed | KL 1 | | | {GAMED} 1
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
    return [{k: v if k in words else float(v) for k, v in row.items()} for row in rows]


def append(rows):
    new = not CSV.exists()
    with open(CSV, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*row.values(), flush=True)


# ---- tables and figure -----------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    make_missing(parser.parse_args().jobs)


if __name__ == "__main__":
    main()
