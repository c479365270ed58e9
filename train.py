"""Train GLM-Image with GRPO on one GPU or several, or a tiny GLM-Image on a CPU.

    python train.py --group-size 4
    torchrun --nproc-per-node 8 train.py --group-size 4

With a CUDA GPU this trains zai-org/GLM-Image, without one the small model in tiny-glm-image/.
grpo_step() is one step of GRPO, its six parts in their order; evaluate() judges; loop() is the run.
"""

import signal
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C in the seconds that the imports take: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
from diffusers import GlmImagePipeline
from transformers import set_seed

from glm_image import memory
from glm_image.decoder import DecoderGRPO, DenoisingStep, repeat_for_steps
from glm_image.model import build, captured_step, load, meta_models, painting_models
from glm_image.painting import Painting, encode_prompts, paint, read_sources, to_images
from grpo import GRPO, Group, GRPOSettings, set_advantages
from rewards import begin_scoring, score, weights_of
from runtime import UserError, checkpoints, counted, ranks
from runtime.data import load_data, prompt_indices, read_inputs
from runtime.gpu import Phases, place, plan
from runtime.record import Record
from runtime.rescue import how_to_go_on, rescued
from runtime.settings import (
    claim_folder,
    groups_of,
    parse_settings,
    part_of,
    print_start,
)

# ---- one step of GRPO: sample, paint and score, advantages, reference, loss, update --------------


def grpo_step(run, sampling, rewards, prompts, seed):
    """One step, its six parts, which are the same for the policy that writes codes and the decoder.

    rewards: {name: (function, weight)}. prompts: Prompts. seed: of sampling and painting. Returns
    the Rollout and {name: number}; those of the decoder begin with "decoder/".
    """
    batch = rollout(run, sampling, rewards, prompts, seed)  # 1. sample; 2. paint and score
    metrics = {}
    for half in run.trainers:
        groups, raw_rewards = batch.learned_by(half)
        set_advantages(groups, raw_rewards, weights_of(rewards), sampling.combine)  # 3. z-scores
        run.add_reference(half, groups)  # 4. recompute the log-probs: with the adapter off
        metrics |= run.update(half, groups)  # 4. with it on; 5. the clipped loss; 6. AdamW

    logprobs = torch.stack([group.old_logprobs for group in batch.groups])
    return batch, metrics | {"entropy": -logprobs.mean().item()}  # an unbiased estimate of it


def rollout(run, sampling, rewards, prompts, seed):
    """The first two parts of a step, and all that an evaluation runs."""
    groups = run.sample(prompts, sampling, seed)  # 1. G code sequences for each of the N prompts
    images = []
    denoising_steps = []
    scoring = []
    for i, group in enumerate(groups):
        painted, steps = run.paint(prompts, i, group.tokens, sampling, seed + i)  # 2. K of each
        images += painted
        denoising_steps += steps
        # Rewards that are `async def` score these pictures while the next are painted.
        prompt = prompts.for_rewards(i)
        scoring.append(begin_scoring(rewards, painted, *prompt))
    raw_rewards = run.score(rewards, images, prompts, scoring)
    return Rollout(groups, denoising_steps, images, raw_rewards)


@dataclass
class Rollout:
    """What was sampled for N prompts: G code sequences for each, K paintings of each sequence."""

    groups: list[Group]  # N
    denoising_steps: list[DenoisingStep]  # of N*G sequences, K paths each; none if K is 1
    images: list  # N*G*K PIL images, prompt after prompt, sequence after sequence
    raw_rewards: dict  # {name: (N*G*K,)}

    def learned_by(self, half):
        """The groups that a half learns from, and the rewards of their samples, {name: (number,)}.

        A code sequence gets the mean reward of its K paintings, to be compared among the G of its
        prompt. A painting is compared among the K of the same codes, at each denoising step.
        """
        if half == "decoder":
            steps = self.denoising_steps
            return steps, {name: repeat_for_steps(x, steps) for name, x in self.raw_rewards.items()}
        count = sum(len(group.tokens) for group in self.groups)  # N*G
        means = {name: x.view(count, -1).nanmean(1) for name, x in self.raw_rewards.items()}
        return self.groups, means


