"""What a run has learned, merged into its base: a pipeline folder that any tool loads, with no adapter left.

python -m runtime.export runs/1 FOLDER
"""

import argparse
import json
import sys
from pathlib import Path

from diffusers import GlmImagePipeline
from transformers import AutoConfig

from runtime import UserError, checkpoints, readable
from runtime.adapters import adapter_file, read_adapter
from runtime.data import readable_loading


def export(run, folder):
    """Merges the adapters of a run into its base; a half that it did not train has that of --adapter, if there is one."""
    with readable(f"read the settings of the run {run}"):
        settings = json.loads((run / "settings.json").read_text())
    if settings["base"] == "int8":
        words = "was trained on a base rounded to int8, into which nothing merges; load its adapter beside the base"
        raise UserError(f"{run} {words}, see its README.md")
    started_from = settings["adapter"] or run
    files = {name: adapter_file(run, name) or adapter_file(started_from, name) for name in checkpoints.FOLDERS}
    if not any(files.values()):
        raise UserError(f"there is no adapter in {run}: export a run that has ended")
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another folder")
    with readable_loading(settings["model"]):
        config = AutoConfig.from_pretrained(settings["model"], subfolder="vision_language_encoder")
        pipe = GlmImagePipeline.from_pretrained(settings["model"], dtype=config.dtype, use_safetensors=True)
    for name, module in (("codes", pipe.vision_language_encoder), ("decoder", pipe.transformer)):
        if files[name] is not None:
            merge(module, *read_adapter(files[name]))
    with checkpoints.writing(folder):
        pipe.save_pretrained(folder)


def merge(module, weights, config):
    """W + alpha / rank * B A for each adapted layer (Hu et al. 2021, eq. 3): in float32, rounded once to W's dtype."""
    for key, down in weights.items():
        name, lora_a, _ = key.partition(".lora_A.weight")
        if lora_a:
            weight = module.get_submodule(name).weight
            delta = config["lora_alpha"] / config["r"] * weights[f"{name}.lora_B.weight"].float() @ down.float()
            weight.data = (weight.float() + delta).to(weight.dtype)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run that has ended")
    parser.add_argument("folder", type=Path, help="a new folder, for the pipeline")
    options = parser.parse_args(arguments)
    try:
        export(options.run, options.folder)
    except UserError as error:
        print("error:", error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
