"""Editing: a picture and a wish go in, against the stock classes; runs on edits; rewards that see
the source."""

import json
import re
import runpy
from pathlib import Path

import make
import numpy as np
import pytest
import torch
import train_edits
import world
from conftest import (
    BLUE_CROSS,
    CPU,
    QUICK,
    RED_CIRCLE,
    ROOT,
    TINY,
    chat_inputs,
    error_from,
    load_once,
    painted,
    prompts_of,
    records,
    seeded,
    short_runs,
    tiny_settings,
)
from PIL import Image
from test_vqa import bounded, by_generate, pictures, tiny_model

import rewards
import train
from glm_image import editing
from glm_image.editing import (
    EditingGlmImage,
    encode_edit,
    read_sources,
)
from glm_image.model import RELEASE, GlmImage, for_decoder
from inputs import UserError
from inputs.prompts import Prompt
from rewards import parse_rewards

WISH = "make the circle blue"
# (height, width) of the source and of the result: alike, the source larger, wide to tall.
SIZES = [((64, 64), (64, 64)), ((96, 160), (64, 64)), ((64, 192), (160, 64))]


@pytest.fixture(scope="module")
def stock():
    """The stock pipeline with the three lines of docs/decoder.md around it, in a process's own copy."""
    pipe = load_once(str(TINY), CPU)
    pipe.set_progress_bar_config(disable=True)
    policy = pipe.vision_language_encoder
    read, channels = policy.get_image_tokens, policy.config.vision_config.hidden_size
    policy.get_image_tokens = lambda joined, grids: read(joined.unflatten(0, (-1, channels)), grids)
    return pipe


def source_of(pipe, height, width, scene=RED_CIRCLE):
    """A Prompt with a source of this size that the model has read."""
    given = Prompt(WISH, source=world.draw(scene).resize((width, height)))
    model = pipe.vision_language_encoder
    own = model.__dict__.pop("get_image_tokens", None)  # without the three lines
    read_sources(pipe, [given], CPU)
    if own is not None:
        model.get_image_tokens = own
    return given


def forget(pipe):
    """What generate() leaves in the model."""
    pipe.vision_language_encoder.model.rope_deltas = None
    pipe.vision_language_encoder.model._cached_decode_position_ids = None


# ---- a prompt with a picture ---------------------------------------------------------------------


