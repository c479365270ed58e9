"""Rewards of your own: (images, prompts, targets) -> one number a picture, higher is better.

python train.py --reward examples/my_reward.py:blueness
python train.py --reward clip:1,examples/my_reward.py:served:0.5
"""

import asyncio
import base64
import http.client
import io
import json
import math
import urllib.request
from multiprocessing.pool import ThreadPool

import numpy as np


def blueness(images, prompts, targets):
    pixels = [np.asarray(image) / 255 for image in images]  # (height, width, 3)
    return [(p[..., 2] - p[..., :2].mean(-1)).mean() for p in pixels]


answered = set()  # judges that have: only those are worth a long wait


async def served(images, prompts, targets, url="http://localhost:8000/score", limit=100, waits=(1, 10, 60)):
    """By a judge behind HTTP: a prompt's pictures in one request, while the next are painted. NaN where it cannot judge.

    It has `limit` seconds for an answer. What may mend, such as a judge that restarts, is tried again after each of the
    waits, all else after the first alone. Together that is 8 minutes: other ranks wait for ten.
    """
    pictures = []
    for image in images:
        image.save(png := io.BytesIO(), "PNG")
        pictures.append(base64.b64encode(png.getvalue()).decode())
    body = json.dumps({"images": pictures, "prompts": list(prompts)}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    for tries, seconds in enumerate((*waits, None)):
        try:
            scores = await asyncio.to_thread(ask, request, limit)
            answered.add(url)
            return [math.nan if score is None else score for score in scores]
        except (OSError, ValueError, http.client.HTTPException) as error:
            refused = 400 <= getattr(error, "code", 500) < 500
            hopeless = refused or isinstance(error, ValueError) or url not in answered
            if seconds is None or (hopeless and tries > 0):
                raise  # the run saves its last whole step and says so
            print(f"no scores from {url} ({error}); asking again in {seconds} s")
            await asyncio.sleep(seconds)


def ask(request, limit):
    """The scores, or an error after `limit` seconds: urlopen's own timeout starts anew with every byte that comes."""

    def read():
        with urllib.request.urlopen(request, timeout=limit) as answer:
            return answer.read()

    with ThreadPool(1) as pool:
        reading = pool.apply_async(read)
        reading.wait(limit)
        if not reading.ready():
            raise TimeoutError(f"no whole answer in {limit} seconds")
        match json.loads(reading.get()):
            case {"scores": list(scores)}:
                return scores
            case answer:
                raise ValueError(f"an answer without a list of scores: {str(answer)[:200]}")