# ---- what a step works with ----------------------------------------------------------------------


@dataclass
class Sampling:
    """How prompts become pictures, and several rewards one number."""

    prompts_per_step: int  # N, on each rank
    sequences: int  # G, of codes, per prompt; 1 where the decoder learns alone
    paintings: int  # K, of each code sequence; 1 unless the decoder learns
    painting: Painting
    combine: str = "sum"  # or "zscore", see combine in grpo.py


@dataclass
class Run:
    """The models, and what a step does with them: timed, on a GPU that they may have to share."""

    pipe: GlmImagePipeline  # the stock pipeline without its language model: it paints
    policy_trainer: GRPO  # of the language model, which samples codes whether or not it learns
    decoder_trainer: DecoderGRPO | None
    learns: str  # "codes", "decoder" or "both"
    phase: Phases

    @property
    def trainers(self):
        """{"codes" or "decoder": its trainer}, of what learns."""
        both = {"codes": self.policy_trainer, "decoder": self.decoder_trainer}
        return {half: both[half] for half in both if self.learns in (half, "both")}

    def sample(self, prompts, sampling, seed):
        """A Group per prompt."""
        with self.phase("sample", base_of(self.policy_trainer), prompts=prompts.texts):
            encoded = encode_prompts(self.pipe, prompts, sampling.painting)
            return self.policy_trainer.sample(encoded, sampling.sequences, seed)

    def paint(self, prompts, i, tokens, sampling, seed):
        """G*K PIL images of the code sequences (G, T) of prompt i, and their DenoisingSteps.

        With K = 1 the stock scheduler paints: it is deterministic, so nothing can be learned.
        """
        text, source = prompts.texts[i], prompts.sources[i]
        glyphs, decoder, vae = painting_models(self.pipe)
        readers = [vae] if source else []
        steps = []
        with self.phase("paint", glyphs, decoder, *readers, prompts=[text]):
            if sampling.paintings == 1:
                # Equal codes make equal pictures: these are painted once.
                tokens, picture = tokens.unique(dim=0, return_inverse=True)
                latents = paint(self.pipe, text, tokens, sampling.painting, seed, source)
            else:
                paint_paths = self.decoder_trainer.paint_paths
                latents, steps = paint_paths(
                    text, tokens, sampling.paintings, sampling.painting, seed
                )
        with self.phase("vae", vae):  # in a turn of its own, as it takes the most memory
            images = to_images(self.pipe, latents, sampling.painting.micro_batch_size)
        if sampling.paintings == 1:
            images = [images[i] for i in picture]
        self.phase.painted()
        return images, steps

    def score(self, rewards, images, prompts, scoring):
        """{name: (N*G*K,)}. scoring: what begin_scoring has begun, prompt after prompt."""
        with self.phase("score"):
            return score(rewards, images, *prompts.for_rewards(), scoring)

    def add_reference(self, half, groups):
        trainer = self.trainers[half]
        with self.phase(prefix_of(half) + "reference", base_of(trainer)):
            trainer.add_reference(groups)

    def update(self, half, groups):
        """The metrics of GRPO.update."""
        trainer = self.trainers[half]
        with self.phase(prefix_of(half) + "update", base_of(trainer)):
            metrics = trainer.update(groups)
        return {prefix_of(half) + name: value for name, value in metrics.items()}


def prefix_of(half):
    return "" if half == "codes" else f"{half}/"


def base_of(trainer):
    """What moves to the GPU and back; the adapter is in its layers."""
    return trainer.model.get_base_model()


