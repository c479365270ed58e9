"""Frozen weights as 8-bit integers, half the memory of bfloat16: --base int8."""

import torch
from torch.nn.functional import linear


class Int8Linear(torch.nn.Linear):
    """A linear layer of int8 weights (out, in) times a scale per row: off by half a scale."""

    def forward(self, x):
        # The scale comes before the product. If it came after, torch.compile would replace both by
        # a kernel for int8, _weight_int8pack_mm, which on CUDA has one thread per output and reads
        # weights very slowly (pytorch 190529).
        return linear(x, self.weight * self.scale[:, None], self.bias)


@torch.no_grad()
def round_linears(module, device=None):
    """Makes an Int8Linear of every linear layer in `module`, one by one.

    Weights mapped from a file are read only here. device: where the rounded weights go; None: they
    stay where they are.
    """
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            weight = layer.weight.to(device or layer.weight.device)  # (out, in)
            largest = weight.float().abs().amax(dim=1)
            scale = (largest / 127).clamp(min=1e-12).to(weight.dtype)  # (out,)
            rounded = (weight.float() / scale.float()[:, None]).round().to(torch.int8)
            layer.weight = torch.nn.Parameter(rounded, requires_grad=False)
            layer.scale = torch.nn.Buffer(scale)
            layer.__class__ = Int8Linear
