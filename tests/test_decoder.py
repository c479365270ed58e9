"""The decoder as a policy: its steps against the stock scheduler and values by hand, its update as
in test_grpo.py."""

import math
import shutil

import pytest
import torch
import train_decoder
from conftest import (
    BLUE_CROSS,
    CPU,
    RED_CIRCLE,
    TINY,
    build_run,
    load_once,
    painted,
    perturb,
    prompts_of,
    resume,
    seeded,
    short_runs,
    shorten,
    tiny_settings,
    words_of,
)
from diffusers import GlmImagePipeline
from PIL import Image
from safetensors.torch import load_file
from world import draw

import rewards
import train
from glm_image.decoder import PathScheduler, gaussian_step, log_density
from grpo import NotFinite
from rewards import combine, parse_rewards
from runtime.folder import load as load_newest

PROMPTS = ["a red circle", "a blue cross"]
VARIED = ["--temperature", "9", "--top-p", "1"]  # or the sequences of a prompt are all the same
REWARDS = {name: x.load() for name, x in parse_rewards("ssim:1,mse:1").items()}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Codes of the picture alone, without the preview before it."""
    shorten(monkeypatch.setattr)


def build(*arguments, dtype=torch.float32):
    """What a run works with and its settings, of the tiny model, on small pictures of three
    steps."""
    flags = "--height 64 --width 64 --decode-steps 3 --group-size 3 --combine zscore"
    flags = words_of(["--model", TINY, flags, *arguments])
    settings = train.parse_settings(flags, train_decoder.DecoderSettings)
    return build_run(settings, load_once(str(TINY), CPU, dtype=dtype)), settings


def roll_out(run, settings):
    """A step on two prompts, all but for the updates; with its paths."""
    updated = []
    update = lambda groups: updated.append(groups) or {"skipped": 0}
    with pytest.MonkeyPatch.context() as patch:
        for trainer in (run.trainers["decoder-adapter"], run.trainer):
            patch.setattr(trainer, "update", update)
        rolled, _ = train_decoder.decoder_step(run, settings, REWARDS, two_prompts(), 5)
    rolled.paths = updated[0]
    return rolled


def two_prompts():
    return prompts_of(*PROMPTS, targets=[draw(RED_CIRCLE), draw(BLUE_CROSS)])


def adapter(model):
    return [p for p in model.parameters() if p.requires_grad]


# ---- one step ------------------------------------------------------------------------------------


def test_a_move_by_hand():
    """x = 0.5, v = 1, from level 0.8 to 0.6: clean = -0.3, noise = 0.7."""
    x, v = torch.tensor([[[[0.5]]]]), torch.tensor([[[[1.0]]]])
    mean, std = gaussian_step(x, v, 0.8, 0.6, 0.5)
    expected_std = 0.6 * math.sin(math.pi / 4)
    assert std == pytest.approx(expected_std)
    assert mean.item() == pytest.approx(
        0.4 * -0.3 + math.sqrt(0.36 - expected_std**2) * 0.7, abs=1e-6
    )
    assert gaussian_step(x, v, 0.8, 0.0, 0.5)[1] == 0  # the last step is the ODE's


def test_log_density_equals_torchs():
    torch.manual_seed(0)
    x, mean = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x).flatten(1)
    torch.testing.assert_close(log_density(x, mean, 0.3), expected, atol=1e-4, rtol=1e-5)


def test_without_noise_the_moves_are_the_stock_schedulers_to_the_last_bit(pipe):
    stock = pipe.scheduler
    paths = PathScheduler.from_config(stock.config)
    paths.begin(1e-15, [0, 1])
    expected, found = (
        GlmImagePipeline(**{**pipe.components, "scheduler": scheduler})(
            prompt=PROMPTS,
            prior_token_ids=torch.randint(1024, (2, 16), generator=seeded(1)),
            latents=torch.randn(2, 8, 8, 8, generator=seeded(0)),
            height=64,
            width=64,
            num_inference_steps=6,
            guidance_scale=1.5,
            output_type="latent",
        ).images
        for scheduler in (stock, paths)
    )
    assert torch.equal(found, expected)
    # bfloat16 would round by more than the spread of late steps.
    paths.set_timesteps(sigmas=[1.0, 0.5], mu=0.6)
    paths.begin(0.7, [0, 1])
    paths.step(found, paths.timesteps[0], found.bfloat16())
    (drawn,) = paths.steps
    assert drawn.latents.dtype == drawn.next_latents.dtype == torch.float32


# ---- paths and their update ----------------------------------------------------------------------


@pytest.mark.parametrize("guidance, calls", [("1.0", 1), ("1.5", 2)])
def test_scored_again_the_log_probs_are_those_of_the_draw(guidance, calls):
    """Recomputed by the Gaussian's own formula from a transformer called by hand, guided as the
    pipeline does."""
    run, settings = build("--guidance-scale", guidance)
    perturb(run.trainers["decoder-adapter"].model)
    steps = roll_out(run, settings).paths
    assert len(steps) == 2 * 2  # prompts x steps but the last
    for step in steps:
        assert step.old_logprobs.shape == (3, 8 * 8 * 8) and step.latents.device.type == "cpu"
        with torch.no_grad():
            again = run.trainers["decoder-adapter"].logprobs(step, torch.arange(3))
        # Of the mean over the numbers of a step.
        assert (again - step.old_logprobs).mean(1).abs().max() < 2e-7
        assert (again - step.old_logprobs).abs().max() < 1e-3
        assert len(step.calls) == calls
        assert all(call["hidden_states"] is None for call in step.calls)  # kept once, as latents
    level, next_level = steps[1].levels
    assert 1 > level > next_level > 0 and steps[0].levels[1] == level
    assert steps[1].latents is steps[0].next_latents  # a path, kept once


def test_all_paintings_of_a_group_start_from_one_noise_and_go_their_own_ways():
    """From the noise of the stock scheduler, see test_pictures.py; by the seed alone, in any
    batch."""
    run, settings = build()
    starts = roll_out(run, settings).paths[::2]
    for i, step in enumerate(starts):
        noise = torch.randn(1, 8, 8, 8, generator=seeded(5 + i + 2**31))
        assert torch.equal(step.latents, noise.expand(3, -1, -1, -1))
    settings.micro_batch_size = 2
    for step, again in zip(starts, roll_out(run, settings).paths[::2]):
        torch.testing.assert_close(again.next_latents, step.next_latents, atol=1e-4, rtol=0)


def test_no_two_paintings_share_their_draws(monkeypatch):
    """Of a code sequence, of two of a prompt, of steps, and of seeds that differ by one, as those
    of neighbouring prompts do."""
    run, settings = build()
    stock_randn, drawn = torch.randn, []
    monkeypatch.setattr(
        torch,
        "randn",
        lambda *given, **more: drawn.append(stock_randn(*given, **more)) or drawn[-1],
    )
    settings.group_size = 2
    (prompt,), codes = prompts_of(PROMPTS[0]), torch.zeros(3, 4, dtype=torch.long)
    for seed in (5, 6, 1005):
        run.trainers["decoder-adapter"].paint_paths(prompt, codes, settings, seed)
    draws = [x for x in drawn if x.dim() == 3]
    # Seeds, code sequences, steps, paintings.
    assert len({x.numpy().tobytes() for x in draws}) == 3 * 3 * 2 * 2
    # From a stream of their own.
    first = torch.randint(2**62, (2,), generator=seeded(5 + 2**30))[0].item()
    assert torch.equal(draws[0], stock_randn(8, 8, 8, generator=seeded(first)))


def test_as_on_a_gpu_in_bfloat16_and_with_recomputed_activations():
    run, settings = build("--guidance-scale 1.5 --kl-coef 0.1", dtype=torch.bfloat16)
    run.glm_image.pipe.transformer.enable_gradient_checkpointing()
    steps = roll_out(run, settings).paths
    assert {step.old_logprobs.dtype for step in steps} == {torch.float32}
    metrics = run.trainers["decoder-adapter"].update(steps)
    assert metrics["max_logprob_gap"] < 1e-4  # in batches of the same size the same operations
    assert 0 < metrics["grad_norm"] < 1 and metrics["skipped"] == 0


def test_the_reference_is_the_decoder_without_its_adapter():
    run, settings = build("--kl-coef 0.1")
    steps = roll_out(run, settings).paths
    perturb(run.trainers["decoder-adapter"].model)
    run.trainers["decoder-adapter"].add_reference(steps)
    moved = pytest.warns(UserWarning, match="mean_logprob_gap is above")
    with moved, pytest.warns(UserWarning, match="kl is above 0 at the start"):
        metrics = run.trainers["decoder-adapter"].update(steps)
    for step in steps:
        torch.testing.assert_close(step.ref_logprobs, step.old_logprobs, atol=1e-3, rtol=0)
    assert metrics["kl"] > 0
    base = adapter(run.trainer.model)
    # The codes' half is left alone.
    assert base and all(p.grad is None for p in run.trainer.model.parameters())


# ---- credit --------------------------------------------------------------------------------------


def test_codes_are_compared_by_the_means_of_their_paintings_and_paintings_among_themselves(
    monkeypatch,
):
    """Two prompts, three code sequences each, four paintings of each; a painting without a reward
    is left out."""
    run, settings = build("--train both --group-size 3 --paintings 4")
    values, given, calls, learned = torch.arange(24.0) ** 2, {}, [], []
    for trainer in (run.trainer, run.trainers["decoder-adapter"]):
        update = lambda groups: learned.extend(groups) or {"skipped": 1}
        monkeypatch.setattr(trainer, "update", update)
    monkeypatch.setattr(
        train_decoder, "combine", lambda *given: calls.append(given[2:]) or combine(*given)
    )
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    values[12:] = 21.7  # whose mean in float32 depends on how many there are
    values[[5, 13]] = math.nan

    def number(images, prompts, targets):
        given.update(prompts=prompts, targets=targets, images=len(images))
        return values

    prompts = prompts_of(*PROMPTS, targets=[red, blue])
    number = {"number": rewards.Reward("number", 1.0, number)}
    rolled, metrics = train_decoder.decoder_step(run, settings, number, prompts, 5)
    # Several rewards are made alike among those that are compared.
    assert calls == [(4, "zscore"), (3, "zscore")]
    assert given["prompts"] == [text for text in PROMPTS for _ in range(12)]
    assert given["targets"] == [red] * 12 + [blue] * 12
    assert given["images"] == len(rolled.images) == 24
    assert metrics["decoder/skipped"] == 1 and metrics["skipped"] == 2
    values, moves_each = values.double().view(6, 4), settings.decode_steps - 1
    compared = [*values.repeat_interleave(moves_each, 0), *values.nanmean(1).view(2, 3)]
    for own, group in zip(compared, learned, strict=True):
        by_hand = ((own - own.nanmean()) / (own[~own.isnan()].std() + 1e-6)).nan_to_num(0)
        torch.testing.assert_close(group.advantages, by_hand.float(), atol=1e-4, rtol=0)


def test_a_path_ends_in_its_own_picture():
    """Of every prompt, code sequence and painting: the last latents drawn are all but clean."""
    run, settings = build("--train both --group-size 2 --paintings 2 --decode-steps 16", *VARIED)
    rolled = roll_out(run, settings)
    last = torch.cat([step.next_latents for step in rolled.paths[14::15]])  # (N*G*K, C, H, W)
    pixels = lambda images: torch.stack([rewards.to_tensor(image) for image in images]).flatten(1)
    distances = torch.cdist(pixels(run.glm_image.to_images(last, 8)), pixels(rolled.images))
    assert distances.argmin(1).tolist() == list(range(8))


def test_one_code_sequence_a_prompt_when_only_the_decoder_learns():
    run, settings = build("--lr 0.002")
    assert run.trainers["decoder-adapter"].optimizer.param_groups[0]["lr"] == 0.002
    before = [p.detach().clone() for p in adapter(run.trainer.model)]
    rolled, metrics = train_decoder.decoder_step(run, settings, REWARDS, two_prompts(), 5)
    assert [len(group.tokens) for group in rolled.groups] == [1, 1]
    assert len(rolled.images) == len(rolled.raw_rewards["ssim"]) == 2 * 3
    assert "groups_without_spread" not in metrics and metrics["decoder/groups_without_spread"] == 0
    assert all(torch.equal(p, b) for p, b in zip(adapter(run.trainer.model), before))
    assert any(
        p.abs().max() > 0
        for n, p in run.trainers["decoder-adapter"].model.named_parameters()
        if "lora_B" in n
    )


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both_halves(tmp_path_factory):
    """A folder with a run of two steps in which both halves have learned; beside it is another that
    has ended after one of them."""
    folder = tmp_path_factory.mktemp("both")
    arguments = "--train both --paintings 2 --decode-steps 2 --warmup-steps 3"
    with short_runs(folder) as quick, pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *given: None)
        for run, steps in (("run", 2), ("one", 1)):
            rates = f"--lr 0.05 --policy-lr 0.05 --steps {steps} --out {run}"
            assert quick(arguments, rates) == 0
    return folder / "run"


def test_the_decoders_adapter_paints_in_a_stock_pipeline_what_it_painted_here(both_halves):
    """Saved by a run, loaded as in docs/after.md: the same picture, and not that of the
    base."""
    settings = tiny_settings("--height 32 --width 32 --decode-steps 3")
    paint = lambda pipe: painted(pipe, PROMPTS[0], torch.tensor([[7]]), settings, 3)[0]
    run, _ = build("--train both")
    load_newest(both_halves, run.trainers)
    here, pipe = paint(run.glm_image.pipe), load_once(str(TINY), CPU)
    assert (paint(pipe) - here).abs().max() > 0.01
    folder = str(both_halves / "decoder-adapter")
    pipe.transformer.load_lora_adapter(folder, prefix=None, use_safetensors=True)
    torch.testing.assert_close(paint(pipe), here, atol=1e-4, rtol=0)
    # In a run of the policy it paints along, and does not learn.
    along = build_run(tiny_settings("--adapter", both_halves)).glm_image.pipe
    torch.testing.assert_close(paint(along), here, atol=1e-4, rtol=0)
    assert not any(p.requires_grad for p in along.transformer.parameters())


def test_a_resumed_run_of_both_halves_equals_the_uninterrupted_one(both_halves, quick):
    shutil.copytree(both_halves.with_name("one"), "killed")
    assert resume("killed", "--steps 2") == 0
    for file in (
        "adapter/adapter_model.safetensors",
        "decoder-adapter/pytorch_lora_weights.safetensors",
    ):
        expected, found = load_file(both_halves / file), load_file(f"killed/{file}")
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
        assert any(weights.any() for name, weights in found.items() if "lora_B" in name)


def test_one_move_leaves_nothing_to_learn(quick, capsys):
    assert quick("--train decoder --decode-steps 1 --steps 1") == 2
    assert "--decode-steps" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_a_decoder_that_paints_nonsense_fails_the_step():
    """Its adapter is ruined: nothing is learned from black pictures."""
    run, settings = build()
    for name, parameter in run.trainers["decoder-adapter"].model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(math.nan)
    with pytest.raises(NotFinite, match="not finite: .* too high a learning rate"):
        train_decoder.decoder_step(run, settings, REWARDS, prompts_of(*PROMPTS), 5)
