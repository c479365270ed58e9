"""What a run leaves as it goes: numbers, pictures, a progress bar with a clock; and how a signal ends it."""

import importlib.util
import json
import math
import os
import signal
import sys
import time
from contextlib import contextmanager

import numpy as np
import torch
from accelerate import PartialState, tracking
from tqdm import tqdm

from runtime import UserError, format_number, ranks, reward_names
from runtime.card import write_card
from runtime.metrics import why_nothing_was_learned
from runtime.pictures import save_before_after, save_curves, save_grid


class Clock:
    """clock("decode", *models) brings the models to the GPU if they take turns there, and measures a phase of a step.

    The phase is also shown in the progress bar. offload: see grpo.Offload; None where nothing ever moves.
    """

    def __init__(self, device, steps, done=0, offload=None):
        self.device, self.offload, self.phase, self.timings = device, offload, "", {}
        self.bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, disable=ranks.rank() > 0)

    @contextmanager
    def __call__(self, phase, *models):
        if self.offload is not None and models:
            with self("move"):
                self.offload(*models)
        started, cuda, self.phase = time.perf_counter(), self.device.type == "cuda", phase
        self.bar.set_description_str(phase, refresh=sys.stderr.isatty())
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if cuda:
            torch.cuda.synchronize(self.device)  # the clock would else stop while the GPU is still at work
            peak = torch.cuda.max_memory_allocated(self.device) / 1e9
            self.timings[f"gpu_gb/{phase}"] = max(peak, self.timings.get(f"gpu_gb/{phase}", 0))
        name = f"seconds/{phase}"
        self.timings[name] = self.timings.get(name, 0) + time.perf_counter() - started

    def read(self):
        """What was measured since the last time: seconds/PHASE and, on a GPU, gpu_gb/PHASE, its peak memory."""
        timings, self.timings = self.timings, {}
        return timings


