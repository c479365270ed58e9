"""LoRA adapters as files: PEFT's two, in a folder for the policy and one for the decoder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import peft
import safetensors.torch
from safetensors.torch import load_file

from lookup import UserError
from runtime.terminal import readable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
ADAPTERS = "adapter", "decoder-adapter"  # folders: of the policy, of the decoder
NO_VOCABULARY = {"save_embedding_layers": False}  # by itself PEFT would ask the hub about it


def find_adapters(place):
    """{"adapter", "decoder-adapter": its folder} of those in a checkpoint, or of a lone one.

    A lone adapter is the decoder's if it is named like that.
    """
    found = adapters_in(place := Path(place))
    if (place / CONFIG).is_file():
        of_decoder = place.resolve().name == "decoder-adapter"
        found = {"decoder-adapter" if of_decoder else "adapter": place}
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
    """adapters: {name in the folder: folder of an adapter}. Nothing else there is touched.

    The config comes last: without it there is no adapter, only a copy that was ended.
    """
    for name, adapter in adapters.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / CONFIG).unlink(missing_ok=True)
        for file in (WEIGHTS, CONFIG):
            shutil.copyfile(adapter / file, folder / name / file)


def save_adapter(model, folder, base):
    """base: the model's name. By itself PEFT writes where it was read from, such as a cache."""
    config = model.peft_config["default"]
    config = replace(config, inference_mode=True, base_model_name_or_path=base)
    config.save_pretrained(folder)
    weights = peft.get_peft_model_state_dict(model, **NO_VOCABULARY)
    # As bytes: safetensors itself writes a file that its owner alone may read.
    (folder / WEIGHTS).write_bytes(safetensors.torch.save(weights, {"format": "pt"}))


def load_adapter(model, file, name="default"):
    """The weights in a file, all of them, into the model's adapter of this name."""
    weights = load_file(file)
    wanted = peft.get_peft_model_state_dict(model, adapter_name=name, **NO_VOCABULARY)
    if other := weights.keys() ^ wanted.keys():  # which PEFT would leave out
        raise ValueError(f"{file} is of another model: {min(other)} is only in one of them")
    peft.set_peft_model_state_dict(model, weights, adapter_name=name)
