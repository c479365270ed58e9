"""Runs that survive: what is saved and when, how a run goes on, and how it ends when something
breaks.

Everything here is a run of train.main on short pictures; see conftest.py.
"""

import dataclasses
import errno
import io
import multiprocessing
import os
import pty
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import (
    QUICK,
    TINY,
    adapter_of,
    build_run,
    error_from,
    perturb,
    prompts_of,
    records,
    resume,
    short_runs,
    shorten,
    steps_of,
    steps_saved,
    tiny_settings,
    unheard,
    write_reward,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from train_decoder import DecoderRun, DecoderSettings
from train_edits import EditSettings

import train
from rewards import UserError, load_from_file
from runtime import checkpoints
from runtime.errors import exit_code
from runtime.folder import RunFolder, claimed
from runtime.resume import kept_settings, portable


def files_in(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def error_of(capsys):
    """The one line that a user reads."""
    output = capsys.readouterr().err
    message = output.strip().splitlines()[-1]
    assert "Traceback" not in output and message.startswith("error: ")
    return message


def same_run(expected, found):
    """Bit for bit: the same operations in the same order."""
    for name in ("metrics.jsonl", "evaluation.jsonl", "groups.jsonl"):
        assert records(f"{expected}/{name}") == records(f"{found}/{name}")
    assert adapter_of(expected) == adapter_of(found)


# ---- going on ------------------------------------------------------------------------------------


HEARD = "INT TERM HUP"  # signals
DICE = "return torch.rand(len(images))"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two steps, to copy. Its reward throws dice."""
    folder = tmp_path_factory.mktemp("whole")
    with short_runs(folder) as run:
        often = "--steps 2 --save-every 1 --eval-every 1 --iterations 2 --warmup-steps 9 --out run"
        assert run(*write_reward(DICE), often) == 0
    return folder / "run"


def test_a_resumed_run_equals_the_uninterrupted_one(judged, whole, capsys):
    """With what a kill may leave in the files: records of later steps, half a line, a damaged line,
    and no evaluation of the step that was saved last. A checkpoint that somebody has copied is left
    alone."""
    write_reward(DICE)
    shutil.copytree(whole, "run")
    shutil.rmtree("run/checkpoints/000002")
    shutil.rmtree("run/adapter")
    for name in ("metrics", "groups"):
        file = Path(f"run/{name}.jsonl")
        later = '{"step": 3, "of": "a step without a checkpoint"}\n{"step": 4, "rew'
        file.write_text('{"step": 1, "rew\0\0\n' + file.read_text() + later)
    first = Path("run/evaluation.jsonl").read_text().splitlines()[0]
    Path("run/evaluation.jsonl").write_text(f"{first}\n")
    shutil.copytree("run/checkpoints/000000", "run/checkpoints/000000-good")
    assert resume("run") == 0
    same_run(whole, "run")
    assert steps_saved("run") == ["000000", "000000-good", "000001", "000002"]
    output = capsys.readouterr().out
    assert output.count("is damaged, and left out") == 2
    code = whole.parent / "mine.py:reward"
    assert f"run runs code, as when it began: --reward {code}\n" in output
    assert "run goes on after step 1; its records of later steps (2) are made again\n" in output
    assert Path("run/start/mine.py").read_text() == Path("mine.py").read_text()
    changed = (
        "warning: the file of mine.py:reward has changed since the run began; a copy is in run/s"
    )
    load = lambda: load_from_file("mine.py:reward")([1, 2], ["a"] * 2, None)
    assert load().any()
    write_reward("return torch.zeros(len(images))")
    moved = "--reward mine.py:reward"
    assert (
        resume("run", moved) == 0 and changed in capsys.readouterr().out and changed not in output
    )
    # And now it is what scores, in this process too.
    assert not load().any()


def test_the_rate_warms_up_by_the_step_whose_number_a_checkpoint_has(quick, monkeypatch, capsys):
    """Adam's first step is as long as the rate, whatever the gradient: a third of it, where the
    third step has all."""
    monkeypatch.setattr(checkpoints, "KEPT", 9)
    arguments = "--warmup-steps 2 --lr 0.01 --save-every 1"
    assert quick(*write_reward(""), arguments, "--steps 1 --out run") == 0
    assert resume("run", "--steps 3") == 0
    files = sorted(Path("run/checkpoints").glob("*/adapter-optimizer.pt"))
    states = [torch.load(file, weights_only=True) for file in files]
    assert "step 3/3, epoch 1.5 | reward" in capsys.readouterr().out
    rates = [state["param_groups"][0]["lr"] for state in states[1:]]
    assert rates == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    weights = load_file("run/checkpoints/000001/adapter/adapter_model.safetensors")
    moved = max(weight.abs().max().item() for name, weight in weights.items() if "lora_B" in name)
    assert moved == pytest.approx(0.01 / 3, rel=0.01)


@pytest.mark.parametrize(
    "minutes, steps", [(4, [0, 2, 4, 5]), (20, [0, 1, 2, 3, 4, 5]), (1, [0, 5])]
)
def test_a_kill_costs_ten_minutes_or_one_step(quick, monkeypatch, minutes, steps):
    """Of steps of four minutes the third would end after twelve."""
    done = lambda: len(steps_of("run/metrics.jsonl")) if Path("run/metrics.jsonl").exists() else 0
    monkeypatch.setattr(checkpoints, "KEPT", 9)
    monkeypatch.setattr("runtime.folder.monotonic", lambda: 60 * minutes * done())
    assert quick(*write_reward(""), "--steps 5 --out run") == 0
    assert steps_saved("run") == [f"{step:06d}" for step in steps]


def test_an_error_of_a_step_is_no_error_of_writing(quick, capfd):
    """A connection that breaks, in the second step: its traceback is shown, and what --save-every
    left out is saved."""
    reward = write_reward("if call > 2:\n    raise ConnectionError('503 Service Unavailable')")
    with pytest.raises(ConnectionError, match="503"):
        quick(*reward, "--steps 5 --save-every 2 --out run")
    output = "".join(capfd.readouterr())
    assert "stopped in the phase 'score'; continue with --resume run" in output
    assert "cannot write" not in output and steps_saved("run") == ["000000", "000001"]


def test_a_resumed_run_keeps_every_setting_but_these(monkeypatch, capsys):
    """Of files, what they hold is compared. Code that it runs is listed as it was named."""
    changed = set()
    for kind in (DecoderSettings, EditSettings):
        before = dict.fromkeys(each.name for each in dataclasses.fields(kind))
        state = before, {"processes": 1}
        monkeypatch.setattr("runtime.resume.description", lambda out, state=state: state)
        for name in before:
            with suppress(UserError):
                changed |= (
                    kept_settings({"resume": "run", name: "other"}, kind).items() - before.items()
                )
    files = "model adapter prompts targets sources eval_prompts eval_targets eval_sources"
    others = "micro_batch_size steps device offload save_every eval_every resume tracker"
    assert {name for name, _ in changed} == {*files.split(), *others.split()}
    before |= {"targets": "odd,tiny-glm-image/world.py:f", "reward": "mse,my.py:f:2"}
    before["eval_targets"] = "new.py:f"  # which the user names
    kept_settings({"resume": "run", "eval_targets": "new.py:f"}, EditSettings)
    flags = "--reward mse,my.py:f:2 --targets odd,tiny-glm-image/world.py:f"
    assert capsys.readouterr().out == f"run runs code, as when it began: {flags}\n"


def test_resuming_refuses_what_would_change_the_run(quick, one_step, capsys):
    shutil.copytree(one_step, "run")
    before = files_in("run")
    for arguments, words in [
        (
            "--lr 0.1 --seed 3",
            "--lr 0.1 (was 0.002), --seed 3 (was 0); free to change are --device, ",
        ),
        (
            "--lr 0.1",
            "--steps, --tracker; to change others, start a new run from its adapter: --ad",
        ),
        ("--out other", "--out other (was run)"),
        ("--steps -1", "--steps"),
    ]:
        assert resume("run", arguments) == 2
        assert words in error_of(capsys)
    assert resume("run", run_class=DecoderRun) == 2
    words = "run was made by another script or version; start a new run from its adapter: "
    assert f"{words}--adapter run" in error_of(capsys)
    assert files_in("run") == before
    link = Path("run/group-000002.png")
    link.symlink_to("precious.png")
    assert resume("run", "--steps 2") == 2 and f"{link} is a link" in error_of(capsys)
    link.unlink()
    card = Path("run/adapter/README.md")
    card.write_text("mine")
    assert resume("run") == 0
    assert "1 step, " in (last := capsys.readouterr().out.splitlines()[-1])
    assert "already complete: raise --steps for more; output folder: run" in last
    assert resume("run --base auto --micro-batch-size 1 --save-every 1 --steps 2") == 0
    assert steps_of("run/metrics.jsonl") == [1, 2] and card.read_text() == "mine"


def test_a_run_goes_on_with_what_it_began_with(quick, capsys, monkeypatch):
    """Prompts, their kinds and pictures, the adapters it started from: by what they hold, before
    anything loads."""
    both = "--train both --paintings 2 --decode-steps 2 --steps 1"
    assert quick(both, "--out first") == 0
    Path("new.txt").write_text("# type: low\na red circle\n# type: high\na blue cross\n")
    shutil.copytree("targets", "new-targets")
    arguments = f"{both} --eval-prompts new.txt --eval-targets new-targets --adapter first"
    assert quick(arguments, "--out run") == 0
    shutil.rmtree("first")  # a run has copies
    other = Path("targets/2.png").read_bytes()
    config = Path("run/start/adapter/adapter_config.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(train, "load", lambda *arguments: pytest.fail("it loads"))
        alpha = config.replace(b'alpha": 32', b'alpha": 8')
        here = Path.cwd()
        for name, changed, flag in (
            ("prompts.txt", b"a blue cross\na red circle\n", f"--prompts {here}/prompts.txt"),
            ("new.txt", b"# type: low\na red circle\n# type: lower\na blue cross\n", "--eval-pro"),
            ("targets/1.png", other, f"--targets {here}/targets; restore"),
            ("new-targets/1.png", other, f"--eval-targets {here}/new-targets; restore"),
            ("run/start/adapter/adapter_config.json", alpha, "--adapter, adapter run/start;"),
            ("run/start/decoder-adapter/adapter_model.safetensors", None, "--adapter, decoder-ad"),
        ):
            whole = Path(name).read_bytes()
            Path(name).write_bytes(changed or whole[:-1] + bytes([whole[-1] ^ 1]))
            assert resume("run", "--steps 2") == 2
            words = f"other prompts, pictures or adapters; different here: {flag}"
            assert words in (error := error_of(capsys))
            assert error.endswith("or start a new run from its adapter: --adapter run")
            Path(name).write_bytes(whole)
        assert resume("run", "--steps 2 --eval-targets none") == 2
        assert "different here: --eval-targets none" in error_of(capsys)
        assert resume("run", "--steps 2 --adapter run") == 2
        assert "different here: --adapter" in error_of(capsys)
    Path("prompts.txt").write_text("a red circle\n\na blue cross\n")  # the same prompts
    assert resume("run", "--steps 2") == 0
    for name in ("prompts.txt", "new.txt"):
        Path(name).unlink()
    own = "--prompts run/start/prompts.txt --eval-prompts run/start/eval_prompts.txt"
    assert resume("run", "--steps 2", own) == 0


NO_DATA = SimpleNamespace(made_of={}, copies={})


def test_only_a_run_that_trains_keeps_the_adapters_it_starts_from(one_step, tmp_path):
    for steps in (0, 1):
        settings = tiny_settings("--adapter", one_step, "--steps", steps)
        (out := tmp_path / str(steps)).mkdir()
        RunFolder(out, settings, NO_DATA, {}, 0)
        assert (out / "start/adapter").exists() == bool(steps)


def test_a_run_whose_files_have_moved_goes_on(quick, capsys, monkeypatch):
    """First from another folder, then with its model, prompts and reward elsewhere. A reward of
    another name or weight is refused."""
    Path("mine").mkdir()
    shutil.copytree(TINY, "mine/model", copy_function=os.link)
    shutil.copy("prompts.txt", "mine")
    Path("mine/helper.py").write_text("SHIFT = 1\n")
    Path("mine/package").mkdir()  # without __init__.py, of which ModuleFinder knows nothing
    Path("mine/package/part.py").write_text("")
    Path("mine/own.py").write_text(
        "import helper, package.part\ndef f(images, prompts, targets):\n    return [0, helper.SHIFT]\n"
    )
    files = "--model {0}/model --prompts {0}/prompts.txt --reward {0}/own.py:f:0.5,ssim"
    assert quick(files.format("mine"), "--steps 1 --out run") == 0
    run = Path("run").resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert resume(run, "--steps 2") == 0
    Path("../mine").rename("../moved")
    assert resume(run, "--steps 0") == 2
    assert "--steps 0 resumes nothing: to evaluate, --adapter" in error_of(capsys)
    assert resume(run, "--steps 3") == 2
    capsys.readouterr()
    assert resume(run, "--steps 3", files.format("../moved")) == 0
    assert "warning" not in capsys.readouterr().out.replace("warning: 2 of the 2 held-out", "")
    assert steps_of(run / "metrics.jsonl") == [1, 2, 3]
    assert (run / "start/helper.py").read_text() == "SHIFT = 1\n"
    Path("../moved/helper.py").write_text("SHIFT = 2\n")
    assert resume(run, "--steps 3") == 0
    changed = "warning: the file of helper.py, imported by own.py:f has changed since the run began"
    assert changed in capsys.readouterr().out
    for reward in ("../moved/own.py:f,ssim", "../moved/own.py:g:0.5,ssim"):
        assert resume(run, "--steps 3 --reward", reward) == 2
        assert f"different here: --reward {reward} (was " in error_of(capsys)


def test_a_run_goes_on_with_the_model_that_it_began_with(quick, one_step, capsys):
    """Which is what an adapter is for, too."""
    shutil.copytree(TINY, "model", copy_function=shutil.copyfile)
    weights = Path("model/vision_language_encoder/model.safetensors")
    rewritten(weights, lambda key, x: (key, x))  # so that all but one tensor stays
    shutil.copytree("model", "kept")
    assert quick("--model model --steps 1 --out run") == 0
    rewritten(weights, lambda key, x: (key, x / 2 if key == "lm_head.weight" else x))
    assert resume("run --steps 2") == 2
    error = error_of(capsys)
    model = Path("model").resolve()
    assert error.startswith(f"error: run was started with another model than {model}: give the")
    assert resume("run --steps 2 --model kept") == 0
    assert "another model" not in capsys.readouterr().out
    shutil.copytree(one_step, "other")
    for adapter in ("other", "other/adapter"):
        out = f"on-{adapter.replace('/', '-')}"
        assert quick("--model model --steps 0 --adapter", adapter, "--out", out) == 0
        assert " was trained upon another model than model\n" in capsys.readouterr().out


def test_zero_steps_evaluates_only(judged, one_step, capsys):
    assert judged("--steps 0 --out base") == 0
    output = capsys.readouterr().out
    assert "warning: cannot show" not in output and "complete" not in output
    # A run that has ended leaves signals as it found them.
    assert {signal.getsignal(getattr(signal, f"SIG{x}")) for x in HEARD.split()} == {unheard}
    (expected, _), (found,) = (records(f"{run}/evaluation.jsonl") for run in (one_step, "base"))
    del expected["training"]
    assert found == expected
    assert not Path("base/adapter").exists() and not Path("base/checkpoints").exists()


def test_a_second_stage_starts_from_an_adapter_which_is_its_reference(judged, one_step, capsys):
    """A published one, with another rate; the first KL is 0, and resumed it is as if it had not
    stopped."""
    config = shutil.copytree(one_step / "adapter", Path("downloaded")) / "adapter_config.json"
    config.write_text(config.read_text().replace("vision_language_encoder", "elsewhere"))
    second = "--adapter downloaded --kl-coef 0.5 --lr 0.03 --warmup-steps 0"
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert judged(second, "--steps 2 --save-every 1 --out straight") == 0
    first, last = (line["kl"] for line in records("straight/metrics.jsonl"))
    assert first == 0 and last > 1e-3
    last = records(one_step / "evaluation.jsonl")[-1]
    first = records("straight/evaluation.jsonl")[0]
    assert {**first, "step": 1, "shown": []} == {**last, "shown": []}  # files have other places
    trained, adapter = (
        load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("straight", one_step)
    )
    assert trained.keys() == adapter.keys()
    shutil.copytree("straight", "stopped")
    left = {file.name for file in Path("stopped/checkpoints/000002/adapter").iterdir()}
    assert left == {checkpoints.CONFIG, checkpoints.WEIGHTS}  # and no reference
    shutil.rmtree("stopped/checkpoints/000002")
    assert resume("stopped") == 0
    same_run("straight", "stopped")
    begun = lambda: train.parse_settings(["--config", "straight/settings.json"]).adapter
    assert begun() == "straight/start"
    shutil.rmtree("straight/start/adapter")  # as in a run that only evaluated
    assert begun() == str(config.parent.resolve())
    assert judged("--adapter nowhere") == 2
    assert "--adapter nowhere: no run, no checkpoint and no adapter" in error_of(capsys)


def test_an_adapter_comes_from_the_newest_checkpoint_of_a_run(judged, one_step, capsys):
    """Which has no adapter/ of its own before it has ended. While the models load, the run may
    remove the checkpoint: the base is not taken for it."""
    shutil.copytree(one_step, "going")
    shutil.rmtree("going/adapter")
    assert judged("--adapter going --steps 0 --out again") == 0
    (expected, found) = (records(f"{run}/evaluation.jsonl")[-1] for run in ("going", "again"))
    assert found["held out"] == expected["held out"]
    reward = write_reward("if call == 1:\n    shutil.rmtree('going/checkpoints/000001')")
    capsys.readouterr()
    assert judged(*reward, "--adapter going --steps 0 --out lost") == 2
    words = (
        "going/checkpoints/000001: no run, no checkpoint and no adapter; a run removes its older"
    )
    assert words in error_of(capsys) and not Path("lost").exists()


def test_both_halves_of_a_model_are_in_each_checkpoint_and_at_the_end(judged, one_step):
    """The decoder is trained over a policy that was trained before, then the policy over that
    decoder: what each run ends with is what --adapter evaluates."""
    shutil.copytree(one_step, "policy")
    often = "--steps 1 --save-every 1 --eval-decode-steps 2 --warmup-steps 0"
    decoder = f"--train decoder --decode-steps 2 --decoder-lr 0.1 {often}"
    assert judged(decoder, "--adapter policy --out decoder") == 0
    assert judged(often, "--lr 0.03 --adapter decoder --out both") == 0
    for run in ("decoder", "both"):
        for folder in (run, f"{run}/checkpoints/000000", f"{run}/checkpoints/000001"):
            assert {*checkpoints.find_adapters(folder)} == {"adapter", "decoder-adapter"}
        words = "--eval-decode-steps 2 --steps 0 --adapter"
        assert judged(words, run, f"--out {run}-again") == 0
        last = records(f"{run}/evaluation.jsonl")[-1]["held out"]
        assert records(f"{run}-again/evaluation.jsonl")[0]["held out"] == last
    same = lambda name, *runs: len({Path(run, name).read_bytes() for run in runs}) == 1
    policy, of_decoder = ADAPTER, f"decoder-{ADAPTER}"
    assert same(policy, "policy", "decoder") and not same(policy, "decoder", "both")
    assert same(of_decoder, "decoder", "both")
    stock = "decoder-adapter/pytorch_lora_weights.safetensors"  # which docs/memory.md loads
    expected, found = (load_file(f"{run}/{stock}") for run in ("decoder", "both"))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    shutil.copytree("both", "stopped")
    shutil.rmtree("stopped/checkpoints/000001")
    assert resume("stopped") == 0
    same_run("both", "stopped")


# ---- what is damaged -----------------------------------------------------------------------------


def rewritten(file, change):
    """A file of tensors, with the (key, tensor) pairs that `change` makes of each."""
    tensors = load_file(file)
    save_file(dict(map(change, tensors, tensors.values())), file)


def cut(end):
    return lambda file: file.write_bytes(file.read_bytes()[:end])


class Code:
    """To pickle: a program in a file of somebody else."""

    def __reduce__(self):
        return pytest.fail, ("it runs code",)


KEY = "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight"
ADAPTER, OPTIMIZER = "adapter/adapter_model.safetensors", "adapter-optimizer.pt"


def test_an_adapter_is_found_in_a_run_in_a_checkpoint_and_alone(one_step, tmp_path):
    own, of_decoder = tmp_path / "adapter", tmp_path / "decoder-adapter"
    for folder in (own, of_decoder):
        shutil.copytree(one_step / "adapter", folder)
    find = lambda folder, name: checkpoints.find_adapter(checkpoints.newest(folder), name)
    checkpoint = one_step / "checkpoints/000001"
    assert find(one_step, "adapter") == find(checkpoint, "adapter") == checkpoint / "adapter"
    assert find(tmp_path, "adapter") == find(own, "adapter") == own
    assert find(tmp_path, "decoder-adapter") == find(of_decoder, "decoder-adapter") == of_decoder
    for folder, name in (
        (one_step, "decoder-adapter"),
        (own, "decoder-adapter"),
        (of_decoder, "adapter"),
    ):
        assert find(folder, name) is None


def test_an_adapters_dropout_does_not_act(one_step, tmp_path, monkeypatch):
    """In train mode, in which an update recomputes activations. Sampling is in eval mode."""
    shorten(monkeypatch.setattr)
    config = shutil.copytree(one_step / "adapter", tmp_path / "own") / "adapter_config.json"
    config.write_text(config.read_text().replace('dropout": 0.0', 'dropout": 0.5'))
    run = build_run(settings := tiny_settings("--temperature 6 --adapter", config.parent))
    perturb(run.policy.model)
    (group,) = run.policy.sample(run.glm_image.encode(prompts_of("a ring"), settings), 2, 0)
    run.policy.model.train()
    again = run.policy.logprobs(group, torch.arange(2))
    torch.testing.assert_close(again.detach(), group.old_logprobs, atol=1e-4, rtol=0)


def test_an_adapter_that_cannot_be_used_is_refused(one_step, tmp_path):
    """One that holds more; one of another model; one that would change the base twice, for the policy and for its
    reference; and one that is cut off."""
    folder = shutil.copytree(one_step / "adapter", tmp_path / "adapter")
    file, given = folder / checkpoints.WEIGHTS, tiny_settings("--adapter", tmp_path)
    save_file(load_file(file) | {"own": torch.ones(2)}, file)
    errors = [error_from(build_run, given)]
    rewritten(file, lambda key, x: (f"own.{key}", x))
    errors.append(error_from(build_run, given))
    (folder / "adapter_config.json").write_text('{"init_lora_weights": "pissa"}')
    errors.append(error_from(checkpoints.find_adapters, tmp_path))
    cut(-1)(file)
    errors.append(error_from(checkpoints.find_adapters, tmp_path))
    reasons = "own is [2], in this model it is missing", f"{KEY} is missing, "
    reasons += "with pissa the model has other weights;", "Error while "
    for error, reason in zip(errors, reasons, strict=True):
        assert error.startswith(f"cannot use the adapter {folder} ({reason}")


@pytest.mark.parametrize(
    "name, damage, words",
    [
        (ADAPTER, cut(-1), "file not fully covered"),
        (ADAPTER, lambda file: rewritten(file, lambda k, x: (k, x[:1])), f"({KEY} is [1, 256], "),
        (OPTIMIZER, cut(9999), ""),
        (OPTIMIZER, lambda file: torch.save(Code(), file), "Weights only load failed"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(whole, tmp_path, trainers, name, damage, words):
    """Which says how to go on from the checkpoint before. Nothing is deleted but by the user."""
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / "000002"
    damage(folder / name)
    error = error_from(checkpoints.load, tmp_path, trainers)
    assert error.startswith(f"cannot read {folder / name} (") and words in error
    assert error.endswith(f"; to continue from 000001, rm -r {folder}")
    assert steps_saved(tmp_path) == ["000000", "000001", "000002"]
    shutil.rmtree(folder)
    assert checkpoints.load(tmp_path, trainers) == 1


def test_a_damaged_description_is_one_line(quick, one_step, capsys):
    shutil.copytree(one_step, "run")
    cut(99)(Path("run/settings.json"))
    assert resume("run") == 2
    assert error_of(capsys).startswith("error: cannot read run/settings.json (")


@pytest.fixture(scope="module")
def trainers():
    return build_run(tiny_settings()).trainers


# ---- what breaks ---------------------------------------------------------------------------------


def test_a_reward_that_fails_stops_the_run_after_saving(judged, capsys):
    """In the second step, in one line."""
    reward = write_reward("if call > 4:\n    return [0, -torch.inf]")
    assert judged(*reward, "--steps 9 --out run") == 2
    output, errors = capsys.readouterr()
    assert "error: reward 'mine.py:reward' is infinite for image 1, of 'a " in errors
    assert output.endswith("stopped in the phase 'score'; continue with --resume run\n")
    assert steps_of("run/metrics.jsonl") == [1]
    assert steps_saved("run") == ["000000", "000001"]


def test_a_reward_that_fails_its_trial_leaves_nothing(quick):
    with pytest.raises(KeyError, match="no such face"):
        quick(*write_reward("raise KeyError('no such face')"), "--steps 1")
    assert not Path("runs").exists()


def test_where_nothing_is_saved_there_is_nothing_to_resume(judged, capsys):
    """The base is only judged, and its reward fails in that."""
    reward = write_reward("if call > 1:\n    return [0.0, torch.inf]")
    assert judged(*reward, "--steps 0 --out run") == 2
    output, errors = capsys.readouterr()
    assert "error: reward 'mine.py:reward' is infinite" in errors
    assert "--resume" not in output + errors


def test_what_comes_after_is_never_labelled_before(judged, one_step, capsys):
    """Where evaluations, pictures and adapter were thrown away: neither on the sheet nor in the
    lines."""
    shutil.copytree(one_step, "run")
    shutil.rmtree("run/evaluation")
    shutil.rmtree("run/adapter")
    Path("run/evaluation.jsonl").unlink()
    assert resume("run") == 0
    output = capsys.readouterr().out
    assert "evaluation after 1 step: " in output
    assert "before" not in output
    last = Path("run/evaluation/000001/sheet.png").read_bytes()
    assert Path("run/before-after.png").read_bytes() == last
    assert Path("run/adapter/adapter_model.safetensors").exists()


def test_a_sheet_that_is_cut_off_ends_no_later_evaluation(judged, monkeypatch):
    def write_half(image, file, **options):
        save(image, file, **options)
        if file.name.endswith("sheet.png"):
            cut(99)(file)
            raise SystemExit

    save = Image.Image.save
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Image.Image, "save", write_half)
        judged("--steps 1 --out run")
    assert resume("run") == 0 and Path("run/before-after.png").exists()


def test_after_a_kill_before_the_pictures_the_resumed_run_draws_them(judged, monkeypatch):
    """And opens what lies there as a picture, not as a program for Ghostscript."""
    show = Mock(side_effect=[None, SystemExit])  # of the last evaluation
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("viewer.show", show)
        judged("--steps 1 --out run")
    assert steps_of("run/evaluation.jsonl") == [0, 1] and not Path("run/before-after.png").exists()
    shutil.copytree("run", "strange")
    assert resume("run") == 0
    sheets = [Image.open(f"run/evaluation/00000{step}/sheet.png") for step in (0, 1)]
    assert Image.open("run/before-after.png").width > max(sheet.width for sheet in sheets)
    started = Mock()
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", started)
    program = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    Path("strange/evaluation/000000/sheet.png").write_text(program)
    assert resume("strange") == 0
    started.assert_not_called()


def test_a_run_that_diverges_says_where_to_start_again_and_saves_nothing_broken(quick, capsys):
    """Resumed, it would diverge again, also from a checkpoint that was saved before it showed."""
    reward = write_reward("")
    for saves, saved in ((20, ["000000"]), (1, ["000000", "000001"])):
        arguments = f"--lr 1e30 --warmup-steps 0 --steps 3 --save-every {saves} --out run-{saves}"
        for again in (False, True):
            assert (resume(f"run-{saves}") if again else quick(*reward, arguments)) == 2
            output, errors = capsys.readouterr()
            assert "error: sampled log-probs are not finite" in errors
            start = f"--adapter run-{saves}/checkpoints/000000"
            assert output.endswith(f"from an earlier step with a lower --lr: {start}\n")
            assert steps_saved(f"run-{saves}") == saved
    assert quick(*reward, start, "--steps 1") == 0


def test_a_step_skipped_in_part_is_no_skipped_step(quick, monkeypatch):
    """One of ten iterations of the second step has a finite gradient; `norm` is that one's. Ten
    tenths are one. And no KL is no KL of 0."""
    norms = iter([torch.nan, torch.inf] * 5 + [torch.inf] * 4 + [0.25] + [torch.nan] * 5)
    clip = lambda parameters, limit: torch.tensor(next(norms))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    with pytest.warns(UserWarning, match="no step was taken"):
        assert quick(*write_reward(""), "--steps 2 --iterations 10 --kl-coef 0 --out run") == 0
    skipped, grad_norm, kl = zip(
        *((line["skipped"], line["grad_norm"], line["kl"]) for line in records("run/metrics.jsonl"))
    )
    assert skipped == (1, pytest.approx(0.9))
    assert grad_norm == (0, 0.25) and kl == (None, None)


def test_out_of_gpu_memory_says_what_helps(quick, capsys, monkeypatch):
    """Here before the first step; see test_cards.py for the others."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr(train, "load", Mock(side_effect=error))
    assert quick("--steps 2 --out run") == 2
    line = error_of(capsys)
    assert line.startswith("error: out of GPU memory (CUDA out of memory. Tried to allocate 2.00")
    assert all(word in line for word in ("--offload yes", "--micro-batch-size", "--group-size"))
    assert not Path("run").exists()


def test_a_folder_that_vanishes_ends_in_a_clear_line(quick, capsys):
    reward = write_reward("if call == 4:\n    shutil.rmtree('run')")
    assert quick(*reward, "--steps 9 --out run") == 2
    assert "cannot write to run" in error_of(capsys)


def test_a_step_whose_records_are_not_all_written_is_not_saved(quick, capsys):
    """The file of its groups cannot be written."""
    reward = write_reward(
        "if call == 2:\n    os.remove('run/groups.jsonl')\n    os.mkdir('run/groups.jsonl')"
    )
    assert quick(*reward, "--steps 9 --out run") == 2
    assert "cannot write to run" in error_of(capsys) and steps_saved("run") == ["000000"]


def test_a_full_disk_ends_in_a_clear_line(quick, one_step, capsys, monkeypatch):
    """The optimiser's file on a device that is full; then the system refuses files above 100 KB,
    amid the adapter."""
    shutil.copytree(one_step, "a run")
    with monkeypatch.context() as patch:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patch.setattr(Path, "write_bytes", full)
        assert resume("'a run' --steps 2") == 2
    output, errors = capsys.readouterr()
    assert errors.endswith("No space left on device\n")
    assert "continue with --resume 'a run'" in output
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, limits[1]))
    try:
        assert resume("'a run' --steps 2") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write to a run" in error_of(capsys)
    assert steps_saved("a run")[-1] == "000001"  # what was written before is whole
    assert resume("'a run' --steps 2") == 0


