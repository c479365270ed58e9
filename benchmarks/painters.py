"""How cheap may the painter of training be? The same codes, painted as deployed and by cheaper painters.

    python benchmarks/painters.py --reward pickscore:1,clip:1                      # GLM-Image, on a GPU
    python benchmarks/painters.py --eval-decode-steps 30 --eval-guidance-scale 3   # the tiny model, on a CPU
    python benchmarks/painters.py --adapter runs/1 --compiled                      # a trained model; compiled blocks too

A group's pictures share what a cheap painter leaves out. So what counts is not how alike two paintings are but whether
the advantages are those of the deployed pictures: each painter's are correlated with them, over all pictures, and by
rank within the groups. Painters are numbers of denoising steps, with guidance in all of them, in the first half or in
none. Flags of train.py choose model, rewards, and the deployed painter: --eval-decode-steps, --eval-guidance-scale.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import train
from glm_image import memory
from glm_image.model import meta_models, painting_models
from grpo import compute_advantages
from rewards import combine, score, weights_of
from runtime import UserError, ranks, short_name
from runtime.data import load_data, read_inputs
from runtime.gpu import plan
from runtime.settings import changed, decoder_passes, deployed


def cheaper(best, all_steps):
    """Painters with fewer denoising steps or less guidance than the deployed one."""
    for steps in all_steps:
        guidance = [(best.guidance_scale, None), (best.guidance_scale, steps // 2), (1.0, None)]
        for scale, guided in guidance if best.guidance_scale > 1 else guidance[2:]:
            painter = changed(best, decode_steps=steps, guidance_scale=scale, guidance_steps=guided)
            if guided != 0 and decoder_passes(painter) < decoder_passes(best):
                yield painter


def flags_of(painter):
    guided = f" --guidance-steps {painter.guidance_steps}" if painter.guidance_steps else ""
    return f"--decode-steps {painter.decode_steps} --guidance-scale {painter.guidance_scale:g}{guided}"


def paint_all(run, prompts, groups, painter):
    """All pictures, and the seconds that they took."""
    images = []
    started = time.perf_counter()
    for i, (text, source) in enumerate(prompts.with_sources()):
        images += train.paint(run.pipe, text, groups[i].tokens, painter, i, source)  # PIL: the GPU has finished
    return images, time.perf_counter() - started


def advantages(rewards, images, given, settings):
    """{reward: (N*G,)}: of what train.py would train for, and of each reward alone."""
    size = settings.group_size
    raw = score(rewards, images, *given)
    alone = {name: compute_advantages(values, size) for name, values in raw.items()}
    return {"all": compute_advantages(combine(raw, weights_of(rewards), size, settings.combine), size)} | alone


def correlations(found, expected, size):
    """Of two sets of advantages (N*G,), and the mean over groups of that of their ranks; NaN where nothing varies."""
    groups = [x.view(-1, size) for x in (found, expected)]  # (N, G)
    ranked = [(x[:, :, None] - x[:, None]).sign().sum(2) for x in groups]  # (N, G), ties share their rank
    within = [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(*ranked, strict=True)]
    return torch.corrcoef(torch.stack([found, expected]))[0, 1].item(), torch.stack(within).nanmean().item()


def compare(run, data, settings, options):
    """A row for each painter: (seconds, passes, pixels off, {reward: correlations}, flags), the deployed one first."""
    prompts = data.prompts.take(range(min(options.count, len(data.prompts))))
    groups = []
    with run.phase("sample", run.policy.model):
        for rows in torch.arange(len(prompts)).split(settings.prompts_per_step):
            some = [train.encode(run, settings, *each) for each in prompts.take(rows.tolist()).with_sources()]
            groups += run.policy.sample(some, settings.group_size, seed=1000 + rows[0].item())
    best = deployed(settings)
    painters = [(best, ""), *((painter, "") for painter in cheaper(best, options.painted_steps))]
    if options.compiled:
        painters += [(painter, "  (compiled)") for painter, _ in painters]
    rows = []
    for painter, compiled in painters:
        with run.phase("paint", *painting_models(run.pipe)):
            if compiled and not rows[-1][-1].endswith(compiled):
                run.pipe.transformer.compile_repeated_blocks(fullgraph=True)
            paint_all(run, prompts.take([0]), groups, painter)  # warms up
            images, seconds = paint_all(run, prompts, groups, painter)
        pixels = np.stack(images) / 255.0
        with run.phase("score"):
            found = advantages(data.rewards, images, prompts.for_rewards, settings)
        if not rows:
            expected = found
            pictures = pixels
        agreement = {name: correlations(found[name], expected[name], settings.group_size) for name in found}
        off = abs(pixels - pictures).mean()
        rows.append((seconds, decoder_passes(painter), off, agreement, flags_of(painter) + compiled))
    return rows


def report(rows, threshold):
    """The deployed painter; the others whose advantages agree, the fastest first; those whose do not."""
    first, *others = rows
    agree = lambda row: row[3]["all"][0] >= threshold
    agreement = [f"{short_name(name)} {kind}" for name in first[3] for kind in ("corr", "rank")]
    lines = [["seconds", "passes", "pixels off", *agreement, "flags"]]
    for seconds, count, off, agreement, flags in [first, *sorted(others, key=lambda row: (not agree(row), row[0]))]:
        numbers = [f"{value:.3f}" for pair in agreement.values() for value in pair]
        lines.append([f"{seconds:.2f}", f"{count}", f"{off:.4f}", *numbers, flags])
    fine = min(filter(agree, others), key=lambda row: row[0], default=None)
    advice = f"the fastest at {threshold} or above: {fine[-1]}" if fine else f"none of them reaches {threshold}"
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join([*("  ".join(map(str.rjust, line, widths)) for line in lines), advice])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.usage = "%(prog)s [options below] [flags of train.py, such as --model FOLDER --reward ssim]"
    parser.add_argument("--painted-steps", type=int, nargs="+", default=[12, 8, 6, 4, 2], help="(default: 12 8 6 4 2)")
    parser.add_argument("--count", type=int, default=16, help="prompts, the first of --prompts (default: 16)")
    parser.add_argument("--threshold", type=float, default=0.95, help="least correlation of advantages (default: .95)")
    parser.add_argument("--compiled", action="store_true", help="all painters once more with compiled blocks")
    options, flags = parser.parse_known_args()
    device = ranks.device()
    try:
        settings = train.parse_settings([*flags, "--compile", "no", "--steps", "0"])
        turns = plan(memory.needed, meta_models, settings, device)
        prompts, held_out, _ = read_inputs(settings)
        data = load_data(settings, prompts, held_out)
        run, _ = train.load_run(settings, data, device, turns)
        print(report(compare(run, data, settings, options), options.threshold))
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
