"""The tiny model and its judge: check.py knows every picture by its pixels, and the model follows half of its prompts."""

import re
import runpy
import sys
from pathlib import Path

import check
import make
import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, build_run, tiny_settings
from PIL import Image
from safetensors.torch import save_file

import grpo
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


def test_the_check_reads_a_wish_with_its_source():
    source = make.draw("circle", "red", "pink")
    right, other_shape = ("circle", "blue", "pink"), ("cross", "blue", "pink")
    images = [make.draw(*right), source, make.draw("circle", "blue", "cyan"), make.draw(*other_shape)]
    assert check.shows(images, ["make it blue"] * 4, sources=[source] * 4).tolist() == [1, 0, 0, 0]
    wishes = ["make it a cross", "make the background cyan", "make it red"]
    edited = [make.draw("cross", "red", "pink"), make.draw("circle", "red", "cyan"), source]
    assert check.shows(edited, wishes, sources=[source.resize((256, 256))] * 3).all(), "of any size, or true already"
    assert not check.shows(edited, wishes[1:] + wishes[:1], sources=[source] * 3).any()


def test_the_check_judges_only_what_it_can():
    source, blank = make.draw("circle", "red", "pink"), Image.new("RGB", (128, 128))
    prompts = ["make it blue", "make it blue", "make it bigger", RED_CIRCLE, RED_CIRCLE]
    sources = [None, blank, source, None, blank]
    judged = check.shows([source] * 5, prompts, sources=sources)
    assert judged.isnan().tolist() == [True, True, True, False, False] and judged[3:].all()
    assert check.shows([source], ["make it blue"]).isnan().all()


# ---- the data -------------------------------------------------------------------------------------------------------


def test_prompts_targets_and_size_of_the_tiny_model():
    training, held_out = lines("prompts"), lines("heldout")
    targets = sorted((TINY / "targets").iterdir())
    assert (len(training), len(held_out)) == (32, 16)
    assert len(set(training)) == len(targets) == 32
    assert not set(training) & set(held_out)
    assert check.shows([Image.open(target) for target in targets], training).all()
    tracked = [file for file in TINY.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in tracked) <= 12e6


def pictures(folder):
    return [Image.open(file) for file in sorted((TINY / folder).iterdir())]


def test_edits_sources_and_targets_of_the_tiny_model():
    pairs = []
    for prefix, count in (("", 32), ("heldout-", 16)):
        wishes, sources = lines(f"{prefix}edits"), pictures(f"{prefix}sources")
        assert len(wishes) == len(sources) == count
        assert set(wishes) <= set(make.WISHES)
        assert check.shows(pictures(f"{prefix}edit-targets"), wishes, sources=sources).all()
        assert not check.shows(sources, wishes, sources=sources).any(), "nothing is asked for that is there already"
        pairs += zip(map(check.describe, sources), wishes, strict=True)
    assert len(set(pairs)) == 48, "those held out are others"


def test_the_data_can_be_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "HERE", tmp_path)
    make.write_prompts()
    for name in ("prompts.txt", "heldout.txt", "edits.txt", "heldout-edits.txt"):
        assert (tmp_path / name).read_text() == (TINY / name).read_text()
    made = sorted(tmp_path.glob("*/*.png"))
    assert len(made) == 3 * (32 + 16)
    for file in made:
        shipped = Image.open(TINY / file.relative_to(tmp_path))
        difference = np.asarray(Image.open(file)).astype(int) - np.asarray(shipped)
        assert np.abs(difference).max() <= 1, "up to rounding, should Pillow change"


# ---- the model ------------------------------------------------------------------------------------------------------


def test_the_base_draws_clean_shapes_and_follows_half_of_its_prompts():
    prompts = lines("prompts")[::4]
    images = check.paint(8, prompts)
    assert len(images) == 64
    assert np.mean([check.describe(image) is not None for image in images]) > 0.85
    assert 0.3 < check.shows(images, [prompt for prompt in prompts for _ in range(8)]).mean() < 0.7


# ---- it edits ---------------------------------------------------------------------------------------------------------

