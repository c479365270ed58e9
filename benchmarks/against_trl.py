"""Time our training step against that of TRL's GRPOTrainer: the same work, on one CPU thread.

    pip install trl datasets
    python benchmarks/against_trl.py [--steps 10]

Both train a LoRA adapter of the same random Llama with the same prompts, reward, number of new tokens, KL penalty,
AdamW and micro-batch (one group). Steps alternate, so that a machine that is busy for a while slows both. TRL's step is
what runs between its on_step_begin and on_step_end: from sampling to the optimiser, without loading data and logging.

TRL has its defaults, save for what would make it slower here (gradient checkpointing, bfloat16) or another algorithm
(loss_type "dapo", a KL term times the ratio). What differs: TRL computes the logits again in the backward pass, which
spares the memory to keep them, and every token's entropy, a metric.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import grpo

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"this compares with TRL, which is not installed ({error}): pip install trl datasets")

# Large enough that matrices, not Python, take most of the time; sampling is half of our step or more.
MODEL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
LORA |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
PROMPT_TOKENS, NEW_TOKENS = 64, 128
LR, KL_COEF, CLIP_RANGE = 1e-4, 0.05, 0.2
WARM_UP = 2  # steps that are not counted


def build_model():
    transformers.set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL, bos_token_id=None, eos_token_id=None))


def build_tokenizer():
    """One word for each id of the model. The end token is beyond them, so no sequence can end early."""
    size = MODEL["vocab_size"]
    words = {f"w{i}": i for i in range(size)} | {"<end>": size}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def reward(ids):
    """The share of odd ids: next to no work, and hardly ever equal within a group, which we would pass over."""
    assert len(ids) == NEW_TOKENS, "a sample that ended early is less work"
    return sum(i % 2 for i in ids) / len(ids)


# ---- the two trainers ----------------------------------------------------------------------------------------------


def build_trl(options, prompts, tokenizer, folder):
    as_ours = {"temperature": 1.0, "top_p": 1.0, "beta": KL_COEF, "epsilon": CLIP_RANGE, "num_iterations": 1}
    as_ours |= {"learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "shuffle_dataset": False}
    as_ours |= {"max_completion_length": NEW_TOKENS, "max_steps": WARM_UP + options.steps}
    as_ours |= {"num_generations": options.group_size, "per_device_train_batch_size": options.group_size}
    as_ours |= {"gradient_accumulation_steps": options.prompts_per_step}  # it samples for all of them at once
    same_algorithm = {"loss_type": "grpo", "use_bias_correction_kl": False}
    faster_here = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    silent = {"disable_tqdm": True, "logging_strategy": "no", "report_to": "none", "save_strategy": "no"}
    trl = GRPOTrainer(
        model=build_model(),
        reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
        args=GRPOConfig(output_dir=folder, **as_ours, **same_algorithm, **faster_here, **silent),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(**LORA),
    )
    trl.remove_callback(PrinterCallback)
    return trl


def build_ours(options, weights):
    model = peft.get_peft_model(build_model(), peft.LoraConfig(**LORA))
    model.load_state_dict(weights)
    trainable = [p for p in model.parameters() if p.requires_grad]
    settings = grpo.GRPOSettings(micro_batch_size=options.group_size, clip_range=CLIP_RANGE, kl_coef=KL_COEF)
    return grpo.GRPO(model, torch.optim.AdamW(trainable, lr=LR, weight_decay=0.0), settings)


def our_step(ours, prompts, tokenizer, group_size, seed):
    """A step, see grpo_step in train.py."""
    encoded = [(torch.tensor(tokenizer(prompt)["input_ids"]), None, NEW_TOKENS) for prompt in prompts]
    groups = ours.sample(encoded, group_size, seed)
    grpo.set_advantages(groups, torch.tensor([reward(ids) for group in groups for ids in group.tokens.tolist()]))
    ours.add_reference(groups)
    ours.update(groups)


# ---- the clock -----------------------------------------------------------------------------------------------------


class Alternate(TrainerCallback):
    """Times each step of TRL, and after it a step of ours on the same prompts: step(number)."""

    def __init__(self, step):
        self.step = step
        self.seconds = {"TRL": [], "ours": []}

    def on_step_begin(self, *_, **__):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        between = time.perf_counter()
        self.step(state.global_step - 1)
        self.seconds["TRL"].append(between - self.started)
        self.seconds["ours"].append(time.perf_counter() - between)
        theirs, own = (values[-1] for values in self.seconds.values())
        print(f"step {state.global_step}: TRL {theirs:.2f} s, ours {own:.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each (default: 10)")
    parser.add_argument("--group-size", type=int, default=4, help="samples per prompt (default: 4)")
    parser.add_argument("--prompts-per-step", type=int, default=4, help="groups in a step (default: 4)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # of names that TRL and transformers still use
    tokenizer = build_tokenizer()
    count = options.prompts_per_step
    ids = torch.randint(MODEL["vocab_size"], ((WARM_UP + options.steps) * count, PROMPT_TOKENS))
    prompts = [" ".join(f"w{i}" for i in row) for row in ids.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        trl = build_trl(options, prompts, tokenizer, folder)
        ours = build_ours(options, trl.model.state_dict())

        step = lambda i: our_step(ours, prompts[i * count : (i + 1) * count], tokenizer, options.group_size, i * count)
        alternate = Alternate(step)
        trl.add_callback(alternate)
        trl.train()
    theirs, own = (statistics.median(values[WARM_UP:]) for values in alternate.seconds.values())
    print(f"medians {theirs:.2f} and {own:.2f} s: a step of TRL takes {theirs / own:.2f} times as long as ours")


if __name__ == "__main__":
    main()
