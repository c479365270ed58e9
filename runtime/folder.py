"""The folder of a run is the run: what it began with, its records, a checkpoint of every step."""

import json
import shutil
import subprocess
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from importlib.metadata import version
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from rewards import ROOT, UserError
from runtime import ranks
from runtime.checkpoint import adapters_in, copy_adapters, find_adapters, newest, write_whole
from runtime.terminal import option, readable, say

# A resumed run may change these.
MAY_CHANGE = {"steps", "eval_every", "save_every"}
MAY_CHANGE |= {"device", "offload", "micro_batch_size", "tracker"}
# What settings.json has beside the settings: what a run has found out as it began.
OF_RUN = "script", "versions", "processes", "planned_base", "began_from", "command"
LOCK = ".lock"
# The project's files that make a run's numbers.
CODE = ["grpo.py", "rewards.py", "train.py", "examples/train_*.py", "tiny-glm-image/*.py"]
CODE += ["glm_image/*.py", "gpu/*.py", "reward_models/*.py", "runtime/*.py"]


# ---- how a run begins ----------------------------------------------------------------------------


@dataclass
class Folder:
    """Where a run is, and what it has begun from."""

    name: str  # as given, or runs/N
    path: Path  # absolute: a reward may change the working folder
    began_from: str | None = None  # what was found at --adapter

    @property
    def adapters(self):
        """{name: folder} of their copies, which the run starts from."""
        return adapters_in(self.path / "start")


@contextmanager
def run_folder(settings, data, base):
    """Yields the Folder of a run, with its start/ and settings.json; no other process writes to it.

    This is before anything slow: what was read is what is copied, and a run to start from goes on.
    A new run that fails before its first record leaves a folder that the next run takes.
    """
    folder, lock = None, nullcontext()
    if ranks.rank() == 0:
        adapters = {} if settings.resume else find_adapters(settings.adapter)
        folder, lock = claim(settings)
    with lock:  # until the process ends, however it ends
        if folder:
            begin(folder, settings, data, base, adapters)
        folder, *_ = ranks.gather(folder)
        yield folder


def claim(settings):
    """The Folder of --resume; that of --out; or the next free runs/N. Returns it, and its lock."""
    given = settings.resume or settings.out
    for name in [given] if given else (str(Path("runs", str(n))) for n in count(1)):
        out = Path(name).absolute()
        with readable(f"use the folder {name}"):
            out.mkdir(parents=True, exist_ok=True)
            free = settings.resume or is_free(out)
            lock = FileLock(out / LOCK, timeout=0)
            with suppress(Timeout):
                if free:
                    lock.acquire()
        if lock.is_locked:
            say(f"output folder: {name}")
            return Folder(name, out), lock
        if given and free:
            raise UserError(f"another process is at work in {name}: wait, or stop it")
        if given:
            hint = f"choose another --out, or continue its run: --resume {name}"
            raise UserError(f"{name} is not empty: {hint}")


def is_free(out):
    """Whether a folder has nothing, or only the files of a run that ended before its first record.

    Such a run was killed as the models loaded, and is begun again: its .jsonl files are empty.
    """
    own = {LOCK, "settings.json", "start", "tracker-id", "tensorboard"}
    left = {x.name for x in out.iterdir() if x.suffix != ".jsonl" or x.stat().st_size}
    return not left or LOCK in left <= own


def begin(folder, settings, data, base, adapters):
    """Writes start/, which has all that a resume needs, and settings.json."""
    start, kept = folder.path / "start", folder.path / "settings.json"
    if settings.resume:
        values = json.loads(kept.read_text("utf-8"))
        values |= {name: getattr(settings, name) for name in MAY_CHANGE}
    else:
        shutil.rmtree(start, ignore_errors=True)
        start.mkdir()
        for name, file in data.files(settings).items():
            shutil.copyfile(file, start / name)
        copy_adapters(adapters, start)
        began_from = settings.adapter and str(newest(settings.adapter))
        of_run = settings.script, versions(), ranks.count(), base, began_from
        values = settings.portable() | dict(zip(OF_RUN, of_run))
    folder.began_from = values["began_from"]
    values["command"] = settings.command(values)
    write_whole(kept, json.dumps(values, indent=2))


def versions():
    """{name: version} of what makes a run's numbers.

    Of the project a hash of its code, and for people the commit, where git knows it.
    """
    found = {name: version(name) for name in ("torch", "transformers", "diffusers", "peft")}
    texts = [file.read_text("utf-8") for each in CODE for file in sorted(ROOT.glob(each))]
    found["code"] = sha256("".join(texts).encode()).hexdigest()[:12]
    describe = "git", "-C", str(ROOT), "describe", "--always", "--dirty"
    with suppress(OSError):
        answer = subprocess.run(describe, capture_output=True, encoding="utf-8", check=False)
        found["commit"] = answer.stdout.strip() or None
    return found


# ---- how it goes on ------------------------------------------------------------------------------


def resumed(given, kind):
    """{name: value}: the settings of the run in --resume, and the flags that are given.

    kind: the class of its Settings. UserError for flags that would change the run, and for a run of
    another script or version.
    """
    out = Path(given["resume"])
    if other := sorted(given.keys() - MAY_CHANGE - {"resume"}):
        free = ", ".join(map(option, sorted(MAY_CHANGE)))
        raise UserError(
            f"a resumed run keeps its settings: leave out {', '.join(map(option, other))} (free to "
            f"change are {free}), or start a new run from its adapter: --adapter {out}"
        )
    with readable(f"resume {out}", "; name the folder of a run, such as runs/1"):
        values = dict(json.loads((out / "settings.json").read_text("utf-8")))
    if (own := values.get("script", kind.script)) != kind.script:
        raise UserError(f"{out} is a run of {own}: python {own} --resume {out}")
    known = {*OF_RUN, *(each.name for each in fields(kind))} - {"out", "resume"}
    if other := values.keys() ^ known:
        raise UserError(
            f"{out} is a run of another version ({min(other)}): resume it there, or start a new "
            f"run from its adapter: --adapter {out}"
        )
    _, began, processes, base, *_ = map(values.pop, OF_RUN)
    now = {name: version for name, version in versions().items() if version != began.get(name)}
    if now.keys() - {"commit"}:
        other = ", ".join(f"{name} {began.get(name)} ({now[name]} now)" for name in now)
        say(f"warning: {out} began with {other}: numbers may differ")
    if processes != ranks.count():  # other prompts would be a step's
        raise UserError(f"{out} began with {processes} processes: start as many by torchrun")
    return values | {"base": base} | given  # whatever memory is free now
