"""Checkpoints of a run, and the adapters in them, or from anywhere else."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import peft
import safetensors.torch
import torch
from safetensors.torch import load_file

from rewards import UserError
from runtime.terminal import readable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
ADAPTERS = "adapter", "decoder-adapter"  # folders: of the policy, of the decoder
STEP = "[0-9]" * 6  # a checkpoint's folder
WHOLE = "whole"  # its last file, which is empty
NO_VOCABULARY = {"save_embedding_layers": False}  # by itself PEFT would ask the hub about it


# ---- checkpoints ---------------------------------------------------------------------------------


def checkpoints(out):
    """The folders of a run's checkpoints, oldest first; not what people put beside them."""
    return [file.parent for file in sorted((out / "checkpoints").glob(f"{STEP}/{WHOLE}"))]


def steps_saved(out):
    """The step of the newest checkpoint, or 0."""
    return max((int(each.name) for each in checkpoints(out)), default=0)


def save(out, step, trainers, evaluated):
    """Writes a checkpoint, its file WHOLE last: without that, as after a kill, it does not count.

    trainers: {folder of its adapter: its trainer}. Adapters that do not learn are copied from
    start/: whoever starts from the checkpoint needs both halves. Of older checkpoints those of
    evaluated steps stay, without their optimizers. There are no random states: the prompts and all
    random draws of a step are functions of the seed and the step.
    """
    folder = out / "checkpoints" / f"{step:06d}"
    shutil.rmtree(folder, ignore_errors=True)  # what a kill has left
    for name, trainer in trainers.items():
        config = replace(trainer.model.peft_config["default"], inference_mode=True)
        config.save_pretrained(folder / name)
        weights = peft.get_peft_model_state_dict(trainer.model, **NO_VOCABULARY)
        # As bytes: safetensors itself writes a file that its owner alone may read.
        (folder / name / WEIGHTS).write_bytes(safetensors.torch.save(weights, {"format": "pt"}))
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


def load(out, trainers):
    """Adapters and optimisers from the newest checkpoint, if any. Returns its step, or 0."""
    for saved in checkpoints(out)[-1:]:
        for name, trainer in trainers.items():
            load_adapter(trainer.model, saved / name / WEIGHTS)
            state = torch.load(saved / f"{name}-optimizer.pt", "cpu", weights_only=True)
            trainer.optimizer.load_state_dict(state)
    return steps_saved(out)


# ---- adapters ------------------------------------------------------------------------------------


def newest(place):
    """The newest checkpoint of a run, or what else is in this place."""
    return [Path(place), *checkpoints(Path(place))][-1]


def find_adapters(place):
    """{"adapter", "decoder-adapter": its folder} of those in --adapter, which may be None.

    place: of a run, whose newest checkpoint counts, of a checkpoint, or of a lone adapter, which is
    the decoder's if it is named like that.
    """
    if not place:
        return {}
    folder = newest(place)
    found = adapters_in(folder)
    if (folder / CONFIG).is_file():
        of_decoder = folder.resolve().name == "decoder-adapter"
        found = {"decoder-adapter" if of_decoder else "adapter": folder}
    if not found:
        raise UserError(f"--adapter {place}: no run, no checkpoint and no adapter is there")
    for each in found.values():
        refuse_unless_plain(each)
    return found


def adapters_in(folder):
    """{name: its folder} of those in a checkpoint or in start/."""
    return {name: folder / name for name in ADAPTERS if (folder / name).is_dir()}


def refuse_unless_plain(adapter):
    """Of other kinds PEFT would load a part, or change the model's own weights."""
    with readable(f"use the adapter {adapter}"):
        config = json.loads((adapter / CONFIG).read_text("utf-8"))
        plain = config["peft_type"] == "LORA" and config.get("bias", "none") == "none"
        plain &= config.get("init_lora_weights", True) in (True, False, "gaussian")
        if not plain or config.get("use_dora") or config.get("modules_to_save"):
            raise ValueError("it is not plain LoRA: no DoRA, PiSSA, biases or whole modules")


def copy_adapters(adapters, folder):
    """adapters: {name in the folder: folder of an adapter}. Nothing else there is touched."""
    for name, adapter in adapters.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in (CONFIG, WEIGHTS):
            shutil.copyfile(adapter / file, folder / name / file)


def load_adapter(model, file, name="default"):
    """The weights in a file, all of them, into the model's adapter of this name."""
    weights = load_file(file)
    wanted = peft.get_peft_model_state_dict(model, adapter_name=name, **NO_VOCABULARY)
    if other := weights.keys() ^ wanted.keys():  # which PEFT would leave out
        raise ValueError(f"{file} is of another model: {min(other)} is only in one of them")
    peft.set_peft_model_state_dict(model, weights, adapter_name=name)


# ---- files that survive --------------------------------------------------------------------------


def write_whole(path, text):
    """A kill, or a power cut, leaves what was there before."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, "utf-8")
    sync(unfinished)
    os.replace(unfinished, path)


def sync(*files):
    """What was written to files is on the disk itself. A disk may refuse to promise that."""
    for file in files:
        with open(file, "r+b") as opened:
            try:
                os.fsync(opened.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
