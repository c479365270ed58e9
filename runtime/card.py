"""The adapter's README: what it is, how it was made and what it did, in place of PEFT's form."""

from pathlib import Path

from runtime import format_number

CARD = """---
base_model: {base}
library_name: peft
pipeline_tag: text-to-image
tags: [lora, grpo, glm-image]
license:
---

# A LoRA adapter for {base}, trained with GRPO

It adapts {what}. {steps} steps, groups of {group_size}, {prompts_per_step} prompts a
step{each}; reward `{reward}`, learning rate {lr}, KL {kl_coef}, rank {lora_rank}, {height}x{width} pixels, seed {seed}.

{table}

![before and after](before-after.png)

```python
import torch
from diffusers import GlmImagePipeline

FOLDER = "where this file is"
pipe = GlmImagePipeline.from_pretrained("{base}", dtype=torch.bfloat16).to("cuda")
pipe.{load}
settings = dict(num_inference_steps={eval_decode_steps}, guidance_scale={eval_guidance_scale})
image = pipe("YOUR PROMPT", height={height}, width={width}, **settings).images[0]
```
"""

HALVES = {  # folder: what it adapts, and how it loads
    "adapter": ("the language model, which writes the image codes", "vision_language_encoder.load_adapter(FOLDER)"),
    "decoder-adapter": (
        "the diffusion decoder, which paints the image codes",
        "transformer.load_lora_adapter(FOLDER, prefix=None, use_safetensors=True)",
    ),
}


def write_card(path, settings, before, after, num_ranks=1):
    """`before`, `after`: records of evaluation.jsonl. A model from a local folder is named by the folder's name."""
    base = Path(settings.model).resolve().name if Path(settings.model).is_dir() else settings.model
    lines = ["| Mean reward | before | after | pictures |", "|---|---|---|---|"]
    for prefix, name in (("", "training prompts"), ("held_out/", "held-out prompts")):
        for key in [k for k in after if k == f"{prefix}reward" or k.startswith(f"{prefix}reward/")]:
            numbers = f"{format_number(before[key])} | {format_number(after[key])} | {after[prefix + 'images']}"
            lines.append(f"| {key.removeprefix(prefix).removeprefix('reward/')}, {name} | {numbers} |")
    each = f" on each of {num_ranks} GPUs" if num_ranks > 1 else ""
    values = {**vars(settings), "steps": after["step"], **dict(zip(("what", "load"), HALVES[path.parent.name]))}
    if path.parent.name == "decoder-adapter":
        values["lr"] = settings.decoder_lr
        values["group_size"] = settings.paintings if settings.train == "both" else settings.group_size
    path.write_text(CARD.format(base=base, table="\n".join(lines), each=each, **values), encoding="utf-8")
