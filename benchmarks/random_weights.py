"""Writes a model of GLM-Image's released sizes with random weights: a trial without the download.

    python benchmarks/random_weights.py random
    python train.py --model random --reward examples/my_reward.py:blueness --eval-reward none \
        --steps 1 --eval-count 1

Time and memory do not depend on the values of the weights. The folder takes 33 GB. The tokenizers
and the scheduler are those of the tiny model.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from glm_image.model import TINY
from glm_image.weights import without_weights
from inputs import find_path

# All else is the default of the classes. The policy's vision tower, which does not train, has one
# layer here.
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
SIZES = {
    "vision_language_encoder": {
        "text_config": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        "vision_config": {"depth": 1},
    },
    "transformer": {"num_layers": 30, "num_attention_heads": 32, "attention_head_dim": 128},
    "text_encoder": {
        "d_model": 1472,
        "d_kv": 64,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
        "vocab_size": 384,
        "feed_forward_proj": "gated-gelu",
    },
    "vae": {
        "block_out_channels": [128, 512, 1024, 1024],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 3,
        "mid_block_add_attention": False,
        "latent_channels": 16,
        "latents_mean": [0] * 16,
        "latents_std": [1] * 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
}


def main(folder):
    # On a CPU it takes minutes.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left_out = shutil.ignore_patterns("*.safetensors", "*.png", "*.txt", "*.py")
    shutil.copytree(find_path(TINY), folder, ignore=left_out, dirs_exist_ok=True)
    torch.set_default_dtype(torch.bfloat16)
    for name, sizes in SIZES.items():
        with torch.device(device):
            without_weights(name, sizes).save_pretrained(Path(folder, name))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    main(parser.parse_args().folder)