def load_run(settings, data, device, turns):
    """The models on the device, with their trainers; and how many steps a resumed run has made.

    turns: None, "pinned" or "mapped", see plan in gpu.py.
    """
    try:
        pipe = load(settings.model, device, edits=settings.sources is not None)
        read_sources(pipe, [*data.prompts.sources, *data.held_out.sources], device)
        pipe, adapted = build(pipe, settings, device, home=None if turns else device)
        policy_trainer, decoder_trainer = make_trainers(settings, pipe, adapted, device)
        models = [base_of(policy_trainer), *painting_models(pipe)]
        offload = place(models, device, policy_trainer.forward, turns)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"no memory for the weights ({reason}); try --offload yes") from None
    run = Run(pipe, policy_trainer, decoder_trainer, settings.train, Phases(device, offload))
    done = checkpoints.load(Path(settings.resume), run.trainers) if settings.resume else 0
    return run, done


def make_trainers(settings, pipe, adapted, device):
    """Of the policy, which samples whether or not it learns; of the decoder, or None.

    adapted: {"codes": (model with an adapter, reference), "decoder": the same, if it has one}.
    """
    algorithm = part_of(settings, GRPOSettings)
    policy, reference = adapted["codes"]
    codes = slice(0, pipe.transformer.config.prior_vq_quantizer_codebook_size)
    forward = captured_step(policy, pipe, settings, device)
    sampler = GRPO(policy, adamw(policy), algorithm, codes, forward, reference, ranks.meet)
    if settings.train == "codes":
        return sampler, None
    decoder, reference = adapted["decoder"]
    painting = pipe, settings.noise_level, settings.guidance_scale
    options = {"reference": reference, "meet": ranks.meet}
    return sampler, DecoderGRPO(decoder, adamw(decoder), algorithm, *painting, **options)


def adamw(model):
    """Over the adapter of a model; loop() sets the rate."""
    # eps: gradients here can be as small as 5e-9 per weight; with torch's 1e-8 nothing would move.
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, betas=(0.9, 0.99), eps=1e-15, weight_decay=0.0)


def sampling_of(settings):
    """In training; and in an evaluation, which samples and paints as deployed."""
    sequences, paintings = groups_of(settings)
    painting = part_of(settings, Painting)
    training = Sampling(settings.prompts_per_step, sequences, paintings, painting, settings.combine)
    steps, scale = settings.eval_decode_steps, settings.eval_guidance_scale
    deployed = replace(painting, decode_steps=steps, guidance_scale=scale)
    # A CPU's passes cost more for their number than for their rows: fewer and larger ones.
    at_once = settings.prompts_per_step * (1 if torch.cuda.is_available() else 4)
    return training, Sampling(at_once, settings.group_size, 1, deployed)


# ---- what a step trains on, and at which rate ----------------------------------------------------

# Seeds of an evaluation count up from these. Those of training (seed_of_step) go up by 1,000 per
# step, one for each prompt of all ranks, and by 10^9 per --seed: the two never meet in 500,000
# steps. Painting adds an offset to both.
SEEDS = {"training": 2**29, "held out": 2**29 + 2**20}


def seed_of_step(step, seed, prompts_per_step):
    """The seed of this rank's first group; the groups after it count up, on through all ranks."""
    return (seed * 1_000_003 + step) * 1_000 + ranks.rank() * prompts_per_step


def set_learning_rates(trainers, settings, step):
    """They rise over the first steps: a function of the step, so a resumed run needs no state."""
    warmup = min(1, (step + 1) / (settings.warmup_steps + 1))
    rates = {"codes": settings.lr, "decoder": settings.decoder_lr}
    for half, trainer in trainers.items():
        for group in trainer.optimizer.param_groups:
            group["lr"] = rates[half] * warmup


# ---- judging -------------------------------------------------------------------------------------


