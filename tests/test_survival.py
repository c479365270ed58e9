"""Runs that survive: each step is on disk, a resumed run reads its own folder, signals end it
whole.

Everything here is a run of train.main on short pictures; see conftest.py.
"""

import dataclasses
import errno
import importlib
import json
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import train_edits
from conftest import (
    QUICK,
    ROOT,
    adapter_of,
    build_run,
    error_from,
    perturb,
    prompts_of,
    records,
    resume,
    shorten,
    steps_of,
    steps_saved,
    tiny_settings,
    write_reward,
)
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from filelock import FileLock
from safetensors.torch import load_file, save_file
from train_decoder import DecoderSettings

import train
from glm_image.adapters import CONFIG, WEIGHTS
from glm_image.decoder import DecoderGRPO
from runtime.folder import MAY_CHANGE, WHOLE, copy_adapters, find_adapters, newest

SCRIPTS = "examples/train_decoder.py", "examples/train_edits.py"


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

DICE = "return torch.rand(len(images))"


def test_a_resumed_run_equals_the_uninterrupted_one(judged):
    """With what a kill may leave in the files: records of later steps, half a line, and no
    evaluation of the step that was saved last. A checkpoint that somebody has copied is left
    alone. The prompts that the run was started with are gone."""
    Path("mine").mkdir()
    Path("mine/helper.py").write_text("SCALE = 2\n")
    Path("mine/own.py").write_text(
        "import torch, helper\ndef f(images, prompts, targets):\n"
        "    return helper.SCALE * torch.rand(len(images))\n"
    )
    often = "--reward mine/own.py:f,ssim:0.5 --save-every 1 --eval-every 1 --iterations 2"
    for run, steps in (("run", 2), ("again", 1)):
        assert judged(often, "--warmup-steps 9 --steps", steps, "--out", run) == 0
    Path("prompts.txt").unlink()
    Path("elsewhere").mkdir()
    again = Path("again").rename("elsewhere/again")
    for name in ("metrics", "groups"):
        with open(again / f"{name}.jsonl", "a") as file:
            file.write('{"step": 3, "of": "a step without a checkpoint"}\n{"step": 4, "rew')
    first = (again / "evaluation.jsonl").read_text().splitlines()[0]
    (again / "evaluation.jsonl").write_text(f"{first}\n")
    shutil.copytree(again / "checkpoints/000001", again / "checkpoints/000001-good")
    assert resume(again, "--steps 2") == 0
    same_run("run", again)
    assert steps_saved(again) == ["000001", "000001-good", "000002"]


def test_the_rate_warms_up_by_the_step_whose_number_a_checkpoint_has(quick, capsys):
    """Adam's first step is as long as the rate, whatever the gradient: a third of it, where the
    third step has all."""
    arguments, rates = "--warmup-steps 2 --lr 0.01 --save-every 1 --steps 1 --out run", []
    for steps in (1, 2, 3):
        code = resume("run --steps", steps) if rates else quick(*write_reward(""), arguments)
        (file,) = Path("run/checkpoints").glob("*/adapter-optimizer.pt")  # the newest has one
        state = torch.load(file, weights_only=True)
        rates.append(state["param_groups"][0]["lr"])
        assert (code, file.parent.name) == (0, f"00000{steps}")
        if steps == 1:
            weights = load_file(file.parent / "adapter/adapter_model.safetensors")
            moved = [x.abs().max().item() for name, x in weights.items() if "lora_B" in name]
            assert max(moved) == pytest.approx(0.01 / 3, rel=0.01)
    assert "step 3/3, epoch 1.5 | reward" in capsys.readouterr().out
    assert rates == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])


def test_the_newest_checkpoint_stays_and_those_of_evaluated_steps(judged, capsys):
    """The newest alone has an optimizer, which is two thirds of it. Seen by a reward from step 2 on,
    by when the step before is saved. Equal rewards, such as step 2 gets, move nothing."""
    see = "print(*sorted(os.listdir('run/checkpoints')), file=open('seen.txt', 'a'))"
    equal = "if call == 4:\n    return torch.zeros(len(images))"
    reward = write_reward(f"if os.path.exists('run/checkpoints'):\n    {see}\n{equal}")
    assert judged(*reward, "--steps 4 --eval-every 3 --out run") == 0
    assert "(2 of the last 3 steps moved the policy)" in capsys.readouterr().out
    seen = ["000001", "000002"] + ["000003"] * 2  # the evaluation and the fourth step
    assert Path("seen.txt").read_text().split("\n")[:4] == seen
    assert steps_saved("run") == ["000003", "000004"]
    assert not Path("run/checkpoints/000003/adapter-optimizer.pt").exists()
    assert Path("run/checkpoints/000004/adapter-optimizer.pt").exists()


