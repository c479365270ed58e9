r"""Train GLM-Image to edit pictures: a run of train.py whose prompts are wishes about a picture.

    python examples/train_edits.py --model tiny-glm-image     # "make the triangle red"
    python examples/train_edits.py --sources photos --prompts wishes.txt \
        --eval-sources others --eval-prompts others.txt \
        --targets none --eval-targets none --reward edit:1,keep:0.2

photos/ holds a picture per line of wishes.txt, sorted by name. The flags of the last line are
GLM-Image's defaults; the tiny model's compare with targets that it draws. (Without a download:
--reward keep.) Takes the flags of train.py, and knows two more rewards, keep and edit. What edits
need beside captions: glm_image/editing.py.
"""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import train
from glm_image.editing import EditingGlmImage, read_edits, read_sources
from glm_image.model import load
from runtime.settings import TINY, Settings, flag


@dataclass(kw_only=True)
class EditSettings(Settings):
    """The tiny model draws its own pictures to edit; for another, all four flags are needed."""

    script = "examples/train_edits.py"
    section = "edits"
    overrides: ClassVar = {"reward": "edit:1,keep:0.2", "eval_reward": "aesthetic"}

    sources: str = flag(
        None,
        "folder with the picture that each prompt changes, sorted by name",
        group="edits",
        is_path=True,
    )
    eval_sources: str = flag(
        None,
        "folder with the picture that each held-out prompt changes",
        is_path=True,
    )


class EditRun(train.Run):
    Settings = EditSettings
    Model = EditingGlmImage
    read_prompts = staticmethod(read_edits)

    @classmethod
    def load(cls, settings, data, device, turns):
        """As in train.py, after the model has read all sources."""
        tiny = Path(settings.model).resolve() == Path(TINY)
        # In bfloat16 the tiny model's vision tower reads a third of the codes wrong.
        pipe = load(settings.model, device, **({"dtype": torch.float32} if tiny else {}))
        read_sources(pipe, [*data.prompts, *data.held_out], device)
        return super().load(settings, data, device, turns, pipe)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(train.main(run_class=EditRun))
