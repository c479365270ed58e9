"""Losses on the tiny model: a run, judged by all held-out captions.

    python benchmarks/variants.py "No baseline" --kl-coef 0 --lr 5e-4 --seed 10     a row again
    python benchmarks/variants.py GSPO --kl-coef 0 --mini-batches 4 --lr 1e-3 --seed 15 >> \
        benchmarks/variants.csv                                                    a new row

Other flags are train.py's. The losses are those of losses.py. A row has the share of correct
pictures of the held-out captions, 16 of each, with the sampler and the decoder as deployed. A run
has 20 steps, at a learning rate that rises to the last.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import make

from benchmarks import losses

OUT = ROOT / "runs" / "variants"
STARTS = {"hard": OUT / "hard-start", "shipped": ROOT / "tiny-glm-image"}
# Its own settings, since train.py's may change; flags of a row come after them.
TRAINED = "--steps 20 --warmup-steps 20 --eval-count 1 --eval-every 0"
JUDGED = "--eval-count 48 --group-size 16 --prompts-per-step 4"
JUDGED += " --eval-reward correct,many --eval-prompts captions.txt"


def train(start, loss, flags, lr, seed):
    """Trains a copy of the project that has this loss. Returns a row of the file."""
    if start == "hard":
        make_hard_start()
    out = OUT / f"{os.getpid()}"
    shutil.copytree(ROOT, out, ignore=shutil.ignore_patterns(".*", "runs", "test*"))
    for file, text in losses.edited(loss).items():
        (out / file).write_text(text, encoding="utf-8")
    # In the file's order: an evaluation would take captions of different types in turns.
    captions = (ROOT / "tiny-glm-image" / "heldout.txt").read_text("utf-8").splitlines()
    lines = [line for line in captions if not line.startswith("#")]
    (out / "captions.txt").write_text("\n".join(lines), encoding="utf-8")

    def run(name, *flags):
        """Returns the records of a run of train.py."""
        call = [sys.executable, "train.py", "--model", STARTS[start], *flags, "--out", name]
        subprocess.run(call, cwd=out, check=True, stdout=subprocess.DEVNULL)
        files = [out / name / f"{each}.jsonl" for each in ("metrics", "evaluation")]
        return [[*map(json.loads, file.read_text("utf-8").splitlines())] for file in files]

    call = f"{TRAINED} {flags} --lr {lr} --seed {seed}"
    metrics, _ = run("run", *call.split())
    _, (judged,) = run("judged", "--steps", "0", "--adapter", "run", *JUDGED.split())
    shutil.rmtree(out)
    # A step without a group to learn from has none.
    clipped = np.nanmean([np.float64(each["clip_fraction"]) for each in metrics])
    shares = judged["reward/correct"][0], judged["reward/many"][0], clipped
    return [start, loss, flags, lr, seed, *(f"{x:.5f}" for x in shares), losses.cpu()]


def make_hard_start():
    """The shipped policy misread for longer, by words that are never the correct words."""
    if (folder := STARTS["hard"]).exists():
        return
    torch.set_num_threads(1)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(STARTS["shipped"], unfinished)
    part = unfinished / "vision_language_encoder"
    policy = transformers.GlmImageForConditionalGeneration.from_pretrained(part)
    torch.manual_seed(3)
    make.train_policy(policy, steps=160, lr=1e-4, redraw=partial(make.redraw, same=False))
    policy.save_pretrained(part)
    unfinished.rename(folder)


def main(*arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loss", choices=["GRPO", *losses.EDITS])
    parser.add_argument("--start", choices=STARTS, default="hard")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(*train(**vars(options), flags=" ".join(flags)), sep=",")


if __name__ == "__main__":
    main(*sys.argv[1:])
