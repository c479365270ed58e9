"""The adapter's README: what it is, how it was made and what it did, in place of PEFT's form."""

from pathlib import Path

from runtime import format_number, ranks, reward_names

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


def write_card(folder, settings, before, after, picture):
    """README.md and before-after.png in an adapter's folder. A model from a local folder is named by that folder's name.

    settings: of the half that the adapter belongs to. before, after: records of evaluation.jsonl.
    """
    base = Path(settings.model).resolve().name if Path(settings.model).is_dir() else settings.model
    lines = ["| Mean reward | before | after | pictures |", "|---|---|---|---|"]
    for prefix, name in (("", "training prompts"), ("held_out/", "held-out prompts")):
        for key in reward_names(after, prefix):
            numbers = f"{format_number(before[key])} | {format_number(after[key])} | {after[prefix + 'images']}"
            lines.append(f"| {key.removeprefix(prefix).removeprefix('reward/')}, {name} | {numbers} |")
    each = f" on each of {ranks.count()} GPUs" if ranks.count() > 1 else ""
    values = {**vars(settings), "steps": after["step"], **dict(zip(("what", "load"), HALVES[folder.name]))}
    card = CARD.format(base=base, table="\n".join(lines), each=each, **values)
    (folder / "README.md").write_text(card, encoding="utf-8")
    picture.save(folder / "before-after.png")
