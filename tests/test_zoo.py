"""grpo.py in other experiments: many kinds of models, other adapters, what it refuses, and what it
warns of."""

import copy
import math
import re
import runpy
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import ROOT, perturb, seeded
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Emu3ForCausalLM

from grpo import (
    GRPO,
    GRPOSettings,
    Offload,
    generate_with_logprobs,
    mask_through_end,
    set_advantages,
)
from test_grpo import reread, trainer, with_adapter

IDS = slice(20, 44)  # as in Emu3 and Chameleon, whose image codes begin somewhere in the vocabulary
EQUAL = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([9, 4, 7, 3, 8])]
RAGGED = [EQUAL[0], EQUAL[1][:3]]
FAR = [EQUAL[0], torch.arange(45) % 40 + 3]  # the shorter one is nearly all padding
LENGTH = 8

# ---- models --------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Not 0, with which grpo.py pads: the embedding of a model's own padding is 0, and hides a fault.
    "pad_token_id": 49,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # As other models call these.
    "init_std": 0.3,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    # Mixtures of experts, linear attention.
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
WINDOW = {"sliding_window": 10}  # an answer of LENGTH leaves it
KINDS = {
    "llama": {},
    "llama, eager": {"attn_implementation": "eager"},
    "gpt2": {},
    "opt": {},
    "bloom": {},
    "mixtral": {},
    "emu3_text_model": {},
    "mistral": WINDOW,
    "gpt_oss": WINDOW,
    "gemma3_text": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    # Recurrent layers, and layers of attention.
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    # One length alone: its positions begin after its padding id.
    "roberta": {"is_decoder": True},
}
ANY_PROMPTS = [kind for kind in KINDS if kind != "roberta"]


def build(kind, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split(",")[0], **SIZES | KINDS.get(kind, {}) | changes)
    make = Emu3ForCausalLM if kind.startswith("emu3") else AutoModelForCausalLM.from_config
    return make(config).eval()


def on_the_page(begin, folder, **given):
    """What the block of code in docs/copying.md defines that begins so, after its imports.

    given: the names that it has from other blocks.
    """
    page = (ROOT / "docs" / "copying.md").read_text()
    imports = r"(?:(?:from|import) [^\n]*\n|\n)+"
    (code,) = re.findall(rf"```python\n({imports}{begin}.*?)```", page, flags=re.DOTALL)
    (folder / "page.py").write_text(code)
    return runpy.run_path(str(folder / "page.py"), given)


def home_made(folder):
    """It has no config, and has heard neither of positions nor of logits_to_keep."""
    torch.manual_seed(0)
    model = on_the_page("class MyModel", folder)["MyModel"]()
    for parameter in model.memory.parameters():
        parameter.data.mul_(10)  # sharp
    return model


def check(model, prompts):
    """Sampled and recomputed log-probs are those of a plain forward pass, one prompt at a time."""
    generators = [seeded(seed) for seed in range(len(prompts))]
    tokens, logprobs, nucleus = generate_with_logprobs(
        model, prompts, LENGTH, num_samples=2, allowed_ids=IDS, generators=generators
    )
    assert nucleus is None and tokens.min() >= IDS.start and tokens.max() < IDS.stop
    assert logprobs.std() > 0.3  # a flat distribution would hide a fault
    for i, prompt in enumerate(prompts):
        rows = slice(2 * i, 2 * i + 2)
        ids = torch.cat([prompt.expand(2, -1), tokens[rows]], dim=1)
        with torch.no_grad():
            plain = model(input_ids=ids).logits[:, -LENGTH - 1 : -1, IDS].float().log_softmax(-1)
        again = reread(model, prompt, tokens[rows], allowed_ids=IDS)
        plain = plain.gather(-1, (tokens[rows] - IDS.start)[..., None])[..., 0]
        torch.testing.assert_close(logprobs[rows], plain, atol=1e-4, rtol=0)
        torch.testing.assert_close(again, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ANY_PROMPTS)