def test_fewer_checkpoints_for_a_slow_disk(judged, start):
    """--save-every counts the steps between them. An evaluated step has one, and so has the last.
    A resumed run makes the other steps again."""
    kill = write_reward("if call == 7:\n    os.kill(os.getpid(), signal.SIGKILL)")  # in step 5
    start(*QUICK, *kill, *str.split("--steps 7 --save-every 3 --eval-every 0 --out killed")).join()
    assert steps_saved("killed") == ["000003"] and steps_of("killed/metrics.jsonl") == [1, 2, 3, 4]
    assert judged(*write_reward(""), "--steps 5 --save-every 3 --eval-every 4 --out whole") == 0
    assert steps_saved("whole") == ["000004", "000005"]


def test_a_resumed_run_takes_only_what_may_change(quick, one_step, capsys):
    names = {
        each.name
        for kind in (DecoderSettings, train_edits.EditSettings)
        for each in dataclasses.fields(kind)
    }
    free = "micro_batch_size steps device offload save_every eval_every tracker"
    assert {*free.split()} == MAY_CHANGE & names
    shutil.copytree(one_step, "run")
    assert resume("run", "--lr 0.003 --group-size 4") == 2
    words = "run began with group_size 2 (now 4), lr 0.002 (now 0.003): resume it with the same, or"
    assert words in (error := error_of(capsys)) and error.endswith("its adapter: --adapter run")
    assert resume("run", "--out other") == 2
    assert "leave out --out" in error_of(capsys)
    assert train_edits.main(["--resume", "run"]) == 2
    words = f"{Path('run/settings.json')} is of a run of train.py, not of examples/train_edits.py"
    assert words in error_of(capsys)
    assert resume("nothing") == 2
    assert f"cannot read {Path('nothing/settings.json')} ([Errno 2] No such" in error_of(capsys)
    assert resume("run --micro-batch-size 1 --save-every 1 --steps 2 --lr 0.002") == 0
    assert steps_of("run/metrics.jsonl") == [1, 2]
    capsys.readouterr()
    assert resume("run") == 0  # with these steps
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 steps, ")
    assert resume("run --steps 1") == 0  # it has made more
    settings = json.loads(Path("run/settings.json").read_text())
    for values, words in (
        ({"lr": None}, "run began with lr None (now 0.001): resume"),
        ({"older": 1}, "(unrecognized arguments: --older=1)"),
    ):
        Path("run/settings.json").write_text(json.dumps(settings | values))
        assert resume("run") == 2 and words in error_of(capsys)


