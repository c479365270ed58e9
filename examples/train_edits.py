r"""Train GLM-Image to edit pictures: a run of train.py whose prompts are wishes about a picture.

    python examples/train_edits.py --model tiny-glm-image     # "make the triangle red"
    python examples/train_edits.py --sources photos --prompts wishes.txt \
        --eval-sources others --eval-prompts others.txt --reward edit:1,keep:0.2

photos/ holds a picture per line of wishes.txt, sorted by name. Or --prompts names a .jsonl file
with rows like {"prompt": "make it red", "source": "photo.png"}: docs/rewards.md. That reward is
GLM-Image's default; the tiny model's compares with targets that it draws. (Without a download:
--reward keep --eval-reward none.) Takes the flags of train.py. What edits need beside captions:
glm_image/editing.py.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import devices
import train
from glm_image.editing import EditingGlmImage, read_edits, read_sources
from glm_image.model import TINY, is_tiny, load
from inputs import Own
from runtime.data import read_inputs
from runtime.settings import Settings, parse_settings
from runtime.terminal import exit_code, leave


@dataclass(kw_only=True)
class EditSettings(Settings):
    """The tiny model draws its own pictures to edit.

    Another needs --prompts and --eval-prompts, and --sources and --eval-sources where rows of these
    do not name their pictures.
    """

    # ---- edits

    # folder with the pictures that the prompts change, as --targets has those to resemble
    sources: str = None
    # the same of the held-out prompts
    eval_sources: str = None

    reward: str = "edit:1,keep:0.2"
    eval_reward: str = "aesthetic"

    tiny: ClassVar[dict] = Settings.tiny | {
        "sources": Own(f"{TINY}/world.py:edit_sources"),
        "prompts": Own(f"{TINY}/edits.txt"),
        "targets": Own(f"{TINY}/world.py:edit_targets"),
        "reward": "ssim:1,mse:1",
        "eval_sources": Own(f"{TINY}/world.py:heldout_sources"),
        "eval_prompts": Own(f"{TINY}/heldout-edits.txt"),
        "eval_targets": Own(f"{TINY}/world.py:heldout_targets"),
        "steps": 20,
        "lr": 2e-3,
        "warmup_steps": 0,
        "eval_every": 10,
    }


def load_run(data, settings, plan, adapters):
    """As in train.py, after the model has read all sources."""
    # In bfloat16 the tiny model's vision tower reads a third of the codes wrong.
    dtype = {"dtype": torch.float32} if is_tiny(settings.model) else {}
    pipe = load(settings.model, plan.device, **dtype)
    read_sources(pipe, [*data.prompts, *data.held_out], plan.device)
    return train.Run.load(settings, plan, adapters, EditingGlmImage, pipe)


@exit_code
def main(arguments=None):
    settings = parse_settings(arguments, EditSettings, __file__)
    plan, data = devices.plan(settings), read_inputs(settings, read_edits)
    return train.train(settings, plan, data, script=__file__, load_run=partial(load_run, data))


if __name__ == "__main__":
    leave(main())
