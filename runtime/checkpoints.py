"""The folder of a run, and its checkpoints. A kill leaves the last complete one."""

import json
import os
import pickle
import shlex
import shutil
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import peft
import torch
from safetensors import SafetensorError

from runtime import ROOT, UserError, ranks, readable

KEPT = 2  # the newest checkpoints, beside that of the best evaluation


def find(out):
    """Complete checkpoints of a run, oldest first."""
    return sorted((out / "checkpoints").glob("[0-9]*"))


def saved(settings):
    """Settings as they are written, {name: value}."""
    return shortened(vars(settings))


def shortened(values):
    """Files of this project by their place in it, so that another clone finds its own."""
    short = lambda value: value.replace(f"{ROOT}/", "") if isinstance(value, str) else value
    return {name: short(value) for name, value in values.items()}


def save(out, step, trainers, state, best_step=0):
    """Write to a temporary folder and rename it; of others the newest and the best one stay.

    trainers: {folder in the checkpoint: GRPO}; "." is that of the policy, so the checkpoint loads
    as its adapter. state: {"settings": see saved, "inputs": hashes}. No random states: the prompts
    and all random draws of a step are functions of the seed and the step.
    """
    final = out / "checkpoints" / f"{step:06d}"
    unfinished = out / "checkpoints" / ".unfinished"
    state = {"step": step, "ranks": ranks.count(), **state}
    with writing(out):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        (unfinished / "state.json").write_text(json.dumps(state))
        if final.exists():  # resumed from here; only settings may be new, such as --steps
            os.replace(unfinished / "state.json", final / "state.json")
            unfinished.rmdir()
        else:
            for name, trainer in trainers.items():
                folder = unfinished / name
                trainer.model.save_pretrained(folder)
                (folder / "README.md").unlink()  # PEFT's form, empty
                # Given a path, torch.save hides that a disk is full.
                with open(folder / "optimizer.pt", "wb") as file:
                    torch.save(trainer.optimizer.state_dict(), file)
            os.replace(unfinished, final)
        for old in find(out)[:-KEPT]:
            if old.name != f"{best_step:06d}":
                shutil.rmtree(old)


def read_state(out):
    """The newest checkpoint's step, number of ranks, settings, and hashes of what the run reads."""
    if not find(out):
        raise UserError(f"there is no checkpoint in {out} to resume")
    with readable_errors(find(out)[-1]):
        state = json.loads((find(out)[-1] / "state.json").read_text())
        return state["step"], state["ranks"], state["settings"], state["inputs"]


def load(out, trainers):
    """The newest checkpoint onto the device of adapters and optimisers. Returns its step."""
    folder = find(out)[-1]
    with readable_errors(folder):
        for name, trainer in trainers.items():
            weights = peft.load_peft_weights(folder / name, device="cpu")
            peft.set_peft_model_state_dict(trainer.model, weights)
            file = folder / name / "optimizer.pt"
            state = torch.load(file, map_location="cpu", weights_only=True)
            trainer.optimizer.load_state_dict(state)
    return read_state(out)[0]


@contextmanager
def writing(out):
    """A full disk, a folder that is gone or rights that were taken away become a UserError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # The last error of torch.save hides why it failed, such as "No space left on device".
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = str(cause).strip().split("\n")[0]
        again = f"--resume {shlex.quote(str(out))} goes on"
        hint = f"; its checkpoints are whole; once that is fixed, {again}" if find(out) else ""
        raise UserError(f"cannot write to {out}: {reason}{hint}") from None


def readable_errors(folder):
    hint = "delete that folder to go on from the one before"
    more = (RuntimeError, EOFError, pickle.PickleError)
    return readable(f"read the checkpoint {folder}", hint, *more)


# ---- the folder of a run ---------------------------------------------------------------------


@contextmanager
def claim_folder(resume, name):
    """The run's folder, taken before anything loads, so that two runs never share one.

    resume, name: --resume and --out. Left empty it is removed.
    """
    with ExitStack() as locks:
        with ranks.together():
            claimed = _claim(resume, name, locks) if ranks.rank() == 0 else None
            out = ranks.gather(claimed)[0]
        try:
            yield out
        finally:
            if ranks.rank() == 0:
                with suppress(OSError):  # runs/ goes too, if this was the first
                    if [file.name for file in out.iterdir()] == ["settings.json"]:
                        (out / "settings.json").unlink()
                        out.rmdir()
                        out.parent.rmdir()


def _claim(resume, name, locks):
    """The folder: that of --resume or --out, or the next free runs/N.

    Creating settings.json claims a new one. `locks` keeps that file open and locked, so that
    nothing else resumes the run; a kill ends the lock.
    """
    names = [resume or name] if resume or name else map("runs/{}".format, count(1))
    for out in map(Path, names):
        again = "choose another --out"
        try:
            if resume is None:
                out.mkdir(parents=True, exist_ok=name is not None)
                if find(out):
                    resumes = f"--resume {shlex.quote(str(out))}"
                    raise UserError(f"{out} already holds a run; {again}, or {resumes}")
            file = locks.enter_context((out / "settings.json").open("a" if resume else "x"))
        except FileExistsError:
            if name is None:
                continue
            what = "already holds a run" if out.is_dir() else "is no folder"
            raise UserError(f"{out} {what}; {again}, or delete it") from None
        except OSError as error:
            raise UserError(f"cannot write to {out}: {error.strerror or error}") from None
        if _locked(file):
            busy = "another process is still at work on the run in"
            raise UserError(f"{busy} {out}: wait for it, or stop it")
        return out


def _locked(file):
    """Whether another process has locked it. If not, this one does.

    On Windows, and on disks that have no locks, nothing is locked.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        return isinstance(error, BlockingIOError)
