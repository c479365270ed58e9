"""What each part of GRPO is worth: training runs of the tiny model with one part changed.

    python benchmarks/variants.py

variants.csv has a line per run and evaluation. This makes the runs that are missing there, one per
core, hours of work that may be broken off; then it prints the tables and draws the figure from that
file alone. An edit is one of docs/copying.md, named by its first words; flags are those of
train.py.
"""

import csv
import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
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
from runtime.log import read_jsonl

CSV = ROOT / "benchmarks" / "variants.csv"
OUT = ROOT / "runs" / "variants"
SEEDS = range(3)
MOVING = ("two", "counting", "position", "binding")  # kinds: the other two are right before
PICTURES = 16  # of each held-out caption
HARD = {"steps": 160, "lr": 1e-4}  # of the harder start
COLUMNS = ["start", "variant", "seed", "step", "pictures", *world.KINDS, "clean", "objects"]
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
hard | a reward of 1 or 0 | no KL | | --kl-coef 0 --reward tiny-glm-image/check.py:correct
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


def variants(start=""):
    rows = [row for row in VARIANTS.strip().split("\n") if row.startswith(start)]
    return [Variant(*(cell.strip() for cell in row.split("|"))) for row in rows]


# ---- runs ----------------------------------------------------------------------------------------


def edited(name):
    """{file: its text after the edit of docs/copying.md whose name begins so}; without one none."""
    page = (ROOT / "docs" / "copying.md").read_text("utf-8")
    files = {file: (ROOT / file).read_text("utf-8") for file in ("grpo.py", "train.py")}
    edits = {}
    for recipe, old, new in EDIT.findall(page):
        edits.setdefault(recipe or [*edits][-1], []).append((old, new))
    (recipe,) = [recipe for recipe in edits if recipe.startswith(name)] if name else [None]
    for old, new in edits.get(recipe, []):
        (file,) = [file for file in files if old in files[file]]
        before, after = files[file].split(old)  # it stands there once
        text = before + new + after
        for code in [code for code, name in BLOCK.findall(page) if f"{name}(" in new]:
            text = text.replace("\ndef paint_and_score(", f"\n{code}\n\ndef paint_and_score(")
        files[file] = text
    return files


def lines_of(variant, seed):
    """Trains a variant; returns its lines of the file, one per checkpoint but that of the start."""
    torch.set_num_threads(1)
    model = start_of(variant.start)
    if variant.name == "before training":
        return [dict(zip(COLUMNS, [*variant[:2], seed, 0, 0])) | judged(model)]
    out = OUT / f"{re.sub('[^a-z0-9]+', '-', ' '.join(variant[:2]).lower())}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    ignored = shutil.ignore_patterns(".*", "runs", "test*")
    shutil.copytree(ROOT, out / "project", ignore=ignored)
    for file, text in edited(variant.edit).items():
        (out / "project" / file).write_text(text, encoding="utf-8")
    flags = f"--eval-count 1 --eval-every 0 --save-every 10 {variant.flags} --seed {seed}"
    call = [sys.executable, "train.py", "--model", model, *flags.split(), "--out", out / "run"]
    piped = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    log = subprocess.run(call, cwd=out / "project", check=True, **piped).stdout
    groups = read_jsonl(out / "run" / "groups.jsonl")
    lines = []
    for checkpoint in sorted((out / "run" / "checkpoints").glob("*[1-9]*")):
        step = int(checkpoint.name)
        rewards = [group["rewards"].values() for group in groups if group["step"] <= step]
        again = re.findall(r"drawn again: (\d+)", log.partition(f"\nstep {step}/")[0])
        pictures = sum(len(next(iter(values))) for values in rewards) + sum(map(int, again))
        row = [variant.start, variant.name, seed, step, pictures]
        lines.append(dict(zip(COLUMNS, row)) | judged(model, checkpoint))
    shutil.rmtree(out)
    return lines


def judged(model, adapter=None):
    """Shares of the held-out captions' pictures, with the sampler and the decoder as deployed."""
    flags = ["--model", str(model), *(["--adapter", str(adapter)] if adapter else [])]
    settings = train.parse_settings(flags)
    with redirect_stdout(None):
        prompts, held_out, _ = train.read_inputs(settings, train.Run.read_prompts)
        data = train.load_data(settings, prompts, held_out)
        run = train.Run.load(settings, data, torch.device("cpu"), None)
    settings = replace(settings, group_size=PICTURES, prompts_per_step=4)
    right, clean, objects = [], [], []
    for rewards, images in train.evaluate(
        run, settings, data.judges, held_out, train.SEEDS["held out"]
    ):
        of_right, of_clean = rewards.values()
        right.append(of_right.mean().item())
        clean += of_clean.tolist()
        objects += (4 * check.many(images)).tolist()
    kinds = np.array([prompt.type for prompt in held_out])
    shares = {kind: np.array(right)[kinds == kind].mean() for kind in world.KINDS}
    shares |= {"clean": np.mean(clean), "objects": np.mean(objects)}
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
    make.train_policy(policy, make.make_codebook(), **HARD, misreads=True, same=False)
    policy.save_pretrained(part)
    unfinished.rename(folder)


def make_missing():
    """The runs that the file has no lines of: each is appended when it is done."""
    os.environ["OMP_NUM_THREADS"] = "1"
    OUT.mkdir(parents=True, exist_ok=True)
    there = {(row["start"], row["variant"], row["seed"]) for row in read()}
    starts = [Variant(start, "before training") for start in ("hard", "shipped")]
    wanted = [(start, 0) for start in starts] + [*itertools.product(variants(), SEEDS)]
    missing = [(each, seed) for each, seed in wanted if (*each[:2], seed) not in there]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        if missing and not start_of("hard").exists():
            pool.submit(make_hard_start).result()
        for future in as_completed([pool.submit(lines_of, *each) for each in missing]):
            append(future.result())


