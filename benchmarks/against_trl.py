"""Time our training step against that of TRL's GRPOTrainer: the same work, on one CPU thread.

    pip install trl datasets
    python benchmarks/against_trl.py [--steps 10]

Both train a LoRA adapter of the same random Llama with the same prompts, reward, number of new tokens, KL penalty,
AdamW and micro-batch (one group). Before the clock starts, log-probs, loss and gradient on the same samples are
compared. Steps alternate, so that a machine that is busy for a while slows both. TRL's step is what runs between its
on_step_begin and on_step_end: from sampling to the optimiser, without loading data and logging.

TRL has its defaults, save for what would make it slower here (gradient checkpointing, bfloat16) or another algorithm
(loss_type "dapo", a KL term times the ratio). What differs: TRL computes the logits again in the backward pass, which
spares the memory to keep them, and every token's entropy, a metric; it takes pi_old from the policy's pass, where ours
keeps the log-prob of each token as it is sampled.
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
from runtime.settings import number

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    print(f"this compares with TRL, which is not installed ({error}): pip install trl datasets", file=sys.stderr)
    sys.exit(2)

# Large enough that matrices, not Python, take most of the time; sampling is half of our step or more.
MODEL = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
# peft's own start is 0, which would leave little to compare.
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "init_lora_weights": False}
LORA |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
PROMPT_TOKENS, NEW_TOKENS = 64, 128
LR, KL_COEF, CLIP_RANGE = 1e-4, 0.05, 0.2
WARM_UP = 2  # steps that are not counted
TOLERANCE = 1e-5


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    count, several = number(int, "[1, inf)"), number(int, "[2, inf)")
    parser.add_argument("--steps", type=several, default=10, help="measured steps of each (default: 10)")
    parser.add_argument("--group-size", type=several, default=4, help="samples per prompt (default: 4)")
    parser.add_argument("--prompts-per-step", type=count, default=4, help="groups in a step (default: 4)")
    return parser.parse_args()


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


def draw_prompts(count):
    ids = torch.randint(MODEL["vocab_size"], (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def reward(ids):
    """The share of odd ids: next to no work, and hardly ever equal within a group, which we would pass over."""
    if len(ids) != NEW_TOKENS:
        raise RuntimeError(f"a sample of {len(ids)} tokens instead of {NEW_TOKENS}: the comparison is void")
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
    """A step, see grpo_step in train.py. Raises RuntimeError where it did less than TRL."""
    encoded = [(torch.tensor(tokenizer(prompt)["input_ids"]), None, NEW_TOKENS) for prompt in prompts]
    groups = ours.sample(encoded, group_size, seed)
    grpo.set_advantages(groups, torch.tensor([reward(ids) for group in groups for ids in group.tokens.tolist()]))
    ours.add_reference(groups)
    metrics = ours.update(groups)
    if metrics["skipped"] or metrics["groups_without_spread"]:
        raise RuntimeError("our step passed over a group: the comparison is void")


def compare(trl, ours, group_size):
    """How far the two are apart on the same samples; for the gradient, as a share of its largest entry."""
    ids = torch.randint(MODEL["vocab_size"], (group_size, PROMPT_TOKENS + NEW_TOKENS))
    prompts, samples = ids.split([PROMPT_TOKENS, NEW_TOKENS], dim=1)
    advantages = grpo.compute_advantages(torch.tensor([reward(row) for row in samples.tolist()]), group_size)
    inputs = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "advantages": advantages}
    inputs |= {"completion_ids": samples, "completion_mask": torch.ones_like(samples)}

    def logprobs(trainer):
        if trainer is trl:
            return trl._get_per_token_logps_and_entropies(trl.model, ids, torch.ones_like(ids), NEW_TOKENS)[0]
        return grpo.get_per_token_logprobs(ours.model, ids, NEW_TOKENS)

    results = []
    for trainer in (trl, ours):
        trainer.model.eval()  # in training TRL divides the loss by the number of micro-batches, not known yet
        with torch.no_grad(), trainer.model.disable_adapter():
            reference = logprobs(trainer)
        policy = logprobs(trainer)
        if trainer is trl:
            loss = trl.compute_loss(trl.model, inputs | {"ref_per_token_logps": reference})
        else:
            loss, _ = grpo.compute_grpo_loss(policy, policy.detach(), advantages, reference, None, CLIP_RANGE, KL_COEF)
        adapter = [p for p in trainer.model.parameters() if p.requires_grad]
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, adapter)])
        results.append({"log-probs": policy, "reference": reference, "loss": loss, "gradient": gradient})
    differences = {name: (x - results[0][name]).abs().max().item() for name, x in results[1].items()}
    differences["gradient"] /= gradient.abs().max().item()
    return differences


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
    options = parse_options()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # of names that TRL and transformers still use
    tokenizer = build_tokenizer()
    count = options.prompts_per_step
    prompts = draw_prompts((WARM_UP + options.steps) * count)
    with tempfile.TemporaryDirectory() as folder:
        trl = build_trl(options, prompts, tokenizer, folder)
        ours = build_ours(options, trl.model.state_dict())
        differences = compare(trl, ours, options.group_size)
        print("largest differences: " + ", ".join(f"{name} {value:.1e}" for name, value in differences.items()))
        if max(differences.values()) > TOLERANCE:
            sys.exit(f"the two do not compute the same thing (tolerance {TOLERANCE}): no timing")

        def step(number):
            some = prompts[number * count : (number + 1) * count]
            our_step(ours, some, tokenizer, options.group_size, seed=number * count)

        alternate = Alternate(step)
        trl.add_callback(alternate)
        trl.train()
    theirs, own = (statistics.median(values[WARM_UP:]) for values in alternate.seconds.values())
    print(f"medians {theirs:.2f} and {own:.2f} s: a step of TRL takes {theirs / own:.2f} times as long as ours")


if __name__ == "__main__":
    main()
