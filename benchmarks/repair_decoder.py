"""Repair a decoder that was rounded to a few bits, by `train.py --train decoder`: the reward is likeness to its codes.

    python benchmarks/repair_decoder.py --bits 3        # --bits 32 leaves the decoder as it is

A quantised GLM-Image is what small cards run, and its decoder pays for that in detail. Here the tiny model's decoder is
rounded, each row of a matrix to 2^bits levels between its least and largest weight, and an adapter beside it is trained
on the training captions. The stock sampler's pictures are judged by the drawings that their codes were taken from, on
captions held out: by SSIM, and, since that knows little of colours, by the share of objects that check.py finds as drawn,
both shape and colour in their place.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

import check
import make
import torch

import rewards
import train
from runtime import UserError
from runtime.data import Prompts, read_prompts
from runtime.log import Phases
from runtime.pictures import save_grid
from runtime.settings import TINY

CPU = torch.device("cpu")
FLAGS = "--train decoder --group-size 8 --micro-batch-size 8 --prompts-per-step 8 --steps 200 --kl-coef 0"
FLAGS = ["--model", TINY, "--reward", "ssim:1,mse:1", *FLAGS.split()]


def load_rounded(bits, settings):
    """The pipeline, with each matrix of the decoder rounded."""
    pipe = train.load(settings, CPU)
    for layer in pipe.transformer.modules():
        if isinstance(layer, torch.nn.Linear) and bits < 32:
            least, largest = layer.weight.data.aminmax(dim=1, keepdim=True)
            step = (largest - least).clamp(min=1e-12) / (2**bits - 1)
            layer.weight.data = ((layer.weight.data - least) / step).round() * step + least
    return pipe


def drawings(settings):
    """For training, and held out: (caption, drawing, its large codes (1, 16)) of each caption."""
    corners = make.corner_codes(make.make_codebook())
    files = []
    for file in (settings.prompts, settings.eval_prompts):
        texts = read_prompts(file, None).texts
        scenes = [make.MEANING[text].scene() for text in texts]
        codes = make.codes_of(scenes, corners)[:, 256:].split(1)
        files.append(list(zip(texts, map(make.draw, scenes), codes, strict=True)))
    return files


def judge(pipe, examples, settings):
    """The stock sampler's pictures, and "SSIM 0.812, 75.0% of objects as drawn"."""
    latents = [train.paint(pipe, text, codes, settings, seed=10**9) for text, _, codes in examples]
    images = [train.develop(pipe, each)[0] for each in latents]
    drawn = [drawing for _, drawing, _ in examples]
    likeness = rewards.ssim(images, None, drawn).mean().item()
    return images, f"SSIM {likeness:.4f}, {share_as_drawn(images, drawn):.1%} of objects as drawn"


def share_as_drawn(images, drawings):
    """Of all objects in the drawings, the share that the pictures show in the same place, shape and colour."""
    pairs = [pair for both in zip(images, drawings, strict=True) for pair in zip(*map(check.look, both), strict=True)]
    found = [seen == drawn for seen, drawn in pairs if drawn is not None]
    return sum(found) / len(found)


@dataclass
class Drawn:
    """In the place of the policy: what it samples is the codes of the step's drawings."""

    model: torch.nn.Module
    groups: list = ()

    def sample(self, prompts, num_samples, seed):
        return self.groups


def repair(run, settings, training, held_out, pictures):
    """Train the decoder; every 25 steps it is judged. Returns its last pictures, or those before it."""
    likeness = rewards.parse_rewards(settings.reward)
    started = time.time()
    chosen = torch.Generator().manual_seed(settings.seed)
    for step in range(1, settings.steps + 1):
        rows = torch.randperm(len(training), generator=chosen)[: settings.prompts_per_step].tolist()
        texts, targets, codes = zip(*(training[row] for row in rows), strict=True)
        run.policy_trainer.groups = [SimpleNamespace(tokens=tokens, old_logprobs=torch.zeros(1)) for tokens in codes]
        seed = train.seed_of_step(step, settings)
        rolled, metrics = train.grpo_step(run, settings, likeness, Prompts(texts, targets), seed)
        if step % 25 == 0 or step == settings.steps:
            pictures, words = judge(run.pipe, held_out, settings)
            reward = rewards.combine(rolled.raw_rewards, rewards.weights_of(likeness)).mean()
            seconds = (time.time() - started) / step
            print(f"step {step}: {words}; reward of this step's paths {reward:.4f}, ", end="")
            print(f"norm {metrics['decoder/grad_norm']:.2g}, {seconds:.2f} s a step", flush=True)
    return pictures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.usage = "%(prog)s [options below] [flags of train.py, such as --steps 25 --seed 1]"
    parser.add_argument("--bits", type=int, default=3, help="of the decoder's matrices (default: 3)")
    parser.add_argument("--sheet", help="where to save pictures before and after")
    options, flags = parser.parse_known_args()
    try:
        settings = train.parse_settings([*FLAGS, *flags])
    except UserError as error:
        parser.error(str(error))
    torch.set_num_threads(1)  # see device in runtime/ranks.py
    pipe, policy, decoder = train.build(load_rounded(options.bits, settings), settings, CPU)
    run = train.Run(pipe, Drawn(policy.model), decoder, Phases(CPU))
    training, held_out = drawings(settings)
    before, words = judge(pipe, held_out, settings)
    print(f"{options.bits} bits, seed {settings.seed}: {words}, {len(held_out)} held-out drawings", flush=True)
    after = repair(run, settings, training, held_out, before)
    if options.sheet:
        rows = []
        for i in range(1, len(held_out), max(len(held_out) // 5, 1)):
            text, drawing, _ = held_out[i]
            rows.append((text, [(drawing, "drawn"), (before[i], "before"), (after[i], "after")]))
        title = f"a decoder of {options.bits} bits, before and after {settings.steps} steps"
        save_grid(options.sheet, rows, title, cell=128)


if __name__ == "__main__":
    main()
