"""The benchmarks run, and what they print follows from what they measure."""

import importlib
import re
import sys
from types import ModuleType, SimpleNamespace

import make
import pytest
import torch
from conftest import tiny_settings

from benchmarks import memory, repair_decoder


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a benchmark as a command; returns the lines that it printed."""

    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
        module.main()
        return capsys.readouterr().out.splitlines()

    return run


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_what_is_alive():
    with torch.device("meta"), memory.Alive([]) as alive:
        a = torch.zeros(256)  # 1,024 bytes
        b = a + a  # another 1,024
        del a
        c = b.view(16, 16)[0], torch.zeros(1)  # nothing new, and a block of 512
    assert (alive.now, alive.peak, len(c)) == (1536, 2048, 2)


def test_memory_at_full_size(run, monkeypatch):
    """Against what must be there, counted by hand from GLM-Image's sizes."""
    found, peaks = [], memory.peaks

    def remember(*case):
        work, cache = peaks(*case)
        found.append((dict(work), cache))  # main takes `work` apart
        return work, cache

    monkeypatch.setattr(memory, "peaks", remember)
    monkeypatch.setattr(memory, "SIZE", 512)
    monkeypatch.setattr(memory, "MICRO_BATCHES", [1])
    weights, _, *rows = run(memory)
    assert weights == "GB: policy 17.8, what paints 15.1"  # 8.9 B and 7.5 B, two bytes each
    work, cache = found[0]

    layers, sampled, heads, codes = 40, 4 * 4, 2, 16 * 16 + 256
    room = 768  # 60 of the prompt and the codes, rounded up
    assert cache == pytest.approx(1e-9 * layers * 2 * sampled * heads * room * 128 * 2)  # keys and values in bfloat16
    nucleus = 1e-9 * sampled * codes * 16_384
    assert cache + nucleus < work["sample"] < cache + nucleus + 0.05

    read, rank, mlp = 60 + codes - 1, 16, 2 * 13_696
    per_layer = (4096 + 4096) * 2 + (4096 + 256) * 2 + (4096 + mlp) + (mlp // 2 + 4096)
    gradients = 1e-9 * layers * rank * per_layer * 4
    checkpoints = 1e-9 * layers * read * 4096 * 2
    layer = 1e-9 * read * mlp * (2 + 2 + 4)  # of its widest matrix: output, gradient, and the adapter's, in float32
    assert gradients + checkpoints + layer < work["update"] < gradients + checkpoints + 3 * layer
    assert work["VAE"] == pytest.approx(1e-9 * 512**2 * (3.1e3 + 2e3), rel=0.02), "with cuDNN's workspace"
    (turns, stay), (learning, all_learning) = ([float(cell) for cell in row.split()[2:]] for row in rows)
    decoder_update = work.pop("decoder update")
    assert turns == pytest.approx(17.8 + 0.57 + max(work["sample"], work["update"]), abs=0.1)
    assert stay == pytest.approx(17.8 + 15.1 + 0.57 + cache + max(work.values()), abs=0.1)
    assert learning == pytest.approx(max(turns + 0.19, 15.1 - 0.8 + 0.57 + 0.19 + decoder_update), abs=0.1)
    assert all_learning == pytest.approx(max(stay + 0.19, 17.8 + 15.1 + 0.76 + cache + decoder_update), abs=0.1)


# ---- against TRL ----------------------------------------------------------------------------------------------------


@pytest.fixture
def against_trl(monkeypatch):
    """The comparison with TRL, without TRL: its names are there, and empty."""
    for name, contents in {"trl": ("GRPOConfig", "GRPOTrainer"), "datasets": ("Dataset",)}.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(dict.fromkeys(contents, object))
    monkeypatch.delitem(sys.modules, "benchmarks.against_trl", raising=False)
    yield importlib.import_module("benchmarks.against_trl")
    del sys.modules["benchmarks.against_trl"]


def test_our_half_of_the_comparison(against_trl):
    """A step of ours, alternating with one of TRL in which nothing happens."""
    options = SimpleNamespace(group_size=2, prompts_per_step=1)
    lora = against_trl.peft.LoraConfig(**against_trl.LORA)
    weights = against_trl.peft.get_peft_model(against_trl.build_model(), lora).state_dict()
    ours, words = against_trl.build_ours(options, weights), against_trl.build_tokenizer()
    alternate = against_trl.Alternate(lambda number: against_trl.our_step(ours, prompts, words, 2, seed=number))
    prompts = against_trl.draw_prompts(1)
    alternate.on_step_begin()
    alternate.on_step_end(None, SimpleNamespace(global_step=1), None)
    (nothing,), (step,) = alternate.seconds.values()
    assert 0 <= nothing < step


def test_log_probs_loss_and_gradient_are_trls(tmp_path):
    """Where TRL is installed: pip install trl datasets."""
    for name in ("trl", "datasets"):
        pytest.importorskip(name)
    against_trl = importlib.import_module("benchmarks.against_trl")
    options = SimpleNamespace(group_size=4, prompts_per_step=1, steps=1)
    trl = against_trl.build_trl(options, against_trl.draw_prompts(1), against_trl.build_tokenizer(), str(tmp_path))
    differences = against_trl.compare(trl, against_trl.build_ours(options, trl.model.state_dict()), 4)
    assert max(differences.values()) < against_trl.TOLERANCE, differences


def test_against_trl_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)  # as if it were not installed
    with pytest.raises(SystemExit) as exit:
        importlib.import_module("benchmarks.against_trl")
    assert exit.value.code == 2 and capsys.readouterr().err.endswith("pip install trl datasets\n")


# ---- a rounded decoder ----------------------------------------------------------------------------------------------


def test_rounding_leaves_so_many_levels():
    exact, rounded = (
        repair_decoder.load_rounded(bits, tiny_settings()).transformer.transformer_blocks[0].attn1.to_q.weight
        for bits in (32, 3)
    )
    steps = (exact.amax(1) - exact.amin(1)) / 7
    assert all(len(row.unique()) <= 8 for row in rounded) and len(exact[0].unique()) > 50
    assert ((rounded - exact).abs() <= steps[:, None] / 2 + 1e-6).all() and (rounded != exact).any()


def test_repairing_a_rounded_decoder(run, monkeypatch, tmp_path):
    monkeypatch.setattr(
        repair_decoder, "drawings", lambda settings, own=repair_decoder.drawings: [e[:2] for e in own(settings)]
    )
    first, last = run(repair_decoder, "--steps", 1, "--sheet", tmp_path / "sheet.png")
    before, after = (float(re.search(r"SSIM (\S+),", line)[1]) for line in (first, last))
    assert re.fullmatch(r"3 bits, seed 0: SSIM \S+, \S+% of objects as drawn, 2 held-out drawings", first)
    assert 0.5 < before < 1 and abs(after - before) < 0.2 and after != before
    assert (tmp_path / "sheet.png").exists()


def test_objects_as_drawn_are_counted_place_by_place():
    red, blue, ring = ("circle", "red"), ("circle", "blue"), ("ring", "red")
    drawn = [make.draw((red, blue, None, None)), make.draw((None, ring, None, None))]
    share = lambda *scenes: repair_decoder.share_as_drawn([make.draw(scene) for scene in scenes], drawn)
    assert share((red, blue, None, None), (None, ring, None, None)) == 1
    assert share((red, red, None, None), (None, ring, blue, None)) == pytest.approx(2 / 3), "a colour; more is no harm"
    assert share((blue, red, None, None), (ring, None, None, None)) == 0, "in their places"
