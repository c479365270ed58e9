"""The decoder as a policy: its moves against the stock scheduler and hand-computed values, its update as in test_grpo.py."""

import math
from pathlib import Path

import pytest
import torch
from conftest import CPU, tiny_settings
from diffusers import GlmImagePipeline
from make import draw
from safetensors.torch import load_file

import rewards
import train
from decoder import PathScheduler, gaussian_move, log_density
from runtime import checkpoints
from runtime.metrics import step_metrics

PROMPTS = ["a red circle on a pink background", "a blue cross on a white background"]


def build(*arguments, spec="ssim:1,mse:1", dtype=torch.float32):
    """(trainer of the codes, trainer of the decoder, settings) of the tiny model, on small pictures of three moves."""
    flags = ["--train", "decoder", "--height", "64", "--width", "64", "--decode-steps", "3", "--group-size", "3"]
    settings = tiny_settings(*flags, *arguments)
    settings.combine = settings.combine or "zscore"
    pipe = GlmImagePipeline.from_pretrained(train.TINY, dtype=dtype)
    trainer = train.build_trainer(pipe, settings, rewards.parse_rewards(spec), CPU)
    shorten_encode(trainer)
    trainer.pipe.transformer.eval()
    return trainer, train.build_decoder(trainer, settings), settings


def shorten_encode(trainer):
    """Ten codes instead of 260; the decoder is shown the last four."""
    encode = trainer.encode

    def ten(prompt):
        ids, positions, _ = encode(prompt)
        return ids, positions[:, : len(ids) + 10], 10

    trainer.encode = ten


def perturb(model, size=0.05):
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size)


def roll_out(trainer, seed=5):
    targets = [draw("circle", "red", "pink"), draw("cross", "blue", "white")]
    return trainer.rollout(PROMPTS, targets, seed)


# ---- one move -------------------------------------------------------------------------------------------------------


def test_a_move_by_hand():
    """x = 0.5, v = 1, from level 0.8 to 0.6: clean = -0.3, noise = 0.7."""
    x, v = torch.tensor([[[[0.5]]]]), torch.tensor([[[[1.0]]]])
    mean, std = gaussian_move(x, v, 0.8, 0.6, 0.5)
    expected_std = 0.6 * math.sin(math.pi / 4)
    assert std == pytest.approx(expected_std)
    assert mean.item() == pytest.approx(0.4 * -0.3 + math.sqrt(0.36 - expected_std**2) * 0.7, abs=1e-6)
    assert gaussian_move(x, v, 0.8, 0.0, 0.5)[1] == 0, "the last move is the ODE's"


def test_a_move_keeps_the_level_of_noise():
    """Of clean = 2 and unit noise, drawn many times: mean (1 - s') clean, spread s'."""
    torch.manual_seed(0)
    clean, noise = torch.full((200_000, 1, 1, 1), 2.0), torch.randn(200_000, 1, 1, 1)
    mean, std = gaussian_move(0.3 * clean + 0.7 * noise, noise - clean, 0.7, 0.4, 0.7)
    after = mean + std * torch.randn_like(mean)
    assert after.mean().item() == pytest.approx(0.6 * 2, abs=5e-3)
    assert after.std().item() == pytest.approx(0.4, abs=5e-3)


def test_log_density_equals_torchs():
    torch.manual_seed(0)
    x, mean = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x).flatten(1)
    torch.testing.assert_close(log_density(x, mean, 0.3), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("steps", [2, 6, 50])
def test_without_noise_the_moves_are_the_stock_schedulers_to_the_last_bit(pipe, steps):
    """Each move by itself; and the pipeline's latents, while the scheduler draws nothing."""
    latents = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    prior = torch.randint(1024, (2, 16), generator=torch.Generator().manual_seed(1))
    arguments = {"prompt": PROMPTS, "prior_token_ids": prior, "height": 64, "width": 64, "num_inference_steps": steps}
    arguments |= {"guidance_scale": 1.5, "output_type": "latent"}
    expected = pipe(**arguments, latents=latents.clone()).images
    other = GlmImagePipeline(**{**pipe.components, "scheduler": PathScheduler.from_config(pipe.scheduler.config)})
    assert torch.equal(other(**arguments, latents=latents.clone()).images, expected)

    stock = pipe.scheduler
    stock.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist(), mu=0.6)
    x = latents
    for t, (level, next_level) in zip(stock.timesteps, stock.sigmas.unfold(0, 2, 1).tolist(), strict=True):
        v = torch.randn_like(x)
        mean, std = gaussian_move(x, v, level, next_level, 0.0)
        x = stock.step(v, t, x, return_dict=False)[0]
        assert std == 0 and torch.equal(mean, x)