def test_a_run_goes_on_anywhere_with_what_it_began_with(quick, tmp_path, monkeypatch):
    """In a folder that looks like one of Windows; a linked reward file keeps its name, and finds
    what lies beside the file, both where they were."""
    Path("lib").mkdir()
    Path("lib/real.py").write_text(
        "from beside import f\n\ndef own(images):\n    return f(images)\n"
    )
    Path("lib/beside.py").write_text("def f(images):\n    return range(len(images))\n")
    Path("mine.py").symlink_to("lib/real.py")
    run = Path("lr=1e-4, a\\start,b").absolute()
    row = {"prompt": "a red circle", "target": "2.png"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    targets = Path("targets").absolute()
    flags = f"--prompts rows.jsonl --targets {targets} --eval-targets {targets}"
    flags += f" --reward ' mse, {Path('mine.py').absolute()}:own'"
    assert quick(flags, "--steps 1 --out", shlex.quote(str(run))) == 0
    assert {"mine.py", "prompts.jsonl"} <= set(os.listdir(run / "start"))
    before = (run / "settings.json").read_text()
    Path("rows.jsonl").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume(shlex.quote(str(run)), "--steps 2") == 0
    first, last = records(run / "metrics.jsonl")
    assert first.keys() == last.keys() and "reward/mine.py:own" in last
    after = before.replace('"steps": 1', '"steps": 2').replace("--steps 1", "--steps 2")
    assert (run / "settings.json").read_text() == after


def test_a_resume_stops_where_a_reward_file_is_another(quick, capsys):
    """The new file, copied to start/, mends the run; a copy there brings it back."""
    code, mine, copy = "f = lambda images: [{}, 1]\n", Path("mine.py"), Path("run/start/mine.py")
    mine.write_text(code.format(0))
    assert quick("--reward mine.py:f --steps 1 --out run") == 0
    ways = f"run began with {copy} ({mine.absolute()} differs: copy one over the other)"
    edit = lambda: mine.write_text(code.format(9))
    for change, words in ((edit, ways), (mine.unlink, "the file mine.py does not exist")):
        change()
        assert resume("run", "--steps 2") == 2 and words in error_of(capsys)
    for number, steps in ((0, 2), (0.5, 3)):
        copy.write_text(code.format(number))
        shutil.copy(copy, mine)
        assert resume("run", "--steps", steps) == 0
    assert [each["reward"] for each in records("run/metrics.jsonl")] == [0.5, 0.5, 0.75]


def test_a_resume_warns_where_other_modules_of_the_users_are_others(quick, capsys):
    """What a reward file imports; and the functions that draw targets."""
    Path("helper.py").write_bytes(b"# coding: latin-1, not the usual: \xe9\nVALUE = 1\n")
    Path("late.py").touch()
    mine = "from helper import VALUE\ndef f(images):\n    import late\n    return [VALUE, 2]\n"
    Path("mine.py").write_text(mine)
    draw = "from PIL import Image\nt = lambda: [Image.new('RGB', (32, 32), 'red')] * 2\n"
    Path("draw.py").write_text(draw)
    flags = "--reward mine.py:f,mse --targets draw.py:t --eval-targets draw.py:t"
    assert quick(flags, "--steps 1 --out run") == 0
    assert resume("run") == 0 and "began" not in capsys.readouterr().out
    made = json.loads(Path("run/settings.json").read_text())["versions"]["your modules"]
    found = []
    for name in ("helper.py", "draw.py", "late.py", None):  # and each time
        if name:
            with open(name, "a", encoding="utf-8") as file:
                file.write("MORE = 1\n")
        assert resume("run") == 0
        text = capsys.readouterr().out
        found += re.findall(rf"warning: run began with your modules {made} \(now (\w+)", text)
    assert len(found) == 4 and len({made, *found}) == 4 and found[2] == found[3]


OWN_SCRIPT = """
import train
from devices import plan
from runtime.data import read_inputs
from runtime.settings import Settings, parse_settings
from runtime.terminal import exit_code

@exit_code
def main(arguments):
    settings = parse_settings(arguments, Settings, __file__)
    return train.train(settings, plan(settings), read_inputs(settings), script=__file__)
"""


def test_a_run_of_a_users_own_script_is_resumed_by_that_script_alone(quick, capsys, monkeypatch):
    Path("own_run.py").write_text(OWN_SCRIPT)
    monkeypatch.syspath_prepend(Path.cwd())
    own, flags = importlib.import_module("own_run"), ["--steps", "0", "--out", "run"]
    assert own.main([*QUICK, *flags]) == 0
    script = json.loads(Path("run/settings.json").read_text())["script"]
    assert script == "own_run.py"
    assert resume("run", main=train.main) == 2
    assert f"is of a run of {script}, not of train.py" in error_of(capsys)
    assert resume("run", main=own.main) == 0


def test_zero_steps_evaluates_only(judged, one_step, capsys):
    assert judged("--steps 0 --out base") == 0
    assert "warning: cannot show" not in capsys.readouterr().out
    (expected, _), (found,) = (records(f"{run}/evaluation.jsonl") for run in (one_step, "base"))
    assert found == expected
    assert not Path("base/adapter").exists() and not Path("base/checkpoints").exists()


def test_a_second_stage_starts_from_an_adapter_which_is_its_reference(judged, one_step, capsys):
    """A published one, with another rate; the first KL is 0, and resumed it is as if it had not
    stopped."""
    config = shutil.copytree(one_step / "adapter", Path("downloaded")) / "adapter_config.json"
    config.write_text(config.read_text().replace("vision_language_encoder", "elsewhere"))
    second = "--adapter downloaded --kl-coef 0.5 --lr 0.03 --warmup-steps 0"
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert judged(second, "--steps 2 --eval-every 1 --out straight") == 0
    first, last = (line["kl"] for line in records("straight/metrics.jsonl"))
    assert first == 0 and last > 1e-3
    last = records(one_step / "evaluation.jsonl")[-1]
    first = records("straight/evaluation.jsonl")[0]
    other = {"step": 1, "shown": [], "moved": []}  # files have other places
    assert first | other == last | other
    trained, adapter = (
        load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("straight", one_step)
    )
    assert trained.keys() == adapter.keys()
    left = {file.name for file in Path("straight/checkpoints/000002/adapter").iterdir()}
    assert left == {CONFIG, WEIGHTS}  # and no reference
    assert judged(second, "--steps 1 --eval-every 1 --out stopped") == 0
    shutil.rmtree("downloaded")
    assert resume("stopped", "--steps 2") == 0
    same_run("straight", "stopped")
    begun = train.parse_settings(["--config", "straight/settings.json"]).adapter
    assert begun == "downloaded"
    assert judged("--adapter nowhere") == 2
    assert "--adapter nowhere: no run, no checkpoint and no adapter" in error_of(capsys)


def test_an_adapter_comes_from_the_newest_checkpoint_of_a_run(judged, one_step, capsys):
    """Which has no adapter/ of its own before it has ended. What was judged is said, and trained
    from there when the evaluation is resumed."""
    shutil.copytree(one_step, "going")
    shutil.rmtree("going/adapter")
    assert judged("--adapter going --steps 0 --out again") == 0
    (expected, found) = (records(f"{run}/evaluation.jsonl")[-1] for run in ("going", "again"))
    judged_one = str(Path("going/checkpoints/000001"))
    assert found["adapter"] == judged_one and expected["adapter"] is None
    assert f"| reward | {judged_one} |" in capsys.readouterr().out
    other = {"step": 1, "shown": [], "moved": [], "adapter": None}  # files have other places
    assert found | other == expected | other
    shutil.rmtree("going")
    assert resume("again", "--steps 1") == 0
    assert "| reward | before | after 1 step |" in capsys.readouterr().out
    assert adapter_of("again") != adapter_of(one_step)
    card = Path("again/adapter/README.md").read_text()
    assert f", from 1 step of GRPO, begun from `{judged_one}`.\n" in card


def test_both_halves_of_a_model_are_in_each_checkpoint_and_at_the_end(judged, one_step):
    """The decoder is trained over a policy that was trained before, then the policy over that
    decoder: what each run ends with is what --adapter evaluates."""
    shutil.copytree(one_step, "policy")
    often = "--steps 1 --save-every 1 --eval-decode-steps 2 --warmup-steps 0"
    decoder = f"--train decoder --decode-steps 2 --lr 0.1 {often}"
    assert judged(decoder, "--adapter policy --out decoder") == 0
    assert judged(often, "--lr 0.03 --adapter decoder --out both") == 0
    for run in ("decoder", "both"):
        for folder in (run, f"{run}/checkpoints/000001"):
            assert {*find_adapters(newest(folder))} == {"adapter", "decoder-adapter"}
        words = "--eval-decode-steps 2 --steps 0 --adapter"
        assert judged(words, run, f"--out {run}-again") == 0
        last = records(f"{run}/evaluation.jsonl")[-1]["reward"]
        assert records(f"{run}-again/evaluation.jsonl")[0]["reward"] == last
    same = lambda name, *runs: len({Path(run, name).read_bytes() for run in runs}) == 1
    policy = "adapter/adapter_model.safetensors"
    of_decoder = f"decoder-{policy}"
    assert same(policy, "policy", "decoder") and not same(policy, "decoder", "both")
    assert same(of_decoder, "decoder", "both")
    taken = f", as it was in `{Path('policy/checkpoints/000001')}`: this run trained another part."
    assert taken in Path("decoder/adapter/README.md").read_text()
    assert "from 1 step of GRPO" in Path("decoder/decoder-adapter/README.md").read_text()
    stock = "decoder-adapter/pytorch_lora_weights.safetensors"  # which docs/after.md loads
    expected, found = (load_file(f"{run}/{stock}") for run in ("decoder", "both"))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    shutil.copytree("both", "stopped")
    saved = Path("stopped/checkpoints/000001")
    (saved / WHOLE).unlink()
    (saved / "adapter" / CONFIG).unlink()  # as a kill leaves it
    assert resume("stopped") == 0
    same_run("both", "stopped")
    assert (saved / "adapter" / CONFIG).exists()


# ---- adapters ------------------------------------------------------------------------------------


def test_an_adapter_is_found_in_a_run_in_a_checkpoint_and_alone(one_step, tmp_path):
    own, of_decoder = tmp_path / "adapter", tmp_path / "decoder-adapter"
    for folder in (own, of_decoder):
        shutil.copytree(one_step / "adapter", folder)
    saved, find = one_step / "checkpoints/000001", lambda place: find_adapters(newest(place))
    assert find(one_step) == find(saved) == {"adapter": saved / "adapter"}
    assert find(tmp_path) == {"adapter": own, "decoder-adapter": of_decoder}
    assert find(own) == {"adapter": own} and find(of_decoder) == {"decoder-adapter": of_decoder}


def test_half_a_copy_is_no_adapter(one_step, tmp_path, monkeypatch):
    """Also over an older copy: a second Ctrl-C may end an export."""
    own = {"adapter": one_step / "adapter"}
    copy_adapters(own, tmp_path)
    first = lambda *files: monkeypatch.setattr(shutil, "copyfile", second) or copy(*files)
    copy, second = shutil.copyfile, Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(shutil, "copyfile", first)
    with pytest.raises(KeyboardInterrupt):
        copy_adapters(own, tmp_path)
    assert "no adapter is there" in error_from(find_adapters, tmp_path / "adapter")


def test_an_adapters_dropout_does_not_act(one_step, tmp_path, monkeypatch):
    """In train mode, in which an update recomputes activations. Sampling is in eval mode."""
    shorten(monkeypatch.setattr)
    config = shutil.copytree(one_step / "adapter", tmp_path / "own") / "adapter_config.json"
    config.write_text(config.read_text().replace('dropout": 0.0', 'dropout": 0.5'))
    run = build_run(settings := tiny_settings("--temperature 6 --adapter", config.parent))
    perturb(run.trainer.model)
    (group,) = run.trainer.sample(run.glm_image.encode(prompts_of("a ring"), settings), 2, 0)
    run.trainer.model.train()
    again = run.trainer.logprobs(group, torch.arange(2))
    torch.testing.assert_close(again.detach(), group.old_logprobs, atol=1e-4, rtol=0)


def test_an_adapter_of_another_model_is_refused(one_step, tmp_path):
    """PEFT would leave out what has another name."""
    folder = shutil.copytree(one_step / "adapter", tmp_path / "adapter")
    file, given = folder / WEIGHTS, tiny_settings("--adapter", tmp_path)
    save_file(load_file(file) | {"own": torch.ones(2)}, file)
    error = error_from(build_run, given)
    assert error.startswith(f"cannot use the adapter {folder} ({file} is of another model: own is")


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "LOHA"},
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(one_step, tmp_path, change):
    """PEFT would load a part of it, or change the model's own weights."""
    config = shutil.copytree(one_step / "adapter", tmp_path / "own") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert "(it is not plain LoRA" in error_from(find_adapters, config.parent)