class Record:
    """metrics.jsonl, evaluation.jsonl, pictures and a tracker in `out`. Only the first rank writes.

    Of a run that is resumed after step `done`, later records are taken out first, and a line that a kill cut short.
    """

    def __init__(self, out, settings, device, done, offload=None):
        if str(out) != settings.resume and (out / "settings.json").exists():  # not yet when its name was chosen
            raise UserError(f"another run has begun in {out} meanwhile; start again, with another --out")
        self.out, self.kind, self.writes = out, settings.tracker, ranks.rank() == 0
        self.evaluations, metrics = read_jsonl(out / "evaluation.jsonl", done), read_jsonl(out / "metrics.jsonl", done)
        self.clock, self.tracker = Clock(device, settings.steps, done, offload), None
        ranks.gather(None)  # all have read what the first now writes
        if self.writes:
            out.mkdir(parents=True, exist_ok=True)
            (out / "settings.json").write_text(json.dumps(vars(settings), indent=2) + "\n")
            write_jsonl(out / "evaluation.jsonl", self.evaluations)
            write_jsonl(out / "metrics.jsonl", metrics)
            if self.kind != "none":
                PartialState()
                places = {"tensorboard": {"logging_dir": out}, "wandb": {"name": out.name, "dir": out}}
                project = "tensorboard" if self.kind == "tensorboard" else "grpo-glm-image"
                self.tracker = tracking.LOGGER_TYPE_TO_CLASS[self.kind](project, **places.get(self.kind, {}))
                self.tracker.start()

    def track(self, step, values):
        if self.tracker is not None:
            self.tracker.log({name: value for name, value in values.items() if value is not None}, step=step)

    def step(self, step, metrics, line):
        metrics = without_nan(metrics)
        if self.writes:
            append_jsonl(self.out / "metrics.jsonl", {"step": step, **metrics})
        self.track(step, metrics)
        self.clock.bar.set_postfix_str(f"reward {metrics['reward'] or 0:.3f}")
        self.clock.bar.update()
        self.clock.bar.write(line)

    def group(self, step, prompt, images, rewards, sequences, paintings):
        """The first pictures of a step, with their rewards: those of a prompt, a row for each code sequence."""
        if self.writes:
            captions = [f"reward {format_number(reward)}" for reward in rewards.tolist()]
            cells = list(zip(images, captions, strict=True))[: sequences * paintings]
            width = paintings if min(sequences, paintings) > 1 else sequences * paintings
            rows = [("" if i else prompt, cells[i : i + width]) for i in range(0, len(cells), width)]
            picture = save_grid(self.out / f"group-{step:06d}.png", rows, f"step {step}")
            layout = {"dataformats": "NHWC"} if self.kind == "tensorboard" else {}
            if self.kind in ("tensorboard", "wandb"):
                self.tracker.log_images({"group": np.asarray(picture)[None]}, step=step, **layout)
            self.curves()

    def evaluation(self, step, training, held_out):
        """Of both: (metrics, [(prompt, pictures, their rewards)]), the latter for before-after.png."""
        record, shown = {"step": step}, [*training[1], *held_out[1]]
        for prefix, (metrics, _) in (("", training), ("held_out/", held_out)):
            record |= {prefix + key: value for key, value in without_nan(metrics).items()}
        self.track(step, {f"evaluation/{name}": value for name, value in record.items()})
        record["shown"] = [(prompt, [None if math.isnan(r) else r for r in rewards]) for prompt, _, rewards in shown]
        self.evaluations.append(record)
        first = self.evaluations[0]
        records, compared = ((record,), "") if first is record else ((first, record), ", before -> after")
        for prefix, name in (("", "training"), ("held_out/", "held-out")):
            words = f"evaluation after {step} steps, {name} prompts{compared}: {summary(prefix, *records)}"
            self.clock.bar.write(words)
        self.clock.read()
        self.clock.bar.unpause()  # what an evaluation takes is not the time of a step
        if self.writes:
            folder = self.out / "evaluation" / f"{step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            for i, (_, images, _) in enumerate(shown):
                for j, image in enumerate(images):
                    image.save(folder / f"{i + 1}-{j + 1}.png")
            append_jsonl(self.out / "evaluation.jsonl", record)
            self.curves()

    def curves(self):
        save_curves(self.out / "reward.png", read_jsonl(self.out / "metrics.jsonl"), self.evaluations)

    def best_step(self):
        """The step whose adapter did best on prompts held out, or on those of training if no reward applied to them."""
        name = "held_out/reward" if all(r["held_out/reward"] is not None for r in self.evaluations) else "reward"
        rated = [record for record in self.evaluations if record[name] is not None]
        return max(rated, key=lambda record: record[name], default={"step": 0})["step"]

    def end(self, learners, settings):
        """The adapters with their cards, and before-after.png; and a warning if training has changed nothing."""
        if reason := why_nothing_was_learned(read_jsonl(self.out / "metrics.jsonl")):
            self.clock.bar.write(f"warning: nothing was learned: {reason}")
        if self.writes:
            folders = []
            if settings.train in ("codes", "both"):
                folders.append(self.out / "adapter")
                learners[""].model.save_pretrained(folders[-1])
            if settings.train in ("decoder", "both"):
                folders.append(self.out / "decoder-adapter")
                learners["decoder"].model.base_model.model.save_lora_adapter(folders[-1])
            before, after = self.evaluations[0], self.evaluations[-1]
            picture = save_before_after(self.out, before, after)
            for folder in folders:
                write_card(folder, settings, before, after, picture)


def summary(prefix, *records):
    """'reward 0.692 -> 0.864, ssim ... (64 images: 16 prompts x 4)', of one record or of several."""
    names = reward_names(records[0], prefix)
    parts = [f"{name.split('/')[-1]} {' -> '.join(format_number(r[name]) for r in records)}" for name in names]
    images, prompts = records[0][f"{prefix}images"], records[0][f"{prefix}prompts"]
    return f"{', '.join(parts)} ({images} images: {prompts} prompts x {images // prompts})"


def check_tracker(kind):
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise UserError(f"--tracker {kind} needs a package: pip install {kind}")


def without_nan(metrics):
    return {name: None if math.isnan(value) else value for name, value in metrics.items()}  # JSON has no NaN


def append_jsonl(path, record):
    with open(path, "a") as file:  # opened anew for each line: a folder that is gone is noticed at once
        file.write(json.dumps(record) + "\n")


def read_jsonl(path, last_step=math.inf):
    """The records up to a step. A line cut short by a kill, and all after it, are left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [record for record in records if record["step"] <= last_step]


def write_jsonl(path, records):
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(unfinished, path)


class StopRequest:
    """Ctrl-C or SIGTERM: finish the step, save, evaluate. Once more ends at once."""

    def __init__(self):
        self.received = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.receive)

    def receive(self, signum, frame):
        if not self.received:  # by os.write: print may have been interrupted by this very signal
            again = b"; once more ends at once" if ranks.count() == 1 else b""
            words = b"\nasked to stop: this step is finished, saved and evaluated; a first evaluation is broken off"
            os.write(2, words + again + b"\n")
        self.received = True
        if ranks.count() == 1:  # torchrun passes on what the terminal has sent already
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