# ---- paths and their update -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", ["1.0", "1.5"])
def test_scored_again_the_log_probs_are_those_of_the_draw(guidance):
    """Recomputed by the Gaussian's own formula from a transformer called by hand, guided as the pipeline does."""
    trainer, decoder, _ = build("--guidance-scale", guidance)
    perturb(decoder.model)
    roll_out(trainer)
    assert len(decoder.moves) == 2 * 2  # prompts x moves but the last
    for move in decoder.moves:
        assert move.old_logprobs.shape == (3, 8 * 8 * 8) and move.latents.device.type == "cpu"
        with torch.no_grad():
            again = decoder.logprobs(move, torch.arange(3))
        assert (again - move.old_logprobs).mean(1).abs().max() < 2e-7, "of the mean over the numbers of a move"
        assert (again - move.old_logprobs).abs().max() < 1e-3
        assert len(move.calls) == (1 if guidance == "1.0" else 2)
        assert all(call["hidden_states"] is None for call in move.calls), "kept once, as latents"
    level, next_level = decoder.moves[1].levels
    assert 1 > level > next_level > 0 and decoder.moves[0].levels[1] == level
    assert torch.equal(decoder.moves[1].latents, decoder.moves[0].next_latents), "a path"


def test_all_paintings_of_a_group_start_from_one_noise_and_go_their_own_ways():
    trainer, decoder, _ = build()
    roll_out(trainer)
    first = decoder.moves[0]
    assert torch.equal(first.latents[0], first.latents[1])
    assert not torch.equal(first.next_latents[0], first.next_latents[1])
    again, decoder.moves = decoder.moves, []
    roll_out(trainer)
    assert all(torch.equal(a.next_latents, b.next_latents) for a, b in zip(again, decoder.moves)), "by the seed alone"
    decoder.moves = []
    roll_out(trainer, seed=6)
    assert not torch.equal(again[0].latents, decoder.moves[0].latents), "the noise a group starts from"
    for other in (again[2], decoder.moves[0]):  # of another prompt, of another step: log-probs depend on draws alone
        assert (again[0].old_logprobs - other.old_logprobs).abs().max() > 0.1, "fresh draws"


def test_as_on_a_gpu_in_bfloat16_and_with_recomputed_activations():
    trainer, decoder, _ = build("--guidance-scale", "1.5", "--kl-coef", "0.1", dtype=torch.bfloat16)
    trainer.pipe.transformer.enable_gradient_checkpointing()
    roll_out(trainer)
    assert {move.old_logprobs.dtype for move in decoder.moves} == {torch.float32}
    metrics = decoder.learn()
    assert metrics["decoder/max_logprob_gap"] < 1e-4, "in batches of the same size the same operations"
    assert 0 < metrics["decoder/grad_norm"] < 1 and metrics["decoder/skipped"] == 0


