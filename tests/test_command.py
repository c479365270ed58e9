"""The command line: what a run prints and leaves, what it refuses, which prompts and seeds a step takes, its numbers."""

import asyncio
import importlib.machinery
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    RED_CIRCLE,
    ROOT,
    adapter_of,
    build_run,
    records,
    shorten,
    tiny_settings,
    write_prompts,
    write_reward,
)
from make import draw
from PIL import Image

import train
from grpo import compute_advantages
from rewards import REWARDS
from runtime import UserError, log, ranks, settings
from runtime.data import Prompts, read_prompts
from runtime.log import Phases
from runtime.metrics import (
    format_step,
    reward_metrics,
    step_metrics,
    why_nothing_was_learned,
)
from runtime.settings import TINY

NAN = math.nan
SHAPES = [
    "--reward",
    "ssim:1",
    "--eval-reward",
    "",
    "--prompts",
    f"{TINY}/prompts.txt",
]  # a reward that downloads nothing


def command(folder, *arguments, environment=os.environ):
    """train.py as a user starts it."""
    words = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(words, check=False, cwd=folder, capture_output=True, text=True, timeout=200, env=environment)


# ---- what a run leaves ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    """The real thing: two steps on whole pictures of the default size, KL, two iterations and two rewards on."""
    folder = tmp_path_factory.mktemp("real")
    write_prompts(folder)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = command(
        folder, "--model", TINY, "--prompts", "prompts.txt", "--targets", "targets", "--steps", "2",
        "--prompts-per-step", "2", "--group-size", "3", "--iterations", "2", "--reward", "ssim:1,mse:0.5",
        "--eval-prompts", "prompts.txt", "--eval-targets", "targets", "--eval-count", "2", "--eval-every", "0",
        "--temperature", "3", environment=environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return folder, process


def test_a_run_leaves_every_promised_file(real_run):
    out = real_run[0] / "runs" / "1"
    left = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    expected = {"settings.json", "metrics.jsonl", "evaluation.jsonl", "before-after.png", "group-000001.png"}
    expected |= {"group-000002.png", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    expected |= {f"evaluation/{step}/{i}-{j}.png" for step in ("000000", "000002") for i in (1, 2) for j in (1, 2, 3)}
    assert expected <= left
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["group_size"], settings["lr"], settings["top_p"]) == (3, 3e-4, 0.95)
    for picture in ("before-after.png", "group-000002.png", "evaluation/000000/1-1.png"):
        assert np.asarray(Image.open(out / picture).convert("RGB")).std() > 30, "something is painted"


def test_a_run_logs_every_step_and_evaluation(real_run):
    out = real_run[0] / "runs" / "1"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    names = ["loss", "policy_loss", "kl", "clip_fraction", "ratio_mean", "grad_norm", "max_logprob_gap", "skipped"]
    names += ["reward", "reward_std", "reward/ssim", "reward/mse", "groups_without_spread", "unscored"]
    names += [f"seconds/{phase}" for phase in ("sample", "paint", "score", "reference", "update")]
    assert all(math.isfinite(line[name]) for line in lines for name in names)
    for line in lines:  # the log is the weighted sum of raw rewards, though z-scores were maximised
        assert line["reward"] == pytest.approx(line["reward/ssim"] + 0.5 * line["reward/mse"], abs=1e-5)
        assert 0 < line["mean_logprob_gap"] <= line["max_logprob_gap"] < 1e-3
        assert line["grad_norm"] > 0
    before, after = records(out / "evaluation.jsonl")
    assert (before["step"], after["step"]) == (0, 2)
    assert before["images"] == after["images"] == 6 and before["prompts"] == 2
    assert before["reward"] != after["reward"], "the adapter has moved"


def test_a_run_says_what_it_does(real_run):
    output = real_run[1].stdout + real_run[1].stderr
    for words in (
        "device: CPU in float32, threads: 1", "--model FOLDER_OR_ID chooses another", "group_size=3", "kl_coef=0.2",
        "combine=zscore", "a step: 6 pictures of about 272 codes, 6 decoder passes each", "2 prompts, 2 held out; what the run", "step 1/2 | reward", "an evaluation: 12 pictures of",
        "step 2/2", "evaluation after 0 steps, training prompts: reward", "(6 images: 2 prompts x 3)",
        "evaluation after 2 steps, held-out prompts", "held-out prompts, before -> after: reward 0.",
    ):  # fmt: skip
        assert words in output
    assert "evaluating 4 prompts" in output and not re.search(r"\r|\x1b|%\|", output), "in a file no bars, only lines"
    assert real_run[1].stdout.splitlines()[-1].endswith("what it leaves is in runs/1")


def test_the_forecast_of_a_run_whose_decoder_learns(capsys):
    """A step paints one code sequence of a prompt, an evaluation paints as many as in any run."""
    run = tiny_settings("--train", "decoder", "--group-size", "8", "--guidance-scale", "1.5",
                        "--prompts-per-step", "4", "--eval-count", "16")  # fmt: skip
    run.prompts = "a-folder-" * 11
    settings.print_start(run, Path("runs/1"), CPU, 32, 16)
    output = capsys.readouterr().out
    assert "a step: 32 pictures of about 272 codes, 12 decoder passes each" in output
    assert "an evaluation: 256 pictures of about 272 codes, 6 decoder passes each" in output
    assert f"prompts={run.prompts}" in output, "a path can be copied"


def test_the_same_seed_gives_the_same_run(quick):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert quick("--steps", "2", "--seed", str(seed), "--out", out) == 0
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        assert records(f"a/{name}") == records(f"b/{name}")
    assert records("a/metrics.jsonl") != records("c/metrics.jsonl")
    assert adapter_of("a") == adapter_of("b") != adapter_of("c")


def test_out_is_by_default_the_next_free_folder(quick):
    Path("runs/2").mkdir(parents=True)
    for _ in range(2):
        assert quick("--steps", "0") == 0
    assert sorted(os.listdir("runs")) == ["1", "2", "3"]
    assert os.listdir("runs/2") == []


def test_runs_begun_together_never_share_a_folder(quick, monkeypatch, capsys):
    """Another begins while this one loads its model: it takes the next number, or is refused before it loads."""
    load, begun = train.load, []

    def slowly(settings, device):
        if not begun:
            begun.append(True)
            assert quick("--steps", "1") == 0
            assert quick("--steps", "1", "--out", "runs/1") == 2
            assert "runs/1 already holds a run" in capsys.readouterr().err
        return load(settings, device)

    monkeypatch.setattr(train, "load", slowly)
    assert quick("--steps", "2") == 0
    assert sorted(os.listdir("runs")) == ["1", "2"]
    assert [len(records(f"runs/{name}/metrics.jsonl")) for name in "12"] == [2, 1]


def test_targets_are_sorted_as_people_count(tmp_path):
    names = ["1.png", "2.png", "10.png", "11.png"]
    for i, name in enumerate(names):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / name)
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\n", encoding="utf-8-sig")
    prompts = read_prompts(tmp_path / "prompts.txt", tmp_path, None, (8, 8))
    assert prompts.texts == ["a", "b", "c", "d"], "without the mark that some editors write"
    assert [target.getpixel((0, 0))[0] for target in prompts.targets] == [0, 1, 2, 3]


