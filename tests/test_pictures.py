"""Prompts in, pictures out, against GLM-Image's stock pipeline; which weights are trained."""

import warnings
from pathlib import Path

import make
import numpy as np
import pytest
import torch
from conftest import (
    CODES,
    CPU,
    TINY,
    build_run,
    chat_inputs,
    load_once,
    painted,
    seeded,
    tiny_settings,
    write_reward,
)

from glm_image.model import encode_prompt
from glm_image.weights import sizes
from grpo import get_per_token_logprobs
from runtime.folder import load as load_newest

# Square, wide, tall: an exchange of rows and columns shows on the last two.
SIZES = [(128, 128), (128, 256), (224, 96)]
PROMPT = "a red circle"


def codes(count, length):
    return torch.randint(make.NUM_CODES, (count, length), generator=seeded(0))


def pixels(images):
    return np.stack([np.asarray(image) for image in images]).astype(int)


def small(*arguments):
    return tiny_settings("--height 32 --width 32 --decode-steps 2", *arguments)


# ---- prompts in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_positions_equal_the_models_own(pipe, size):
    """encode_prompt against get_rope_index, which generate() uses."""
    ids, positions, count = encode_prompt(pipe.processor, PROMPT, *size)
    inputs = chat_inputs(pipe.processor, PROMPT, *size)
    inner = pipe.vision_language_encoder.model
    prompt_positions, _ = inner.get_rope_index(**inputs)
    assert torch.equal(ids, inputs["input_ids"][0])
    assert torch.equal(positions[:, : len(ids)], prompt_positions[:, 0])
    assert torch.equal(positions[:, len(ids) :], inner._cached_decode_position_ids[0, :, :count])
    rows, columns = size[0] // 32, size[1] // 32
    assert count == rows * columns + int((rows / columns) ** 0.5 * 16) * int(
        (columns / rows) ** 0.5 * 16
    )


# ---- pictures out --------------------------------------------------------------------------------