def test_micro_batches_change_neither_the_paths_nor_the_gradient():
    found = []
    for size in ("3", "1", "2"):
        trainer, decoder, _ = build("--micro-batch-size", size, "--kl-coef", "0.1")
        decoder.optimizer = torch.optim.SGD([p for p in decoder.model.parameters() if p.requires_grad], lr=1.0)
        perturb(decoder.model)
        before = {n: p.detach().clone() for n, p in decoder.model.named_parameters() if p.requires_grad}
        roll_out(trainer)
        latents = decoder.moves[-1].next_latents
        decoder.learn()
        after = {n: p.detach() for n, p in decoder.model.named_parameters() if p.requires_grad}
        found.append((latents, torch.cat([(after[n] - before[n]).flatten() for n in before])))
    for latents, change in found[1:]:
        torch.testing.assert_close(latents, found[0][0], atol=1e-4, rtol=0)
        torch.testing.assert_close(change, found[0][1], atol=1e-5, rtol=1e-2)
    assert found[0][1].abs().max() > 1e-4


def test_the_gradient_is_the_policy_gradient_of_the_mean_log_prob():
    """On fresh samples: minus the mean over moves of A times the mean log-density, by autograd."""
    trainer, decoder, _ = build("--kl-coef", "0")
    decoder.optimizer = torch.optim.SGD([p for p in decoder.model.parameters() if p.requires_grad], lr=1.0)
    perturb(decoder.model)
    roll_out(trainer)
    moves, parameters = decoder.moves, [p for p in decoder.model.parameters() if p.requires_grad]
    logprobs = [decoder.logprobs(move, torch.arange(3)).mean(1) for move in moves]
    loss = -sum((move.advantages * logp).mean() for move, logp in zip(moves, logprobs)) / len(moves)
    expected = torch.autograd.grad(loss, parameters)
    before = [p.detach().clone() for p in parameters]
    metrics = decoder.learn()
    norm = torch.stack([g.norm() for g in expected]).norm().item()
    assert metrics["decoder/grad_norm"] == pytest.approx(norm, rel=1e-3)
    for p, b, g in zip(parameters, before, expected):
        torch.testing.assert_close(b - p.detach(), g / max(norm, 1), atol=1e-6, rtol=1e-2)


def test_the_reference_is_the_decoder_without_its_adapter():
    trainer, decoder, _ = build("--kl-coef", "0.1")
    roll_out(trainer)
    moves = decoder.moves
    perturb(decoder.model)
    metrics = decoder.learn()
    for move in moves:
        torch.testing.assert_close(move.ref_logprobs, move.old_logprobs, atol=1e-3, rtol=0)
    assert metrics["decoder/kl"] > 0
    base = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert base and all(p.grad is None for _, p in trainer.model.named_parameters()), "the codes' half is left alone"


# ---- credit ---------------------------------------------------------------------------------------------------------


