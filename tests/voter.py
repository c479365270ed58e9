"""Plays the person at examples/vote.py, over HTTP: likes many objects, whatever the caption says.

python tests/voter.py &
python train.py --reward examples/vote.py:vote --eval-reward tests/voter.py:many --steps 10 --eval-count 8 --eval-every 0

With seed 0 the share of the four places in which something stands goes from 38% to 66%, also on prompts held out, after votes
on 109 groups of four (32 pictures in each evaluation).
"""

import base64
import http.client
import io
import json
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny-glm-image")]

from check import look
from PIL import Image


def many(images, prompts=None, targets=None):
    """A reward: the share of the four places in which something stands."""
    return [sum(place is not None for place in look(image)) / 4 for image in images]


def most(images):
    """A vote: for those with the most objects of a group."""
    found = many(images)
    return [float(each == max(found)) for each in found]


def votes(url, likes=most, timeout=None):
    """Votes on every group until the run ends; yields the number of pictures liked in each."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/group", timeout=timeout) as answer:
                group = json.load(answer)
            if group is None:  # the next pictures are being made
                time.sleep(0.1)
                continue
            pictures = [base64.b64decode(source.partition(",")[2]) for source in group["pictures"]]
            liked = likes([Image.open(io.BytesIO(picture)) for picture in pictures])
            urllib.request.urlopen(f"{url}/vote", json.dumps({"id": group["id"], "liked": liked}).encode()).close()
        except (OSError, http.client.HTTPException):
            return
        yield sum(liked)


if __name__ == "__main__":
    started = time.time()
    while not (counts := list(votes("http://127.0.0.1:8765"))) and time.time() - started < 300:
        time.sleep(1)
    print(f"voted on {len(counts)} groups")
