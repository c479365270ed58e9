"""LoRA adapters: in a model, and as PEFT's two files."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import peft
import safetensors.torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file

from inputs import UserError, readable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
NO_VOCABULARY = {"save_embedding_layers": False}  # by itself PEFT would ask the hub about it
LORA_TARGETS = {
    # In the language model only.
    "codes": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    # The attention of every block.
    "decoder": ["to_q", "to_k", "to_v", "to_out.0"],
}


# ---- in a model ----------------------------------------------------------------------------------


def add_adapter(module, targets, rank, folder=None):
    """Returns the module with an adapter that learns, and the reference for GRPO.

    The adapter is float32, even over a bfloat16 base. A new adapter goes to the layers of
    LORA_TARGETS[targets], and the reference is None: the module without it. An adapter that is read
    from a folder has its own layers and rank, and the reference is a frozen copy of it.
    """
    if folder is None:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA_TARGETS[targets])
        return get_peft_model(module, lora), None
    with readable(f"use the adapter {folder}"):
        config = PeftConfig.from_pretrained(folder)
        # Dropout would act in the update alone: the ratios of fresh samples would not be 1.
        dropout = {each.name: 0.0 for each in fields(config) if each.name.endswith("dropout")}
        # With a base_model_name_or_path PEFT would warn of another place.
        config = replace(config, inference_mode=False, base_model_name_or_path=None, **dropout)
        model = get_peft_model(module, config)
        model.add_adapter("reference", replace(config, inference_mode=True))
        for name in ("default", "reference"):
            load_adapter(model, folder / WEIGHTS, name)
    return model, partial(with_reference, model)


@contextmanager
def with_reference(model):
    model.set_adapter("reference", inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter("default")


# ---- as files ------------------------------------------------------------------------------------


def refuse_unless_plain(adapter):
    """Of other kinds PEFT would load a part, or change the model's own weights."""
    with readable(f"use the adapter {adapter}"):
        config = json.loads((adapter / CONFIG).read_text("utf-8"))
        plain = config["peft_type"] == "LORA" and config.get("bias", "none") == "none"
        plain &= config.get("init_lora_weights", True) in (True, False, "gaussian")
        if not plain or config.get("use_dora") or config.get("modules_to_save"):
            raise ValueError("it is not plain LoRA: no DoRA, PiSSA, biases or whole modules")


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


# ---- of the two models of a pipeline that can learn, in folders side by side ---------------------

# {folder: (its model, that model's library, the stock pipeline's call)}
ADAPTERS = {
    "adapter": ("language model", "peft", "policy.load_adapter(adapter)"),
    "decoder-adapter": (
        "diffusion decoder",
        "diffusers",
        "pipe.transformer.load_lora_adapter(adapter, prefix=None, use_safetensors=True)",
    ),
}


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


def copy_adapters(adapters, folder):
    """adapters: {name in the folder: folder of an adapter}. Nothing else there is touched.

    The config comes last: without it there is no adapter, only a copy that was ended.
    """
    for name, adapter in adapters.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / CONFIG).unlink(missing_ok=True)
        for file in (WEIGHTS, CONFIG):
            shutil.copyfile(adapter / file, folder / name / file)


def export_adapters(adapters, folder):
    """Copies them, with a third file for the decoder's: that of the call in ADAPTERS."""
    copy_adapters(adapters, folder)
    if "decoder-adapter" in adapters:
        own = folder / "decoder-adapter"
        weights = load_file(own / WEIGHTS)
        weights = {name.removeprefix("base_model.model."): x for name, x in weights.items()}
        config = {"format": "pt", LORA_ADAPTER_METADATA_KEY: (own / CONFIG).read_text("utf-8")}
        (own / LORA_WEIGHT_NAME_SAFE).write_bytes(safetensors.torch.save(weights, config))
