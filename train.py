"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a laptop.

    python train.py --group-size 4
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/.
grpo_step() is one step of GRPO, its six parts in their order; evaluate() judges; train() is the
loop around both.
"""

import random
import signal
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C in the seconds that the imports take: no traceback

import torch
from diffusers import GlmImagePipeline
from transformers import set_seed

from glm_image import memory
from glm_image.decoder import DecoderGRPO, repeat_for_steps
from glm_image.model import build, load, meta_models, painting_models
from glm_image.painting import develop, encode_prompt, paint, read_sources
from grpo import GRPO, NotFinite, set_advantages
from rewards import begin_scoring, combine, score, weights_of
from runtime import UserError, checkpoints, counted, ranks
from runtime.data import load_data, read_inputs
from runtime.gpu import place, plan
from runtime.log import Phases, Record
from runtime.metrics import evaluation_metrics
from runtime.rescue import failing_together, how_to_go_on, rescued
from runtime.settings import claim_folder, deployed, parse_settings, print_start

SHOWN = 3  # before-after.png shows this many pictures per prompt, and this many prompts if the file names no kinds
# Seeds of an evaluation count up from these. Those of training (seed_of_step) go up by 1,000 per
# step, one for each prompt of all ranks, and by 10^9 per --seed: the two never meet in 500,000
# steps. Painting adds an offset to both.
SEEDS = {"training": 2**29, "held out": 2**29 + 2**20}


@dataclass
class Run:
    """What a run works with."""

    pipe: GlmImagePipeline  # the stock pipeline without its language model: it paints
    policy_trainer: GRPO  # of the language model, which writes the codes
    decoder_trainer: DecoderGRPO | None  # of the decoder, if that learns
    phase: Phases

    @property
    def trainers(self):  # by the names that checkpoints have for them
        trainers = {"codes": self.policy_trainer, "decoder": self.decoder_trainer}
        return {name: trainer for name, trainer in trainers.items() if trainer is not None}


def load_run(settings, data, device, turns):
    """The models on the device, with their trainers; and how many steps a resumed run has already
    made.

    turns: None, "pinned" or "mapped", see plan in gpu.py.
    """
    try:
        pipe = load(settings, device)
        read_sources(pipe, [*(data.prompts.sources or ()), *(data.held_out.sources or ())], device)
        pipe, policy, decoder = build(pipe, settings, device, home=None if turns else device)
        offload = place([policy.model, *painting_models(pipe)], device, policy.forward, turns)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise UserError(
            f"no memory for the weights ({str(error).splitlines()[0]}); try --offload yes"
        ) from None
    run = Run(pipe, policy, decoder, Phases(device, offload))
    begun = checkpoints.load(Path(settings.resume), run.trainers) if settings.resume else 0
    return run, begun


# ---- one step of GRPO: sample, paint and score, advantages, reference, loss, update --------------


@dataclass
class Rollout:
    """What was sampled for N prompts: G code sequences for each, K paintings of each sequence."""

    groups: list  # N Groups, of grpo.py
    denoising_steps: (
        list  # DenoisingSteps of N*G sequences, K paths each; none where nothing was drawn
    )
    images: list  # N*G*K PIL images, prompt after prompt, sequence after sequence
    raw_rewards: dict  # {name: (N*G*K,)}


def rollout(run, settings, rewards, prompts, seed):
    """The first two parts of a step, and all that an evaluation runs.

    rewards: {name: (function, weight)}. prompts: Prompts. seed: of sampling and painting.
    run.phase(name, *models) times what is within it, and first brings the models to the GPU if they
    take turns there.
    """
    with run.phase("sample", run.policy_trainer.model), failing_together(prompts.texts):
        size = settings.height, settings.width
        encoded = [
            encode_prompt(run.pipe.processor, text, *size, source)
            for text, source in prompts.with_sources()
        ]
        groups = run.policy_trainer.sample(
            encoded, settings.sequences, seed
        )  # 1. N groups of G code sequences

    images = []
    denoising_steps = []
    started = []  # for each prompt, the rewards that are scored while the next prompt is painted
    with failing_together(prompts.texts):
        for i, (text, source) in enumerate(
            prompts.with_sources()
        ):  # 2. paint each of them K times ...
            with run.phase(
                "paint", *painting_models(run.pipe)[: 3 if source else 2]
            ):  # the VAE reads a source
                latents, steps = paint_group(
                    run, settings, text, groups[i].tokens, seed + i, source
                )
            if not all(step.old_logprobs.isfinite().all() for step in steps):
                raise NotFinite([i])
            with run.phase(
                "develop", run.pipe.vae
            ):  # in a turn of its own, as it takes the most memory
                painted = [
                    x
                    for part in latents.split(settings.micro_batch_size)
                    for x in develop(run.pipe, part)
                ]
            run.phase.painted()
            images += painted
            denoising_steps += steps
            started.append(begin_scoring(rewards, painted, *prompts.take([i]).for_rewards))
        with run.phase("score"):  # ... and score every picture
            raw_rewards = score(rewards, images, *prompts.for_rewards, started)
    return Rollout(groups, denoising_steps, images, raw_rewards)


def paint_group(run, settings, text, tokens, seed, source=None):
    """Latents of G*K pictures of a prompt's code sequences (G, T), and the denoising steps that the
    decoder drew.

    With K = 1 the stock scheduler paints. It is deterministic, so there are no steps to learn from.
    """
    if settings.paintings == 1:
        return paint(run.pipe, text, tokens, settings, seed, source), []
    return run.decoder_trainer.paint_paths(text, tokens, settings.paintings, settings, seed)


def grpo_step(run, settings, rewards, prompts, seed):
    """The six parts of a step. N prompts, G code sequences for each, K paintings of each.

    By default K is 1, and only the first block below runs. G is 1 where the decoder learns alone.
    """
    G = settings.sequences
    K = settings.paintings
    rolled = rollout(run, settings, rewards, prompts, seed)  # 1 and 2
    metrics = {}

    if G > 1:
        # 3. advantages: a code sequence gets the mean reward of its paintings, compared among the G
        # of a prompt
        means = {
            name: values.view(-1, K).nanmean(1) for name, values in rolled.raw_rewards.items()
        }  # {name: (N*G,)}
        set_advantages(rolled.groups, combine(means, weights_of(rewards), G, settings.combine))
        with run.phase("reference", run.policy_trainer.model):
            run.policy_trainer.add_reference(
                rolled.groups
            )  # 4. log-probs of these codes under the reference
        with run.phase("update", run.policy_trainer.model):
            metrics |= run.policy_trainer.update(
                rolled.groups
            )  # 4. under the policy, 5. the loss, and 6. the update

    if K > 1:
        # 3. to 6. for the decoder: its paintings are compared among the K of the same codes
        combined = combine(rolled.raw_rewards, weights_of(rewards), K, settings.combine)
        set_advantages(rolled.denoising_steps, repeat_for_steps(combined, rolled.denoising_steps))
        with run.phase("decoder reference", run.pipe.transformer):
            run.decoder_trainer.add_reference(rolled.denoising_steps)
        with run.phase("decoder update", run.pipe.transformer):
            updated = run.decoder_trainer.update(rolled.denoising_steps)
        metrics |= {f"decoder/{name}": value for name, value in updated.items()}

    entropy = (
        -torch.stack([group.old_logprobs for group in rolled.groups]).mean().item()
    )  # an unbiased estimate of it
    return rolled, metrics | {"entropy": entropy}


# ---- what a step trains on -----------------------------------------------------------------------


def prompt_indices(step, settings, count):
    """Which of `count` prompts a step trains on: each once per epoch, in the order of the file or
    shuffled.

    A function of the seed and the step alone, so that a resumed run needs no state. Each rank takes
    its share.
    """
    groups = settings.prompts_per_step * ranks.count()
    places = [divmod(step * groups + i, count) for i in ranks.shard(groups)]  # (epoch, place in it)
    if settings.order == "file":
        return [place for _, place in places]
    return [
        random.Random(f"{settings.seed} {epoch}").sample(range(count), count)[place]
        for epoch, place in places
    ]


def seed_of_step(step, settings):
    """The seed of this rank's first group; the groups after it count up, on through all ranks."""
    return (settings.seed * 1_000_003 + step) * 1_000 + ranks.rank() * settings.prompts_per_step


