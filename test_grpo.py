"""The specification of grpo.py. Every number has a second witness: transformers' generate(),
autograd, a case by hand.

pytest test_grpo.py            # no network, no GPU, under a minute on one core
"""

import copy
import math
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
)

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "tiny-glm-image")]

from make import NUM_CODES

from glm_image.model import encode_prompt
from grpo import (
    GRPO,
    GRPOSettings,
    NotFinite,
    Offload,
    compute_advantages,
    compute_grpo_loss,
    generate_with_logprobs,
    get_per_token_logprobs,
    mask_through_end,
    set_advantages,
)
from runtime.settings import TINY

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # several threads on matrices this small only wait for one another

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",  # of one library about another
    # Adapters are moved on purpose; see tests/test_zoo.py.
    "ignore:(mean_logprob_gap|kl is above 0|rewards differ|the gradient)",
)
NAN = math.nan
CODES = slice(0, NUM_CODES)
SHORT, LONG = torch.tensor([9, 8]), torch.tensor([5, 6, 7, 3, 4])  # prompts of a text model
# Prompts of GLM-Image, of two lengths.
RED, BLUE = (
    "a red circle on a pink background",
    "a blue cross",
)


# ---- models --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pipe():
    """The shipped model, through the stock pipeline. Its distributions are sharp, so a wrong
    position is expensive."""
    return GlmImagePipeline.from_pretrained(TINY, dtype=torch.float32)


def text_model(**settings):
    """A random Llama whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **settings,
    )
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(8)
    return model


def model_with_learned_positions():
    """A random GPT-2. Llama knows distances only: it would not notice if all positions were
    shifted."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GPT2LMHeadModel(config).eval()
    model.transformer.wpe.weight.data.mul_(50)
    model.transformer.ln_f.weight.data.mul_(20)
    return model


def with_adapter(model, size=0.0, **settings):
    """`size` above 0: the adapter has moved, so that policy and reference differ."""
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "gate_up_proj", "up_proj"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings))
    perturb(model, size)
    return model


def perturb(model, size):
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size)


def adapter_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def reread(model, ids, tokens, **shaping):
    """The log-probs (G, T) of a group's tokens, by teacher forcing."""
    with torch.no_grad():
        return get_per_token_logprobs(
            model, torch.cat([ids.expand(len(tokens), -1), tokens], 1), tokens.shape[1], **shaping
        )


def glm_prompts(pipe, *texts, size=(128, 128), length=None):
    """Ids, positions and T of some prompts; a `length` keeps the first tokens only, which saves
    time."""
    ids, positions, counts = zip(*(encode_prompt(pipe.processor, text, *size) for text in texts))
    length = length or counts[0]
    return ids, [p[:, : len(i) + length] for i, p in zip(ids, positions)], length


def glm_inputs(pipe, prompt, height, width):
    """What the stock pipeline hands to generate()."""
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]]
    return pipe.processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )


def oracle(model, inputs, tokens, nucleus, allowed_ids, temperature, top_p):
    """Log-probs of `tokens` (G, T) by the raw logits of transformers' own generate(), one prompt
    alone and unpadded."""
    length = inputs["input_ids"].shape[1]

    def force(input_ids, scores):  # walk along the tokens, whatever the model thinks of them
        step = input_ids.shape[1] - length
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, step : step + 1], 0.0)

    batch = {k: v.repeat(len(tokens), *[1] * (v.ndim - 1)) for k, v in inputs.items()}
    out = model.generate(
        **batch,
        max_new_tokens=tokens.shape[1],
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([force]),
        eos_token_id=None,
    )
    assert torch.equal(out.sequences[:, length:], tokens)
    logits = torch.stack(out.logits, dim=1)[..., allowed_ids].float() / temperature  # (G, T, V)
    if top_p == 1:
        assert nucleus is None
    else:
        assert nucleus.shape == logits.shape and nucleus.dtype == torch.bool
        ordered = logits.softmax(-1).sort(descending=True)
        likelier = torch.zeros_like(logits).scatter(
            -1, ordered.indices, ordered.values.cumsum(-1) - ordered.values
        )
        # An id is kept while those likelier than it hold less than top_p. On the very border
        # rounding may decide.
        assert likelier[nucleus].max() < top_p + 1e-4
        assert likelier[~nucleus].min() > top_p - 1e-4
        logits = logits.masked_fill(~nucleus, -torch.inf)
    drawn = tokens.unsqueeze(-1) - allowed_ids.start
    return logits.log_softmax(-1).gather(-1, drawn).squeeze(-1)


# ---- 1 and 4. sampling and reading again, against transformers -----------------------------------


