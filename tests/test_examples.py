"""What the README tells people to copy from runs, and learns."""

import base64
import functools
import importlib.util
import inspect
import io
import json
import math
import re
import runpy
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, records
from PIL import Image

import rewards
import train
from grpo import generate_with_logprobs


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_a_text_model_learns_by_grpo_alone():
    means = load("text_model").train(steps=20)
    assert np.mean(means[:3]) < 0.7 and np.mean(means[-5:]) > 0.8


@pytest.mark.parametrize("change", [{"layer_types": ["full_attention", "linear_attention"]}, {"sliding_window": 8}])
def test_text_models_whose_layers_see_no_mask_are_told_what_to_do(change):
    example = load("text_model")
    model = example.build_model()
    vars(model.config).update(change)
    with pytest.raises(ValueError, match="sample prompts of one length together"):
        generate_with_logprobs(model, [ids for ids, _, _ in example.PROMPTS], 3)


# ---- examples/my_reward.py ------------------------------------------------------------------------------------------


class Judge(BaseHTTPRequestHandler):
    """Fails as often as it is told, then scores each picture by its red, and cannot judge what a cat is."""

    failures, cut, says = 0, False, None

    def do_POST(self):
        if Judge.failures > 0:
            Judge.failures -= 1
            self.send_error(500)
            return
        if Judge.says is not None:
            self.send_response(200)
            self.end_headers()
            for part in Judge.says:
                self.wfile.write(part)
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pictures = [Image.open(io.BytesIO(base64.b64decode(picture))) for picture in asked["images"]]
        reds = [picture.getpixel((0, 0))[0] for picture in pictures]
        scores = [None if prompt == "a cat" else red for red, prompt in zip(reds, asked["prompts"], strict=True)]
        self.send_response(200)
        self.end_headers()
        answer = json.dumps({"scores": scores}).encode()
        self.wfile.write(answer[:5] if Judge.cut else answer)
        Judge.cut = False

    def log_message(self, *given):
        pass


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Judge.failures, Judge.says = 0, None
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def test_a_judge_behind_http_is_asked_again(url):
    served = functools.partial(load("my_reward").served, url=url, waits=(0, 0))
    for failures, Judge.cut in ((0, False), (2, False), (0, True)):
        Judge.failures = failures
        first, cat, last = ask(served)
        assert (first, last) == (10, 30) and math.isnan(cat)
    Judge.failures = 3
    with pytest.raises(rewards.RewardError, match="HTTP Error 500"):
        ask(served)


def test_an_answer_of_another_form_is_named(url):
    served = functools.partial(load("my_reward").served, url=url, waits=())
    for Judge.says, words in (([b'{"error": "out of memory"}'], "KeyError: 'scores'"), ([b"<html>"], "JSONDecodeError"),
                              ([b'{"scores": [1]}'], "gave shape \\(1,\\) for 3 images")):  # fmt: skip
        with pytest.raises(rewards.RewardError, match=words):
            ask(served)


def test_the_judge_is_given_up_before_other_ranks_are():
    waits = inspect.signature(load("my_reward").served).parameters["waits"].default
    assert sum(waits) + (len(waits) + 1) * 100 < 9 * 60


def ask(served):
    """Of three pictures, what they get."""
    images, prompts = [Image.new("RGB", (8, 8), (red, 0, 0)) for red in (10, 20, 30)], ["a", "a cat", "b"]
    return rewards.score({"served": (served, 1.0)}, images, prompts, None)["served"].tolist()


def test_blueness_by_hand():
    images = [Image.new("RGB", (8, 8), colour) for colour in ("blue", "white", (51, 102, 204))]
    assert load("my_reward").blueness(images, [""] * 3, None) == pytest.approx([1, 0, 0.8 - 0.3])


# ---- notebook.ipynb -------------------------------------------------------------------------------------------------


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


def test_the_cells_of_the_notebook_run(quick, tmp_path, monkeypatch):
    """From top to bottom, on short pictures, which show no shapes: the default reward is another that tells them apart."""
    reward = ["--reward", f"{ROOT}/examples/my_reward.py:blueness"]
    short = ["--height", "32", "--width", "32", "--decode-steps", "1", "--steps", "2", "--eval-count", "2"]
    short += ["--eval-decode-steps", "1", "--temperature", "5", "--prompts-per-step", "2"]
    parse = train.parse_settings
    monkeypatch.setattr(train, "parse_settings", lambda arguments: parse([*reward, *arguments, *short]))
    monkeypatch.setattr(train, "GRPO", train.GRPO)  # a cell puts another in its place
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("cells.py").write_text(as_script(code_cells()))
    names = runpy.run_path("cells.py")
    trained, own = (records(f"{names[folder]}/metrics.jsonl") for folder in ("folder", "own"))
    assert len(trained) == len(own) == 2 and "reward/my_count.py:many" in own[0]
    assert any(name.endswith("my_reward.py:blueness") for name in trained[0])
    assert names["advantages"].abs().max() > 0.5 and names["change"].abs().max() > 0
    held_back = [
        module.compute_grpo_loss(torch.tensor([[math.log(1.25)]]), torch.zeros(1, 1), torch.ones(1))[1]["clip_fraction"]
        for module in (names["grpo"], names["my_grpo"])
    ]
    assert held_back == [1, 0]


def test_the_outputs_of_the_notebook_are_of_one_run():
    """From top to bottom, without errors, and it got better at what the judge looks for."""
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert (ROOT / "notebook.ipynb").stat().st_size < 500_000
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    texts = ["".join(text for output in cell["outputs"] for text in output.get("text", "")) for cell in cells]
    number = r"([-.\d]+) \+- \S+"
    line = rf"reward {number} -> {number}, .*?right {number} -> {number},"
    found = [re.findall(line, " ".join(text.split())) for text in texts]
    trained, held_out = next(filter(None, found))[-2:]  # the last evaluation of the first run
    for before, after, wrong, right in (trained, held_out):
        assert float(after) > float(before) and float(right) > float(wrong)