def test_a_start_that_fails_can_be_repeated(quick, one_step, monkeypatch):
    """At its first checkpoint. What it started from is not taken for what the second starts from."""
    shutil.copytree(one_step, "before")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_adapter", Mock(side_effect=OSError("full")))
        assert quick("--steps 1 --adapter before --out run") == 2
    assert not Path("run/start").exists() and not Path("run/settings.json").exists()
    shutil.copytree("before/adapter", "run/start/adapter")  # a kill leaves it, and the lock
    Path("run/.lock").touch()
    assert quick("--train decoder --decode-steps 2 --steps 1 --out run") == 0
    assert not Path("run/start/adapter").exists() and not Path("run/adapter").exists()


# ---- signals -------------------------------------------------------------------------------------


def test_a_signal_finishes_the_step_saves_and_evaluates(judged, capfd):
    """It comes in the second step, when its pictures are judged."""
    reward = write_reward("if call == 5:\n    os.kill(os.getpid(), signal.SIGINT)")
    Path("typed.txt").write_text("# type: a\na red circle\n# type: b\na blue cross\n")
    typed = "--eval-prompts typed.txt --eval-count 2"
    assert judged(*reward, typed, "--steps 9 --eval-every 2 --out 'the run'") == 130
    output = "".join(capfd.readouterr())
    assert "stopping: the step at hand will be finished (again: stop now)" in output
    assert "saved; continue with --resume 'the run'" in output
    assert output.count("| - b ") == 1  # the last table has the types
    assert steps_of("the run/metrics.jsonl") == [1, 2]
    assert steps_saved("the run")[-1] == "000002"
    assert {"adapter", "before-after.png", "group-000002.png"} <= set(os.listdir("the run"))
    assert steps_of("the run/evaluation.jsonl") == [0, 2]