def test_the_adapter_may_go_while_the_models_load(quick, one_step, monkeypatch):
    """A run that goes on removes its older checkpoints."""
    shutil.copytree(one_step, "going")
    load = train.load
    monkeypatch.setattr(train, "load", lambda *given: shutil.rmtree("going") or load(*given))
    assert quick("--adapter going --steps 1 --out run") == 0


# ---- what breaks ---------------------------------------------------------------------------------


def test_a_step_that_fails_costs_that_step(judged, capsys):
    """In one line, or with the traceback of an error that is no user's."""
    reward = write_reward("if call > 3:\n    return [0, -torch.inf]")
    assert judged(*reward, "--steps 9 --out run") == 2
    assert "reward 'mine.py:reward' has to return 2 finite numbers" in error_of(capsys)
    assert steps_of("run/metrics.jsonl") == [1] and steps_saved("run") == ["000001"]
    reward = write_reward("if call > 4:\n    raise ConnectionError('503 Service Unavailable')")
    with pytest.raises(ConnectionError, match="503"):
        judged(*reward, "--steps 9 --out other")
    assert steps_saved("other") == ["000002"]


def test_what_comes_after_is_never_labelled_before(judged, one_step, capsys):
    """Where evaluations, pictures and adapter were thrown away: neither on the sheet nor in the
    lines."""
    shutil.copytree(one_step, "run")
    shutil.rmtree("run/evaluation")
    shutil.rmtree("run/adapter")
    Path("run/evaluation.jsonl").unlink()
    assert resume("run") == 0
    output = capsys.readouterr().out
    assert "| after 1 step |" in output
    assert "before" not in output
    assert "step 0" not in Path("run/index.html").read_text()
    assert Path("run/adapter/adapter_model.safetensors").exists()


