"""A reward behind HTTP: a server judges the pictures, such as a large model on another machine.

    python train.py --reward examples/http_reward.py:served

The server gets {"images": [PNG files in base64], "prompts": [...]}, and answers {"scores": [...]}:
a number for each picture, or null where it does not apply. Where http_proxy is set, as on many
clusters, requests to this machine too go to the proxy: set no_proxy=localhost,127.0.0.1.
"""

import base64
import io
import json
import time
import urllib.request

URL = "http://localhost:8000/score"
WAITS = 1, 10, 60  # seconds before each further try


def served(images, prompts):
    body = {"images": [as_text(image) for image in images], "prompts": prompts}
    for seconds in WAITS:
        try:
            return ask(body)
        except OSError as error:  # no network, a timeout, an error of the server
            print(f"no scores from {URL} ({error!r}); asking again in {seconds} s")
            time.sleep(seconds)
    return ask(body)  # an error ends the run, whose steps are saved


def as_text(image):
    """A PIL image as a PNG file in base64."""
    image.save(file := io.BytesIO(), "PNG")
    return base64.b64encode(file.getvalue()).decode()


def ask(body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)["scores"]
