"""Cheaper paintings: which painters are tried, how they agree, guidance in a part of the steps."""

import numpy as np
import pytest
import torch
from conftest import QUICK, prompts_of, tiny_settings

from benchmarks import painters
from glm_image.model import GlmImage


def test_painters_come_by_their_passes():
    settings = tiny_settings("--guidance-scale 1.5 --guidance-steps 1")
    found = painters.painters(settings)
    passes = [each for each, *_ in found]
    assert passes == sorted(passes) and passes[0] == 1 and passes[-1] == 24
    by_flags = {words: own for _, words, own in found}
    own = by_flags["--decode-steps 6 --guidance-scale 1.5 --guidance-steps 3"]
    assert (own.decode_steps, own.guidance_scale, own.guidance_steps) == (6, 1.5, 3)
    assert by_flags["--decode-steps 12 --guidance-scale 1.5"].guidance_steps is None
    assert len(painters.painters(tiny_settings())) == len(painters.STEPS)


def test_agreement_by_hand():
    one, other = np.array([1.0, -1, 0, 1]), np.array([1.0, 1, 0, 1])
    assert painters.agreement(one, other) == pytest.approx((1 / 3, 8 / 9 / 3**0.5, 2 / 3))
    assert np.isnan(painters.agreement(np.zeros(2), np.zeros(2))[0])


def test_the_cheapest_within_reach_is_told_by_a_ceiling_of_another_noise(
    quick, monkeypatch, capsys
):
    """Of 16 signs, those that each painter has wrong. The ceiling is 0.75 +- 0.11, and 5/8 too
    low."""

    def painted(run, settings, rewards, prompts, groups, seed):
        wrong = {1: 4, 2: 3, 3: 2}.get(settings.decode_steps, 0) + 2 * (seed != settings.seed)
        return {"a": np.repeat([-1.0, 1.0], [wrong, 16 - wrong])}, 0

    monkeypatch.setattr(painters, "painted", painted)
    painters.main(*QUICK, "--eval-decode-steps", "6")
    *_, last = lines = capsys.readouterr().out.splitlines()
    (ceiling,) = (line for line in lines if "another noise" in line)
    assert ceiling.endswith("| 0.750 +- 0.109, 88% |")
    assert last.endswith("of the ceiling: --decode-steps 3 --guidance-scale 1.0")


@pytest.mark.parametrize("steps, passes", [(None, 6), (1, 4), (2, 5)])
def test_guidance_ends_after_its_steps(pipe, steps, passes):
    """Passes of the decoder for three denoising steps; an evaluation guides in all."""
    settings = tiny_settings("--decode-steps 3 --guidance-scale 1.5 --eval-decode-steps 3")
    settings.guidance_steps, settings.eval_guidance_scale = steps, 1.5
    glm_image, calls = GlmImage(pipe), []
    hook = glm_image.pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    (prompt,) = prompts_of("a ring")
    ((*_, length),) = glm_image.encode([prompt], settings)
    tokens = torch.zeros(1, length, dtype=int)
    glm_image.paint(prompt, tokens, settings, 0)
    glm_image.paint(prompt, tokens, settings.for_evaluation(), 0)
    hook.remove()
    assert len(calls) == passes + 6