def test_after_a_kill_before_the_pictures_the_resumed_run_draws_them(judged, monkeypatch):
    show = Mock(side_effect=[None, SystemExit])  # of the last evaluation
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("viewer.show", show)
        judged("--steps 1 --out run")
    assert steps_of("run/evaluation.jsonl") == [0, 1] and not Path("run/before-after.png").exists()
    assert resume("run") == 0
    assert Path("run/before-after.png").exists()


def test_a_run_that_diverges_ends_in_one_line(quick, capsys):
    """Resumed, it does again."""
    arguments = "--lr 1e30 --warmup-steps 0 --steps 3 --out run"
    for again in (False, True):
        assert (resume("run") if again else quick(*write_reward(""), arguments)) == 2
        assert "sampled log-probs are not finite" in error_of(capsys)


def test_a_folder_without_a_step_is_taken_again_and_no_other(quick, start, capsys):
    """Of a run that was killed as its models loaded; a folder that was there before stays, and so
    does what others put in it."""
    killed = start(*QUICK, "--out", "run", prepare=kill_as_models_load)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and "settings.json" in os.listdir("run")
    assert quick("--lr 3e-3 --steps 1 --out run") == 0
    assert json.loads(Path("run/settings.json").read_text())["lr"] == 3e-3
    assert steps_saved("run") == ["000001"]
    assert quick("--steps 1 --out run") == 2
    assert "run is not empty: choose another --out, or continue its run" in error_of(capsys)
    Path("mine/start").mkdir(parents=True)
    Path("mine/start/thesis.txt").touch()
    Path("mine/settings.json").write_text("{}")
    assert quick("--steps 1 --out mine") == 2
    assert Path("mine/start/thesis.txt").exists() and "mine is not empty" in error_of(capsys)
    assert quick("--steps 1 --out mine/settings.json/run") == 2
    assert "cannot use the folder mine/settings.json/run (" in error_of(capsys)