def check_against_generate(
    model, prompts, inputs, length, positions=None, top_p=1.0, tolerance=2e-4, **shaping
):
    """All prompts side by side, against each of them alone: `inputs` are what generate() needs for
    the first ones."""
    tokens, logprobs, nucleus = generate_with_logprobs(
        model,
        prompts,
        length,
        num_samples=2,
        position_ids=positions,
        top_p=top_p,
        generators=seeded(*range(10, 10 + len(prompts))),
        **shaping,
    )
    assert tokens.shape == logprobs.shape == (2 * len(prompts), length)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert len(tokens.unique(dim=0)) == len(tokens)  # a group of copies teaches nothing
    for i, (ids, alone) in enumerate(zip(prompts, inputs)):
        group = slice(2 * i, 2 * i + 2)
        kept = None if nucleus is None else nucleus[group]
        expected = oracle(model, alone, tokens[group], kept, **shaping, top_p=top_p)
        # generate() has just left its own grid in GLM-Image: reading again must not pick that up.
        place = positions and positions[i]
        again = reread(model, ids, tokens[group], position_ids=place, nucleus=kept, **shaping)
        torch.testing.assert_close(logprobs[group], expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(again, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "first, second, size, temperature, top_p",
    # Wide and tall: an exchange of rows and columns shows. The first prompt is padded in one, but
    # not in the other.
    [(BLUE, RED, (64, 128), 3.0, 1.0), (RED, BLUE, (160, 64), 4.0, 0.7)],
    ids=["wide", "tall"],
)
def test_glm_image_equals_generate(pipe, first, second, size, temperature, top_p):
    ids, positions, length = glm_prompts(pipe, first, second, size=size)
    inputs = [glm_inputs(pipe, first, *size)]
    shaping = {"allowed_ids": CODES, "temperature": temperature, "top_p": top_p}
    check_against_generate(pipe.vision_language_encoder, ids, inputs, length, positions, **shaping)


@pytest.mark.parametrize("make_model", [text_model, model_with_learned_positions])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("prompts", [[LONG, SHORT, LONG[:4]], [LONG, SHORT, LONG.flip(0)]])
def test_text_model_equals_generate(make_model, top_p, prompts):
    inputs = [{"input_ids": ids[None]} for ids in prompts]
    shaping = {"allowed_ids": slice(3, 48), "temperature": 0.7, "top_p": top_p}
    check_against_generate(make_model(), prompts, inputs, 12, **shaping, tolerance=1e-4)


@pytest.mark.parametrize("forgotten", ["position_ids", "allowed_ids", "temperature", "nucleus"])
def test_reading_again_has_to_know_how_it_was_sampled(pipe, forgotten):
    """The silent trap, above all of positions: without them the same call runs, and is wrong by
    nats."""
    model, ((ids,), (positions,), length) = (
        pipe.vision_language_encoder,
        glm_prompts(pipe, RED, length=60),
    )
    told = {"position_ids": positions, "allowed_ids": CODES, "temperature": 3.0}
    sampling = {**told, "position_ids": [positions], "top_p": 0.7, "generators": seeded(0)}
    tokens, logprobs, nucleus = generate_with_logprobs(
        model, [ids], length, num_samples=2, **sampling
    )
    # It is as wide as there are codes.
    told["nucleus"] = None if forgotten == "allowed_ids" else nucleus
    del told[forgotten]
    gap = (reread(model, ids, tokens, **told) - logprobs).abs().max()
    assert gap > (1 if forgotten == "position_ids" else 0.1)


def test_greedy_codes_equal_generate(pipe):
    model, (ids, positions, count) = (
        pipe.vision_language_encoder,
        glm_prompts(pipe, BLUE, size=(64, 64), length=24),
    )
    sampling = {"num_samples": 2, "position_ids": positions, "allowed_ids": CODES, "top_p": 1e-6}
    tokens, logprobs, _ = generate_with_logprobs(model, ids, count, **sampling)
    banned = list(range(NUM_CODES, model.lm_head.out_features))
    inputs = glm_inputs(pipe, BLUE, 64, 64)
    expected = model.generate(
        **inputs, max_new_tokens=count, do_sample=False, suppress_tokens=banned
    )
    assert torch.equal(tokens, expected[:, len(ids[0]) :].expand(2, -1))
    assert logprobs.eq(0).all()  # under the distribution they were drawn from there was no choice


def test_exactly_t_codes_even_when_the_model_wants_to_stop(pipe):
    model, (ids, positions, count) = pipe.vision_language_encoder, glm_prompts(pipe, RED, length=30)

    def want_to_stop(module, inputs, logits):
        logits[..., model.config.image_end_token_id] += 100
        return logits

    sampling = {
        "num_samples": 3,
        "position_ids": positions,
        "allowed_ids": CODES,
        "generators": seeded(0),
    }
    with model.lm_head.register_forward_hook(want_to_stop):
        tokens, logprobs, _ = generate_with_logprobs(model, ids, count, **sampling)
    assert tokens.shape == (3, count)
    assert tokens.max() < NUM_CODES
    assert logprobs.min() > -30  # not charged for the ids that were ruled out


def test_samples_follow_the_distribution():
    """Frequencies of 20,000 draws of one token against softmax by hand, after temperature and
    top-p."""
    model = text_model()
    shaping = {"allowed_ids": slice(0, 30), "temperature": 1.5, "top_p": 0.8}
    tokens, _, _ = generate_with_logprobs(
        model, [LONG], 1, num_samples=20_000, generators=seeded(0), **shaping
    )
    with torch.no_grad():
        p = (model(LONG[None]).logits[0, -1, :30] / 1.5).softmax(-1).double().numpy()
    order = np.argsort(-p)
    kept = order[: np.searchsorted(np.cumsum(p[order]), 0.8) + 1]
    expected = np.zeros(30)
    expected[kept] = p[kept] / p[kept].sum()
    assert 2 < len(kept) < 30
    frequency = np.bincount(tokens.flatten().numpy(), minlength=30) / 20_000
    assert np.abs(frequency - expected).max() < 0.015
    assert frequency[expected == 0].sum() == 0


@pytest.mark.parametrize("kind", ["GLM-Image", "text"])
def test_a_group_depends_on_its_own_generator_alone(pipe, kind):
    """A neighbour removed or exchanged changes the padding, and with it nothing but rounding."""
    if kind == "text":
        model, ids, positions, length, top_p = text_model(), [LONG, SHORT, LONG[:4]], None, 12, 0.9
    else:  # top-p of 1,024 codes has so many borders that rounding may decide on one
        model, top_p = pipe.vision_language_encoder, 1.0
        ids, positions, length = glm_prompts(pipe, RED, BLUE, "a green square on white", length=24)

    def sample(*chosen):
        """{prompt: its tokens, log-probs and nucleus}, drawn by generators numbered as the
        prompts."""
        found = generate_with_logprobs(
            model,
            [ids[i] for i in chosen],
            length,
            num_samples=3,
            temperature=3.0,
            top_p=top_p,
            position_ids=positions and [positions[i] for i in chosen],
            generators=seeded(*chosen),
        )
        groups = zip(
            *([None] * len(chosen) if x is None else x.split(3) for x in found), strict=True
        )
        return dict(zip(chosen, groups))

    assert len({len(i) for i in ids}) == 3
    everyone = sample(0, 1, 2)
    for others in ((0,), (1,), (2,), (1, 2), (2, 1)):
        for i, (tokens, logprobs, nucleus) in sample(*others).items():
            assert torch.equal(tokens, everyone[i][0])
            torch.testing.assert_close(logprobs, everyone[i][1], atol=2e-4, rtol=0)
            assert nucleus is None if top_p == 1 else torch.equal(nucleus, everyone[i][2])


def test_in_bfloat16_sampling_and_reading_again_differ_by_rounding(pipe):
    model = with_adapter(copy.deepcopy(pipe.vision_language_encoder).to(torch.bfloat16), 0.05)
    (ids,), (positions,), length = glm_prompts(pipe, RED, length=30)
    shaping = {"allowed_ids": CODES, "temperature": 0.9}
    sampling = {"num_samples": 4, "position_ids": [positions], "generators": seeded(0), **shaping}
    tokens, logprobs, _ = generate_with_logprobs(model, [ids], length, **sampling)
    gap = (reread(model, ids, tokens, position_ids=positions, **shaping) - logprobs).abs()
    assert gap.mean() < 0.01
    assert gap.max() < 0.5
    with torch.no_grad():
        start = positions[:, None, : len(ids)].expand(-1, 4, -1)
        logits = model(input_ids=ids.expand(4, -1), position_ids=start, logits_to_keep=1).logits[
            :, -1, :NUM_CODES
        ]
    first = (logits.double() / 0.9).log_softmax(-1).gather(-1, tokens[:, :1])
    # Softmax itself is not in bfloat16.
    torch.testing.assert_close(logprobs[:, :1].double(), first, atol=1e-5, rtol=0)


def test_no_token_sees_nothing(monkeypatch):
    """Attention may answer NaN to such a one, here it does; and no mask is left for transformers to
    ask about."""
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def attention(query, key, value, attn_mask=None, **options):
        seen.append(attn_mask.any(-1).all())
        return attend(query, key, value, attn_mask=attn_mask, **options).masked_fill(
            ~attn_mask.any(-1)[..., None], NAN
        )

    model, masks, ids = text_model(), [], [LONG, SHORT, LONG[:4]]
    model.register_forward_pre_hook(
        lambda model, _, inputs: masks.append(inputs["attention_mask"].ndim), with_kwargs=True
    )
    sampling = {"num_samples": 2, "generators": seeded(0, 1, 2)}
    healthy = generate_with_logprobs(model, ids, 5, **sampling)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    found = generate_with_logprobs(model, ids, 5, **sampling | {"generators": seeded(0, 1, 2)})
    assert (
        all(torch.equal(a, b) for a, b in zip(healthy[:2], found[:2]))
        and all(seen)
        and masks == [4] * 10
    )


def test_each_prompt_is_read_once():
    """By as many rows as there are prompts, the cache then has a row per sample; only the last
    logits are computed."""
    model = text_model()
    ids, logits = [], []
    model.register_forward_pre_hook(
        lambda *given: ids.append(tuple(given[2]["input_ids"].shape)), with_kwargs=True
    )
    model.lm_head.register_forward_hook(lambda *given: logits.append(tuple(given[2].shape[:2])))
    generate_with_logprobs(model, [LONG, SHORT], 3, num_samples=4, top_p=0.9)
    assert ids == [(2, 5), (8, 1), (8, 1)] and logits == [(2, 1), (8, 1), (8, 1)]


def test_mask_through_end_by_hand():
    tokens = torch.tensor([[5, 7, 3, 7], [7, 7, 9, 3], [3, 5, 5, 9], [5, 5, 5, 5]])
    assert mask_through_end(tokens, (7, 9)).tolist() == [
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
    ]


def test_sampling_stops_when_all_texts_have_ended():
    """What was sampled until then is what it would have been; and the trainer learns from it
    through each end."""
    sampling = {"num_samples": 2, "temperature": 2.0}
    tokens, logprobs, _ = generate_with_logprobs(
        text_model(), [LONG, SHORT], 40, **sampling, generators=seeded(3, 4)
    )
    ends = tuple(range(0, 50, 3))
    first = [next(t for t, token in enumerate(row) if token in ends) for row in tokens.tolist()]
    run = trainer(with_adapter(text_model()), temperature=2.0, end_ids=ends, kl_coef=0.1)
    passes = []
    run.model.register_forward_pre_hook(lambda *_: passes.append(1))
    groups = run.sample([(ids, None, 40) for ids in (LONG, SHORT)], 2, 3)
    assert len(set(first)) > 1 and max(first) < 16
    length = groups[0].tokens.shape[1]
    assert length == max(first) + 1 and len(passes) == 16  # it looks at every 16th token
    mask = torch.cat([group.mask for group in groups])
    expected = tokens[:, :length].where(mask > 0, ends[0])  # nothing stands after an end
    assert torch.equal(torch.cat([group.tokens for group in groups]), expected)
    torch.testing.assert_close(
        torch.cat([group.old_logprobs for group in groups]), logprobs[:, :length]
    )
    assert torch.cat([group.mask for group in groups]).sum(1).tolist() == [1 + end for end in first]
    set_advantages(groups, [0.0, 1.0, 2.0, 5.0])
    run.add_reference(groups)
    assert run.update(groups)["mean_logprob_gap"] < 1e-5


def test_log_probs_that_are_not_finite_are_an_error():
    model = text_model()
    spoil = lambda _, inputs, logits: (
        logits.index_fill(0, torch.tensor([3]), NAN) if len(logits) > 3 else None
    )
    model.lm_head.register_forward_hook(spoil)
    # Of the second prompt's second sample.
    with pytest.raises(NotFinite, match=r"sampled for prompts \[1\] are not finite"):
        generate_with_logprobs(
            model, [LONG, SHORT, LONG], 3, num_samples=2, generators=seeded(0, 1, 2)
        )


def test_cudnns_attention_is_left_out():
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "bad", [{"temperature": 0}, {"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}]
)
def test_sampler_refuses(bad):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        generate_with_logprobs(text_model(), [SHORT], 1, **bad)
    with pytest.raises(ValueError, match="1 generators for 2 prompts"):
        generate_with_logprobs(text_model(), [SHORT, LONG], 1, num_samples=3, generators=seeded(0))


# ---- 3. advantages -------------------------------------------------------------------------------


def test_advantages_by_hand():
    scores = compute_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0, 10.0, 20.0, 30.0, 60.0]), 4)
    # Mean 3, unbiased variance (4+1+0+9)/3.
    by_hand = torch.tensor([-2.0, -1.0, 0.0, 3.0]) / (14 / 3) ** 0.5
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, by_hand.repeat(2), atol=1e-6, rtol=0)
    z = torch.tensor([-1.0, 1.0]) / 2**0.5
    # Of float32, in which their mean would be one of them.
    neighbours = torch.tensor([1e6, 1e6 + 0.0625])
    torch.testing.assert_close(compute_advantages(neighbours, 2), z, atol=1e-4, rtol=0)
    # Eps: their spread.
    torch.testing.assert_close(compute_advantages(torch.tensor([0.0, 2.0]), 2, eps=2**0.5), z / 2)


