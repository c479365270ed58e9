"""LoRA adapters: a fresh one, or that of --adapter; its reference and its optimizer."""

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import peft
import torch
from safetensors import safe_open

from runtime import UserError, checkpoints, readable


def add_adapter(module, name, targets, settings):
    """The module with a LoRA adapter, float32 even over a bfloat16 base, and the reference, see
    GRPO.

    The adapter is a fresh one, and the reference the module without it; or it is that of --adapter,
    which then is the reference too. name: "codes" or "decoder". targets: the layers that are
    adapted.
    """
    alpha = settings.lora_alpha or 2 * settings.lora_rank
    lora = peft.LoraConfig(r=settings.lora_rank, lora_alpha=alpha, target_modules=targets)
    model = peft.get_peft_model(module, lora)
    if settings.adapter is None or not start_from(settings.adapter, name, model):
        return model, None
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, partial(having_weights, trained, [p.detach().clone() for p in trained])


@contextmanager
def having_weights(parameters, weights):
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight.to(parameter.device)
        yield
    finally:
        for parameter, weight in zip(parameters, own, strict=True):
            parameter.data = weight


def adamw(model, lr, warmup_steps):
    """AdamW whose rate grows over its first steps. Its state_dict holds that of the scheduler too,
    for checkpoints.

    eps: gradients here can be as small as 5e-9 per weight; with torch's default of 1e-8 nothing
    would move.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), eps=1e-15, weight_decay=0.0)
    rate = lambda made: min(1, (made + 1) / (warmup_steps + 1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    optimizer.register_step_post_hook(
        lambda *_: scheduler.step()
    )  # so that a step that is skipped does not count
    optimizer.register_state_dict_post_hook(
        lambda _, state: state | {"scheduler": scheduler.state_dict()}
    )
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: scheduler.load_state_dict(state["scheduler"])
    )
    return optimizer


def adapter_file(folder, name):
    """The weights of one half's adapter in the folder of a run, of a checkpoint or of an adapter;
    or None."""
    own = "adapter_model.safetensors"  # as PEFT and as diffusers name them
    other = "pytorch_lora_weights.safetensors"
    files = {
        "codes": [f"adapter/{own}", own],
        "decoder": [f"decoder-adapter/{other}", f"decoder/{own}", other],
    }
    return next(
        (Path(folder) / file for file in files[name] if (Path(folder) / file).is_file()), None
    )


def start_from(folder, name, model):
    """Give a model's fresh adapter the weights of one in a folder. Returns whether there was one
    for this model."""
    if not any(adapter_file(folder, kind) for kind in checkpoints.FOLDERS):
        raise UserError(
            f"there is no adapter in {folder}: give --adapter the folder of a run that has ended"
        )
    file = adapter_file(folder, name)
    if file is None:
        return False
    weights, config = read_adapter(file)
    weights = {f"base_model.model.{name}": weight for name, weight in weights.items()}
    fresh = peft.get_peft_model_state_dict(model)
    lora = model.peft_config["default"]
    if (config.get("r"), config.get("lora_alpha")) != (lora.r, lora.lora_alpha):
        raise UserError(
            f"--adapter {folder} was made with --lora-rank {config.get('r')} --lora-alpha "
            f"{config.get('lora_alpha')}: give the same"
        )
    if {key: x.shape for key, x in weights.items()} != {key: x.shape for key, x in fresh.items()}:
        raise UserError(
            f"--adapter {folder} does not fit: it is that of another model, or of other layers"
        )
    if not next(model.parameters()).is_meta:  # there plan asks for sizes alone
        peft.set_peft_model_state_dict(model, weights)
    return True


def read_adapter(file):
    """({name: weight}, configuration) of an adapter that PEFT or diffusers has saved; names as in
    the model's own."""
    with readable(f"read the adapter {file}"):
        with safe_open(file, "pt") as opened:
            weights = {
                key.removeprefix("base_model.model."): opened.get_tensor(key)
                for key in opened.keys()
            }  # noqa: SIM118
            config = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
        if (file.parent / "adapter_config.json").is_file():
            config = json.loads((file.parent / "adapter_config.json").read_text())
    return weights, config
