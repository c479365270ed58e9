"""A whole GRPO trainer for GLM-Image: model, adapter, loop, and a judge before and after.

    python examples/pictures.py

It trains the tiny model, in three minutes of one CPU core, and overwrites runs/pictures. train.py,
with another learning rate and other prompts, adds what long runs need, such as checkpoints.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__" and len(sys.argv) > 1:  # it takes no flags
    print(__doc__)
    sys.exit()

import random

import torch

from glm_image.model import TINY, GlmImage, load
from grpo import GRPO, set_advantages
from inputs import load_from_file
from inputs.prompts import evenly, read_file
from runtime.settings import parse_settings
from viewer.sheets import draw_grid

GROUP_SIZE, PROMPTS_PER_STEP, STEPS = 4, 16, 20
torch.set_num_threads(1)
settings = parse_settings(["--model", TINY])  # the defaults of train.py
prompts = read_file(settings.prompts)  # such as "three yellow squares"
held_out = evenly(read_file(settings.eval_prompts), 48)
reward = load_from_file("tiny-glm-image/check.py:facts")  # the share that is shown
judge = load_from_file("tiny-glm-image/check.py:correct")  # 1 if all is shown, else 0

# The pipeline of diffusers: its language model gets a LoRA adapter, all else is frozen.
glm_image = GlmImage(load(settings.model, torch.device("cpu")))
glm_image.prepare_training(settings, torch.device("cpu"))
model = glm_image.language_model
optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.99), eps=1e-15, weight_decay=0)
trainer = GRPO(model, optimizer, settings, allowed_ids=glm_image.codes())


def sample_and_paint(batch, seed):
    """Groups, their pictures, and the caption of each picture."""
    groups = trainer.sample(glm_image.encode(batch, settings), GROUP_SIZE, seed)
    images = []
    for i, (prompt, group) in enumerate(zip(batch, groups)):
        latents = glm_image.paint(prompt, group.tokens, settings, seed + i)
        images += glm_image.to_images(latents, settings.micro_batch_size)
    return groups, images, [prompt.text for prompt in batch for _ in range(GROUP_SIZE)]


def evaluate(when):
    _, images, captions = sample_and_paint(held_out, seed=2**29)
    verdicts = judge(images, captions)
    print(f"{when}: {verdicts.mean():.0%} of {len(images)} held-out pictures are correct")
    cells = [(image, "", verdict == 0) for image, verdict in zip(images, verdicts)]
    return [cells[i : i + GROUP_SIZE] for i in range(0, len(cells), GROUP_SIZE)]


before = evaluate("before")
for step in range(STEPS):
    batch = random.Random(step).sample(prompts, PROMPTS_PER_STEP)
    groups, images, captions = sample_and_paint(batch, seed=step * len(batch))  # parts 1 and 2
    rewards = torch.as_tensor(reward(images, captions))
    set_advantages(groups, rewards)  # 3. z-scores within each group
    trainer.add_reference(groups)  # 4. log-probs with the adapter off
    trainer.update(groups)  # 4. with the adapter on; 5. the clipped loss; 6. AdamW
    print(f"step {step + 1}: reward {rewards.mean():.3f}")
after = evaluate("after")

model.save_pretrained("runs/pictures")
rows = [(prompt.text, [x, y]) for prompt, x, y in zip(held_out[:6], before, after)]
draw_grid(["before", "after"], rows, "red: wrong").save("runs/pictures/before-after.png")