def test_advantages_leave_nan_out():
    z = 2 / math.sqrt(8)  # of 0 and 4
    values = [0, NAN, 4] + [NAN] * 3 + [NAN, 5, NAN] + [7, NAN, 7]
    expected = torch.tensor([-z, 0, z] + [0] * 9)
    torch.testing.assert_close(
        compute_advantages(torch.tensor(values), 3), expected, atol=1e-5, rtol=0
    )
    tenths = torch.tensor([0.1, NAN, 0.1, 0.1], dtype=torch.float64)  # their mean is off by an ulp
    assert not compute_advantages(tenths, 4).any()


@pytest.mark.parametrize("reward", [9.9, 0.1, -1e-3, 1e6])
def test_equal_rewards_get_exactly_zero(reward):
    """The mean may be off by an ulp, which would be all the spread there is."""
    assert compute_advantages(torch.full((16,), reward), 8).eq(0).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_advantages_name_a_bad_reward(bad):
    with pytest.raises(ValueError, match="sample 1 of prompt 1"):
        compute_advantages(torch.tensor([0.0, 1, 2, NAN, 4, bad, 6, 7]), 4)


@pytest.mark.parametrize("count, size", [(4, 1), (5, 2), (4, 0)])
def test_advantages_refuse_groups(count, size):
    with pytest.raises(ValueError, match="G > 1"):
        compute_advantages(torch.arange(float(count)), size)


