"""What a card would meet: memory of every card that README.md names, several GPUs, the pages' sums
and their code."""

import json
import os
import re
import runpy
import signal
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_decoder
from conftest import (
    CPU,
    QUICK,
    ROOT,
    TINY,
    build_run,
    painting_models,
    rolled_out,
    seeded,
    tiny_settings,
    words_of,
    write_reward,
)
from diffusers import GlmImagePipeline
from test_ranks import together
from world import draw

import train
from grpo import GRPO, Offload
from runtime import UserError, gpu

CUDA = torch.device("cuda", 0)
PAGES = ("README.md", "docs/memory.md", "docs/editing.md", "docs/deploy.md")
README, MEMORY, EDITING, DEPLOY = ((ROOT / name).read_text() for name in PAGES)
IDLE = {
    "12": (11.5,),
    "16": (16.0, 16.4),
    "24": (23.4, 24.9),
    "48": (47.0,),
    "80": (84.0,),
}  # 10^9 bytes free, by GB
SIZES = {
    "bfloat16": (17.8, 0.44, 13.86, 0.81),
    "int8": (9.7, 0.44, 7.06, 0.81),
}  # of the released models, in order


@cache
def released(base):
    """Models of those sizes, and an adapter of 0.19 GB."""
    models = [
        torch.nn.Linear(10**5, int(1e4 * size / 4), bias=False, device="meta")
        for size in SIZES[base]
    ]
    for model in models:
        model.requires_grad_(False)
    models[0].adapter = torch.nn.Linear(10**5, 475, bias=False, device="meta")
    return models


