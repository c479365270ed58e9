"""grpo.py in other experiments: two dozen kinds of models, other adapters, what it refuses, and what it warns of."""

import copy
import runpy
import textwrap
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Emu3ForCausalLM,
    LlamaForCausalLM,
)

import grpo
from grpo import (
    GRPO,
    GRPOSettings,
    compute_advantages,
    compute_grpo_loss,
    generate_with_logprobs,
    get_per_token_logprobs,
    set_advantages,
)

IDS = slice(20, 44)  # as in Emu3 and Chameleon, whose image codes begin somewhere in the vocabulary
EQUAL = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([9, 4, 7, 3, 8])]
RAGGED = [EQUAL[0], EQUAL[1][:3]]
LENGTH = 8

# ---- models ---------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "hidden_size": 32}
BART = {
    "vocab_size": 50, "d_model": 32, "hidden_size": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "init_std": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_target_positions": 64,
    "decoder_start_token_id": 2, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

ANY_PROMPTS = {
    "llama": SIZES,
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "gpt2": GPT,
    "gpt_neox": SIZES | {"rotary_pct": 0.5},
    "opt": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
    "falcon": {name: size for name, size in SIZES.items() if name != "head_dim"},
    "mixtral": SIZES | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4},
    "deepseek_v3": SIZES | EXPERTS | LATENT,
    "emu3_text_model": SIZES,
}
ONE_LENGTH = {
    "mistral": SIZES | {"sliding_window": 4},
    "gemma2": SIZES | {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": SIZES | {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gpt_oss": SIZES | EXPERTS | {"num_local_experts": 4, "sliding_window": 4},
    "qwen3_next": SIZES | EXPERTS | LINEAR | {"num_experts": 4, "num_hidden_layers": 4},
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"]},
    "bart": BART,
    "whisper": BART | {"suppress_tokens": None, "begin_suppress_tokens": None},
    "trocr": BART,
    "roberta": SIZES | {"is_decoder": True},
    "bloom": GPT,
    "mpt": SIZES | {"d_model": 32, "n_heads": 4, "n_layers": 2},
}
REFUSED = {
    "mamba": SIZES,
    "rwkv": SIZES,
    "recurrent_gemma": SIZES | {"num_hidden_layers": 3},
    "openai-gpt": GPT,
}


def build(kind, settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    model = Emu3ForCausalLM(config) if kind.startswith("emu3") else AutoModelForCausalLM.from_config(config)
    return model.eval()


def home_made(folder):
    """The stub of COPYING: it has no config, and has heard neither of positions nor of logits_to_keep."""
    torch.manual_seed(0)
    stub = textwrap.dedent(grpo.COPYING[grpo.COPYING.index("    class MyModel") :])
    (folder / "stub.py").write_text(f"import torch\nfrom types import SimpleNamespace\n{stub}")
    model = runpy.run_path(folder / "stub.py")["MyModel"]()
    for parameter in model.memory.parameters():
        parameter.data.mul_(10)  # sharp
    return model


def check(model, prompts):
    """The log-probs of sampling and of scoring are those of a plain forward pass, one prompt at a time."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    tokens, logprobs, _ = generate_with_logprobs(
        model, prompts, LENGTH, num_samples=2, allowed_ids=IDS, generators=generators
    )
    assert tokens.min() >= IDS.start and tokens.max() < IDS.stop
    assert logprobs.std() > 0.3, "a flat distribution would hide a fault"
    for i, prompt in enumerate(prompts):
        rows = slice(2 * i, 2 * i + 2)
        ids = torch.cat([prompt.expand(2, -1), tokens[rows]], dim=1)
        with torch.no_grad():
            plain = model(input_ids=ids).logits[:, -LENGTH - 1 : -1, IDS].float().log_softmax(-1)
            scored = get_per_token_logprobs(model, ids, LENGTH, allowed_ids=IDS)
        plain = plain.gather(-1, (tokens[rows] - IDS.start)[..., None])[..., 0]
        torch.testing.assert_close(logprobs[rows], plain, atol=1e-4, rtol=0)
        torch.testing.assert_close(scored, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ANY_PROMPTS)
def test_prompts_of_any_lengths(kind):
    model = build(kind, ANY_PROMPTS[kind])
    check(model, EQUAL)
    check(model, RAGGED)


@pytest.mark.parametrize("kind", [*ONE_LENGTH, "home-made"])
def test_prompts_of_one_length(kind, tmp_path):
    """Of several they are refused: a mask, or positions, would be ignored."""
    model = home_made(tmp_path) if kind == "home-made" else build(kind, ONE_LENGTH[kind])
    check(model, EQUAL)
    with pytest.raises(ValueError, match="sample prompts of one length together"):
        check(model, RAGGED)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_without_a_cache_of_keys_and_values(kind):
    with pytest.raises(ValueError, match="returns no past_key_values"):
        check(build(kind, REFUSED[kind]), EQUAL)


# ---- faults that would be silent ------------------------------------------------------------------------------------


def llama(**settings):
    return build("llama", SIZES | settings)


def with_adapter(model, **settings):
    """The base keeps its own weights: PiSSA and OLoRA change them."""
    return get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings))


def perturb(model, size=0.3):
    """Moves the adapter."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size)
    return model


def trainer(model, optimizer=torch.optim.SGD, lr=0.1, module=grpo, **settings):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return module.GRPO(model, optimizer(trained, lr=lr), module.GRPOSettings(**settings), IDS)


def roll_out(run, seed=0):
    groups = run.sample([(ids, None, LENGTH) for ids in EQUAL], 4, seed)
    set_advantages(groups, torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0, 0.0, 1.0, 0.0]))
    return groups