def test_pictures_and_evaluations_come_when_asked_for(quick, monkeypatch):
    monkeypatch.setattr(log, "SAMPLE_EVERY", 3)
    assert quick("--steps", "5", "--eval-every", "2", "--out", "run") == 0
    groups = sorted(file.name for file in Path("run").glob("group-*"))
    assert groups == ["group-000001.png", "group-000003.png", "group-000005.png"]
    assert [record["step"] for record in records("run/evaluation.jsonl")] == [0, 2, 4, 5]


def test_prompts_of_every_kind_work(quick):
    prompts = [
        "一只红色的圆 「你好」",
        "вывеска “привет”",
        "don't say \"hi\" or 'bye' or “so”, 「它」",
        "a circle " * 400,
    ]
    Path("prompts.txt").write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    for number in (3, 4):
        shutil.copy("targets/1.png", f"targets/{number}.png")
    assert quick("--steps", "2", "--prompts-per-step", "2", "--eval-count", "4", "--out", "run") == 0
    assert records("run/evaluation.jsonl")[0]["prompts"] == 4


def test_groups_jsonl_has_the_prompts_and_rewards_of_all_groups(quick):
    """The reward counts its pictures, and leaves out each third."""
    Path("mine.py").write_text(
        "seen = []\n\ndef count(images, prompts, targets):\n    seen.extend(images)\n"
        "    numbers = range(len(seen) - len(images), len(seen))\n"
        "    return [float('nan') if i % 3 == 2 else i for i in numbers]\n"
    )
    both = ["--train", "both", "--paintings", "2", "--decode-steps", "2"]
    for name, flags, size in (("codes", [], 2), ("both", both, 4)):
        arguments = ["--reward", "mine.py:count,mse:0.5", "--prompts-per-step", "2", "--steps", "2", *flags]
        assert quick(*arguments, "--order", "file", "--out", name) == 0
        groups = records(f"{name}/groups.jsonl")
        assert [group["step"] for group in groups] == [1, 1, 2, 2]
        assert [group["prompt"] for group in groups] == Path("prompts.txt").read_text().splitlines() * 2
        first = 2 + 2 * 2  # pictures of the trial, and of two evaluations
        numbers = [None if i % 3 == 2 else i for i in range(first, first + 4 * size)]
        assert [value for group in groups for value in group["rewards"]["mine.py:count"]] == numbers
        for step, line in enumerate(records(f"{name}/metrics.jsonl")):
            mses = [value for group in groups[2 * step :][:2] for value in group["rewards"]["mse"]]
            assert len(mses) == 2 * size and np.mean(mses) == pytest.approx(line["reward/mse"])


def test_a_group_is_judged_while_the_next_is_painted(quick, monkeypatch):
    """The judge of the first waits for the second to be begun; the last one's ends after the painting."""
    stock_paint, painting = train.paint, threading.Event()

    def paint(pipe, prompt, *given):
        if prompt.startswith("a blue"):
            painting.set()
        return stock_paint(pipe, prompt, *given)

    async def judge(images, prompts, targets):
        return [float(await asyncio.to_thread(painting.wait, 20))] * len(images)

    monkeypatch.setattr(train, "paint", paint)
    settings = tiny_settings("--height", "32", "--width", "32", "--decode-steps", "1", "--group-size", "2")
    prompts = Prompts(Path("prompts.txt").read_text().splitlines())
    rolled = train.rollout(build_run(settings), settings, {"judge": (judge, 1.0)}, prompts, 0)
    assert rolled.raw_rewards["judge"].tolist() == [1] * 4


