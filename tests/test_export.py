"""An exported run: a stock pipeline without adapters that does what base and adapters do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY
from diffusers import GlmImagePipeline
from safetensors.torch import load_file

from runtime import export

LEARN = ["--train", "both", "--paintings", "2", "--decode-steps", "2", "--lr", "0.05", "--decoder-lr", "0.05"]
PROMPT = "a red circle"


def painted(pipe):
    """As any tool would call it: what is painted hangs on all that was learned."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 1.5}
    torch.manual_seed(0)
    return pipe(PROMPT, generator=generator, output_type="pt", **sizes).images


def weights_of(folder, part):
    (file,) = Path(folder, part).glob("*.safetensors")
    return load_file(file)


@pytest.fixture
def run(quick):
    assert quick(*LEARN, "--steps", "2", "--out", "run") == 0
    return Path("run")


def test_merged_is_base_and_adapter(run, pipe):
    assert export.main(["run", "merged"]) == 0
    stock = GlmImagePipeline.from_pretrained(str(TINY), dtype=torch.float32)
    stock.vision_language_encoder.load_adapter("run/adapter")
    stock.transformer.load_lora_adapter("run/decoder-adapter", prefix=None, use_safetensors=True)
    merged = GlmImagePipeline.from_pretrained("merged", dtype=torch.float32)
    assert not [name for name, _ in merged.vision_language_encoder.named_parameters() if "lora" in name]
    torch.testing.assert_close(painted(merged), painted(stock), atol=2e-3, rtol=0)
    assert (painted(merged) - painted(pipe)).abs().max() > 0.05, "something was learned"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_rounded_once(run, dtype):
    """From float64, layer by layer; what has no adapter stays as it was, bit for bit."""
    base = GlmImagePipeline.from_pretrained(str(TINY), dtype=dtype)
    base.save_pretrained("base")
    settings = json.loads(Path("run/settings.json").read_text())
    Path("run/settings.json").write_text(json.dumps(settings | {"model": "base"}))
    assert export.main(["run", "merged"]) == 0
    scale = settings["lora_alpha"] or 2 * settings["lora_rank"]
    for part, file in (
        ("vision_language_encoder", "run/adapter/adapter_model.safetensors"),
        ("transformer", "run/decoder-adapter/pytorch_lora_weights.safetensors"),
    ):
        adapter = {key.removeprefix("base_model.model."): x.double() for key, x in load_file(file).items()}
        before, after = weights_of("base", part), weights_of("merged", part)
        assert before.keys() == after.keys()
        changed = 0
        for key, weight in before.items():
            down = adapter.get(key.removesuffix("weight") + "lora_A.weight")
            if down is None:
                assert torch.equal(after[key], weight), key
                continue
            up = adapter[key.removesuffix("weight") + "lora_B.weight"]
            expected = weight.double() + scale / settings["lora_rank"] * up @ down
            assert after[key].dtype == dtype
            wrong = after[key] != expected.to(dtype)
            assert (after[key].double() - expected).abs().max() < (1e-6 if dtype is torch.float32 else 0.01)
            assert dtype is torch.float32 or wrong.double().mean() < 0.001, "a tie in float32 is none in float64"
            changed += 1
        assert changed == len(adapter) / 2 > 0


def test_a_second_stage_exports_the_half_that_it_did_not_train(run, quick):
    """Its codes went on learning with the decoder of the first stage."""
    assert quick("--adapter", "run", "--steps", "1", "--lr", "0.05", "--temperature", "4", "--out", "second") == 0
    assert export.main(["second", "merged"]) == 0 and export.main(["run", "first"]) == 0
    second, first, base = (weights_of(folder, "transformer") for folder in ("merged", "first", TINY))
    assert all(torch.equal(second[key], first[key]) for key in first)
    assert any(not torch.equal(second[key], base[key]) for key in first)
    codes = [weights_of(folder, "vision_language_encoder") for folder in ("merged", "first")]
    assert any(not torch.equal(codes[0][key], codes[1][key]) for key in codes[0])


def test_what_cannot_be_exported_is_one_line(run, capsys):
    settings = json.loads(Path("run/settings.json").read_text())
    shutil.copytree("run", "int8")
    Path("int8/settings.json").write_text(json.dumps(settings | {"base": "int8"}))
    shutil.copytree("run", "unended")
    shutil.rmtree("unended/adapter")
    shutil.rmtree("unended/decoder-adapter")
    shutil.copytree("run", "homeless")
    Path("homeless/settings.json").write_text(json.dumps(settings | {"model": "nowhere/at-all"}))
    Path("taken").mkdir()
    for source, folder, words in (
        ("int8", "new", "int8 was trained on a base rounded to int8"),
        ("unended", "new", "there is no adapter in unended"),
        ("nowhere", "new", "cannot read the settings of the run nowhere"),
        ("run", "taken", "taken exists already"),
        ("homeless", "new", "cannot load nowhere/at-all"),
    ):
        capsys.readouterr()
        assert export.main([source, folder]) == 2
        assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not Path("new").exists()