def test_a_run_that_fails_in_its_first_step_is_in_nobodys_way(judged, capsys):
    """What it has judged goes with it. A run that only judges is whole."""
    fails = write_reward("if call == 3:\n    return [torch.inf] * len(images)")
    assert judged(*fails, "--steps 1 --out run") == 2
    assert steps_of("run/evaluation.jsonl") == [0]
    assert judged("--reward mse --steps 0 --out run") == 0
    (found,) = records("run/evaluation.jsonl")
    assert "reward/mse" in found and "reward/mine.py:reward" not in found
    assert judged("--steps 0 --out run") == 2 and "run is not empty" in error_of(capsys)


def kill_as_models_load():
    train.load = lambda *given: os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_read_is_what_is_kept(quick, monkeypatch):
    """Though prompts are edited while the reward models load; and a reward goes elsewhere."""
    mine = Path("mine.py").absolute()
    mine.write_text("import os\ndef f(images):\n    os.chdir('/')\n    return range(len(images))\n")
    here, load_rewards = Path.cwd(), train.load_rewards

    def slowly(settings, data):
        Path("prompts.txt").write_text("a ring\n")
        load_rewards(settings, data)

    with monkeypatch.context() as patch:
        patch.setattr(train, "load_rewards", slowly)
        assert quick(f"--reward {mine}:f --eval-every 0 --out run", "--steps 1") == 0
    os.chdir(here)
    assert resume("run", "--steps 2") == 0
    prompts = [each["prompt"] for each in records(here / "run/groups.jsonl")]
    assert sorted(prompts) == ["a blue cross", "a red circle"]


