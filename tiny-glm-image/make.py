"""Make tiny-glm-image: a GLM-Image of two million parameters that paints coloured shapes.

    python tiny-glm-image/make.py     # rewrites the models in this folder

Every part is the class the released model uses, only small, so whatever trains this trains the
release. The sizes, the tokenizer, the scheduler and the prompts stay as this folder's files say:

1. scenes      See world.py: captions ask for one, wishes change one.
2. codes       The patches of scenes: a picture is 16x16 preview codes and 4x4 large codes. The
               vision tower and its quantiser, which read the large codes, stay as they are: a
               formula finds the code c nearest to the colours of a patch. The quantiser compares
               directions, so c has two more coordinates: -|c|**2 / 2 (the colours: a constant), and
               one that makes all c equally long (the colours: 0).
3. policy      The language model: caption -> preview codes -> large codes, and picture, wish ->
               large codes. It learns all of them first. The correct picture of a caption then has a
               probability of 0.99 to 1.00 in every type (12 captions of each; the product over its
               272 codes, without top-p). Then, for a short while, what is painted is what was
               misread: numbers, relations, whose colour is whose. So it is weak where large models
               are. GRPO repairs that.
4. VAE         Pixels <-> latents.
5. decoder     A flow-matching transformer: large codes -> latents, also beside the latents of a
               picture to edit.
"""

import argparse
import functools
import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import GlmImagePipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from world import (
    CAPTIONS,
    COLOURS,
    KINDS,
    NUMBERS,
    RELATIONS,
    SHAPES,
    SIZE,
    THINGS,
    Caption,
    Wish,
    draw,
    random_edit,
    random_scene,
    seen_captions,
    split_edits,
)

from glm_image.editing import encode_edit
from glm_image.model import encode_prompt, for_decoder, latent_scaling
from glm_image.weights import without_weights
from grpo import _pad_left
from inputs.prompts import Prompt

NUM_CODES = 1024


# ---- captions and edits, misread -----------------------------------------------------------------

# Of the captions of a step.
SHARES = {
    "one": 1,
    "two": 3,
    "counting": 5,
    "colours": 2,
    "position": 5,
    "binding": 5,
    "coloured position": 4,
}


def misread(caption, rng, redraw):
    """What a policy reads that is weak at numbers, relations, whose colour is whose."""
    shapes = tuple(redraw(shape, SHAPES, 0.04, rng) for shape in caption.shapes)
    colours = tuple(redraw(colour, COLOURS, 0.04, rng) for colour in caption.colours)
    word = caption.word
    if word in NUMBERS:
        word = redraw(word, NUMBERS, 0.9, rng)
    elif word in RELATIONS:
        word = redraw(word, RELATIONS, 0.95, rng)
    if len(colours) == 2 and rng.random() < 0.15:
        colours = colours[::-1]
    if len(shapes) == 2 and rng.random() < 0.3:  # the second object is left out
        return Caption(caption.kind, shapes[:1], colours[:1])
    return Caption(caption.kind, shapes, colours, word)


def misread_edit(scene, wish, rng, redraw):
    """An edit as it is read: of another object, to something else, or of another colour."""
    scene = tuple(thing and (thing[0], redraw(thing[1], COLOURS, 0.08, rng)) for thing in scene)
    named = SHAPES if wish.kind == "add" else [thing[0] for thing in scene if thing]
    shape = redraw(wish.shape, named, 0.5, rng)
    words = COLOURS if wish.word in COLOURS else SHAPES
    return scene, Wish(wish.kind, shape, wish.word and redraw(wish.word, words, 0.5, rng))


def redraw(word, words, chance, rng, same=True):
    """A word, or now and then one drawn from all `words`; with `same` it may be that word."""
    others = [other for other in words if same or other != word]
    return rng.choice(others) if rng.random() < chance and others else word


def to_tensor(images):
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


# ---- codes ---------------------------------------------------------------------------------------


def patches(pixels, grid):
    """(B, 3, H, W) -> (B, grid*grid, 48): each cell of the grid as 4x4 mean colours, row by row."""
    small = F.adaptive_avg_pool2d(F.interpolate(pixels, size=(256, 256)), grid * 4)
    return F.pixel_unshuffle(small, 4).flatten(2).transpose(1, 2)


def encode(pixels, codebook, grid):
    return torch.cdist(patches(pixels, grid), codebook).argmin(-1)  # (B, grid*grid)


def drawn_things():
    """Pixels of all that a place may show, by itself: (37, 3, 128, 128)."""
    return to_tensor([draw((thing, None, None, None)) for thing in THINGS])


@functools.cache
def make_codebook():
    """The centres of the codes (1024, 48).

    All patches that occur, 529, are centres, for shapes lie on the codes' grids; the others are
    noise, nearest to none.
    """
    seen = torch.cat([patches(drawn_things(), grid).flatten(0, 1) for grid in (4, 16)])
    seen = torch.unique((seen * 1e4).round() / 1e4, dim=0)
    noise = torch.rand(NUM_CODES - len(seen), 48, generator=torch.Generator().manual_seed(0))
    return torch.cat([seen, noise * 2 - 1])


