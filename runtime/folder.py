"""The folder of a run is the run: how it begins, what a step leaves, what a resume reads.

    settings.json        the settings, as you would type them; script, processes, versions
    start/               copies of the prompts, of your reward files, and of --adapter
    *.jsonl              records: see runtime/record.py
    checkpoints/000020/  adapters after 20 steps, their optimizers; `whole` is its last file

1. A run begins in a new or empty folder, or in that of a run without a step. Without --out it is a
   new runs/N. `--config runs/1/settings.json` begins a run like runs/1.
2. Prompts and adapters are read from start/ ever after.
3. A checkpoint counts once its file `whole` is there: it is written when all else is on the disk.
   No random state is saved: prompts and draws of a step follow from the seed and the step.
4. `--resume DIR` takes the settings from DIR. A flag that you repeat must have the same value, but
   for MAY_CHANGE. One line names all that is not as it was, before anything loads: other versions,
   other code, also what your reward files import, are a warning; all else is refused.
5. A reward file that you have mended goes on once you copy it over the copy in start/.
6. One process at a time: a lock, which ends with the process. A disk without locks has none.

A run of an earlier version is not resumed: start from its adapter, --adapter DIR.
"""

import errno
import json
import os
import shutil
import subprocess
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from itertools import count
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from glm_image.adapters import (
    WEIGHTS,
    adapters_in,
    copy_adapters,
    find_adapters,
    load_adapter,
    save_adapter,
)
from inputs import CODE, ROOT, UserError, find_file, find_path, modules, readable, script_name
from runtime import ranks
from runtime.terminal import say

# A resumed run may change these; the commit is for people, and of versions each counts.
MAY_CHANGE = {"steps", "eval_every", "save_every", "commit", "versions", "not_default"}
MAY_CHANGE |= {"device", "offload", "micro_batch_size", "tracker", "of_project", "your modules"}
# What settings.json has beside the settings.
OF_RUN = "script", "processes", "versions", "not_default", "of_project"
LOCK = ".lock"
STEP = "[0-9]" * 6  # a checkpoint's folder
WHOLE = "whole"  # its last file, which is empty
RECORDS = "metrics", "groups", "evaluation"  # .jsonl files


# ---- how a run begins ----------------------------------------------------------------------------


@contextmanager
def begun(settings, base, script, data):
    """Yields a run's folder, and the settings with what was decided; nobody else writes to it.

    Nothing slow comes before: what was read is what is copied. From here on only micro_batch_size
    changes. The folder is absolute, as a reward may change the working folder. base: of the plan.
    script: the file that resumes the run.
    """
    name, lock = None, nullcontext()
    if ranks.rank() == 0:
        name, lock = claim(settings)
        say(f"output folder: {name}")
    with lock:
        name = ranks.gather(name)[0]
        adapter = settings.adapter and str(newest(settings.adapter))
        chosen = settings.not_default()  # what "auto" becomes is no choice
        settings = replace(settings, out=name, base=base, adapter=adapter)
        out = Path(name).absolute()
        if ranks.rank() == 0:
            begin(out, settings, chosen, script, data)
        ranks.gather(None)  # start/ is there
        yield out, settings


def claim(settings):
    """The folder's name, and a lock, which ends with the process."""
    if settings.adapter and not settings.resume:
        found = find_adapters(newest(settings.adapter))  # a mistake leaves no folder
        if "lora_rank" in settings.not_default() and found.keys() >= {*settings.learned}:
            raise UserError(f"--lora-rank is for a new adapter: {settings.adapter} has its own")
    name = settings.resume or settings.out
    with readable(f"use the folder {name or 'runs'}"):
        out = Path(name := name or new_number()).absolute()
        out.mkdir(parents=True, exist_ok=True)
        if free := settings.resume or is_free(out):
            (out / "metrics.jsonl").touch()  # by which is_free knows a run
    if not free:
        hint = f"choose another --out, or continue its run: --resume {name}"
        raise UserError(f"{name} is not empty: {hint}")
    try:
        return name, FileLock(out / LOCK, timeout=0).acquire()
    except Timeout as error:
        raise UserError(f"another process is at work in {name}: wait, or stop it") from error
    except OSError:  # a disk without locks
        return name, nullcontext()


def new_number():
    """The first runs/N that this process makes: a file system makes a folder once."""
    Path("runs").mkdir(exist_ok=True)
    for number in count(1):
        with suppress(FileExistsError):
            (out := Path("runs", str(number))).mkdir()
            return str(out)


