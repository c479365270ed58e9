"""What rewards need of a GPU, against models of the released sizes without content: no network, no
GPU."""

import functools
from unittest.mock import patch

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
)

import rewards
from benchmarks.memory import META, Alive
from reward_models.lpips import Lpips
from runtime.gpu import NEEDED, scoring_memory


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """As on a GPU, without a matrix of scores."""
    return torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)


def peak(model, work):
    """Bytes alive at most, beside the weights."""
    alive = Alive([model])
    with (
        META,
        alive,
        torch.no_grad(),
        patch("torch.nn.functional.scaled_dot_product_attention", attention),
    ):
        work(model)
    return alive.peak


def weights(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def clip(text, vision, layers, heads, dims):
    """By the sizes in the config of its repository, in float32."""
    size = lambda width, depth, heads: {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
    }
    config = CLIPConfig(
        text_config=size(text, layers[0], heads[0]) | {"vocab_size": 49408},
        projection_dim=dims,
        vision_config=size(vision, layers[1], heads[1]) | {"image_size": 224, "patch_size": 14},
    )
    with META:
        return CLIPModel(config).eval()


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("clip", (768, 1024, (12, 24), (12, 16), 768)),  # openai/clip-vit-large-patch14
        (
            "pickscore",
            (1024, 1280, (24, 32), (16, 16), 1024),
        ),  # laion/CLIP-ViT-H-14-laion2B-s32B-b79K
    ],
)
def test_memory_of_clip_is_that_of_its_sizes(name, sizes):
    model = clip(*sizes)
    look = lambda model: model(torch.zeros(16, 77, dtype=torch.long), torch.zeros(16, 3, 224, 224))
    work = peak(model, look)
    assert weights(model) + work < scoring_memory(name, 16) < 1.02 * (weights(model) + work)
    assert scoring_memory(name, 64) - scoring_memory(name, 16) == pytest.approx(3 * work, rel=0.05)


def test_memory_of_smolvlm_is_that_of_its_sizes():
    """A pass over 8 pictures of 17 tiles; of edits, 4 questions about two pictures."""
    text = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
    }
    text |= {
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 49155,
        "pad_token_id": 2,
    }
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
    }
    vision |= {"patch_size": 14, "image_size": 384}
    with META:
        model = Idefics3ForConditionalGeneration(
            Idefics3Config(
                text_config=text, vision_config=vision, scale_factor=3, image_token_id=49153
            )
        )
    model = model.to(torch.bfloat16).eval()

    def look(model):
        tiles = torch.zeros(8 * 17, 3, 384, 384)  # made of float32, then cast
        tower = model.model.vision_model
        x = tower.embeddings.patch_embedding(tiles.bfloat16()).flatten(2).transpose(1, 2)
        for layer in tower.encoder.layers:
            x = layer(x, None)
        model.model.connector(tower.post_layernorm(x))

    def read(model, rows, length):
        ids = {"position_ids": torch.zeros(rows, length, dtype=torch.long), "use_cache": False}
        mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
        model.model.text_model(
            inputs_embeds=torch.zeros(rows, length, 2048).bfloat16(), attention_mask=mask, **ids
        )

    towers = peak(model, look)
    for rows, length in ((8, 1510), (4, 2960)):
        # The peak is the vision tower's.
        assert peak(model, functools.partial(read, rows=rows, length=length)) < towers
    for name in ("vqa", "edit"):
        assert weights(model) + towers < scoring_memory(name, 16) < 1.03 * (weights(model) + towers)
    assert scoring_memory("vqa", 16) == scoring_memory("vqa", 64)  # passes are of one size


def test_memory_of_lpips_is_that_of_a_pair(monkeypatch):
    sizes = {
        0: (64, 3, 11, 11),
        3: (192, 64, 5, 5),
        6: (384, 192, 3, 3),
        8: (256, 384, 3, 3),
        10: (256, 256, 3, 3),
    }

    def empty(source, file):
        found = {f"features.{n}.weight": torch.empty(shape) for n, shape in sizes.items()}
        found |= {f"features.{n}.bias": torch.empty(shape[0]) for n, shape in sizes.items()}
        return found | {
            f"lin{i}.model.1.weight": torch.empty(1, n[0], 1, 1)
            for i, n in enumerate(sizes.values())
        }

    monkeypatch.setattr("reward_models.lpips.load_weights", empty)
    with META:
        model = Lpips("", "")
    look = lambda model: model.distance(torch.zeros(3, 1024, 1024), torch.zeros(3, 1024, 1024))
    assert weights(model) + peak(model, look) < scoring_memory("lpips", 64) < 0.15e9


def test_memory_is_that_of_the_largest_reward_for_each_takes_its_turn(tmp_path):
    assert (
        scoring_memory("ssim:1,mse:1", 16)
        == scoring_memory("text,mine.py:own:2", 16)
        == scoring_memory("", 16)
        == 0
    )
    assert (
        scoring_memory("pickscore:1,vqa:0.5", 16)
        == scoring_memory("vqa", 16)
        > scoring_memory("pickscore", 16)
    )
    assert set(NEEDED) == {
        name for name, made in rewards.REWARDS.items() if isinstance(made, tuple)
    } - {"text"}
    for name, size in (
        ("model-1.safetensors", 3000),
        ("model-2.safetensors", 4000),
        ("notes.txt", 9),
    ):
        (tmp_path / name).write_bytes(bytes(size))
    assert scoring_memory(f"clip={tmp_path}:2", 2) == 7000 + 2 * 18e6
