"""What the README tells people to copy from runs, and learns."""

import base64
import functools
import importlib.util
import inspect
import io
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, records
from PIL import Image
from voter import votes

import rewards
import train
from grpo import generate_with_logprobs
from runtime.log import StopRequest


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
def voting(port, monkeypatch):
    """The example's reward, which may not wait for ever, and what a browser does: GET without a body, POST with one."""
    example = load("vote")
    monkeypatch.setattr(example, "RELOAD", 0.5)

    def vote(images, prompts, sources=None):
        scores = []
        in_background(lambda: scores.extend(example.vote(images, prompts, None, sources))).join(timeout=20)
        assert len(scores) == len(images), "it still waits, or failed"
        return scores

    def browse(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=20) as answer:
            return answer.read().decode()

    example.serve()
    yield vote, browse, example
    example.serve().shutdown()
    example.serve().server_close()


def in_background(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def next_group(browse, page="", last=None):
    """Asks as a page does, until there is another group than the last."""
    while json.loads(browse(f"/asked{page and '?' + page}")) in (None, last):
        time.sleep(0.02)
    return json.loads(browse("/group"))


def answer(browse, group, *liked):
    browse("/vote", {"id": group["id"], "liked": liked})


def test_votes_are_those_of_the_page(voting, port):
    """Each group is shown by itself, with its prompt; blank pictures, on which rewards are tried, wait for nobody."""
    vote, _, _ = voting
    assert np.isnan(vote([RED, RED], ["a", "a"])).all()
    seen = []
    likes = lambda images: seen.append([image.getpixel((0, 0)) for image in images]) or blue(images)
    counts = []
    in_background(lambda: counts.extend(votes(f"http://127.0.0.1:{port}", likes, timeout=5)))
    assert vote(IMAGES, PROMPTS) == [0, 1, 0, 1, 1, 0]
    assert seen == [[image.getpixel((0, 0)) for image in group] for group in (IMAGES[:3], IMAGES[3:])]


def test_a_vote_on_other_pictures_does_not_count(voting):
    vote, browse, _ = voting

    def person():
        first = next_group(browse)
        assert first["prompt"] == "a" and len(first["pictures"]) == 3 and "fetch(" in browse("/")
        time.sleep(0.3)  # people think
        answer(browse, first, 1, 0, 0)
        answer(browse, first, 1, 1, 1)  # of a second page
        second = next_group(browse, last=first["id"])
        assert second["prompt"] == "b" and second["id"] != first["id"]
        answer(browse, second, 0, 0, 1)

    in_background(person)
    assert vote(IMAGES, PROMPTS) == [1, 0, 0, 0, 0, 1]


def test_the_picture_that_is_edited_is_shown_and_parts_groups_with_the_same_wish(voting):
    vote, browse, _ = voting
    shown = []

    def person():
        last = None
        for _ in range(2):
            group = next_group(browse, last=last)
            last = group["id"]
            (source,) = group["source"]
            shown.append(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).getpixel((0, 0)))
            answer(browse, group, 0, 1)

    in_background(person)
    assert vote([RED, BLUE, RED, BLUE], ["make it blue"] * 4, [RED, RED, GREEN, GREEN]) == [0, 1, 0, 1]
    assert shown == [RED.getpixel((0, 0)), GREEN.getpixel((0, 0))]


def test_while_no_page_is_open_nothing_is_judged(voting, capsys):
    """A page that is loaded again at once has never been closed; one that is opened later is asked again."""
    vote, browse, _ = voting

    def person():
        group = next_group(browse, "A")
        browse("/closed?A", "")
        time.sleep(0.2)
        assert next_group(browse, "B")["id"] == group["id"]
        time.sleep(0.7)  # by then A is no longer waited for
        answer(browse, group, 0, 1, 0)
        browse("/closed?B", "")

    in_background(person)
    first, second = np.split(np.array(vote(IMAGES, PROMPTS)), 2)
    assert first.tolist() == [0, 1, 0] and np.isnan(second).all()
    assert np.isnan(vote(IMAGES[:3], PROMPTS[:3])).all()
    assert capsys.readouterr().out.count("no page is open") == 1
    browse("/asked?C")
    in_background(lambda: answer(browse, next_group(browse, "C"), 1, 1, 0))
    assert vote(IMAGES[:3], PROMPTS[:3]) == [1, 1, 0]


def test_a_page_that_is_closed_loses_no_vote_of_another(voting):
    vote, browse, _ = voting

    def two_people():
        group = next_group(browse, "A")
        next_group(browse, "B")
        browse("/closed?B", "")
        time.sleep(1)
        answer(browse, group, 1, 0, 1)

    in_background(two_people)
    assert vote(IMAGES[:3], PROMPTS[:3]) == [1, 0, 1]


