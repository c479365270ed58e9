"""Models that score pictures: a file for each type of reward. rewards.py loads them by name."""

import re
from contextlib import contextmanager
from pathlib import Path

import torch

from inputs import download

CHINESE = re.compile("[\u4e00-\u9fff]")
SMALL = "*.json", "*.txt", "*.jinja"  # files of a model beside its weights


@contextmanager
def lend_gpu(model):
    """Lends the GPU, if any, to a model while it scores: policy and decoder need the memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    homes = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, home in homes:
            tensor.data = home.to(device)
        with torch.no_grad():
            yield device
    finally:
        # The copies are dropped: weights that have not changed need no way back.
        for tensor, home in homes:
            tensor.data = home


def load_weights(source, file):
    if source.startswith("https://"):
        return torch.hub.load_state_dict_from_url(
            source, map_location="cpu", check_hash=True, weights_only=True
        )
    return torch.load(Path(download(source, file), file), map_location="cpu", weights_only=True)


def load_pretrained(kind, source, dtype):
    only_data = {"weights_only": True, "trust_remote_code": False}
    folder = download(source, *SMALL, "*.safetensors")
    if not any(Path(folder).glob("*.safetensors")):
        folder = download(source, *SMALL, "*.bin")
    model, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **only_data)
    if report["missing_keys"]:  # which transformers fills with noise
        raise ValueError(f"{source} lacks {min(report['missing_keys'])}")
    return model