def test_prompts_sampled_a_few_at_a_time_are_as_if_sampled_side_by_side(quick, monkeypatch):
    prompts = Prompts(["a red circle", "a blue cross", "a red cross"])  # equally long: no padding to round differently
    flags = ["--height", "32", "--width", "32", "--decode-steps", "1", "--temperature", "9", "--top-p", "1"]
    flags += ["--group-size", "2"]
    run, found, sampled = build_run(tiny_settings(*flags)), [], []
    sample = run.policy.sample

    def counted(encoded, *given):
        sampled.append(len(encoded))
        if len(sampled) == 9:  # of the last rollout
            raise train.NotFinite([0])
        return sample(encoded, *given)

    monkeypatch.setattr(run.policy, "sample", counted)
    batches = [[], ["--sample-batch", "2"], ["--sample-batch", "1"]]
    rollout = lambda batch: train.rollout(run, tiny_settings(*flags, *batch), {}, prompts, 7)
    found = [rollout(batch) for batch in batches]
    assert sampled == [3, 2, 1, 1, 1, 1]
    for other in found[1:]:
        for one, another in zip(found[0].groups, other.groups, strict=True):
            assert torch.equal(one.tokens, another.tokens)
            torch.testing.assert_close(one.old_logprobs, another.old_logprobs, atol=1e-5, rtol=0)
        assert [image.tobytes() for image in other.images] == [image.tobytes() for image in found[0].images]
    assert len({tuple(row) for group in found[0].groups for row in group.tokens.tolist()}) == 6
    with pytest.raises(UserError, match="sampled for 'a red cross' are not finite"):
        rollout(batches[-1])


def test_tensorboard_gets_numbers_and_pictures_of_one_run_however_often_resumed(quick):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert quick("--steps", "2", "--out", "run", "--tracker", "tensorboard") == 0
    shutil.rmtree("run/checkpoints/000002")  # as if the second step had been killed before it was saved
    time.sleep(1)  # its files are named by the second
    assert train.main(["--resume", "run", "--steps", "3"]) == 0
    events = EventAccumulator("run/tensorboard")
    events.Reload()
    written = [record["reward"] for record in records("run/metrics.jsonl")]
    assert [event.value for event in events.Scalars("reward")] == pytest.approx(written)
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3]
    assert {"grad_norm", "evaluation/reward"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Images("group")] == [1, 3]
    assert [event.step for event in events.Images("before_after")] == [3]
    assert b'"group_size": 2' in events.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0]


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_trackers_know_a_resumed_run_and_its_settings(quick, monkeypatch, kind):
    """A stand-in for the package: which calls reach it."""
    package, seen = types.ModuleType(kind), []
    package.__spec__ = importlib.machinery.ModuleSpec(kind, None)
    package.Image = lambda array: array
    package.config = SimpleNamespace(update=lambda values, **options: seen.append(("settings", values["lr"])))
    tracked = {}

    def log(values, step):
        tracked.update(values)
        if "reward" in values:
            seen.append(("step", step))

    run = SimpleNamespace(log=log, finish=lambda: seen.append("finish"))
    package.init = lambda **options: seen.append(options) or run
    monkeypatch.setitem(sys.modules, kind, package)
    assert quick("--steps", "1", "--tracker", kind, "--out", "run") == 0
    assert train.main(["--resume", "run", "--steps", "2"]) == 0
    begun = seen[0]
    assert seen == [begun, ("settings", 3e-4), ("step", 1), "finish", begun, ("settings", 3e-4), ("step", 2), "finish"]
    assert begun["resume"] == "allow" and begun["project"] == "grpo-glm-image" and "-run-" in begun["name"]
    assert begun["name"].endswith(Path("run/tracker-id").read_text())
    assert quick("--steps", "1", "--tracker", kind, "--out", "other/run") == 0
    assert {"evaluation/reward", "evaluation/held_out/reward"} < tracked.keys()
    assert not {"evaluation/step", "evaluation/images", "evaluation/held_out/prompts"} & tracked.keys(), "no curves"
    assert ({"before_after", "group"} <= tracked.keys()) == (kind == "wandb")
    assert seen[8]["name"] != begun["name"] and seen[8].get("id") != begun.get("id", 0)


# ---- settings and refusals ------------------------------------------------------------------------------------------