def is_free(out):
    """Whether a folder has nothing, or a run that failed before its first step."""
    sizes = {file.stem: file.stat().st_size for file in out.glob("*.jsonl")}
    if sizes.get("metrics", 1):
        return not any(out.iterdir())
    # With --steps 0 the evaluation is the run.
    kept = out / "settings.json"
    return not sizes.get("evaluation") or json.loads(kept.read_text("utf-8"))["steps"] > 0


def is_running(out):
    """Whether a process is at work in the folder of a run."""
    try:
        with FileLock(out / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a disk without locks, or somebody else's run
        return False


def begin(out, settings, chosen, script, data):
    """Writes settings.json and start/, or compares them in a resumed run."""
    values = values_of(settings, chosen, script)
    if settings.resume:
        began = json.loads((out / "settings.json").read_text("utf-8"))
        refuse_changes(settings.out, began, values, data)
        values["versions"] = began.get("versions", {})
        if "base" not in began.get("not_default", ()):
            values["not_default"] = [name for name in values["not_default"] if name != "base"]
    else:
        keep(out, settings, data)
    write_whole(out / "settings.json", json.dumps(values, indent=2))


def keep(out, settings, data):
    """Copies what a resume reads, or compares with. What a failed run has left goes."""
    for name in ("start", "evaluation"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in RECORDS:
        (out / f"{name}.jsonl").write_text("", "utf-8")
    (start := out / "start").mkdir()
    for name in ("prompts", "eval_prompts"):
        file = find_path(getattr(settings, name))
        shutil.copyfile(file, start / (name + Path(file).suffix))
    for name, file in reward_files(data).items():
        shutil.copyfile(file, start / name)
    if settings.adapter:
        copy_adapters(find_adapters(settings.adapter), start)


def refuse_changes(run, began, now, data):
    """UserError for what is not as it was when a run began; other versions are a warning.

    run: its folder. began: what settings.json has. now: what it would have.
    """
    old, new = began | began.get("versions", {}), now | now["versions"]
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


def compare_modules(out, settings, data):
    """Notes the user's modules, or warns where a resumed run has others.

    They are what reward files import, and files whose functions draw pictures. The rewards have
    been tried: what they import late is loaded, too.
    """
    own = {*modules().values()} - {*reward_files(data).values()}
    if ranks.rank() > 0 or not own:
        return
    values = json.loads((out / "settings.json").read_text("utf-8"))
    began = values["versions"].setdefault("your modules", now := hash_of(sorted(own)))
    if began != now:
        line = f"{settings.out} began with your modules {began} (now {now})"
        say(f"warning: {line}: numbers may differ")
    write_whole(out / "settings.json", json.dumps(values, indent=2))


def reward_files(data):
    """{name in start/: file} of the user's own rewards."""
    return {Path(each.own).name: find_file(each.source) for each in data.own()}


def values_of(settings, chosen, script):
    """What settings.json has. chosen: the names of settings that are not the defaults."""
    values = {name: x for name, x in vars(settings).items() if name not in ("out", "resume")}
    not_default, of_project = (
        [name for name in names if name in values] for names in (chosen, settings.of_project())
    )
    of_run = script_name(script), ranks.count(), versions(), not_default, of_project
    return values | dict(zip(OF_RUN, of_run, strict=True))


def versions():
    """{name: version} of what makes a run's numbers.

    Of the project a hash of its code, and for people the commit, where git knows it. The user's
    modules join later: see compare_modules.
    """
    found = {name: version(name) for name in ("torch", "transformers", "diffusers", "peft")}
    found["code"] = hash_of(file for each in CODE for file in sorted(ROOT.glob(each)))
    if (ROOT / ".git").exists():  # or git would describe another project around this folder
        describe = "git", "-C", str(ROOT), "describe", "--always", "--dirty"
        with suppress(OSError):
            answer = subprocess.run(describe, capture_output=True, encoding="utf-8", check=False)
            found["commit"] = answer.stdout.strip() or None
    return found


def hash_of(files):
    """Of their bytes, but for the ends of lines: a checkout may end them as Windows does."""
    contents = (file.read_bytes().replace(b"\r\n", b"\n") for file in files)
    return sha256(b"".join(contents)).hexdigest()[:12]


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
        hint = "; copy it again, or begin a run from an older checkpoint with --adapter"
        with readable(f"read {saved}", hint):
            for name, trainer in trainers.items():
                load_adapter(trainer.model, saved / name / WEIGHTS)
                state = torch.load(saved / f"{name}-optimizer.pt", "cpu", weights_only=True)
                trainer.optimizer.load_state_dict(state)
    return steps_saved(out)


def newest(place):
    """The newest checkpoint of a run, or what else is in this place."""
    return [Path(place), *checkpoints(Path(place))][-1]
