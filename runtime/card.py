"""The adapter's README, in place of PEFT's empty form: what it adapts, how it loads, what it did, its settings."""

import json
from pathlib import Path

from runtime import checkpoints, counted, reward_names, short_name
from runtime.metrics import kinds_table, with_error

README = """---
base_model: {base}
library_name: peft
tags: [lora, grpo, glm-image]
---

# A LoRA adapter for {base}, trained with GRPO

It adapts {what}, and was trained for {steps}. With FOLDER the folder of this file, it loads into the stock pipeline:
`pipe.{load}`

{table}

![before and after](before-after.png)

```json
{settings}
```
"""

ADAPTERS = {  # folder: what it adapts, and how it loads
    "adapter": ("the language model, which writes the image codes", "vision_language_encoder.load_adapter(FOLDER)"),
    "decoder-adapter": (
        "the diffusion decoder, which paints the image codes",
        "transformer.load_lora_adapter(FOLDER, prefix=None, use_safetensors=True)",
    ),
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
    what, load = ADAPTERS[folder.name]
    shown = json.dumps(checkpoints.saved(settings), indent=2)
    steps = counted(after["step"], "step")
    text = README.format(base=base, what=what, load=load, steps=steps, table="\n".join(lines), settings=shown)
    (folder / "README.md").write_text(text, encoding="utf-8")
    picture.save(folder / "before-after.png")
