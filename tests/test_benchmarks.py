"""The benchmarks run, what they print follows from what they measure, and what a run plans for is
what they measure."""

import itertools
import re
import sys

import check
import pytest
import torch
import train_decoder
from conftest import CPU, TINY, painted, tiny_settings
from PIL import Image

import train
from benchmarks import memory, repair_decoder, variants
from glm_image.memory import needed as memory_needed
from glm_image.memory import working_memory
from glm_image.model import Painting
from runtime.int8 import round_linears


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a benchmark as a command; returns the lines that it printed."""

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
        module.main()
        return capsys.readouterr().out.splitlines()

    return run


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_size():
    """What learns of the released sizes, and its peaks: groups of 4, micro-batches of 2."""
    learners = memory.build()
    return *learners, *memory.peaks(*learners, 1024, 4, 2)


def test_memory_at_full_size_by_hand(full_size, run, monkeypatch):
    """Counted from GLM-Image's sizes; and the rows that are printed add it up."""
    *learners, work, cache = full_size
    monkeypatch.setattr(memory, "build", lambda base: learners)
    monkeypatch.setattr(memory, "peaks", lambda *case: (dict(work), cache))  # main takes them apart
    monkeypatch.setattr(memory, "MICRO_BATCHES", [2])
    weights, *rows = run(memory)
    assert weights == "GB: policy 17.8, what paints 15.1"  # 8.9 B and 7.5 B, two bytes each

    layers, sampled, batch, heads, length = 40, 4 * 4, 2, 2, 32 * 32 + 256
    room = 1536  # 60 of the prompt and the codes, rounded up
    # Keys and values in bfloat16.
    assert cache == pytest.approx(1e-9 * layers * 2 * sampled * heads * room * 128 * 2)
    nucleus = 1e-9 * sampled * length * 16_384
    assert cache + nucleus < work["sample"] < cache + nucleus + 0.05

    read, rank, mlp = 60 + length - 1, 16, 2 * 13_696
    per_layer = (4096 + 4096) * 2 + (4096 + 256) * 2 + (4096 + mlp) + (mlp // 2 + 4096)
    gradients = 1e-9 * layers * rank * per_layer * 4
    checkpoints = 1e-9 * batch * layers * read * 4096 * 2
    # Its widest matrix: output, gradient, and the adapter's in float32.
    layer = 1e-9 * batch * read * mlp * (2 + 2 + 4)
    assert gradients + checkpoints + layer < work["update"] < gradients + checkpoints + 3 * layer
    # With cuDNN's workspace.
    assert work["VAE"] == pytest.approx(1e-9 * 1024**2 * (3.1e3 + 2e3), rel=0.02)

    numbers = [[float(cell) for cell in row.split()[2:]] for row in rows[1:]]
    (turns, stay), (learning, all_learning) = numbers
    decoder_update = work["decoder update"]
    others = max(value for name, value in work.items() if name != "decoder update")
    assert turns == pytest.approx(17.8 + 0.57 + max(work["sample"], work["update"]), abs=0.1)
    assert stay == pytest.approx(17.8 + 15.1 + 0.57 + cache + others, abs=0.1)
    assert learning == pytest.approx(
        max(turns + 0.19, 15.1 - 0.8 + 0.57 + 0.19 + decoder_update), abs=0.1
    )
    assert all_learning == pytest.approx(
        max(stay + 0.19, 17.8 + 15.1 + 0.76 + cache + decoder_update), abs=0.1
    )


FULL = str.split("--height 1024 --width 1024 --prompts-per-step 4 --group-size 4")


def fits(codes, decoder, pipe, work, cache, half, *flags):
    """On every card the peak fits beside the context, and not much is left unused."""
    models = [codes.model, *memory.painting_models(pipe)]
    adapters = [memory.gigabytes(learner.parameters) for learner in (codes, decoder)]
    policy = memory.gigabytes(memory.tensors(models[:1])) - adapters[0]
    painters = memory.gigabytes(memory.tensors(models[1:])) - adapters[1]
    learning = 1 if half == "codes" else 2
    learns = ["--train", half] if half == "both" else []
    settings = tiny_settings(*FULL, "--guidance-scale 1.5", *learns, *flags)
    needed = train_decoder.needed if half == "both" else memory_needed
    passes = {k: v for k, v in work.items() if half == "both" or k != "decoder update"}
    # Adapters, Adam's moments, and the context.
    beside = sum(adapters) + 2 * sum(adapters[:learning]) + 0.6
    peak = max(value + (0 if name == "sample" else cache) for name, value in passes.items())
    peak += policy + painters
    vae = memory.gigabytes(memory.tensors(models[-1:]))
    # Elsewhere the policy.
    there = {"paint": painters - vae, "decoder update": painters - vae, "VAE": vae}
    in_turns = max(value + there.get(name, policy) for name, value in passes.items())
    together, turn, *_ = (value / 1e9 for value in needed(models, settings, 2, 0))
    assert peak + beside < together < peak + beside + 3
    assert in_turns + beside < turn < in_turns + beside + 3


@pytest.mark.parametrize("half", ["codes", "both"])
def test_what_is_planned_fits(full_size, half):
    fits(*full_size, half)


def test_what_is_planned_for_a_rounded_base_is_one_block_in_16_bits():
    """A backward pass has the layers of one block cast at once, here of the language model."""
    widths = [(4096, 4096)] * 2 + [(4096, 256)] * 2 + [(4096, 27_392), (13_696, 4096)]
    linear = lambda width: torch.nn.Linear(*width, bias=False, device="meta").bfloat16()
    block = torch.nn.ModuleList(map(linear, widths))
    round_linears(block)
    row = lambda layer: torch.zeros(1, layer.in_features, device="meta").bfloat16()
    with memory.Alive([block]) as alive:
        outputs = [layer(row(layer).requires_grad_()) for layer in block]
    cast = 2 * sum(rows * columns for rows, columns in widths)
    assert outputs and cast < alive.peak < cast + 1e6
    of = lambda base: tiny_settings(*FULL, "--train both --base", base)
    exact, rounded = (working_memory(of(base), 4, 0) for base in ("bfloat16", "int8"))
    pairs = zip(rounded[:3], exact[:3])
    assert all(alive.peak < more - less < 1.5 * alive.peak for more, less in pairs)
    assert rounded[3:] == exact[3:]  # but for the VAE and the scoring


def test_what_is_planned_grows_with_groups_and_pictures():
    """The sampler's cache and nuclei in large groups; the VAE without cuDNN's workspace."""
    settings = tiny_settings(*FULL, "--group-size 64")
    sampled = 1e-9 * 256 * (40 * 2 * 2 * 1536 * 128 * 2 + 1280 * 16_384)
    assert sampled < working_memory(settings, 1, 0)[1] / 1e9 < sampled + 2
    large = tiny_settings("--height 2048 --width 2048")
    more = working_memory(large, 1, 0)[3] - working_memory(settings, 1, 0)[3]
    assert more == pytest.approx(1024**2 * (4 * 3.1e3 - 5.1e3))


def test_an_edit_fits_and_is_counted_by_hand(full_size):
    """Its codes are read with the prompt; one copy of the source's keys and values lies there."""
    work, cache = memory.peaks(*full_size[:3], 1024, 4, 4, edits=True)
    # Room for 60 of the prompt, 1,024 of the source, 1,024 of the picture, rounded up.
    rows, layers, room = (16, 40, 2304)
    assert cache == pytest.approx(1e-9 * layers * 2 * rows * 2 * room * 128 * 2)
    layer = 1e-9 * 2 * (1024 // 16) ** 2 * 4096 * 2  # of the decoder: a picture's keys and values
    assert 30 * layer + 4 * 2 * layer < work["paint"] < 30 * layer + 20 * 2 * layer
    # The widest matrix: output, and the adapter's, in float32.
    read = 1e-9 * 4 * (60 + 1024) * 27_392 * (2 + 4)
    # Each prompt's keys and values, for each sample.
    copied = 1e-9 * layers * 2 * rows * 2 * (60 + 1024) * 128 * 2
    assert read < cache + copied < work["sample"] < cache + copied + read

    needed = working_memory(tiny_settings(*FULL), 4, 0, edits=True)
    together, sampling, painting, *_ = (value / 1e9 for value in needed)
    peak = max(work["sample"], cache + max(work.values()))
    assert peak < together < peak + 2
    assert max(work["sample"], work["update"]) < sampling < peak + 2
    assert max(work["paint"], work["VAE"]) < painting


# ---- a rounded decoder ---------------------------------------------------------------------------


def test_repairing_a_rounded_decoder(run, tmp_path):
    """What is painted is a right drawing, by matrices of four levels per row."""
    few = "--steps 1 --prompts-per-step 2 --group-size 4 --eval-count 2 --out"
    lines = "\n".join(run(repair_decoder, *few.split(), tmp_path / "run"))
    before, after = map(float, re.search(r"likeness (\S+) \S+ \S+ -> (\S+)", lines).groups())
    assert 0.5 < before < 1 and abs(after - before) < 0.2 and after != before

    prompts = prompts_of("a cross and a ring", "three diamonds")
    groups = repair_decoder.Drawn().sample(prompts.texts, 1, 0)
    pipe, painting = train.load(TINY, CPU), Painting(128, 128, 6, 1.0, 4)
    for text, group in zip(prompts.texts, groups):
        _, images = painted(pipe, text, group.tokens, painting, 0)
        assert check.right(images, [text]).all()
    rounded = repair_decoder.load_rounded(TINY, CPU).transformer.transformer_blocks[0]
    assert {len(row.unique()) for row in rounded.attn1.to_q.weight} <= {2, 3, 4}


# ---- variants of GRPO ----------------------------------------------------------------------------


def made_up(**shares):
    """Lines of variants.csv: of each variant 70% +- 2% after 20 steps, or what is given."""
    rows = []
    for start, name, *_ in variants.variants():
        for seed, step in itertools.product(variants.SEEDS, (10, 12, 20)):
            share = shares.get(name, 0.7) + 0.02 * (seed - 1) * (-1) ** len(name)
            row = dict.fromkeys(variants.COLUMNS, share if step == 20 else 0.5)
            rows.append(row | {"start": start, "variant": name, "seed": seed, "step": step})
    for start in ("hard", "shipped"):
        before = dict.fromkeys(variants.COLUMNS, 0.5) | {"seed": 0, "step": 0}
        rows.append(before | {"start": start, "variant": "before training"})
    return rows


def test_the_table_of_variants_by_hand(run, monkeypatch, tmp_path):
    """What the file has is read, not made again."""
    monkeypatch.setattr(variants, "OUT", tmp_path)
    monkeypatch.setattr(variants, "CSV", tmp_path / "variants.csv")
    (tmp_path / "hard-start").mkdir()
    variants.CSV.write_text(",".join(variants.COLUMNS) + "\n")
    variants.append(made_up(**{"no baseline": 0.4}))
    lines = run(variants)
    (line,) = [line for line in lines if line.startswith("| no baseline |")]
    assert line == "| no baseline | 0 | 50.0% | 40.0% | 40.0% | no KL | **-30.0** |"
    assert [line for line in lines if line.endswith("| no KL | +0.0 |")]  # not told apart
    assert Image.open(tmp_path / "variants.png").width == 880


def test_the_threshold_of_one_comparison_is_students(monkeypatch):
    """Of three differences: 4.303, from the tables."""
    rows = "hard | a | before training | |"
    monkeypatch.setattr(variants, "VARIANTS", rows)
    differences, error, threshold = variants.compare(made_up(), "hard")
    assert threshold / error == pytest.approx(4.303, rel=0.05)
    assert error == pytest.approx(0.02 / 3**0.5) and differences == pytest.approx({"a": 0.2})