def test_defaults_depend_on_the_model():
    tiny, other = tiny_settings(), train.parse_settings(["--model", "zai-org/GLM-Image", "--height", "1280"])
    assert (tiny.steps, tiny.lr, tiny.height, tiny.temperature, tiny.top_p) == (20, 3e-4, 128, 1.0, 0.95)
    assert (other.steps, other.lr, other.height, other.width) == (200, 2e-5, 1280, 1024)
    assert (other.temperature, other.top_p) == (0.9, 0.75), "its own sampler's"
    assert (tiny.eval_every, other.eval_every) == (10, 50), "a choice of adapters"
    assert (tiny.kl_coef, other.kl_coef, tiny.decoder_lr, other.decoder_lr) == (0.2, 0.01, 1e-3, 1e-4)
    assert (tiny.prompts_per_step, tiny.group_size, tiny.clip_range, tiny.noise_level) == (16, 4, 0.2, 0.7)
    assert (tiny.eval_count, other.eval_count, other.eval_guidance_scale, tiny.guidance_scale) == (48, 8, 1.5, 1.0)
    assert (other.decode_steps, other.guidance_scale, other.eval_decode_steps) == (12, 1.5, 30)
    assert (other.reward, other.eval_reward) == ("pickscore:1,clip:1", "hps")
    assert Path(other.prompts) == ROOT / "prompts" / "train.txt" and other.targets is other.eval_targets is None
    assert train.parse_settings([]).model == (settings.RELEASE if torch.cuda.is_available() else TINY)
    assert tiny.targets is tiny.eval_targets is None
    edits = ("--sources", f"{TINY}/sources")
    assert tiny_settings(*edits).targets == f"{TINY}/edit-targets"
    assert tiny_settings(*edits, "--prompts", "mine.txt").targets is None, "they fit the shipped prompts alone"
    spelled = tiny_settings(*edits, "--prompts", os.path.relpath(f"{TINY}/edits.txt"))
    assert spelled.targets == f"{TINY}/edit-targets", "however these are spelled"


