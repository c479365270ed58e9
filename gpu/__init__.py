"""The machine of a run: a CUDA GPU. It is imported only with CUDA; for a CPU: runtime/cpu.py."""

from gpu.memory import Machine, plan

__all__ = ["Machine", "plan"]