# ---- 5. loss -------------------------------------------------------------------------------------


def test_loss_by_hand():
    """Two sequences of two tokens, ratios 1.5, 0.9 | 0.5, 1.1; advantages 2, -1; clip 0.2; KL
    0.1."""
    new = torch.tensor([[1.5, 0.9], [0.5, 1.1]]).log().requires_grad_()
    ref = torch.tensor([[1.5, 1.8], [0.5, 1.1]]).log()
    advantages = torch.tensor([2.0, -1.0])
    loss, metrics = compute_grpo_loss(
        new, torch.zeros(2, 2), advantages, ref, clip_range=0.2, kl_coef=0.1
    )
    # 1.5 is clipped for a good sample, 0.5 for a bad one.
    policy_loss = -(2 * 1.2 + 2 * 0.9 - 0.8 - 1.1) / 4
    kl = (2 - math.log(2) - 1) / 4  # only the second token differs: ref / new = 2
    expected = {"loss": policy_loss + 0.1 * kl, "policy_loss": policy_loss, "kl": kl}
    gaps = [abs(math.log(ratio)) for ratio in (1.5, 0.9, 0.5, 1.1)]  # from old log-probs of 0
    expected |= {"mean_logprob_gap": sum(gaps) / 4, "max_logprob_gap": math.log(2)}
    assert metrics == pytest.approx({**expected, "clip_fraction": 0.5, "ratio_mean": 1.0}, abs=1e-6)
    assert loss.item() == metrics["loss"]
    loss.backward()
    # d(-r A)/d(log r) = -r A / 4 unless clipped; d k3 / d(log new) = 1 - ref/new
    by_hand = torch.tensor([[0.0, -0.9 * 2 / 4 + 0.1 * (1 - 2) / 4], [0.0, 1.1 / 4]])
    torch.testing.assert_close(new.grad, by_hand, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "ratio, advantage, learns",
    [
        (1.3, 1.0, False),
        (1.3, -1.0, True),
        (0.7, 1.0, True),
        (0.7, -1.0, False),
        (1.1, 1.0, True),
        (0.9, -1.0, True),
    ],
)
def test_clipping_acts_on_the_right_side(ratio, advantage, learns):
    new = torch.tensor([[ratio]]).log().requires_grad_()
    loss, metrics = compute_grpo_loss(new, torch.zeros(1, 1), torch.tensor([advantage]))
    loss.backward()
    assert (new.grad.abs().item() > 0) == learns
    assert metrics["clip_fraction"] == (0.0 if learns else 1.0)


