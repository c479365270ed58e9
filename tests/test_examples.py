"""What the README tells people to copy from runs, and learns."""

import base64
import functools
import importlib.util
import io
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

import rewards
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

    failures, cut = 0, False

    def do_POST(self):
        if Judge.failures > 0:
            Judge.failures -= 1
            self.send_error(500)
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
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def test_a_judge_behind_http_is_asked_again(url):
    images, prompts = [Image.new("RGB", (8, 8), (red, 0, 0)) for red in (10, 20, 30)], ["a", "a cat", "b"]
    served = functools.partial(load("my_reward").served, url=url, waits=(0, 0))
    for failures, Judge.cut in ((0, False), (2, False), (0, True)):
        Judge.failures = failures
        first, cat, last = rewards.score({"served": (served, 1.0)}, images, prompts, None)["served"].tolist()
        assert (first, last) == (10, 30) and math.isnan(cat)
    Judge.failures = 3
    with pytest.raises(rewards.RewardError, match="HTTP Error 500"):
        rewards.score({"served": (served, 1.0)}, images, prompts, None)


def test_blueness_by_hand():
    images = [Image.new("RGB", (8, 8), colour) for colour in ("blue", "white", (51, 102, 204))]
    assert load("my_reward").blueness(images, [""] * 3, None) == pytest.approx([1, 0, 0.8 - 0.3])
