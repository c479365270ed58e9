"""Make tiny-glm-image: a GLM-Image of two million parameters that paints scenes of coloured shapes,
and edits them.

    python tiny-glm-image/make.py        # rewrites this folder: seven model parts, prompts, pictures

Every part is the class the released model uses, only small, so whatever trains this trains the
release:

1. scenes      Four places, each empty or one of 6 shapes in one of 6 colours. Captions ask for one,
wishes change one. 2. codes       The patches of scenes: a picture is 16x16 preview codes and 4x4
large codes. The vision tower and its
               quantiser are set, not trained, to read the large codes.
3. policy      The language model: caption -> preview codes -> large codes, and picture, wish ->
               large codes. It learns all of them first. Then, for a short while, what is painted is
               what was misread: numbers, relations, whose colour is whose. So it is weak where
               large models are. GRPO repairs that.
4. VAE         Pixels <-> latents.
5. decoder     A flow-matching transformer: large codes -> latents, also beside the latents of a
picture to edit.
"""

import argparse
import itertools
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from glm_image.painting import encode_prompt
from runtime.data import Source

SIZE = 128  # pixels; 4x4 large codes of 32 pixels each
CELL = 64  # a scene has four places: upper left, upper right, lower left, lower right
RADIUS = 24
NUM_CODES = 1024
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
COLOURS = {
    "red": (215, 40, 45),
    "blue": (40, 80, 205),
    "green": (35, 150, 70),
    "yellow": (250, 205, 40),
}
COLOURS |= {"purple": (125, 55, 165), "black": (25, 25, 30)}
WHITE = (245, 245, 240)
USUAL = dict(zip(SHAPES, COLOURS, strict=True))  # the colour of a shape where a caption names none
SPRITES = list(itertools.product(SHAPES, COLOURS))  # 36
NUMBERS = {"two": 2, "three": 3, "four": 4}
RELATIONS = {
    "left of": (0, 1),
    "right of": (1, 0),
    "above": (0, 2),
    "below": (2, 0),
}  # places of both objects
KINDS = (
    "one",
    "two",
    "counting",
    "colours",
    "position",
    "binding",
)  # of GenEval (arXiv 2310.11513), in its order


# ---- 1. captions, wishes and pictures ------------------------------------------------------------


class Caption(NamedTuple):
    """What a caption says: one or two objects, and the colours, the number or the relation if it
    names them."""

    kind: str
    shapes: tuple
    colours: tuple = ()  # one per shape, or none
    word: str = ""  # a number or a relation

    def __str__(self):
        if self.kind == "counting":
            plural = self.shapes[0] + ("es" if self.shapes[0] == "cross" else "s")
            return " ".join([self.word, *self.colours, plural])
        objects = [
            f"a {' '.join(words)}"
            for words in zip(*filter(None, (self.colours, self.shapes)), strict=True)
        ]
        return f" {self.word or 'and'} ".join(objects)

    def scene(self):
        """Its picture: for each of four places (shape, colour) or None, filled from the upper left,
        as one reads."""
        colours = self.colours or [USUAL[shape] for shape in self.shapes]
        objects = list(zip(self.shapes, colours, strict=True)) * NUMBERS.get(self.word, 1)
        places = RELATIONS.get(self.word, range(4))
        scene = [None] * 4
        for place, thing in zip(places, objects):
            scene[place] = thing
        return tuple(scene)


def all_captions():
    """{kind: its captions}: 6, 30, 126, 36, 120 and 900."""
    pairs = list(itertools.permutations(SHAPES, 2))
    colours = list(itertools.permutations(COLOURS, 2))
    one_or_none = [(), *((colour,) for colour in COLOURS)]
    counted = itertools.product(SHAPES, one_or_none, NUMBERS)
    return {
        "one": [Caption("one", (shape,)) for shape in SHAPES],
        "two": [Caption("two", pair) for pair in pairs],
        "counting": [
            Caption("counting", (shape,), colour, number) for shape, colour, number in counted
        ],
        "colours": [Caption("colours", (shape,), (colour,)) for shape, colour in SPRITES],
        "position": [
            Caption("position", pair, (), relation) for pair in pairs for relation in RELATIONS
        ],
        "binding": [Caption("binding", pair, both) for pair in pairs for both in colours],
    }


