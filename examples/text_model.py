"""Train a text model with grpo.py alone, a few seconds on a CPU: where to copy from.

    python examples/text_model.py

A random Llama learns to write even tokens, and token 0, which ends a text. Yours: the model, the
prompts, the reward.
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", category=FutureWarning)  # of peft about transformers

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from grpo import GRPO, GRPOSettings, set_advantages

END, LENGTH, GROUP_SIZE = 0, 16, 8
PROMPTS = [
    (torch.tensor(ids), None, LENGTH) for ids in ([11, 12, 13], [21, 22], [31, 32, 33, 34])
]  # of any lengths


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
    return get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    )


def train(steps=30):
    """Returns the mean reward of each step."""
    torch.set_num_threads(
        1
    )  # of several, most would only wait for one another on matrices this small
    model = build_model()
    means = []
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0
    )
    trainer = GRPO(model, optimizer, GRPOSettings(kl_coef=0.01, top_p=0.95, end_ids=(END,)))
    for step in range(steps):
        groups = trainer.sample(
            PROMPTS, GROUP_SIZE, seed=step * len(PROMPTS)
        )  # prompt after prompt, G samples each
        rewards = []
        for group in groups:
            ended = ((group.tokens == END) * group.mask).sum(1)  # (G,), 1 or 0
            even = ((group.tokens % 2 == 0) * (group.tokens != END) * group.mask).sum(1)
            rewards.append((even / group.mask.sum(1) + ended) / 2)
        set_advantages(groups, torch.cat(rewards))  # compared in each group of G
        trainer.add_reference(groups)
        metrics = trainer.update(groups)
        means.append(torch.cat(rewards).mean().item())
        length = torch.cat([group.mask for group in groups]).sum(1).mean()
        gap = metrics[
            "mean_logprob_gap"
        ]  # between sampled and reread: what grpo.py gets wrong with a model shows here
        learned = (
            f"kl {metrics['kl']:.4f}, gap {gap:.0e}"
            if metrics["groups_without_spread"] < 1
            else "equal rewards"
        )
        print(f"step {step + 1}: reward {means[-1]:.3f}, length {length:.1f}, {learned}")
    return means


if __name__ == "__main__":
    train()
