"""The film at the head of the README: what a policy paints after each step of a run.

    python train.py --model tiny-glm-image --eval-every 1 --eval-count 1 --out runs/film
    python benchmarks/film.py runs/film assets/before-after.gif

It shows the first picture of each of the first four held-out captions of each type, of which one
has two. The share is of all held-out pictures.
"""

import argparse
import sys
from pathlib import Path
from textwrap import fill

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image

import train
from glm_image.adapters import WEIGHTS, load_adapter
from glm_image.model import TINY
from inputs.prompts import choose
from rewards import parse_rewards
from runtime.evaluation import score_prompts
from runtime.folder import checkpoints
from viewer.sheets import draw_grid

COLUMNS, ROWS = ("one", "two", "counting", "colours", "position", "binding"), 4


def sheet(run, settings, prompts, judges, step):
    """What the policy paints now; a wrong picture has a red frame."""
    found = {kind: [] for kind in COLUMNS}
    verdicts = []
    for row, rewards, images in score_prompts(run, settings, judges, prompts):
        verdicts.append(rewards["correct"])
        cell = images[0], fill(prompts[row].text, 19), rewards["correct"][0] == 0
        found[prompts[row].type].append(cell)
    share = np.mean(verdicts)
    title = f"step {step}: {share:.0%} of {np.size(verdicts)} held-out pictures are correct"
    rows = [(title * (i == 0), [found[kind][i : i + 1] for kind in COLUMNS]) for i in range(ROWS)]
    return draw_grid(COLUMNS, rows).reduce(2)


def main(folder, file):
    torch.set_num_threads(1)
    settings = train.parse_settings(["--model", TINY])
    data = train.read_inputs(settings)
    prompts = choose(data.held_out, settings.eval_count)
    judges = {"correct": parse_rewards("correct")["correct"].load()}
    run = train.Run.load(settings)
    sheets = [sheet(run, settings, prompts, judges, 0)]
    for checkpoint in checkpoints(Path(folder)):
        load_adapter(run.trainer.model, checkpoint / "adapter" / WEIGHTS)
        sheets.append(sheet(run, settings, prompts, judges, int(checkpoint.name)))
    height = max(each.height for each in sheets)
    sheets = [each.crop((0, 0, each.width, height)) for each in sheets]
    palette = sheets[-1].quantize(256)  # one for all: what stays the same is stored once
    frames = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in sheets]
    milliseconds = [2000, *[400] * (len(frames) - 2), 4000]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", help="of the run")
    parser.add_argument("file", help="to write, a GIF")
    main(**vars(parser.parse_args()))
