"""Checkpoints, and adapters in files: whatever ends a run, its last complete checkpoint stays."""

import io
import json
import os
import shlex
import shutil
from contextlib import contextmanager
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file

from rewards import UserError
from runtime.errors import readable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
ADAPTERS = "adapter", "decoder-adapter"  # folders: of the policy, of the decoder
KEPT = 2  # the newest checkpoints, beside those of evaluated steps


def find(out):
    """The checkpoints of a run, oldest first; not what people put beside them."""
    return sorted((out / "checkpoints").glob("[0-9]" * 6))


def copied(trainers):
    """Copies of the adapters and optimisers on the host, for save().

    A step that fails halfway may already have changed some weights. trainers: {folder of its
    adapter: GRPO}. Returns {folder: (model, weights, file)}.
    """
    copies = {}
    for name, trainer in trainers.items():
        weights = {
            key: weight.detach().to("cpu", copy=True)
            for key, weight in trainer.model.named_parameters()
            if weight.requires_grad
        }
        # Given a file, torch.save hides that the disk is full.
        file = io.BytesIO()
        torch.save(trainer.optimizer.state_dict(), file)
        copies[name] = trainer.model, weights, file.getbuffer()
    return copies


def save(out, step, copies, frozen, evaluated):
    """Write a checkpoint to a temporary folder and rename it; remove old ones.

    copies: see copied. frozen: {name: folder} of adapters that do not learn: whoever starts from
    the checkpoint needs both halves. evaluated: the steps whose checkpoints stay. There are no
    random states: the prompts and all random draws of a step are functions of the seed and the
    step.
    """
    final = out / "checkpoints" / f"{step:06d}"
    unfinished = out / "checkpoints" / ".unfinished"
    if final.exists():  # the run was resumed from here
        return
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, (model, weights, optimizer) in copies.items():
        save_adapter(model, unfinished / name, weights)
        (unfinished / f"{name}-optimizer.pt").write_bytes(optimizer)
    copy_adapters(frozen, unfinished)
    os.replace(unfinished, final)
    for old in find(out)[:-KEPT]:
        if int(old.name) not in evaluated and not old.is_symlink():
            os.replace(old, unfinished)  # at once: another program may be about to load it
            shutil.rmtree(unfinished)


def save_adapter(model, folder, weights):
    """The adapter that learns, as PEFT writes it, to a new folder. weights: see copied."""
    model.save_pretrained(folder, selected_adapters=["default"], state_dict=weights)
    (folder / "README.md").unlink()  # an empty template
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors lets its owner alone read it


def copy_adapters(adapters, folder):
    """adapters: {name in the folder: folder of an adapter}. Nothing else there is touched."""
    for name, adapter in adapters.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in (CONFIG, WEIGHTS):
            shutil.copy(adapter / file, folder / name)


def newest(folder):
    """The newest checkpoint of a run's folder. Any other folder, or None, is returned as is."""
    saved = find(Path(folder)) if folder else []
    return str(saved[-1]) if saved else folder


def find_adapter(folder, name):
    """The folder of an adapter, "adapter" or "decoder-adapter"; None if there is none.

    folder: of a checkpoint, or of an adapter, which is the decoder's if it is named like that; or
    None.
    """
    if not folder:
        return None
    folder = Path(folder)
    if (folder / CONFIG).is_file():
        of_decoder = folder.resolve().name == "decoder-adapter"
        return folder if of_decoder == (name == "decoder-adapter") else None
    return folder / name if (folder / name).is_dir() else None


def find_adapters(folder):
    """{name: folder} of all adapters in --adapter. UserError for what can be seen to be wrong."""
    found = {name: find_adapter(folder, name) for name in ADAPTERS}
    found = {name: each for name, each in found.items() if each}
    if folder and not found:
        gone = "" if Path(folder).exists() else "; a run removes its older checkpoints"
        raise UserError(f"--adapter {folder}: no run, no checkpoint and no adapter{gone}")
    for each in found.values():
        with readable(f"use the adapter {each}"):
            load_file(each / WEIGHTS)
            config = json.loads((each / CONFIG).read_text())
            start = config.get("init_lora_weights", True)
            # For others, such as PiSSA and OLoRA, PEFT changes the model's own weights.
            if start not in (True, False, "gaussian"):
                hint = "convert it to LoRA: path_initial_model_for_weight_conversion in PEFT"
                raise ValueError(f"with {start} the model has other weights; {hint}")
    return found


def needs_peft(folder):
    """The type of an adapter, if transformers' load_adapter leaves a part of it out; or None."""
    config = json.loads((folder / CONFIG).read_text())
    if config.get("peft_type") == "VERA":
        return "VeRA"
    return "DoRA" if config.get("use_dora") else None


def load_adapter(model, file, name="default"):
    """The weights in a file, all of them, into the model's adapter of this name."""
    weights = without_base(load_file(file), model)
    # By itself it would ask the hub about the vocabulary.
    options = {"adapter_name": name, "save_embedding_layers": False}
    wanted = peft.get_peft_model_state_dict(model, **options)
    shape = lambda tensors, key: list(tensors[key].shape) if key in tensors else "missing"
    for key in sorted(weights.keys() | wanted.keys()):
        if shape(weights, key) != shape(wanted, key):
            here = f"in this model it is {shape(wanted, key)}"
            hint = "; no run has its vision tower: train it without" * (".visual." in key)
            raise ValueError(f"{key} is {shape(weights, key)}, {here}{hint}")
    peft.set_peft_model_state_dict(model, weights, adapter_name=name)


def without_base(weights, model):
    """Weights of an adapter without those of the base, which PEFT writes too if lm_head has one."""
    base = dict(model.named_parameters())
    equal = lambda key: torch.equal(weights[key].to(base[key].dtype), base[key].cpu())
    frozen = [key for key in weights if ".base_layer." in key and key in base]
    frozen = [key for key in frozen if base[key].is_meta or equal(key)]
    return {key: weight for key, weight in weights.items() if key not in frozen}


def load(out, trainers):
    """Adapters and optimisers from the newest checkpoint, onto their devices. Returns its step."""
    for name, trainer in trainers.items():
        with of_newest(out, f"{name}/{WEIGHTS}") as file:
            load_adapter(trainer.model, file)
        with of_newest(out, f"{name}-optimizer.pt") as file:
            trainer.optimizer.load_state_dict(torch.load(file, "cpu", weights_only=True))
    return int(find(out)[-1].name)


@contextmanager
def of_newest(out, name):
    """Yields a file of the newest checkpoint; if it is damaged, one line says how to go on."""
    *before, folder = find(out)
    hint = "; no checkpoint is before it: start a new run"
    if before:
        hint = f"; to continue from {before[-1].name}, rm -r {shlex.quote(str(folder))}"
    with readable(f"read {folder / name}", hint):
        yield folder / name


def how_to_continue(out, diverged=None):
    """In words; nothing if there is no checkpoint. diverged: the step whose policy has diverged."""
    if diverged is not None:
        before = [folder for folder in find(out) if int(folder.name) < diverged]
        start = "start a new run from an earlier step with a lower --lr: --adapter"
        return f"{start} {shlex.quote(str(before[-1]))}" if before else ""
    return f"continue with --resume {shlex.quote(str(out))}" if find(out) else ""