def test_prompts_of_any_lengths(kind):
    model = build(kind)
    for prompts in (EQUAL, RAGGED, FAR):
        check(model, prompts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ANY_PROMPTS)
def test_a_sample_depends_on_its_own_prompt_alone(kind, dtype):
    """Beside a prompt of another length it is what it is alone, by as many random numbers."""
    model = build(kind).to(dtype)

    def sample(prompts, seeds):
        generators = [seeded(seed) for seed in seeds]
        return generate_with_logprobs(
            model, prompts, LENGTH, num_samples=4, allowed_ids=IDS, generators=generators
        )

    for prompts in (RAGGED, FAR):
        together, logprobs, _ = sample(prompts, range(2))
        for i, prompt in enumerate(prompts):
            own = slice(4 * i, 4 * i + 4)
            alone, expected, _ = sample([prompt], [i])
            assert torch.equal(together[own], alone)
            # Rounding of products of other shapes.
            most = 1e-4 if dtype == torch.float32 else 0.06
            torch.testing.assert_close(logprobs[own], expected, atol=most, rtol=0)


@pytest.mark.parametrize("kind", ["roberta", "home-made"])
def test_prompts_of_one_length(kind, tmp_path):
    """Of several the first update warns: a mask is ignored, or a position."""
    model = home_made(tmp_path) if kind == "home-made" else build(kind)
    check(model, EQUAL)
    run = trainer(model.train().requires_grad_(True))
    groups = run.sample([(ids, None, LENGTH) for ids in RAGGED], 4, 0)
    set_advantages(groups, torch.arange(8.0))
    metrics, messages = observed(run.update, groups)
    assert metrics["mean_logprob_gap"] > 0.1 and "recomputed log-probs disagree" in messages[0]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_end_leave_every_kind_of_cache(kind):
    """The others go on as if nothing had happened."""
    model, rows = build(kind), []

    def sample(**ends):
        generators = [seeded(seed) for seed in range(2)]
        return generate_with_logprobs(
            model, EQUAL, 40, num_samples=4, generators=generators, **how, **ends
        )

    how = {"allowed_ids": IDS, "temperature": 5.0}
    endless, _, _ = sample()
    early = lambda id: (endless[:, :16] == id).any(1).sum()  # so many texts end with it at once
    ends = next(id for id in range(IDS.start, IDS.stop) if 0 < early(id) < 8)
    model.register_forward_hook(lambda module, given, output: rows.append(len(output.logits)))
    tokens, logprobs, _ = sample(end_ids=ends)
    assert rows[1] == 8 > rows[-1] > 0
    mask = mask_through_end(tokens, ends)
    assert torch.equal(tokens[mask > 0], endless[:, : tokens.shape[1]][mask > 0])
    for i, prompt in enumerate(EQUAL):
        own = slice(4 * i, 4 * i + 4)
        again = reread(model, prompt, tokens[own], **how) * mask[own]
        torch.testing.assert_close(logprobs[own] * mask[own], again, atol=1e-4, rtol=0)


def test_weights_that_are_not_float32_are_warned_of():
    with pytest.warns(UserWarning, match="trained weights are not float32"):
        trainer(llama().bfloat16())


def test_a_model_without_a_cache_of_keys_and_values_is_refused_or_warned_of():
    """transformers 5.24 gives it one, with which it is sampled wrongly."""
    run = trainer(build("mamba"))
    try:
        groups = run.sample([(ids, None, LENGTH) for ids in EQUAL], 4, 0)
    except AttributeError as error:
        assert "no attribute 'past_key_values" in str(error)
        return
    set_advantages(groups, torch.arange(8.0))
    metrics, messages = observed(run.update, groups)
    assert metrics["mean_logprob_gap"] > 0.1 and "recomputed log-probs disagree" in messages[0]


# ---- faults that would be silent -----------------------------------------------------------------


def llama(**settings):
    return build("llama", **settings)


