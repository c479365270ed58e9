"""Sends a run's numbers and its picture to a tracker. Imported only with --tracker."""

import os
import secrets
from contextlib import contextmanager

import numpy as np
from accelerate import PartialState, tracking
from PIL import Image

from inputs import readable
from runtime.terminal import optional


@contextmanager
def started(settings, out):
    """Yields the Tracker of --tracker, for the run in the folder `out`.

    It starts before the models load: if it cannot, that is an error, and the folder may be used
    again. Whatever fails later is a warning.
    """
    with readable(f"start --tracker {settings.tracker}"):
        tracker = start(settings.tracker, out)
        tracker.store_init_configuration(vars(settings))
    try:
        yield Tracker(settings.tracker, tracker)
    finally:
        with optional(f"finish {settings.tracker}"):
            tracker.finish()


class Tracker:
    """One of accelerate's trackers."""

    def __init__(self, name, tracker):
        self.name = name
        self.tracker = tracker

    def log(self, numbers, step):
        """numbers: {name: number or None}."""
        with optional(f"send numbers to {self.name}"):
            known = {name: number for name, number in numbers.items() if number is not None}
            self.tracker.log(known, step=step)

    def log_picture(self, file, step):
        """A PNG file."""
        pixels = np.asarray(Image.open(file, formats=["PNG"]).convert("RGB"))  # (height, width, 3)
        if self.name == "trackio":
            import trackio

            self.tracker.log({file.stem: trackio.Image(pixels)}, step=step)
        else:
            layout = {"dataformats": "NHWC"} if self.name == "tensorboard" else {}
            self.tracker.log_images({file.stem: pixels[None]}, step=step, **layout)


def start(name, out):
    """One of accelerate's trackers. A resumed run goes on in the same run of it."""
    PartialState()
    if name == "tensorboard":
        tracker = tracking.TensorBoardTracker("tensorboard", logging_dir=out)
        tracker.start()
        return tracker
    file = out / "tracker-id"
    new = f"{out.resolve().name}-{secrets.token_hex(4)}"
    run = file.read_text("utf-8") if file.exists() else new
    project, options = "grpo-glm-image", {"name": run, "resume": "allow"}
    if name == "wandb":
        project = os.environ.get("WANDB_PROJECT", project)
        options |= {"id": run, "name": os.environ.get("WANDB_NAME", run)}
    tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **options)
    tracker.start()
    file.write_text(run, "utf-8")
    return tracker
