"""The README.md of a trained adapter, as the hub reads it: what it gained, how to load it."""

import json
import shutil
from pathlib import Path

from rewards import find_path
from runtime.checkpoint import CONFIG
from runtime.words import counted, evaluation_table

LOADED = {  # how the stock pipeline loads an adapter, and how the hub names it
    "adapter": ("policy.load_adapter(adapter)", "language model", "peft"),
    "decoder-adapter": (
        "pipe.transformer.load_lora_adapter(adapter, prefix=None, use_safetensors=True)",
        "diffusion decoder",
        "diffusers",
    ),
}

# For diffusers 0.42.1, which joins the features that transformers 5.23 expects apart.
EDIT = """
read, channels = policy.get_image_tokens, policy.config.vision_config.hidden_size
policy.get_image_tokens = lambda joined, grids: read(joined.unflatten(0, (-1, channels)), grids)"""

PAGE = """\
---
{base}library_name: {library}
pipeline_tag: text-to-image
tags:
- lora
- grpo
---

# {title}

A LoRA adapter of the {part} of `{model}`, {made}.{others}

{evaluation}

## How to load it

```python
import diffusers
import torch

adapter = "."  # this folder, or its place on the hub: NAME/REPOSITORY
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
pipe = diffusers.GlmImagePipeline.from_pretrained({model!r}, dtype=dtype)
policy = pipe.vision_language_encoder
{load}
# It samples as the evaluation did, and codes alone.
codes = pipe.transformer.config.prior_vq_quantizer_codebook_size
policy.generation_config.suppress_tokens = [*range(codes, policy.lm_head.out_features)]
policy.generation_config.update(temperature={temperature}, top_p={top_p})
pipe.to(device)  # with less memory: pipe.enable_model_cpu_offload()
size = {{"height": {height}, "width": {width}}}
painter = {{"num_inference_steps": {eval_decode_steps}, "guidance_scale": {eval_guidance_scale}}}
pipe({prompt}, {source}**size, **painter).images[0].save("picture.png")
```

## Settings

`python {script} --config settings.json` begins a run like it:

```json
{settings}
```
"""


def write_cards(run, adapters):
    """In the folder of each adapter: README.md, the picture, settings.json.

    run: a Record. adapters: the names of those that it has exported.
    """
    text = (run.out / "settings.json").read_text("utf-8")
    settings = json.loads(text)
    for name in adapters:
        folder = run.out / name
        # PEFT has written the folder that the base model was read from, which may be a cache.
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        config["base_model_name_or_path"] = settings["model"]
        (folder / CONFIG).write_text(json.dumps(config, indent=2), "utf-8")
        if (run.out / "before-after.png").exists():
            shutil.copyfile(run.out / "before-after.png", folder / "before-after.png")
        (folder / "settings.json").write_text(text, "utf-8")
        words = settings | {"settings": text}
        (folder / "README.md").write_text(page(name, words, run, adapters), "utf-8")


def page(name, settings, run, adapters):
    """The text of README.md."""
    model, began_from, records = settings["model"], settings["began_from"], run.records
    load, part, library = LOADED[name]
    made = f"from {counted(run.saved, 'step')} of GRPO"
    made += f", begun from `{began_from}`" if began_from else ""
    if name not in run.trainers:
        made = f"as it was in `{began_from}`: this run trained another part"
    others = [f" Load `{each}` of the same run, too." for each in adapters if each != name]
    if settings["planned_base"] == "int8":
        others.append(" In training and evaluation the base was rounded to int8.")
    is_folder = Path(find_path(model)).exists()
    edits = "sources" in settings
    words = {
        "base": "" if is_folder else f"base_model: {model}\n",
        "library": library,
        "title": f"{Path(model).name}, trained by GRPO: {settings['reward']}",
        "part": part,
        "made": made,
        "others": "".join(others),
        "evaluation": evaluation(records["evaluation"]),
        "load": load + EDIT * edits,
        "source": 'image=[diffusers.utils.load_image("source.png")], ' * edits,
        "prompt": json.dumps(records["groups"][-1]["prompt"], ensure_ascii=False),
    }
    return PAGE.format_map(settings | words)


def evaluation(evaluations):
    """The picture, and the table of the last one beside that before training, if there was any."""
    if not evaluations:
        return ""
    title, table = evaluation_table(evaluations).split("\n", 1)
    picture = "![Held-out prompts before training and after](before-after.png)"
    return f"{picture}\n\n{title}\n\n{table}"