def roll_out(run, seed=0):
    groups = run.sample([(ids, None, LENGTH) for ids in EQUAL], 4, seed)
    set_advantages(groups, torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0, 0.0, 1.0, 0.0]))
    return groups


def step(run, seed=0):
    groups = roll_out(run, seed)
    run.add_reference(groups)
    return run.update(groups)


def observed(act, *arguments):
    """What a call returns, and every warning that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act(*arguments)
    return result, [str(warning.message) for warning in caught if warning.category is UserWarning]


def test_a_warning_comes_once_for_the_line_that_calls_update():
    run = trainer(with_adapter(llama()))
    groups = roll_out(run)
    for group in groups:
        group.old_logprobs += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            run.update(groups)
    (warning,) = [warning for warning in caught if warning.category is UserWarning]
    assert warning.filename == __file__ and "docs/numbers.md" in str(warning.message)


def noisy(kind):
    if kind == "attention":
        return llama(attention_dropout=0.2)
    model = with_adapter(llama(), lora_dropout=0.5)
    perturb(model, 0.3)  # dropout acts where the adapter is no longer 0
    return model


@pytest.mark.parametrize("kind", ["attention", "adapter"])
def test_dropout_is_off(kind):
    """It acts in train mode alone, which only gradient checkpointing needs."""
    metrics, messages = observed(step, trainer(noisy(kind)))
    assert metrics["mean_logprob_gap"] < 1e-5 and messages == []


@pytest.mark.parametrize("kind", ["attention", "adapter", PromptTuningConfig, PrefixTuningConfig])
def test_noise_and_virtual_tokens_show_in_the_gap(kind):
    """Virtual tokens come before each sampled one."""
    if isinstance(kind, str):
        model = noisy(kind)
        model.gradient_checkpointing_enable()
    else:
        model = get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    metrics, messages = observed(step, trainer(model))
    assert metrics["mean_logprob_gap"] > 0.1 and "recomputed log-probs disagree" in messages[0]


@pytest.mark.parametrize("start", ["new", "pissa", "olora", "resumed"])
def test_a_reference_that_is_not_the_start_gives_a_warning(start):
    model = with_adapter(
        llama(), **{"init_lora_weights": start} if start in ("pissa", "olora") else {}
    )
    run = trainer(model, torch.optim.AdamW, lr=0.05, kl_coef=0.1)
    if start == "resumed":
        perturb(model, 0.3)
        for parameter in run.parameters:
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()
    metrics, messages = observed(step, run)
    if start in ("new", "resumed"):
        assert messages == [] and (metrics["kl"] == pytest.approx(0, abs=1e-6)) == (start == "new")
    else:
        (message,) = messages
        assert "the reference is not the model before training" in message and metrics["kl"] > 0.1
    run.optimizer.param_groups[0]["lr"] = 3.0
    step(run, 2)
    metrics, messages = observed(step, run, 4)
    assert messages == [] and metrics["kl"] > 0.01  # it has moved


def test_a_reference_that_would_drift_is_refused():
    run = trainer(with_adapter(llama(attention_bias=True), bias="all"), kl_coef=0.1)
    biases = pytest.warns(UserWarning, match="Careful, disabling adapter layers with bias")
    with pytest.raises(ValueError, match="the reference must be a frozen copy"), biases:
        run.add_reference(roll_out(run))
    run.settings.kl_coef = 0.0
    assert step(run)["grad_norm"] > 0  # without a KL term there is nothing against it


def test_all_weights_learn_beside_a_frozen_copy():
    model = llama()
    run = trainer(model, lr=0.02, kl_coef=0.1)
    reference = GRPO(copy.deepcopy(model).requires_grad_(False), run.optimizer, run.settings)
    for seed in (0, 2):
        groups = roll_out(run, seed)
        reference.add_reference(groups)
        metrics, messages = observed(run.update, groups)
        assert messages == [] and (metrics["kl"] == pytest.approx(0, abs=1e-6)) == (seed == 0)


@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe", "qwen3_moe", "mixtral"])
def test_an_adapter_of_experts_and_attention_alone(kind, tmp_path):
    """As the page makes it. The reference is the base, and the router stays as it is."""
    base, lora = build(kind), on_the_page("lora = ", tmp_path)["lora"]
    model = get_peft_model(copy.deepcopy(base), lora)
    run = trainer(model, torch.optim.AdamW, lr=0.01, kl_coef=0.1)
    for seed in (0, 2):
        metrics, messages = observed(step, run, seed)
        assert messages == [] and metrics["mean_logprob_gap"] < 1e-5
        assert (metrics["kl"] == pytest.approx(0, abs=1e-6)) == (seed == 0)
    with torch.no_grad(), run.reference():
        assert torch.equal(model(EQUAL[0][None]).logits, base(EQUAL[0][None]).logits)
    before, after = base.state_dict(), model.merge_and_unload().state_dict()
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    words = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
    words += ["experts.gate_up_proj", "experts.down_proj"]
    assert moved == {name for name in before if name.endswith(tuple(words))}
    assert len(moved) == 2 * len(words)  # two layers


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # of patterns that PEFT makes
@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe", "qwen3_moe", "mixtral"])
def test_all_linear_leaves_out_experts_or_adapts_the_router(kind):
    """So the page names what to adapt."""
    model = get_peft_model(build(kind), LoraConfig(target_modules="all-linear"))
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    found = [any(f".{word}.lora_" in name for name in adapted) for word in ("experts", "gate")]
    assert found == [kind in ("qwen3_moe", "mixtral")] * 2


def test_what_trains_nothing_gives_a_warning():
    model = with_adapter(llama())
    run = trainer(model)
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
    model.set_adapter("other")
    metrics, (message,) = observed(step, run)
    assert "gradient is exactly 0" in message and metrics["grad_norm"] == 0


def test_across_ranks_what_is_frozen_stays_as_it_is():
    """AdamW(model.parameters()): a gradient of 0 would let all frozen weights decay, and would be
    sent."""
    sent = []
    average = lambda tensors: sent.extend(tensor.numel() for tensor in tensors)
    model = with_adapter(llama())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    run = GRPO(model, optimizer, GRPOSettings(), IDS, average=average)
    assert step(run)["grad_norm"] > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    learning = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert moved == learning.keys()
    # At the start a sum for each, then the number of samples and the gradients, then the metrics.
    assert sent == [len(learning), 1, *learning.values(), 7, 7]


def test_processes_that_would_drift_apart_are_refused(monkeypatch):
    def with_another(tensors):  # whose first adapter was drawn from another seed
        for tensor in tensors:
            tensor[0] += 0.1

    model = with_adapter(llama())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="begin with different adapters"):
        GRPO(model, optimizer, GRPOSettings(), IDS, average=with_another)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="GRPO needs `average`"):
        GRPO(model, optimizer, GRPOSettings(), IDS)


def test_an_exception_leaves_no_gradient_behind(monkeypatch):
    run = trainer(with_adapter(llama()), lr=0.0, micro_batch_size=1)
    groups, logprobs = roll_out(run), run.logprobs
    expected = run.update(groups)

    def fail(group, rows):
        if rows[0] == 2:
            raise torch.OutOfMemoryError
        return logprobs(group, rows)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(run, "logprobs", fail)
        run.update(groups)
    assert str(run.update(groups)) == str(expected)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_masked_may_hold_anything(seed):
    """The text of a tool between two sampled parts has no log-probs and no nucleus; 0 x NaN must
    not teach. An advantage per token is that of its sequence."""
    results = []
    for fill in (False, True):
        run = trainer(with_adapter(llama()), lr=1.0, top_p=0.9, kl_coef=0.1)
        groups = roll_out(run, seed)
        for group in groups:
            group.mask = torch.rand(4, LENGTH, generator=seeded(seed)).round()
            if fill:
                group.old_logprobs[group.mask == 0] = math.nan
                group.nucleus[group.mask == 0] = False
                group.advantages = group.advantages[:, None].where(group.mask > 0, math.nan)
        run.add_reference(groups)
        results.append((observed(run.update, groups), run.parameters))
    (plain, weights), (filled, others) = results
    assert plain == filled and plain[1] == [] and plain[0]["grad_norm"] > 0
    assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_settings_may_change_between_steps(name):
    """As for annealing: sampling and recomputing follow."""
    run = trainer(with_adapter(llama()), **{name: 1.0})
    before = -roll_out(run)[0].old_logprobs.mean()
    setattr(run.settings, name, 0.3)
    groups = roll_out(run)
    metrics, messages = observed(run.update, groups)
    assert -groups[0].old_logprobs.mean() < before / 1.5
    assert messages == [] and metrics["mean_logprob_gap"] < 1e-5


def engine_trainer(**settings):
    """Its texts are of many lengths; some do not end."""
    settings |= {"temperature": 1.3, "end_ids": [2, 7, 9], "kl_coef": 0.1, "micro_batch_size": 3}
    model = with_adapter(llama(), lora_dropout=0.5)
    perturb(model, 0.3)
    run = trainer(model.train(), lr=1.0, max_grad_norm=math.inf, **settings)
    return run, [ids.tolist() for ids in RAGGED]


def learn_from(run, groups):
    """The gradient, of rewards by the length of a text."""
    lengths = torch.cat([group.mask.sum(1) for group in groups])
    set_advantages(groups, lengths)
    run.add_reference(groups)
    before = [p.detach().clone() for p in run.parameters]
    metrics = run.update(groups)
    change = torch.cat([(old - p).flatten() for old, p in zip(before, run.parameters)])
    return lengths.tolist(), change, metrics


@pytest.mark.filterwarnings("ignore:kl is above 0")  # the adapter has moved before
def test_samples_of_another_engine_teach_what_their_own_would(tmp_path):
    groups_of = on_the_page("@torch.no_grad", tmp_path)["groups_of"]
    run, prompts = engine_trainer()
    own = run.sample([(ids, None, LENGTH) for ids in RAGGED], 4, 1)
    texts = [
        [ids[mask > 0].tolist() for ids, mask in zip(group.tokens, group.mask)] for group in own
    ]
    other, _ = engine_trainer()
    groups = groups_of(other, prompts, texts)
    for one, same in zip(own, groups, strict=True):
        masked = one.old_logprobs * one.mask
        found = (same.old_logprobs * same.mask)[:, : masked.shape[1]]
        torch.testing.assert_close(found, masked[:, : found.shape[1]], atol=1e-5, rtol=0)
    lengths, expected, _ = learn_from(run, own)
    assert len(set(lengths)) > 3 and max(lengths) == LENGTH
    others, change, metrics = learn_from(other, groups)
    assert others == lengths and metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(change, expected, atol=1e-6, rtol=1e-4)
    (group,) = groups_of(other, prompts[:1], [[[], [5, 2]]])  # an empty text does not count
    assert group.mask.tolist() == [[0, 0], [1, 1]] and group.old_logprobs.isfinite().all()
    other.settings.top_p = 0.9
    with pytest.raises(ValueError, match="which ids did top-p keep"):
        groups_of(other, prompts, texts)


def generated(model, prompts, **plain):
    """Texts by generate(), through their ends, and their log-probs."""
    texts, logprobs = [], []
    for ids in prompts:
        how = {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 4}
        output = model.generate(torch.tensor([ids]), **plain, **how)
        scores = torch.stack(output.scores, dim=1).log_softmax(-1)  # (4, T, vocabulary)
        tokens = output.sequences[:, len(ids) :]
        each = scores.gather(-1, tokens[..., None])[..., 0]
        for row, of_row, mask in zip(tokens, each, mask_through_end(tokens, [2, 7, 9])):
            texts.append(row[mask > 0].tolist())
            logprobs += of_row[mask > 0].tolist()
    return texts, logprobs


def batched(model, prompts, **plain):
    """The same by continuous batching."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this transformers has another one")
    small = {"num_blocks": 8, "page_size": 32, "max_batch_tokens": 64, "return_logprobs": True}
    outputs = model.generate_batch(
        [ids for ids in prompts for _ in range(4)],
        generation_config=transformers.GenerationConfig(**plain),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**small),
    ).values()
    logprobs = [x for output in outputs for x in output.logprobs]
    return [output.generated_tokens for output in outputs], logprobs


