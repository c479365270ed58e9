"""The machine of a run: a CUDA GPU. It is imported only with CUDA; for a CPU: runtime/cpu.py.

Both have plan, Machine, Trainer and token_forward.
"""

from gpu.forward import CheckedGRPO as Trainer
from gpu.memory import Machine, plan
from gpu.model import token_forward

__all__ = ["Machine", "Trainer", "plan", "token_forward"]