def test_mask_averages_each_sequence_then_sequences():
    new = torch.zeros(3, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    loss, metrics = compute_grpo_loss(
        new, torch.zeros(3, 4), torch.tensor([1.0, 5.0, 9.0]), mask=mask
    )
    # Not -(4 * 1 + 5) / 5: a short answer counts as much as a long one.
    assert loss.item() == pytest.approx(-2.0)
    assert metrics["ratio_mean"] == pytest.approx(2 / 3)
    loss.backward()
    torch.testing.assert_close(new.grad, -torch.tensor([[1 / 12] * 4, [5 / 3, 0, 0, 0], [0] * 4]))


def test_kl_needs_a_reference():
    with pytest.raises(ValueError, match="ref_logprobs"):
        compute_grpo_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), kl_coef=0.1)


def test_k3_has_the_value_and_the_gradient_that_the_comment_claims():
    """Exactly, by summing over a distribution of 6: value KL(pi || ref), gradient KL(ref || pi)."""
    torch.manual_seed(0)
    logits, ref = torch.randn(6, requires_grad=True), torch.randn(6).log_softmax(0)
    pi, value, gradient = logits.log_softmax(0), 0, 0
    for i in range(6):  # as the only token of a sequence, weighted by how often pi draws it
        new, chance = pi[i].view(1, 1), pi[i].exp().detach()
        loss, metrics = compute_grpo_loss(
            new, new.detach(), torch.zeros(1), ref[i].view(1, 1), kl_coef=1.0
        )
        value += chance * metrics["kl"]
        gradient += chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(value, (pi.exp() * (pi - ref)).sum().detach(), atol=1e-5, rtol=0)
    expected = torch.autograd.grad((ref.exp() * (ref - pi)).sum(), logits)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


# ---- 6. the trainer, on a text model -------------------------------------------------------------

PROMPTS = {"one": LONG, "two": SHORT}
METRICS = (
    "loss",
    "policy_loss",
    "kl",
    "clip_fraction",
    "ratio_mean",
    "mean_logprob_gap",
    "max_logprob_gap",
)
NAMES = {*METRICS, "grad_norm", "skipped", "groups_without_spread"}


def trainer(model=None, optimizer=torch.optim.SGD, lr=0.1, extras=None, **settings):
    """GRPO over a text model."""
    model = model or with_adapter(text_model())
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    return GRPO(model, optimizer, GRPOSettings(**settings), **(extras or {}))


def likes_low_ids(groups):
    """A reward with spread: the share of tokens below 25."""
    tokens = torch.cat([group.tokens for group in groups])
    return (tokens < 25).float().mean(1) + tokens[:, 0] * 1e-3


def roll_out(run, *names, seed=0, size=4, rewards=likes_low_ids):
    """1 to 3: groups with their advantages, of prompts of the text model."""
    groups = run.sample([(PROMPTS[name], None, 6) for name in names], size, seed)
    set_advantages(groups, rewards(groups))
    return groups


def step(run, *names, **given):
    """A whole step, as train.py makes it."""
    groups = roll_out(run, *names, **given)
    run.add_reference(groups)
    return groups, run.update(groups)


def assert_unmoved(model, before):
    assert all(torch.equal(p, before[name]) for name, p in adapter_of(model).items())