CAPTIONS = all_captions()
MEANING = {str(caption): caption for captions in CAPTIONS.values() for caption in captions}

# Held out: words of which GRPO trains on no caption that has both; and for each shape by itself a
# colour.
PAIRS = [{"circle", "square"}, {"triangle", "diamond"}, {"cross", "ring"}]
PAIRS += map(
    set, zip([*NUMBERS] * 2, SHAPES, strict=True)
)  # two circles, three squares ... four rings
COLOUR = dict(zip(SHAPES, ("green", "yellow", "purple", "black", "red", "blue"), strict=True))


def unrewarded(caption):
    """Whether a caption is held out from GRPO."""
    if caption.kind == "colours":
        return caption.colours[0] == COLOUR[caption.shapes[0]]
    return any(pair <= {caption.word, *caption.shapes} for pair in PAIRS)


def unseen(caption):
    """Whether it is held out from every stage: a number of a shape in two colours, for in none only
    half composed."""
    colours = (), (USUAL[caption.shapes[0]],), (COLOUR[caption.shapes[0]],)
    return unrewarded(caption) and (caption.kind != "counting" or caption.colours in colours)


def seen_captions():
    """{kind: the captions that the policy learns from}, relations of coloured shapes too, so that
    there are more."""
    placed = itertools.product(CAPTIONS["binding"], RELATIONS)
    coloured = [
        Caption("position", caption.shapes, caption.colours, relation)
        for caption, relation in placed
    ]
    kinds = CAPTIONS | {"coloured position": coloured}
    return {
        kind: [caption for caption in captions if not unseen(caption)]
        for kind, captions in kinds.items()
    }


class Wish(NamedTuple):
    """What an edit asks for."""

    kind: str
    shape: str  # the object that is named
    word: str = ""  # its new colour or shape

    def __str__(self):
        return FORMS[self.kind].format(shape=self.shape, word=self.word)

    def edited(self, scene):
        """The scene after this edit; what is added takes the first empty place."""
        shapes = [thing and thing[0] for thing in scene]
        place = shapes.index(None if self.kind == "add" else self.shape)
        colour = scene[place] and scene[place][1]
        new = {"recolour": (self.shape, self.word), "reshape": (self.word, colour), "remove": None}
        new["add"] = self.shape, self.word
        return (*scene[:place], new[self.kind], *scene[place + 1 :])


FORMS = {
    "recolour": "make the {shape} {word}",
    "reshape": "make the {shape} a {word}",
    "remove": "remove the {shape}",
}
FORMS["add"] = "add a {word} {shape}"
WISHES = [Wish("recolour", *sprite) for sprite in SPRITES] + [
    Wish("add", *sprite) for sprite in SPRITES
]
WISHES += [Wish("reshape", *pair) for pair in itertools.permutations(SHAPES, 2)]
WISHES = {
    str(wish): wish for wish in [*WISHES, *(Wish("remove", shape) for shape in SHAPES)]
}  # 108


def random_edit(rng):
    """(scene, Wish): two or three different shapes anywhere, and something to change that is not so
    already."""
    shapes = rng.sample(SHAPES, 4)
    scene = [None] * 4
    for place, shape in zip(rng.sample(range(4), rng.choice((2, 3))), shapes):
        scene[place] = shape, rng.choice(list(COLOURS))
    shape, colour = rng.choice(list(filter(None, scene)))
    form = rng.choice(list(FORMS))
    words = {
        "recolour": [other for other in COLOURS if other != colour],
        "reshape": shapes[3:],
        "remove": [""],
    }
    words["add"] = list(COLOURS)
    return tuple(scene), Wish(form, shapes[3] if form == "add" else shape, rng.choice(words[form]))