# ---- judging -------------------------------------------------------------------------------------


def evaluate(run, settings, data, prompts, seed, stop=None):
    """Paint the prompts as deployed, from the same seeds each time: only what was learned makes a
    difference.

    stop: StopRequest; once received, this ends early and returns None. Otherwise returns what
    Record.evaluation takes.
    """
    settings = deployed(settings)
    count = len(prompts)
    num_shown = max(SHOWN, len(set(prompts.kinds or ())))  # one of each kind: see Prompts.evenly
    rewards = data.rewards | data.judges
    judged = {}  # {row: its rewards {name: (G,)}, the first pictures}
    for rows in ranks.batches(count, settings.prompts_per_step):  # as many at once as in training
        set_seed(rows[0])
        some = prompts.take([row % count for row in rows])
        rolled = rollout(run, settings, rewards, some, seed + rows[0])
        for i, row in enumerate(rows):
            own = slice(i * settings.sequences, (i + 1) * settings.sequences)
            scores = {name: values[own] for name, values in rolled.raw_rewards.items()}
            judged[row] = scores, rolled.images[own][:SHOWN] if row < num_shown else []
        if stop is not None and any(ranks.gather(stop.received)):
            return None
    judged = {row: result for part in ranks.gather(judged) for row, result in part.items()}
    raw_rewards = {
        name: torch.cat([judged[row][0][name] for row in range(count)]) for name in rewards
    }  # (count*G,)
    total = combine(raw_rewards, weights_of(data.rewards), settings.sequences)
    metrics = evaluation_metrics(raw_rewards, total, settings.sequences, prompts.kinds)
    shown = []
    for row, (text, source) in enumerate([*prompts.with_sources()][:num_shown]):
        scores, images = judged[row]
        judges = {name: scores[name][:SHOWN].tolist() for name in data.judges}
        shown.append(
            (
                text,
                images,
                total.view(count, -1)[row, :SHOWN].tolist(),
                judges,
                source and source.image,
            )
        )
    return metrics, shown


