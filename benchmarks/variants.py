"""What each part of GRPO is worth: the default run of the tiny model with one part changed, on
held-out captions.

    python benchmarks/variants.py [--seeds 3] [--jobs 2]

The variants are those of the table in README.md here: an edit from docs/copying.md, or flags of
train.py. All of it takes hours; a run in runs/variants is not made again: after a change delete it.
Prints the table anew and draws it.
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
OUT = ROOT / "runs" / "variants"
CHECK = "tiny-glm-image/check.py"
FLAGS = "--model tiny-glm-image --eval-every 5 --eval-count 24"
EDIT = re.compile(r"^\| ?(.*?) \| `(.+?)` \| (?:`(.+?)`|nothing) \|$", re.MULTILINE)
HEAD = "| Variant | edit | flags | after 5 steps | 10 | 20 | clean | pictures until 80% |"


def edited(name):
    """The text of grpo.py after the edit of docs/copying.md whose name begins so; without a name,
    as it is."""
    edits = {}
    for recipe, old, new in EDIT.findall((ROOT / "docs/copying.md").read_text("utf-8")):
        edits.setdefault(recipe or [*edits][-1], []).append((old, new))
    (chosen,) = (
        [edit for recipe, edit in edits.items() if recipe.startswith(name)] if name else [[]]
    )
    code = (ROOT / "grpo.py").read_text("utf-8")
    for old, new in chosen:
        before, after = code.split(old)  # it stands there once
        code = before + new + after
    return code


def evaluations(name, edit, flags, seed):
    """Of a run, made if it is missing, after each quarter: shares of held-out pictures that are
    right, and clean."""
    out = OUT / f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{seed}"
    if not out.exists():
        copy = out.with_suffix(".project")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "test*"))
        (copy / "grpo.py").write_text(edited(edit), encoding="utf-8")
        call = [sys.executable, "train.py", *f"{FLAGS} {flags} --seed {seed} --out run".split()]
        with open(out.with_suffix(".log"), "w") as log:
            subprocess.run(
                call, cwd=copy, stdout=log, stderr=log, check=True, start_new_session=True
            )
        (copy / "run").rename(out)
        shutil.rmtree(copy)
    kinds = [
        json.loads(line)["held_out/kinds"]
        for line in (out / "evaluation.jsonl").read_text().splitlines()
    ]
    judged = lambda judge: [each["mean of the kinds"][f"reward/{CHECK}:{judge}"] for each in kinds]
    print(f"{name}, seed {seed}: {judged('right')[-1]:.1%} right", flush=True)
    return judged("right"), judged("clean")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant (default: 3)")
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at a time, one core each (default: 2)"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    OUT.mkdir(parents=True, exist_ok=True)
    rows = (
        (ROOT / "benchmarks/README.md")
        .read_text("utf-8")
        .partition(HEAD)[2]
        .split("\n\n")[0]
        .split("\n")[2:]
    )
    variants = [
        [cell.strip(" `") for cell in row.split("|")[1:4]] for row in rows
    ]  # (name, edit, flags)
    jobs = [(*variant, seed) for seed in range(options.seeds) for variant in variants]
    with ThreadPoolExecutor(options.jobs) as pool:
        shares = np.array(list(pool.map(evaluations, *zip(*jobs, strict=True)))).reshape(
            options.seeds, -1, 2, 5
        )
    error = np.sqrt(shares[:, :, 0, -1].var(axis=0, ddof=1).mean() / options.seeds)
    print(f"{HEAD}\n{'|---' * 8}|")
    pen = ImageDraw.Draw(sheet := Image.new("RGB", (760, 26 * len(variants) + 60), "white"))
    pen.text(
        (10, 8),
        "Held-out pictures that are right, 50% to 100%: grey after 5 and 10 steps, red after 20",
        "black",
    )
    for i, ((name, edit, flags), (right, clean)) in enumerate(
        zip(variants, shares.mean(axis=0), strict=True)
    ):
        needed = 64 * np.interp(0.8, np.maximum.accumulate(right), range(0, 21, 5), right=np.nan)
        means = " | ".join(f"{share:.0%}" for share in (*right[[1, 2, 4]], clean[4]))
        print(f"| {name} | {edit} | {flags and f'`{flags}`'} | {means} | {needed:.0f} |")
        pen.text((230, 26 * i + 45), name, "black", anchor="rm")
        for share, colour in zip(right[[1, 2, 4]], ("#cccccc", "#888888", "#d02030"), strict=True):
            pen.circle((240 + 1000 * (share - 0.5), 26 * i + 45), 6, colour)
    sheet.save(OUT / "variants.png")
    print(
        f"Means over {options.seeds} seeds; the standard error of a share after 20 steps, pooled, is {error:.1%}."
    )


if __name__ == "__main__":
    main()
