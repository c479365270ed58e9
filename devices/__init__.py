"""Where a run computes: cpu.py, and cuda.py with the same names for a CUDA GPU.

device, plan: what is decided before a download. Memory: where the weights are, and what happens
when memory runs out. token_forward, Trainer: how a token is sampled. memory.py and forward.py are
cuda.py's; a run on a CPU imports none of the three.
"""

import torch

from devices import cpu


def backend(wanted):
    """cpu.py or cuda.py. wanted: "cpu", "cuda", or "auto", a GPU if there is one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return cpu
    from devices import cuda

    return cuda


def plan(settings):
    """The Plan of a run on the device that its settings name."""
    chosen = backend(settings.device)
    return chosen.plan(settings, chosen.device())
