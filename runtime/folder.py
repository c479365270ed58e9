"""The folder of a run is the run: how it begins, what a step leaves, what a resume reads.

    settings.json        the settings, and what else makes the run's numbers
    start/               copies of prompts, of the user's reward files, and of --adapter
    *.jsonl              records: see runtime/record.py
    checkpoints/000020/  adapters after 20 steps, their optimizers; `whole` is its last file

A run begins in a new or empty folder, or in that of a run that failed before its first record. A
resume reads all of these, of the checkpoints the newest. There are no random states: the prompts
and all random draws of a step are functions of the seed and the step.
"""

import errno
import json
import os
import shutil
import subprocess
from contextlib import contextmanager, nullcontext, suppress
from hashlib import sha256
from importlib.metadata import version
from itertools import count
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from runtime import ranks
from runtime.adapters import (
    WEIGHTS,
    adapters_in,
    copy_adapters,
    find_adapters,
    load_adapter,
    save_adapter,
)
from runtime.files import ROOT, UserError, find_file, find_path
from runtime.terminal import readable, say

# A resumed run may change these; the commit is for people, and of versions each counts.
MAY_CHANGE = {"steps", "eval_every", "save_every", "commit", "versions"}
MAY_CHANGE |= {"device", "offload", "micro_batch_size", "tracker"}
# What settings.json has beside the settings.
OF_RUN = "script", "processes", "versions"
# The project's files that make a run's numbers.
CODE = ["grpo.py", "rewards.py", "train.py", "examples/train_*.py", "tiny-glm-image/*.py"]
CODE += ["glm_image/*.py", "gpu/*.py", "reward_models/*.py", "runtime/*.py"]
STEP = "[0-9]" * 6  # a checkpoint's folder
WHOLE = "whole"  # its last file, which is empty


# ---- how a run begins ----------------------------------------------------------------------------


@contextmanager
def run_folder(settings, data):
    """Yields the folder of a run, absolute, as a reward may change the working folder.

    Its name is in settings.out from then on. Nothing slow comes before: what was read is what is
    copied. No other process writes to the folder within the block.
    """
    out, lock = None, nullcontext()
    if ranks.rank() == 0:
        adapters = {}
        if settings.adapter and not settings.resume:
            settings.adapter = str(newest(settings.adapter))
            adapters = find_adapters(settings.adapter)
        out, lock = claim(settings)
    with lock:
        if out:
            say(f"output folder: {settings.out}")
            values = values_of(settings)
            if settings.resume:
                values["versions"] = refuse_changes(settings.out, values, data)
            else:
                keep(out / "start", settings, data, adapters)
            write_whole(out / "settings.json", json.dumps(values, indent=2))
        settings.out, out = ranks.gather((settings.out, out))[0]
        yield out


def claim(settings):
    """The folder of --resume or --out, or a new runs/N; and a lock, which ends with the process."""
    name = settings.resume or settings.out
    with readable(f"use the folder {name or 'runs'}"):
        name = settings.out = name or new_number()
        out = Path(name).absolute()
        out.mkdir(parents=True, exist_ok=True)
        if free := settings.resume or is_free(out):
            (out / "metrics.jsonl").touch()  # by which is_free knows a run
    if not free:
        hint = f"choose another --out, or continue its run: --resume {name}"
        raise UserError(f"{name} is not empty: {hint}")
    try:
        return out, FileLock(out / ".lock", timeout=0).acquire()
    except Timeout as error:
        raise UserError(f"another process is at work in {name}: wait, or stop it") from error
    except OSError:  # a disk without locks
        return out, nullcontext()


def new_number():
    """The first runs/N that this process makes: a file system makes a folder once."""
    Path("runs").mkdir(exist_ok=True)
    for number in count(1):
        with suppress(FileExistsError):
            (out := Path("runs", str(number))).mkdir()
            return str(out)


def is_free(out):
    """Whether a folder has nothing, or a run that failed before its first record."""
    sizes = [file.stat().st_size for file in out.glob("*.jsonl")]
    return not any(out.iterdir()) or (sizes and not any(sizes))


def keep(start, settings, data, adapters):
    """Copies what a resume reads, or compares with."""
    shutil.rmtree(start, ignore_errors=True)
    start.mkdir()
    for name in ("prompts", "eval_prompts"):
        file = find_path(getattr(settings, name))
        shutil.copyfile(file, start / (name + Path(file).suffix))
    for name, file in reward_files(data).items():
        shutil.copyfile(file, start / name)
    copy_adapters(adapters, start)


