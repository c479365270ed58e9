"""The phase that a run is in: on a progress bar, and the seconds that each phase took."""

import time
from collections import defaultdict

import torch
from tqdm import tqdm

from runtime import ranks


class Clock:
    """The phase of a run: a bar shows it, its seconds and its peak of GPU memory are measured."""

    def __init__(self, device):
        self.device = device
        self.phase = None
        self.timings = defaultdict(float)
        self.bar = tqdm(disable=True)  # until there is something to count

    def begin(self, phase):
        """Ends the phase before."""
        if phase != self.phase:
            self.end(then=phase)

    def end(self, then=None):
        """The phase, if there is one, joins the timings. then: the next."""
        if self.phase is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # or the time would end while it is at work
                peak = torch.cuda.max_memory_allocated(self.device) / 1e9
                for name in ("gpu_gb", f"gpu_gb/{self.phase}"):
                    self.timings[name] = max(peak, self.timings[name])
            seconds = time.perf_counter() - self.began
            for name in ("seconds", f"seconds/{self.phase}"):
                self.timings[name] += seconds
        if then is not None and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = then
        self.bar.set_description_str(then)
        self.began = time.perf_counter()

    def read(self):
        """Since the last call: seconds, of each phase too, and the peaks of the GPU's memory."""
        self.end()
        timings, self.timings = self.timings, defaultdict(float)
        return {"seconds": 0, "gpu_gb": 0, **timings}

    def count(self, unit, items, total, done=0):
        """The items. In a terminal a bar counts them up to `total`, from `done` on."""
        outer, was_hidden = self.bar, self.bar.disable
        outer.clear()
        outer.disable = True  # one bar at a time
        hidden = ranks.rank() > 0 or None  # None: it is where there is no terminal
        options = {"dynamic_ncols": True, "leave": False, "position": 0, "disable": hidden}
        with tqdm(total=total, initial=done, unit=unit, **options) as self.bar:
            for item in items:
                yield item
                self.bar.update()
        self.bar, outer.disable = outer, was_hidden
        outer.unpause()
