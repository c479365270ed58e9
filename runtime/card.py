"""The adapter's README: what it is, how it was made and what it did, in place of PEFT's form."""

from pathlib import Path

import torch

from runtime import counted, ranks, reward_names, short_name
from runtime.metrics import kinds_table, with_error

CARD = """---
base_model: {base}
library_name: peft
pipeline_tag: {task}
tags: [lora, grpo, glm-image]
---

# A LoRA adapter for {base}, trained with GRPO

It adapts {what}. {steps}, groups of {group_size}, {prompts} per
step{each}; reward `{reward}`, learning rate {lr}, KL {kl_coef}, rank {lora_rank}, {height}x{width} pixels, seed {seed}.{base_note}

{table}

![before and after](before-after.png)

```python
import torch
from diffusers import GlmImagePipeline

FOLDER = "where this file is"
# torch.set_num_threads(1)  # ten times faster on a busy CPU, for tiny-glm-image
pipe = GlmImagePipeline.from_pretrained("{base}", dtype=torch.{dtype})  # on a GPU: .to("cuda")
pipe.{load}
settings = dict(num_inference_steps={eval_decode_steps}, guidance_scale={eval_guidance_scale})
settings["generator"] = torch.Generator().manual_seed(0)
{source}image = pipe("YOUR PROMPT", height={height}, width={width}, **settings).images[0]
```
"""

ROUNDED = """

It was trained, and the table below was made, on a base rounded to int8; the code below loads the base as it is. What that
changes: `python train.py --model {model} --adapter FOLDER --steps 0` judges the adapter there."""

SOURCE = """
# diffusers 0.42.1 joins the vision features of pictures, which transformers 5.23 wants apart: these lines part them.
policy = pipe.vision_language_encoder
read, channels = policy.get_image_tokens, policy.config.vision_config.hidden_size
policy.get_image_tokens = lambda joined, grids: read(joined.unflatten(0, (-1, channels)), grids)

from PIL import Image

settings["image"] = [Image.open("YOUR PICTURE").convert("RGB").resize(({width}, {height}))]  # multiples of 32
"""

LOAD_DECODER = "transformer.load_lora_adapter(FOLDER, prefix=None, use_safetensors=True)"
ADAPTERS = {  # folder: what it adapts, and how it loads
    "adapter": ("the language model, which writes the image codes", "vision_language_encoder.load_adapter(FOLDER)"),
    "decoder-adapter": ("the diffusion decoder, which paints the image codes", LOAD_DECODER),
}


def write_card(folder, settings, before, after, picture):
    """README.md and before-after.png in an adapter's folder. A model from a folder is called by that folder's name.

    before, after: records of evaluation.jsonl; or no record of before.
    """
    lines = ["| Mean reward +- standard error over prompts | before | after | pictures |", "|---|---|---|---|"]
    for prefix, name in (("", "training prompts"), ("held_out/", "held-out prompts")):
        for key in reward_names(after, prefix):
            then = with_error(before, key) if before else "none"
            now = with_error(after, key)
            lines.append(f"| {short_name(key)}, {name} | {then} | {now} | {after[prefix + 'images']} |")
    lines += kinds_table(*([before] if before else []), after)
    base = Path(settings.model).resolve().name if Path(settings.model).is_dir() else settings.model
    values = {**vars(settings), "base": base, "steps": counted(after["step"], "step"), "table": "\n".join(lines)}
    values["dtype"] = "bfloat16" if torch.cuda.is_available() else "float32"  # as trained; diffusers knows no "auto"
    values["prompts"] = counted(settings.prompts_per_step, "prompt")
    values["each"] = f" on each of {ranks.count()} processes" if ranks.count() > 1 else ""
    values["what"], values["load"] = ADAPTERS[folder.name]
    values["base_note"] = ROUNDED.format(model=settings.model) if settings.base == "int8" else ""
    values["task"] = "image-to-image" if settings.sources else "text-to-image"
    values["source"] = SOURCE.format(**vars(settings)) if settings.sources else ""
    if folder.name == "decoder-adapter":
        values |= {"lr": settings.decoder_lr, "group_size": settings.paintings}
    (folder / "README.md").write_text(CARD.format(**values), encoding="utf-8")
    picture.save(folder / "before-after.png")
