"""The machine of a run: a CPU, on which all models stay. gpu/ is the same for a CUDA GPU."""

import time
from collections import defaultdict
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace

import torch
from tqdm import tqdm

from grpo import GRPO
from runtime import ranks


def plan(model_class, settings, device):
    """The Machine of a run, before its models load: see gpu/memory.py."""
    return Machine(device, "bfloat16" if settings.base == "auto" else settings.base)


class Machine:
    """with machine.phase("paint", decoder): the block's time is measured, and a bar shows its name.

    On a GPU the models that are named are on it within the block: see gpu/memory.py.
    """

    Trainer = GRPO
    waiting = None  # where weights wait for their turn: here all models stay

    def __init__(self, device, base):
        """base: that of Settings, but "auto"."""
        self.device = device
        self.base = base
        self.name = ""
        self.timings = defaultdict(float)
        self.bar = tqdm(disable=True)  # until there is something to count

    def token_forward(self, glm_image, settings):
        return SharedForward(glm_image.language_model, merge=self.base != "int8")

    def hold(self, models, release):
        """All models of a run, once they are loaded. release: see gpu/memory.py."""

    @contextmanager
    def phase(self, name, *models):
        """The block's seconds are added to the timings."""
        self.name = name
        self.bar.set_description_str(name)
        began = time.perf_counter()
        yield
        self.timings[f"seconds/{name}"] += time.perf_counter() - began

    def read(self):
        """Since the last call: seconds, of each phase too, and the peaks of the GPU's memory."""
        timings, self.timings = self.timings, defaultdict(float)
        of = lambda what: [value for name, value in timings.items() if name.startswith(what)]
        return timings | {"seconds": sum(of("seconds/")), "gpu_gb": max(of("gpu_gb/"), default=0)}

    @contextmanager
    def counting(self, unit, total, done=0):
        """In a terminal a bar counts up to `total`, from `done` on, until the block ends."""
        outer = self.bar
        hidden = ranks.rank() > 0 or None  # None: it is where there is no terminal
        options = {"dynamic_ncols": True, "leave": False, "disable": hidden}
        with tqdm(total=total, initial=done, unit=unit, **options) as self.bar:
            yield
        self.bar = outer
        outer.unpause()

    def attempt(self, work, settings, trainers):
        """Returns work(). gpu/ calls it again with less if memory runs out."""
        return work()


class SharedForward:
    """A model's forward for one new token, to hand to generate_with_logprobs as `token_forward`.

    Samples that agree so far share a row: the tiny model is so sure of most codes that 64 samples
    are some 20 rows. merge: a copy of the model samples, with the adapter added to its weights: its
    own products would be a third of the work. (Weights in int8 would round it away.) All that both
    change is rounding.
    """

    def __init__(self, model, merge=False):
        self.model = model
        self.merge = merge
        self.release()

    def release(self):
        self.cache = self.sampler = None

    def __call__(self, input_ids, attention_mask, position_ids, past_key_values, **options):
        begins = past_key_values is not self.cache  # that of the prompts, a row for each sample
        if begins:
            self.cache = past_key_values
            # A new copy each time: the adapter has learned since.
            self.sampler = deepcopy(self.model).merge_and_unload() if self.merge else self.model
            # The first layer's keys are made of ids and positions alone.
            keys = self.cache.layers[0].keys.flatten(1)
            self.rows = keys.unique(dim=0, return_inverse=True)[1]  # (B,), equal where they agree
        agree = self.rows * 2**32 + input_ids[:, 0]
        rows = agree.unique(return_inverse=True)[1]  # (B,)
        chosen = rows.new_empty(int(rows.max()) + 1).scatter_(0, rows, torch.arange(len(rows)))
        if begins or rows.max() > self.rows.max():  # otherwise they stay as they are
            self.cache.reorder_cache(chosen if begins else self.rows[chosen])
        self.rows = rows
        output = self.sampler(
            input_ids=input_ids[chosen],
            attention_mask=None if attention_mask is None else attention_mask[chosen],
            position_ids=position_ids[:, chosen],
            past_key_values=self.cache,
            **options,
        )
        return SimpleNamespace(logits=output.logits[rows], past_key_values=self.cache)