@pytest.mark.parametrize("kind", ["GLM-Image", "text"])
def test_before_the_first_update_ratio_is_one_and_kl_zero(pipe, kind):
    """Whatever shapes the sampler's distribution reaches reading again too: positions, codes,
    temperature and nucleus."""
    settings = {"kl_coef": 0.1, "top_p": 0.7, "temperature": 3.0, "micro_batch_size": 3}
    if kind == "text":
        run, prompts = (
            trainer(**settings, extras={"allowed_ids": slice(0, 45)}),
            [(LONG, None, 6), (SHORT, None, 6)],
        )
    else:
        ids, places, length = glm_prompts(pipe, RED, BLUE, length=24)
        model, prompts = (
            with_adapter(copy.deepcopy(pipe.vision_language_encoder)),
            zip(ids, places, [length] * 2),
        )
        run = trainer(model, **settings, extras={"allowed_ids": CODES})
    groups = run.sample(list(prompts), 4, 0)
    set_advantages(groups, likes_low_ids(groups) + torch.arange(8.0) % 4)
    run.add_reference(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        metrics = run.update(groups)
    assert set(metrics) == NAMES
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == metrics["skipped"] == metrics["groups_without_spread"] == 0
    assert 0 < metrics["mean_logprob_gap"] < metrics["max_logprob_gap"] < 2e-4


def test_a_prompt_on_the_gpu_comes_to_the_cpu_where_its_tokens_are():
    class Far(torch.Tensor):
        def cpu(self):
            return self.as_subclass(torch.Tensor)

    (group,) = trainer().sample([(LONG.as_subclass(Far), None, 2)], 2, 0)
    assert type(group.prompt_ids) is torch.Tensor


def test_groups_are_what_the_sampler_draws_from_their_seeds():
    """The same operations in the same order: the same bits."""
    forwards, model = [], with_adapter(text_model(), 0.3)
    shaping = {"temperature": 2.0, "top_p": 0.7}
    extras = {
        "allowed_ids": slice(0, 45),
        "token_forward": lambda **inputs: forwards.append(1) or model(**inputs),
    }
    groups = roll_out(trainer(model, **shaping, extras=extras), "one", "two", "one", seed=70)
    sampling = {"num_samples": 4, "allowed_ids": slice(0, 45), "generators": seeded(70, 71, 72)}
    expected = generate_with_logprobs(model, [LONG, SHORT, LONG], 6, **sampling, **shaping)
    assert len(forwards) == 5
    for i, group in enumerate(groups):
        assert torch.equal(group.prompt_ids, (LONG, SHORT, LONG)[i])
        found = (group.tokens, group.old_logprobs, group.nucleus)
        assert all(torch.equal(x, y[4 * i : 4 * i + 4]) for x, y in zip(found, expected))
        tensors = [v for v in vars(group).values() if isinstance(v, torch.Tensor)]
        assert len(tensors) == 5
        # They wait there.
        assert all(t.device.type == "cpu" and not t.requires_grad for t in tensors)
    # The same prompt twice makes two groups.
    assert not torch.equal(groups[0].tokens, groups[2].tokens)


def test_what_stands_beside_the_new_log_probs_gets_no_gradient():
    """As if detached: an old that is the new would take all of the gradient."""
    gradients = []
    for detached in (True, False):
        new = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
        old = new.detach() if detached else new
        advantages = torch.tensor([1.0, -2.0], requires_grad=not detached)
        loss, _ = compute_grpo_loss(new, old, advantages, old, kl_coef=0.5)
        gradients.append(torch.autograd.grad(loss, new)[0])
    assert torch.equal(*gradients) and gradients[0].abs().min() > 0.1


@pytest.mark.parametrize("shape", [(2,), (2, 3, 4)])
def test_log_probs_of_another_shape_are_one_line(shape):
    with pytest.raises(ValueError, match=r"^log-probs \(.*\): give \(B, T\)$"):
        compute_grpo_loss(torch.zeros(shape), torch.zeros(shape), torch.zeros(2))


def test_rewards_meet_their_own_samples():
    """Prompt after prompt, NaN left out; and no more of them than there are samples, nor fewer."""
    rewards = torch.tensor([1, NAN, 3, 5, 0, 0, 0, 8])
    groups = roll_out(trainer(), "one", "two", rewards=lambda groups: rewards)
    expected = compute_advantages(rewards, 4).split(4)
    assert torch.equal(groups[0].advantages, expected[0]) and torch.equal(
        groups[1].advantages, expected[1]
    )
    for wrong in (rewards[:4], torch.cat([rewards, rewards[:4]])):
        with pytest.raises(ValueError):
            set_advantages(groups, wrong)


def test_sequences_of_two_lengths_are_refused():
    with pytest.raises(ValueError, match="one T for all"):
        trainer().sample([(LONG, None, 6), (SHORT, None, 5)], 2, 0)


def formula(model, groups, kl_coef, temperature):
    """The objective in a few lines, over all samples at once: its loss, and what the metrics should
    say."""
    total, learned = 0, []
    for r in groups:
        sequence = torch.cat([r.prompt_ids.expand(5, -1), r.tokens], 1)

        def logprobs(sequence=sequence, nucleus=r.nucleus, tokens=r.tokens):
            logits = model(input_ids=sequence).logits[:, -7:-1] / temperature
            return (
                logits.masked_fill(~nucleus, -torch.inf)
                .log_softmax(-1)
                .gather(-1, tokens[..., None])[..., 0]
            )

        def mean(x, mask=r.mask):  # of the tokens that count: of each sequence, then of sequences
            return (
                x.float().mean()
                if mask is None
                else ((x * mask).sum(1) / mask.sum(1).clamp(1)).mean()
            )

        if not r.advantages.any():
            continue  # but it counts among the groups
        new = logprobs()
        with torch.no_grad(), model.disable_adapter():
            ref = logprobs()
        advantages, ratio, k3 = (
            r.advantages[:, None],
            (new - r.old_logprobs).exp(),
            (ref - new).exp() - (ref - new) - 1,
        )
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        cut = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
        gap, losses = (new - r.old_logprobs).abs(), kl_coef * k3 - gain
        gap = gap if r.mask is None else gap * r.mask
        total = total + mean(losses) / len(groups)
        learned.append(
            [*(mean(x).item() for x in (losses, -gain, k3, cut, ratio, gap)), gap.max().item()]
        )
    metrics = dict(zip(METRICS, np.mean(learned, axis=0)))
    return total, metrics | {"max_logprob_gap": max(row[-1] for row in learned)}


@pytest.mark.parametrize(
    "size, masked", [(5, False), (1, False), (2, False), (3, False), (5, True), (1, True)]
)
def test_gradient_equals_autograd_of_the_formula_for_every_micro_batch_size(size, masked):
    """Three groups of five, one of them constant; 2 and 3 do not divide 5. SGD: the change is the
    gradient."""

    def rewards(groups):
        values = likes_low_ids(groups)
        return torch.cat([values[:5], torch.ones(5), values[10:]])

    model = with_adapter(text_model(), 0.3)
    run = trainer(model, lr=1.0, kl_coef=0.1, micro_batch_size=size, temperature=1.3, top_p=0.9)
    groups = roll_out(run, "one", "two", "one", size=5, rewards=rewards)
    if masked:  # texts that end early, one of which does not count at all
        groups[0].mask = torch.ones(5, 6).tril(-1)
    run.add_reference(groups)
    perturb(model, 0.6)  # ratios other than 1, some of them clipped
    total, expected = formula(model, groups, 0.1, 1.3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters)
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    before = [p.detach().clone() for p in parameters]
    metrics = run.update(groups)
    assert 0 < expected["clip_fraction"] < 1
    expected |= {
        "grad_norm": norm,
        "skipped": 0,
        "groups_without_spread": 1 / 3,
    }
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for p, b, g in zip(parameters, before, gradients):
        torch.testing.assert_close(b - p.detach(), g / max(norm, 1), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("temperature, clipped", [(1.0, True), (10.0, False)])
def test_a_long_gradient_is_cut_to_length_one(temperature, clipped):
    model = with_adapter(text_model(), 0.3)
    run, before = trainer(model, temperature=temperature, lr=1.0), adapter_of(model)
    _, metrics = step(run, "one")
    moved = torch.stack([(p - before[name]).norm() for name, p in adapter_of(model).items()]).norm()
    assert (metrics["grad_norm"] > 1) == clipped  # logged as it was
    assert moved.item() == pytest.approx(min(metrics["grad_norm"], 1), rel=1e-3)


def test_training_raises_the_reward():
    run, seen = trainer(optimizer=torch.optim.AdamW, lr=2e-2, micro_batch_size=8), []
    for seed in range(0, 300, 10):
        groups, _ = step(run, "one", "two", seed=seed, size=8)
        seen.append(likes_low_ids(groups).mean())
    assert np.mean(seen[-5:]) > np.mean(seen[:5]) + 0.1


def test_a_tiny_update_moves_the_adapter_and_not_the_bf16_base():
    """PEFT keeps the adapter in float32: 5e-6 on top of 0.02 is below what bf16 can hold."""
    model = with_adapter(text_model().to(torch.bfloat16))
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    for p in model.parameters():
        if p.requires_grad:
            assert p.dtype == torch.float32
            p.data.fill_(0.02)
    step(trainer(model, optimizer=torch.optim.Adam, lr=5e-6, kl_coef=0.1), "one", "two")
    assert all(2e-6 < (p - 0.02).abs().max() < 8e-6 for p in adapter_of(model).values())
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)


@pytest.mark.parametrize("case", ["no spread", "all clipped", "not a number", "overflow"])
def test_what_teaches_nothing_gives_no_step(case):
    """Not even Adam's momentum may move the adapter."""
    run, steps = trainer(optimizer=torch.optim.AdamW), []
    step(run, "one")
    run.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    before, (group,) = adapter_of(run.model), roll_out(run, "one", seed=1)
    if case == "no spread":
        group.advantages.zero_()
    elif case == "all clipped":  # the gradient is there, and exactly 0
        group.old_logprobs -= group.advantages.sign()[:, None]
    elif case == "not a number":
        group.old_logprobs[0] = NAN
    else:
        parameter = next(p for p in run.model.parameters() if p.requires_grad)
        hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    metrics = run.update([group])
    if case == "overflow":
        hook.remove()
    skipped = case in ("not a number", "overflow")
    assert (metrics["skipped"], metrics["grad_norm"], steps) == (skipped, 0, [])
    assert metrics["groups_without_spread"] == (case == "no spread")
    assert all(math.isnan(metrics[name]) for name in METRICS) == (case == "no spread")
    assert_unmoved(run.model, before)
    assert step(run, "one", seed=2)[1]["grad_norm"] > 0  # and nothing of it is left behind
    assert all(p.isfinite().all() for p in adapter_of(run.model).values())


def test_clipping_acts_from_the_second_iteration():
    once = step(trainer(lr=5.0), "one", "two")[1]
    thrice = step(trainer(lr=5.0, iterations=3), "one", "two")[1]
    assert once["clip_fraction"] == 0
    assert thrice["clip_fraction"] > 0
    assert abs(thrice["ratio_mean"] - 1) > 1e-3
    # Measured before the policy moves.
    assert 0 < thrice["mean_logprob_gap"] < thrice["max_logprob_gap"] < 1e-4


def test_metrics_are_means_over_the_iterations():
    settings = {"lr": 5.0, "kl_coef": 0.1, "iterations": 2}
    twice = step(trainer(with_adapter(text_model(), 0.3), **settings), "one", "two")[1]
    again = trainer(with_adapter(text_model(), 0.3), lr=5.0, kl_coef=0.1)
    groups, first = step(again, "one", "two")
    second = again.update(groups)
    for name in ("loss", "kl", "clip_fraction", "ratio_mean", "grad_norm"):
        assert twice[name] == pytest.approx((first[name] + second[name]) / 2, rel=1e-4, abs=1e-6)


def test_reference_is_the_base_without_gradient_and_skipped_where_nothing_needs_it(monkeypatch):
    model = with_adapter(text_model(), 0.3)
    constant = lambda groups: torch.cat([likes_low_ids(groups)[:4], torch.ones(4)])
    (first, second), _ = step(
        trainer(model, kl_coef=0.1, micro_batch_size=3), "one", "two", rewards=constant
    )
    expected = reread(text_model(), LONG, first.tokens)  # the same base, never adapted
    # A group without spread.
    assert not first.ref_logprobs.requires_grad and second.ref_logprobs is None
    torch.testing.assert_close(first.ref_logprobs, expected, atol=1e-5, rtol=0)

    run = trainer(model, kl_coef=0.0)
    groups = roll_out(run, "one")
    monkeypatch.setattr(
        run, "logprobs", lambda *_: pytest.fail("a reference pass that nothing uses")
    )
    run.add_reference(groups)


def test_models_take_turns_on_the_gpu(monkeypatch):
    """With the CPU as the 'GPU', and a copy as pinned memory, the coming and going of weights can
    be watched."""
    pinned = []
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: pinned.append(1) or tensor.clone()
    )
    resident, run = trainer(kl_coef=0.1), trainer(kl_coef=0.1)
    _, expected = step(resident, "one", "two")
    decoder, seen = torch.nn.Linear(3, 3).requires_grad_(False), []
    offload = Offload(
        [run.model, decoder],
        torch.device("cpu"),
        lambda: seen.append((is_up(run.model), is_up(decoder))),
    )

    def is_up(model):
        up = {weight.data_ptr() != home.data_ptr() for weight, home in offload.homes[model]}
        assert len(up) == 1  # all of a model or nothing
        return up.pop()

    trained = [p for p in run.model.parameters() if p.requires_grad]
    places = [p.data_ptr() for p in trained]
    homes = [(home, home.clone()) for weights in offload.homes.values() for _, home in weights]
    assert (
        len(pinned)
        == len(homes)
        == len([*run.model.parameters(), *run.model.buffers()]) + 2 - len(trained)
    )
    assert not is_up(run.model) and not is_up(decoder)
    offload.all_but(run.model)
    offload.all_but(run.model)
    assert is_up(run.model) and not is_up(decoder) and seen == []  # nothing has left
    groups = roll_out(run, "one", "two")
    offload.all_but(decoder)
    assert is_up(decoder) and not is_up(run.model)
    assert seen == [(False, False)]  # whoever holds addresses is told once they are no longer good
    decoder.weight.data += 1  # of the copy, which is dropped
    offload.all_but(run.model)
    assert is_up(run.model) and not is_up(decoder) and len(seen) == 2
    run.add_reference(groups)
    assert run.update(groups) == expected
    # Frozen weights never change, nor come back.
    assert all(torch.equal(home, before) for home, before in homes)
    assert [p.data_ptr() for p in trained] == places  # what is trained stays
    assert_unmoved(run.model, adapter_of(resident.model))