@pytest.mark.filterwarnings("ignore:kl is above 0")
@pytest.mark.parametrize("engine", [generated, batched])
def test_another_engine_samples_and_the_policy_learns(engine, tmp_path):
    """transformers' own, whose log-probs are those of the policy."""
    groups_of = on_the_page("@torch.no_grad", tmp_path)["groups_of"]
    run, prompts = engine_trainer()
    plain = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.3}
    plain |= {"eos_token_id": [2, 7, 9], "max_new_tokens": LENGTH}
    texts, logprobs = engine(run.model.eval(), prompts, **plain)
    for ids in texts:
        ends = [i for i, token in enumerate(ids, 1) if token in (2, 7, 9)]
        assert ends == [len(ids)] or (ends == [] and len(ids) == LENGTH)
    groups = groups_of(run, prompts, [texts[:4], texts[4:]])
    found = torch.cat([group.old_logprobs[group.mask > 0] for group in groups])
    torch.testing.assert_close(found, torch.tensor(logprobs), atol=1e-4, rtol=0)
    lengths, change, metrics = learn_from(run, groups)
    assert len(set(lengths)) > 1 and change.norm() > 0 and metrics["skipped"] == 0


def test_two_models_on_one_gpu_take_turns(tmp_path, monkeypatch):
    """As printed, also without a GPU."""
    model, judge, turns = with_adapter(llama()), torch.nn.Linear(LENGTH, 1), []
    turn = Offload.all_but
    seen = lambda offload, *models: turns.extend(models) or turn(offload, *models)
    monkeypatch.setattr(Offload, "all_but", seen)
    given = {"model": model, "judge": judge, "settings": GRPOSettings(kl_coef=0.1)}
    given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    page = on_the_page("device = ", tmp_path, **given)
    run, score = page["trainer"], page["score"]
    groups = run.sample([(EQUAL[0], None, LENGTH)], 4, 0)
    set_advantages(groups, score(groups[0].tokens.float()).flatten())
    run.add_reference(groups)
    assert run.update(groups)["grad_norm"] > 0
    assert turns == [model, judge, model, model] and page["offload"].homes.keys() == {model, judge}


