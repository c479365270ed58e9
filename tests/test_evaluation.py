"""What judges a run: held-out prompts, rewards that only judge, the curve, the card; the released
model's defaults."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import (
    TINY,
    adapter_of,
    judge_file,
    load_once,
    records,
    resume,
    shorten,
    tiny_settings,
)
from test_rewards import tiny_clip
from tqdm import tqdm

import train
from glm_image.model import RELEASE

SEVENS = "[7.0] * len(images)"


def test_what_only_judges_is_logged_and_not_trained_on(judged, one_step, capfd):
    """A judge that throws dice throws the same in every evaluation."""
    Path("other.txt").write_text("a green ring\na black square\n")
    judges = f"{judge_file('seven', SEVENS)},{judge_file('dice', 'torch.rand(len(images))')}"
    arguments = "--steps 1 --eval-prompts other.txt --eval-targets targets --out run"
    assert judged(arguments, "--eval-reward", judges) == 0
    before, after = records("run/evaluation.jsonl")
    for record in (before, after):
        assert record["reward/seven.py:judge"] == [7, None]
        rewards = record["reward/ssim"][0] + 0.5 * record["reward/mse"][0]
        assert record["reward"][0] == pytest.approx(rewards)
    dice = "reward/dice.py:judge"
    assert before[dice] == after[dice]
    assert not any("judge" in name for line in records("run/metrics.jsonl") for name in line)
    assert adapter_of("run") == adapter_of(one_step)
    output = "".join(capfd.readouterr())
    assert re.search(r"\| seven.py:judge +\| 7.000 +\| 7.000 +\|", output)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_held_out_prompts_without_targets_are_judged_by_what_applies(judged, capsys):
    Path("typed.txt").write_text("# type: a\na green ring\n# type: b\na black square\n")
    held_out = "--eval-prompts typed.txt --eval-targets none --eval-count 2 --eval-reward"
    assert judged(held_out, judge_file("seven", SEVENS), "--steps 0 --out run") == 0
    output = capsys.readouterr().out
    assert re.search(r"\| ssim +\| none +\|\n", output)
    assert re.search(r"\| - mean of types +\| 7.000 +\|\n", output)
    (record,) = records("run/evaluation.jsonl")
    assert "evaluating 2 prompts" in output
    assert record["reward"][0] is record["reward/ssim"][0] is None


def test_every_prompt_is_judged_by_its_own_target(judged):
    """In steps and in evaluations: one of the two prompts is drawn in red. What is trained for may
    be named again."""
    red = "(t.getpixel((8, 8))[0] > 200)"
    fits = judge_file("fits", f"[('red' in p) == {red} for p, t in zip(prompts, targets)]")
    arguments = f"--reward {fits} --eval-reward {fits} --eval-count 2"
    assert judged(arguments, "--prompts-per-step 2 --steps 1 --out run") == 0
    for record in records("run/evaluation.jsonl"):
        assert record["reward"] == [1, 0] and record["prompts"] == 2
    assert records("run/metrics.jsonl")[0]["reward"] == 1


def test_an_evaluation_is_no_part_of_a_step(judged, monkeypatch):
    """It has a bar of its own over its prompts; neither its seconds count nor the bar's. A resumed
    run counts on."""
    bars = []

    class Bar(tqdm):
        def update(self, count=1):
            bars.append((self.unit, self.initial, self.total, count))

        def unpause(self):
            bars.extend(["on"] * (not self.disable))

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("runtime.clock.tqdm", Bar)
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)  # a phase takes a second
    Path("new.txt").write_text("a green ring\n")
    arguments = "--eval-prompts new.txt --eval-targets none --eval-count 2 --eval-every 1"
    assert judged(arguments, "--prompts-per-step 2 --steps 1 --out run") == 0
    assert resume("run", "--steps 3") == 0
    prompt, first, later = ("prompt", 0, 1, 1), ("step", 0, 1, 1), ("step", 1, 3, 1)
    assert bars == [prompt, "on", first, prompt, later, prompt, "on", later, prompt]
    for line in Path("run/metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["seconds/score"] == 1


def test_the_released_models_defaults_run_at_tiny_size(tmp_path, monkeypatch, capsys):
    """Everything but sizes, the rewards' weights and numbers of steps is what zai-org/GLM-Image
    gets."""
    monkeypatch.chdir(tmp_path)
    shorten(monkeypatch.setattr)
    monkeypatch.setattr(train, "load", lambda model, device: load_once(str(TINY), device))
    monkeypatch.setattr("runtime.settings.is_tiny", lambda model: False)
    shutil.copytree(TINY, "released", ignore=shutil.ignore_patterns("*.safetensors"))
    tiny_clip("clip", "clip")
    flags = "--model released --height 32 --width 32 --eval-count 1 --group-size 2"
    flags += " --reward pickscore=clip:1,clip=clip:1 --eval-reward hps=clip"
    flags += " --steps 1 --prompts-per-step 1 --eval-decode-steps 1 --out run"
    assert train.main(flags.split()) == 0
    settings = json.loads(Path("run/settings.json").read_text())
    found = settings["decode_steps"], settings["guidance_scale"], settings["top_p"]
    assert found == (12, 1.5, 0.75)
    assert settings["prompts"] == "prompts/train.txt" and settings["targets"] is None
    before, _ = records("run/evaluation.jsonl")
    assert {f"reward/{name}" for name in ("pickscore", "clip", "hps")} <= before.keys()
    assert "| clip -" in capsys.readouterr().out  # for people without the folder


def test_sizes_the_released_model_was_never_trained_on_are_warned_of(capsys):
    for size, warned in (("512", True), ("1024", False), ("2048", False), ("2080", True)):
        train.parse_settings(["--model", RELEASE, "--height", size, "--width", size])
        assert ("warning" in capsys.readouterr().out) == warned
    for width, warned in (("128", False), ("160", True), ("12800", True)):
        tiny_settings("--width", width)
        assert ("trained on 16,384 pixels" in capsys.readouterr().out) == warned
