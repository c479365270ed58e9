"""What a run has on a CPU, on which all models stay; cuda.py has the same for a CUDA GPU."""

import os
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import set_seed

from grpo import GRPO

Trainer = GRPO


@dataclass
class Plan:
    """What is decided before anything is downloaded."""

    device: torch.device
    base: str  # that of Settings, but "auto"
    waiting: str | None = None  # on a GPU: where weights wait for their turn, see memory.py


def device():
    """The CPU, with a single thread unless OMP_NUM_THREADS says otherwise.

    For matrices as small as the tiny model's a second thread gains little, and beside a busy
    program it costs a lot.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")


def plan(settings, device):
    return Plan(device, "bfloat16" if settings.base == "auto" else settings.base)


def token_forward(glm_image, settings, base):
    return SharedForward(glm_image.language_model, merge=base != "int8")


class Memory:
    """All models stay where they were loaded."""

    def __init__(self, plan, clock):
        self.clock = clock

    def place(self, models, release):
        """On a GPU they go there, or where they wait for their turn."""

    def begin(self, phase, *models):
        """On a GPU the models of a phase come first, where they take turns."""
        self.clock.begin(phase)

    def attempt(self, work, run, settings, rewards, prompts, seed):
        """Returns work(run, settings, rewards, prompts, seed), such as a step.

        All its draws start from the seed, also those of a reward. So no random state needs saving,
        and where a GPU's memory runs out the work is done again with less.
        """
        set_seed(seed % 2**32)
        return work(run, settings, rewards, prompts, seed)


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
