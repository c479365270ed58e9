"""The README.md of a trained adapter, as the hub reads it: what it gained, how to load it."""

import json
import shutil
from html import escape
from pathlib import Path

from huggingface_hub import ModelCardData

from glm_image.adapters import ADAPTERS
from inputs import find_path
from runtime.numbers import counted, evaluation_table

PAGE = """\
---
{head}
---

# {title}

A LoRA adapter of the {part} of `{model}`, {made}.

![Held-out prompts before training and after](before-after.png)

{table}

settings.json has its settings: with `--config settings.json` the trainer begins a run like it.

```python
import diffusers
import torch

adapter = "."  # this folder, or its place on the hub: NAME/REPOSITORY
dtype = torch.float32  # on a GPU torch.bfloat16
pipe = diffusers.GlmImagePipeline.from_pretrained({model!r}, dtype=dtype)
policy = pipe.vision_language_encoder
{load}
# It samples as in the evaluation, and codes alone.
codes = pipe.transformer.config.prior_vq_quantizer_codebook_size
policy.generation_config.suppress_tokens = [*range(codes, policy.lm_head.out_features)]
policy.generation_config.update(temperature={temperature}, top_p={top_p})
# On a GPU: pipe.to("cuda"), or with less memory pipe.enable_model_cpu_offload().
size = {{"height": {height}, "width": {width}}}
painter = {{"num_inference_steps": {eval_decode_steps}, "guidance_scale": {eval_guidance_scale}}}
pipe({prompt}, **size, **painter).images[0].save("picture.png")
```
"""


def write_cards(run, adapters):
    """In the folder of each adapter: README.md, and copies of the picture and settings.json.

    run: a Record. adapters: the names of those that it has exported.
    """
    for name in adapters:
        for file in ("before-after.png", "settings.json"):
            if (run.out / file).exists():
                shutil.copyfile(run.out / file, run.out / name / file)
        (run.out / name / "README.md").write_text(card(name, run, adapters), "utf-8")


def card(name, run, adapters):
    """The text of README.md."""
    settings, evaluations = run.settings, run.records["evaluation"]
    # A type of prompts may have anything in it.
    table = escape(evaluation_table(evaluations), quote=False) if evaluations else ""
    part, library, load = ADAPTERS[name]
    is_folder = Path(find_path(settings.model)).exists()
    head = ModelCardData(
        base_model=None if is_folder else settings.model,
        library_name=library,
        pipeline_tag="text-to-image",
        tags=["lora", "grpo"],
    )
    made = f"from {counted(run.saved, 'step')} of GRPO"
    made += f", begun from `{settings.adapter}`" if settings.adapter else ""
    if name not in run.trainers:
        made = f"as it was in `{settings.adapter}`: this run trained another part"
    made += "".join(f". Load `{x}` of the same run, too" for x in adapters if x != name)
    if settings.base == "int8":
        made += ". In training and evaluation the base was rounded to int8"
    if hasattr(settings, "sources"):
        made += ". It edits: what the call needs then is in the trainer's docs/decoder.md"
    words = {
        "head": head,
        "title": f"{Path(settings.model).name}, trained by GRPO: {settings.reward}",
        "part": part,
        "made": made,
        "table": table.replace("\n", "\n\n", 1),  # a title, and rows
        "load": load,
        "prompt": json.dumps(run.records["groups"][-1]["prompt"], ensure_ascii=False),
    }
    return PAGE.format_map(vars(settings) | words)
