"""What a run has on a CUDA GPU; cpu.py has the same for a CPU."""

import os

import torch
import torch.distributed as dist

from devices.forward import CapturedForward, or_plain
from devices.forward import CheckedGRPO as Trainer
from devices.memory import Memory, plan
from inputs import UserError

__all__ = ["Memory", "Trainer", "device", "plan", "token_forward"]


def device():
    """This rank's GPU. UserError for one that will not do."""
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU that it can use")
    if dist.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if torch.cuda.get_device_capability() < (8, 0):
        name = torch.cuda.get_device_name()
        instead = "use an Ampere GPU or newer, or --model tiny-glm-image"
        raise UserError(f"{name} has no bfloat16: {instead}")
    return torch.device("cuda", torch.cuda.current_device())


def token_forward(glm_image, settings, base):
    """The step of one token as a graph, of any base. The decoder is compiled, too."""
    if glm_image.compiles_decoder:
        compile_decoder(glm_image.pipe.transformer)
    rows = settings.prompts_per_step * settings.group_size
    # T at most: a picture follows a preview of 256 codes at most, see encode_prompt.
    most = 256 + settings.height * settings.width // 32**2
    return CapturedForward(glm_image.language_model, most, rows)


def compile_decoder(transformer):
    # Micro-batches of two sizes, with text to paint and without, are more than torch's limit. (Only
    # torch 2.13 takes the limit as an argument.)
    torch._dynamo.config.recompile_limit = 32
    transformer.compile_repeated_blocks()
    transformer.forward = or_plain(transformer.forward)
