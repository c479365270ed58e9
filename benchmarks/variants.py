"""What each part of GRPO is worth: training runs of the tiny model with one part changed.

    python benchmarks/variants.py                        the tables of docs/worth.md
    python benchmarks/variants.py "no std" "with KL"     trains these rows again, with seed 0
    python benchmarks/variants.py "no std" --lr 2e-3 --seed 1 --keep     a run for the tables
    python benchmarks/variants.py --hard-start           makes the harder start alone

variants.csv has a line per run and evaluation. From the harder start each variant is trained at
several learning rates with seed 0: first 1e-3 and 2e-3, then half of the best or twice the best,
until the best has a lower and a higher neighbour; and at the best with two more seeds. The best is
chosen on training captions; the tables are of held-out captions.
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
from runtime.data import evenly
from runtime.report import read_jsonl

CSV = ROOT / "benchmarks" / "variants.csv"
OUT = ROOT / "runs" / "variants"
SEEDS = range(3)  # of the tables
MOVING = ("two", "counting", "position", "binding")  # types: the other two are correct before
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
PLAIN = "plain GRPO"  # without a KL term
NO_KL = "--kl-coef 0"
FOUR = "--kl-coef 0 --iterations 4"
GAME = "--reward many --warmup-steps 0 --steps 12 --eval-every 12 --kl-coef"
SHUFFLED = "rewards shuffled within each group"

FOUR_ITERATIONS = Variant("hard", "4 iterations", PLAIN, "", FOUR)
WITH_KL = Variant("hard", "with KL", PLAIN)
NO_CLIP = "4 iterations, no clip"

# From the harder start, each at its best rate.
HARD = [
    Variant("hard", PLAIN, BEFORE, "", NO_KL),
    Variant("hard", "REINFORCE", PLAIN, "REINFORCE", NO_KL),
    Variant("hard", "no baseline", PLAIN, "No baseline, divided", NO_KL),
    Variant("hard", "no std", PLAIN, "Dr. GRPO", NO_KL),
    Variant("hard", "a constant baseline, 1", "no std", "REINFORCE with a constant", NO_KL),
    WITH_KL,
    Variant("hard", "KL in all groups", "with KL", "KL in all groups"),
    Variant("hard", SHUFFLED, "with KL", "Rewards shuffled", "", 4e-3),
    Variant("hard", "RAFT", PLAIN, "RAFT", NO_KL),
    Variant("hard", "supervised", PLAIN, "Given answers", NO_KL),
    FOUR_ITERATIONS,
    Variant("hard", "STAGE's weights", PLAIN, "STAGE's weights", NO_KL),
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
    "KL 1": Variant("hard", "with KL 1", "", "", "--kl-coef 1 --eval-every 20"),
    "KL 0.2, k2": Variant("hard", "with KL 0.2, k2", "", "k2", "--kl-coef 0.2 --eval-every 20"),
}

ALL = dict.fromkeys([*HARD, *CLIP, *GAMED, WITHOUT_TERM, *HONEST.values()])


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
    lines = []
    for checkpoint in sorted((out / "run" / "checkpoints").glob("*[1-9]*")):
        step = int(checkpoint.name)
        pictures = sum(len(group["reward"]) for group in groups if group["step"] <= step)
        row = dict(zip(COLUMNS, [variant.start, variant.name, lr, seed, step, pictures]))
        row |= judged(model, checkpoint)
        # A step without a group to learn from has none.
        clipped = [x["clip_fraction"] for x in metrics if x["step"] <= step]
        row["clipped"] = np.mean([share for share in clipped if share is not None])
        if variant in GAMED or variant in HONEST.values():
            row["kl"] = exact_kl(model, checkpoint)
        if variant.start == "hard" and step == 20 and seed == 0:
            row["chosen_on"] = mean_of_types(judged(model, checkpoint, "training", 4))
        lines.append(
            {k: f"{v:.5f}" if isinstance(v, float) and v != lr else v for k, v in row.items()}
        )
    shutil.rmtree(out)
    return lines


def loaded(model, adapter):
    """Settings, data and a run of train.py, for evaluations."""
    flags = ["--model", str(model), *(["--adapter", str(adapter)] if adapter else [])]
    settings = train.parse_settings(flags)
    with redirect_stdout(None):
        data = train.read_inputs(settings, train.Run.read_prompts)
        train.load_rewards(settings, data)
        return settings, data, train.Run.load(settings, data, torch.device("cpu"), None)


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


def mean_of_types(row):
    return np.mean([row[kind] for kind in world.KINDS])


@torch.no_grad()
def exact_kl(model, adapter):
    """KL(pi || reference) in nats per code, along 4 pictures of each held-out caption.

    A sum over all codes that top-p leaves, not an estimate from the code that was drawn.
    """
    settings, data, run = loaded(model, adapter)
    own = replace(settings, group_size=PICTURES).for_evaluation()
    policy, values = run.policy, []

    def distribution(group, rows=4):
        ids = torch.cat([group.prompt_ids.expand(rows, -1), group.tokens[:rows]], dim=1)[:, :-1]
        positions = group.position_ids[:, None, :-1].expand(-1, rows, -1)
        last = torch.arange(-group.tokens.shape[1], 0)
        logits = policy.model(input_ids=ids, position_ids=positions, logits_to_keep=last).logits
        return _log_distribution(logits, policy.allowed_ids, own.temperature, group.nucleus[:rows])

    for i in range(0, len(data.held_out), 16):
        encoded = run.glm_image.encode(data.held_out[i : i + 16], own)
        for group in policy.sample(encoded, PICTURES, evaluation.SEED + i):
            pi = distribution(group)
            with policy.model.disable_adapter():
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


def train_again(variant, lr, seed, keep):
    """Prints the share of correct pictures at each checkpoint; with `keep` the file gets it all."""
    if variant.start == "hard":
        make_hard_start()
    lines = lines_of(variant, lr, seed)
    for line in lines:
        share = mean_of_types({kind: float(line[kind]) for kind in world.KINDS})
        words = f"{variant.name}, rate {written(lr)}, after {line['step']} steps"
        print(f"{words}: {share:.1%}", flush=True)
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


# ---- tables --------------------------------------------------------------------------------------


def written(lr):
    """As people write it: 5e-4."""
    return f"{lr:.1e}".replace(".0e", "e").replace("e-0", "e-")


def of_seeds(rows, variant, step, columns=world.KINDS, seeds=SEEDS):
    """A mean of columns per seed of SEEDS; of the model before training a lone one."""
    where = {"start": variant.start, "variant": variant.name}
    if variant.name != BEFORE:
        where |= {"lr": rate_of(rows, variant), "step": step}
    found = [row for row in rows if all(row[key] == value for key, value in where.items())]
    found = [row for row in found if row["clean"] is not None]  # else only its rate was judged
    found = [row for row in found if row["seed"] in seeds]
    return np.array([np.mean([row[each] for each in columns]) for row in found])


def compare(rows, variants):
    """After 20 steps, paired by seed: {variant: its mean less that of its reference}.

    Also the standard error of all differences, and the threshold from which they are significant.
    It is Dunnett's, simulated for as many comparisons with the same references: without any true
    difference 5 tables in 100 have one above it.
    """
    pairs = {each.name: each.reference for each in variants}
    before = Variant(variants[0].start, BEFORE)
    shares = {each.name: of_seeds(rows, each, 20) for each in [*variants, before]}
    names = list(dict.fromkeys([*pairs, *pairs.values()]))
    draws = np.random.default_rng(0).normal(size=(len(names), 100_000, len(SEEDS)))
    chance = {name: x * (len(shares[name]) > 1) for name, x in zip(names, draws)}
    found, drawn = (
        np.array([x[name] - x[other] for name, other in pairs.items()]) for x in (shares, chance)
    )
    errors = [np.sqrt(x.var(-1, ddof=1).mean(0) / len(SEEDS)) for x in (found, drawn)]
    critical = np.quantile(np.abs(drawn.mean(-1)).max(0) / errors[1], 0.95)
    return dict(zip(pairs, found.mean(-1))), errors[0], critical * errors[0]


def markdown(titles, lines):
    """A table of cells that are texts."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (titles, *lines))
    return "\n".join([first, "|---" * len(titles) + "|", *others])