def evaluate(run, sampling, data, prompts, seed, stop=None):
    """Paint the prompts from the same seeds each time: only what was learned makes a difference.

    stop: StopRequest; once received, this ends early and returns None. Otherwise returns, for each
    prompt in their order, its raw rewards {name: (G,)} and its G pictures.
    """
    G = sampling.sequences
    results = {}
    for rows in ranks.batches(len(prompts), sampling.prompts_per_step):
        set_seed(rows[0])  # for the draws of a reward
        some = prompts.take([row % len(prompts) for row in rows])
        batch = rollout(run, sampling, data.rewards | data.judges, some, seed + rows[0])
        for i, row in enumerate(rows):
            own = slice(i * G, (i + 1) * G)
            rewards = {name: values[own] for name, values in batch.raw_rewards.items()}
            results[row] = rewards, batch.images[own]
        if stop is not None and any(ranks.gather(stop.received)):
            return None
    results = {row: result for part in ranks.gather(results) for row, result in part.items()}
    return [results[row] for row in range(len(prompts))]


def evaluate_both(run, sampling, data, record, stop=None):
    """Evaluate on training prompts and held-out ones, unless this step was evaluated already."""
    if record.evaluations and record.evaluations[-1]["step"] == record.done:
        return
    known, new = (each.evenly(record.settings.eval_count) for each in (data.prompts, data.held_out))
    with run.phase.evaluation(sum(-(-len(prompts) // ranks.count()) for prompts in (known, new))):
        training = evaluate(run, sampling, data, known, SEEDS["training"], stop)
        held_out = training and evaluate(run, sampling, data, new, SEEDS["held out"], stop)
    if held_out:
        record.evaluation({"": (known, training), "held_out/": (new, held_out)})


# ---- the run -------------------------------------------------------------------------------------


def train(settings):
    """The whole run: prepare, loop, end."""
    start = time.time()
    device = ranks.device()
    with claim_folder(settings.resume, settings.out) as out:
        prompts, held_out, hashes = read_inputs(settings)
        longest = max(len(text.encode()) for text in (*prompts.texts, *held_out.texts))
        # Before anything is downloaded.
        turns = plan(memory.needed, meta_models, settings, longest, device)
        print_start(settings, out, device, len(prompts), len(held_out))
        data = load_data(settings, prompts, held_out)
        run, begun = load_run(settings, data, device, turns)
        record = Record(out, settings, hashes, run.phase, run.trainers, begun)
        with closing(run.phase), rescued(record):
            loop(run, settings, data, record, begun)
    more = "; already complete: raise --steps for more" if 0 < begun == settings.steps else ""
    seconds = f"{time.time() - start:.0f} s{more}"
    print(f"{counted(record.done, 'step')}, {seconds}; what it leaves is in {out}")


def loop(run, settings, data, record, begun):
    """Steps from `begun` on, with evaluations and checkpoints. A signal ends it after a step."""
    training, evaluation = sampling_of(settings)
    record.save()
    if begun == 0 or due(begun, settings.eval_every):
        evaluate_both(run, evaluation, data, record, record.stop)
    record.stop.follows = b"this step is finished, saved and evaluated"  # printed after a signal
    run.phase.begin(settings.steps, begun)
    for step in range(begun, settings.steps):
        if any(ranks.gather(record.stop.received)):  # together, or others would wait for this rank
            break
        # All draws of a step, even those of a reward, start from the step's seed: no random state
        # needs saving.
        seed = seed_of_step(step, settings.seed, settings.prompts_per_step)
        set_seed(seed % 2**32)
        set_learning_rates(run.trainers, settings, step)
        prompts = data.prompts.take(prompt_indices(step, settings, len(data.prompts)))
        # Not named: a name would keep a step's denoising paths while the next step makes its own.
        record.step(step + 1, prompts, *grpo_step(run, training, data.rewards, prompts, seed))
        if due(step + 1, settings.save_every) or due(step + 1, settings.eval_every):
            record.save()
        if due(step + 1, settings.eval_every):
            evaluate_both(run, evaluation, data, record)
    record.save()
    if record.done < settings.steps:
        record.write(f"saved; {how_to_go_on(record.out)}")
    stopped = any(ranks.gather(record.stop.received))
    if settings.steps > 0 and not (stopped and record.done == begun):  # else there is nothing new
        evaluate_both(run, evaluation, data, record)
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
