"""Train GLM-Image's diffusion decoder with GRPO, alone or with the policy that writes the codes.

    python examples/train_decoder.py --group-size 8
    python examples/train_decoder.py --train both --group-size 4 --paintings 4

The first paints one code sequence per prompt 8 times, the second 4 of them 4 times each.

A run of train.py with a step of its own, decoder_step(), in which groups are nested: G code
sequences are compared within their prompt, and K paintings within their codes. How a painting has
probabilities: glm_image/decoder.py. Takes the flags of train.py too, and leaves the same files,
with the decoder's adapter in decoder-adapter/.
"""

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import devices
import train
from glm_image.decoder import DecoderGRPO, LearningDecoder, repeat_for_steps
from grpo import set_advantages
from inputs import UserError
from rewards import combine, score, weights_of
from runtime import ranks
from runtime.data import read_inputs
from runtime.settings import Settings, parse_settings
from runtime.terminal import exit_code, leave, option

# ---- one step: train.py's, for two that learn, one nested in the other ---------------------------


def decoder_step(run, settings, rewards, prompts, seed):
    """One step of the decoder, or of both; see grpo_step in train.py."""
    sequences, paintings = settings.sequences, settings.paintings_per_sequence  # G, K
    weights = weights_of(rewards)
    trainer, decoder_trainer = run.trainer, run.trainers["decoder-adapter"]

    # 1. sample G code sequences for each prompt
    groups = trainer.sample(run.glm_image.encode(prompts, settings), sequences, seed)

    images = []  # N*G*K, prompt after prompt, code sequence after code sequence
    of_prompts = []  # a group for each denoising step of each code sequence
    for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        # 2. paint each K times
        latents, steps = decoder_trainer.paint_paths(prompt, group.tokens, settings, seed + i)
        images += run.glm_image.to_images(latents, settings.micro_batch_size)
        of_prompts.append(steps)
    paths = [*chain(*of_prompts)]
    run.memory.begin("score")  # 2. score
    raw_rewards = score(rewards, images, prompts)

    # 3. A painting is compared among the K of the same codes, at each denoising step.
    reward = combine(raw_rewards, weights, paintings, settings.combine)
    set_advantages(paths, repeat_for_steps(reward, paths))
    # The decoder learns first, for its update takes the most memory. If memory runs out there,
    # nothing has learned yet, and the step can be made again.
    decoder_trainer.add_reference(paths)  # 4
    learned = decoder_trainer.update(paths)  # 4 to 6
    of_decoder = {f"decoder/{name}": value for name, value in learned.items()}

    metrics = {"skipped": 0}
    advantages = [steps[0].advantages for steps in of_prompts]  # of a lone code sequence
    rollout = train.Rollout(prompts, groups, images, raw_rewards, advantages)
    if settings.train == "both":
        # 3. A code sequence has the mean reward of its K paintings, among the G of its prompt. In
        # float64 the means of equal rewards are equal, whatever is NaN.
        means = {name: x.double().view(-1, paintings).nanmean(1) for name, x in raw_rewards.items()}
        set_advantages(groups, combine(means, weights, sequences, settings.combine))
        trainer.add_reference(groups)  # 4
        metrics = trainer.update(groups)  # 4 to 6
        rollout.advantages = [x.advantages.repeat_interleave(paintings) for x in groups]
        rollout.paintings = paintings

    metrics |= of_decoder
    metrics["skipped"] += of_decoder["decoder/skipped"]
    return rollout, metrics


# ---- settings ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DecoderSettings(Settings):
    # ---- the decoder

    # what learns; --group-size counts the paintings of a code sequence; with both, it counts the
    # code sequences of a prompt
    train: Literal["decoder", "both"] = "decoder"
    # with both: how often each code sequence is painted
    paintings: int = 4
    # AdamW's learning rate for the decoder's adapter
    lr: float = 1e-4
    # with both: AdamW's learning rate for the policy's adapter
    policy_lr: float = Settings.lr
    # share of a denoising step's noise that is drawn again
    noise_level: float = 0.7

    tiny: ClassVar[dict] = Settings.tiny | {
        "steps": 20,
        "lr": 1e-3,
        "policy_lr": 5e-4,
        "warmup_steps": 0,
        "eval_every": 10,
        "reward": "facts:1,near:0.1",
    }

    def __post_init__(self):
        super().__post_init__()
        if self.decode_steps == 1:
            raise UserError("--decode-steps has to be 2 or more: the last step is not drawn")
        of_both = {"paintings", "policy_lr"} & {*self.not_default()}
        if self.train == "decoder" and of_both:
            raise UserError(f"{option(min(of_both))} needs --train both: the decoder learns alone")

    @property
    def learned(self):
        both = self.train == "both"
        return ("adapter", "decoder-adapter") if both else ("decoder-adapter",)

    @property
    def sequences(self):
        """G, code sequences per prompt."""
        return self.group_size if self.train == "both" else 1

    @property
    def paintings_per_sequence(self):
        """K."""
        return self.paintings if self.train == "both" else self.group_size


# ---- the run -------------------------------------------------------------------------------------


def load_run(settings, plan=None, adapters=None, pipe=None):
    """As in train.py, with a trainer of the decoder; the policy samples, and with both learns."""
    run = train.Run.load(settings, plan, adapters, LearningDecoder, pipe, settings.policy_lr)
    decoder_trainer = DecoderGRPO(
        run.glm_image,
        train.adamw(run.glm_image.decoder, settings.lr),
        settings,
        settings.noise_level,
        settings.guidance_scale,
        average=ranks.average,
    )
    of_policy = run.trainers if settings.train == "both" else {}
    run.trainers = of_policy | {"decoder-adapter": decoder_trainer}
    return run


@exit_code
def main(arguments=None):
    settings = parse_settings(arguments, DecoderSettings, __file__)
    plan, data = devices.plan(settings), read_inputs(settings)
    return train.train(
        settings, plan, data, script=__file__, load_run=load_run, make_step=decoder_step
    )


if __name__ == "__main__":
    leave(main())