def test_a_signal_in_the_last_step_ends_a_run_that_is_complete(judged):
    reward = write_reward("if call == 4:\n    os.kill(os.getpid(), signal.SIGTERM)")
    assert judged(*reward, "--steps 1 --out run") == 0
    assert steps_of("run/evaluation.jsonl") == [0, 1]


@pytest.mark.parametrize("name", HEARD.split())
def test_a_signal_saves_the_whole_steps_at_once(quick, name):
    """In the third step, whose end SIGKILL does not wait for."""
    ask = "open('saved', 'a').write(' '.join(sorted(os.listdir('run/checkpoints'))) + '; ')"
    kill = f"os.kill(os.getpid(), signal.SIG{name})"
    reward = write_reward(f"if call == 4:\n    {ask}\n    {kill}\n    {ask}")
    assert quick(*reward, "--steps 9 --out run") == 130
    assert Path("saved").read_text() == "000000; 000000 000002; "
    assert steps_saved("run") == ["000002", "000003"]


def test_a_signal_amid_a_checkpoint_begins_no_second_one(quick, monkeypatch):
    write, written = Path.write_bytes, []

    def interrupted(file, data):
        if file.name == OPTIMIZER:
            written.append(file.name)
            if len(written) == 2:
                os.kill(os.getpid(), signal.SIGINT)
        write(file, data)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    assert quick(*write_reward(""), "--steps 9 --save-every 1 --out run") == 130
    assert len(written) == 2 and steps_saved("run") == ["000000", "000001"]


