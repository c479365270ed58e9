"""README's command whole: README_RUN=runs/1 pytest tests/test_readme.py"""

import os

import pytest
from conftest import records

RUN = os.environ.get("README_RUN")
if RUN:
    RUN = os.path.abspath(RUN)  # a test's own folder is the working one
CORRECT = "reward/correct"


@pytest.mark.skipif(not RUN, reason="README_RUN names no run of README's command")
def test_the_tiny_model_learns_as_readme_says():
    """From 54% correct held-out pictures to 95%, with room for another CPU's rounding."""
    before, *_, after = records(f"{RUN}/evaluation.jsonl")
    shares = [each["held out"][CORRECT][0] for each in (before, after)]
    assert shares[0] == pytest.approx(0.54, abs=0.01) and shares[1] >= 0.88