def planned(monkeypatch, free, host, *flags, parts=None):
    """What a run decides on such a machine: (whether models take turns, the size of
    micro-batches)."""
    for name, value in {
        "get_device_capability": (8, 0),
        "get_per_process_memory_fraction": 1.0,
        "mem_get_info": (free * 1e9, free * 1e9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(gpu, "host_memory", lambda: host * 1e9)
    parts = parts or train.Parts()
    settings = parts.parse(["--model", "zai-org/GLM-Image", *flags], parts.parser())
    settings.micro_batch_size = "auto"
    models = lambda settings, device: released(settings.base)
    return gpu.plan(parts.needed, models, settings, 288, CUDA), settings.micro_batch_size


def test_every_card_in_the_readme_is_taken(monkeypatch):
    rows = re.findall(r"^\| (\d+ GB.*?) \| (.*?) \| (.*?) \|$", README, flags=re.MULTILINE)
    named = [(size, cells) for sizes, *cells in rows for size in re.findall(r"\d+", sizes)]
    named.append(("12", ["does not fit"] * 2))  # said below the table
    assert sorted(size for size, _ in named) == sorted(IDLE)
    for size, cells in named:
        for host, cell in zip((28, 60), cells):
            for free in IDLE[size]:
                if cell == "does not fit":
                    with pytest.raises(UserError, match="too little memory"):
                        planned(monkeypatch, free, host, "--base", "int8")
                else:
                    flags = ["--base", "int8"] if "int8" in cell else []
                    turns, _ = planned(monkeypatch, free, host, *flags)
                    assert (turns is None) == (cell == "no flag needed"), (size, cell)
    # With a desktop on a card of 16 GB.
    assert planned(monkeypatch, 15.0, 28, "--base", "int8") == ("pinned", 2)
    assert planned(monkeypatch, 22.9, 60) == ("pinned", 2)  # and of 24 GB


def decoder_settings(*flags):
    return train_decoder.parse(words_of(flags), train_decoder.PARTS.parser())


def test_the_paths_of_the_decoder_are_counted_on_the_host_and_kept_once(monkeypatch):
    settings = decoder_settings("--model zai-org/GLM-Image --train both")
    needed = train_decoder.needed
    assert needed(released("bfloat16"), settings, 4, 0)[3] == 64 * 2**20 * (3 * 11 + 1)
    settings.paintings = settings.group_size = 8
    assert needed(released("bfloat16"), settings, 4, 0)[3] == 4 * 64 * 2**20 * (3 * 11 + 1)
    both = "--train", "both"
    planned(monkeypatch, 84, 7, *both, run_class=train_decoder.DecoderRun)
    with pytest.raises(
        UserError, match=r"and 2.3 of the host for the decoder's paths; .* 2.2 of the host"
    ):
        planned(monkeypatch, 84, 6.2, *both, run_class=train_decoder.DecoderRun)
    settings = decoder_settings("--model", TINY, *both, "--paintings 2 --decode-steps 4")
    run = build_run(settings, load_run=train_decoder.load_run)
    codes = torch.zeros(1, 16, dtype=torch.long)
    images, steps = run.decoder.paint_paths(prompts_of("a red circle"), codes, 2, settings, 3)
    assert len(images) == 2
    assert all(step.next_latents is after.latents for step, after in pairwise(steps))
    # On a GPU they would stay there beside the copies.
    assert not run.decoder.scheduler.recorded


def test_a_step_has_left_the_host_when_the_next_begins(quick):
    left = []

    def watched(*given):
        # Paths of two steps would be there at once.
        assert not any(reference() for reference in left)
        rolled, metrics = train_decoder.decoder_step(*given)
        left.extend(weakref.ref(each) for each in rolled.paths)
        return rolled, metrics

    parts = replace(train_decoder.PARTS, step=watched)
    flags = "--group-size 2 --decode-steps 2 --steps 3 --out run"
    assert quick(flags, parts=parts, usual=QUICK[:-2]) == 0 and len(left) == 3


def test_the_vae_has_a_turn_of_its_own(monkeypatch):
    """Beside the decoder it only reads sources."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    run, seen, stock = build_run(settings := tiny_settings("--group-size 2")), [], {}
    tokens = torch.randint(1024, (2, 16), generator=seeded(0))
    monkeypatch.setattr(
        run.policy, "sample", lambda *given: [type("Group", (), {"tokens": tokens})] * 2
    )
    run.offload = Offload(run.model.parts, CPU)
    up = lambda model: any(
        weight.data_ptr() != home.data_ptr() for weight, home in run.offload.homes[model]
    )
    for name in ("paint", "to_images"):
        stock[name] = getattr(run.model, name)
        look = lambda *given, name=name: (
            seen.append((name, *map(up, painting_models(run)))) or stock[name](*given)
        )
        monkeypatch.setattr(run.model, name, look)
    prompts = prompts_of("a red circle", "a blue cross")
    rolled_out(run, settings, {}, prompts, 5)
    assert seen == [("paint", True, True, False), ("to_images", False, False, True)] * 2


def test_what_was_left_is_freed_before_weights_are_copied_up(monkeypatch):
    """Rewards leave blocks behind, though no model has to leave after them."""
    calls, model = [], torch.nn.Linear(2, 2).requires_grad_(False)
    offload = Offload([model], CPU, pin=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(model.weight.data_ptr()))
    offload.all_but(model)
    assert calls == [offload.homes[model][0][1].data_ptr()] != [model.weight.data_ptr()]


def test_weights_that_cannot_be_locked_stay_where_they_are(monkeypatch, capsys):
    def refuse(tensor):
        raise torch.AcceleratorError("CUDA error: out of memory\nCompile with ...")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    home = model.weight.data_ptr()
    assert gpu.place([model], CPU, None, "pinned").homes[model][0][1].data_ptr() == home
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("memory: no more can be page-locked (CUDA error: out of memory): ")


# ---- several GPUs --------------------------------------------------------------------------------


def hurry():
    """For `prepare`: a minute of patience is 0.2 seconds, and rank 1 works 2.5 on its update."""
    init, update = dist.init_process_group, GRPO.update
    shorter = lambda *given, timeout, **more: init(*given, timeout=timeout / 300, **more)
    dist.init_process_group = lambda *given, **more: (
        print(more["timeout"]) or shorter(*given, **more)
    )

    def work(self, groups):
        time.sleep(2.5 * int(os.environ["RANK"]))
        return update(self, groups)

    GRPO.update = work


def test_a_rank_that_has_nothing_to_learn_waits_for_the_others_whole_update(start):
    reward = write_reward("if os.environ['RANK'] == '0':\n    return torch.ones(len(images))")
    codes, outputs = together(start, *reward, "--steps", "1", "--out", "run", prepare=hurry)
    assert codes == [0, 0], outputs
    assert outputs[0].startswith(f"{timedelta(hours=3)}\n")


def vanish():
    """For `prepare`: rank 1 is killed in its first update."""
    if os.environ["RANK"] == "1":
        GRPO.update = lambda self, groups: os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_vanishes_in_an_update_is_one_line(start):
    codes, outputs = together(
        start, *write_reward(""), "--steps", "1", "--out", "run", prepare=vanish
    )
    assert codes == [2, -signal.SIGKILL] and "Traceback" not in outputs[0]
    assert outputs[0].strip().splitlines()[-1].startswith("error: rank 0: another rank has gone: ")


# ---- pages ---------------------------------------------------------------------------------------


def test_the_times_on_the_page_follow_from_its_rates():
    """By the formula in benchmarks/README.md, whose numbers stand in its text."""
    for words in (
        "6.5e13",
        "25 GB",
        "49 GB",
        "434 passes",
        "139.5",
        "1,280",
        "4 s for the rewards",
    ):
        assert words in (ROOT / "benchmarks" / "README.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| (\d+) \| ([\d.]+) \| (.*?) minutes \| (.*?) hours \| (.*?) \|$",
        MEMORY,
        re.MULTILINE,
    )
    assert len(rows) >= 9
    for card, operations, bandwidth, minutes, hours, both in rows:
        a_pass = 6.5e13 / (int(operations) * 1e12)
        codes = 1280 * (49e9 if "int8" in card else 25e9) / (float(bandwidth) * 1e12)
        step = 434 * a_pass + codes + 4
        evaluation = 64 * 60.6 * a_pass + 4 * (codes + 4)
        learning = (64 * 139.5 + 50) * a_pass + codes + 16
        assert minutes == f"{step / 60:.1f}", card
        assert hours == f"{(200 * step + 5 * evaluation) / 3600:.0f}", card
        assert both == f"{learning / 60:.0f} minutes", card


def saved_in_bfloat16(folder):
    GlmImagePipeline.from_pretrained(TINY, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("page", [README, EDITING], ids=["README", "editing"])
def test_the_code_for_the_release_paints_with_files_in_bfloat16(page, tmp_path, monkeypatch):
    """At the size of the tiny model, and on a CPU."""
    monkeypatch.chdir(tmp_path)
    draw((("circle", "red"), None, None, None)).save("photo-of-mine.png")
    adapter = re.search(r'load_adapter\("(.*?)"\)', page)[1]
    build_run(tiny_settings()).policy.model.save_pretrained(adapter)
    blocks = re.findall(r"```python\n(.*?)```", page + DEPLOY * (page == README), flags=re.DOTALL)
    first, second, *_ = [block for block in blocks if "Pipeline" in block or page == EDITING]
    own = {
        '"tiny-glm-image': f'"{TINY}',
        '"zai-org/GLM-Image"': repr(saved_in_bfloat16(tmp_path / "release")),
    }
    own |= {
        "1024": "128",
        "num_inference_steps=30": "num_inference_steps=2",
        '"cuda"': '"cpu"',
        '"photo.png"': '"photo-of-mine.png"',
    }
    for name, code in (("tiny", first), ("release", first + second if page == EDITING else second)):
        for words, here in own.items():
            code = code.replace(words, here)
        Path(f"{name}.py").write_text(code)
        runpy.run_path(f"{name}.py")
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_the_code_for_random_weights_makes_a_model_that_trains(quick, tmp_path):
    """With sizes that a CPU has, in place of the released ones."""
    code = next(
        code
        for code in re.findall(r"```python\n(.*?)```", MEMORY, flags=re.DOTALL)
        if "released.json" in code
    )
    sizes = json.loads((ROOT / "benchmarks/released.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    sizes["vision_language_encoder"]["text_config"] |= text | {"rope_parameters": rope}
    sizes["transformer"] |= {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32}
    sizes["text_encoder"] |= {"num_layers": 1}
    sizes["vae"] |= {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
    Path("sizes.json").write_text(json.dumps(sizes))
    for words, here in {
        "benchmarks/released.json": "sizes.json",
        "tiny-glm-image": TINY,
        '"cuda"': '"cpu"',
    }.items():
        code = code.replace(words, str(here))
    Path("make.py").write_text(code)
    try:
        runpy.run_path("make.py")
    finally:
        torch.set_default_dtype(torch.float32)
    assert quick("--model random --reward mse --targets targets --steps 1 --out run") == 0