SHARES = {
    "one": 1,
    "two": 3,
    "counting": 5,
    "colours": 2,
    "position": 5,
    "binding": 5,
}  # of the captions of a step
SHARES |= {"coloured position": 4}


def misread(caption, rng):
    """What a policy reads that is weak where the released models are: numbers, relations, whose
    colour is whose."""
    shapes = tuple(anew(shape, SHAPES, 0.04, rng) for shape in caption.shapes)
    colours = tuple(anew(colour, COLOURS, 0.04, rng) for colour in caption.colours)
    word = caption.word
    if word in NUMBERS:
        word = anew(word, NUMBERS, 0.9, rng)
    elif word in RELATIONS:
        word = anew(word, RELATIONS, 0.95, rng)
    if len(colours) == 2 and rng.random() < 0.15:
        colours = colours[::-1]
    if len(shapes) == 2 and rng.random() < 0.3:  # the second object is left out
        return Caption(caption.kind, shapes[:1], colours[:1])
    return Caption(caption.kind, shapes, colours, word)


def misread_edit(scene, wish, rng):
    """An edit as it is read: of another object, to something else, or of a picture with an object
    of another colour."""
    scene = tuple(thing and (thing[0], anew(thing[1], COLOURS, 0.08, rng)) for thing in scene)
    named = SHAPES if wish.kind == "add" else [thing[0] for thing in scene if thing]
    shape = anew(wish.shape, named, 0.5, rng)
    words = COLOURS if wish.word in COLOURS else SHAPES
    return scene, Wish(wish.kind, shape, wish.word and anew(wish.word, words, 0.5, rng))


def anew(word, words, chance, rng):
    """A word, or now and then one drawn from all `words`, which may be the same."""
    return rng.choice(list(words)) if rng.random() < chance else word