def step(run, seed=0):
    groups = roll_out(run, seed)
    run.add_reference(groups)
    return run.update(groups)


def observed(act, *given):
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act(*given)
    return result, [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("kind", ["right", "longrope", "dynamic", "later"])
def test_sampling_and_scoring_that_disagree_are_told_once(kind):
    """Beyond its original window, here of 8, a rope that changes with the length turns keys that are cached already."""
    ropes = {
        "longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 8},
        "dynamic": {"factor": 4.0},
    }
    settings = {}
    if kind in ropes:
        rope = {"rope_type": kind, "rope_theta": 100.0, **ropes[kind]}
        settings = {"rope_parameters": rope, "max_position_embeddings": 16 if kind == "longrope" else 8}
    model = llama(**settings, initializer_range=0.5)
    run = trainer(with_adapter(model), lr=1e-3)
    if kind == "later":  # a model that begins to see the last token alone
        step(run, seed=4)
        run.forward = lambda past_key_values, **inputs: run.model(past_key_values=None, **inputs)
    metrics, found = observed(step, run)
    if kind == "right":
        assert found == [] and metrics["mean_logprob_gap"] < 1e-5
        return
    assert len(found) == 1 and "sampling and scoring disagree" in found[0] and metrics["mean_logprob_gap"] > 0.1
    metrics, found = observed(step, run, 2)
    assert found == [] and metrics["mean_logprob_gap"] > 0.1, "once"


def test_a_policy_that_has_moved_since_is_no_disagreement():
    run = trainer(with_adapter(llama()), lr=30.0)
    groups = roll_out(run)
    assert observed(run.update, groups)[1] == []
    metrics, found = observed(run.update, groups)
    assert found == [] and metrics["mean_logprob_gap"] > 0.1


@pytest.mark.parametrize(
    ("kind", "noise", "named"),
    [
        ("opt", {"layerdrop": 0.5, "dropout": 0.0}, "layerdrop is 0.5"),
        ("mixtral", {"router_jitter_noise": 0.1}, "jitter_noise is 0.1"),
        ("phimoe", {"num_local_experts": 4}, "router_jitter_noise is 0.01"),  # by default
        ("llama", {"attention_dropout": 0.2}, "self_attn.attention_dropout is 0.2"),
        ("gpt2", {}, "transformer.drop.p is 0.1"),  # by default
    ],
)
def test_noise_of_train_mode_is_refused_by_its_name(kind, noise, named):
    model = build(kind, (GPT if kind == "gpt2" else (ANY_PROMPTS | {"phimoe": SIZES})[kind]) | noise)
    with pytest.raises(ValueError, match=f"{named}, which is noise"):
        step(trainer(model))


def test_only_what_is_called_is_asked_for_noise():
    """Not a name with "drop" in it, nor a Dropout that no forward pass comes through."""

    class DropToken(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.logit_scale = 1.0
            self.unused = torch.nn.Dropout(0.1)

    torch.manual_seed(0)
    run = trainer(DropToken(AutoConfig.for_model("llama", **SIZES)))
    metrics, found = observed(step, run)
    assert found == [] and metrics["grad_norm"] > 0
    assert not any(module._forward_pre_hooks for module in run.model.modules()), "nothing is left on the model"


def test_an_attempt_that_was_refused_leaves_nothing_on_the_model():
    model = build("gpt2", GPT)
    run = trainer(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="transformer.drop.p is 0.1"):
            step(run)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert step(run)["grad_norm"] > 0
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_only_an_active_adapter_is_asked_for_its_dropout():
    model = with_adapter(llama())
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.3))
    assert step(trainer(model))["grad_norm"] > 0
    model.set_adapter("other")
    with pytest.raises(ValueError, match="q_proj.lora_dropout.other.p is 0.3"):
        step(trainer(model))


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(config):
    model = get_peft_model(llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="prompt and prefix tuning"):
        trainer(model)