STOCK_CALL = {"height": 128, "width": 128, "num_inference_steps": 6, "guidance_scale": 1.0}


def read_codes(pipe, images):
    """The codes (B, 16) of pictures by the model's own vision tower and quantiser."""
    policy = pipe.vision_language_encoder
    inputs = pipe.processor.image_processor(images, return_tensors="pt")
    with torch.no_grad():
        features = policy.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        return policy.get_image_tokens(features).view(len(images), 16)


def twice(codes):
    """What the decoder wants: each code (B, 16) for 2x2 of its own (B, 64)."""
    return codes.view(-1, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


def test_the_tower_reads_the_codes_that_the_model_was_taught(pipe):
    """In one cell of 3,840 the processor's interpolation, which looks beyond the cell, decides for a code much alike."""
    pictures, pixels, codebook = make.dataset()
    taught = make.encode(pixels, codebook, 4)
    codes = read_codes(pipe, [make.draw(*attributes, radius=radius) for attributes, radius in pictures])
    assert len(taught.unique()) > 200 and (codes != taught).sum() <= 1


def test_prompts_of_the_tiny_model(pipe):
    """A caption reads as it did before the model could edit; a wish has room for 16 codes of its source."""
    policy, blank = pipe.vision_language_encoder, Image.new("RGB", (128, 128))
    ids, positions = make.read_prompt(policy, pipe.processor, RED_CIRCLE)
    trained_on, trained_positions, count = train.encode_prompt(pipe.processor, RED_CIRCLE, 128, 128)
    caption = "1155 1222 1533 1516 1426 1425 1517 1429 1156 1153 1177 1460 1154 1153 1442 1472 1154 1024"
    assert ids.tolist() == trained_on.tolist() == [int(number) for number in caption.split()]
    assert torch.equal(positions, trained_positions) and count == 256 + 16
    ids, positions = make.read_prompt(policy, pipe.processor, "make it blue", blank)
    wish = "1155 1024" + 16 * " 1152" + " 1025 1234 1222 1232 1226 1378 1230 1241 1531 1156 1153 1177 1460 1154 1024"
    assert ids.tolist() == [int(number) for number in wish.split()]
    assert positions.shape == (3, len(ids) + 16), "no preview"


def test_an_edit_by_teacher_forcing_is_that_of_the_stock_generate(pipe):
    policy, source = pipe.vision_language_encoder, make.draw("circle", "red", "pink")
    ids, positions = make.read_prompt(policy, pipe.processor, "make it blue", source)
    ids = ids.masked_scatter(ids == policy.config.image_token_id, read_codes(pipe, [source]))
    content = [{"type": "image", "image": source}, {"type": "text", "text": "make it blue"}]
    inputs = pipe.processor.apply_chat_template(
        [[{"role": "user", "content": content}]], tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"target_h": 128, "target_w": 128},
    )  # fmt: skip
    torch.manual_seed(0)
    written = policy.generate(**inputs, max_new_tokens=16, output_logits=True, return_dict_in_generate=True)
    policy.model.rope_deltas = policy.model._cached_decode_position_ids = None  # else they stay with the model
    tokens = written.sequences[:, len(ids) :]  # (1, 16)
    logits = torch.stack(written.logits, dim=1)[..., : make.NUM_CODES]  # (1, 16, 1024)
    stock = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def forced(position_ids):
        read = torch.cat([ids.unsqueeze(0), tokens], dim=1)
        with torch.no_grad():
            codes = slice(0, make.NUM_CODES)
            return grpo.get_per_token_logprobs(policy, read, 16, position_ids=position_ids, allowed_ids=codes)

    torch.testing.assert_close(forced(positions), stock, rtol=0, atol=1e-3)
    shifted = positions.clone()
    shifted[:, len(ids) :] += 1
    assert (forced(shifted) - stock).abs().max() > 1e-2, "a position matters"


