"""What the README tells people to copy from runs, and learns."""

import base64
import functools
import importlib.util
import io
import json
import math
import re
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, records
from PIL import Image
from voter import votes

import grpo
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


# ---- examples/vote.py -----------------------------------------------------------------------------------------------

RED, GREEN, BLUE = (Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue"))
IMAGES, PROMPTS = [RED, BLUE, GREEN, BLUE, BLUE, RED], ["a", "a", "a", "b", "b", "b"]


def blue(images):
    return [int(image.getpixel((0, 0))[2] > image.getpixel((0, 0))[0]) for image in images]


@pytest.fixture
def port(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    monkeypatch.setenv("VOTE_PORT", str(number))
    return number


@pytest.fixture
def voting(port):
    """The example's reward, and what a browser does: GET without a body, POST with one."""
    example = load("vote")

    def browse(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=20) as answer:
            return answer.read().decode()

    yield example.vote, browse
    example.serve().server_close()


def in_background(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_votes_are_those_of_the_page(voting, port):
    """Each group is shown by itself, with its prompt; blank pictures, on which rewards are tried, wait for nobody."""
    vote, browse = voting
    assert np.isnan(vote([RED, RED], ["a", "a"], None)).all()
    seen = []
    likes = lambda images: seen.append([image.getpixel((0, 0)) for image in images]) or blue(images)
    counts = []
    in_background(lambda: counts.extend(votes(f"http://127.0.0.1:{port}", likes, timeout=5)))
    assert vote(IMAGES, PROMPTS, None) == [0, 1, 0, 1, 1, 0]
    assert seen == [[image.getpixel((0, 0)) for image in group] for group in (IMAGES[:3], IMAGES[3:])]


def test_a_vote_on_other_pictures_does_not_count(voting):
    vote, browse = voting

    def person():
        first = json.loads(browse("/group"))
        assert first["prompt"] == "a" and len(first["pictures"]) == 3 and "fetch(" in browse("/")
        browse("/vote", {"id": first["id"], "liked": [1, 0, 0]})
        browse("/vote", {"id": first["id"], "liked": [1, 1, 1]})  # of a second page
        second = json.loads(browse("/group"))
        assert second["prompt"] == "b" and second["id"] != first["id"]
        browse("/vote", {"id": second["id"], "liked": [0, 0, 1]})

    in_background(person)
    assert vote(IMAGES, PROMPTS, None) == [1, 0, 0, 0, 0, 1]


def test_while_the_page_is_closed_nothing_is_judged(voting):
    """Loaded again at once it is as if it had never been closed; opened later it is asked again."""
    vote, browse = voting

    def person():
        browse("/closed", "")
        reloaded = json.loads(browse("/group"))
        browse("/vote", {"id": reloaded["id"], "liked": [0, 1, 0]})
        browse("/closed", "")

    in_background(person)
    first, second = np.split(np.array(vote(IMAGES, PROMPTS, None)), 2)
    assert first.tolist() == [0, 1, 0] and np.isnan(second).all()
    assert np.isnan(vote(IMAGES[:3], PROMPTS[:3], None)).all()

    def later():
        browse("/vote", {"id": json.loads(browse("/group"))["id"], "liked": [1, 1, 0]})

    in_background(later)
    assert vote(IMAGES[:3], PROMPTS[:3], None) == [1, 1, 0]


def test_ten_steps_of_voting_move_the_pictures(quick, port):
    """Towards what the voter likes: reddish pictures."""
    likes = lambda images: [int(np.subtract(*np.asarray(image)[..., ::2].mean((0, 1))) > 20) for image in images]
    in_background(lambda: list(votes_when_there(f"http://127.0.0.1:{port}", likes)))
    reward = ["--reward", f"{ROOT}/examples/vote.py:vote", "--targets", "none", "--eval-targets", "none"]
    flags = ["--steps", "10", "--prompts-per-step", "2", "--group-size", "6", "--lr", "1e-2", "--kl-coef", "0"]
    assert quick(*reward, *flags, "--eval-count", "2", "--out", "run") == 0
    print([record["reward"] for record in records("run/metrics.jsonl")])
    before, after = records("run/evaluation.jsonl")
    print(before, after)
    assert after["reward"] > before["reward"] + 0.2


def votes_when_there(url, likes):
    """The run loads its model first."""
    while not (counts := list(votes(url, likes, timeout=20))):
        pass
    return counts