def test_codes_are_compared_by_the_means_of_their_paintings_and_paintings_among_themselves(tmp_path):
    """Rewards 0..15: two prompts, two code sequences each, four paintings of each."""
    trainer, decoder, _ = build("--train", "both", "--group-size", "2", "--paintings", "4", "--combine", "sum")
    seen = {}

    def score(images, prompts, targets):
        seen.update(prompts=prompts, targets=targets)
        values = torch.arange(16.0) ** 2
        return None, {"number": values}

    decoder.score = score
    sizes = []
    decoder.total = lambda raw, size: (sizes.append(size), raw["number"])[1]
    rollouts = trainer.rollout(PROMPTS, ["a", "b"], 5)
    values = torch.arange(16.0) ** 2
    means = values.view(4, 4).mean(1)
    assert torch.equal(torch.cat([r.rewards for r in rollouts]), means)
    assert sizes == [4, 2], "z-scores of several rewards are of the same groups"
    assert seen == {"prompts": [PROMPTS[0]] * 8 + [PROMPTS[1]] * 8, "targets": ["a"] * 8 + ["b"] * 8}
    assert len(decoder.moves) == 2 * 2 * 2  # prompts x code sequences x moves
    for i, move in enumerate(decoder.moves):
        group = values[i // 2 * 4 : i // 2 * 4 + 4]
        torch.testing.assert_close(move.advantages, (group - group.mean()) / group.std(), atol=1e-4, rtol=0)
    assert all(len(r.images) == 2 for r in rollouts)
    images = decoder.paint(PROMPTS[0], rollouts[0].tokens, 5)
    assert images[0] is decoder.pictures[0] and images[1] is decoder.pictures[4], "the first painting of each sequence"


def test_one_code_sequence_a_prompt_when_only_the_decoder_learns():
    trainer, decoder, settings = build("--decoder-lr", "0.002")
    assert [half.optimizer.param_groups[0]["lr"] for half in (trainer, decoder)] == [0.001, 0.002]
    rollouts = roll_out(trainer)
    assert [len(r.tokens) for r in rollouts] == [1, 1]
    assert all(not r.advantages.any() for r in rollouts)
    metrics = step_metrics(rollouts, rewards.parse_rewards("ssim:1,mse:1"))
    assert math.isnan(metrics["groups_without_spread"]), "there are no groups"
    assert settings.group_size == 3, "an evaluation paints as many as ever"
    adapter = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.update(rollouts)
    decoder.learn()
    assert all(torch.equal(p, a) for p, a in zip((p for p in trainer.model.parameters() if p.requires_grad), adapter))
    assert any(p.abs().max() > 0 for n, p in decoder.model.named_parameters() if "lora_B" in n)


def taking_turns(monkeypatch, offload):
    """A step of both halves: Adam's first moments, and where a frozen weight and the adapters were."""
    monkeypatch.setattr(train, "needs_offload", lambda *given: offload)
    trainer, decoder, _ = build("--train", "both", "--group-size", "2", "--paintings", "2", "--kl-coef", "0.1")
    weight = trainer.pipe.transformer.transformer_blocks[0].attn1.to_q.base_layer.weight
    adapters = [p for model in (trainer.model, decoder.model) for p in model.parameters() if p.requires_grad]
    home, places, scored, seen = weight.data_ptr(), [p.data_ptr() for p in adapters], decoder.logprobs, []
    monkeypatch.setattr(decoder, "logprobs", lambda *given: (seen.append(weight.data_ptr()), scored(*given))[1])
    trainer.step(PROMPTS, [draw("circle", "red", "pink"), draw("cross", "blue", "white")], 5)
    decoder.learn()
    assert [p.data_ptr() for p in adapters] == places, "what is trained stays"
    moments = [half.optimizer.state[p]["exp_avg"] for half in (trainer, decoder) for p in half.optimizer.state]
    return torch.cat([moment.flatten() for moment in moments]), [place != home for place in seen]


def test_taking_turns_changes_nothing(monkeypatch):
    """With the CPU as the GPU and a copy as pinned memory: the frozen weights come and go, and gradients are the same."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    resident, moved = taking_turns(monkeypatch, False)
    assert moved and not any(moved)
    offloaded, moved = taking_turns(monkeypatch, True)
    assert moved and all(moved), "the decoder is up when it learns"
    torch.testing.assert_close(offloaded, resident, atol=1e-4 * resident.abs().max().item(), rtol=0)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_both_adapters_paint_in_a_stock_pipeline_what_they_painted_here(quick):
    """Saved by a run, loaded by the lines of the README: the same picture, and not that of the base."""
    arguments = ["--train", "both", "--paintings", "2", "--decode-steps", "3", "--steps", "2", "--out", "run"]
    assert quick(*arguments, "--decoder-lr", "0.05", "--lr", "0.05") == 0
    settings = tiny_settings("--height", "32", "--width", "32", "--decode-steps", "3")
    codes = torch.randint(1024, (1, 1), generator=torch.Generator().manual_seed(0))

    def paint(load):
        pipe = GlmImagePipeline.from_pretrained(train.TINY, dtype=torch.float32)
        if load:
            pipe.vision_language_encoder.load_adapter("run/adapter")
            pipe.transformer.load_lora_adapter("run/decoder-adapter", prefix=None, use_safetensors=True)
        return train.decode_images(pipe, PROMPTS[0], codes, settings, 3)[0]

    trainer, decoder, _ = build("--train", "both")
    checkpoints.load(Path("run"), {"": trainer, "decoder": decoder})
    here = train.decode_images(trainer.pipe, PROMPTS[0], codes, settings, 3)[0]
    difference = torch.tensor([a - b for a, b in zip(here.tobytes(), paint(True).tobytes())]).abs()
    assert difference.max() <= 1
    assert here.tobytes() != paint(False).tobytes()


def test_a_resumed_run_of_both_halves_equals_the_uninterrupted_one(quick):
    arguments = ["--train", "both", "--paintings", "2", "--decode-steps", "3", "--save-every", "1"]
    assert quick(*arguments, "--steps", "2", "--out", "straight") == 0
    assert quick(*arguments, "--steps", "1", "--out", "halves") == 0
    assert train.main(["--resume", "halves", "--steps", "2"]) == 0
    for file in ("adapter/adapter_model.safetensors", "decoder-adapter/pytorch_lora_weights.safetensors"):
        straight, halves = load_file(f"straight/{file}"), load_file(f"halves/{file}")
        assert straight.keys() == halves.keys() and all(torch.equal(straight[name], halves[name]) for name in halves)


BOTH = ["--train", "both", "--paintings", "2", "--decode-steps", "3"]


@pytest.mark.parametrize(("half", "saved"), [("score", "000001"), ("codes", "000001"), ("decoder", "000000")])
def test_a_step_of_which_one_half_has_learned_is_not_saved(quick, monkeypatch, half, saved):
    """Memory runs out in the second step, as it samples, as the codes learn, or as the decoder does after them."""
    calls, owner = [], train.DecoderGRPO if half == "decoder" else train.GRPO
    name = {"score": "rollout", "codes": "add_gradient", "decoder": "learn"}[half]
    original = getattr(owner, name)

    def breaks(self, *given):
        steps = "codes" if isinstance(self, train.DecoderGRPO) == (half == "decoder") else "other"
        calls.append(steps)
        if calls.count("codes") == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, *given)

    monkeypatch.setattr(train, "evaluate", lambda *given: ({"reward": 0.0, "images": 1, "prompts": 1}, []))
    monkeypatch.setattr(owner, name, breaks)
    assert quick(*BOTH, "--steps", "3", "--out", "run") == 2
    assert max(path.name for path in Path("run/checkpoints").iterdir()) == saved


def test_half_an_update_of_the_decoder_alone_is_not_saved(quick, monkeypatch):
    original = train.DecoderGRPO.add_gradient

    def add_gradient(self, move, iteration, *given):
        if iteration == 1 and Path("run/metrics.jsonl").read_text():  # the second optimiser step of the second step
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, move, iteration, *given)

    monkeypatch.setattr(train.DecoderGRPO, "add_gradient", add_gradient)
    arguments = ["--train", "decoder", "--decode-steps", "3", "--iterations", "2", "--save-every", "9"]
    assert quick(*arguments, "--steps", "3", "--out", "run") == 2
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["000000"]


def test_skipped_steps_of_the_decoder_count(quick, capsys, monkeypatch):
    learn = train.DecoderGRPO.learn
    monkeypatch.setattr(train.DecoderGRPO, "learn", lambda self: learn(self) | {"decoder/skipped": 1.0})
    assert quick(*BOTH, "--steps", "9", "--out", "run") == 2
    output = capsys.readouterr()
    assert "a step: 4 pictures" in output.out, "1 prompt x 2 code sequences x 2 paintings"
    assert "5 steps in a row had no finite gradient" in output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--train", "pictures"], "--train"), (["--paintings", "1"], "--paintings: must be in [2, inf), got 1"),
     (["--noise-level", "0"], "--noise-level: must be in (0, 1], got 0.0")],
)  # fmt: skip
def test_bad_flags_are_one_line(quick, capsys, arguments, words):
    assert quick("--steps", "1", *arguments) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


def test_one_move_leaves_nothing_to_learn(quick, capsys):
    assert quick("--train", "decoder", "--decode-steps", "1", "--steps", "1") == 2
    assert "--decode-steps" in capsys.readouterr().err
