"""What each part of GRPO is worth: training runs of the tiny model with one part changed.

    python benchmarks/variants.py                        the tables and the figure of docs/worth.md
    python benchmarks/variants.py "no std" "with KL"     trains these rows again, with seed 0
    python benchmarks/variants.py --hard-start           makes the harder start alone
    python benchmarks/variants.py --train                the runs that variants.csv has no lines of

variants.csv has a line per run and evaluation. From the harder start each variant is trained at
several learning rates with seed 0, and at the best of them with two more seeds. The best is chosen
on training captions; the tables are of held-out captions.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
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
from benchmarks import losses
from grpo import _log_distribution
from runtime import evaluation
from runtime.data import evenly
from runtime.log import read_jsonl

CSV = ROOT / "benchmarks" / "variants.csv"
OUT = ROOT / "runs" / "variants"
SEEDS = range(3)  # of the tables
FIRST_RATES = (1e-3, 2e-3)  # from there halved or doubled, as long as it gets better
LOWEST, HIGHEST = 2.5e-4, 8e-3
MOVING = ("two", "counting", "position", "binding")  # types: the other two are correct before
PICTURES = 16  # of each held-out caption
JUDGES = {"correct": (check.correct, 1.0), "clean": (check.clean, 1.0)}
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
    seeds: range = SEEDS


PLAIN = "plain GRPO"  # without a KL term
NO_KL = "--kl-coef 0"
FOUR = "--kl-coef 0 --iterations 4"
GAME = "--reward tiny-glm-image/check.py:many --warmup-steps 0 --steps 12 --kl-coef"
SHUFFLED = "rewards shuffled within each group"

FOUR_ITERATIONS = Variant("hard", "4 iterations", PLAIN, "", FOUR, seeds=range(5))
NO_CLIP = "4 iterations, no clip"

# From the harder start, each at its best rate.
HARD = [
    Variant("hard", PLAIN, "before training", "", NO_KL),
    Variant("hard", "REINFORCE", PLAIN, "REINFORCE", NO_KL),
    Variant("hard", "no baseline", PLAIN, "No baseline, divided", NO_KL),
    Variant("hard", "no std", PLAIN, "Dr. GRPO", NO_KL),
    Variant("hard", "a constant baseline, 1", "no std", "REINFORCE with a constant", NO_KL),
    Variant("hard", "with KL", PLAIN),
    Variant("hard", SHUFFLED, "with KL", "Rewards shuffled", "", 4e-3),
    Variant("hard", "RAFT", PLAIN, "RAFT", NO_KL),
    Variant("hard", "supervised", PLAIN, "Given answers", NO_KL),
    FOUR_ITERATIONS,
]
# The clip, at the best rate of four iterations. Some runs fail, so each is shown.
CLIP = [
    FOUR_ITERATIONS,
    Variant("hard", NO_CLIP, "", "", f"{FOUR} --clip-range 1e9", 1e-3, FOUR_ITERATIONS.seeds),
]
SHIPPED = [
    Variant("shipped", "with KL", SHUFFLED, "", "", 5e-4),
    Variant("shipped", SHUFFLED, "before training", "Rewards shuffled", "", 5e-4),
]
# {kl_coef: number of seeds}
K3 = {0.2: 3, 0.5: 1, 1: 3, 1.4: 1, 2: 1}
K2 = {0.02: 1, 0.05: 1, 0.1: 1, 0.2: 3, 0.4: 1, 0.5: 1, 1: 1}
GAMED = [Variant("gamed", "no KL", "", "", f"{GAME} 0", 2e-3)] + [
    Variant("gamed", f"KL {coef}{end}", "", loss, f"{GAME} {coef}", 2e-3, range(seeds))
    for loss, end, coefs in (("", "", K3), ("k2", ", k2", K2))
    for coef, seeds in coefs.items()
]


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
    flags = f"--eval-count 1 --eval-every 0 --save-every 10 {variant.flags} --lr {lr} --seed {seed}"
    call = [sys.executable, "train.py", "--model", model, *flags.split(), "--out", out / "run"]
    piped = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    log = subprocess.run(call, cwd=out / "project", check=True, **piped).stdout
    groups, metrics = (read_jsonl(out / "run" / f"{name}.jsonl") for name in ("groups", "metrics"))
    lines = []
    for checkpoint in sorted((out / "run" / "checkpoints").glob("*[1-9]*")):
        step = int(checkpoint.name)
        painted = sum(len(group["reward"]) for group in groups if group["step"] <= step)
        again = re.findall(r"drawn again: (\d+)", log.partition(f"\nstep {step}/")[0])
        pictures = painted + sum(map(int, again))
        row = dict(zip(COLUMNS, [variant.start, variant.name, lr, seed, step, pictures]))
        row |= judged(model, checkpoint)
        # A step without a group to learn from has none.
        clipped = [x["clip_fraction"] for x in metrics if x["step"] <= step]
        row["clipped"] = np.mean([share for share in clipped if share is not None])
        if variant.start == "gamed":
            row["kl"] = exact_kl(model, checkpoint)
        if variant.start == "hard" and step == 20 and seed == 0:
            row["chosen_on"] = share_of_training(model, checkpoint)
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
        prompts, held_out, _ = train.read_inputs(settings, train.Run.read_prompts)
        data = train.load_data(settings, prompts, held_out)
        return settings, data, train.Run.load(settings, data, torch.device("cpu"), None)


def mean_by_type(values, prompts):
    """{type of captions: the mean of its captions' values}"""
    kinds = np.array([prompt.type for prompt in prompts])
    return {kind: np.array(values)[kinds == kind].mean() for kind in world.KINDS}


def judged(model, adapter=None):
    """Shares of the held-out captions' pictures, with the sampler and the decoder as deployed."""
    settings, data, run = loaded(model, adapter)
    settings = replace(settings, group_size=PICTURES, prompts_per_step=4)
    given = settings, JUDGES, data.held_out, evaluation.SEEDS["held out"]
    correct, clean, objects = [], [], []
    for rewards, images in evaluation.judge(run, *given):
        correct.append(rewards["correct"].mean().item())
        clean += rewards["clean"].tolist()
        objects += (4 * check.many(images)).tolist()
    shares = mean_by_type(correct, data.held_out)
    return shares | {"clean": np.mean(clean), "objects": np.mean(objects)}


def share_of_training(model, adapter):
    """What a rate is chosen on: 4 pictures of each of 48 captions that are trained on."""
    settings, data, run = loaded(model, adapter)
    known = evenly(data.prompts, 48)
    given = settings, JUDGES, known, evaluation.SEEDS["training"]
    correct = [rewards["correct"] for rewards, _ in evaluation.judge(run, *given)]
    return np.mean([*mean_by_type([x.mean().item() for x in correct], known).values()])


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
        for group in policy.sample(encoded, PICTURES, evaluation.SEEDS["held out"] + i):
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


def rates(rows, variant):
    """{rate: the share of training captions' pictures by which the best rate is chosen}"""
    return {
        row["lr"]: row["chosen_on"]
        for row in rows
        if (row["start"], row["variant"]) == variant[:2] and row["chosen_on"] is not None
    }


def rate_of(rows, variant):
    """The rate that is given, or the best; of equally good rates the lowest."""
    shares = rates(rows, variant)
    return variant.lr or max(sorted(shares), key=shares.get)


def missing(rows):
    """[(variant, rate, seed)]: the next rates of those whose best is not known, else more seeds."""
    found = {(row["start"], row["variant"], row["lr"], row["seed"]) for row in rows}
    wanted = []
    for variant in dict.fromkeys([*HARD, *CLIP, *SHIPPED, *GAMED]):  # each once
        further = [] if variant.lr else further_rates(rates(rows, variant))
        wanted += [(variant, lr, 0) for lr in further]
        if not further:
            runs = [(variant, rate_of(rows, variant), seed) for seed in variant.seeds]
            wanted += [run for run in runs if (*variant[:2], *run[1:]) not in found]
    return wanted


def further_rates(shares):
    """What to try beside the best of {rate: share}: half of it and twice, where they are not."""
    best = max(sorted(shares), key=shares.get, default=None)
    further = (best / 2, best * 2) if shares else FIRST_RATES
    return [lr for lr in further if lr not in shares and LOWEST <= lr <= HIGHEST]


def make_missing():
    """The runs that the file has no lines of: each is appended when it is done."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        pool.submit(make_hard_start).result()
        while wanted := missing(read()):
            for future in as_completed([pool.submit(lines_of, *each) for each in wanted]):
                append(future.result())


def train_again(variants):
    """These rows of the table from the harder start, at their best rates, with seed 0."""
    make_hard_start()
    for variant in variants:
        lr = rate_of(read(), variant)
        for line in lines_of(variant, lr, 0):
            share = np.mean([float(line[kind]) for kind in world.KINDS])
            words = f"{variant.name}, rate {written(lr)}, after {line['step']} steps"
            print(f"{words}: {share:.1%}", flush=True)


# ---- the file ------------------------------------------------------------------------------------


def read():
    words = ("start", "variant")
    number = lambda text: float(text) if text else None
    with open(CSV, newline="") as file:
        rows = [
            {k: v if k in words else number(v) for k, v in row.items()}
            for row in csv.DictReader(file)
        ]
    return sorted(rows, key=lambda row: row["seed"])


def append(rows):
    with open(CSV, "a", newline="") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerows(rows)
    for row in rows:
        print(*row.values(), flush=True)


# ---- tables and figure ---------------------------------------------------------------------------


def written(lr):
    """As people write it: 5e-4."""
    return f"{lr:.1e}".replace(".0e", "e").replace("e-0", "e-")


def of_seeds(rows, variant, step, columns=world.KINDS, seeds=SEEDS):
    """A mean of columns per seed of SEEDS; of the model before training a lone one."""
    where = {"start": variant.start, "variant": variant.name}
    if variant.name != "before training":
        where |= {"lr": rate_of(rows, variant), "step": step}
    found = [row for row in rows if all(row[key] == value for key, value in where.items())]
    found = [row for row in found if row["clean"] is not None]  # else only its rate was judged
    found = [row for row in found if row["seed"] in seeds]
    return np.array([np.mean([row[each] for each in columns]) for row in found])


def compare(rows, variants):
    """After 20 steps, paired by seed: {variant: its mean less that of its reference}.

    Also the standard error of all differences, and the threshold from which they are told apart. It
    is Dunnett's, simulated for as many comparisons with the same references: without any true
    difference 5 tables in 100 have one above it.
    """
    pairs = {each.name: each.reference for each in variants}
    before = Variant(variants[0].start, "before training")
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


def table(rows, variants):
    """Lines of docs/worth.md."""
    differences, error, threshold = compare(rows, variants)
    titles = "Variant", "rate", "after 10 steps", "20", "the four", "compared with"
    lines = [f"| {' | '.join(titles)} | difference |", "|---" * 7 + "|"]
    for variant in variants:
        columns = (10, world.KINDS), (20, world.KINDS), (20, MOVING)
        shares = [of_seeds(rows, variant, *each).mean() for each in columns]
        cells = variant.name, written(rate_of(rows, variant))
        cells = *cells, *map("{:.1%}".format, shares), variant.reference
        difference = differences[variant.name]
        mark = "**" if abs(difference) > threshold else ""
        lines.append(f"| {' | '.join(cells)} | {mark}{100 * difference:+.1f}{mark} |")
    words = (
        f"\nBold: told apart, from {threshold:.1%} on. Standard error of a difference {error:.1%}"
    )
    lines.append(f"{words}; one of {threshold + 0.84 * error:.1%} is found 8 times in 10.")
    return "\n".join(lines)


def table_of_clip(rows):
    seeds = FOUR_ITERATIONS.seeds
    lines = [f"| After 20 steps | {' | '.join(f'seed {i}' for i in seeds)} | mean |"]
    lines.append("|---" * (len(seeds) + 2) + "|")
    for variant in CLIP:
        shares = of_seeds(rows, variant, 20, seeds=seeds)
        cells = map("{:.1%}".format, [*shares, shares.mean()])
        lines.append(f"| {variant.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_gamed(rows):
    """The variants with several seeds; draw_gamed shows the others too."""
    lines = ["| | reward | correct | clean | exact KL |", "|---" * 5 + "|"]
    measured = [row for row in rows if row["kl"] is not None]
    for variant in GAMED:
        if len(variant.seeds) > 1:
            columns = ["objects"], world.KINDS, ["clean"]
            objects, right, clean = (of_seeds(rows, variant, 12, each).mean() for each in columns)
            kls = of_seeds(measured, variant, 12, ["kl"])
            kl = f"{kls.mean():.4f}" if len(kls) else ""
            cells = f"{objects / 4:.2f} | {right:.0%} | {clean:.0%} | {kl}"
            lines.append(f"| {variant.name} | {cells} |")
    return "\n".join(lines)


def tables(rows):
    """All of docs/worth.md."""
    return [table(rows, HARD), table_of_clip(rows), table_of_gamed(rows)]


def draw(rows, file):
    """Shares after 10 steps and 20, with error and seeds, by outcome."""
    differences, error, threshold = compare(rows, HARD)
    variants = [Variant("hard", "before training"), *HARD]
    bottom, font = 60 + 44 * len(variants), ImageFont.load_default(24)
    sheet = Image.new("RGB", (1760, bottom + 60), "white")
    pen = ImageDraw.Draw(sheet)
    words = "correct after 10 steps (grey), after 20 (points: seeds)"
    pen.text((30, 30), words, "#555", font, anchor="lm")
    pen.text((1730, 30), "in colour: significant", "#555", font, anchor="rm")
    place = lambda share: 560 + 1250 * (share - 0.4)
    for tick in np.arange(0.4, 1.01, 0.1):
        pen.line((place(tick), 60, place(tick), bottom), "#ddd", 2)
        pen.text((place(tick), bottom + 25), f"{tick:.0%}", "#555", font, anchor="mm")
    order = sorted(variants, key=lambda each: -of_seeds(rows, each, 20).mean())
    for i, variant in enumerate(order):
        shares = of_seeds(rows, variant, 20)
        y, mean = 82 + 44 * i, shares.mean()
        colour, label = "#444", variant.name
        if variant.name in differences:
            difference = differences[variant.name]
            if abs(difference) > threshold:
                colour = "#2d6cae" if difference > 0 else "#c62828"
            label = f"{variant.name}, {written(rate_of(rows, variant))}"
            words = f"{100 * difference:+.1f} vs {variant.reference}"
            pen.text((1340, y), words, colour, font, anchor="lm")
            half = error / np.sqrt(2)  # of a share
            pen.line((place(mean - half), y, place(mean + half), y), colour, 4)
        pen.text((540, y), label, "black", font, anchor="rm")
        pen.circle((place(of_seeds(rows, variant, 10).mean()), y), 7, "#bbb")
        pen.circle((place(mean), y), 11, colour)
        for share in shares:
            pen.circle((place(share), y), 4, "white", colour, 2)
    sheet.resize((880, sheet.height // 2), Image.Resampling.LANCZOS).save(file)


def plane(pen, ends, values, shares, title):
    """Draws axes from ends[0] to ends[1]; returns (value, share) -> its place.

    The axis of values is logarithmic.
    """
    pen.font = ImageFont.load_default(24)
    left, right = ends

    def place(value, share):
        along = np.log(value / values[0]) / np.log(values[-1] / values[0])
        height = (share - shares[0]) / (shares[-1] - shares[0])
        return left + (right - left) * along, 540 - 500 * height

    for share in shares:
        start, end = place(values[0], share), place(values[-1], share)
        pen.line((start, end), "#ddd", 2)
        pen.text((left - 20, start[1]), f"{share:.0%}", "#555", anchor="rm")
    for value in values:
        pen.text((place(value, 0)[0], 575), f"{value:g}", "#555", anchor="mm")
    pen.text(((left + right) / 2, 615), title, "#555", anchor="mm")
    return place


def draw_gamed(rows, file):
    """Gamed runs, a dot for each: correct pictures over kl_coef and over the exact KL."""
    sheet = Image.new("RGB", (1760, 640), "white")
    pen = ImageDraw.Draw(sheet)
    shares = 0, 0.2, 0.4, 0.6, 0.8, 1
    before = of_seeds(rows, Variant("shipped", "before training"), 0).mean()
    coefs, kls = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2), (0.0005, 0.002, 0.005, 0.02, 0.05, 0.2)
    for ends, values, title in ((100, 800), coefs, "kl_coef"), ((980, 1680), kls, "exact KL"):
        place = plane(pen, ends, values, shares, title)
        pen.line((place(values[0], before), place(values[-1], before)), "#444", 4)
        for row in rows:
            if row["start"] == "gamed" and row["step"] == 12 and row["variant"] != "no KL":
                _, coef, *loss = re.split(",? ", row["variant"])
                colour = "#2d6cae" if loss else "#c62828"
                share = np.mean([row[kind] for kind in world.KINDS])
                if value := float(coef) if values is coefs else row["kl"]:
                    pen.circle(place(value, share), 9, colour)
    legend = {"k2": "#2d6cae", "k3": "#c62828", "before training": "#444"}
    for y, (words, colour) in zip((60, 90, 120), legend.items()):
        pen.text((120, y), words, colour, anchor="lm")
    sheet.reduce(2).save(file)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="What each part of GRPO is worth.")
    parser.add_argument("names", nargs="*", help="rows of the first table, to train again")
    parser.add_argument("--hard-start", action="store_true", help="make the harder start")
    parser.add_argument("--train", action="store_true", help="make the runs that are missing")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    OUT.mkdir(parents=True, exist_ok=True)
    if options.hard_start:
        make_hard_start()
        return print(f"python train.py --model {start_of('hard').relative_to(ROOT)}")
    known = {each.name: each for each in [*HARD, *CLIP]}
    if unknown := set(options.names) - known.keys():
        parser.error(f"no row is called {'; '.join(unknown)!r}; rows: {'; '.join(known)}")
    if options.names:
        return train_again([known[name] for name in options.names])
    if options.train:
        make_missing()
    rows = read()
    print(*tables(rows), sep="\n\n")
    draw(rows, OUT / "variants.png")
    draw_gamed(rows, OUT / "kl.png")


if __name__ == "__main__":
    main()