def table(rows, variants):
    differences, error, threshold = compare(rows, variants)
    titles = "Variant", "rate", "after 10 steps", "20", "the four", "compared with", "difference"
    lines = []
    for variant in variants:
        columns = (10, world.KINDS), (20, world.KINDS), (20, MOVING)
        shares = [of_seeds(rows, variant, *each).mean() for each in columns]
        difference = differences[variant.name]
        mark = "**" if abs(difference) > threshold else ""
        cells = [variant.name, written(rate_of(rows, variant)), *map("{:.1%}".format, shares)]
        lines.append([*cells, variant.reference, f"{mark}{100 * difference:+.1f}{mark}"])
    words = f"Bold: significant, from {threshold:.1%} on. Standard error of a difference "
    words += f"{error:.1%}; one of {threshold + 0.84 * error:.1%} is found 8 times in 10."
    return f"{markdown(titles, lines)}\n\n{words}"


def table_of_clip(rows):
    seeds = range(5)
    lines = []
    for variant in CLIP:
        shares = of_seeds(rows, variant, 20, seeds=seeds)
        lines.append([variant.name, *map("{:.1%}".format, [*shares, shares.mean()])])
    return markdown(["After 20 steps", *(f"seed {i}" for i in seeds), "mean"], lines)


def table_of_kl(rows):
    """The KL term where the reward is gamed, and from the harder start, where it is honest."""
    titles = (
        "KL term",
        "gamed: reward",
        "correct",
        "exact KL",
        "honest: rate",
        "correct",
        "exact KL",
    )
    lines = []
    for gamed in GAMED:
        if honest := HONEST.get(gamed.name):
            columns = ["objects"], world.KINDS, ["kl"]
            reward, share, kl = (of_seeds(rows, gamed, 12, each).mean() for each in columns)
            cells = [gamed.name, f"{reward / 4:.2f}", f"{share:.1%}", f"{kl:.4f}"]
            share, kl = (of_seeds(rows, honest, 20, each).mean() for each in columns[1:])
            lines.append([*cells, written(rate_of(rows, honest)), f"{share:.1%}", f"{kl:.4f}"])
    return markdown(titles, lines)


def tables(rows):
    """All of docs/worth.md."""
    return [table(rows, HARD), table_of_clip(rows), table_of_kl(rows)]


def main(*arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="rows to train again, at their best rate")
    parser.add_argument("--lr", type=float, help="another rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add what comes out to variants.csv")
    parser.add_argument("--hard-start", action="store_true", help="make the harder start")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    OUT.mkdir(parents=True, exist_ok=True)
    if options.hard_start:
        make_hard_start()
        return print(f"python train.py --model {start_of('hard').relative_to(ROOT)}")
    known = {each.name: each for each in ALL}
    if unknown := set(options.names) - known.keys():
        parser.error(f"no row is called {'; '.join(unknown)!r}; rows: {'; '.join(known)}")
    rows = read()
    kept = {(row["variant"], row["lr"], row["seed"]) for row in rows}
    for name in options.names:
        lr = options.lr or rate_of(rows, known[name])
        if options.keep and (name, lr, options.seed) in kept:
            parser.error(f"variants.csv has {name} at {lr} with seed {options.seed} already")
        train_again(known[name], lr, options.seed, options.keep)
    if options.names:
        return
    print(*tables(rows), sep="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