def evaluate_both(run, settings, data, record, stop=None):
    """Evaluate on some training prompts and some held-out ones, unless this step was evaluated
    already."""
    if record.evaluations and record.evaluations[-1]["step"] == record.done:
        return
    known, new = (prompts.evenly(settings.eval_count) for prompts in (data.prompts, data.held_out))
    with run.phase.evaluation(sum(-(-len(prompts) // ranks.count()) for prompts in (known, new))):
        training = evaluate(run, settings, data, known, SEEDS["training"], stop)
        held_out = training and evaluate(run, settings, data, new, SEEDS["held out"], stop)
    if held_out:
        record.evaluation(training, held_out)


# ---- the run -------------------------------------------------------------------------------------


def train(settings):
    """The whole run: prepare, loop, end."""
    started = time.time()
    device = ranks.device()
    with claim_folder(settings) as out:
        prompts, held_out, hashes = read_inputs(settings)
        turns = plan(memory.needed, meta_models, settings, device)  # before anything is downloaded
        print_start(settings, out, device, len(prompts), len(held_out))
        data = load_data(settings, prompts, held_out)
        run, begun = load_run(settings, data, device, turns)
        with (
            closing(run.phase),
            rescued(Record(out, settings, hashes, run.phase, run.trainers, begun)) as record,
        ):
            loop(run, settings, data, record, begun)
    more = "; already complete: raise --steps for more" if 0 < begun == settings.steps else ""
    print(
        f"{counted(record.done, 'step')}, {time.time() - started:.0f} s{more}; what it leaves is in {out}"
    )


def loop(run, settings, data, record, begun):
    """All steps from `begun` on, with evaluations and checkpoints. A signal ends it after a whole
    step."""
    weights = weights_of(data.rewards)
    record.save()
    if begun == 0 or due(begun, settings.eval_every):
        evaluate_both(run, settings, data, record, record.stop)
    record.stop.follows = (
        b"this step is finished, saved and evaluated"  # printed if a signal comes from now on
    )
    run.phase.begin(settings.steps, begun)
    for step in range(begun, settings.steps):
        if any(
            ranks.gather(record.stop.received)
        ):  # together, or the others would wait for a rank that stopped
            break
        # All draws of a step, even those of a reward, start from the step's seed: no random state
        # needs saving.
        seed = seed_of_step(step, settings)
        set_seed(seed % 2**32)
        prompts = data.prompts.take(prompt_indices(step, settings, len(data.prompts)))
        record.step(
            step + 1, prompts, weights, *grpo_step(run, settings, data.rewards, prompts, seed)
        )
        if due(step + 1, settings.save_every) or due(step + 1, settings.eval_every):
            record.save()
        if due(step + 1, settings.eval_every):
            evaluate_both(run, settings, data, record)
    record.save()
    if record.done < settings.steps:
        record.write(f"saved; {how_to_go_on(record.out)}")
    stopped = any(ranks.gather(record.stop.received))
    if settings.steps > 0 and not (
        stopped and record.done == begun
    ):  # stopped before a step: nothing new to judge
        evaluate_both(run, settings, data, record)
        record.end()


def due(step, every):
    return every > 0 and step % every == 0


def main(arguments=None):
    """train(), but errors the user can fix end in one line and exit code 2, on whichever rank."""
    try:
        ranks.join()
        train(parse_settings(arguments))
        ranks.leave()
        return 0
    except KeyboardInterrupt:  # before the first step: there is nothing to save yet
        return 130
    except UserError as error:
        ranks.print_error(error)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
