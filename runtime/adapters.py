"""LoRA adapters: a fresh one, or that of --adapter, and its reference."""

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import peft
from safetensors import safe_open

from runtime import UserError, readable


def add_adapter(module, half, targets, rank, folder):
    """The module with a LoRA adapter, float32 even over a bfloat16 base, and the reference.

    The adapter is a fresh one, and the reference None, the module without it, see GRPO; or it is
    that of a folder, which then is the reference too. half: "codes" or "decoder". targets: the
    layers that are adapted.
    """
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    model = peft.get_peft_model(module, lora)
    file = folder and adapter_file(folder, half)
    if not file:
        return model, None
    weights = {f"base_model.model.{name}": x for name, x in read_adapter(file)[0].items()}
    fresh = peft.get_peft_model_state_dict(model)
    if {name: x.shape for name, x in weights.items()} != {n: x.shape for n, x in fresh.items()}:
        raise UserError(f"--adapter {folder} does not fit: its model or its layers are others")
    if not next(model.parameters()).is_meta:  # there plan asks for sizes alone
        peft.set_peft_model_state_dict(model, weights)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, partial(having_weights, parameters, [p.detach().clone() for p in parameters])


@contextmanager
def having_weights(parameters, weights):
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, weight in zip(parameters, weights):
            parameter.data = weight.to(parameter.device)
        yield
    finally:
        for parameter, weight in zip(parameters, own):
            parameter.data = weight


def adapter_file(folder, half):
    """One half's adapter in the folder of a run, of a checkpoint or of an adapter; or None."""
    own = "adapter_model.safetensors"  # as PEFT and as diffusers name them
    other = "pytorch_lora_weights.safetensors"
    names = {
        "codes": [f"adapter/{own}", own],
        "decoder": [f"decoder-adapter/{other}", f"decoder/{own}", other],
    }
    files = [Path(folder) / name for name in names[half]]
    return next(filter(Path.is_file, files), None)


def find_adapters(folder, rank):
    """The files of the adapters in a folder, which have to be of this rank."""
    files = [adapter_file(folder, half) for half in ("codes", "decoder")]
    files = [file for file in files if file]
    if not files:
        raise UserError(f"there is no adapter in {folder}: --adapter takes the folder of a run")
    for file in files:
        _, lora = read_adapter(file)
        if lora.get("r") != rank:
            given = f"--lora-rank {lora.get('r')}"
            raise UserError(f"--adapter {folder} was made with {given}: give the same")
        if lora.get("lora_alpha") != 2 * rank:
            raise UserError(f"--adapter {folder}: its alpha is not twice its rank, as here")
    return files


def read_adapter(file):
    """({name: weight}, configuration) of an adapter by PEFT or diffusers; names as in the model."""
    with readable(f"read the adapter {file}"):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            weights = {
                name.removeprefix("base_model.model."): opened.get_tensor(name) for name in names
            }
            config = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
        if (file.parent / "adapter_config.json").is_file():
            config = json.loads((file.parent / "adapter_config.json").read_text())
    return weights, config
