"""The adapter's README: what it is, how it was made and what it did, in place of PEFT's form."""

from pathlib import Path

from runtime import format_number, ranks, reward_names, short_name

CARD = """---
base_model: {base}
library_name: peft
pipeline_tag: text-to-image
tags: [lora, grpo, glm-image]
---

# A LoRA adapter for {base}, trained with GRPO

It adapts {what}. {steps} steps, groups of {group_size}, {prompts_per_step} prompts a
step{each}; reward `{reward}`, learning rate {lr}, KL {kl_coef}, rank {lora_rank}, {height}x{width} pixels, seed {seed}.{base_note}

{table}

![before and after](before-after.png)

```python
import torch
from diffusers import GlmImagePipeline

FOLDER = "where this file is"
# torch.set_num_threads(1)  # ten times faster on a busy CPU, for tiny-glm-image
pipe = GlmImagePipeline.from_pretrained("{model}", dtype="auto")  # on a GPU: .to("cuda")
pipe.{load}
settings = dict(num_inference_steps={eval_decode_steps}, guidance_scale={eval_guidance_scale})
settings["generator"] = torch.Generator().manual_seed(0)
image = pipe("YOUR PROMPT", height={height}, width={width}, **settings).images[0]
```
"""

ROUNDED = """

It was trained, and the table below was made, on a base rounded to int8; the code below loads the base as it is. What that
changes: `python train.py --model {model} --adapter FOLDER --steps 0` judges the adapter there."""

ADAPTERS = {  # folder: what it adapts, and how it loads
    "adapter": ("the language model, which writes the image codes", "vision_language_encoder.load_adapter(FOLDER)"),
    "decoder-adapter": (
        "the diffusion decoder, which paints the image codes",
        "transformer.load_lora_adapter(FOLDER, prefix=None, use_safetensors=True)",
    ),
}


def write_card(folder, settings, before, after, picture):
    """README.md and before-after.png in an adapter's folder. A model from a folder is called by that folder's name.

    before, after: records of evaluation.jsonl.
    """
    lines = ["| Mean reward | before | after | pictures |", "|---|---|---|---|"]
    for prefix, name in (("", "training prompts"), ("held_out/", "held-out prompts")):
        for key in reward_names(after, prefix):
            numbers = f"{format_number(before[key])} | {format_number(after[key])} | {after[prefix + 'images']}"
            lines.append(f"| {short_name(key)}, {name} | {numbers} |")
    base = Path(settings.model).resolve().name if Path(settings.model).is_dir() else settings.model
    values = {**vars(settings), "base": base, "steps": after["step"], "table": "\n".join(lines)}
    values |= {"each": f" on each of {ranks.count()} processes" if ranks.count() > 1 else ""}
    values |= dict(zip(("what", "load"), ADAPTERS[folder.name]))
    values |= {"base_note": ROUNDED.format(model=settings.model) if settings.base == "int8" else ""}
    if folder.name == "decoder-adapter":
        values |= {"lr": settings.decoder_lr, "group_size": settings.paintings}
    (folder / "README.md").write_text(CARD.format(**values), encoding="utf-8")
    picture.save(folder / "before-after.png")