@functools.cache
def codes_of_places():
    """The codes of an empty place, then of each sprite: (37, 8, 8) preview, (37, 2, 2) large."""
    pixels, codebook = drawn_things(), make_codebook()
    codes = [encode(pixels, codebook, 2 * n).view(-1, 2, n, 2, n) for n in (8, 2)]
    return [each[:, 0, :, 0] for each in codes]


def codes_of(scenes):
    """The codes (B, 272) of scenes, from those of their places: 256 of the preview, 16 large."""
    things = torch.tensor([[THINGS.index(thing) for thing in scene] for scene in scenes])
    places = [codes[things.view(-1, 2, 2)] for codes in codes_of_places()]  # (B, 2, 2, n, n)
    return torch.cat([codes.transpose(2, 3).flatten(1) for codes in places], dim=1)


# ---- the models, without training ----------------------------------------------------------------


def fresh(part):
    """A model of this folder's pipeline: sizes as its config.json says, random weights."""
    return without_weights(part, json.loads((HERE / part / "config.json").read_text("utf-8")))


# ---- training ------------------------------------------------------------------------------------


def optimise(name, module, steps, lr, loss_fn):
    """AdamW on a one-cycle schedule, with a progress bar; `loss_fn()` draws its own batch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    module.train()
    bar = tqdm(range(steps), desc=name, mininterval=10)
    for _ in bar:
        loss = loss_fn()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    module.eval()


def train_decoder(decoder, latents, codes, glyphs, steps, lr, sources=False):
    """On pictures painted from nothing and, with `sources`, as many beside a picture to edit."""
    # The pipeline shifts the noise levels for the size of the picture, but tells the decoder the
    # time before the shift.
    mu = calculate_shift(latents.shape[-1] * latents.shape[-2] // decoder.config.patch_size**2)
    prior = for_decoder(codes.view(-1, 4, 4))
    size = {"target_size": torch.full((16, 2), float(SIZE)), "crop_coords": torch.zeros(16, 2)}
    text, drop = glyphs.expand(16, -1, -1), torch.zeros(16, 64, dtype=torch.bool)

    def remember(rows):
        """Keys and values of pictures as the pipeline takes them: clean, at time 0, no text."""
        cache = GlmImageKVCache(decoder.config.num_layers)
        cache.set_mode("write")
        inputs = latents[rows], text[:, :0], prior[rows], drop, torch.zeros(16)
        decoder(*inputs, kv_caches=cache, **size)
        cache.set_mode("read")
        return cache

    def flow_loss(rows, cache=None):
        clean, noise = latents[rows], torch.randn_like(latents[rows])
        sigma = torch.sigmoid(torch.randn(16))
        time = sigma / (sigma + mu * (1 - sigma))  # sigma = mu / (mu + 1 / time - 1)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1))
        dropped = drop | (torch.rand(16, 1) < 0.1)  # what guidance compares with
        inputs = noisy, text, prior[rows], dropped, time * 1000 - 1
        predicted = decoder(*inputs, kv_caches=cache, **size).sample
        return F.mse_loss(predicted, noise - clean)

    def loss():
        painted, beside, source = torch.randint(len(latents), (3, 16))
        # Any source: the codes alone say what to paint, for the policy may misread the picture.
        return flow_loss(painted) + (flow_loss(beside, remember(source)) if sources else 0)

    optimise("decoder", decoder, steps, lr, loss)


def train_policy(policy, steps, lr, redraw=None):
    """On captions and edits; with `redraw` what is painted is what was misread, see misread."""
    rng = random.Random(2)
    seen, (_, held_out) = seen_captions(), split_edits()
    processor = GlmImagePipeline.from_pretrained(HERE).processor

    @functools.cache
    def encoded(prompt):
        """Ids and positions of a Caption, or of a Wish, with room for the codes of a source."""
        if isinstance(prompt, Caption):
            return encode_prompt(processor, str(prompt), SIZE, SIZE)[:2]
        room = torch.full((16,), policy.config.image_token_id)
        edit = Prompt(str(prompt), source=draw((None,) * 4), codes=room)
        return encode_edit(processor, edit, SIZE, SIZE)[:2]

    def cross_entropy(prompts, sources, targets):
        """Mean over codes (B, T) after prompts, which contain codes of sources (B, 16), or none."""
        ids, positions = zip(*map(encoded, prompts))
        ids, positions, real = _pad_left(ids, positions, targets.shape[1], "cpu")
        ids = ids.masked_scatter(ids == policy.config.image_token_id, sources)
        # One logit more than there are codes: the last code predicts the end of the image, as
        # generate() expects.
        logits = policy(
            input_ids=torch.cat([ids, targets], dim=1),
            position_ids=positions,
            attention_mask=real,
            logits_to_keep=targets.shape[1] + 1,
            use_cache=False,
        ).logits
        end = torch.full((len(ids), 1), policy.config.image_end_token_id)
        return F.cross_entropy(logits.flatten(0, 1), torch.cat([targets, end], dim=1).flatten())

    def loss():
        kinds = rng.choices(list(SHARES), SHARES.values(), k=12)
        captions = [rng.choice(seen[kind]) for kind in kinds]
        read = [misread(caption, rng, redraw) if redraw else caption for caption in captions]
        targets = codes_of([caption.scene() for caption in read])
        total = cross_entropy(captions, targets[:0, 256:], targets)  # 256 + 16 codes

        edits = [edit for edit in (random_edit(rng) for _ in range(24)) if edit not in held_out]
        read = [misread_edit(*edit, rng, redraw) if redraw else edit for edit in edits]
        sources = codes_of([scene for scene, _ in edits])[:, 256:]
        targets = codes_of([wish.edited(scene) for scene, wish in read])[:, 256:]
        return total + cross_entropy([wish for _, wish in edits], sources, targets)

    optimise("policy", policy, steps, lr, loss)


# ---- the stages, each with its own seed ----------------------------------------------------------


def make_policy():
    torch.manual_seed(3)
    policy = fresh("vision_language_encoder")
    shipped = GlmImagePipeline.from_pretrained(HERE).vision_language_encoder
    # See README.md.
    policy.model.visual, policy.model.vqmodel = shipped.model.visual, shipped.model.vqmodel
    train_policy(policy, steps=2800, lr=2.5e-3)
    # At five times this rate it also forgets which shape stands below, and GRPO then has to teach
    # more than it can.
    train_policy(policy, steps=280, lr=1e-4, redraw=redraw)
    # It suppresses the end: a picture that ends early has too few codes for the decoder.
    policy.generation_config = shipped.generation_config
    return policy


def make_vae():
    torch.manual_seed(1)
    vae = fresh("vae")
    rng = random.Random(1)
    pixels = to_tensor([draw(random_scene(rng)) for _ in range(600)])

    def loss():
        batch = pixels[torch.randint(600, (4,))]
        posterior = vae.encode(batch).latent_dist
        painted = vae.decode(posterior.sample()).sample
        # Without the squares it takes red for brown, for long.
        likeness = F.l1_loss(painted, batch) + F.mse_loss(painted, batch)
        return likeness + 1e-4 * posterior.kl().mean() / 2048

    optimise("VAE", vae, 1500, 2e-3, loss)
    latents = latents_of(vae, pixels)
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return vae


@torch.no_grad()
def latents_of(vae, pixels):
    batches = pixels.split(40)
    return torch.cat([vae.encode(each).latent_dist.mode() for each in batches])  # (B, 8, 16, 16)


def make_decoder(vae, no_text):
    """no_text: what the text encoder says of a prompt that quotes nothing, (1, L, 64)."""
    torch.manual_seed(2)
    decoder = fresh("transformer")
    rng = random.Random(2)
    scenes = [random_scene(rng) for _ in range(1000)]  # what edits may lead to
    scenes += [rng.choice(CAPTIONS[rng.choice(KINDS)]).scene() for _ in scenes]
    mean, std = latent_scaling(vae)
    latents = (latents_of(vae, to_tensor([draw(scene) for scene in scenes])) - mean) / std
    large = codes_of(scenes)[:, 256:]
    # First to paint from captions, then to edit too: what is the same in both is learned by then.
    train_decoder(decoder, latents, large, no_text, steps=3500, lr=2e-3)
    train_decoder(decoder, latents, large, no_text, steps=600, lr=5e-4, sources=True)
    return decoder


def make_painters():
    """The text encoder, which stays random, the VAE and the decoder."""
    torch.manual_seed(4)
    text_encoder, vae = fresh("text_encoder").eval(), make_vae()
    pipe = GlmImagePipeline.from_pretrained(HERE, text_encoder=text_encoder)
    with torch.no_grad():
        no_text = pipe.encode_prompt("no text in quotes", do_classifier_free_guidance=False)[0]
    decoder = make_decoder(vae, no_text)
    return {"text_encoder": text_encoder, "vae": vae, "transformer": decoder}


def main():
    """Both halves at once. One thread each: sums, and the weights, do not depend on the cores."""
    words = "Makes this folder's model again, in 36 minutes on two cores."
    argparse.ArgumentParser(description=words).parse_args()
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        policy, painters = pool.submit(make_policy), pool.submit(make_painters)
        parts = painters.result() | {"vision_language_encoder": policy.result()}
    GlmImagePipeline.from_pretrained(HERE, **parts).save_pretrained(HERE)


if __name__ == "__main__":
    main()
