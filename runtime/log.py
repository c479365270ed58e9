"""The records of a run: numbers, pictures, a progress bar, the time of each phase; and how a signal
ends the run."""

import json
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState, tracking
from tqdm import tqdm

from rewards import combine, split_spec
from runtime import checkpoints, counted, format_number, ranks, without_nan
from runtime import metrics as numbers
from runtime.pictures import save_before_after, save_curves, save_grid

ROW = 8  # pictures in a row of group-*.png
SAMPLE_EVERY = 10  # steps between group-*.png


class Phases:
    """with phase("paint", *models): the block is timed; if models take turns on the GPU, only these
    are on it.

    The progress bar, in a terminal, shows the name of the phase; it counts steps, or prompts within
    evaluation().
    """

    def __init__(self, device, offload=None):
        self.device = device
        self.offload = offload
        self.name = ""
        self.timings = {}
        self.shown = {"dynamic_ncols": True, "disable": ranks.rank() > 0 or not sys.stderr.isatty()}
        self.bar = self.steps = tqdm(disable=True)  # until there is something to count

    def begin(self, steps, done=0):
        """From here on the bar counts steps, `done` of which are already made."""
        if steps > 0:
            self.bar = self.steps = tqdm(total=steps, initial=done, unit="step", **self.shown)

    def close(self):
        self.steps.close()

    @contextmanager
    def __call__(self, name, *models):
        if self.offload is not None:
            with self.measured("move"):
                self.offload(*models)
        with self.measured(name):
            yield

    @contextmanager
    def measured(self, name):
        self.name = name
        started = time.perf_counter()
        cuda = self.device.type == "cuda"
        self.bar.set_description_str(name)
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if cuda:
            torch.cuda.synchronize(
                self.device
            )  # or the time would be taken while the GPU is still at work
            peak = torch.cuda.max_memory_allocated(self.device) / 1e9
            self.timings[f"gpu_gb/{name}"] = max(peak, self.timings.get(f"gpu_gb/{name}", 0))
        seconds = time.perf_counter() - started
        self.timings[f"seconds/{name}"] = self.timings.get(f"seconds/{name}", 0) + seconds

    @contextmanager
    def evaluation(self, prompts):
        """The block is no part of a step, nor is its time. prompts: how many this rank
        evaluates."""
        if not sys.stderr.isatty():
            self.bar.write(f"evaluating {counted(prompts, 'prompt')}")
        with tqdm(
            total=prompts, unit="prompt", postfix="evaluation", leave=False, **self.shown
        ) as self.bar:
            yield
        self.bar = self.steps
        self.bar.unpause()
        self.read()

    def painted(self):  # another prompt
        if self.bar is not self.steps:
            self.bar.update()

    def read(self):
        """Timings since the last call: seconds/PHASE and, on a GPU, gpu_gb/PHASE, its peak
        memory."""
        timings, self.timings = self.timings, {}
        return timings