@pytest.mark.parametrize(
    ("start", "optimizer"),
    [
        ("new", torch.optim.SGD),  # which has no state
        ("new", torch.optim.AdamW),
        ("trained before", torch.optim.AdamW),
        ("pissa", torch.optim.AdamW),
        ("olora", torch.optim.AdamW),
        ("resumed", torch.optim.AdamW),
        ("resumed", torch.optim.SGD),
    ],
)
def test_a_reference_that_is_not_the_start_is_told_once(start, optimizer):
    model = with_adapter(llama(), **{"init_lora_weights": start} if start in ("pissa", "olora") else {})
    if start in ("trained before", "resumed"):
        perturb(model)
    run = trainer(model, optimizer, lr=0.05, kl_coef=0.1)
    if start == "resumed":
        for parameter in run.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()
    metrics, found = observed(step, run)
    if start in ("new", "resumed"):
        assert found == [] and (metrics["kl"] == pytest.approx(0, abs=1e-6)) == (start == "new")
    else:
        assert len(found) == 1 and "the reference is not the model before training" in found[0] and metrics["kl"] > 0.1
    run.optimizer.param_groups[0]["lr"] = 3.0
    step(run, 2)
    metrics, found = observed(step, run, 4)
    assert found == [] and metrics["kl"] > 0.01, "it has moved"


@pytest.mark.parametrize("drifting", ["bias", "norm"])
def test_a_reference_that_would_drift_is_refused(drifting):
    model = with_adapter(llama(attention_bias=True), bias="all" if drifting == "bias" else "none")
    if drifting == "norm":
        model.base_model.model.model.norm.weight.requires_grad_(True)
    run = trainer(model, kl_coef=0.1)
    with pytest.raises(ValueError, match="the reference must be a frozen copy"):
        run.add_reference(roll_out(run))
    run.settings.kl_coef = 0.0
    assert step(run)["grad_norm"] > 0, "without a KL term there is nothing against it"


