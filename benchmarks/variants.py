"""What each part of GRPO is worth, and each published loss: training runs of the tiny model.

    python benchmarks/variants.py "GSPO" "no std"    trains these rows of docs/worth.md again
    python benchmarks/variants.py "no std" --lr 2e-3 --seed 1 --keep     a run for the tables
    python benchmarks/variants.py "GSPO" --shipped   a row of the model as shipped
    python benchmarks/variants.py --hard-start       makes the harder start alone
    python benchmarks/tables.py                      prints the tables

variants.csv has a line per run and evaluation. A variant that names no rate is trained at several
learning rates with seed 0: first 1e-3 and 2e-3, then half of the best or twice the best,
until the best has a lower and a higher neighbour; and at the best with two more seeds. The best is
chosen on training captions, by the mean of their types (`chosen_on`).
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import check
import make
import world

import train
from benchmarks import losses
from grpo import _log_distribution
from rewards import Reward
from runtime import evaluation
from runtime.checkpoint import find_adapters
from runtime.cpu import Machine
from runtime.data import evenly
from runtime.record import read_jsonl

CSV = ROOT / "benchmarks" / "variants.csv"
OUT = ROOT / "runs" / "variants"
SEEDS = range(3)  # of the tables
CAPTIONS = {"one": 2, "two": 6, "counting": 12, "colours": 6, "position": 12, "binding": 10}
PICTURES = 16  # of each held-out caption
JUDGES = {
    "correct": Reward("correct", 1.0, check.correct),
    "clean": Reward("clean", 1.0, check.clean),
}
HARD_START = {"steps": 160, "lr": 1e-4}
COLUMNS = ["start", "variant", "lr", "seed", "step", "pictures", *world.KINDS, "clean", "objects"]
COLUMNS += ["clipped", "chosen_on", "kl"]


class Variant(NamedTuple):
    start: str  # "hard" or "shipped"; "gamed": as shipped, with a reward that can be gamed
    name: str
    reference: str = ""  # the variant that differs in one part
    loss: str = ""  # of losses.py
    flags: str = ""
    lr: float | None = None  # None: its best


BEFORE = "before training"
PLAIN = "GRPO without KL"
NO_KL = "--kl-coef 0"
FOUR = "--kl-coef 0 --iterations 4"
MORE = "--kl-coef 0 --iterations 8"
# Redrawn pictures count: about 11 steps take 1,280.
DYNAMIC = f"{NO_KL} --steps 14 --warmup-steps 11 --eval-every 1"
GAME = "--reward many --warmup-steps 0 --steps 12 --eval-every 12 --kl-coef"
SHUFFLED = "rewards shuffled within each group"

ITERATED = "4 iterations"
FOUR_ITERATIONS = Variant("hard", ITERATED, PLAIN, "", FOUR)
WITH_KL = Variant("hard", "GRPO with KL", PLAIN)
NO_CLIP = "4 iterations, no clip"

# From the harder start, each at its best rate.
HARD = [
    Variant("hard", PLAIN, BEFORE, "", NO_KL),
    Variant("hard", "REINFORCE", PLAIN, "REINFORCE", NO_KL),
    Variant("hard", "no baseline", PLAIN, "No baseline", NO_KL),
    Variant("hard", "no std", PLAIN, "Dr. GRPO", NO_KL),
    Variant("hard", "a constant baseline, 1", "no std", "REINFORCE with a constant", NO_KL),
    WITH_KL,
    Variant("hard", "KL in all groups", WITH_KL.name, "KL in all groups"),
    Variant("hard", SHUFFLED, WITH_KL.name, "Rewards shuffled", "", 4e-3),
    Variant("hard", "RAFT", PLAIN, "RAFT", NO_KL),
    Variant("hard", "supervised", PLAIN, "Given answers", NO_KL),
    FOUR_ITERATIONS,
    Variant("hard", "STAGE's weights", PLAIN, "STAGE's weights", NO_KL),
]
# Published losses, each at its best rate: with one update per batch, then with four. With Adam and
# one update "no std" is Dr. GRPO, and RLOO too: their advantages differ by constant factors alone.
LOSSES = [
    *(each for each in HARD if each.name in (PLAIN, WITH_KL.name, "no std", "RAFT")),
    Variant("hard", "REINFORCE++", PLAIN, "The batch's mean and std", NO_KL),
    Variant("hard", "GPG", PLAIN, "GPG", NO_KL),
    Variant("hard", "DAPO's dynamic sampling", PLAIN, "DAPO's dynamic sampling", DYNAMIC),
    FOUR_ITERATIONS,
    Variant("hard", "DAPO's two clip ranges", ITERATED, "DAPO's two clip ranges", FOUR),
    Variant("hard", "GSPO", ITERATED, "GSPO", FOUR),
    Variant("hard", "CISPO", ITERATED, "CISPO", FOUR),
]
# With more updates per batch, which move the policy further from the samples.
EIGHT = [
    Variant("hard", "8 iterations", BEFORE, "", MORE),
    *(
        Variant("hard", f"{loss}, 8 iterations", "8 iterations", loss, MORE)
        for loss in ("DAPO's two clip ranges", "CISPO")
    ),
]
# Clip ranges, with seed 0: as in LOSSES, and others at the same rate.
CLIP_RANGES = [
    *(each for each in LOSSES if each.name in ("GSPO", "CISPO")),
    *(
        Variant("hard", f"{loss}, clip range {x}", ITERATED, loss, f"{FOUR} --clip-range {x}")
        for loss, others in (("GSPO", ["1e-4", "3e-3", "3e-2"]), ("CISPO", [1, 4]))
        for x in others
    ),
]
# The most discussed again from the model as shipped, on half of the pictures.
SHIPPED = [
    each._replace(start="shipped", flags=f"{each.flags} --steps 10 --warmup-steps 10")
    for each in LOSSES
    if each.name in (PLAIN, "no std", ITERATED, "GSPO")
]
# The clip, at the best rate of four iterations. Some runs fail, so each is shown.
CLIP = [
    FOUR_ITERATIONS,
    Variant("hard", NO_CLIP, "", "", f"{FOUR} --clip-range 1e9", 1e-3),
]
# The KL term as k3 and as k2: where the reward is gamed, and from the harder start.
COEFS = 0.02, 0.05, 0.1, 0.2, 0.5, 1
GAMED = [
    Variant("gamed", f"KL {coef}{end}", "", loss, f"{GAME} {coef}", 2e-3)
    for loss, end in (("", ""), ("k2", ", k2"))
    for coef in COEFS
]
WITHOUT_TERM = Variant("gamed", "no KL", "", "", f"{GAME} 0", 2e-3)
HONEST = {
    "KL 0.2": WITH_KL,
    "KL 1": Variant("hard", "GRPO with KL 1", "", "", "--kl-coef 1 --eval-every 20"),
    "KL 0.2, k2": Variant("hard", "GRPO with KL 0.2, k2", "", "k2", "--eval-every 20"),
}

ALL = dict.fromkeys(
    [*HARD, *LOSSES, *EIGHT, *CLIP_RANGES, *CLIP, *GAMED, WITHOUT_TERM, *HONEST.values()]
)


# ---- runs ----------------------------------------------------------------------------------------


def lines_of(variant, lr, seed):
    """Trains a variant; returns its lines of the file, one per checkpoint but that of the start."""
    torch.set_num_threads(1)
    model = start_of(variant.start)
    out = OUT / re.sub("[^a-z0-9.]+", "-", f"{variant.start} {variant.name} {lr} {seed}".lower())
    shutil.rmtree(out, ignore_errors=True)
    ignored = shutil.ignore_patterns(".*", "runs", "test*")
    shutil.copytree(ROOT, out / "project", ignore=ignored)
    for file, text in losses.edited(variant.loss or None).items():
        (out / "project" / file).write_text(text, encoding="utf-8")
    # The checkpoints of evaluated steps stay.
    flags = f"--eval-count 1 --eval-every 10 {variant.flags} --lr {lr} --seed {seed}"
    call = [sys.executable, "train.py", "--model", model, *flags.split(), "--out", out / "run"]
    quiet = {"stdout": subprocess.DEVNULL, "start_new_session": True}
    subprocess.run(call, cwd=out / "project", check=True, **quiet)
    groups, metrics = (read_jsonl(out / "run" / f"{name}.jsonl") for name in ("groups", "metrics"))
    made = {}  # pictures until each checkpoint, those that are drawn again too
    for checkpoint in sorted((out / "run" / "checkpoints").glob("*[1-9]*")):
        step = int(checkpoint.name)
        first = [len(group["reward"]) for group in groups if group["step"] <= step]
        again = [each.get("redrawn", 0) for each in metrics if each["step"] <= step]
        made[checkpoint] = sum(first) + int(sum(again))
    lines = []
    for checkpoint in sorted({nearest(made, step) for step in (10, 20)}):
        step, pictures = int(checkpoint.name), made[checkpoint]
        row = dict(zip(COLUMNS, [variant.start, variant.name, lr, seed, step, pictures]))
        row |= judged(model, checkpoint)
        # A step without a group to learn from has none.
        clipped = [x["clip_fraction"] for x in metrics if x["step"] <= step]
        row["clipped"] = np.mean([share for share in clipped if share is not None])
        if variant in GAMED or variant in HONEST.values():
            row["kl"] = exact_kl(model, checkpoint)
        if variant.start != "gamed" and checkpoint == nearest(made, 20) and seed == 0:
            of_types = judged(model, checkpoint, "training", 4)
            row["chosen_on"] = np.mean([of_types[kind] for kind in world.KINDS])
        lines.append(
            {k: f"{v:.5f}" if isinstance(v, float) and v != lr else v for k, v in row.items()}
        )
    shutil.rmtree(out)
    return lines


def loaded(model, adapter):
    """Settings, data and a run of train.py, for evaluations."""
    settings = train.parse_settings(["--model", str(model)])
    with redirect_stdout(None):
        data = train.read_inputs(settings, train.Run.read_prompts)
        train.load_rewards(settings, data)
        machine = Machine(torch.device("cpu"), "bfloat16")
        return settings, data, train.Run.load(settings, data, machine, find_adapters(adapter))


def judged(model, adapter=None, prompts="held out", pictures=PICTURES):
    """Shares of pictures of the held-out captions, or of 48 captions that are trained on.

    With the sampler and the decoder as deployed.
    """
    settings, data, run = loaded(model, adapter)
    settings = replace(settings, group_size=pictures, prompts_per_step=4)
    some = data.held_out if prompts == "held out" else evenly(data.prompts, 48)
    correct, clean, objects = [], [], []
    seed = evaluation.SEED if prompts == "held out" else 2**29
    for _, rewards, images in evaluation.score_prompts(run, settings, JUDGES, some, seed):
        correct.append(rewards["correct"].mean().item())
        clean += rewards["clean"].tolist()
        objects += (4 * check.many(images)).tolist()
    kinds = np.array([prompt.type for prompt in some])
    shares = {kind: np.mean(np.array(correct)[kinds == kind]) for kind in world.KINDS}
    return shares | {"clean": np.mean(clean), "objects": np.mean(objects)}


def nearest(made, steps):
    """The checkpoint with about as many pictures as these steps of 64 take."""
    return min(made, key=lambda checkpoint: abs(made[checkpoint] - 64 * steps))


def correct(row):
    """The share of correct pictures of the held-out captions."""
    return sum(float(row[kind]) * number for kind, number in CAPTIONS.items()) / 48


@torch.no_grad()
def exact_kl(model, adapter):
    """KL(pi || reference) in nats per code, along 4 pictures of each held-out caption.

    A sum over all codes that top-p leaves, not an estimate from the code that was drawn.
    """
    settings, data, run = loaded(model, adapter)
    own = replace(settings, group_size=PICTURES).for_evaluation()
    trainer, values = run.trainer, []

    def distribution(group, rows=4):
        ids = torch.cat([group.prompt_ids.expand(rows, -1), group.tokens[:rows]], dim=1)[:, :-1]
        positions = group.position_ids[:, None, :-1].expand(-1, rows, -1)
        last = torch.arange(-group.tokens.shape[1], 0)
        logits = trainer.model(input_ids=ids, position_ids=positions, logits_to_keep=last).logits
        return _log_distribution(logits, trainer.allowed_ids, own.temperature, group.nucleus[:rows])

    for i in range(0, len(data.held_out), 16):
        encoded = run.glm_image.encode(data.held_out[i : i + 16], own)
        for group in trainer.sample(encoded, PICTURES, evaluation.SEED + i):
            pi = distribution(group)
            with trainer.model.disable_adapter():
                ref = distribution(group)
            values.append((pi.exp() * (pi - ref)).nan_to_num(0).sum(-1).mean())
    return torch.stack(values).mean().item()


def start_of(name):
    return OUT / "hard-start" if name == "hard" else ROOT / "tiny-glm-image"


def make_hard_start():
    """The shipped policy misread for longer, by words that are never the correct words."""
    shipped, folder = start_of("shipped"), start_of("hard")
    if folder.exists():
        return
    torch.set_num_threads(1)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(shipped, unfinished)
    part = unfinished / "vision_language_encoder"
    policy = transformers.GlmImageForConditionalGeneration.from_pretrained(part)
    torch.manual_seed(3)
    make.train_policy(policy, **HARD_START, redraw=partial(make.redraw, same=False))
    policy.save_pretrained(part)
    unfinished.rename(folder)


def rate_of(rows, variant):
    """The rate that is given, or the best that was tried; of equally good rates the lowest."""
    shares = {
        row["lr"]: row["chosen_on"]
        for row in rows
        if (row["start"], row["variant"]) == variant[:2] and row["chosen_on"] is not None
    }
    return variant.lr or max(sorted(shares), key=shares.get, default=1e-3)


def written(lr):
    """As people write it: 5e-4."""
    return re.sub(r"\.?0*e-0", "e-", f"{lr:.2e}")


def train_again(variant, lr, seed, keep):
    """Prints the share of correct pictures at each checkpoint; with `keep` the file gets it all."""
    if variant.start == "hard":
        make_hard_start()
    lines = lines_of(variant, lr, seed)
    for line in lines:
        words = f"{variant.name}, rate {written(lr)}, after {line['step']} steps"
        print(f"{words}: {correct(line):.1%}", flush=True)
    if keep:
        append(CSV, COLUMNS, lines)


# ---- the file ------------------------------------------------------------------------------------


def read():
    words = ("start", "variant")
    number = lambda text: float(text) if text else None
    with open(CSV, newline="", encoding="utf-8") as file:
        rows = [
            {k: v if k in words else number(v) for k, v in row.items()}
            for row in csv.DictReader(file)
        ]
    return sorted(rows, key=lambda row: row["seed"])


def append(file, columns, lines):
    with file.open("a", newline="", encoding="utf-8") as opened:
        csv.DictWriter(opened, columns, lineterminator="\n").writerows(lines)


def main(*arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="rows to train again, at their best rate")
    parser.add_argument("--lr", type=float, help="another rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add what comes out to variants.csv")
    parser.add_argument("--hard-start", action="store_true", help="make the harder start")
    parser.add_argument("--shipped", action="store_true", help="rows from the model as shipped")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    OUT.mkdir(parents=True, exist_ok=True)
    if options.hard_start:
        make_hard_start()
        return print(f"python train.py --model {start_of('hard').relative_to(ROOT)}")
    known = {each.name: each for each in (SHIPPED if options.shipped else ALL)}
    if unknown := set(options.names) - known.keys():
        parser.error(f"no row is called {'; '.join(unknown)!r}; rows: {'; '.join(known)}")
    rows = read()
    kept = {(row["start"], row["variant"], row["lr"], row["seed"]) for row in rows}
    for name in options.names:
        variant = known[name]
        lr = options.lr or rate_of(rows, variant)
        if options.keep and (*variant[:2], lr, options.seed) in kept:
            parser.error(f"variants.csv has {name} at {lr} with seed {options.seed} already")
        train_again(variant, lr, options.seed, options.keep)


if __name__ == "__main__":
    main(*sys.argv[1:])
