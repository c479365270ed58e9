"""The command line: what a run prints, leaves and refuses, which prompts and seeds a step takes,
its numbers."""

import ast
import dataclasses
import io
import json
import math
import os
import re
import runpy
import shutil
import sys
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import train_decoder
import train_edits
from conftest import (
    CPU,
    ROOT,
    TINY,
    build_run,
    error_from,
    judge_file,
    prompts_of,
    records,
    shorten,
    tiny_settings,
    words_of,
    write_reward,
)
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

import devices
import inputs
import train
from devices.cpu import Plan
from devices.memory import Memory
from glm_image.model import load
from grpo import compute_advantages
from inputs import UserError
from inputs.prompts import read_prompts
from rewards import REWARDS, Reward, parse_rewards
from runtime import evaluation, folder, model_card, ranks, settings, terminal
from runtime.clock import Clock
from runtime.numbers import format_step, reward_metrics

NAN = math.nan
SHORT = "--height 32 --width 32 --decode-steps 1 --temperature 9 --top-p 1"
BOTH = "--train both --paintings 2 --decode-steps 2"
MOVED = "tiny-glm-image/world.py:edit_targets"


# ---- what a run leaves ---------------------------------------------------------------------------


def test_a_run_leaves_every_promised_file(one_step):
    left = {file.relative_to(one_step).as_posix() for file in one_step.rglob("*")}
    expected = "settings.json metrics.jsonl groups.jsonl evaluation.jsonl"
    expected += " index.html before-after.png adapter/adapter_config.json"
    expected += " groups/000001/1-1.jpg groups/000001/1-2.jpg groups/000001/1-target.jpg"
    expected += " adapter/adapter_model.safetensors"
    for name in ("1-1", "1-2"):
        expected += f" evaluation/000000/{name}.png evaluation/000001/{name}.png"
    expected += " adapter/README.md adapter/settings.json adapter/before-after.png"
    assert {*expected.split()} <= left
    copies = {file.name: file.read_bytes() for file in (one_step / "start").iterdir()}
    prompts = (one_step.parent / "prompts.txt").read_bytes()
    assert copies == dict.fromkeys(["prompts.txt", "eval_prompts.txt"], prompts)
    modes = {file.stat().st_mode for file in one_step.rglob("adapter/adapter_*")}
    assert len(modes) == 1  # safetensors would let nobody else read the weights
    saved = json.loads((one_step / "settings.json").read_text())
    assert (saved["group_size"], saved["lr"], saved["top_p"]) == (2, 2e-3, 1)
    again = train.parse_settings(["--config", str(one_step / "settings.json")])
    assert again.base == "auto"  # another card may choose another
    rest = vars(again).items() - {"out": None, "resume": None, "base": "auto"}.items()
    assert rest <= saved.items()


def test_an_error_of_several_lines_is_one_line():
    """The first line of huggingface_hub's errors says nothing."""

    def ask_the_hub():
        with inputs.readable("load x/y", "; give a folder"):
            raise OSError("401 Client Error. (Request ID: 1)\n\nRepository Not Found for x/y.")

    line = "401 Client Error. (Request ID: 1) Repository Not Found for x/y."
    assert error_from(ask_the_hub) == f"cannot load x/y ({line}); give a folder"