def test_all_weights_learn_beside_a_frozen_copy():
    model = llama()
    run = trainer(model, lr=0.02, kl_coef=0.1)
    with pytest.raises(ValueError, match="the reference must be a frozen copy"):
        step(run)
    reference = GRPO(copy.deepcopy(model).requires_grad_(False), run.optimizer, run.settings, IDS)
    start = copy.deepcopy(model)
    for seed in (0, 2):
        groups = roll_out(run, seed)
        reference.add_reference(groups)
        metrics, found = observed(run.update, groups)
        assert found == [] and (metrics["kl"] == pytest.approx(0, abs=1e-6)) == (seed == 0)
        for group in groups:
            ids = torch.cat([group.prompt_ids.expand(4, -1), group.tokens], dim=1)
            with torch.no_grad():
                expected = get_per_token_logprobs(start, ids, LENGTH, allowed_ids=IDS)
            torch.testing.assert_close(group.ref_logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cause", ["another adapter", "no choice"])
def test_what_trains_nothing_is_told_once(cause):
    model = with_adapter(llama())
    run = trainer(model, top_p=1e-6 if cause == "no choice" else 1.0)
    if cause == "another adapter":
        model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
        model.set_adapter("other")
    metrics, found = observed(step, run)
    assert len(found) == 1 and "gradient is exactly 0" in found[0] and metrics["grad_norm"] == 0
    metrics, found = observed(step, run, 2)
    assert found == [] and metrics["grad_norm"] == 0


def test_across_ranks_what_is_frozen_stays_as_it_is(monkeypatch):
    """AdamW(model.parameters()): a gradient of 0 would let all frozen weights decay, and would be sent."""
    sent = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: sent.append(tensor.numel()))
    model = with_adapter(llama())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = GRPO(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), GRPOSettings(), IDS)
    assert step(run)["grad_norm"] > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    learning = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    assert moved == {name for name, _ in learning}
    sums = 2 * len(learning)  # of its bytes, compared before the first step
    assert sorted(sent) == sorted([1, sums] + [size for _, size in learning]), "and the sum of weights"


def test_an_exception_leaves_no_gradient_behind():
    runs = [trainer(with_adapter(llama()), lr=1.0, micro_batch_size=1) for _ in range(2)]
    groups = [roll_out(run) for run in runs]
    compute = runs[0].loss

    def fail(group, rows):
        if rows[0] == 2:
            raise torch.OutOfMemoryError
        return compute(group, rows)

    runs[0].loss = fail
    with pytest.raises(torch.OutOfMemoryError):
        runs[0].update(groups[0])
    runs[0].loss = compute
    assert str(runs[0].update(groups[0])) == str(runs[1].update(groups[1]))
    assert all(torch.equal(a, b) for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_told_once(value):
    run = trainer(with_adapter(llama()))
    for seed in (0, 2):
        groups = roll_out(run, seed)
        groups[0].old_logprobs[0, 0] = value
        metrics, found = observed(run.update, groups)
        found = [text for text in found if "sampling and scoring" not in text]  # infinitely, in one case
        assert metrics["skipped"] == 1 and run.steps == 0
        assert [text[:31] for text in found] == (["the gradient is NaN or infinite"] if seed == 0 else [])


def test_what_is_masked_may_hold_anything():
    """The text of a tool between two sampled parts has no log-probs and no nucleus, and would teach nothing by 0 x NaN."""
    runs = [trainer(with_adapter(llama()), top_p=0.9, kl_coef=0.1) for _ in range(2)]
    found = []
    for run, filling in zip(runs, (None, float("nan")), strict=True):
        groups = roll_out(run)
        for group in groups:
            group.mask = torch.ones(4, LENGTH)
            group.mask[:, 2:5] = 0
            if filling is not None:
                group.old_logprobs[:, 2:5] = filling
                group.nucleus[:, 2:5] = False
                group.advantages = group.advantages[:, None].expand(-1, LENGTH).where(group.mask > 0, filling)
        run.add_reference(groups)
        found.append(observed(run.update, groups))
    assert found[0] == found[1] and found[0][1] == [] and found[0][0]["grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(*(run.model.parameters() for run in runs), strict=True))


@pytest.mark.parametrize("shape", [(4, 1), (LENGTH,), (1, LENGTH), (4, LENGTH, 1), ()])
def test_advantages_of_another_shape_are_refused(shape):
    logprobs = torch.zeros(4, LENGTH)
    with pytest.raises(ValueError, match=r"advantages \(.*\) for log-probs \(4, 8\): give \(B,\) or \(B, T\)"):
        compute_grpo_loss(logprobs, logprobs, torch.ones(shape))


def test_an_advantage_per_token():
    """Equal ones are the advantage of their sequence; others weigh their tokens alone."""
    runs = [trainer(with_adapter(llama()), lr=1.0) for _ in range(2)]
    groups = [roll_out(run) for run in runs]
    for group in groups[1]:
        group.advantages = group.advantages[:, None].repeat(1, LENGTH)
    assert str(runs[0].update(groups[0])) == str(runs[1].update(groups[1]))
    assert all(torch.equal(a, b) for a, b in zip(*(run.model.parameters() for run in runs), strict=True))

    new, advantages = torch.randn(4, LENGTH).requires_grad_(), torch.randn(4, LENGTH)
    compute_grpo_loss(new, new.detach(), advantages)[0].backward()
    torch.testing.assert_close(new.grad, -advantages / 4 / LENGTH)


@pytest.mark.parametrize("shape", [(4, 1), (LENGTH,), (1, LENGTH)])
def test_a_mask_of_another_shape_is_refused(shape):
    logprobs = torch.zeros(4, LENGTH)
    with pytest.raises(ValueError, match=r"mask \(.*\) for log-probs \(4, 8\)"):
        compute_grpo_loss(logprobs, logprobs, torch.ones(4), mask=torch.ones(shape))


def test_rewards_of_any_kind_and_of_one_shape():
    rewards = [1, 2, 4, 8, 0, 0, 3, 1]
    expected = compute_advantages(torch.tensor(rewards).float(), 4)
    for given in (rewards, np.array(rewards), np.array(rewards, dtype=np.float32), torch.tensor(rewards)):
        assert torch.equal(compute_advantages(given, 4), expected)
    for shape in ((2, 4), (4, 2)):
        with pytest.raises(ValueError, match=r"give \(N\*G,\)"):
            compute_advantages(np.array(rewards).reshape(shape), 4)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (EQUAL[0][None], r"a prompt is a tensor \(1, 5\)"),
        (EQUAL[0].tolist(), "a prompt is a list"),
        (EQUAL[0][:0], r"a prompt is a tensor \(0,\)"),
    ],
)
def test_a_prompt_is_a_row_of_ids(prompt, named):
    with pytest.raises(ValueError, match=named + r": give a tensor \(L,\)"):
        trainer(with_adapter(llama())).sample([(prompt, None, LENGTH)], 2, 0)