@pytest.mark.parametrize("given, size", SIZES)
def test_codes_ids_and_positions_are_the_models_own(stock, given, size):
    edit = source_of(stock, *given)
    ids, positions, count = encode_edit(stock.processor, edit, *size)
    model = stock.vision_language_encoder.model
    # Nothing is left in the model.
    assert model.rope_deltas is None and model._cached_decode_position_ids is None

    inputs = chat_inputs(stock.processor, edit.text, *size, edit.source)
    total, offset, rows, columns = stock._compute_generation_params(
        inputs["image_grid_thw"], is_text_to_image=False
    )
    assert count == total - 1 == rows * columns == size[0] * size[1] // 32**2 and offset == 0
    torch.manual_seed(0)
    _, (codes,), (grid,) = stock.generate_prior_tokens([WISH], *size, [[edit.source]])
    assert grid.tolist() == [[1, given[0] // 16, given[1] // 16]]
    doubled = for_decoder(edit.codes.view(1, given[0] // 32, given[1] // 32))
    assert torch.equal(codes, doubled[0]) and len(edit.codes.unique()) > 1

    image_id = stock.processor.image_token_id
    assert torch.equal(ids[inputs["input_ids"][0] == image_id], edit.codes)
    assert torch.equal(ids[ids != inputs["input_ids"][0]], edit.codes)  # and nothing else differs
    read, _ = model.get_rope_index(
        inputs["input_ids"], inputs["image_grid_thw"], inputs["images_per_sample"]
    )
    assert torch.equal(positions[:, : len(ids)], read[:, 0])
    assert torch.equal(positions[:, len(ids) :], model._cached_decode_position_ids[0, :, :count])
    forget(stock)


# ---- a picture from a picture --------------------------------------------------------------------


@pytest.mark.parametrize("given, size, guidance", [(*SIZES[1], "1.5"), (*SIZES[2], "1.0")])
def test_painting_is_that_of_the_stock_call(stock, given, size, guidance):
    """Its own codes, cut out by hand; its own picture from the same noise."""
    edit = source_of(stock, *given)
    height, width = size
    options = f"--height {height} --width {width} --decode-steps 2 --guidance-scale {guidance}"
    settings = tiny_settings(options)
    noise = torch.randn(1, 8, height // 8, width // 8, generator=seeded(5 + 2**31))
    expected = stock(
        WISH,
        image=[edit.source],
        latents=noise,
        generator=seeded(3),
        height=height,
        width=width,
        num_inference_steps=2,
        guidance_scale=float(guidance),
    ).images[0]
    prior = stock.generate_prior_tokens([WISH], *size, [[edit.source]], generator=seeded(3))
    tokens = prior[0].view(1, height // 16, width // 16)[:, ::2, ::2].flatten(1)
    assert tokens.max() < make.NUM_CODES
    forget(stock)
    glm = EditingGlmImage(stock)
    (found,) = glm.to_images(glm.paint(edit, tokens, settings, 5), 4)
    (without,) = painted(stock, WISH, tokens, settings, 5)[1]
    assert found.size == expected.size == (width, height)
    difference = lambda image: np.abs(np.asarray(image).astype(int) - np.asarray(expected)).max()
    assert difference(found) <= 1 < difference(without)  # the source takes part


def test_one_source_is_kept_for_a_batch(pipe):
    """Bit for bit the pictures that the pipeline paints with a copy each."""
    settings = tiny_settings("--guidance-scale 1.5 --decode-steps 2")
    edit = source_of(pipe, 128, 128)
    keeping = EditingGlmImage(load_once(str(TINY), CPU))
    keeping.prepare_training(settings, CPU)
    tokens = torch.randint(make.NUM_CODES, (4, 16), generator=seeded(0))
    kept, pictures = [], []

    def count(module, inputs, options):
        kept.append((options["kv_caches"][0].mode, len(options["kv_caches"][0].k_caches)))

    for glm in (keeping, EditingGlmImage(pipe)):
        hook = glm.pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
        images = glm.to_images(glm.paint(edit, tokens, settings, 0), 4)
        pictures.append([image.tobytes() for image in images])
        hook.remove()
    assert pictures[0] == pictures[1] and len(set(pictures[0])) == 4
    writes = [("write", 0)] * 4
    steps = [("read", 1), ("skip", 1)] * 2
    assert kept[:8] == writes + steps
    assert kept[8:] == [("write", n) for n in range(4)] + [("read", 4), ("skip", 4)] * 2


@pytest.mark.parametrize("kind", [GlmImage, EditingGlmImage])
def test_codes_go_where_the_decoder_is_once_it_has_come(pipe, monkeypatch, kind):
    """Where models take turns it waits in host memory before."""
    where = [torch.device("meta")]
    monkeypatch.setattr(type(pipe.transformer), "device", property(lambda model: where[-1]))
    glm = kind(pipe, begin=lambda part, *models: where.append(CPU))
    edit, settings = source_of(pipe, 128, 128), tiny_settings("--decode-steps 1")
    assert glm.paint(edit, torch.zeros(1, 16).long(), settings, 0).isfinite().all()


# ---- runs ----------------------------------------------------------------------------------------

FLAGS = "--sources targets --eval-sources targets --height 64 --width 64"
# By a reward that sees the sources: each picture is given its own.
OWN = """def own(images, prompts, targets, sources):
    reds = [source.getpixel((16, 16))[0] > 200 for source in sources]
    return [float(red == ("red" in prompt)) for red, prompt in zip(reds, prompts)]
"""


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The folder of a run of a step on two edits, in pictures of 4 codes."""
    folder = tmp_path_factory.mktemp("edited")
    with short_runs(folder) as run:
        Path("mine.py").write_text(OWN)
        rewards = "--reward mine.py:own:1,mse:1 --eval-reward mine.py:own"
        counts = "--steps 1 --prompts-per-step 2 --eval-count 2 --lr 1 --out run"
        assert run(FLAGS, rewards, counts) == 0
    return folder / "run"


def test_a_run_of_edits_and_what_it_leaves(edited):
    """A reward with a fourth parameter gets the sources, beside one with three."""
    (record,) = records(edited / "metrics.jsonl")
    assert record["reward/mine.py:own"] == 1 and record["max_logprob_gap"] < 1e-4
    for record in records(edited / "evaluation.jsonl"):
        assert record["reward/mine.py:own"] == [1, 0]
    assert "docs/decoder.md" in (edited / "adapter/README.md").read_text()  # how to call it
    first = world.draw(RED_CIRCLE).resize((64, 64))
    shown = Image.open(edited / "before-after.png").crop((288, 56, 288 + 144, 56 + 144))
    # The source comes first.
    difference = np.asarray(shown.resize((64, 64))).astype(int) - np.asarray(first)
    assert np.abs(difference).mean() < 5


def test_sources_go_with_their_prompts_and_sources_to_judge_by(quick, capfd, monkeypatch):
    """The same wish about two pictures is two edits. What cannot work is one line before the model
    loads."""
    first, second = (Prompt("", source=world.draw(x)) for x in (RED_CIRCLE, BLUE_CROSS))
    assert first.identity() != second.identity()
    monkeypatch.setattr(train_edits, "load", lambda *given: pytest.fail("the model is loaded"))
    for flag, folder, words in (
        ("--sources", "targets", "error: targets has 2 source pictures for"),
        ("--eval-sources", "nowhere", "error: nowhere has 0 source pictures for"),
    ):
        assert quick(flag, folder, main=train_edits.main, usual=QUICK[:2]) == 2
        assert words in capfd.readouterr().err.splitlines()[-1]
    assert not Path("runs").exists()
    settings = train_edits.EditSettings(model=RELEASE, sources="targets")
    words = "^line 2 of .*heldout.txt has no source picture: edits need --sources, --prompts,"
    with pytest.raises(UserError, match=words):
        editing.read_edits(settings, "eval_")


def test_rows_name_their_sources_where_the_tiny_model_would_draw_its_own(judged):
    rows = [{"prompt": WISH, "source": f"targets/{i}.png"} for i in (2, 1, 2)]
    write = lambda: Path("own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write()
    flags = ["--model", str(TINY), "--prompts", "own.jsonl"]
    settings = train.parse_settings(flags, train_edits.EditSettings)
    assert ".py:" in settings.sources and ".py:" in settings.eval_targets
    assert settings.targets is None  # those of the default prompts are not theirs
    sources = [edit.source.tobytes() for edit in editing.read_edits(settings)]
    red, blue = (world.draw(scene).tobytes() for scene in (RED_CIRCLE, BLUE_CROSS))
    assert sources == [blue, red, blue]
    del rows[1]["source"]
    write()
    line = error_from(editing.read_edits, settings)
    assert line.startswith("line 2 of own.jsonl has no source picture: ")


def test_the_adapter_edits_in_the_stock_pipeline(edited, tmp_path, monkeypatch):
    """By the lines of docs/decoder.md as they stand."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "decoder.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    for words, own in (
        ('"tiny-glm-image"', repr(str(TINY))),
        ('"runs/edits/adapter"', repr(f"{edited}/adapter")),
        ('"tiny-glm-image/world.py"', repr(f"{TINY}/world.py")),
    ):
        assert words in code
        code = code.replace(words, own)
    pictures = set()
    for lines in (code, re.sub(r"pipe\.vision_language_encoder\.load_adapter.*", "", code)):
        Path("lines.py").write_text(lines)
        runpy.run_path("lines.py")
        pictures.add(Path("edited.png").read_bytes())
    assert len(pictures) == 2


# ---- rewards that see the source -----------------------------------------------------------------


def test_keep_is_likeness_to_the_source():
    drawn = world.draw(RED_CIRCLE), world.draw(BLUE_CROSS)
    assert torch.equal(rewards.keep(drawn, drawn[::-1]), rewards.ssim(drawn, drawn[::-1]))


def test_edit_asks_about_both_pictures(tmp_path):
    """Log-odds by generate() from one chat with two pictures; the mean of two bounded values."""
    folder = tiny_model(tmp_path / "vlm")
    (reward,) = parse_rewards(f"edit={folder}").values()
    edit = reward.load().function
    source, one, two = pictures((64, 64), (64, 64), (48, 80))
    sources, images, wishes = [source, one], [one, two], ['make "it" blue', "x"]
    found = rewards.score({"edit": reward}, images, prompts_of(*wishes, sources=sources))["edit"]
    kept = "Is everything else in the second picture as it was in the first?"
    for value, *shown, wish in zip(found.tolist(), sources, images, ["make 'it' blue", "x"]):
        asked = (f'Has the first picture been changed as asked: "{wish}"?', kept)
        expected = np.mean([bounded(by_generate(folder, shown, each)) for each in asked])
        assert value == pytest.approx(expected, abs=1e-4)
    assert abs(found[0] - found[1]) > 1e-3
    turned = rewards.score({"edit": reward}, [source], prompts_of("x", sources=[one]))["edit"]
    assert abs(turned - edit([one], ["x"], [source])) > 1e-4  # which is the first matters