def test_codes_with_a_head_of_their_own(tmp_path):
    """Janus: a text, then codes, which have an embedding of their own, too."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32}
    vision |= {"patch_size": 16, "projection_dim": 32, "num_image_tokens": 4, "mlp_ratio": 2.0}
    codes = {"embed_dim": 8, "num_embeddings": 24, "latent_channels": 8, "base_channels": 32}
    codes |= {"channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 4}
    codes |= {"projection_dim": 32, "image_token_embed_dim": 32}
    text = SIZES | {"model_type": "llama"}
    config = transformers.JanusConfig(text_config=text, vision_config=vision, vq_config=codes)
    codes = on_the_page("class Codes", tmp_path)["Codes"]
    model = codes(transformers.JanusForConditionalGeneration(config))
    head = model.janus.model.generation_head.vision_head.weight
    head.data.mul_(20)  # sharp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = GRPO(model, optimizer, GRPOSettings(), slice(0, 24))
    before = head.detach().clone()
    groups = run.sample([(ids + 24, None, LENGTH) for ids in EQUAL], 4, 0)
    set_advantages(groups, torch.arange(8.0))
    metrics, messages = observed(run.update, groups)
    assert messages == [] and 0 < metrics["mean_logprob_gap"] < 1e-5
    assert not torch.equal(head, before)  # it is the head of the codes that learns