def test_the_decoder_paints_with_a_source_and_without(pipe):
    """Its codes alone say what it paints: a source that the policy has misread does not break the picture."""
    wishes, sources, targets = lines("edits")[:8], pictures("sources")[:8], pictures("edit-targets")[:8]
    call = {**STOCK_CALL, "prompt": wishes, "prior_token_ids": twice(read_codes(pipe, targets))}
    call["latents"] = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    painted = [pipe(**call).images]
    for others in (sources, sources[::-1]):
        codes = list(twice(read_codes(pipe, others)))
        grids = [torch.tensor([[1, 8, 8]])] * 8
        call |= {"image": [[each] for each in others], "prior_token_image_ids": codes, "source_image_grid_thw": grids}
        painted.append(pipe(**call).images)
    for images in painted:
        assert check.shows(images, wishes, sources=sources).all()
    assert painted[0][0].tobytes() != painted[1][0].tobytes() != painted[2][0].tobytes(), "the source is not left out"


def test_the_readme_edits_a_picture(tmp_path, monkeypatch):
    """Its two snippets, one after the other; half of the edits by what they leave behind are right."""
    snippets = re.findall(r"```python\n(.*?)```", (TINY / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "readme.py").write_text("import torch\ntorch.manual_seed(0)\n" + "\n".join(snippets))
    monkeypatch.chdir(ROOT)
    names = runpy.run_path(str(tmp_path / "readme.py"))
    assert check.describe(names["image"]) is not None and check.describe(names["edited"]) is not None
    wishes, sources = lines("edits")[:16] * 3, pictures("sources")[:16] * 3
    images = names["pipe"](wishes, image=[[source] for source in sources], **STOCK_CALL).images
    assert np.mean([check.describe(image) is not None for image in images]) > 0.85
    assert 0.3 < check.shows(images, wishes, sources=sources).mean() < 0.8


def test_the_readme_still_needs_its_three_lines(pipe):
    """When this fails, diffusers or transformers has mended the call: take them out of README.md and the cards."""
    with pytest.raises(RuntimeError, match=r"to have 48 channels"):
        pipe("make it blue", image=[make.draw("circle", "red", "pink")], **STOCK_CALL)


@pytest.fixture
def first_codes(monkeypatch):
    """Pictures whose preview is only begun: nonsense, painted in a moment."""
    encode = train.encode_prompt

    def encode_prompt(*arguments):
        ids, positions, count = encode(*arguments)
        count = min(count, 20)
        return ids, positions[:, : len(ids) + count], count

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
    """Of the first two prompts and edits one picture is right, one of the wrong shape; all others are blank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check.py", "--samples", "2", "--sheet", str(tmp_path / "sheet.png")])
    painted, seeds = [], []

    def paint(pipe, prompt, tokens, settings, seed, source):
        painted.append(prompt)
        seeds.append(seed)
        right = check.wanted(prompt, source and source.image)
        wrong = (next(shape for shape in make.SHAPES if shape != right[0]), *right[1:])
        shown = [make.draw(*words) for words in (right, wrong)]
        return shown if len(painted) <= 2 or 48 < len(painted) <= 50 else [Image.new("RGB", (128, 128))] * 2

    monkeypatch.setattr(train, "paint", paint)
    assert check.main() == 0
    captions, held_out, edits, held_out_edits = capsys.readouterr().out.splitlines()[-4:]
    assert painted == [line for name in ("prompts", "heldout", "edits", "heldout-edits") for line in lines(name)]
    assert len(set(seeds[:32])) == 32
    for name, words in (("prompts", captions), ("edits", edits)):
        assert words == f"{name}.txt: 2/64 right = 3.1% (shape 3%, colour 6%, background 6%)"
    assert held_out.startswith("heldout.txt: 0/32 right = 0.0%")
    assert held_out_edits.startswith("heldout-edits.txt: 0/32 right = 0.0%")
    assert Image.open(tmp_path / "sheet.png").width > 3 * 128
    assert not Path("check.png").exists()


def test_the_judge_of_a_run_does_not_import_the_trainer_again(monkeypatch):
    """train.py is __main__ then, and would be loaded a second time."""
    for name in ("train", "make"):
        monkeypatch.delitem(sys.modules, name)
    assert runpy.run_path(str(TINY / "check.py"))["shows"]([make.draw("circle", "red", "pink")], [RED_CIRCLE]) == 1
    assert "train" not in sys.modules
