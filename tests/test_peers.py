"""grpo.py beside TRL's GRPOTrainer: the same samples of the same model give the same advantages,
log-probs, loss and gradient.

    pip install trl==1.16.0 && pytest tests/test_peers.py

Both divide by the std over G - 1, and leave a reward of NaN out. The test makes equal what differs:
- TRL adds 1e-4 to the std. grpo.py adds 1e-6: rewards of a small spread count like others.
- TRL multiplies k3 by the ratio (DeepSeek-V3.2), as the recipe "k3 times the ratio" does. For the
  others use_bias_correction_kl is False.
- TRL's dr_grpo divides by the number of tokens that a text may have. The recipe divides by the
  longest text of the batch: grpo.py has no setting for that number.
- TRL keeps the KL term of a group of equal rewards. Here no group has equal rewards.
"""

import math

import pytest
import torch
from conftest import perturb
from peft import LoraConfig
from test_recipes import taken
from test_zoo import LENGTH, RAGGED, build

from benchmarks import losses
from test_grpo import trainer

trl = pytest.importorskip("trl", "1.16.0")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed, kl_coef", [(0, 0.0), (1, 0.1)])
@pytest.mark.parametrize(
    "recipe, loss_type, settings",
    [
        ("GRPO", "grpo", {}),
        ("k3 times the ratio", "grpo", {}),
        ("Dr. GRPO", "dr_grpo", {"scale_rewards": "none"}),
        ("DAPO's token mean", "bnpo", {}),
        ("DAPO's token mean", "dapo", {}),
        ("DAPO's two clip ranges", "dapo", {"epsilon_high": 0.28}),
        (
            "GSPO",
            "grpo",
            {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        ),
        ("CISPO", "cispo", {"epsilon_high": 1.2}),
    ],
)
def test_trl_agrees(recipe, loss_type, settings, seed, kl_coef, pipe, tmp_path):
    torch.manual_seed(seed)
    rewards = torch.randn(16)
    rewards[5] = math.nan
    settings = settings | {"loss_type": loss_type, "beta": kl_coef, "temperature": 1.3}
    settings |= {"num_iterations": 2, "max_completion_length": LENGTH}
    if recipe != "k3 times the ratio":
        settings["use_bias_correction_kl"] = False
    cat = lambda name: torch.cat([getattr(group, name) for group in groups])
    theirs = trl.GRPOTrainer(
        build("llama", vocab_size=1600),
        lambda **_: rewards.tolist(),
        trl.GRPOConfig(str(tmp_path), bf16=False, **settings),
        trl.trainer.grpo_trainer.Dataset.from_dict({"prompt": [""]}),
        processing_class=pipe.processor.tokenizer,
        peft_config=LoraConfig(),
        rollout_func=lambda *_: {
            "prompt_ids": [ids.tolist() for ids in RAGGED for _ in range(8)],
            "completion_ids": [
                row[mask > 0].tolist() for row, mask in zip(cat("tokens"), cat("mask"))
            ],
            "logprobs": None,
        },
    )
    model, module = theirs.model.eval(), losses.module(recipe)
    settings = {"kl_coef": kl_coef, "temperature": 1.3, "max_grad_norm": math.inf}
    ours = trainer(model, lr=1.0, module=module, end_ids=tuple(range(300)), **settings)

    perturb(model, 0.3)
    groups = ours.sample([(ids, None, LENGTH) for ids in RAGGED], 8, seed)
    advantages = module.compute_advantages(rewards, 8, eps=1e-4)
    for group, own in zip(groups, advantages.split(8)):
        group.advantages = own
    ours.add_reference(groups)
    inputs = theirs._generate_and_score_completions([{"prompt": ""}] * 16)
    expected = inputs["advantages"], inputs["old_per_token_logps"] * cat("mask")
    torch.testing.assert_close((advantages, cat("old_logprobs") * cat("mask")), expected)

    perturb(model, 0.6)  # ratios other than 1, clipped on both sides
    loss = theirs.compute_loss(model, inputs)
    expected = [*torch.autograd.grad(loss, ours.parameters)]
    gradient, metrics = taken(ours, lambda: ours.update(groups))
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-3)