def test_an_adapter_has_a_card_as_the_hub_reads_it(one_step):
    card = ModelCard.load(one_step / "adapter" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-to-image",
        "tags": ["lora", "grpo"],
    }
    before, after = records(one_step / "evaluation.jsonl")
    numbers = [f"{side['reward/mse'][0]:.3f}" for side in (before, after)]
    assert re.search(rf"\| mse +\| {' +[|] '.join(numbers)} +\|\n", card.text)
    name = "before-after.png"
    assert (one_step / name).read_bytes() == (one_step / "adapter" / name).read_bytes()
    text = (one_step / "adapter/settings.json").read_text()
    assert json.loads(text) == json.loads((one_step / "settings.json").read_text())
    config = json.loads((one_step / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == json.loads(text)["model"] == "tiny-glm-image"
    found = {name: records(one_step / f"{name}.jsonl") for name in folder.RECORDS}

    def card_of(model):
        values = SimpleNamespace(**json.loads(text) | {"model": model, "base": "int8"})
        run = SimpleNamespace(records=found, trainers=["decoder-adapter"], saved=1, settings=values)
        return model_card.card("decoder-adapter", run, ["adapter", "decoder-adapter"])

    card = ModelCard(card_of(settings.RELEASE))
    assert card.data.base_model == "zai-org/GLM-Image"
    assert "from 1 step of GRPO. Load `adapter` of the same run, too. In training and" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card_of(r"C:\Users\new"), flags=re.DOTALL)
    words = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert r"C:\Users\new" in words


def test_a_run_logs_every_step_and_evaluation(one_step):
    line = json.loads((one_step / "metrics.jsonl").read_text())
    names = "loss policy_loss kl clip_fraction ratio_mean grad_norm max_logprob_gap skipped"
    names += " reward reward_std reward/ssim reward/mse groups_without_spread unscored"
    names += " seconds/sample seconds/paint seconds/score seconds/reference seconds/update"
    assert line["step"] == 1 and all(math.isfinite(line[name]) for name in names.split())
    # The log is the weighted sum of raw rewards, though z-scores were maximised.
    assert line["reward"] == pytest.approx(line["reward/ssim"] + 0.5 * line["reward/mse"], abs=1e-5)
    assert 0 < line["mean_logprob_gap"] <= line["max_logprob_gap"] < 1e-3
    assert line["grad_norm"] > 0
    before, after = records(one_step / "evaluation.jsonl")
    assert (before["step"], after["step"]) == (0, 1)
    assert (before["images"], after["prompts"], after["types"]) == (2, 1, {})
    weights = load_file(one_step / "adapter" / "adapter_model.safetensors")
    # The adapter has moved.
    assert all(weight.any() for name, weight in weights.items() if "lora_B" in name)


def test_runs_begun_together_never_share_a_folder(quick, monkeypatch, capsys):
    """Another begins while this one loads its model: it takes the next number."""
    load = train.load
    begun = []

    def slowly(*given, **parts):
        if not begun:
            begun.append(True)
            assert quick("--steps 0") == 0
        return load(*given, **parts)

    monkeypatch.setattr(train, "load", slowly)
    assert quick("--steps 1") == 0
    assert sorted(os.listdir("runs")) == ["1", "2"]
    assert [len(records(f"runs/{name}/metrics.jsonl")) for name in "12"] == [1, 0]


def test_evaluations_come_when_asked_for(quick, monkeypatch):
    evaluated = []
    note = lambda run, settings, data, record, **last: evaluated.append(record.done)
    monkeypatch.setattr(train, "evaluate", note)
    assert quick("--steps 4 --eval-every 3 --out run") == 0
    assert evaluated == [0, 3, 4]


@pytest.mark.parametrize(
    "flags, count", [("", 3), (BOTH, 6), ("--train decoder --decode-steps 2", 3)]
)
def test_groups_jsonl_has_every_group_with_its_pictures(quick, flags, count):
    """For viewer/, which need not know what a run is. Blank lines count, as in an editor; a prompt
    may come twice, and quote in any script. The reward applies to the long prompt alone. Paintings
    of a code sequence have the advantage of their codes, unless the decoder alone learns."""
    long = "don't write 「它」, “привет” or 'bye' " + "on it " * 9 + "."
    Path("odd.txt").write_text(f"一只红色的圆\n\n{long}\n一只红色的圆\n")
    shutil.copy("targets/1.png", "targets/3.png")
    reward = write_reward(
        "for i, image in enumerate(images):\n    image.save(f'{i}.png')\n"
        "return [i if len(p) > 9 else torch.nan for i, p in enumerate(prompts)]"
    )
    sizes = "--prompts odd.txt --prompts-per-step 3 --group-size 3 --eval-targets none"
    assert quick(*reward, sizes, flags, "--steps 1 --out run") == 0
    groups = records("run/groups.jsonl")
    found = [(group["step"], group["line"], group["prompt"]) for group in groups]
    assert sorted(found) == [(1, 1, "一只红色的圆"), (1, 3, long), (1, 4, "一只红色的圆")]
    pixels = lambda file: np.asarray(Image.open(file)).astype(int)
    scored = [pixels(f"{i}.png") for i in range(3 * count)]
    for i, group in enumerate(groups):
        place = f"groups/000001/{i + 1}"
        assert group["pictures"] == [f"{place}-{j}.jpg" for j in range(1, count + 1)]
        assert group["beside"] == {"target": f"{place}-target.jpg"}
        assert Image.open(f"run/{place}-target.jpg").size == (32, 32)
        own = range(i * count, (i + 1) * count)
        for number, file in zip(own, group["pictures"]):
            errors = [np.abs(pixels(f"run/{file}") - each).mean() for each in scored]
            assert errors[number] == min(errors) < 20  # JPEG; here codes are noise
        applies = group["prompt"] == long
        assert group["reward"] == ([*own] if applies else [None] * count)
        expected = torch.arange(-1.0, 2).repeat_interleave(count // 3) * applies
        assert group["advantage"] == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.parametrize("code_page", ["cp1252", "cp936"])
def test_a_code_page_without_chinese_letters_ends_no_run(judged, monkeypatch, code_page):
    """Others are printed as they are."""
    text = "# type: 颜色\na red circle\n# type: 数量\na blue cross\n"
    Path("types.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), code_page))
    assert judged("--eval-prompts types.txt --eval-count 2 --steps 0 --out run") == 0
    sys.stdout.flush()
    lines = sys.stdout.buffer.getvalue().decode(code_page)
    for word in ("颜色", "数量"):
        assert f"- {word if code_page == 'cp936' else ascii(word)[1:-1]} " in lines


# ---- settings and refusals -----------------------------------------------------------------------


def test_default_prompts_are_the_projects_own(tmp_path, monkeypatch):
    """Also where the working folder has files of these names, which a user may name."""
    monkeypatch.chdir(tmp_path)
    Path(settings.TINY).mkdir()
    (file := Path(settings.TINY, "prompts.txt")).write_text("a prompt of mine\n", "utf-8")
    defaults = train.parse_settings([])
    assert len(read_prompts(defaults)) == 112
    (mine,) = read_prompts(dataclasses.replace(defaults, prompts=str(file)))
    assert mine.text == "a prompt of mine"


def test_what_was_read_from_the_project_is_read_from_it_again(quick, tmp_path, monkeypatch):
    """Prompts, model and targets, by --config and --resume, whatever another folder has."""
    script = {"kind": train_edits.EditSettings, "script": train_edits.__file__}
    flags = "--model tiny-glm-image --steps 0 --eval-count 1 --height 32 --width 32"
    monkeypatch.chdir(ROOT)  # there the names are those of files in the working folder
    out = tmp_path / "run"
    assert train_edits.main([*flags.split(), "--targets", MOVED, "--out", str(out)]) == 0
    saved = json.loads((out / "settings.json").read_text())
    places = "model prompts targets sources eval_prompts eval_targets eval_sources"
    assert {*saved["of_project"]} == {*places.split()}
    assert "prompts" not in saved["not_default"] and "lr" not in saved["not_default"]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, "tiny-glm-image", ignore=shutil.ignore_patterns("*.safetensors"))
    Path("tiny-glm-image/world.py").write_text("raise KeyError('it ran')\n")
    Path("tiny-glm-image/edits.txt").write_text("MINE\n")
    again = train.parse_settings(["--config", str(out / "settings.json")], **script)
    assert "MINE" not in {prompt.text for prompt in train_edits.read_edits(again)}
    assert train_edits.main(["--resume", str(out)]) == 0
    # A file of the same name is a choice, and stays the user's.
    mine = "tiny-glm-image/edits.txt"
    chosen = train.parse_settings(["--model", "tiny-glm-image", "--prompts", mine], **script)
    assert {"model", "prompts"} <= {*chosen.not_default()} and chosen.of_project() != []
    assert chosen.of_project().count("prompts") == 0


def test_a_setting_that_nothing_reads_is_refused(one_step, monkeypatch):
    decoder = {"kind": train_decoder.DecoderSettings, "script": train_decoder.__file__}
    parsed = lambda flags, **script: train.parse_settings(flags.split(), **script)
    tiny, given = "--model tiny-glm-image ", "needs --train both"
    assert f"--paintings {given}" in error_from(lambda: parsed(tiny + "--paintings 3", **decoder))
    assert f"--policy-lr {given}" in error_from(lambda: parsed(tiny + "--policy-lr 1", **decoder))
    both = parsed(tiny + "--train both --paintings 3 --policy-lr 0.5 --lr 0.25", **decoder)
    trainers = train_decoder.load_run(both).trainers.values()
    assert [each.optimizer.param_groups[0]["lr"] for each in trainers] == [0.5, 0.25]
    words = "--guidance-steps needs a --guidance-scale above 1"
    assert error_from(lambda: parsed(tiny + "--guidance-steps 3")) == words
    own = parsed(tiny + f"--adapter {one_step} --lora-rank 3")
    words = f"--lora-rank is for a new adapter: {one_step} has its own"
    assert error_from(folder.claim, own) == words
    # The decoder's is new beside a policy that has learned.
    alone = parsed(tiny + f"--adapter {one_step} --lora-rank 3 --out other", **decoder)
    assert folder.claim(alone)[0] == "other"


def test_a_run_empties_no_file_that_it_did_not_write(quick):
    """In the folder of a run that failed before its first step, which the next run takes."""
    assert quick("--eval-reward clip=nowhere --out run") == 2
    Path("run/train.jsonl").write_text(rows := '{"prompt": "a ring"}\n{"prompt": "a cross"}\n')
    flags = "--prompts run/train.jsonl --reward clean --targets none --steps 0 --out run"
    assert quick(flags) == 0
    assert (
        Path("run/train.jsonl").read_text() == Path("run/start/prompts.jsonl").read_text() == rows
    )


def test_defaults_depend_on_the_model():
    tiny = tiny_settings()
    other = train.parse_settings(["--model", settings.RELEASE, "--height", "1280"])
    names = "steps", "lr", "height", "width", "temperature", "top_p", "device"
    assert attrgetter(*names)(tiny) == (10, 1e-3, 128, 128, 1.0, 0.95, "cpu")
    # The temperature and the nucleus of its own sampler.
    assert attrgetter(*names)(other) == (200, 2e-5, 1280, 1024, 0.9, 0.75, "auto")
    assert (other.reward, other.eval_reward) == ("pickscore:1,clip:1", "hps,variety")
    assert other.prompts.endswith("prompts/train.txt")
    assert tiny.targets is other.targets is other.eval_targets is None
    default = settings.RELEASE if torch.cuda.is_available() else settings.TINY
    assert train.parse_settings([]).model == default
    assert train.parse_settings(["--out=~/a"]).out == str(Path.home() / "a")  # as the shell does


def test_every_setting_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        train.main(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert "training steps; 0 only evaluates (default: 10 for tiny, 200 for GLM-Image)" in output
    for kind in (settings.Settings, train_decoder.DecoderSettings, train_edits.EditSettings):
        actions = settings.build_parser(kind)._actions
        helps = {action.dest: action.help for action in actions}
        assert helps.keys() - {"help", "config"} == {each.name for each in fields(kind)}
        assert all(helps.values())
    with pytest.raises(UserError):  # no abbreviations: later flags must not change a command
        train.parse_settings(["--group", "4"])


def test_a_run_begins_with_the_settings_of_another(quick, tmp_path, capsys):
    """Flags win."""
    assert quick(BOTH, "--steps 1 --reward mse --targets targets --out run") == 0
    of_run = json.loads(Path("run/settings.json").read_text())
    kind = train_decoder.DecoderSettings, train_decoder.__file__
    parsed = lambda *flags: vars(train.parse_settings(flags, *kind))
    again = parsed("--config", "run/settings.json", "--lr", "0.25")
    differ = {name for name in of_run if name in again and again[name] != of_run[name]}
    assert differ == {"lr", "base"} and (again["lr"], again["base"]) == (0.25, "auto")
    own = {"paintings": 3, "combine": "sum", "reward": "mse,ssim", "lr": 1e-3}
    Path("own.json").write_text(json.dumps({**own, "eval_reward": "", "targets": None}))
    found = parsed("--config", "own.json", "--train", "both", "--reward", "ssim,mse")
    assert found.items() >= (own | {"reward": "ssim,mse", "eval_reward": ""}).items()
    assert found["steps"] == 20  # of the tiny model
    for text, words in (
        ('{"lr": "fast"}', "--lr: invalid float value: 'fast'"),
        ('{"speed": 3}', "unrecognized arguments: --speed=3"),
        ("[3]", "--config a file such as"),
        ("{", "--config a file such as"),
    ):
        Path("own.json").write_text(text)
        assert words in error_from(parsed, "--config", "own.json", "--reward", "mse")
    line = error_from(train.parse_settings, ["--config", "run/settings.json"])
    words = "is of a run of examples/train_decoder.py, not of train.py: give it to that"
    assert line == f"run/settings.json {words}"


def test_the_start_shows_how_much_there_is_to_do(monkeypatch, capsys):
    chosen = tiny_settings("--group-size 8 --prompts-per-step 4 --eval-count 16")
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert devices.cpu.device() == CPU and torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    cpu = devices.cpu.device()
    monkeypatch.setattr(ranks, "count", lambda: 2)
    terminal.print_start(chosen, cpu, SimpleNamespace(prompts=[1, 2, 3], held_out=[4]))
    output = capsys.readouterr().out
    assert output.startswith("device: CPU in float32, threads: 1 (OMP_NUM_THREADS)\n")
    assert "a step: 8 x 8 pictures; prompts: 3, held out: 1\n" in output


FILES = {
    "empty.txt": "\n  \n",
    "one.txt": "a red circle\n",
    "judged/settings.json": "{}",
    "judged/metrics.jsonl": '{"step": 1}\n',
}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--group-sise 4", "unrecognized arguments: --group-sise 4"),
        ("--height 100", "--height and --width must be multiples of 32, got 100"),
        ("--prompts missing.txt", "cannot read the prompts file missing.txt"),
        ("--prompts empty.txt", "has no prompt in it"),
        ("--eval-targets missing", "missing has 0 target pictures for"),
        ("--prompts rows.csv", "rows.csv is no file of prompts: these are .txt"),
        ("--reward pickscore:1,vqq:1", "unknown reward 'vqq'; known: "),
        ("--reward ssim:nan", "unknown reward 'ssim:nan'"),
        ("--reward clip=few --eval-reward clip=new", "have two rewards named 'clip'"),
        ("--reward none --steps 0", "--reward names nothing to train on"),
        ("--reward facts:0", "--reward names nothing to train on"),
        ("--reward none.py:f", f"the file none.py does not exist in {os.sep}"),
        ("--reward good.py:jugde", "good.py has no 'jugde'"),
        ("--reward clip=few", "cannot load the reward clip ("),
        ("--device cuda", "--device cuda: torch finds no GPU that it can use"),
        ("--group-size 1", "--group-size must be at least 2, got 1"),
        ("--lr 0", "--lr must be above 0, got 0.0"),
        ("--kl-coef -0.1", "--kl-coef must be at least 0, got -0.1"),
        ("--prompts-per-step 0", "--prompts-per-step must be above 0, got 0"),
        ("--top-p 75", "--top-p must be above 0 and at most 1, got 75.0"),
        ("--lr nan", "--lr must be above 0, got nan"),
        ("--reward good.py:judge,ssim --prompts one.txt", "'ssim' needs --targets"),
        ("--eval-reward pickscore,ssim", "'ssim' needs --targets, or --eval-targets"),
        ("--reward asks.py:judge", "asks for 'tag'; for prompts of tiny-glm-image/prompts.txt"),
        ("--reward bad.py:judge", "reward 'bad.py:judge' has to return 2 finite numbers"),
        ("--model few --reward ssim --eval-reward ''", "cannot load few"),
        ("--reward pickscore --adapter few", "--adapter few: no run, no checkpoint and no adapter"),
        ("--out judged", "judged is not empty: choose another --out, or continue its run: --re"),
        ("--out one.txt", "cannot use the folder one.txt ([Errno 17] File exists"),
        ("--resume nothing", "cannot read nothing/settings.json ([Errno 2] No such file"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "load", lambda *_: pytest.fail("this was not refused"))
    download = lambda **_: pytest.fail("a download, before all is checked")
    monkeypatch.setitem(REWARDS, "pickscore", (download, {}))
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    judge_file("bad", "[1.0]")
    judge_file("asks", "[]", "tag")
    judge_file("good", "[1.0] * len(images)")
    Path("few").mkdir()
    Path("new").mkdir()
    files = lambda: sorted(x for x in tmp_path.rglob("*") if "__pycache__" not in x.parts)
    before = files()
    named = "--out" in arguments or "--resume" in arguments
    for out in [""] if named else ["", "--out new/a/run"]:
        assert train.main(words_of(["--steps 1", arguments, out])) == 2
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert message.startswith("error: ")
        assert words in message
    # A reward is tried after the run has its folder, which the next run takes.
    tried = any(word in arguments for word in ("clip=few", "asks.py", "bad.py"))
    assert tried or files() == before


def test_a_models_folder_runs_no_code(tmp_path, monkeypatch):
    """Nor does a folder that looks like the project's: its judge is found from the project."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.chdir(tmp_path)
    tiny = shutil.copytree(TINY, "tiny-glm-image", ignore=shutil.ignore_patterns("*.safetensors"))
    Path(tiny, "check.py").write_text("raise KeyError('it ran')\n")
    for reward in parse_rewards("facts,correct,clean,near,many").values():
        reward.load()
    file = tmp_path / "own.py"
    file.write_text("raise KeyError('it ran')\n")
    processor = tmp_path / "tiny-glm-image/processor"
    auto_map = {"AutoTokenizer": ["own.Own", "own.Own"]}
    config = json.dumps({"tokenizer_class": "Own", "auto_map": auto_map})
    (processor / "tokenizer_config.json").write_text(config)
    file.rename(processor / "own.py")
    with pytest.raises(UserError, match="contains custom code"):
        train.load("tiny-glm-image", CPU)
    pickled = Path(shutil.copytree(TINY, "pickled"))
    file = pickled / "vae/diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    with pytest.raises(UserError, match="safetensors"):
        train.load("pickled", CPU)


def test_old_transformers_are_refused(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.4.9")
    words = "transformers 5.4.9 paints wrong pictures; pip install -r requirements.txt"
    assert error_from(load, str(TINY), CPU) == words


def test_the_script_ends_with_an_exit_code_of_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--group-size", "1"])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert capsys.readouterr() == ("", "error: --group-size must be at least 2, got 1\n")


# ---- prompts and seeds ---------------------------------------------------------------------------


def test_prompts_come_round_once_an_epoch_in_another_order():
    settings = SimpleNamespace(seed=0, prompts_per_step=3, order="shuffled")
    indices = lambda step: train.prompt_indices(step, settings, 4)
    rows = [row for step in range(20) for row in indices(step)]
    epochs = {tuple(rows[i : i + 4]) for i in range(0, 60, 4)}
    assert {tuple(sorted(epoch)) for epoch in epochs} == {(0, 1, 2, 3)} and len(epochs) > 5
    assert indices(7) == rows[21:24]  # a function of the step
    settings.order = "file"
    assert indices(0) + indices(1) == [0, 1, 2, 3, 0, 1]
    other = SimpleNamespace(seed=1, prompts_per_step=60, order="shuffled")
    assert train.prompt_indices(0, other, 4) != rows


def test_no_two_groups_share_a_seed(monkeypatch):
    """Over steps, ranks, prompts of a step, and runs whose --seed differs by one."""
    monkeypatch.setattr(ranks, "count", lambda: 3)
    seeds = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        for step in range(30):
            for seed in (0, 1, 2):
                first = train.seed_of_step(step, seed, 4)
                seeds += range(first, first + 4)
    assert len(set(seeds)) == len(seeds) == 3 * 30 * 3 * 4
    assert train.seed_of_step(10**6, 2**32 - 1, 4) < 2**63


@pytest.mark.parametrize("seeds, steps, evaluated", [(10, 10**4, 2**20), (1000, 1000, 1000)])
def test_streams_of_a_run_are_apart_in_the_32_bits_that_a_cpu_takes(seeds, steps, evaluated):
    """Codes, noise and the decoder's draws of the first seeds, and those of the evaluations."""
    for seed in range(seeds):
        first, last = (train.seed_of_step(s, seed, 4) for s in (0, steps))
        starts = (first, evaluation.SEED)
        streams = [start + offset for start in starts for offset in (0, 2**30, 2**31)]
        assert len({*streams}) == 6
        for own in streams[:3]:
            for other in {*streams} - {own}:
                assert (other - own) % 2**32 > last - first
                assert (own - other) % 2**32 >= evaluated


def test_evaluations_have_the_same_prompts_and_seeds_each_time_and_paint_as_deployed(
    judged, monkeypatch
):
    """And seeds that training never draws from."""
    painted = []

    def paint(self, prompt, tokens, settings, seed):
        painted.append((prompt.text, seed, settings.decode_steps, settings.guidance_scale))
        return torch.zeros(len(tokens), 8, 4, 4)

    monkeypatch.setattr(train.GlmImage, "paint", paint)
    new = [f"ring {number}" for number in range(5)]
    Path("new.txt").write_text("\n".join(new))
    arguments = "--prompts-per-step 1 --eval-prompts new.txt --eval-targets none --eval-count 5"
    deployed = "--eval-decode-steps 3 --eval-guidance-scale 1.5"
    assert judged("--steps 2 --seed 3", arguments, deployed, "--out run") == 0
    expected = [(prompt, evaluation.SEED + place, 3, 1.5) for place, prompt in enumerate(new)]
    assert painted[:5] == painted[-5:] == expected  # 4 are sampled at once
    steps = [(train.seed_of_step(step, 3, 1), 1, 1.0) for step in range(2)]
    assert [of_step for _, *of_step in painted[5:-5]] == [*map(list, steps)]


# ---- numbers -------------------------------------------------------------------------------------


def test_reward_metrics_by_hand():
    """Means over all pictures; spreads within groups, then their mean, of which a lone one has none.
    NaN is no picture of this reward."""
    total = [[2 + 5, 4, 6 + 15], [NAN, 10, NAN], [8, 8, 8 + 3]]  # 2a + b/2, of those that apply
    a = [[1, 2, 3], [NAN, 5, NAN], [4, 4, 4]]
    b = [[10, NAN, 30], [NAN] * 3, [0, 0, 6]]
    rewards = {"reward": total, "reward/a": a, "reward/b": b}
    rewards = {name: torch.tensor(values) for name, values in rewards.items()}
    spread = lambda *values: np.std(values, ddof=1)
    assert reward_metrics(rewards) == pytest.approx(
        {
            "unscored": 2 / 9,
            "reward": np.mean([7, 4, 21, 10, 8, 8, 11]),
            "reward_std": (spread(7, 4, 21) + spread(8, 8, 11)) / 2,
            "reward/a": np.mean([1, 2, 3, 5, 4, 4, 4]),
            "reward_std/a": (1 + 0) / 2,
            "reward/b": np.mean([10, 30, 0, 0, 6]),
            "reward_std/b": (spread(10, 30) + spread(0, 0, 6)) / 2,
        }
    )
    nothing = reward_metrics({name: rewards[name][1:2] for name in ("reward", "reward/b")})
    assert all(math.isnan(nothing[name]) for name in ("reward/b", "reward_std/b", "reward_std"))
    assert nothing["reward"] == 10


def test_spreads_of_code_sequences_and_of_their_paintings_by_hand():
    """One prompt, three code sequences, painted twice each; or one code sequence, painted six
    times. NaN is no painting of this reward."""
    values = torch.tensor([[NAN, 2.0, 10.0, 16.0, 3.0, 5.0]])
    spread = lambda *values: pytest.approx(np.std(values, ddof=1))

    rewards = {"reward": values, "reward/a": values}
    both, decoder = reward_metrics(rewards, 2), reward_metrics(rewards)
    assert both["reward"] == both["reward/a"] == pytest.approx((2 + 13 + 4) / 3)
    assert both["reward_std"] == both["reward_std/a"] == spread(2, 13, 4)  # of the means
    within = (np.std([10, 16], ddof=1) + np.std([3, 5], ddof=1)) / 2
    assert both["decoder/reward_std"] == pytest.approx(within)
    assert decoder["reward"] == pytest.approx((2 + 10 + 16 + 3 + 5) / 5)
    assert decoder["reward_std"] == decoder["reward_std/a"] == spread(2, 10, 16, 3, 5)
    assert both["unscored"] == decoder["unscored"] == pytest.approx(1 / 6)


NUMBERS = {
    "step": 3,
    "reward": 1.25,
    "reward_std": 0.5,
    "reward/a": 0.75,
    "reward_std/a": 0.125,
    "reward/b": None,
    "reward_std/b": None,
    "unscored": 0.0,
    "groups_without_spread": 0.25,
    "kl": 0.0125,
    "clip_fraction": 0.125,
    "grad_norm": 2.5,
    "mean_logprob_gap": 2e-6,
    "max_logprob_gap": 3e-5,
    "skipped": 0.0,
    "entropy": 0.0169,
    "seconds/sample": 1.5,
    "seconds": 3.75,
    "gpu_gb/sample": 7.0,
    "gpu_gb": 9.5,
}


def test_the_line_of_a_step_by_hand():
    """What is 0 or was not measured is left out; alarms stand before what is to be watched."""
    assert format_step(20, NUMBERS) == (
        "step 3/20 | reward 1.250 +- 0.500 | a 0.750 | b none | 25% without spread | kl 0.0125 | "
        "entropy 0.0169 | gap 2e-06 | norm 2.500 | 12.5% clipped | 3.8s | 9.5 GB"
    )
    trouble = dict.fromkeys(["kl", "clip_fraction", "mean_logprob_gap"])  # nothing learned
    trouble |= {"unscored": 0.25, "skipped": 1.0, "grad_norm": 0.0, "reward/a": 1.25}
    assert format_step(20, {**NUMBERS, **trouble, "gpu_gb": 0}) == (
        "step 3/20 | reward 1.250 +- 0.500 | a 1.250 | b none | SKIPPED: the gradient was not "
        "finite | 25% without spread | 25% unscored | entropy 0.0169 | 3.8s"
    )
    tiny = format_step(20, NUMBERS | {"reward_std": 4.2e-5})
    # 0.000 beside "25% without spread" would contradict it.
    assert tiny.startswith("step 3/20 | reward 1.250 +- 4e-05 | a")
    for epochs, words in ((1 / 20, "step 3/20 |"), (0.7, "step 3/20, epoch 2.1 |")):
        assert format_step(20, NUMBERS, epochs).startswith(words)
    decoder = {**NUMBERS, "reward_std": None, "decoder/groups_without_spread": 0.5}
    decoder |= {"decoder/kl": 0.0, "decoder/reward_std": 0.0625}
    assert format_step(20, decoder).startswith(
        "step 3/20 | reward 1.250 | a 0.750 | b none | decoder +- 0.062 | "
        "decoder: 50% without spread | 25% without spread | kl 0.0125 | entropy"
    )


def test_the_seconds_of_a_steps_phases_add_up(monkeypatch):
    """Where models take turns, weights move before each, in seconds of their own."""
    times = iter([0.0, 1.0, 10.0, 13.0, 20.0, 25.0, 30.0, 31.0, 40.0, 40.5, 50.0, 51.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(times, 60.0))
    peaks = iter([2e9, 7e9, 1e9, 3e9, 1e9, 5e9])
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    clock = Clock(device := torch.device("cuda"))
    memory, named = Memory(Plan(device, "bfloat16"), clock), []
    memory.offload = Mock(all_but=lambda *models: named.append((clock.phase, *models)))
    for name, *models in (("sample", "policy"), ("score",), ("score",), ("sample", "policy")):
        memory.begin(name, *models)
        named.append(clock.phase)
    again = [("move", "policy"), "sample"]
    assert named == [*again, ("move",), "score", "score", *again]  # a phase begins once
    seconds = {"seconds/move": 6.5, "seconds/sample": 4.5, "seconds/score": 1, "seconds": 12}
    largest = {"gpu_gb/move": 2, "gpu_gb/sample": 7, "gpu_gb/score": 3, "gpu_gb": 7}
    assert clock.read() == seconds | largest
    assert clock.read() == {"seconds": 0, "gpu_gb": 0}  # of the next step


@pytest.mark.parametrize("combine", ["sum", "zscore"])
def test_code_sequences_get_the_advantages_of_their_own_pictures(monkeypatch, combine):
    """Two prompts, three sequences each: a picture's colour is a number of its codes. The spread of
    another reward is a hundredth of that of the colour."""
    shorten(monkeypatch.setattr)
    number = lambda codes: int(codes.sum()) % 251
    colours = lambda tokens, size: [Image.new("RGB", (8, 8), (number(x), 0, 0)) for x in tokens]
    colour = lambda images, prompts, targets: [image.getpixel((0, 0))[0] for image in images]
    place = torch.tensor([0.0, NAN, 2.0])
    functions = {
        "colour": Reward("colour", 0.5, colour),
        "place": Reward("place", 2.0, lambda **_: place.repeat(2)),
    }
    run = build_run(settings := tiny_settings(SHORT, "--group-size 3 --combine", combine))
    monkeypatch.setattr(run.glm_image, "paint", lambda prompt, tokens, *_: tokens)
    monkeypatch.setattr(run.glm_image, "to_images", colours)
    prompts = prompts_of("a red circle", "a blue cross")
    rolled, metrics = train.grpo_step(run, settings, functions, prompts, 0)
    assert len(rolled.groups) == 2 and len(rolled.images) == 6
    numbers = torch.tensor([[float(number(x)) for x in group.tokens] for group in rolled.groups])
    assert rolled.raw_rewards["colour"].tolist() == numbers.flatten().tolist()
    for group, own in zip(rolled.groups, numbers, strict=True):
        assert own.std() > 1
        total = 0.5 * own + 2 * place.nan_to_num(1)
        if combine == "zscore":
            total = 0.5 * compute_advantages(own, 3) + 2 * torch.tensor([-1, 0, 1]) / 2**0.5
        expected = compute_advantages(total, 3)
        torch.testing.assert_close(group.advantages, expected, atol=1e-5, rtol=0)
    assert 0 < metrics["mean_logprob_gap"] <= metrics["max_logprob_gap"] < 1e-3
    assert abs(metrics["kl"]) < 1e-6


def test_pictures_without_any_reward_are_a_run_too(judged, capfd, monkeypatch):
    """Nor does what cannot be drawn end it."""
    monkeypatch.setattr("viewer.draw_grid", Mock(side_effect=ValueError("no font\n:")))
    monkeypatch.setattr("runtime.trackers.start", lambda *given: tracker)
    tracker = Mock()
    reward = write_reward("return [float('nan')] * len(images)")
    assert judged(*reward, "--steps 1 --tracker trackio --out run") == 0
    # A tracker gets numbers alone.
    assert all(map(math.isfinite, chain(*(x.args[0].values() for x in tracker.log.mock_calls))))
    (line,) = records("run/metrics.jsonl")
    assert line["reward"] is None and line["grad_norm"] == 0
    assert line["unscored"] == line["groups_without_spread"] == 1
    for record in records("run/evaluation.jsonl"):
        assert record["reward"] == [None, None]
    output = "".join(capfd.readouterr())
    assert "step 1/1 | reward none | 100% without spread | 100% unscored" in output
    assert output.count("warning: cannot show the run (no font") == 2