def test_a_power_cut_leaves_a_checkpoint_whole(quick, monkeypatch):
    """Its files, and the records of its step, are on the disk before its last file, and older
    optimizers go after that. A disk may refuse to say so."""
    done, touch = [], Path.touch

    def synced(number):
        done.append(Path(f"/proc/self/fd/{number}").resolve())
        raise OSError(errno.EINVAL, "refused")

    def touched(file):
        if file.name != WHOLE:
            return touch(file)
        files = {*file.parent.rglob("*.*"), *file.parents[2].glob("*.jsonl")}
        assert len(files) == 6 and {x.resolve() for x in files} <= {*done}
        assert len([*file.parents[1].rglob("*.pt")]) == int(file.parent.name)
        done.clear()
        touch(file)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "touch", touched)
    assert quick(*write_reward(""), "--steps 2 --out run") == 0
    assert steps_saved("run") == ["000002"] and done[0].name == WHOLE


def test_a_run_needs_no_screen(quick, monkeypatch):
    """The tee of `| tee log` has ended."""
    monkeypatch.setattr(sys, "stdout", Mock(flush=Mock(side_effect=BrokenPipeError)))
    assert quick("--steps 1 --out run") == 0
    assert steps_saved("run") == ["000001"]


@pytest.mark.parametrize("file", ["adapter/adapter_model.safetensors", "adapter-optimizer.pt"])
def test_a_checkpoint_that_was_cut_short_is_named(judged, one_step, capsys, file):
    shutil.copytree(one_step, "run")
    os.truncate(f"run/checkpoints/000001/{file}", 1000)
    assert resume("run --steps 2") == 2
    line = error_of(capsys)
    assert line.startswith(f"error: cannot read {Path('run').resolve()}/checkpoints/000001 (")
    assert line.endswith("; copy it again, or begin a run from an older checkpoint with --adapter")


def test_a_strangers_run_is_data(judged, one_step):
    """The file of an optimizer runs no code."""
    shutil.copytree(one_step, "run")
    torch.save({"state": Bomb()}, "run/checkpoints/000001/adapter-optimizer.pt")
    assert resume("run --steps 2") == 2
    assert not Path("ran").exists()


class Bomb:
    def __reduce__(self):
        return open, ("ran", "w")


def test_a_kill_as_a_resumed_run_writes_its_settings_leaves_what_was_there(quick, one_step):
    file = Path(shutil.copytree(one_step, "run"), "settings.json")
    before, write = file.read_text(), Path.write_text

    def killed(path, text, encoding):
        write(path, "", encoding)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        assert resume("run", "--steps 2") == 130
    assert file.read_text() == before


# ---- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, saved", [(2, 0), (3, 0), (6, 2)])
def test_ctrl_c_leaves_the_newest_checkpoint(judged, capfd, call, saved):
    """In the evaluation before training, in the first step, and in the fourth, where each second step
    has a checkpoint."""
    once = f"if call == {call} and not os.path.exists('pressed'):\n    open('pressed', 'w')\n"
    reward = write_reward(f"{once}    os.kill(os.getpid(), signal.SIGINT)")
    assert judged(*reward, "--steps 9 --save-every 2 --eval-every 0 --out 'the run'") == 130
    output = capfd.readouterr().out
    assert f"\n{saved} steps, " in output and "\ncontinue with --resume the run" in output
    if call == 6:
        ended = "ended after 3 of 9 steps, of which 2 are saved: --resume"
        assert ended in Path("the run/index.html").read_text()
    card, adapter = Path("the run/adapter/README.md"), "adapter/adapter_model.safetensors"
    assert card.exists() == bool(saved)
    if saved:
        assert "from 2 steps of GRPO" in card.read_text()
        newest = Path("the run/checkpoints/000002", adapter)
        assert Path("the run", adapter).read_bytes() == newest.read_bytes()
    assert resume("'the run' --steps 4") == 0
    assert steps_of("the run/metrics.jsonl") == [1, 2, 3, 4]
    assert steps_of("the run/evaluation.jsonl") == [0, 4]


