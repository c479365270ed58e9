"""What the README tells people to copy from runs, and learns."""

import base64
import functools
import importlib.util
import inspect
import io
import json
import math
import threading
import time
import urllib.request
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

    failures, cut, asked, status, says = 0, False, 0, 500, None

    def do_POST(self):
        Judge.asked += 1
        if Judge.failures > 0:
            Judge.failures -= 1
            self.send_error(Judge.status)
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
    Judge.failures, Judge.asked, Judge.status, Judge.says = 0, 0, 500, None
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()


def test_a_judge_behind_http_is_asked_again(url):
    served = functools.partial(load("my_reward").served, url=url, waits=(0, 0))
    for failures, Judge.cut in ((0, False), (2, False), (0, True)):  # it has answered before it fails
        Judge.failures = failures
        first, cat, last = ask(served)
        assert (first, last) == (10, 30) and math.isnan(cat)
    Judge.failures = 3
    with pytest.raises(rewards.RewardError, match="HTTP Error 500"):
        ask(served)


def test_a_judge_that_cannot_mend_is_asked_twice(url):
    """One that is not there, refuses, answers with something else, or has never answered; the error is named."""
    example = load("my_reward")
    served = functools.partial(example.served, url=url, waits=(0, 0, 100))
    for Judge.failures, Judge.says, words in (
        (9, None, "HTTP Error 500"), (0, [b'{"error": "out of memory"}'], "list of scores: {'error': 'out of memory'}"),
        (0, [b"<html>"], "JSONDecodeError"), (0, [b"[1, 2, 3]"], "without a list of scores: \\[1, 2, 3"),
    ):  # fmt: skip
        Judge.asked = 0
        with pytest.raises(rewards.RewardError, match=words):
            ask(served)
        assert Judge.asked == 2
    Judge.failures, Judge.says, Judge.status = 0, None, 404
    assert ask(served)[0] == 10 and example.answered == {url}
    for Judge.failures, Judge.status, times in ((9, 404, 2), (2, 500, 3)):
        Judge.asked = 0
        if times == 2:
            with pytest.raises(rewards.RewardError, match="HTTP Error 404"):
                ask(served)
        else:
            ask(served)
        assert Judge.asked == times


def test_a_judge_that_drips_is_given_up_in_time(url):
    """No single read takes long, and what comes in the end would be an answer."""
    Judge.says = (time.sleep(0.05) or part for part in [b" "] * 30 + [b'{"scores": []}'])
    with pytest.raises(TimeoutError, match="no whole answer in 0.3 seconds"):
        load("my_reward").ask(urllib.request.Request(url, b'{"images": [], "prompts": []}'), 0.3)


def test_the_judge_is_given_up_before_other_ranks_are():
    defaults = inspect.signature(load("my_reward").served).parameters
    waits, limit = defaults["waits"].default, defaults["limit"].default
    assert sum(waits) + (len(waits) + 1) * limit < 9 * 60


def ask(served):
    """Of three pictures, what they get."""
    images, prompts = [Image.new("RGB", (8, 8), (red, 0, 0)) for red in (10, 20, 30)], ["a", "a cat", "b"]
    return rewards.score({"served": (served, 1.0)}, images, prompts, None)["served"].tolist()


def test_blueness_by_hand():
    images = [Image.new("RGB", (8, 8), colour) for colour in ("blue", "white", (51, 102, 204))]
    assert load("my_reward").blueness(images, [""] * 3, None) == pytest.approx([1, 0, 0.8 - 0.3])