class Record:
    """The files of a run in `out`: numbers, pictures, checkpoints, adapters; and a tracker. Only
    the first rank writes.

    hashes: see read_inputs in data.py. trainers: {"codes" or "decoder": GRPO}. done: steps made so
    far. When a run is resumed, records of later steps are removed first, as is a line that a kill
    cut short.
    """

    def __init__(self, out, settings, hashes, phase, trainers, done):
        self.out = out
        self.settings = settings
        self.hashes = hashes
        self.trainers = trainers
        self.phase = phase
        self.done = done
        # Training maximises z-scores, which say nothing across evaluations, and their raw sum is
        # something else.
        judges = (
            [name for name, _ in split_spec(settings.eval_reward)]
            if settings.combine == "zscore"
            else []
        )
        self.best_by = f"reward/{judges[0]}" if judges and judges[0] != "none" else "reward"
        self.writes = ranks.rank() == 0
        kept = {
            name: read_jsonl(out / f"{name}.jsonl", done)
            for name in ("evaluation", "metrics", "groups")
        }
        self.evaluations = kept["evaluation"]
        ranks.gather(None)  # all ranks have read the files that the first one now writes
        self.tracker = None
        if self.writes:
            with checkpoints.writing(out):
                (out / "settings.json").write_text(
                    json.dumps(checkpoints.saved(settings), indent=2) + "\n"
                )
                for name, records in kept.items():
                    write_jsonl(out / f"{name}.jsonl", records)
            self.tracker = start_tracker(settings, out)
        self.stop = StopRequest()
        self.optimizer_steps = self.count_optimizer_steps()  # up to the end of the last step

    def count_optimizer_steps(self):
        return [trainer.steps for trainer in self.trainers.values()]

    def write(self, line):
        self.phase.bar.write(line)

    def track(self, step, values):
        if self.tracker is not None:
            self.tracker.log(
                {name: x for name, x in values.items() if isinstance(x, float)}, step=step
            )

    def track_picture(self, name, picture):
        layout = {"dataformats": "NHWC"} if self.settings.tracker == "tensorboard" else {}
        if self.settings.tracker in ("tensorboard", "wandb"):
            self.tracker.log_images({name: np.asarray(picture)[None]}, step=self.done, **layout)

    def step(self, done, prompts, weights, rolled, metrics):
        """Writes a step's line and metrics, and every SAMPLE_EVERY steps its pictures."""
        texts, _, sources = prompts.for_rewards
        self.done = done
        self.optimizer_steps = self.count_optimizer_steps()
        sequences, paintings = self.settings.sequences, self.settings.paintings
        metrics["skipped"] = metrics.get("skipped", 0) + metrics.get("decoder/skipped", 0)
        total = combine(rolled.raw_rewards, weights, sequences * paintings)
        metrics |= numbers.step_metrics(rolled.raw_rewards, total, sequences, paintings)
        metrics = ranks.mean(metrics | self.phase.read())
        recorded = without_nan(metrics)
        per_rank = ranks.gather(numbers.group_records(done, prompts, rolled.raw_rewards))
        if self.writes:
            with checkpoints.writing(self.out):
                append_jsonl(self.out / "metrics.jsonl", {"step": done, **recorded})
                append_jsonl(
                    self.out / "groups.jsonl", *(group for groups in per_rank for group in groups)
                )
        self.track(done, recorded)
        self.phase.bar.set_postfix_str(f"reward {recorded['reward'] or 0:.3f}")
        self.phase.bar.update()
        self.write(numbers.format_step(done, metrics, self.settings))
        if done in (1, self.settings.steps) or done % SAMPLE_EVERY == 0 or self.stop.received:
            groups = total.view(len(texts), -1)  # (N, G*K)
            i = next(
                (i for i, group in enumerate(groups.nan_to_num()) if len(group.unique()) > 1), 0
            )  # it teaches
            if sequences > 1:
                advantages = rolled.groups[i].advantages.repeat_interleave(paintings)
            else:
                advantages = rolled.denoising_steps[
                    i * len(rolled.denoising_steps) // len(texts)
                ].advantages
            images = rolled.images[i * len(groups[i]) : (i + 1) * len(groups[i])]
            self.group(texts[i], images, groups[i], advantages, sources and sources[i])

    def group(self, prompt, images, rewards, advantages, source):
        """A group's pictures with rewards and advantages, a row per code sequence; before them the
        one they edit."""
        if not self.writes:
            return
        pairs = zip(rewards.tolist(), advantages.tolist(), strict=True)
        captions = [
            f"reward {format_number(reward)}, advantage {advantage:+.2f}"
            for reward, advantage in pairs
        ]
        cells = list(zip(images, captions, strict=True))
        width = (
            self.settings.paintings
            if min(self.settings.sequences, self.settings.paintings) > 1
            else ROW
        )
        rows = [("" if i else prompt, cells[i : i + width]) for i in range(0, len(cells), width)]
        if source is not None:
            rows[0][1][:0] = [(source, "to edit"), None]
        with checkpoints.writing(self.out):
            picture = save_grid(self.out / f"group-{self.done:06d}.png", rows, f"step {self.done}")
            self.curves()
        self.track_picture("group", picture)

    def evaluation(self, training, held_out):
        """Of both: (metrics, [(prompt, pictures, rewards, {judge: its rewards}, the picture they
        edit or None)])"""
        record = {"step": self.done}
        for prefix, (metrics, _) in (("", training), ("held_out/", held_out)):
            record |= {prefix + key: value for key, value in without_nan(metrics).items()}
        self.track(self.done, {f"evaluation/{name}": x for name, x in record.items()})
        shown = [*training[1], *held_out[1]]
        record["shown"] = without_nan(
            [[prompt, rewards, judges] for prompt, _, rewards, judges, _ in shown]
        )
        self.evaluations.append(record)
        before = self.before()
        records, compared = (
            ((record,), "") if before in (None, record) else ((before, record), ", before -> after")
        )
        steps = counted(self.done, "step")
        for prefix, name in numbers.PROMPTS.items():
            self.write(
                f"evaluation after {steps}, {name} prompts{compared}: {numbers.summary(prefix, *records)}"
            )
        table = numbers.kinds_table(*records)
        if table and (self.done >= self.settings.steps or self.stop.received):
            self.write("\n".join(table))
        if self.writes:
            with checkpoints.writing(self.out):
                folder = self.out / "evaluation" / f"{self.done:06d}"
                folder.mkdir(parents=True, exist_ok=True)
                for i, (_, images, _, _, source) in enumerate(shown):
                    if source is not None:
                        source.save(folder / f"{i + 1}-source.png")
                    for j, image in enumerate(images):
                        image.save(folder / f"{i + 1}-{j + 1}.png")
                append_jsonl(self.out / "evaluation.jsonl", record)
                self.curves()

    def curves(self):
        save_curves(
            self.out / "reward.png", read_jsonl(self.out / "metrics.jsonl"), self.evaluations
        )

    def before(self):  # None if its line was deleted
        return next((record for record in self.evaluations if record["step"] == 0), None)

    def save(self):
        if self.writes and self.settings.steps > 0:  # a run that only evaluates needs no checkpoint
            best, _ = numbers.best_step(self.evaluations, self.best_by)
            checkpoints.save(self.out, self.done, self.trainers, self.settings, self.hashes, best)

    def save_whole_step(self):
        """After an error. A half that has moved in a step that did not end is not saved."""
        if self.optimizer_steps == self.count_optimizer_steps():
            self.save()

    def end(self):
        """The adapters with their READMEs, and before-after.png; warns if nothing, or less than
        before, was learned."""
        best, words = numbers.best_step(self.evaluations, self.best_by)
        if words:
            self.write(f"warning: {words}; that adapter is in {self.out}/checkpoints/{best:06d}")
        for half, name in {"": "policy", "decoder/": "decoder"}.items():
            if reason := numbers.why_nothing_was_learned(
                read_jsonl(self.out / "metrics.jsonl"), half
            ):
                self.write(f"warning: the {name} learned nothing: {reason}")
        if not self.writes:
            return
        with checkpoints.writing(self.out):
            before, after = self.before(), self.evaluations[-1]
            picture = save_before_after(self.out, before, after)
            if self.settings.train in ("codes", "both"):
                self.trainers["codes"].model.save_pretrained(self.out / "adapter")
                write_card(self.out / "adapter", self.settings, before, after, picture)
            if self.settings.train in ("decoder", "both"):
                self.trainers["decoder"].model.base_model.model.save_lora_adapter(
                    self.out / "decoder-adapter"
                )
                write_card(self.out / "decoder-adapter", self.settings, before, after, picture)
        self.track_picture("before_after", picture)

    def finish(self):
        self.stop.end()
        if self.tracker is not None:
            self.tracker.finish()