@pytest.mark.parametrize("ids", [[20, 21, 22], range(20, 44), slice(None, 44), slice(20, 44, 2), slice(-20, None)])
def test_allowed_ids_are_a_plain_slice(ids):
    with pytest.raises(ValueError, match=r"give slice\(first, end\)"):
        generate_with_logprobs(llama(), EQUAL, 2, allowed_ids=ids)


def test_groups_and_rewards_that_do_not_fit_are_refused():
    run = trainer(with_adapter(llama()))
    groups = [*run.sample([(EQUAL[0], None, 2)], 4, 0), *run.sample([(EQUAL[1], None, 2)], 2, 1)]
    with pytest.raises(ValueError, match=r"groups of \[4, 2\] samples"):
        set_advantages(groups, torch.arange(6.0))
    for act in (run.update, run.add_reference, lambda groups: set_advantages(groups, [])):
        with pytest.raises(ValueError, match=r"groups of \[\] samples: give one group or more"):
            act([])
    with pytest.raises(ValueError, match=r"give rewards.detach\(\)"):
        set_advantages(groups[:1], torch.arange(4.0, requires_grad=True))


def test_a_wrapped_model_is_refused(tmp_path):
    model = llama()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        for wrap in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
            with pytest.raises(ValueError, match="give model.module"):
                trainer(wrap(model))
        assert step(trainer(model))["grad_norm"] > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("method", ["add_reference", "update"])
def test_advantages_come_first(method):
    run = trainer(with_adapter(llama()), kl_coef=0.1)
    groups = run.sample([(EQUAL[0], None, LENGTH)], 4, 0)
    with pytest.raises(ValueError, match="set_advantages comes before"):
        getattr(run, method)(groups)
