"""A person as the reward: a page on 127.0.0.1 shows each group, and the run waits for the pictures that you like.

    python train.py --reward examples/vote.py:vote --steps 10 --eval-count 1

Open the page that it names, choose the pictures that you like by a click or by their numbers, and press Enter: they get
1, the others 0. A group of which you like all or none teaches nothing. You are asked about --prompts-per-step groups in
each step, and in each evaluation about --eval-count groups of training and as many held out; identical pictures are not
shown. When no page has been heard of for 100 seconds, or after Ctrl-C, pictures get NaN, "not judged", and the run goes
on: open the page again to go on voting. For a run on another machine: ssh -L 8765:127.0.0.1:8765 MACHINE. VOTE_PORT sets
another port; with VOTE_HOST=0.0.0.0 everybody on your network can vote, a phone for example.
"""

import base64
import functools
import io
import itertools
import json
import math
import os
import secrets
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ADDRESS = os.environ.get("VOTE_HOST", "127.0.0.1"), int(os.environ.get("VOTE_PORT", "8765"))
PAGE = Path(__file__).with_suffix(".html").read_text()
SILENCE = 100  # seconds: a browser lets pages in the background ask once per minute
RELOAD = 2  # seconds


class Handler(BaseHTTPRequestHandler):
    """GET / is the page. It asks /asked?PAGE each second which group to show, and gets a new one from /group.

    POST /vote is its answer, POST /closed?PAGE its end.
    """

    def do_GET(self):
        path = self.heard(SILENCE)
        group = self.server.group
        found = {"/group": group, "/asked": group and group["id"]}
        self.answer(*(("application/json", json.dumps(found[path])) if path in found else ("text/html", PAGE)))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.heard(RELOAD) == "/vote":
            vote = json.loads(body)
            if self.server.group and vote["id"] == self.server.group["id"]:  # else another page was faster
                self.server.vote = vote["liked"]
                self.server.group = None
        self.answer("text/plain", "")

    def heard(self, seconds):
        """A page that gives its name counts as open for so long. Returns the path."""
        path, _, page = self.path.partition("?")
        if page:
            self.server.open_until.pop("the first", None)
            self.server.open_until[page] = time.monotonic() + seconds
        return path

    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *given):
        pass


@functools.cache
def serve():
    """The server of a run, in a thread of its own."""
    server = ThreadingHTTPServer(ADDRESS, Handler)
    server.open_until = {"the first": math.inf}  # {page: time}; the first pictures wait for a page
    server.group = server.handler = None
    server.handle_error = lambda *given: None  # a page that was closed before it had its answer
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"vote at http://{ADDRESS[0]}:{server.server_port}", flush=True)
    return server


def ask(server, prompt, pictures, source):
    """Waits for the vote on the pictures of a prompt, PNGs: 1 for each that is liked, else 0. Unwatched: all NaN."""
    shown = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in (*pictures, *source)]
    count = len(pictures)
    server.handler = server.handler or signal.getsignal(signal.SIGINT)
    server.vote = [math.nan] * count
    server.group = {"id": secrets.token_hex(8), "prompt": prompt, "pictures": shown[:count], "source": shown[count:]}
    while server.group and is_watched(server):
        time.sleep(0.05)
    server.group = None
    return server.vote


def is_watched(server):
    if signal.getsignal(signal.SIGINT) is not server.handler:  # the run was asked to stop: once more would end it
        return False
    if any(until > time.monotonic() for until in list(server.open_until.values())):
        return True
    if server.open_until:
        print("no page is open to vote: pictures go unscored until one is", flush=True)
        server.open_until.clear()
    return False


def png(image):
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def vote(images, prompts, targets, sources=None):
    server = serve()
    scores = []
    edited = [[png(source)] if source else [] for source in sources or [None] * len(images)]
    shown = zip(prompts, edited, map(png, images), strict=True)
    for (prompt, source), group in itertools.groupby(shown, key=lambda one: one[:2]):
        pictures = [picture for _, _, picture in group]
        same = len(set(pictures)) == 1  # as are the blank ones on which every reward is tried
        scores += [math.nan] * len(pictures) if same else ask(server, prompt, pictures, source)
    return scores
