"""A run's folder and its checkpoints: whatever ends a run, its last complete checkpoint stays."""

import io
import json
import os
import shlex
import shutil
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path

import peft
import torch
from safetensors import SafetensorError

from runtime import ROOT, UserError, ranks

KEPT = 2  # the newest checkpoints, beside those of evaluated steps


def find(out):
    """The checkpoints of a run, oldest first."""
    return sorted((out / "checkpoints").glob("[0-9]*"))


def saved(settings):
    """Settings as they are written, {name: value}."""
    return shortened(vars(settings))


def shortened(values):
    """Files of this project by their place in it, so that another clone finds its own."""
    short = lambda value: value.replace(f"{ROOT}{os.sep}", "") if isinstance(value, str) else value
    return {name: short(value) for name, value in values.items()}


def save(out, step, trainers, state):
    """Write a checkpoint to a temporary folder and rename it; remove old ones.

    trainers: {folder of its adapter: GRPO}. state: {"settings": see saved, "inputs": see hash_of in
    data.py}. No random states: the prompts and all random draws of a step are functions of the seed
    and the step.
    """
    final = out / "checkpoints" / f"{step:06d}"
    unfinished = out / "checkpoints" / ".unfinished"
    if final.exists():  # the run was resumed from here
        return
    with writing(out):
        shutil.rmtree(unfinished, ignore_errors=True)
        for name, trainer in trainers.items():
            save_adapter(trainer.model, unfinished / name)
            # Given a file, torch.save hides that the disk is full.
            buffer = io.BytesIO()
            torch.save(trainer.optimizer.state_dict(), buffer)
            (unfinished / f"{name}-optimizer.pt").write_bytes(buffer.getvalue())
        state = {"step": step, "ranks": ranks.count(), **state}
        (unfinished / "state.json").write_text(json.dumps(state))
        os.replace(unfinished, final)
        every = state["settings"]["eval_every"]
        for old in find(out)[:-KEPT]:
            if every == 0 or int(old.name) % every:
                shutil.rmtree(old)


def save_adapter(model, folder):
    """The adapter that learns, as PEFT writes it."""
    model.save_pretrained(folder, selected_adapters=["default"])
    (folder / "README.md").unlink()  # an empty template


def find_adapter(folder, name):
    """The folder of an adapter, "adapter" or "decoder-adapter"; None if there is none.

    folder: of a run, whose newest checkpoint counts, or of a checkpoint; or None.
    """
    places = [Path(folder), *find(Path(folder))] if folder else []
    return next((place / name for place in places[::-1] if (place / name).is_dir()), None)


def read_state(out):
    """{"step", "ranks", "settings", "inputs"} of the newest checkpoint, see save."""
    if not find(out):
        raise UserError(f"there is no checkpoint in {out} to resume")
    return json.loads((find(out)[-1] / "state.json").read_text())


def load(out, trainers):
    """Adapters and optimisers from the newest checkpoint, onto their devices. Returns its step."""
    folder = find(out)[-1]
    for name, trainer in trainers.items():
        weights = peft.load_peft_weights(folder / name, device="cpu")
        peft.set_peft_model_state_dict(trainer.model, weights)
        file = folder / f"{name}-optimizer.pt"
        trainer.optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return int(folder.name)


def how_to_continue(out):
    return f"continue with --resume {shlex.quote(str(out))}"


@contextmanager
def writing(out):
    """A full disk, a deleted folder or missing rights become one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {out}: {error}") from None


# ---- the folder of a run -------------------------------------------------------------------------


@contextmanager
def claimed(resume, name):
    """The folder of --resume or --out, or the next free runs/N: no other process can take it.

    If nothing is written to it, it is removed.
    """
    with open_locked(resume, name) if ranks.rank() == 0 else nullcontext() as file:
        out = ranks.gather(file and Path(file.name).parent)[0]
        try:
            yield out
        finally:
            with suppress(OSError):  # there are other files in it
                if file and os.path.getsize(file.name) == 0:
                    file.close()  # Windows removes no open file
                    os.remove(file.name)
                    os.removedirs(out)


def open_locked(resume, name):
    """The folder's settings.json. A kill ends the lock."""
    out = Path(resume or name or "runs")
    with writing(out):
        out = out if resume or name else next_folder(out)
        out.mkdir(parents=True, exist_ok=True)
        file = (out / "settings.json").open("a")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        busy = f"another process is at work on the run in {out}: wait for it, or stop it"
        raise UserError(busy) from None
    except (ImportError, OSError):  # Windows, or a disk without locks
        pass
    if resume is None and file.tell():
        more = f", or {how_to_continue(out)}" if find(out) else ""
        raise UserError(f"{out} already holds a run; choose another --out{more}")
    return file


def next_folder(parent):
    for number in count(1):
        with suppress(FileExistsError):
            (parent / str(number)).mkdir(parents=True)
            return parent / str(number)