@pytest.mark.parametrize("gone", ["is_gradient_checkpointing", "is_activation_checkpointing"])
def test_checkpointing_has_two_names(monkeypatch, gone):
    """The first will go, and transformers warns of it; older releases have it alone."""
    now = PreTrainedModel.is_activation_checkpointing
    monkeypatch.setattr(PreTrainedModel, "is_gradient_checkpointing", now)
    monkeypatch.delattr(PreTrainedModel, gone)
    base = text_model()
    base.activation_checkpointing_enable()
    run = trainer(with_adapter(base))
    run.update(roll_out(run, "one"))
    assert run.model.training


def test_gradient_checkpointing_is_awake_in_training_and_changes_nothing():
    """A layer then runs twice in training, but once in sampling, where its cache is needed."""
    found = []
    for passes in (1, 2):
        base, phases, counts = text_model(), [], Counter()
        if passes == 2:  # before PEFT, which then lets gradients into the frozen layers
            base.activation_checkpointing_enable()
        count = lambda *_, counts=counts, phases=phases: counts.update(phases[-1:])
        base.model.layers[0].mlp.register_forward_pre_hook(count)
        run, metrics = trainer(with_adapter(base), lr=1.0, kl_coef=0.1), []
        for seed in (0, 1):  # the second begins in training mode
            phases.append("sample")
            groups = roll_out(run, "one", "two", seed=seed)
            phases.append("reference")
            run.add_reference(groups)
            phases.append("update")
            metrics.append(run.update(groups))
        assert counts == {"sample": 2 * 6, "reference": 2 * 2, "update": 2 * 2 * passes}
        found.append((metrics, adapter_of(run.model)))
    (plain, expected), (checkpointed, weights) = found
    for metrics, again in zip(plain, checkpointed):
        assert again == pytest.approx(metrics, abs=1e-5)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], atol=1e-5, rtol=1e-4)
