"""The tiny model and its judge: check.py knows every picture by its pixels, and the model follows half of its prompts."""

import runpy
import sys
from pathlib import Path

import check
import make
import numpy as np
import pytest
import torch
from conftest import TINY, build_run, tiny_settings
from PIL import Image
from safetensors.torch import save_file

import train
from runtime import UserError

RED_CIRCLE = "a red circle on a pink background"


def lines(name):
    return (TINY / f"{name}.txt").read_text().splitlines()


# ---- the judge ------------------------------------------------------------------------------------------------------


def test_the_check_knows_every_picture_and_no_other():
    for attributes in make.ALL:
        for radius in make.RADII:
            assert check.describe(make.draw(*attributes, radius=radius)) == attributes
    blank = Image.new("RGB", (128, 128), make.BACKGROUNDS["pink"])
    half = make.draw("circle", "red", "pink")
    half.paste(blank.crop((0, 0, 64, 128)), (0, 0))
    two = make.draw("square", "red", "pink")
    two.paste(make.draw("square", "blue", "pink").crop((0, 0, 64, 128)), (0, 0))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8))
    assert [check.describe(image) for image in (blank, half, two, noise)] == [None] * 4


def test_the_check_is_a_reward():
    shown = [
        ("circle", "red", "pink"),
        ("square", "red", "pink"),
        ("circle", "blue", "pink"),
        ("circle", "red", "cyan"),
    ]
    images = [*(make.draw(*attributes) for attributes in shown), Image.new("RGB", (128, 128))]
    assert check.shows(images, [RED_CIRCLE] * 5).tolist() == [1, 0, 0, 0, 0]
    assert check.shows(images[:1], ["a red circle"]).isnan().all(), "a prompt that it cannot judge"


# ---- the data -------------------------------------------------------------------------------------------------------


def test_prompts_targets_and_size_of_the_tiny_model():
    training, held_out = lines("prompts"), lines("heldout")
    targets = sorted((TINY / "targets").iterdir())
    assert (len(training), len(held_out)) == (32, 16)
    assert len(set(training)) == len(targets) == 32
    assert not set(training) & set(held_out)
    assert check.shows([Image.open(target) for target in targets], training).all()
    tracked = [file for file in TINY.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in tracked) <= 10e6


def test_the_data_can_be_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "HERE", tmp_path)
    make.write_prompts()
    for name in ("prompts.txt", "heldout.txt"):
        assert (tmp_path / name).read_text() == (TINY / name).read_text()
    made = sorted((tmp_path / "targets").iterdir())
    assert len(made) == 32
    for file in made:
        difference = np.asarray(Image.open(file)).astype(int) - np.asarray(Image.open(TINY / "targets" / file.name))
        assert np.abs(difference).max() <= 1, "up to rounding, should Pillow change"


# ---- the model ------------------------------------------------------------------------------------------------------


def test_the_base_draws_clean_shapes_and_follows_half_of_its_prompts():
    prompts = lines("prompts")[::4]
    images = check.paint(8, prompts)
    assert len(images) == 64
    assert np.mean([check.describe(image) is not None for image in images]) > 0.85
    assert 0.3 < check.shows(images, [prompt for prompt in prompts for _ in range(8)]).mean() < 0.7


@pytest.fixture
def first_codes(monkeypatch):
    """Pictures whose preview is only begun: nonsense, painted in a moment."""
    encode = train.encode_prompt

    def encode_prompt(*arguments):
        ids, positions, _ = encode(*arguments)
        return ids, positions[:, : len(ids) + 20], 20

    monkeypatch.setattr(train, "encode_prompt", encode_prompt)


def perturb(model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)


def test_the_check_paints_with_trained_adapters(tmp_path, first_codes):
    """Those of a run's folder, or either by itself."""
    run = build_run(tiny_settings("--train", "both"))
    perturb(run.policy.model)
    perturb(run.decoder.model)
    run.policy.model.save_pretrained(tmp_path / "run" / "adapter")
    run.pipe.transformer.save_lora_adapter(tmp_path / "run" / "decoder-adapter")

    def paint(folder):
        return [image.tobytes() for image in check.paint(1, [RED_CIRCLE], folder and str(tmp_path / folder))]

    base, both = paint(None), paint("run")
    assert paint(None) == base, "always the same samples"
    assert len({base[0], both[0], paint("run/adapter")[0], paint("run/decoder-adapter")[0]}) == 4
    with pytest.raises(UserError, match="there is no adapter in"):
        paint("nowhere")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--adapter", "nowhere"], "there is no adapter in nowhere"),
        (["--samples", "0"], "--samples: must be in [1, inf), got 0"),
        (["--sample", "2"], "unrecognized arguments"),
        (["--adapter", "other"], "there is no adapter in other"),
        (["--adapter", "cut"], "cannot read the adapter cut/pytorch_lora_weights.safetensors"),
        (["--adapter", "none"], "none was made with --lora-rank None"),
    ],
)
def test_a_check_that_cannot_work_is_one_line(tmp_path, monkeypatch, capfd, first_codes, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("other/adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["nothing"]}')
    Path("cut").mkdir()
    Path("cut/pytorch_lora_weights.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    Path("none").mkdir()
    save_file({"other": torch.zeros(1)}, "none/pytorch_lora_weights.safetensors")
    monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
    assert check.main() == 2
    error = capfd.readouterr().err
    assert words in error.strip().splitlines()[-1] and "Traceback" not in error


def test_the_check_counts_by_hand(tmp_path, monkeypatch, capsys, first_codes):
    """Of the first two prompts one picture is right, one of the wrong shape; all others are blank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check.py", "--samples", "2", "--sheet", str(tmp_path / "sheet.png")])
    painted, seeds = [], []

    def decode_images(pipe, prompt, tokens, settings, seed):
        painted.append(prompt)
        seeds.append(seed)
        right = next(words for words in make.ALL if make.caption(*words) == prompt)
        wrong = (next(shape for shape in make.SHAPES if shape != right[0]), *right[1:])
        return (
            [make.draw(*words) for words in (right, wrong)] if len(painted) <= 2 else [Image.new("RGB", (128, 128))] * 2
        )

    monkeypatch.setattr(train, "decode_images", decode_images)
    assert check.main() == 0
    training, held_out = capsys.readouterr().out.splitlines()[-2:]
    assert painted == lines("prompts") + lines("heldout") and len(set(seeds[:32])) == 32
    assert training == "prompts.txt: 2/64 right = 3.1% (shape 3%, colour 6%, background 6%)"
    assert held_out.startswith("heldout.txt: 0/32 right = 0.0%")
    assert Image.open(tmp_path / "sheet.png").width > 2 * 128
    assert not Path("check.png").exists()


def test_the_judge_of_a_run_does_not_import_the_trainer_again(monkeypatch):
    """train.py is __main__ then, and would be loaded a second time."""
    for name in ("train", "make"):
        monkeypatch.delitem(sys.modules, name)
    assert runpy.run_path(str(TINY / "check.py"))["shows"]([make.draw("circle", "red", "pink")], [RED_CIRCLE]) == 1
    assert "train" not in sys.modules
