"""The folder of a run: who may write to it, its records, settings.json, checkpoints, adapters."""

import json
import os
import shutil
from contextlib import contextmanager, suppress
from itertools import count, takewhile
from pathlib import Path
from time import monotonic

from filelock import FileLock, Timeout

from rewards import UserError
from runtime import checkpoints, ranks, resume
from runtime.checkpoints import ADAPTERS
from runtime.errors import say, writing
from runtime.jsonl import RECORDS, as_lines, read_jsonl

SAVE_SECONDS = 600  # a kill costs that much at most, or one step


class RunFolder:
    """What a run writes to the folder `out`, for --resume and for people. The first rank writes.

    data: see data.py. trainers: see checkpoints.copied. done: steps made so far. When a run is
    resumed, records of later steps are removed first, as is a line that a kill cut short.
    """

    def __init__(self, out, settings, data, trainers, done):
        self.out = out
        self.settings = settings
        self.made_of = data.made_of
        self.trainers = trainers
        self.writes = ranks.rank() == 0
        self.saving = False
        self.saved_at = self.kept_at = monotonic()
        found = {name: read_jsonl(out / f"{name}.jsonl") for name in RECORDS}
        self.records = {
            name: [each for each in records if each["step"] <= done]
            for name, records in found.items()
        }
        if settings.resume:
            later = len(found["metrics"]) - len(self.records["metrics"])
            again = f"; its records of later steps ({later}) are made again" if later else ""
            say(f"{out} goes on after step {done}{again}")
        if self.writes:
            with writing(out):
                if not settings.resume:
                    self.keep_start(data.copies)
                for name, records in self.records.items():
                    (out / f".{name}.jsonl").write_text(as_lines(records))
                    os.replace(out / f".{name}.jsonl", out / f"{name}.jsonl")
        self.keep(done)

    def keep_start(self, copies):
        """start/: the adapters, prompts and rewards that the run begins with."""
        start = self.out / "start"
        shutil.rmtree(start, ignore_errors=True)  # of a start that was killed
        start.mkdir()
        if self.settings.steps > 0:
            checkpoints.copy_adapters(checkpoints.find_adapters(self.settings.adapter), start)
        for name, content in copies.items():
            (start / name).parent.mkdir(parents=True, exist_ok=True)
            (start / name).write_bytes(content)

    def append(self, name, records):
        """To a .jsonl file, with None for NaN, which JSON does not have."""
        records = json.loads(json.dumps(records), parse_constant=lambda name: None)
        self.records[name] += records
        if self.writes:
            with writing(self.out), open(self.out / f"{name}.jsonl", "a") as file:
                file.write(as_lines(records))

    def keep(self, step):
        """What was learned up to a step, to be saved even if the next one breaks off midway."""
        self.whole = step, checkpoints.copied(self.trainers) if self.writes else {}
        self.step_seconds, self.kept_at = monotonic() - self.kept_at, monotonic()

    @property
    def overdue(self):
        """Whether a kill at the end of the next step would cost more than SAVE_SECONDS."""
        return self.kept_at + self.step_seconds - self.saved_at > SAVE_SECONDS

    def save(self):
        """The last whole step, also when a signal comes; if it comes in here, nothing more.

        Then settings.json, since memory that runs out changes settings. It comes last: it says that
        the folder is a run's.
        """
        if self.saving or not self.writes:
            return
        self.saving = True
        try:
            evaluated = {each["step"] for each in self.records["evaluation"]}
            starts = {name: self.out / "start" / name for name in ADAPTERS}
            frozen = {
                name: folder
                for name, folder in starts.items()
                if folder.exists() and name not in self.trainers
            }
            with writing(self.out):
                if self.settings.steps > 0:  # a run that only evaluates needs no checkpoint
                    checkpoints.save(self.out, *self.whole, frozen, evaluated)
                resume.describe(self.out, self.settings, self.made_of)
            self.saved_at = self.kept_at
        finally:
            self.saving = False

    def how_to_continue(self, diverged=None):
        """In words. diverged: the step whose policy has diverged, if one has."""
        return checkpoints.how_to_continue(self.out, diverged)

    def export(self, glm_image):
        """The adapters of the last checkpoint, for other programs and people to load."""
        if self.writes:
            from runtime.model_card import write_cards  # training needs nothing of it

            with writing(self.out):
                adapters = checkpoints.find_adapters(checkpoints.find(self.out)[-1])
                checkpoints.copy_adapters(adapters, self.out)
                if "decoder-adapter" in adapters:
                    glm_image.save_decoder_adapter(self.out / "decoder-adapter")
                write_cards(self, adapters)


# ---- who may write to it -------------------------------------------------------------------------


@contextmanager
def claimed(resumed, name):
    """The folder of --resume or --out, or the next free runs/N: no other process can take it.

    If nothing is written to it, it is removed, with what folders were made for it. In the folder of
    a run the lock's file stays; a kill ends the lock.
    """
    if ranks.rank() > 0:
        yield ranks.gather(None)[0]
        return
    out = Path(resumed or name or "runs")
    before = next(folder for folder in (out, *out.parents) if folder.exists())
    for file in out.rglob("*") if resumed or name else ():
        if file.is_symlink() and not file.is_dir():  # a folder may be on another disk
            raise UserError(
                f"{file} is a link, which a run would write through: copy the file there"
            )
    with writing(out):
        out = out if resumed or name else next_folder(out)
        if resumed is None:  # before anything is written, and once more when it is locked
            refuse_taken(out)
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            busy = f"another process is at work on the run in {out}: wait for it, or stop it"
            raise UserError(busy) from None
    try:
        if resumed is None:
            refuse_taken(out)
        yield ranks.gather(out)[0]
    finally:
        with suppress(OSError):  # Windows removes no open file: there the release does it
            if not resume.is_run(out):
                shutil.rmtree(out / "start", ignore_errors=True)
                os.remove(lock.lock_file)
        lock.release()
        with suppress(OSError):  # something was written
            for folder in takewhile(lambda folder: folder != before, (out, *out.parents)):
                folder.rmdir()


def refuse_taken(out):
    """UserError for a folder that holds a run, or what a new one would take for its own.

    A start that failed before its first checkpoint leaves nothing of either. A start that was
    killed leaves start/, and its lock's file.
    """
    if resume.is_run(out):
        hint = checkpoints.how_to_continue(out)
        more = [f"{out} already holds a run; choose another --out", hint]
        raise UserError(", or ".join(filter(None, more)))
    files = [out / f"{name}.jsonl" for name in RECORDS]
    foreign = [file for file in files if file.exists() and file.stat().st_size]
    names = [*ADAPTERS, "index.html"]
    if not (out / ".lock").exists():
        names.append("start")
    foreign += [*checkpoints.find(out), *filter(Path.exists, map(out.joinpath, names))]
    if foreign:
        raise UserError(f"{foreign[0]} is of no run (no settings.json): choose another --out")


def next_folder(parent):
    for number in count(1):
        with suppress(FileExistsError):
            (parent / str(number)).mkdir(parents=True)
            return parent / str(number)