def test_a_browser_that_was_killed_is_waited_for_no_longer_than_a_page_may_be_silent(voting, monkeypatch):
    vote, browse, example = voting
    monkeypatch.setattr(example, "SILENCE", 0.5)
    in_background(lambda: next_group(browse, "A"))
    started = time.monotonic()
    assert np.isnan(vote(IMAGES[:3], PROMPTS[:3])).all() and 0.4 < time.monotonic() - started < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_the_wait_of_a_run(voting, number):
    """Nor is anything asked from then on, as in the run's last evaluation."""
    _, _, example = voting
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = StopRequest()
        in_background(lambda: time.sleep(0.3) or os.kill(os.getpid(), number))
        started = time.monotonic()
        scores = example.vote(IMAGES, PROMPTS, None)
        assert stop.received and np.isnan(scores).all() and np.isnan(example.vote(IMAGES, PROMPTS, None)).all()
        assert 0.2 < time.monotonic() - started < 2
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
CHROMIUM += ["--disable-background-networking", "--disable-component-update"]


@pytest.fixture
def browser(tmp_path):
    """A real one, in the words of WebDriver: browser(method, path, **body) -> value."""
    if shutil.which("chromedriver") is None:
        pytest.skip("needs chromium and chromedriver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        root = f"http://127.0.0.1:{free.getsockname()[1]}"
    driver = subprocess.Popen(["chromedriver", f"--port={root.rpartition(':')[2]}"], stdout=subprocess.DEVNULL)

    def call(method, path, **body):
        data = None if method == "GET" else json.dumps(body).encode()
        request = urllib.request.Request(root + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def ready():
        try:
            return call("GET", "/status")["ready"]
        except OSError:
            return False

    try:
        wait_for(ready)
        options = {"args": [*CHROMIUM, f"--user-data-dir={tmp_path / 'profile'}"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        session = f"/session/{call('POST', '/session', capabilities=capabilities)['sessionId']}"
        yield lambda method, path, **body: call(method, session + path, **body)
        with suppress(OSError):  # its last window may be closed
            call("DELETE", session)
    finally:
        driver.terminate()
        driver.wait()


def test_pages_in_a_real_browser(voting, port, browser, monkeypatch):
    """Two tabs and a reload: the picture to edit is shown; a click and the button vote, as do a number and Enter."""
    vote, _, example = voting
    monkeypatch.setattr(example, "RELOAD", 3)
    run = lambda script: browser("POST", "/execute/sync", script=f"return {script}", args=[])
    pictures = lambda: run("document.querySelectorAll('figure img').length")
    address = {"url": f"http://127.0.0.1:{port}"}
    scores = []
    waiting = in_background(lambda: scores.extend(vote(IMAGES, PROMPTS, [GREEN] * 6)))
    browser("POST", "/url", **address)
    wait_for(lambda: pictures() == 3)
    assert run("document.querySelector('h2').textContent") == "a"
    assert run("document.querySelectorAll('aside img').length") == 1
    assert run("innerWidth == screen.width || !!document.querySelector('meta[name=viewport]')")
    first = browser("GET", "/window")

    second = browser("POST", "/window/new", type="tab")["handle"]
    browser("POST", "/window", handle=second)
    browser("POST", "/url", **address)
    wait_for(lambda: pictures() == 3)
    browser("DELETE", "/window")  # the second closes: the first still waits for its vote
    browser("POST", "/window", handle=first)
    browser("POST", "/refresh")
    wait_for(lambda: pictures() == 3)
    time.sleep(1.5 * example.RELOAD)
    run("document.querySelectorAll('figure')[1].click()")
    run("document.querySelector('button').click()")

    wait_for(lambda: run("document.querySelector('h2').textContent") == "b")
    keys = [{"type": kind, "value": key} for key in ("2", "\ue007") for kind in ("keyDown", "keyUp")]
    browser("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": keys}])
    waiting.join(timeout=20)
    assert scores == [0, 1, 0, 0, 1, 0]
    wait_for(lambda: pictures() == 0 and run("document.querySelector('button').hidden"))
    again = in_background(lambda: scores.extend(vote(IMAGES[:3], PROMPTS[:3])))
    wait_for(lambda: pictures() == 3)
    browser("DELETE", "/window")  # the last
    again.join(timeout=20)
    assert np.isnan(scores[6:]).all()


def test_seven_steps_of_voting_move_the_pictures(tmp_path, monkeypatch, port):
    """Towards what the voter likes: many objects."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("four triangles\n")
    in_background(lambda: list(votes_when_there(f"http://127.0.0.1:{port}")))
    flags = ["--model", str(TINY), "--prompts", "prompts.txt", "--eval-prompts", "prompts.txt", "--eval-count", "1"]
    flags += ["--reward", f"{ROOT}/examples/vote.py:vote", "--eval-reward", f"{ROOT}/tests/voter.py:many"]
    flags += ["--prompts-per-step", "1", "--group-size", "8", "--steps", "7", "--eval-every", "0", "--out", "run"]
    assert train.main(flags) == 0
    before, after = (record[f"reward/{ROOT}/tests/voter.py:many"] for record in records("run/evaluation.jsonl"))
    assert before < 0.9 and after > 0.95


def votes_when_there(url):
    """The run loads its model first."""
    while not (counts := list(votes(url, timeout=20))):
        pass
    return counts


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
