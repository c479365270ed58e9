"""What each part of GRPO is worth: the default run of the tiny model with one part changed, on held-out captions.

    python benchmarks/variants.py [--seeds 3] [--jobs 2]

A variant is an edit of grpo.py, read from docs/copying.md, and flags of train.py. All of it takes hours; runs that have
ended are not made again. Prints a table and draws it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "--model tiny-glm-image --eval-every 5 --eval-count 24"
AGAIN = "--iterations 4 --warmup-steps 80"  # the warm-up counts optimiser steps
VARIANTS = {  # name: (edit, flags)
    "default": ("", ""), "no baseline": ("REINFORCE, without", ""), "a constant baseline, 1": ("REINFORCE with", ""),
    "mean and std of the batch": ("The batch's", ""), "no std": ("Dr. GRPO", ""), "no KL": ("", "--kl-coef 0"),
    "5 times the KL": ("", "--kl-coef 1"), "2 iterations": ("", "--iterations 2 --warmup-steps 40"),
    "4 iterations": ("", AGAIN), "4 iterations, no clip": ("", f"{AGAIN} --clip-range 1e9"),
    "4 iterations, two clip ranges": ("DAPO's two", AGAIN), "4 iterations, GSPO": ("GSPO", f"{AGAIN} --clip-range 3e-4"),
    "32 groups of 2": ("", "--prompts-per-step 32 --group-size 2"), "top-p 1": ("", "--top-p 1"),
    "8 groups of 8": ("", "--prompts-per-step 8 --group-size 8"), "half the rate": ("", "--lr 2.5e-4"),
    "4 groups of 16": ("", "--prompts-per-step 4 --group-size 16"), "twice the rate": ("", "--lr 1e-3"),
    "reward 1 or 0": ("", "--reward tiny-glm-image/check.py:right"),
}  # fmt: skip


def edited(recipe):
    """The text of grpo.py after the edit of docs/copying.md whose name begins so: (what stands there, what replaces it)."""
    page = (ROOT / "docs" / "copying.md").read_text(encoding="utf-8")
    code = (ROOT / "grpo.py").read_text(encoding="utf-8")
    edits = {}
    for name, old, new in re.findall(r"^\| ?(.*?) \| `(.+?)` \| (?:`(.+?)`|nothing) \|$", page, flags=re.MULTILINE):
        edits.setdefault(name or [*edits][-1], []).append((old, new))
    (chosen,) = [edit for name, edit in edits.items() if name.startswith(recipe)] if recipe else [[]]
    for old, new in chosen:
        before, after = code.split(old)  # it stands there once
        code = before + new + after
    return code


def evaluations(name, seed, folder):
    """Of a variant's run, made if it is missing: [shares of held-out pictures that are right], [that are clean]."""
    out = folder / f"{re.sub('[^a-z0-9]+', '-', name)}-{seed}"
    if not out.exists():
        copy = out.with_suffix(".project")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        (copy / "grpo.py").write_text(edited(VARIANTS[name][0]), encoding="utf-8")
        command = f"{FLAGS} {VARIANTS[name][1]} --seed {seed} --out run".split()
        with open(out.with_suffix(".log"), "w") as log:
            streams = {"stdout": log, "stderr": log, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
            subprocess.run([sys.executable, "train.py", *command], cwd=copy, check=True, **streams)
        (copy / "run").rename(out)
        shutil.rmtree(copy)
    kinds = [json.loads(line)["held_out/kinds"] for line in (out / "evaluation.jsonl").read_text().splitlines()]
    judged = lambda judge: [each["mean of the kinds"][f"reward/tiny-glm-image/check.py:{judge}"] for each in kinds]
    return judged("right"), judged("clean")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant (default: 3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each (default: 2)")
    options = parser.parse_args()
    folder = ROOT / "runs" / "variants"
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            (name, pool.submit(evaluations, name, seed, folder)) for seed in range(options.seeds) for name in VARIANTS
        ]
    runs = {
        name: np.array([job.result() for known, job in jobs if known == name]) for name in VARIANTS
    }  # (seeds, 2, 5)
    error = np.sqrt(np.mean([run[:, 0].var(0, ddof=1) for run in runs.values()]) / options.seeds)
    print(f"| | after 5 steps | 10 | 20 | clean | pictures until 80% |\n{'|---' * 6}|")
    sheet = Image.new("RGB", (760, 26 * len(runs) + 30), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text(
        (10, 8), f"held-out pictures that are right, 50% to 100%: after 5, 10 and 20 steps; errors {error:.1%}", "black"
    )
    for i, (name, (right, clean)) in enumerate((name, run.mean(0)) for name, run in runs.items()):
        needed = 64 * np.interp(0.8, np.maximum.accumulate(right), range(0, 21, 5), right=np.nan)
        print(f"| {name} | {right[1]:.0%} | {right[2]:.0%} | {right[4]:.0%} | {clean[4]:.0%} | {needed:.0f} |")
        pen.text((230, 26 * i + 40), name, "black", anchor="rm")
        for share, colour in zip(right[[1, 2, 4]], ("#cccccc", "#888888", "#d02030"), strict=True):
            pen.circle((240 + 1000 * (share - 0.5), 26 * i + 40), 6, colour)
    sheet.save(folder / "variants.png")
    print(f"Means over {options.seeds} seeds, with a standard error of {error:.1%}; {folder / 'variants.png'}")


if __name__ == "__main__":
    main()
