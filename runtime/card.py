"""The adapter's README, in place of PEFT's empty form: what it adapts, how it loads, what it did, its settings."""

import json
from pathlib import Path

from runtime import checkpoints, counted
from runtime.metrics import PROMPTS, kinds_table, summary

README = """---
base_model: {base}
library_name: peft
tags: [lora, grpo, glm-image]
---

# A LoRA adapter for {base}, trained with GRPO

It adapts {what}, and was trained for {steps}. With FOLDER the folder of this file, it loads into the stock pipeline:
`pipe.{load}`

Means with standard errors over prompts, before -> after:

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
    """README.md and before-after.png in an adapter's folder. before, after: of evaluation.jsonl; before may be None."""
    records = [before, after] if before else [after]
    lines = [f"- {name} prompts: {summary(prefix, *records)}" for prefix, name in PROMPTS.items()]
    lines += kinds_table(*records)
    base = Path(settings.model).resolve().name if Path(settings.model).is_dir() else settings.model
    what, load = ADAPTERS[folder.name]
    shown = json.dumps(checkpoints.saved(settings), indent=2)
    steps = counted(after["step"], "step")
    text = README.format(base=base, what=what, load=load, steps=steps, table="\n".join(lines), settings=shown)
    (folder / "README.md").write_text(text, encoding="utf-8")
    picture.save(folder / "before-after.png")