def draw(scene):
    """A scene as 128x128 pixels, drawn four times larger and averaged down for smooth edges."""
    k = 4
    image = Image.new("RGB", (SIZE * k, SIZE * k), WHITE)
    pen, r = ImageDraw.Draw(image), RADIUS * k
    for place, thing in enumerate(scene):
        if thing is None:
            continue
        shape, fill = thing[0], COLOURS[thing[1]]
        x, y = (CELL * (place % 2) + CELL // 2) * k, (CELL * (place // 2) + CELL // 2) * k
        if shape in ("circle", "ring"):
            pen.ellipse((x - r, y - r, x + r - 1, y + r - 1), fill=fill)
        if shape == "ring":
            pen.ellipse((x - r // 2, y - r // 2, x + r // 2 - 1, y + r // 2 - 1), fill=WHITE)
        elif shape == "square":
            pen.rectangle(
                (x - r * 5 // 6, y - r * 5 // 6, x + r * 5 // 6 - 1, y + r * 5 // 6 - 1), fill=fill
            )
        elif shape == "triangle":
            pen.polygon([(x, y - r), (x + r, y + r * 7 // 8), (x - r, y + r * 7 // 8)], fill=fill)
        elif shape == "diamond":
            pen.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=fill)
        elif shape == "cross":
            pen.rectangle((x - r, y - r // 3, x + r - 1, y + r // 3 - 1), fill=fill)
            pen.rectangle((x - r // 3, y - r, x + r // 3 - 1, y + r - 1), fill=fill)
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def random_scene(rng):
    return tuple(rng.choice(SPRITES) if rng.random() < 0.75 else None for _ in range(4))


def to_tensor(images):
    return (
        torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).float()
        / 127.5
        - 1
    )


# ---- 2. codes ------------------------------------------------------------------------------------


def patches(pixels, grid):
    """(B, 3, H, W) -> (B, grid*grid, 48): each cell of the grid as 4x4 mean colours, row by row."""
    small = F.adaptive_avg_pool2d(F.interpolate(pixels, size=(256, 256)), grid * 4)
    return F.pixel_unshuffle(small, 4).flatten(2).transpose(1, 2)


def encode(pixels, codebook, grid):
    return torch.cdist(patches(pixels, grid), codebook).argmin(-1)  # (B, grid*grid)


def make_codebook():
    """The centres of the codes (1024, 48).

    All patches that occur, 529, are centres, for shapes lie on the codes' grids; the others are
    noise, nearest to none.
    """
    pixels = to_tensor([draw((sprite, None, None, None)) for sprite in SPRITES])
    seen = torch.cat([patches(pixels, grid).flatten(0, 1) for grid in (4, 16)])
    seen = torch.unique((seen * 1e4).round() / 1e4, dim=0)
    noise = torch.rand(NUM_CODES - len(seen), 48, generator=torch.Generator().manual_seed(0))
    return torch.cat([seen, noise * 2 - 1])


def corner_codes(codebook):
    """The codes of an empty place, then those of each sprite there: (37, 8, 8) of the preview, (37,
    2, 2) large."""
    drawn = to_tensor([draw((thing, None, None, None)) for thing in (None, *SPRITES)])
    return [
        encode(drawn, codebook, grid).unflatten(1, (grid, grid))[:, : grid // 2, : grid // 2]
        for grid in (16, 4)
    ]


def codes_of(scenes, corners):
    """The codes (B, 272) of scenes, put together from those of their places: 256 of the preview,
    then 16 large ones."""
    things = [
        [0 if thing is None else 1 + SPRITES.index(thing) for thing in scene] for scene in scenes
    ]
    places = [
        corner[torch.tensor(things)].unflatten(1, (2, 2)) for corner in corners
    ]  # (B, 2, 2, n, n)
    return torch.cat([codes.transpose(2, 3).flatten(1) for codes in places], dim=1)


# ---- 3. the seven parts, small -------------------------------------------------------------------


def build_processor():
    """A byte-level BPE over the captions; ids below NUM_CODES are the image codes, as in the
    release."""
    special = [f"<|code_{i}|>" for i in range(NUM_CODES)]
    special += [
        "<|begin_of_image|>",
        "<|end_of_image|>",
        *(f"<|unused_{i}|>" for i in range(126)),
        "<|image|>",
    ]
    special += ["<sop>", "<eop>", "<|user|>", "<|assistant|>", "<|pad|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, initial_alphabet=alphabet
    )
    grids = [f"{i} {j}" for i in range(33) for j in range(33)]
    tokenizer.train_from_iterator(
        [*MEANING, *WISHES, *grids], trainer
    )  # every word ends as one token
    ends = {
        "bos_token": "<|begin_of_image|>",
        "eos_token": "<|end_of_image|>",
        "pad_token": "<|pad|>",
    }
    extra = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", extra_special_tokens=extra, **ends
    )
    template = (
        "{% for message in messages %}<|user|>{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% else %}<|begin_of_image|><|image|><|end_of_image|>{% endif %}{% endfor %}{% endfor %}"
        "<|assistant|>"
    )
    # Pictures are halved, as the released processor does: a patch of 16 is what a code stands for,
    # 32x32 pixels.
    reader = transformers.GlmImageImageProcessorPil(
        patch_size=16,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": 64**2, "longest_edge": 2048**2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        resample=Image.Resampling.BILINEAR,
    )
    return transformers.GlmImageProcessor(reader, fast, chat_template=template)


def build_policy(processor):
    ids = processor.tokenizer.convert_tokens_to_ids
    image, start, end, padding = ids(
        ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|pad|>"]
    )
    # Sections of the 16 frequencies go to (temporal, height, width) in turn, so that rows and
    # columns each get fast and slow ones; the release's base of 10,000 would leave columns of a
    # small grid alike.
    rope = {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": [1, 2, 2, 1, 2, 2, 1, 2, 2, 1],
    }
    text = {
        "vocab_size": len(processor.tokenizer),
        "vision_vocab_size": NUM_CODES + 128,
        "rope_parameters": rope,
    }
    text |= {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
    }
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": padding,
        "eos_token_id": end,
    }
    vision = {"depth": 1, "hidden_size": 48, "num_heads": 1, "intermediate_size": 32}
    vision |= {"image_size": 64, "patch_size": 16}
    vq = {"embed_dim": 50, "num_embeddings": NUM_CODES, "latent_channels": 48}
    special = {"image_token_id": image, "image_start_token_id": start, "image_end_token_id": end}
    config = transformers.GlmImageConfig(
        text_config=text, vision_config=vision, vq_config=vq, **special
    )
    return transformers.GlmImageForConditionalGeneration(config)


@torch.no_grad()
def set_tower(model, codebook):
    """Sets the vision tower to the 4x4 mean colours of a patch, and the quantiser to the nearest
    centre.

    The quantiser compares directions: it takes the centre c of the largest cosine to x. The nearest
    is that of the largest x.c - |c|^2 / 2. So c gets one coordinate more for the second term, where
    x has a constant, and one, where x has 0, that makes all centres equally long.
    """
    for parameter in (*model.visual.parameters(), *model.vqmodel.parameters()):
        parameter.zero_()  # attention and MLP add nothing
    cells = torch.eye(48).view(48, 3, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    model.visual.patch_embed.proj.weight.copy_(cells / 16)  # (48, 3, 16, 16)
    mean, constant = codebook.mean(0), 5.0
    centres = codebook - mean
    term = -centres.square().sum(1, keepdim=True) / (2 * constant)
    squares = centres.square().sum(1, keepdim=True) + term.square()
    centres = torch.cat([centres, term, (1.01 * squares.max() - squares).sqrt()], dim=1)
    model.vqmodel.quantize.embedding.weight.copy_(centres)  # (1024, 50)
    model.vqmodel.quant_conv.weight[:48, :, 0, 0] = torch.eye(48)
    model.vqmodel.quant_conv.bias[:49] = torch.cat([-mean, torch.tensor([constant])])


def build_vae():
    blocks = 4  # 2 ** (4 - 1) = 8 pixels a latent; times the decoder's patch of 2 that is the release's 16
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(16, 16, 32, 48),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        sample_size=SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_decoder():
    return diffusers.GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=3,
        text_embed_dim=64,
        time_embed_dim=64,
        condition_dim=32,
        prior_vq_quantizer_codebook_size=NUM_CODES,
    )


# ---- 4. training ---------------------------------------------------------------------------------


def optimise(name, module, steps, lr, loss_fn):
    """AdamW on a one-cycle schedule, with a progress bar; `loss_fn()` draws its own batch."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    module.train()
    bar = tqdm(range(steps), desc=name, mininterval=10)
    for _ in bar:
        loss = loss_fn()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    module.eval()


def train_vae(vae, pixels, steps):
    def loss():
        batch = pixels[torch.randint(len(pixels), (4,))]
        posterior = vae.encode(batch).latent_dist
        painted = vae.decode(posterior.sample()).sample
        # Without the squares it takes red for brown, for long.
        return (
            F.l1_loss(painted, batch)
            + F.mse_loss(painted, batch)
            + 1e-4 * posterior.kl().mean() / 2048
        )

    optimise("VAE", vae, steps, 2e-3, loss)


def train_decoder(decoder, latents, codes, glyphs, steps, lr, sources=False):
    """Trains on pictures painted from nothing and, with `sources`, as many beside a picture to
    edit."""
    # The pipeline shifts the noise levels for the size of the picture, but tells the decoder the
    # time before the shift.
    mu = calculate_shift(latents.shape[-1] * latents.shape[-2] // decoder.config.patch_size**2)
    prior = (
        codes.view(-1, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    )  # 2x2 each
    size = {"target_size": torch.full((16, 2), float(SIZE)), "crop_coords": torch.zeros(16, 2)}
    text, drop = glyphs.expand(16, -1, -1), torch.zeros(16, 64, dtype=torch.bool)

    def remember(rows):
        """Keys and values of pictures as the pipeline takes them: clean, at time 0, without a
        text."""
        cache = GlmImageKVCache(decoder.config.num_layers)
        cache.set_mode("write")
        decoder(
            latents[rows], text[:, :0], prior[rows], drop, torch.zeros(16), kv_caches=cache, **size
        )
        cache.set_mode("read")
        return cache

    def flow_loss(rows, cache=None):
        clean, noise = latents[rows], torch.randn_like(latents[rows])
        sigma = torch.sigmoid(torch.randn(16))
        time = sigma / (sigma + mu * (1 - sigma))  # sigma = mu / (mu + 1 / time - 1)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1))
        dropped = drop | (torch.rand(16, 1) < 0.1)  # what guidance compares with
        predicted = decoder(
            noisy, text, prior[rows], dropped, time * 1000 - 1, kv_caches=cache, **size
        ).sample
        return F.mse_loss(predicted, noise - clean)

    def loss():
        painted, beside, source = torch.randint(len(latents), (3, 16))
        # Any source: the codes alone say what to paint, for the policy may well misread the
        # picture.
        return flow_loss(painted) + (flow_loss(beside, remember(source)) if sources else 0)

    optimise("decoder", decoder, steps, lr, loss)


def collate(prompts, padding):
    """Prompts side by side that end alike: B pairs of ids (L,) and positions (3, L+T).

    Returns ids (B, L), positions (3, B, L+T) and the attention mask (B, 1, L+T, L+T), with L that
    of the longest.
    """
    longest = max(len(ids) for ids, _ in prompts)
    empty = [longest - len(ids) for ids, _ in prompts]
    ids = torch.stack(
        [F.pad(ids, (n, 0), value=padding) for n, (ids, _) in zip(empty, prompts, strict=True)]
    )
    positions = [F.pad(positions, (n, 0)) for n, (_, positions) in zip(empty, prompts, strict=True)]
    positions = torch.stack(positions, dim=1)  # (3, B, L+T)
    length = positions.shape[-1]
    real = torch.arange(length) >= torch.tensor(empty).unsqueeze(1)  # (B, L+T)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    itself = torch.eye(
        length, dtype=torch.bool
    )  # padding sees itself: a row that sees nothing is NaN
    return ids, positions, (causal & real[:, None, None, :]) | itself


def train_policy(policy, processor, codebook, steps, lr, misreads):
    """Trains on captions and edits; with `misreads` what is painted is what was read, which may be
    something else."""
    rng = random.Random(2)
    seen, (_, held_out) = seen_captions(), split_edits(random.Random(0))
    room = Source(
        draw((None,) * 4), torch.full((16,), policy.config.image_token_id)
    )  # for the codes of a source
    asked = {str(caption): None for caption in itertools.chain(*seen.values())} | dict.fromkeys(
        WISHES, room
    )
    prompts = {
        text: encode_prompt(processor, text, SIZE, SIZE, source)[:2]
        for text, source in asked.items()
    }

    def cross_entropy(texts, sources, targets):
        """Mean over codes (B, T) after prompts, into which the codes of sources go: (B, 16), or
        none."""
        ids, positions, mask = collate(
            [prompts[text] for text in texts], processor.tokenizer.pad_token_id
        )
        ids = ids.masked_scatter(ids == policy.config.image_token_id, sources)
        # One logit more than there are codes: the last code predicts the end of the image, as
        # generate() expects.
        logits = policy(
            input_ids=torch.cat([ids, targets], dim=1),
            position_ids=positions,
            attention_mask=mask,
            logits_to_keep=targets.shape[1] + 1,
            use_cache=False,
        ).logits
        end = torch.full((len(texts), 1), policy.config.image_end_token_id)
        return F.cross_entropy(logits.flatten(0, 1), torch.cat([targets, end], dim=1).flatten())

    def loss():
        kinds = rng.choices(list(SHARES), SHARES.values(), k=12)
        captions = [rng.choice(seen[kind]) for kind in kinds]
        read = [misread(caption, rng) if misreads else caption for caption in captions]
        targets = codes_of([caption.scene() for caption in read], corners)
        total = cross_entropy(
            [str(caption) for caption in captions], targets[:0, 256:], targets
        )  # 256 + 16 codes

        edits = [edit for edit in (random_edit(rng) for _ in range(24)) if edit not in held_out]
        read = [misread_edit(*edit, rng) if misreads else edit for edit in edits]
        sources = codes_of([scene for scene, _ in edits], corners)[:, 256:]
        targets = codes_of([wish.edited(scene) for scene, wish in read], corners)[:, 256:]
        return total + cross_entropy([str(wish) for _, wish in edits], sources, targets)

    corners = corner_codes(codebook)
    optimise("policy", policy, steps, lr, loss)


# ---- 5. the stages, each with its own seed -------------------------------------------------------


def make_policy():
    torch.manual_seed(3)
    processor, codebook = build_processor(), make_codebook()
    policy = build_policy(processor)
    set_tower(policy.model, codebook)
    train_policy(policy, processor, codebook, steps=2800, lr=2.5e-3, misreads=False)
    # At five times this rate it also forgets which shape stands below, and GRPO then has to teach
    # more than it can.
    train_policy(policy, processor, codebook, steps=280, lr=1e-4, misreads=True)
    end = (
        policy.config.image_end_token_id
    )  # suppressed: a picture that ends early has too few codes for the decoder
    policy.generation_config.update(
        do_sample=True, temperature=1.0, top_p=0.95, top_k=0, suppress_tokens=[end]
    )
    return policy


def make_vae():
    torch.manual_seed(1)
    vae = build_vae()
    rng = random.Random(1)
    pixels = to_tensor([draw(random_scene(rng)) for _ in range(600)])
    train_vae(vae, pixels, steps=1500)
    latents = latents_of(vae, pixels)
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return vae


@torch.no_grad()
def latents_of(vae, pixels):
    return torch.cat(
        [vae.encode(batch).latent_dist.mode() for batch in pixels.split(40)]
    )  # (B, 8, 16, 16)


def make_decoder(vae, codebook, no_text):
    """no_text: what the text encoder says of a prompt that quotes nothing, (1, L, 64)."""
    torch.manual_seed(2)
    decoder = build_decoder()
    rng = random.Random(2)
    scenes = [random_scene(rng) for _ in range(1000)]  # what edits may lead to
    scenes += [rng.choice(CAPTIONS[rng.choice(KINDS)]).scene() for _ in scenes]
    mean, std = (
        torch.tensor(each).view(1, -1, 1, 1)
        for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    latents = (latents_of(vae, to_tensor([draw(scene) for scene in scenes])) - mean) / std
    large = codes_of(scenes, corner_codes(codebook))[:, 256:]
    # First to paint from captions, then to edit too: what is the same in both is learned by then.
    train_decoder(decoder, latents, large, no_text, steps=3500, lr=2e-3)
    train_decoder(decoder, latents, large, no_text, steps=600, lr=5e-4, sources=True)
    return decoder


def make_text_encoder():
    torch.manual_seed(4)
    glyphs = transformers.T5Config(
        vocab_size=384, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4
    )
    return transformers.T5EncoderModel(glyphs).eval()


def make_painters():
    """The text encoder, the VAE and the decoder."""
    text_encoder, vae = make_text_encoder(), make_vae()
    pipe = assemble(build_policy(build_processor()), text_encoder, vae, build_decoder())
    with torch.no_grad():
        no_text = pipe.encode_prompt("no text in quotes", do_classifier_free_guidance=False)[0]
    return text_encoder, vae, make_decoder(vae, make_codebook(), no_text)


def assemble(policy, text_encoder, vae, decoder):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.25,
        max_shift=0.75,
        base_image_seq_len=256,
        time_shift_type="linear",
    )
    tokenizer = transformers.ByT5Tokenizer()
    return diffusers.GlmImagePipeline(
        tokenizer, build_processor(), text_encoder, policy, vae, decoder, scheduler
    )


# ---- 6. what to train on, and what is held out ---------------------------------------------------


# Captions to train on and held out, for each kind, number and relation, without colours and with
# them.
COUNTS = {"one": (2, 2), "two": (6, 6), "counting": (4, 2), "position": (7, 3)}
COLOURED = {"counting": (5, 2), "colours": (4, 6), "binding": (45, 10)}


def split_captions(rng):
    """112 captions to train on and 48 held out, kind after kind: two lists. Held out is what no
    stage has seen."""
    training, held_out = [], []
    for kind, captions in CAPTIONS.items():
        alike = {}
        for caption in rng.sample(captions, len(captions)):
            alike.setdefault((caption.word, bool(caption.colours)), []).append(caption)
        chosen = [], []
        for (_, coloured), own in alike.items():
            many, few = (COLOURED if coloured else COUNTS)[kind]
            hidden = [caption for caption in own if unseen(caption)] or own[
                -few:
            ]  # of single objects, two by chance
            chosen[0].extend(
                [each for each in own if not unrewarded(each) and each not in hidden][:many]
            )
            chosen[1].extend(hidden[:few])
        training += rng.sample(
            chosen[0], len(chosen[0])
        )  # an evaluation on some takes the first of each kind
        held_out += rng.sample(chosen[1], len(chosen[1]))
    return training, held_out


def split_edits(rng):
    """144 edits (scene, Wish) to train on and 24 held out, form after form: two lists."""
    by_form = {form: {} for form in FORMS}
    while min(map(len, by_form.values())) < 42:
        edit = random_edit(rng)
        by_form[edit[1].kind].setdefault(edit)
    parts = [list(edits) for edits in by_form.values()]
    return [edit for part in parts for edit in part[:36]], [
        edit for part in parts for edit in part[36:42]
    ]


def write_prompts():
    """Captions and edits to train on with GRPO, and others that no stage has seen."""
    captions = split_captions(random.Random(0))
    edits = split_edits(random.Random(0))
    for prefix, name, part in (("", "prompts", 0), ("heldout-", "heldout", 1)):
        write_lines(f"{name}.txt", captions[part])
        write_lines(f"{prefix}edits.txt", [wish for _, wish in edits[part]])
        write_pictures(f"{prefix}sources", [scene for scene, _ in edits[part]])
        write_pictures(f"{prefix}edit-targets", [wish.edited(scene) for scene, wish in edits[part]])


def write_lines(file, prompts):
    """One per line, each kind after a line that names it: evaluations show them apart."""
    kinds = itertools.groupby(prompts, lambda prompt: prompt.kind)
    parts = ["\n".join([f"# kind: {kind}", *map(str, own)]) for kind, own in kinds]
    (HERE / file).write_text("\n".join(parts) + "\n")


def write_pictures(folder, scenes):
    (HERE / folder).mkdir(exist_ok=True)
    for line, scene in enumerate(scenes, 1):
        draw(scene).save(HERE / folder / f"{line:03d}.png", optimize=True)


def main():
    """Both halves at once. One thread each: the order of sums, and so the weights, do not depend on
    the cores."""
    argparse.ArgumentParser(
        description="Makes this folder's model anew, in 40 minutes on two cores."
    ).parse_args()
    write_prompts()
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        half = pool.submit(make_policy)
        text_encoder, vae, decoder = pool.submit(make_painters).result()
    assemble(half.result(), text_encoder, vae, decoder).save_pretrained(HERE)


if __name__ == "__main__":
    main()
