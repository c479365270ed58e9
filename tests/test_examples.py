"""What the README tells people to copy from runs, and learns."""

import importlib.util

import numpy as np
from conftest import ROOT


def test_a_text_model_learns_by_grpo_alone():
    spec = importlib.util.spec_from_file_location("text_model", ROOT / "examples" / "text_model.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    means = example.train(steps=20)
    assert np.mean(means[:3]) < 0.7 and np.mean(means[-5:]) > 0.8
