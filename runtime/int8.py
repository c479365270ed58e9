"""The frozen weights as 8-bit integers, half the memory of bfloat16: `--base int8`."""

import torch
from torch.nn.functional import linear


class Int8Linear(torch.nn.Linear):
    """A linear layer whose weights (out, in) are int8 times a scale for each row: off by half a scale at most.

    They are plain tensors: PEFT adds an adapter as to any linear layer, and whatever counts or moves bytes sees them all.
    """

    def forward(self, x):
        output = linear(x, self.weight.to(x.dtype)) * self.scale  # a row at a time, so the scale can wait
        return output if self.bias is None else output + self.bias


@torch.no_grad()
def round_linears(module, device=None):
    """Makes an Int8Linear of every linear layer in `module`, one by one: weights mapped from a file are read only here.

    device: where the rounded weights go; None: they stay where they are.
    """
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            weight = layer.weight.to(device or layer.weight.device)  # (out, in)
            scale = (weight.float().abs().amax(dim=1) / 127).clamp(min=1e-12).to(weight.dtype)  # (out,)
            rounded = (weight.float() / scale.float()[:, None]).round().to(torch.int8)
            layer.weight = torch.nn.Parameter(rounded, requires_grad=False)
            layer.scale = torch.nn.Buffer(scale)
            layer.__class__ = Int8Linear
