"""A text model trained by grpo.py alone: a random Llama learns to write even tokens, and an end.

    python examples/text.py

Token 0 ends a text. It takes seconds on a CPU. docs/copying.md says how to put your own model,
prompts and reward in their places.
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", category=FutureWarning)  # transformers renames past_key_values

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, logging

from grpo import GRPO, GRPOSettings, set_advantages

logging.set_verbosity_error()  # of the same
END = 0
LENGTH = 16  # tokens
GROUP_SIZE = 8
PROMPTS = ([11, 12, 13], [21, 22], [31, 32, 33, 34])  # of any lengths


def build_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    return get_peft_model(LlamaForCausalLM(config), lora)


def reward(group):
    """Half for the share of even tokens, half for an end."""
    has_end = ((group.tokens == END) * group.mask).sum(1)  # (G,), 1 or 0
    even = ((group.tokens % 2 == 0) * (group.tokens != END) * group.mask).sum(1)
    return (even / group.mask.sum(1) + has_end) / 2


def train(steps=30):
    torch.set_num_threads(1)  # more threads slow matrices this small
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    trainer = GRPO(model, optimizer, GRPOSettings(kl_coef=0.01, top_p=0.95, end_ids=END))
    means = []
    for step in range(steps):
        groups = trainer.sample(PROMPTS, GROUP_SIZE, max_new_tokens=LENGTH)  # G for each prompt
        rewards = torch.cat([reward(group) for group in groups])
        set_advantages(groups, rewards)  # compared within each group of G
        trainer.add_reference(groups)
        metrics = trainer.update(groups)

        means.append(rewards.mean().item())
        length = torch.cat([group.mask for group in groups]).sum(1).mean()
        # The gap shows what goes wrong with a model: sampled and recomputed log-probs differ.
        learned = f"kl {metrics['kl']:.4f}, gap {metrics['mean_logprob_gap']:.0e}"
        if metrics["groups_without_spread"] == 1:
            learned = "equal rewards"
        print(f"step {step + 1}: reward {means[-1]:.3f}, length {length:.1f}, {learned}")
    return means


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    train()
