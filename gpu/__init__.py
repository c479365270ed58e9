"""What a run has on a CUDA GPU, which alone imports it; runtime/cpu.py has the same for a CPU."""

from gpu.forward import CheckedGRPO as Trainer
from gpu.memory import Memory, plan
from gpu.model import token_forward

__all__ = ["Memory", "Trainer", "plan", "token_forward"]