# ---- the file ------------------------------------------------------------------------------------


def read():
    with open(CSV, newline="") as file:
        rows = list(csv.DictReader(file))
    words = ("start", "variant")
    rows = [{k: v if k in words else float(v) for k, v in row.items()} for row in rows]
    return sorted(rows, key=lambda row: row["seed"])


def append(rows):
    with open(CSV, "a", newline="") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(rows)
    for row in rows:
        print(*row.values(), flush=True)


# ---- tables and figure ---------------------------------------------------------------------------


def of_seeds(rows, start, name, step, columns=world.KINDS):
    """A mean of columns per seed; of the model before training a lone one."""
    found = [row for row in rows if (row["start"], row["variant"]) == (start, name)]
    found = [row for row in found if row["step"] in (0, step)]
    return np.array([np.mean([row[each] for each in columns]) for row in found])


def compare(rows, start):
    """After 20 steps, paired by seed: {variant: its mean less that of its reference}.

    Also the standard error of all differences, and the threshold from which they are told apart. It
    is Dunnett's, simulated for as many comparisons with the same references: without any true
    difference 5 tables in 100 have one above it.
    """
    pairs = {each.name: each.reference for each in variants(start)}
    names = list(dict.fromkeys([*pairs, *pairs.values()]))
    shares = {name: of_seeds(rows, start, name, 20) for name in names}
    draws = np.random.default_rng(0).normal(size=(len(names), 20_000, len(SEEDS)))
    chance = {name: x * (len(shares[name]) > 1) for name, x in zip(names, draws)}
    found, drawn = (
        np.array([x[name] - x[other] for name, other in pairs.items()]) for x in (shares, chance)
    )
    errors = [np.sqrt(x.var(-1, ddof=1).mean(0) / len(SEEDS)) for x in (found, drawn)]
    critical = np.quantile(np.abs(drawn.mean(-1)).max(0) / errors[1], 0.95)
    return dict(zip(pairs, found.mean(-1))), errors[0], critical * errors[0]


def table(rows, start):
    """Lines of docs/worth.md."""
    differences, error, threshold = compare(rows, start)
    lines = ["| Variant | pictures | after 10 steps | 20 | the four | compared with | difference |"]
    lines.append("|---" * 7 + "|")
    for _, name, reference, *_ in variants(start):
        columns = (10, world.KINDS), (20, world.KINDS), (20, MOVING)
        shares = [of_seeds(rows, start, name, *each).mean() for each in columns]
        pictures = of_seeds(rows, start, name, 20, ["pictures"]).mean()
        cells = name, f"{pictures:.0f}", *map("{:.1%}".format, shares), reference
        mark = "**" if abs(differences[name]) > threshold else ""
        lines.append(f"| {' | '.join(cells)} | {mark}{100 * differences[name]:+.1f}{mark} |")
    words = (
        f"\nBold: told apart, from {threshold:.1%} on. Standard error of a difference {error:.1%}"
    )
    lines.append(f"{words}; one of {threshold + 0.84 * error:.1%} is found 8 times in 10.")
    return "\n".join(lines)


def table_of_gamed(rows):
    lines = ["| | reward | right | clean |", "|---" * 4 + "|"]
    for _, name, *_ in variants("gamed"):
        columns = ["objects"], world.KINDS, ["clean"]
        objects, *shares = (of_seeds(rows, "gamed", name, 12, each).mean() for each in columns)
        lines.append(f"| {name} | {objects / 4:.2f} | {shares[0]:.0%} | {shares[1]:.0%} |")
    return "\n".join(lines)


def draw(rows, file, start="hard"):
    """Shares after 10 steps and 20, with error and seeds, by outcome."""
    differences, error, threshold = compare(rows, start)
    names = ["before training", *differences]
    shares = {name: of_seeds(rows, start, name, 20) for name in names}
    bottom, font = 60 + 44 * len(names), ImageFont.load_default(24)
    sheet = Image.new("RGB", (1760, bottom + 60), "white")
    pen = ImageDraw.Draw(sheet)
    words = (
        "right after 10 steps (grey) and 20 (points: seeds; blue, red: above, below its reference)"
    )
    pen.text((30, 30), words, "#555", font, anchor="lm")
    place = lambda share: 700 + 2000 * (share - 0.5)
    for tick in np.arange(0.5, 1.01, 0.1):
        pen.line((place(tick), 60, place(tick), bottom), "#ddd", 2)
        pen.text((place(tick), bottom + 25), f"{tick:.0%}", "#555", font, anchor="mm")
    for i, name in enumerate(sorted(names, key=lambda name: -shares[name].mean())):
        y, mean = 82 + 44 * i, shares[name].mean()
        difference = differences.get(name, 0)
        told = "#2d6cae" if difference > 0 else "#c62828"
        colour = told if abs(difference) > threshold else "#444"
        pen.text((680, y), name, "black", font, anchor="rm")
        pen.circle((place(of_seeds(rows, start, name, 10).mean()), y), 7, "#bbb")
        half = error / np.sqrt(2) * (name in differences)  # of a share
        pen.line((place(mean - half), y, place(mean + half), y), colour, 4)
        pen.circle((place(mean), y), 11, colour)
        for share in shares[name]:
            pen.circle((place(share), y), 4, "white", colour, 2)
    sheet.resize((880, sheet.height // 2), Image.Resampling.LANCZOS).save(file)


def main():
    make_missing()
    rows = read()
    print(table(rows, "hard"), table(rows, "shipped"), table_of_gamed(rows), sep="\n\n")
    draw(rows, OUT / "variants.png")


if __name__ == "__main__":
    main()