README = """---
base_model: {base}
library_name: peft
tags: [lora, grpo, glm-image]
---

# A LoRA adapter for {base}, trained with GRPO

It adapts {what}, and was trained for {steps}. With FOLDER the folder of this file, it loads into the stock pipeline:
`pipe.{load}`

Means with standard errors over prompts, before -> after:

{table}

![before and after](before-after.png)

```json
{settings}
```
"""

ADAPTERS = {  # folder: what it adapts, and how it loads
    "adapter": (
        "the language model, which writes the image codes",
        "vision_language_encoder.load_adapter(FOLDER)",
    ),
    "decoder-adapter": (
        "the decoder",
        "transformer.load_lora_adapter(FOLDER, prefix=None, use_safetensors=True)",
    ),
}


def write_card(folder, settings, before, after, picture):
    """README.md and before-after.png in an adapter's folder. before, after: of evaluation.jsonl;
    before may be None."""
    records = [before, after] if before else [after]
    lines = [
        f"- {name} prompts: {numbers.summary(prefix, *records)}"
        for prefix, name in numbers.PROMPTS.items()
    ]
    lines += numbers.kinds_table(*records)
    base = Path(settings.model).resolve().name if Path(settings.model).is_dir() else settings.model
    what, load = ADAPTERS[folder.name]
    shown = json.dumps(checkpoints.saved(settings), indent=2)
    steps = counted(after["step"], "step")
    text = README.format(
        base=base, what=what, load=load, steps=steps, table="\n".join(lines), settings=shown
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    picture.save(folder / "before-after.png")


def start_tracker(settings, out):
    """One of accelerate's trackers, given the settings, or None. A resumed run is a further run of
    the same name."""
    if settings.tracker == "none":
        return None
    PartialState()
    name = f"{out.resolve().parent.name}-{out.name}"
    place = {"logging_dir": out} if settings.tracker == "tensorboard" else {"name": name}
    tracker = tracking.LOGGER_TYPE_TO_CLASS[settings.tracker]("grpo-glm-image", **place)
    tracker.start()
    tracker.store_init_configuration(checkpoints.saved(settings))
    return tracker


def append_jsonl(path, *records):
    with open(path, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_jsonl(path, last_step=math.inf):
    """The records up to a step. A line cut short by a kill, and all after it, are left out."""
    records = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in path.read_text().splitlines():
            records.append(json.loads(line))
    return [record for record in records if record["step"] <= last_step]


def write_jsonl(path, records):
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(unfinished, path)


class StopRequest:
    """Ctrl-C or SIGTERM: finish the step, save, evaluate; before the first step, only leave. A
    second signal quits."""

    def __init__(self):
        self.received = False
        self.follows = b"the first evaluation is aborted"
        self.before = {
            number: signal.signal(number, self.receive)
            for number in (signal.SIGINT, signal.SIGTERM)
        }

    def end(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, *_):
        if not self.received:  # by os.write: print may have been interrupted by this very signal
            again = b"; press again to quit now" if ranks.count() == 1 else b""
            os.write(2, b"\nasked to stop: " + self.follows + again + b"\n")
        self.received = True
        if ranks.count() == 1:  # torchrun passes on what the terminal has sent already
            self.end()
