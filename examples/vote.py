"""A person as the reward: a page on 127.0.0.1 shows each group, and the run waits for the pictures that you like.

    python train.py --reward examples/vote.py:vote --steps 10 --eval-count 1

Open the page that it names. Click pictures or press their numbers, then Enter: 1 for those you like, 0 for the others, so
`reward` is the share that you like. A group of which you like all or none teaches nothing. You are asked about
--prompts-per-step groups in each step, and in each evaluation about --eval-count groups of training and as many held out;
identical pictures are not shown. While the page is closed pictures get NaN, "not judged", and the run goes on: open it
again to go on voting. For a run on another machine: ssh -L 8765:127.0.0.1:8765 MACHINE. VOTE_PORT sets another port.
"""

import base64
import functools
import io
import itertools
import json
import math
import os
import secrets
import select
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PORT = int(os.environ.get("VOTE_PORT", "8765"))
PAGE = Path(__file__).with_suffix(".html").read_text()


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /group what it shows; POST /vote is its answer, POST /closed its end."""

    timeout = 1  # seconds: browsers also open connections on which they ask nothing

    def do_GET(self):
        self.server.watched = True
        kind, body = ("application/json", self.server.group) if self.path == "/group" else ("text/html", PAGE)
        self.answer(kind, body)

    def do_POST(self):
        self.server.watched = self.path != "/closed"
        if self.server.watched:
            vote = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.votes[vote["id"]] = vote["liked"]  # a second page may answer for pictures no longer asked about
        self.answer("text/plain", "")

    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *given):
        pass


@functools.cache
def serve():
    """The server of a run. It answers only while vote() waits: between steps the page waits for the run."""
    server = HTTPServer(("127.0.0.1", PORT), Handler)
    server.watched = True  # the first pictures wait for the page to be opened
    server.votes = {}
    server.handle_error = lambda *given: None  # a page that was closed before it had its answer
    print(f"vote at http://127.0.0.1:{server.server_port}", flush=True)
    return server


def ask(server, prompt, pictures):
    """Waits for the vote on the pictures of a prompt, PNGs: 1 for each that is liked, else 0. Unwatched: all NaN."""
    sources = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
    asked = secrets.token_hex(8)
    server.group = json.dumps({"id": asked, "prompt": prompt, "pictures": sources})
    while asked not in server.votes:
        if not server.watched and not select.select([server], [], [], 1)[0]:  # a page loaded again is back at once
            return [math.nan] * len(pictures)
        server.handle_request()
    return server.votes.pop(asked)


def png(image):
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def vote(images, prompts, targets):
    server = serve()
    scores = []
    for prompt, group in itertools.groupby(zip(prompts, images, strict=True), key=lambda pair: pair[0]):
        pictures = [png(image) for _, image in group]
        same = len(set(pictures)) == 1  # as are the blank ones on which every reward is tried
        scores += [math.nan] * len(pictures) if same else ask(server, prompt, pictures)
    return scores
