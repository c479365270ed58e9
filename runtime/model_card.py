"""The README.md of a trained adapter, as the hub reads it: what it gained, how to load it."""

import json
import shlex
import shutil
import textwrap
from pathlib import Path

from rewards import parse_rewards
from runtime.checkpoints import CONFIG, needs_peft
from runtime.errors import option
from runtime.evaluation import evaluation_table
from runtime.resume import portable
from runtime.words import counted

# A README.md without this line is the user's own.
MARK = "<!-- A resumed run writes this page again. Without this line it leaves the page alone. -->"
# Settings by which its example paints.
SHOWN = "temperature", "top_p", "height", "width", "eval_decode_steps", "eval_guidance_scale"
LOADED = {  # how the stock pipeline loads an adapter, and how the hub names it
    "adapter": ("policy.load_adapter(adapter)", "language model", "peft"),
    "decoder-adapter": (
        "pipe.transformer.load_lora_adapter(adapter, prefix=None, use_safetensors=True)",
        "diffusion decoder",
        "diffusers",
    ),
}

PAGE = """\
---
{front}
pipeline_tag: text-to-image
tags:
- lora
- grpo
---
{mark}

# {title}

A LoRA adapter of the {part} of `{model}`, {how}.{other}
{picture}{evaluation}
## How to load it

```python
import diffusers
import torch

adapter = "."  # this folder, or its place on the hub: NAME/REPOSITORY
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
pipe = diffusers.GlmImagePipeline.from_pretrained({name}, dtype=dtype)
{load}
# It samples as the evaluation did, and codes alone.
policy = pipe.vision_language_encoder
codes = pipe.transformer.config.prior_vq_quantizer_codebook_size
policy.generation_config.suppress_tokens = [*range(codes, policy.lm_head.out_features)]
policy.generation_config.update(temperature={temperature}, top_p={top_p})
pipe.to(device)  # with less memory: pipe.enable_model_cpu_offload()
size = {{"height": {height}, "width": {width}}}
painter = {{"num_inference_steps": {eval_decode_steps}, "guidance_scale": {eval_guidance_scale}}}
pipe({prompt}, **size, **painter).images[0].save("picture.png")
```

## Settings

`python train.py --config settings.json` begins a run like it:

```text
{flags}
```

Versions: {versions}.
"""


def write_cards(run, adapters):
    """In the folder of each adapter: README.md, the picture, settings.json.

    run: a RunFolder. adapters: the names of those that it has exported.
    """
    for name in adapters:
        folder = run.out / name
        name_base(folder / CONFIG, run.settings)
        shutil.copy(run.out / "settings.json", folder)
        if (run.out / "before-after.png").exists():
            shutil.copy(run.out / "before-after.png", folder)
        card = folder / "README.md"
        if not card.exists() or MARK in card.read_text("utf-8"):
            card.write_text(page(folder, run, adapters), "utf-8")


def name_base(config, settings):
    """PEFT has written the folder that the base model was read from, which may be a cache."""
    base = portable(vars(settings))["model"]
    values = json.loads(config.read_text()) | {"base_model_name_or_path": base}
    config.write_text(json.dumps(values, indent=2))


def page(folder, run, adapters):
    """The text of README.md. folder: the adapter's, which has the picture already."""
    settings, records = run.settings, run.records
    name, values = folder.name, portable(vars(settings))
    load, part, library = LOADED[name]
    if name == "adapter" and needs_peft(folder):
        load = "from peft import PeftModel\n\npolicy = PeftModel.from_pretrained(policy, adapter)"
    load = load.replace("policy", "pipe.vision_language_encoder")
    steps = f"trained by GRPO for {counted(records['metrics'][-1]['step'], 'step')}"
    frozen = "with which the run began, and which it did not train"
    others = [f" Load `{each}` of the same run, too." for each in adapters if each != name]
    on_hub = [] if Path(settings.model).exists() else [f"base_model: {settings.model}"]
    given = {x: y for x, y in values.items() if y is not None and x not in ("out", "tracker")}
    flags = [f"{option(x)} {shlex.quote(str(y))}" for x, y in given.items()]
    of_run = {x: y for x, y in run.made_of["versions"].items() if y is not None}
    picture = "\n![Held-out prompts before training and after](before-after.png)\n"
    return PAGE.format(
        front="\n".join([*on_hub, f"library_name: {library}"]),
        mark=MARK,
        title=f"{Path(settings.model).name}, trained by GRPO: {settings.reward}",
        part=part,
        model=values["model"],
        name=json.dumps(values["model"]),
        load=load,
        how=steps if name in run.trainers else frozen,
        other="".join(others),
        picture=picture if (folder / "before-after.png").exists() else "",
        evaluation=evaluation(settings, records["evaluation"]),
        prompt=json.dumps(records["groups"][-1]["prompt"], ensure_ascii=False),
        flags=textwrap.fill(" ".join(flags), 100, break_on_hyphens=False, break_long_words=False),
        versions=", ".join(f"{x} {y}" for x, y in of_run.items()),
        **{x: values[x] for x in SHOWN},
    )


def evaluation(settings, evaluations):
    """The table of the last one beside that before training, if there was any."""
    if not evaluations:
        return ""
    by_type = evaluations[-1].get("judge") or next(iter(parse_rewards(settings.reward)))
    _, table = evaluation_table(evaluations, by_type).split("\n", 1)
    words = "Before -> after training; mean +- standard error over prompts."
    return f"\n## Evaluation\n\n{words}\n\n{table}\n"
