"""A step of grpo.py beside one of TRL, and its sampler beside transformers' generate().

    pip install trl==1.16.0 && python benchmarks/step.py

A random Qwen2, one thread, float32. A step samples 4 prompts x 8 texts of at most 128 tokens, and
makes one update of a LoRA adapter in micro-batches of 8, with a KL term. The samplers write 32
prompts x 8 texts of 1 to 200 tokens; generate() returns no log-probs. Each program draws its own
texts. CPU seconds are user and system, of one step. MiB are the growth of the process's peak
memory. Each measurement is a process of its own, in which a first step is not timed. The programs
take turns; a row has the least of two rounds, since other programs on the machine only add.
"""

import argparse
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from grpo import GRPO, GRPOSettings, set_advantages

VOCABULARY, END, PAD, STEPS = 2000, 0, 1, 3
reward = lambda ids: sum(id % 2 for id in ids) / len(ids)
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
PROMPTS = torch.randint(2, VOCABULARY, (64, 16), generator=torch.Generator().manual_seed(1))
marks = []


def mark():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    marks.append((time.process_time(), peak))


def build_model(ends):
    """With `ends` a text ends at each token with probability 1/40, else never."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCABULARY}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, eos_token_id=END, pad_token_id=PAD)).eval()
    # All other logits are near 0.
    bias = torch.zeros(VOCABULARY)
    bias[END] = math.log(VOCABULARY / 39) if ends else -1e4
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


def our_steps(model):
    model = get_peft_model(model, LORA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    trainer = GRPO(model, optimizer, GRPOSettings(micro_batch_size=8, kl_coef=0.04, end_ids=END))
    for prompts in PROMPTS[: 4 * STEPS].split(4):
        mark()
        groups = trainer.sample([*prompts], 8, max_new_tokens=128)
        rows = [row for group in groups for row in zip(group.tokens, group.mask)]
        set_advantages(groups, torch.tensor([reward(ids[mask > 0].tolist()) for ids, mask in rows]))
        trainer.add_reference(groups)
        trainer.update(groups)


def their_steps(model):
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(id): id for id in range(VOCABULARY)}, str(PAD)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"eos_token": str(END), "pad_token": str(PAD)}
    texts = [" ".join(map(str, ids)) for ids in PROMPTS[: 4 * STEPS].tolist()]
    watch = TrainerCallback()
    watch.on_step_begin = lambda *_, **__: mark()
    how = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "beta": 0.04}
    how |= {"num_generations": 8, "max_completion_length": 128, "max_steps": STEPS}
    how |= {"loss_type": "grpo", "learning_rate": 1e-4, "gradient_checkpointing": False}
    how |= {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        trl.GRPOTrainer(
            model,
            lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
            trl.GRPOConfig(folder, **how, logging_strategy="no", disable_tqdm=True),
            Dataset.from_dict({"prompt": texts}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends),
            peft_config=LORA,
            callbacks=[watch],
        ).train()


def our_sampler(model):
    trainer = GRPO(model, torch.optim.SGD(model.parameters()), GRPOSettings(end_ids=END))
    for prompts in PROMPTS.split(32):
        mark()
        trainer.sample([*prompts], 8, max_new_tokens=200)


def generate(model):
    how = {"do_sample": True, "top_k": 0, "num_return_sequences": 8, "max_new_tokens": 200}
    for prompts in PROMPTS.split(32):
        mark()
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **how)


def measure(program, ends):
    """CPU seconds of a step, and MiB."""
    torch.set_num_threads(1)
    program(build_model(ends))
    mark()
    (_, before), (start, _), *_, (end, peak) = marks
    return (end - start) / (len(marks) - 2), peak - before


def main():
    for case, ends, programs in (
        ("no text ends", False, (our_steps, their_steps)),
        ("texts end", True, (our_steps, their_steps)),
        ("sampler", True, (our_sampler, generate)),
    ):
        found = {program: [] for program in programs}
        for program in [*programs] * 2:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                found[program].append(process.apply(measure, (program, ends)))
        for program, own in found.items():
            seconds, mib = map(min, zip(*own))
            print(f"{case}: {program.__name__} {seconds:.2f} s, {mib:.0f} MiB", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
