"""What a run meets on a card: memory that runs out, models that take turns, several GPUs."""

import itertools
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import train_decoder
from conftest import (
    CPU,
    adapter_of,
    build_run,
    holding,
    prompts_of,
    records,
    short_runs,
    shorten,
    steps_of,
    steps_saved,
    tiny_settings,
    write_reward,
)
from diffusers import AutoencoderKL

import grpo
import train
from benchmarks import random_weights
from devices import cpu
from devices import memory as gpu
from devices.cpu import SharedForward
from devices.memory import Memory
from glm_image.decoder import DecoderGRPO
from glm_image.model import GlmImage
from grpo import GRPO, Offload
from rewards import Reward
from runtime import ranks
from runtime.terminal import out_of_memory


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch):
    monkeypatch.setattr(cpu, "Memory", Memory)


# ---- memory that runs out ------------------------------------------------------------------------

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    "error, expected",
    [
        (FULL, True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError(CUBLAS), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_runs_out_has_many_words(error, expected):
    assert out_of_memory(error) == expected


def runs_out(monkeypatch, owner, name, when, error=FULL):
    """Raises after those calls of a function whose number is in `when`. Returns the calls."""
    calls, original = [], getattr(owner, name)

    def fails(*given, **more):
        result = original(*given, **more)
        calls.append(1)
        if len(calls) in when:
            raise error
        return result

    monkeypatch.setattr(owner, name, fails)
    return calls


# A reward that draws: what is made again draws the same.
DRAWS = "return torch.rand(len(images))"
FLAGS = "--steps 2 --kl-coef 0.1 --micro-batch-size 2"
PLACES = [
    (GlmImage, "paint", [1, 3]),  # in an evaluation, then in a step
    (grpo, "_sample_token", [6]),  # of 2 tokens in an evaluation that is made twice
    (AutoencoderKL, "decode", [2]),
    (torch, "rand", [3]),  # after a trial
    # In the second step.
    (GRPO, "logprobs", [3]),
    (grpo, "compute_grpo_loss", [2]),
]
PHASES = ["paint", "sample", "paint", "vae", "score", "reference", "update"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Metrics, evaluations and adapter of a run that has memory enough."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with short_runs(folder) as run:
        assert run(*write_reward(DRAWS), FLAGS, "--out run") == 0
        return what_is_left("run")


def memory_lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory:")]


def full(phase, instead):
    return f"memory: the GPU is full in the phase '{phase}': from here on {instead}"


def what_is_left(folder):
    left = [records(f"{folder}/{name}.jsonl") for name in ("metrics", "evaluation")]
    return *left, adapter_of(folder)


def test_what_ran_out_of_memory_is_made_again_exactly(judged, undisturbed, monkeypatch, capsys):
    """In every phase of a step, and in an evaluation."""
    reward = write_reward(DRAWS)
    for place in PLACES:
        runs_out(monkeypatch, *place)
    # Groups of 2 fit micro-batches of 2 and of more alike.
    assert judged(*reward, FLAGS, "--micro-batch-size 256 --offload no --out run") == 0
    sizes = [128, 64, 32, 16, 8, 4, 2]
    lines = [full(*x) for x in zip(PHASES, [f"--micro-batch-size is {size}" for size in sizes])]
    assert memory_lines(capsys) == lines
    assert what_is_left("run") == undisturbed


def test_models_take_turns_first_then_micro_batches_are_halved(
    quick, undisturbed, monkeypatch, capsys, lockable
):
    """With a CPU in place of the GPU; the last time memory runs out in CUDA's own words."""
    reward = write_reward(DRAWS)
    released, stock = [], SharedForward.release
    release = lambda forward: (stock(forward), released.append(1))  # as of a captured step
    monkeypatch.setattr(SharedForward, "release", release)
    runs_out(monkeypatch, grpo, "compute_grpo_loss", [1, 2, 4], RuntimeError(CUBLAS))
    assert quick(*reward, FLAGS, "--micro-batch-size 8 --out run") == 0
    changes = ["the models take turns", "--micro-batch-size is 4", "--micro-batch-size is 2"]
    assert memory_lines(capsys) == [full("update", change) for change in changes] and released
    # Copies of weights lie otherwise in memory, and a CPU rounds by that.
    for expected, found in zip(undisturbed[0], records("run/metrics.jsonl"), strict=True):
        assert found == pytest.approx(expected, abs=1e-4, nan_ok=True)


def test_of_both_halves_the_larger_learns_first(quick, monkeypatch, capsys):
    """If memory runs out in the decoder's update, neither half has moved: the step is made again."""
    flags = "--train both --paintings 2 --decode-steps 3 --kl-coef 0 --steps 1"
    assert quick(*write_reward(DRAWS), flags, "--micro-batch-size 1 --out undisturbed") == 0
    runs_out(monkeypatch, DecoderGRPO, "logprobs", [1])
    assert quick(*write_reward(DRAWS), flags, "--micro-batch-size 2 --offload no --out run") == 0
    assert memory_lines(capsys) == [full("decoder/update", "--micro-batch-size is 1")]
    assert records("run/metrics.jsonl") == records("undisturbed/metrics.jsonl")


def test_memory_that_is_never_enough_ends_in_one_line(quick, monkeypatch, capsys):
    calls = runs_out(monkeypatch, grpo, "compute_grpo_loss", range(2, 99))
    assert quick(*write_reward(""), FLAGS, "--offload no --out run") == 2
    output, errors = capsys.readouterr()
    assert output.count("from here on") == 1 and len(calls) == 3  # of micro-batches of 2, then 1
    (line,) = errors.splitlines()[-1:]
    assert line.startswith("error: out of GPU memory (CUDA out of memory. Tried to allocate 2.00")
    assert all(flag in line for flag in ("--offload yes", "--micro-batch-size", "--group-size"))
    assert steps_saved("run")[-1] == "000001"


def test_a_step_that_has_moved_the_policy_is_not_made_again(quick, monkeypatch):
    """It fails in the optimizer, which may be half done. The step before it is saved."""
    runs_out(monkeypatch, torch.optim.AdamW, "step", [3])
    assert quick(*write_reward(""), FLAGS, "--iterations 2 --out run") == 2
    assert steps_of("run/metrics.jsonl") == [1] and steps_saved("run") == ["000001"]


def attempt(work, run, *given):
    return run.memory.attempt(work, run, *given)


def room_for(micro_batch, *models, release=lambda: None):
    """What Memory.attempt needs beside the work and a seed."""
    memory = holding(CPU, *models, release=release)
    run = SimpleNamespace(trainers={}, memory=memory, clock=memory.clock)
    return run, tiny_settings("--micro-batch-size", micro_batch), {}, []


def test_what_the_error_held_is_free_before_work_is_called_again():
    held = []

    def work(*given):
        if held:
            assert held[0]() is None and held[1:] == ["released"]
            return "done"
        tensor = torch.zeros(3)
        tensor.itself = tensor  # which a traceback may hold too
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("out of memory")

    room = room_for(2, release=lambda: held.append("released"))
    assert attempt(work, *room, 2**40) == "done"


def test_a_try_that_failed_is_no_part_of_a_steps_seconds(monkeypatch):
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)  # a phase takes a second
    run, settings, *given = room_for(2)
    settings.offload = "no"
    tries = []

    def work(*given):
        run.clock.begin("sample")
        tries.append(1)
        if len(tries) == 1:
            raise FULL

    attempt(work, run, settings, *given, 0)
    assert run.clock.read() == {"seconds/sample": 1, "seconds": 1, "gpu_gb": 0} and len(tries) == 2


def test_several_ranks_do_not_repeat(monkeypatch):
    def work(*given):
        raise FULL

    monkeypatch.setattr(ranks, "count", lambda: 2)
    run, settings, *given = room_for(4)
    with pytest.raises(torch.OutOfMemoryError):
        attempt(work, run, settings, *given, 0)
    assert settings.micro_batch_size == 4


def test_models_that_the_user_or_the_host_keeps_do_not_take_turns(monkeypatch, lockable):
    """Micro-batches are halved instead. These weights are in no file."""
    for offload, host, turns in (("auto", 60e9, True), ("no", 60e9, False), ("auto", 4e9, False)):
        monkeypatch.setattr(gpu, "host_memory", lambda host=host: host)
        run, settings, *given = room_for(2, torch.nn.Linear(300, 300).requires_grad_(False))
        settings.offload = offload
        work = Mock(side_effect=[FULL, "done"])
        assert attempt(work, run, settings, *given, 0) == "done"
        assert (run.memory.offload is not None) == turns
        assert settings.micro_batch_size == (2 if turns else 1)


# ---- models that take turns ----------------------------------------------------------------------


def test_a_step_has_left_the_host_when_the_next_begins(quick, monkeypatch):
    left, step = [], train_decoder.decoder_step

    def watched(*given):
        # Samples of two steps would be there at once.
        assert not any(reference() for reference in left)
        rollout, metrics = step(*given)
        left.extend(weakref.ref(each) for each in rollout.groups)
        return rollout, metrics

    monkeypatch.setattr(train_decoder, "decoder_step", watched)
    flags = "--group-size 2 --decode-steps 2 --steps 3 --train decoder --out run"
    assert quick(flags) == 0 and len(left) == 3


@pytest.mark.parametrize("flags", ["", "--train both --paintings 2"])
def test_each_model_has_a_turn_of_its_own(monkeypatch, lockable, flags):
    """With the CPU as the GPU. All models leave while rewards score."""
    shorten(monkeypatch.setattr)
    sizes = "--height 64 --width 64 --group-size 2 --decode-steps 2 --kl-coef 0.1"
    settings = tiny_settings(flags, sizes, "--temperature 9 --top-p 1")
    run = build_run(settings)
    trainers = list(run.trainers.values())
    offload = run.memory.offload = Offload(run.glm_image.parts, CPU)
    frozen = [offload.homes[part][0] for part in run.glm_image.parts]
    seen = set()  # which models are on the GPU for which work

    def look(name):
        seen.add((name, *(tensor.data_ptr() != home.data_ptr() for tensor, home in frozen)))

    def watch(owner, name):
        stock = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (stock(*given), look(name))[0])

    watch(run.trainer, "sample")
    watch(getattr(trainers[-1], "painter", run.glm_image), "paint")
    watch(run.glm_image, "to_images")
    for trainer in trainers:
        watch(trainer, "logprobs")
    reward = lambda images, **_: (look("score"), range(len(images)))[1]
    step = train_decoder.decoder_step if flags else train.grpo_step
    step(run, settings, {"mine": Reward("mine", 1.0, reward)}, prompts_of("a red circle"), 5)
    assert "seconds/move" in run.clock.read()  # what moves is timed by itself
    # The language model, the glyph encoder, the decoder, the VAE.
    turns = {("sample", 1, 0, 0, 0), ("paint", 0, 1, 1, 0), ("to_images", 0, 0, 0, 1)}
    turns |= {("score", 0, 0, 0, 0), ("logprobs", 1, 0, 0, 0)}
    assert seen == (turns | {("logprobs", 0, 0, 1, 0)} if flags else turns)


# ---- a model without the download ----------------------------------------------------------------


def test_random_weights_make_a_model_that_trains(quick, tmp_path, monkeypatch):
    """With sizes that a CPU has, in place of the released ones."""
    small = {
        "vision_language_encoder": {
            "text_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [4, 6, 6],
                },
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
            },
        },
        "transformer": {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32},
        "text_encoder": {"num_layers": 1, "d_ff": 64},
        "vae": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1},
    }
    sizes = {name: each | small[name] for name, each in random_weights.SIZES.items()}
    monkeypatch.setattr(random_weights, "SIZES", sizes)
    try:
        random_weights.main("random")
    finally:
        torch.set_default_dtype(torch.float32)
    assert quick("--model random --reward mse --targets targets --steps 1 --out run") == 0
