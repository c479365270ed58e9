"""The forward pass for one new token on a CPU."""

from types import SimpleNamespace

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer


class SharedForward:
    """A model's forward for one new token, to hand to generate_with_logprobs as `forward`.

    Samples that agree so far share a row: the tiny model is so sure of most codes that 64 samples
    are some 20 rows. All it changes is rounding.
    """

    def __init__(self, model, num_new_tokens):
        self.model = model
        self.num_new_tokens = num_new_tokens
        self.cache = None

    def __call__(self, input_ids, attention_mask, position_ids, past_key_values, **options):
        begins = past_key_values is not self.cache  # that of the prompts, a row for each sample
        if begins:
            self.cache = past_key_values
            # The first layer's keys are made of ids and positions alone.
            keys = self.cache.layers[0].keys.flatten(1)
            self.rows = keys.unique(dim=0, return_inverse=True)[1]  # (B,), equal where they agree
            layers = self.cache.layers
            self.cache.layers = [InPlaceLayer(each, self.num_new_tokens) for each in layers]
        agree = self.rows * 2**32 + input_ids[:, 0]
        rows = agree.unique(return_inverse=True)[1]  # (B,)
        samples = torch.arange(len(rows))
        chosen = torch.empty(int(rows.max()) + 1, dtype=torch.long).scatter_(0, rows, samples)
        if begins or rows.max() > self.rows.max():  # otherwise they stay as they are
            self.cache.reorder_cache(chosen if begins else self.rows[chosen])
        self.rows = rows
        output = self.model(
            input_ids=input_ids[chosen],
            attention_mask=None if attention_mask is None else attention_mask[chosen],
            position_ids=position_ids[:, chosen],
            past_key_values=self.cache,
            **options,
        )
        return SimpleNamespace(logits=output.logits[rows], past_key_values=self.cache)


class InPlaceLayer(DynamicLayer):
    """A layer of a cache with room for new tokens, where DynamicLayer copies itself for each."""

    def __init__(self, layer, num_new_tokens):
        super().__init__()
        self.keys, self.values = layer.keys, layer.values
        self.is_initialized = True
        self.room = [pad(each, (0, 0, 0, num_new_tokens)) for each in (layer.keys, layer.values)]

    def update(self, *states, **options):
        start = self.get_seq_length()
        end = start + states[0].shape[-2]
        for room, new in zip(self.room, states[:2]):
            room[..., start:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self.room)
        return self.keys, self.values

    def reorder_cache(self, rows):
        end = self.get_seq_length()
        self.room = [room[rows] for room in self.room]
        self.keys, self.values = (room[..., :end, :] for room in self.room)