def test_ctrl_c_ends_the_loop_of_a_shell():
    """Which goes on after an exit code, also of 130. A terminal tells all processes.

    Handlers of atexit run before. A string that they execute makes Python forget the signal.
    """
    press = "import atexit, os, signal\nfrom runtime.terminal import exit_code, leave\n"
    press += 'atexit.register(print, "handled")\natexit.register(exec, "0")\n'
    press += "leave(exit_code(lambda: os.killpg(0, signal.SIGINT))())"
    loop = f"for run in 1 2; do {sys.executable} -c '{press}'; echo ended $?; done"
    options = {"cwd": ROOT, "start_new_session": True, "capture_output": True, "text": True}
    options["env"] = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(["bash", "-c", loop], check=False, **options)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "handled\n" and done.stderr == ""


@pytest.mark.parametrize("script", ["train.py", *SCRIPTS])
def test_scripts_leave_with_their_code(monkeypatch, script, capsys):
    codes = []
    monkeypatch.setattr("runtime.terminal.leave", codes.append)
    monkeypatch.setattr(sys, "argv", [script, "--steps", "-1"])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert codes == [2] and "--steps must be at least 0" in error_of(capsys)


def test_ctrl_c_in_an_update_leaves_no_half_step(judged, monkeypatch):
    """Of the decoder's adapter neither: its second file is not a copy."""
    steps, step = [], DecoderGRPO.step

    def pressed(trainer):
        norm = step(trainer)
        steps.append(norm)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return norm

    monkeypatch.setattr(DecoderGRPO, "step", pressed)
    words = "--train decoder --decode-steps 2 --lr 0.1 --warmup-steps 0 --out run"
    assert judged(*write_reward(""), words, "--steps 3") == 130 and steps[0] > 0
    folder, saved = Path("run/decoder-adapter"), Path("run/checkpoints/000001/decoder-adapter")
    one, other = (load_file(file) for file in (folder / LORA_WEIGHT_NAME_SAFE, saved / WEIGHTS))
    assert len(one) == len(other)
    for name, x in other.items():
        assert torch.equal(one[name.removeprefix("base_model.model.")], x)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_reward_may_open_a_pool_in_every_call(judged, start, method):
    """Its functions are its own module's. Ctrl-C, which a terminal sends to all, ends the run while
    the pool is at work."""
    Path("mine.py").write_text(
        "import os, time\nfrom multiprocessing import get_context\n\ncalls = []\n\n"
        "def one(waits):\n    if waits:\n        open(f'at-{os.getpid()}', 'w').close()\n        time.sleep(99)\n"
        "    return float(os.getpid())\n\n"
        f"def f(images):\n    calls.append(1)\n    with get_context('{method}').Pool(2) as pool:\n"
        "        return pool.map(one, [len(calls) == 4] * len(images))\n"
    )
    flags = "--reward mine.py:f --steps 6 --eval-every 0 --out run"
    run = start(*QUICK, *flags.split(), prepare=os.setpgrp)
    while run.is_alive() and len([*Path().glob("at-*")]) < 2:
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)
    run.join(60)
    assert run.exitcode == 130, Path("output.txt").read_text()
    assert steps_of("run/metrics.jsonl") == [1] and Path("run/adapter/README.md").exists()


# ---- kills ---------------------------------------------------------------------------------------


def test_kills_at_random_moments_change_nothing(judged, start):
    """Each of some runs is killed, resumed to its end, and compared. $KILLS: how many runs."""
    reward = write_reward(DICE)
    often = str.split("--steps 6 --save-every 2 --eval-every 3 --kl-coef 0.1 --out")
    start(*QUICK, *reward, *often, "whole").join()
    draw, killed = random.Random(0), []
    for number in range(int(os.environ.get("KILLS", "3"))):
        run, step = f"killed-{number}", draw.randrange(6)
        process, metrics = start(*QUICK, *reward, *often, run), Path(run, "metrics.jsonl")
        while not metrics.exists() or metrics.read_text().count("\n") < step:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        killed.append(process.exitcode)
        process = start("--resume", run)
        process.join()
        assert process.exitcode == 0, Path("output.txt").read_text()
        same_run("whole", run)
        assert steps_saved(run) == steps_saved("whole")
    assert -signal.SIGKILL in killed


def test_a_run_is_resumed_by_one_process_at_a_time(quick, one_step, capsys):
    shutil.copytree(one_step, "run")
    with FileLock("run/.lock"):
        assert resume("run", "--steps 2") == 2
        assert "error: another process is at work in run: wait, or" in capsys.readouterr().err
    assert resume("run", "--steps 2") == 0