@pytest.mark.parametrize("size, guidance", [((64, 64), "1.0"), ((64, 96), "1.5")])
def test_decoding_equals_the_stock_pipeline(pipe, size, guidance):
    """The codes cut out and doubled by the pipeline's own helpers, painted one by one with the same
    noise."""
    settings = small("--height", size[0], "--width", size[1], "--guidance-scale", guidance)
    grids = chat_inputs(pipe.processor, PROMPT, *size)["image_grid_thw"]
    total, offset, rows, columns = pipe._compute_generation_params(grids, is_text_to_image=True)
    tokens = codes(2, encode_prompt(pipe.processor, PROMPT, *size)[2])
    assert total == tokens.shape[1] + 1  # generate() writes an end token too
    _, images = painted(pipe, PROMPT, tokens, settings, 5)
    generator = seeded(5 + 2**31)  # of the noise, not of the codes
    latents = torch.randn(1, 8, size[0] // 8, size[1] // 8, generator=generator)
    for row, image in zip(tokens, images):
        large = pipe._extract_large_image_tokens(row[None], 0, offset, rows * columns)
        expected = pipe(
            prompt=PROMPT,
            prior_token_ids=pipe._upsample_token_ids(large, rows, columns),
            latents=latents,
            height=size[0],
            width=size[1],
            num_inference_steps=2,
            guidance_scale=settings.guidance_scale,
        ).images
        assert image.size == size[::-1]
        assert np.abs(pixels([image]) - pixels(expected)).max() <= 1
    assert np.abs(np.subtract(*pixels(images))).max() > 50


def test_one_noise_for_a_group_and_any_batch_size(pipe):
    tokens = codes(1, CODES).repeat(3, 1)
    batched = pixels(painted(pipe, PROMPT, tokens, small("--micro-batch-size 2"), 5)[1])
    assert np.abs(batched[1:] - batched[:1]).max() <= 1  # equal codes, equal pictures
    other = pixels(painted(pipe, PROMPT, tokens[:1], small(), 6)[1])
    assert np.abs(other - batched[:1]).max() > 1  # the seed is used


# ---- what is trained -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return build_run(small("--lora-rank 8 --seed 3 --train both --policy-lr 3e-3 --lr 1e-3"))


@pytest.mark.parametrize(
    "half, layers, place, lr",
    [
        ("adapter", 4 * 6, ".language_model.", 3e-3),
        ("decoder-adapter", 3 * 4, ".attn1.", 1e-3),
    ],
)
def test_the_adapters_sit_where_they_belong(run, half, layers, place, lr):
    trainer = run.trainers[half]
    learns = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    adapted = {name.partition(".lora_")[0] for name in learns}
    assert len(adapted) == layers  # layers x projections
    assert all(place in name for name in adapted)
    (group,) = trainer.optimizer.param_groups
    assert {*map(id, group["params"])} == {*map(id, learns.values())}
    assert all(p.dtype == torch.float32 and 8 in p.shape for p in group["params"])
    assert (group["lr"], group["betas"], group["weight_decay"]) == (lr, (0.9, 0.99), 0)
    lora = trainer.model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (8, 16, 0)


def test_only_adapters_are_trained_and_the_vision_tower_is_left_behind(run):
    for name, p in torch.nn.ModuleList(run.glm_image.parts).named_parameters():
        assert p.requires_grad == ("lora_" in name)
        assert ".visual." not in name and ".vqmodel." not in name


def test_the_seed_fixes_the_adapters_start(run):
    def start(run):
        models = torch.nn.ModuleList([each.model for each in run.trainers.values()])
        return [p.tolist() for p in models.parameters() if p.requires_grad]

    seeded = lambda seed: start(build_run(small("--lora-rank 8 --train both --seed", seed)))
    assert seeded(3) == start(run) != seeded(4)


def logprobs(pipe, model, prompt, tokens):
    ids, positions, _ = encode_prompt(pipe.processor, prompt, 64, 64)
    length = tokens.shape[1]
    with torch.no_grad():
        return get_per_token_logprobs(
            model,
            torch.cat([ids.expand(len(tokens), -1), tokens], 1),
            length,
            allowed_ids=slice(0, make.NUM_CODES),
            position_ids=positions[:, : len(ids) + length],
        )


def test_the_adapter_works_in_a_stock_pipeline(pipe, quick):
    """What a run saves, the checkpoints too, loaded by transformers: the policy as trained, and not
    the base."""
    # The short pictures are blank below this temperature.
    differing = "--temperature 5 --top-p 1 --lr 0.05 --group-size 4"
    assert quick(*write_reward(""), differing, "--steps 1 --out run") == 0
    trained = build_run(small()).trainer
    load_newest(Path("run"), {"adapter": trained})
    tokens = codes(2, 40)
    expected = logprobs(pipe, trained.model, PROMPT, tokens)
    for folder in ("run/adapter", "run/checkpoints/000001/adapter"):
        stock = load_once(str(TINY), CPU).vision_language_encoder
        stock.load_adapter(folder)
        found = logprobs(pipe, stock, PROMPT, tokens)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert not list(Path("run/checkpoints").rglob("README.md"))  # PEFT's form, empty
    # For its plan a run on a GPU builds models without data, and this adapter on them.
    with warnings.catch_warnings(action="error", category=UserWarning):
        policy, *_ = sizes(small("--adapter run"), "bfloat16", torch.device("cuda"))
    assert all(p.is_meta for p in policy.parameters())
    base = logprobs(pipe, pipe.vision_language_encoder, PROMPT, tokens)
    assert (base - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    "flags, passes, evaluated",
    [
        ("--guidance-scale 1.0", 3, 6),
        ("--guidance-scale 1.5", 6, 6),
        ("--guidance-scale 1.5 --guidance-steps 1", 4, 6),
        ("--guidance-scale 1.5 --guidance-steps 2", 5, 6),
        ("--micro-batch-size 2", 2 * 3, 2 * 6),  # four pictures
    ],
)
def test_passes_of_the_decoder(pipe, flags, passes, evaluated):
    """For three denoising steps: two passes where they are guided. An evaluation guides in all."""
    usual = "--height 32 --width 32 --decode-steps 3 --eval-decode-steps 3"
    settings = tiny_settings(usual, "--eval-guidance-scale 1.5", flags)
    calls = []
    hook = pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    tokens = codes(4, CODES)
    painted(pipe, "a ring", tokens, settings, 0)
    assert len(calls) == passes
    painted(pipe, "a ring", tokens, settings.for_evaluation(), 0)
    hook.remove()
    assert len(calls) == passes + evaluated