def test_nohup_and_another_thread_hear_no_signals(quick):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reward = write_reward("if call == 2:\n    os.kill(os.getpid(), signal.SIGHUP)")
    codes = []
    thread = threading.Thread(target=lambda: codes.append(quick(*reward, "--steps 2 --out run")))
    thread.start()
    thread.join()
    assert [*codes, quick(*reward, "--steps 2 --out again")] == [0, 0]


def closed_terminal():
    """For `prepare`: nobody reads on from the second step on."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    os.dup2(theirs, 1)
    os.dup2(theirs, 2)
    os.environ["TERMINAL"] = str(ours)


def closed_pipe():
    ours, theirs = os.pipe()
    os.dup2(theirs, 1)
    os.environ["TERMINAL"] = str(ours)


@pytest.mark.parametrize("prepare", [closed_terminal, closed_pipe])
def test_a_run_whose_output_nobody_reads_goes_on(start, prepare):
    """It closes before the models load."""
    close = "if call == 1:\n    os.close(int(os.environ['TERMINAL']))"
    flags = str.split("--steps 3 --out run")
    process = start(*QUICK, *write_reward(close), *flags, prepare=prepare)
    process.join(60)
    assert process.exitcode == 0, Path("output.txt").read_text()
    assert steps_of("run/metrics.jsonl") == [1, 2, 3] and steps_of("run/evaluation.jsonl") == [0, 3]


def test_a_signal_in_the_first_evaluation_ends_it(judged, capfd):
    """After the pictures at hand, without a step and without another evaluation."""
    calls = "open('calls', 'a').write('x')\nif call == 2:\n    os.kill(os.getpid(), signal.SIGINT)"
    reward = write_reward(calls)
    assert judged(*reward, "--eval-count 2 --steps 9 --out run") == 130
    assert "saved; continue with --resume run" in "".join(capfd.readouterr())
    assert len(Path("calls").read_text()) == 2  # the trial, and a first prompt of two
    assert steps_saved("run") == ["000000"]
    assert records("run/metrics.jsonl") == records("run/evaluation.jsonl") == []
    write_reward("")
    assert resume("run", "--steps 1") == 0
    assert steps_of("run/evaluation.jsonl") == [0, 1]


def test_a_second_signal_ends_at_once_and_loses_no_whole_step(quick, capfd):
    """It comes when the pictures of the second step are judged, and is no longer the run's."""
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    reward = write_reward(f"if call >= 3:\n    {kill}\n    {kill}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    assert quick(*reward, "--steps 9 --out run") == 130
    output, errors = capfd.readouterr()
    assert "stopping: the step at hand" in errors
    assert "stopped in the phase 'score'; continue with --resume run\n" in output
    assert steps_of("run/metrics.jsonl") == [1] and steps_saved("run") == ["000000", "000001"]


def test_interrupted_before_the_first_step_there_is_nothing_to_save(quick, monkeypatch):
    interrupt = lambda *arguments, **parts: signal.default_int_handler(signal.SIGINT, None)
    monkeypatch.setattr(train, "load", interrupt)
    assert quick("--steps 1") == 130
    assert not Path("runs").exists()


def test_a_character_that_the_console_lacks_is_replaced(monkeypatch):
    """As a Western Windows prints to a file."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
    assert exit_code(lambda: print("计数 é")) is None
    sys.stdout.flush()
    sys.stdout.seek(0)
    assert sys.stdout.read() == "?? é\n"


# ---- kills ---------------------------------------------------------------------------------------


def hold(folder):
    with claimed(folder, None):
        Path("held").touch()
        signal.pause()


def test_a_run_is_resumed_by_one_process_at_a_time(quick, one_step, capsys):
    """A run that another process has resumed is refused before anything is written; a kill frees
    it."""
    shutil.copytree(one_step, "run")
    process = multiprocessing.get_context("fork").Process(target=hold, args=["run"], daemon=True)
    process.start()
    while process.is_alive() and not Path("held").exists():
        time.sleep(0.01)
    times = lambda: {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    before = times()
    assert resume("run", "--steps 2") == 2
    words = "another process is at work on the run in run: wait for it, or stop it"
    assert words in error_of(capsys) and times() == before
    process.kill()
    process.join()
    assert resume("run", "--steps 2") == 0
    assert steps_of("run/metrics.jsonl") == [1, 2]


def keep(name):
    """What a kill at this moment leaves."""
    if not Path(name).exists():
        shutil.copytree("run", name)


def test_a_kill_as_a_run_goes_on_loses_no_record(one_step, tmp_path, monkeypatch):
    run, write = shutil.copytree(one_step, tmp_path / "run"), Path.write_text
    half = lambda file, text: sys.exit(write(file, text[: len(text) // 2]))
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(SystemExit):
        RunFolder(run, tiny_settings(), NO_DATA, {}, 1)
    for name in ("metrics", "groups", "evaluation"):
        assert records(run / f"{name}.jsonl") == records(one_step / f"{name}.jsonl")


def test_a_kill_while_saving_leaves_the_checkpoint_before(judged, monkeypatch):
    """A half-written checkpoint does not count, and what it leaves is no hindrance."""
    write, replace, remove = Path.write_bytes, os.replace, shutil.rmtree

    def write_half(file, data):
        if file.name == OPTIMIZER and steps_saved("run")[-1:] == ["000002"]:
            write(file, data[: len(data) // 2])
            keep("amid the optimiser")
        write(file, data)

    def rename_late(source, target):
        if Path(target).name == "000003":
            keep("before the renaming")
        replace(source, target)

    def remove_half(path, *arguments, **options):
        if (Path(path) / OPTIMIZER).exists():  # a whole checkpoint, the first
            assert steps_saved("run") == [".unfinished", "000000", "000002", "000003"]
            (Path(path) / OPTIMIZER).unlink()
            keep("amid pruning")
        remove(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        patch.setattr(os, "replace", rename_late)
        patch.setattr(shutil, "rmtree", remove_half)
        often = "--steps 4 --save-every 1 --eval-every 2 --out run"
        assert judged(*write_reward(""), often) == 0
    moments = {"amid the optimiser": 2, "before the renaming": 2, "amid pruning": 3}
    for moment, newest in moments.items():
        assert steps_saved(moment)[-1] == f"{newest:06d}"
        assert resume(f"'{moment}'") == 0
        same_run("run", moment)
        # Those of evaluated steps and the newest two stay, and nothing that is unfinished.
        assert steps_saved(moment) == ["000000", "000002", "000003", "000004"]
    kept = Path("run/checkpoints/000003")
    kept.rename("elsewhere")
    kept.symlink_to(Path("elsewhere").resolve())
    assert resume("run --steps 6 --eval-every 5") == 0
    assert steps_saved("run") == [f"{step:06d}" for step in (0, 2, 3, 4, 5, 6)]
    assert Path("elsewhere", OPTIMIZER).exists()


@pytest.mark.parametrize("sep", ["/", "\\"])
def test_only_the_beginning_of_a_path_is_the_projects(monkeypatch, sep):
    monkeypatch.setattr(os, "sep", sep)
    monkeypatch.setattr("runtime.resume.ROOT", Path("/app"))
    specs = f"clip=/app{sep}c,/app{sep}m.py:f,/x/app{sep}m.py:f:2"
    assert portable({"prompts": f"/data/app{sep}a.txt", "reward": specs}) == {
        "prompts": f"/data/app{sep}a.txt",
        "reward": f"clip=c,m.py:f,/x/app{sep}m.py:f:2",
    }