def refuse_changes(run, now, data):
    """UserError for what is not as it was when a run began; other versions are a warning.

    run: its folder. now: what settings.json would have. Returns the versions that it began with.
    """
    began = json.loads(Path(run, "settings.json").read_text("utf-8"))
    first = began.get("versions", {})
    old, new = began | first, now | now["versions"]
    names = [x for x in old | new if old.get(x) != new.get(x) and x not in MAY_CHANGE]
    words = [f"{name} {old.get(name)} (now {new.get(name)})" for name in names]
    for name, file in reward_files(data).items():
        copy = Path(run, "start", name)
        if not copy.exists() or copy.read_bytes() != file.read_bytes():
            names.append(name)
            words.append(f"{copy} ({file} differs: copy one over the other)")
    line = f"{run} began with {', '.join(words)}"
    if {*names} - now["versions"].keys():
        ways = "resume it with the same, or start a new run from its adapter: --adapter"
        raise UserError(f"{line}: {ways} {run}")
    if names:
        say(f"warning: {line}: numbers may differ")
    return first


def reward_files(data):
    """{name in start/: file} of the user's own rewards."""
    return {Path(each.own).name: find_file(each.source) for each in data.own()}


def values_of(settings):
    """What settings.json has."""
    values = {name: x for name, x in vars(settings).items() if name not in ("out", "resume")}
    return values | dict(zip(OF_RUN, (settings.script, ranks.count(), versions())))


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


# ---- what a step leaves --------------------------------------------------------------------------


def save(out, step, trainers, model, evaluated):
    """Writes a checkpoint, its file WHOLE last: without that, as after a kill, it does not count.

    trainers: {folder of its adapter: its trainer}. model: its name. Adapters that do not
    learn are copied from start/: whoever starts from the checkpoint needs both halves. Of older
    checkpoints those of evaluated steps stay, without their optimizers.
    """
    folder = out / "checkpoints" / f"{step:06d}"
    shutil.rmtree(folder, ignore_errors=True)  # what a kill has left
    for name, trainer in trainers.items():
        save_adapter(trainer.model, folder / name, model)
        torch.save(trainer.optimizer.state_dict(), folder / f"{name}-optimizer.pt")
    others = {name: x for name, x in adapters_in(out / "start").items() if name not in trainers}
    copy_adapters(others, folder)
    # The records too, which are older.
    sync(*folder.glob("**/*.*"), *out.glob("*.jsonl"))
    (folder / WHOLE).touch()
    sync(folder / WHOLE)
    # From here on not even a power cut loses the step.
    for old in {*folder.parent.glob(STEP)} - {folder}:
        if int(old.name) not in evaluated:
            shutil.rmtree(old, ignore_errors=True)
        for file in old.glob("*-optimizer.pt"):
            file.unlink()


def write_whole(path, text):
    """A kill, or a power cut, leaves what was there before."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, "utf-8")
    sync(unfinished)
    try:
        os.replace(unfinished, path)
    except OSError:  # a disk that renames nothing
        path.write_text(text, "utf-8")


def sync(*files):
    """What was written to files is on the disk itself. A disk may refuse to promise that."""
    for file in files:
        with open(file, "r+b") as opened:
            try:
                os.fsync(opened.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise


# ---- what a resume reads -------------------------------------------------------------------------


def checkpoints(out):
    """The folders of a run's checkpoints, oldest first; not what people put beside them."""
    return [file.parent for file in sorted((out / "checkpoints").glob(f"{STEP}/{WHOLE}"))]


def steps_saved(out):
    """The step of the newest checkpoint, or 0."""
    return max((int(each.name) for each in checkpoints(out)), default=0)


def load(out, trainers):
    """Adapters and optimisers from the newest checkpoint, if any. Returns its step, or 0."""
    for saved in checkpoints(out)[-1:]:
        for name, trainer in trainers.items():
            load_adapter(trainer.model, saved / name / WEIGHTS)
            state = torch.load(saved / f"{name}-optimizer.pt", "cpu", weights_only=True)
            trainer.optimizer.load_state_dict(state)
    return steps_saved(out)


def newest(place):
    """The newest checkpoint of a run, or what else is in this place."""
    return [Path(place), *checkpoints(Path(place))][-1]