def test_settings_of_a_file_are_a_start_and_flags_win(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = tiny_settings(
        "--train", "decoder", "--group-size", "8", "--lr", "0.00123", "--eval-reward", "", "--out", "a"
    )
    Path("settings.json").write_text(json.dumps(vars(first)))
    again = train.parse_settings(["--settings", "settings.json"])
    assert vars(again) == vars(first) | {"out": None, "settings": "settings.json"}
    other = train.parse_settings(["--settings", "settings.json", "--train", "both", "--group-size", "3"])
    assert (other.lr, other.group_size, other.sequences, other.paintings) == (0.00123, 3, 3, 4)
    Path("settings.json").write_text('{"lr": 0.5, "train": "both", "paintings": 7}')
    few = tiny_settings("--settings", "settings.json", "--lr", "0.25")
    assert (few.lr, few.paintings, few.steps) == (0.25, 7, 16)
    for text, words in (("{", "cannot read the settings in"), ("[1]", "cannot read the settings in"),
                        ('{"lr": -1}', "--lr: must be in"), ('{"rate": 1}', "unrecognized arguments: --rate=1")):  # fmt: skip
        Path("settings.json").write_text(text)
        with pytest.raises(UserError, match=words):
            train.parse_settings(["--settings", "settings.json"])
    with pytest.raises(UserError, match="cannot read the settings in missing"):
        train.parse_settings(["--settings", "missing"])


def test_every_setting_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        train.main(["--help"])
    text = capsys.readouterr().out
    for action in settings.build_parser()[0]._actions:
        assert f"{action.option_strings[-1]} " in text
        assert action.help
    for name in vars(tiny_settings()).keys() - {"sequences"}:  # which is decided by --train and --group-size
        assert f"--{name.replace('_', '-')} " in text
    assert f"NAME[=FOLDER][:WEIGHT],... with NAME one of {', '.join(REWARDS)}, or" in " ".join(text.split())
    with pytest.raises(UserError):  # no abbreviations: a later flag must not change what a command means
        train.parse_settings(["--group", "4"])
    head = [line.strip() for line in text.splitlines()[:6]]
    examples = [line.split()[2:] for line in head if line.startswith("python train.py --")]
    assert len(examples) == 2 and all(map(train.parse_settings, examples)), "shown by --help | head"


def test_an_unknown_flag_names_the_one_that_was_meant(capsys):
    for words, meant in (
        ("--kl 0.1", "--kl-coef"),
        ("--group_size=4", "--group-size"),
        ("--lr-decoder 1", "--decoder-lr"),
    ):
        assert train.main(words.split()) == 2
        assert capsys.readouterr().err == f"error: unrecognized arguments: {words}; did you mean {meant}?\n"
    assert train.main(["--zzz", "1"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --zzz 1\n"


@pytest.mark.parametrize("width", [60, 200])
def test_settings_are_shown_within_the_terminal_and_first_those_that_are_no_default(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    chosen = tiny_settings("--group-size", "8", "--lr", "0.1", "--seed", "0")
    settings.print_start(chosen, Path("runs/1"), CPU, 32, 16)
    output = capsys.readouterr().out.partition("settings: ")[2].partition("\na step:")[0]
    first, rest = output.split("\nby default: ")
    assert first.split() == ["group_size=8", "lr=0.1"]
    assert {"seed=0", "kl_coef=0.2", "height=128"} < set(rest.split()) and "None" not in rest
    paths = [word for word in rest.split() if len(word) > width]
    assert all(len(line) <= width or line in paths for line in output.splitlines()[1:])
    assert (max(map(len, output.splitlines())) > 118) == (width == 200)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--group-sise", "4"], "unrecognized arguments: --group-sise 4"),
        (["--group-size", "1"], "--group-size: must be in [2, inf), got 1"),
        (["--group-size", "many"], "--group-size: invalid int value: 'many'"),
        (["--height", "100"], "--height and --width must be multiples of 32, got 100"),
        (["--top-p", "0"], "--top-p: must be in (0, 1], got 0.0"),
        (["--lr", "inf"], "--lr: must be in (0, inf), got inf"),
        (["--lr", "nan"], "--lr: must be in (0, inf), got nan"),
        (["--seed", str(2**32)], "--seed: must be in [0, 4294967295]"),
        (["--offload", "always"], "--offload: invalid choice: 'always'"),
        (["--prompts", "missing.txt"], "cannot read the prompts file missing.txt"),
        (["--prompts", "empty.txt"], "has no prompt in it"),
        (["--prompts", "cut.txt"], "cannot read the prompts file cut.txt"),
        (["--prompts", "one.txt", "--reward", "ssim"], "--targets"),
        (["--targets", "missing"], "missing does not exist"),
        (["--targets", "few"], "has 1 pictures for 112 prompts"),
        (["--prompts", "one.txt", "--targets", "broken"], "the target picture broken/1.png cannot be read"),
        (["--prompts", "one.txt", "--targets", "cut"], "the target picture cut/1.png cannot be read"),
        (["--prompts", "long.txt"], "long.txt has a prompt of 10,000 characters; 4,096 at most"),
        (["--reward", "beauty"], "unknown reward 'beauty'"),
        (["--reward", "bad.py:reward"], "--reward: reward 'bad.py:reward' failed for the prompt 'a "),
        (["--reward", "bad.py:reward"], "KeyError: 'no such face' (bad.py, line 2) (tried on two blank pictures)"),
        (["--reward", "bad.py:none"], "not NoneType; give NaN, not None, where it does not apply (tried on two blank"),
        (["--reward", "bad.py:leaves"], "SystemExit: 3 (bad.py, line 11)"),
        (["--reward", "ssim:0,mse:0.0"], "--reward: all weights in ssim:0,mse:0.0 are 0: there is nothing"),
        (["--reward", "ssim:1e39"], "--reward: the weight of reward 'ssim' is 1e+39"),
        (["--reward", "bad.py:one"], "--reward: reward 'bad.py:one' gave shape (1,) for 2 images"),
        (["--eval-reward", "clip=few"], "--eval-reward: cannot load reward 'clip'"),
        (["--tracker", "wandb"], "pip install wandb"),
        (["--model", "nobody/nothing", *SHAPES], "cannot load nobody/nothing"),
        (["--model", "few", *SHAPES], "cannot load few"),
        (["--out", "one.txt/run"], "cannot write to one.txt/run"),
        (["--out", "old"], "old already holds a run; choose another --out, or go on with it: --resume old"),
        (["--out", "judged"], "judged already holds a run; choose another --out"),
        (["--reward", "ssim", "--targets", "none"], "'ssim' compares with target pictures: give --targets"),
        (["--settings", "missing.json"], "cannot read the settings in missing.json"),
        (["--resume", "nothing"], "there is no checkpoint in nothing to resume"),
        (["--resume", "run", "--out", "other"], "leave out --out"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # without a network it tries for a while
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("empty.txt").write_text("\n  \n")
    Path("one.txt").write_text("a red circle\n")
    Path("cut.txt").write_bytes("a red circle\n一只".encode()[:-1])
    Path("bad.py").write_text(
        "def reward(images, prompts, targets):\n    raise KeyError('no such face')\n\n"
        "def one(images, prompts, targets):\n    return [1.0]\n\n"
        "def none(images, prompts, targets):\n    return [None, 1.0]\n\n"
        "def leaves(images, prompts, targets):\n    raise SystemExit(3)\n"
    )
    Path("long.txt").write_text("a" * 10_000)
    Path("cut").mkdir()
    draw(RED_CIRCLE).save("cut/1.png")
    Path("cut/1.png").write_bytes(Path("cut/1.png").read_bytes()[:-300])
    Path("few").mkdir()
    draw(RED_CIRCLE).save("few/1.png")
    Path("broken").mkdir()
    Path("broken/1.png").write_text("not a picture")
    Path("judged").mkdir()
    Path("judged/settings.json").write_text("{}")
    for folder, value in (("a", 0.1), ("b", 0.9)):
        Path(folder).mkdir()
        Path(folder, "own.py").write_text(f"def f(images, prompts, targets):\n    return [{value}] * len(images)\n")
    Path("old/checkpoints/000001").mkdir(parents=True)
    Path("old/metrics.jsonl").write_text('{"step": 1}\n')
    before = sorted(tmp_path.rglob("*"))
    for out in ([],) if {"--out", "--resume"} & set(arguments) else ([], ["--out", "new/run"]):
        assert train.main(["--steps", "1", *arguments, *out]) == 2
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert message.startswith("error: ")
        assert words in message
    assert sorted(tmp_path.rglob("*")) == before, "no empty run is left"
    assert Path("old/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_reward_is_tried_after_the_start_is_printed(quick, capsys):
    """It may take minutes; and says of how many prompts it has a file of its own."""
    write_reward("print('tried')\nif call > 1:\n    raise SystemExit")
    with open("mine.py", "a") as file:
        file.write("\n\nclass Own:\n    __call__ = staticmethod(reward)\n")
        file.write("    coverage = lambda self, prompts: f'questions for 1 of {len(prompts)} prompts'\n\nown = Own()\n")
    assert quick("--reward", "mine.py:own", "--steps", "1") == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Loading")]
    start = next(i for i, line in enumerate(lines) if "what the run leaves goes to runs/1" in line)
    words = ["loading --reward mine.py:own", "tried", "mine.py:own: questions for 1 of 2 prompts"]
    assert lines[start + 1 :][:3] == words and lines.index("tried") > start


@pytest.mark.parametrize("seconds", [0.5, 2])
def test_ctrl_c_while_the_libraries_load_has_no_traceback(tmp_path, seconds):
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), "--steps", "0"], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGINT


def test_a_refusal_has_no_traceback(tmp_path):
    process = command(tmp_path, "--group-size", "1")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "error: --group-size: must be in [2, inf), got 1\n"


# ---- prompts and seeds ----------------------------------------------------------------------------------------------


def test_prompts_come_round_once_an_epoch_in_another_order():
    settings = SimpleNamespace(seed=0, prompts_per_step=3, order="shuffled")
    rows = [row for step in range(20) for row in train.prompt_indices(step, settings, 4)]
    epochs = [rows[i : i + 4] for i in range(0, 60, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 5
    assert train.prompt_indices(7, settings, 4) == rows[21:24], "a function of the step"
    other = SimpleNamespace(seed=1, prompts_per_step=60, order="shuffled")
    assert train.prompt_indices(0, other, 4) != rows
    settings.order = "file"
    assert [train.prompt_indices(step, settings, 4) for step in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


def test_no_two_groups_share_a_seed(monkeypatch):
    """Over steps, ranks, prompts of a step, and runs whose --seed differs by one."""
    monkeypatch.setattr(ranks, "count", lambda: 3)
    seeds = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        for step in range(30):
            for seed in (0, 1, 2):
                first = train.seed_of_step(step, SimpleNamespace(seed=seed, prompts_per_step=4))
                seeds += range(first, first + 4)
    assert len(set(seeds)) == len(seeds) == 3 * 30 * 3 * 4
    assert train.seed_of_step(10**6, SimpleNamespace(seed=2**32 - 1, prompts_per_step=4)) < 2**63


@pytest.mark.parametrize(("seeds", "steps", "evaluated"), [(10, 10**4, 2**20), (1000, 1000, 1000)])
def test_streams_of_a_run_are_apart_in_the_32_bits_that_a_cpu_takes(seeds, steps, evaluated):
    """Codes, noise and the decoder's draws of the first seeds, and those of the evaluations."""
    for seed in range(seeds):
        first, last = (train.seed_of_step(s, SimpleNamespace(seed=seed, prompts_per_step=4)) for s in (0, steps))
        own, *evaluations = (
            [start + offset for offset in (0, 2**30, 2**31)]
            for start in (first, train.SEEDS["training"], train.SEEDS["held out"])
        )
        for start in own:
            for other in {*own, *evaluations[0], *evaluations[1]} - {start}:
                assert (other - start) % 2**32 > last - first and (start - other) % 2**32 >= evaluated


def test_a_gpu_is_named_by_its_number(quick, capsys, monkeypatch):
    """Some of torch.cuda takes no other device."""

    def refuse(settings, out, device, *counts):
        raise UserError(f"on {device}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(train, "plan", lambda *given: False)
    monkeypatch.setattr(train, "print_start", refuse)
    assert quick("--steps", "1") == 2
    assert "on cuda:1" in capsys.readouterr().err


@pytest.mark.parametrize("prompts_per_step", [1, 2])
def test_an_evaluation_is_always_of_the_same_prompts_and_seeds(quick, monkeypatch, prompts_per_step):
    """And of seeds that training never draws from; how many are painted at once is no matter."""
    painted, stock_paint = [], train.paint

    def paint(pipe, prompt, tokens, settings, seed, source):
        painted.append((prompt, seed))
        return stock_paint(pipe, prompt, tokens, settings, seed, source)

    monkeypatch.setattr(train, "paint", paint)
    Path("new.txt").write_text("a green ring\na blue ring\na third that is never asked for\n")
    arguments = ["--prompts-per-step", f"{prompts_per_step}", "--eval-prompts", "new.txt", "--eval-targets", "none"]
    assert quick("--steps", "2", *arguments, "--eval-count", "2", "--out", "run") == 0
    prompts = Path("prompts.txt").read_text().splitlines()
    before, training, after = painted[:4], painted[4:-4], painted[-4:]
    known = [(prompts[0], train.SEEDS["training"]), (prompts[1], train.SEEDS["training"] + 1)]
    assert (
        before
        == after
        == [*known, ("a green ring", train.SEEDS["held out"]), ("a blue ring", train.SEEDS["held out"] + 1)]
    )
    assert len({seed for _, seed in training}) == len(training) == 2 * prompts_per_step
    assert max(seed for _, seed in training) < train.SEEDS["training"] < train.SEEDS["held out"] < 2**30


# ---- numbers --------------------------------------------------------------------------------------------------------

RAW = {
    "a": torch.tensor([1.0, 2.0, 3.0] + [NAN, 5.0, NAN] + [4.0, 4.0, 4.0]),
    "b": torch.tensor([10.0, NAN, 30.0] + [NAN, NAN, NAN] + [0.0, 0.0, 6.0]),
}
TOTAL = torch.tensor([2 + 5, 4, 6 + 15] + [NAN, 10, NAN] + [8, 8, 8 + 3])  # 2a + b/2, of those that apply


def test_reward_metrics_by_hand():
    """Means over all pictures; spreads within groups, then their mean. NaN is no picture of this reward."""
    metrics = step_metrics(RAW, TOTAL, 3, 1)
    totals = [7, 4, 21, 10, 8, 8, 11]
    assert metrics == pytest.approx(
        {
            "reward": np.mean(totals),
            "reward_std": np.mean([np.std([7, 4, 21], ddof=1), np.std([8, 8, 11], ddof=1)]),  # a lone one has none
            "reward_best": np.mean([21, 10, 11]),
            "reward/a": np.mean([1, 2, 3, 5, 4, 4, 4]),
            "reward_std/a": (1 + 0) / 2,
            "reward_best/a": np.mean([3, 5, 4]),
            "reward/b": np.mean([10, 30, 0, 0, 6]),
            "reward_std/b": np.mean([np.std([10, 30], ddof=1), np.std([0, 0, 6], ddof=1)]),
            "reward_best/b": np.mean([30, 6]),
            "unscored": 2 / 9,
        }
    )
    nothing = reward_metrics({"b": RAW["b"][3:6]}, TOTAL[3:6], 3)
    assert math.isnan(nothing["reward/b"]) and math.isnan(nothing["reward_std/b"]) and math.isnan(nothing["reward_std"])
    assert nothing["reward"] == 10


def test_spreads_of_code_sequences_and_of_their_paintings_by_hand():
    """One prompt, two code sequences, painted twice each; or one code sequence, painted four times."""
    values = torch.tensor([0.0, 2.0, 10.0, 16.0])
    both, decoder = step_metrics({"a": values}, values, 2, 2), step_metrics({"a": values}, values, 1, 4)
    assert both["reward"] == decoder["reward"] == both["reward/a"] == 7
    assert both["reward_std"] == pytest.approx(np.std([1, 13], ddof=1)), "of the means"
    assert both["decoder/reward_std"] == pytest.approx((np.std([0, 2], ddof=1) + np.std([10, 16], ddof=1)) / 2)
    assert decoder["reward_std"] == decoder["reward_std/a"] == pytest.approx(np.std(values.numpy(), ddof=1))
    values[0] = NAN
    both = step_metrics({"a": values}, values, 2, 2)
    assert both["reward"] == 7.5 and both["reward_std/a"] == pytest.approx(np.std([2, 13], ddof=1)), "of the others"


METRICS = {
    "reward": 1.25, "reward_std": 0.5, "reward/a": 0.75, "reward_std/a": 0.125, "reward/b": NAN, "reward_std/b": NAN,
    "unscored": 0.0, "groups_without_spread": 0.25, "kl": 0.0125, "clip_fraction": 0.125, "grad_norm": 2.5,
    "mean_logprob_gap": 2e-6, "max_logprob_gap": 3e-5, "skipped": 0.0, "entropy": 0.0169, "seconds/sample": 1.5,
    "seconds/update": 2.25, "gpu_gb/sample": 7.0, "gpu_gb/update": 9.5,
}  # fmt: skip


def test_the_line_of_a_step_by_hand():
    """What is 0 or was not measured is left out; alarms stand in front, and what is to be watched before the rest."""
    assert format_step(3, METRICS, SimpleNamespace(steps=20)) == (
        "step 3/20 | reward 1.250 +- 0.500 | 25% without spread | a 0.750 | kl 0.0125 | entropy 0.0169 | gap 2e-06 | "
        "norm 2.50 | 12.5% clipped | 3.8s | 9.5 GB"
    )
    trouble = dict.fromkeys(["kl", "clip_fraction", "mean_logprob_gap", "max_logprob_gap"], NAN)  # nothing learned
    trouble |= {"unscored": 0.25, "skipped": 1.0, "grad_norm": 0.0}
    line = format_step(3, METRICS | trouble, SimpleNamespace(steps=20))
    assert line.startswith(
        "step 3/20 | reward 1.250 +- 0.500 | SKIPPED: the gradient was not finite | 25% without spread | 25% unscored"
    )
    assert not re.search("kl|norm|gap|nan", line)
    quiet = METRICS | {"kl": 0.0, "entropy": 0.0, "groups_without_spread": 0.0}
    line = format_step(3, quiet, SimpleNamespace(steps=20))
    assert line.endswith("0.500 | a 0.750 | gap 2e-06 | norm 2.50 | 12.5% clipped | 3.8s | 9.5 GB")
    halves = quiet | {"decoder/reward_std": 0.0625, "decoder/groups_without_spread": 0.5}
    line = format_step(3, halves, SimpleNamespace(steps=20))
    assert "| decoder: 50% without spread | a 0.750 | gap 2e-06 | decoder +- 0.062 | norm" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "in no group did one picture score higher"),
        ({}, "a higher --temperature or --top-p, or a larger"),
        ({"unscored": 1.0}, "no reward applied to any picture"),
        ({"skipped": 1.0}, "no gradient was finite"),
        ({"grad_norm": 0.1}, None),
        ({"decoder/grad_norm": 0.1}, None),
    ],
)
def test_why_nothing_was_learned(changes, words):
    record = {"grad_norm": 0.0, "unscored": 0.0, "skipped": 0.0, "groups_without_spread": 1.0}
    reason = why_nothing_was_learned([record | changes] * 2)
    assert reason is None if words is None else words in reason
    decoder = {"grad_norm" if name == "groups_without_spread" else name: 0.0 for name in record}
    assert "a higher --noise-level, or a larger" in why_nothing_was_learned([decoder])
    assert why_nothing_was_learned([record, record | {"grad_norm": 0.2}]) is why_nothing_was_learned([]) is None


def test_a_run_that_learns_nothing_says_so(quick, capfd):
    Path("mine.py").write_text("def constant(images, prompts, targets):\n    return [1.0] * len(images)\n")
    assert quick("--reward", "mine.py:constant", "--steps", "2", "--out", "run") == 0
    output = "".join(capfd.readouterr())
    assert "step 1/2 | reward 1.000 +- 0.000 | 100% without spread" in output
    assert "warning: nothing was learned: in no group did one picture score higher than another" in output
    assert quick("--steps", "1", "--out", "other") == 0
    assert "nothing was learned" not in "".join(capfd.readouterr())


def test_the_clock_adds_up_the_phases_of_a_step(monkeypatch):
    """Weights move three times in a step where policy and decoder take turns."""
    times = iter([0.0, 1.0, 10.0, 13.0, 20.0, 25.0, 30.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Phases(CPU)
    for phase in ("move", "sample", "move"):
        with clock(phase):
            assert clock.name == phase
    assert clock.read() == {"seconds/move": 6, "seconds/sample": 3}
    with clock("move"):
        pass
    assert clock.read() == {"seconds/move": 1}, "of the next step"


@pytest.mark.parametrize("combine", ["sum", "zscore"])
def test_advantages_come_from_the_combination_and_the_log_from_raw_rewards(monkeypatch, combine):
    """A group's advantages by hand; the spread of "b" is a hundred times that of "a"."""
    shorten(monkeypatch.setattr)
    a, b = torch.tensor([1.0, 2.0, NAN, 6.0]), torch.tensor([300.0, 100.0, NAN, 500.0])
    functions, seen = {"a": (lambda *_: a, 2.0), "b": (lambda *_: b, 0.5)}, []
    settings = tiny_settings(
        "--height", "32", "--width", "32", "--combine", combine, "--temperature", "9", "--top-p", "1"
    )
    run = build_run(settings)
    monkeypatch.setattr(run.policy, "update", lambda groups: seen.extend(groups) or {})
    rolled, metrics = train.grpo_step(run, settings, functions, Prompts(["a red circle"]), 0)
    total = 2 * a + 0.5 * b
    if combine == "zscore":
        total = 2 * compute_advantages(a, 4) + 0.5 * compute_advantages(b, 4)
        total[2] = NAN
    (advantages,) = (group.advantages for group in seen)
    torch.testing.assert_close(advantages, compute_advantages(total, 4), atol=1e-5, rtol=0)
    assert advantages[2] == 0 and advantages[1] < 0 < advantages[3]
    assert metrics["entropy"] == pytest.approx(-seen[0].old_logprobs.mean().item()) and metrics["entropy"] > 0
    assert all(rolled.raw_rewards[name].tolist()[3] == values[3] for name, values in (("a", a), ("b", b))), (
        "the log has these"
    )


def test_code_sequences_get_the_rewards_of_their_own_pictures(monkeypatch):
    """Two prompts, three sequences each: a picture's colour is a number of its codes, and its reward is that colour."""
    shorten(monkeypatch.setattr)
    number = lambda codes: int(codes.sum()) % 251
    paint = lambda pipe, prompt, tokens, *given: [Image.new("RGB", (8, 8), (number(codes), 0, 0)) for codes in tokens]
    monkeypatch.setattr(train, "paint", paint)
    settings = tiny_settings(
        "--height", "32", "--width", "32", "--group-size", "3", "--temperature", "9", "--top-p", "1"
    )
    colour = lambda images, prompts, targets: [image.getpixel((0, 0))[0] for image in images]
    prompts = Prompts(["a red circle", "a blue cross"])
    rolled, _ = train.grpo_step(build_run(settings), settings, {"colour": (colour, 1.0)}, prompts, 0)
    assert len(rolled.groups) == 2 and len(rolled.images) == 6
    for group in rolled.groups:
        numbers = torch.tensor([float(number(codes)) for codes in group.tokens])
        assert numbers.std() > 1
        torch.testing.assert_close(group.advantages, compute_advantages(numbers, 3), atol=1e-5, rtol=0)


def test_several_rewards_are_combined_by_zscores_unless_told_otherwise(quick):
    for arguments, expected in ((["--reward", "mse"], "sum"), ([], "zscore"), (["--combine", "sum"], "sum")):
        assert quick("--steps", "0", *arguments) == 0
        newest = max(Path("runs").iterdir())
        assert json.loads((newest / "settings.json").read_text())["combine"] == expected


def test_pictures_without_any_reward_are_a_run_too(quick):
    Path("mine.py").write_text("def nothing(images, prompts, targets):\n    return [float('nan')] * len(images)\n")
    assert quick("--reward", "mine.py:nothing", "--steps", "1", "--out", "run") == 0
    (line,) = records("run/metrics.jsonl")
    assert (line["reward"], line["unscored"], line["groups_without_spread"], line["grad_norm"]) == (None, 1, 1, 0)
    assert [record["reward"] for record in records("run/evaluation.jsonl")] == [None, None]
    assert Path("run/before-after.png").exists()
