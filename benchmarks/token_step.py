"""What the adapter and the attention add to a sampled code: milliseconds, and the slowest kernels.

    python benchmarks/token_step.py

GLM-Image's language model with random weights and 8 of its 40 layers writes 16 sequences side by
side. On a CPU there are no graph and no kernels to list, and each form takes minutes.
"""

import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peft.tuners.lora import LoraLayer
from torch.profiler import ProfilerActivity, profile

from benchmarks import command
from benchmarks.random_weights import SIZES
from card.forward import CapturedForward
from card.model import without_weights
from glm_image.model import add_adapter
from grpo import generate_with_logprobs

POLICY = "vision_language_encoder"
LAYERS, ROWS, CODES, RANK = 8, 16, 200, 16
FORMS = {  # whether there is an adapter, which of its products are no sums, and the attention
    "no adapter": (False, [], "grouped"),
    "as in training": (True, [], "grouped"),
    "B as a product": (True, ["lora_B"], "grouped"),
    "A and B as products": (True, ["lora_A", "lora_B"], "grouped"),
    "torch's attention": (True, [], "sdpa"),
}


def build(adapted, products, attention):
    """A model, and its step of a token in one of the forms."""
    text = SIZES[POLICY]["text_config"] | {"num_hidden_layers": LAYERS}
    sizes = SIZES[POLICY] | {"text_config": text}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = without_weights(POLICY, sizes).to(torch.bfloat16).eval()
        if adapted:
            model, _ = add_adapter(model, "codes", RANK)
    forward = CapturedForward(model, CODES, ROWS)
    model.config.get_text_config()._attn_implementation = attention
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for layer in (x for name in products for x in getattr(module, name).values()):
                layer.__class__ = torch.nn.Linear
    return model, forward


def milliseconds(model, forward):
    """Per code, the best of three times after one that compiles and captures."""
    best = torch.inf
    for _ in range(4):
        start = perf_counter()
        generate_with_logprobs(
            model,
            [torch.arange(20)],
            CODES,
            num_samples=ROWS,
            position_ids=[torch.arange(20 + CODES).expand(3, -1)],
            allowed_ids=slice(0, 16384),
            token_forward=forward,
        )
        best = min(best, perf_counter() - start)  # the tokens are on the CPU: the GPU is done
    return 1000 * best / CODES


def slowest_kernels(graph):
    """Lines: microseconds, how often, and the name of each."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:12]:
        yield f"  {event.self_device_time_total:6.0f} us {event.count:4d} x {event.key[:80]}"


def main():
    for name, form in FORMS.items():
        torch.compiler.reset()
        model, forward = build(*form)
        print(f"{milliseconds(model, forward):.2f} ms: {name}", flush=True)
        if forward.graph:
            print(*slowest_kernels(forward.graph), sep="\n", flush=True)
        forward.release()


if __name__ == "__main__":
    command.run(main, __doc__)
