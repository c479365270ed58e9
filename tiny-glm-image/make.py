"""Make tiny-glm-image: a GLM-Image of 2.3 million parameters that paints one coloured shape, and edits it.

    python tiny-glm-image/make.py        # rewrites this folder: seven model parts, prompts, pictures

Every part is the class the released model uses, only small, so whatever trains this trains the release:

1. draw        Pillow draws a shape on a background; a caption names both, a wish changes one of them.
2. codebook    k-means over patch colours: a picture becomes 16x16 preview codes and 4x4 large codes. The vision tower
               and its quantiser are set, not trained, to read the large codes.
3. VAE         pixels <-> latents.
4. decoder     a flow-matching transformer: large codes -> latents, also beside the latents of a picture to edit.
5. policy      the language model: caption -> preview codes -> large codes, and picture, wish -> large codes. Some of
               the words it reads are wrong on purpose, so it draws well and follows its prompt only some of the time.
               GRPO mends that.
"""

import itertools
import random
import time
from pathlib import Path

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

SIZE = 128  # pixels; 4x4 large codes of 32 pixels each
NUM_CODES = 1024
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {"red": (215, 40, 45), "green": (35, 150, 70), "blue": (40, 80, 205)}
COLOURS |= {"yellow": (250, 205, 40), "purple": (125, 55, 165)}
BACKGROUNDS = {"white": (245, 245, 240), "black": (25, 25, 30), "pink": (250, 165, 185), "cyan": (140, 220, 230)}
RADII = (34, 39, 44)  # pixels; the caption does not say which, the target pictures are all 39
WORDS = SHAPES, tuple(COLOURS), tuple(BACKGROUNDS)
ALL = list(itertools.product(*WORDS))
FORMS = "make it a {}", "make it {}", "make the background {}"
WISHES = {form.format(word): (kind, word) for kind, form in enumerate(FORMS) for word in WORDS[kind]}  # 13
WRONG_WORDS = 0.22  # chance that a word of the prompt, or of what the picture to edit shows, is drawn anew


# ---- 1. pictures, captions and wishes ----------------------------------------------------------------------------


def draw(shape, colour, background, radius=39):
    """One shape on a plain background, 128x128, drawn four times larger and averaged down for smooth edges."""
    k = 4
    image = Image.new("RGB", (SIZE * k, SIZE * k), BACKGROUNDS[background])
    pen, fill = ImageDraw.Draw(image), COLOURS[colour]
    x, y, r = SIZE / 2 * k, SIZE / 2 * k, radius * k
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        pen.rectangle((x - 0.9 * r, y - 0.9 * r, x + 0.9 * r, y + 0.9 * r), fill=fill)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x + 1.1 * r, y + 0.85 * r), (x - 1.1 * r, y + 0.85 * r)], fill=fill)
    else:
        pen.rectangle((x - r, y - 0.35 * r, x + r, y + 0.35 * r), fill=fill)
        pen.rectangle((x - 0.35 * r, y - r, x + 0.35 * r, y + r), fill=fill)
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def caption(shape, colour, background):
    return f"a {colour} {shape} on a {background} background"


def edited(attributes, kind, word):
    """The (shape, colour, background) of a picture with one of them replaced: kind 0, 1 or 2."""
    return (*attributes[:kind], word, *attributes[kind + 1 :])


def misread(attributes, rng):
    """Each of the three words drawn anew `WRONG_WORDS` of the time (it may come out the same)."""
    choices = zip(attributes, WORDS, strict=True)
    return tuple(rng.choice(words) if rng.random() < WRONG_WORDS else word for word, words in choices)


def to_tensor(images):
    return torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).float() / 127.5 - 1


# ---- 2. codes ----------------------------------------------------------------------------------------------------


def patches(pixels, grid):
    """(B, 3, H, W) -> (B, grid*grid, 48): each cell of the grid as 4x4 mean colours, row by row."""
    small = F.adaptive_avg_pool2d(F.interpolate(pixels, size=(256, 256)), grid * 4)
    return F.pixel_unshuffle(small, 4).flatten(2).transpose(1, 2)


def kmeans(points, k, iterations=25):
    unique = torch.unique((points * 64).round() / 64, dim=0)
    centres = unique[torch.randperm(len(unique))[:k]].clone()
    for _ in range(iterations):
        nearest = torch.cdist(unique, centres).argmin(1)
        counts = torch.bincount(nearest, minlength=k).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, unique)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


def encode(pixels, codebook, grid):
    return torch.cdist(patches(pixels, grid), codebook).argmin(-1)  # (B, grid*grid)


def dataset():
    """240 (attributes, radius), their pixels (240, 3, 128, 128), and the centres of the codes (1024, 48)."""
    torch.manual_seed(0)
    pictures = list(itertools.product(ALL, RADII))
    pixels = to_tensor([draw(*attributes, radius=radius) for attributes, radius in pictures])
    codebook = kmeans(torch.cat([patches(pixels, grid).flatten(0, 1) for grid in (16, 4)]), NUM_CODES)
    return pictures, pixels, codebook


# ---- 3. the seven parts, small -----------------------------------------------------------------------------------


def build_processor():
    """A byte-level BPE over the captions; ids below NUM_CODES are the image codes, as in the release."""
    special = [f"<|code_{i}|>" for i in range(NUM_CODES)]
    special += ["<|begin_of_image|>", "<|end_of_image|>", *(f"<|unused_{i}|>" for i in range(126)), "<|image|>"]
    special += ["<sop>", "<eop>", "<|user|>", "<|assistant|>", "<|pad|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, size = pre_tokenizers.ByteLevel.alphabet(), len(special) + 400
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    grids = [f"{i} {j}" for i in range(33) for j in range(33)]
    tokenizer.train_from_iterator([caption(*a) for a in ALL] + grids, trainer)
    ends = {"bos_token": "<|begin_of_image|>", "eos_token": "<|end_of_image|>", "pad_token": "<|pad|>"}
    extra = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", extra_special_tokens=extra, **ends
    )
    template = (
        "{% for message in messages %}<|user|>{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% else %}<|begin_of_image|><|image|><|end_of_image|>{% endif %}{% endfor %}{% endfor %}"
        "<|assistant|>"
    )
    # Pictures are halved, as the released processor does: a patch of 16 is what a code stands for, 32x32 pixels.
    reader = transformers.GlmImageImageProcessorPil(
        patch_size=16, merge_size=1, temporal_patch_size=1, size={"shortest_edge": 64**2, "longest_edge": 2048**2},
        image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=Image.Resampling.BILINEAR,
    )  # fmt: skip
    return transformers.GlmImageProcessor(reader, fast, chat_template=template)


def build_policy(processor):
    ids = processor.tokenizer.convert_tokens_to_ids
    image, start, end, padding = ids(["<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|pad|>"])
    # Sections of the 16 frequencies go to (temporal, height, width) in turn, so that rows and columns each get fast and
    # slow ones; the release's base of 10,000 would leave columns of a small grid alike.
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 2, 2, 1, 2, 2, 1, 2, 2, 1]}
    text = {"vocab_size": len(processor.tokenizer), "vision_vocab_size": NUM_CODES + 128, "rope_parameters": rope}
    text |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 4096}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": padding, "eos_token_id": end}
    vision = {"depth": 1, "hidden_size": 48, "num_heads": 1, "intermediate_size": 32}
    vision |= {"image_size": 64, "patch_size": 16}
    vq = {"embed_dim": 50, "num_embeddings": NUM_CODES, "latent_channels": 48}
    special = {"image_token_id": image, "image_start_token_id": start, "image_end_token_id": end}
    config = transformers.GlmImageConfig(text_config=text, vision_config=vision, vq_config=vq, **special)
    return transformers.GlmImageForConditionalGeneration(config)


@torch.no_grad()
def set_tower(model, codebook):
    """Sets the vision tower to the 4x4 mean colours of a patch, and the quantiser to the nearest centre.

    The quantiser compares directions: it takes the centre c of the largest cosine to x. The nearest is that of the
    largest x.c - |c|^2 / 2. So c gets one coordinate more for the second term, where x has a constant, and one, where
    x has 0, that makes all centres equally long.
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
        down_block_types=("DownEncoderBlock2D",) * blocks, up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(16, 16, 32, 48), layers_per_block=1, latent_channels=8, norm_num_groups=8, sample_size=SIZE,
        mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def build_decoder():
    return diffusers.GlmImageTransformer2DModel(
        patch_size=2, in_channels=8, out_channels=8, num_layers=3, attention_head_dim=32, num_attention_heads=3,
        text_embed_dim=64, time_embed_dim=64, condition_dim=32, prior_vq_quantizer_codebook_size=NUM_CODES,
    )  # fmt: skip


# ---- 4. training -------------------------------------------------------------------------------------------------


def optimise(name, module, steps, lr, loss_fn):
    """AdamW on a one-cycle schedule, with a progress bar; `loss_fn()` draws its own batch."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    module.train()
    started, average = time.time(), None
    bar = tqdm(range(steps), desc=name, mininterval=10)
    for _ in bar:
        loss = loss_fn()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        bar.set_postfix(loss=f"{average:.4f}", refresh=False)
    module.eval()
    print(f"{name}: {steps} steps, loss {average:.4f}, {time.time() - started:.0f} s", flush=True)


def train_vae(vae, pixels, steps):
    def loss():
        batch = pixels[torch.randint(len(pixels), (12,))]
        posterior = vae.encode(batch).latent_dist
        return F.l1_loss(vae.decode(posterior.sample()).sample, batch) + 1e-4 * posterior.kl().mean() / 2048

    optimise("VAE", vae, steps, 2e-3, loss)


def train_decoder(decoder, latents, codes, glyphs, steps, lr, sources=False):
    """Trains on pictures painted from nothing and, with `sources`, as many beside a picture to edit."""
    # The pipeline shifts the noise levels for the size of the picture, but tells the decoder the time before the shift.
    mu = calculate_shift(latents.shape[-1] * latents.shape[-2] // decoder.config.patch_size**2)
    prior = codes.view(-1, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)  # 2x2 each
    size = {"target_size": torch.full((16, 2), float(SIZE)), "crop_coords": torch.zeros(16, 2)}
    text, drop = glyphs.expand(16, -1, -1), torch.zeros(16, 64, dtype=torch.bool)

    def remember(rows):
        """Keys and values of pictures as the pipeline takes them: clean, at time 0, without a text."""
        cache = GlmImageKVCache(decoder.config.num_layers)
        cache.set_mode("write")
        decoder(latents[rows], text[:, :0], prior[rows], drop, torch.zeros(16), kv_caches=cache, **size)
        cache.set_mode("read")
        return cache

    def flow_loss(rows, cache=None):
        clean, noise = latents[rows], torch.randn_like(latents[rows])
        sigma = torch.sigmoid(torch.randn(16))
        time = sigma / (sigma + mu * (1 - sigma))  # sigma = mu / (mu + 1 / time - 1)
        noisy = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1))
        dropped = drop | (torch.rand(16, 1) < 0.1)  # what guidance compares with
        predicted = decoder(noisy, text, prior[rows], dropped, time * 1000 - 1, kv_caches=cache, **size).sample
        return F.mse_loss(predicted, noise - clean)

    def loss():
        painted, beside, source = torch.randint(len(latents), (3, 16))
        # Any source: the codes alone say what to paint, for the policy may well misread the picture.
        return flow_loss(painted) + (flow_loss(beside, remember(source)) if sources else 0)

    optimise("decoder", decoder, steps, lr, loss)


def read_prompt(policy, processor, text, picture=None):
    """A prompt's ids (L,), with room for the codes of a picture, and by the model's own rule the positions (3, L+T)."""
    content = [{"type": "text", "text": text}]
    if picture is not None:
        content.insert(0, {"type": "image", "image": picture})
    inputs = processor.apply_chat_template(
        [[{"role": "user", "content": content}]], tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"target_h": SIZE, "target_w": SIZE},
    )  # fmt: skip
    ids, model = inputs["input_ids"], policy.model
    read, _ = model.get_rope_index(ids, inputs["image_grid_thw"], inputs["images_per_sample"])
    written = model._cached_decode_position_ids[:, :, :-1]  # (1, 3, T), without that of the end of the image
    return ids[0], torch.cat([read[:, 0], written[0]], dim=1)


def train_policy(policy, processor, pictures, preview, large, steps, lr, captions, edits):
    """Trains on so many captions and edits a step. What is painted is right, what was read of it may be wrong."""
    rng = random.Random(2)
    row = {picture: i for i, picture in enumerate(pictures)}
    prompts = {caption(*a): read_prompt(policy, processor, caption(*a)) for a in ALL}
    prompts |= {wish: read_prompt(policy, processor, wish, draw(*ALL[0])) for wish in WISHES}

    def cross_entropy(texts, sources, targets):
        """Mean over codes (B, T) after prompts of one length, into which the codes of sources go: (B, 16), or none."""
        ids, positions = zip(*(prompts[text] for text in texts), strict=True)
        ids = torch.stack(ids)
        ids = ids.masked_scatter(ids == policy.config.image_token_id, sources)
        # One logit more than there are codes: the last code predicts the end of the image, as generate() expects.
        logits = policy(
            input_ids=torch.cat([ids, targets], dim=1), position_ids=torch.stack(positions, dim=1),
            logits_to_keep=targets.shape[1] + 1,
        ).logits  # fmt: skip
        end = torch.full((len(texts), 1), policy.config.image_end_token_id)
        return F.cross_entropy(logits.flatten(0, 1), torch.cat([targets, end], dim=1).flatten())

    def loss():
        painted = rng.choices(range(len(pictures)), k=captions)
        texts = [caption(*misread(pictures[i][0], rng)) for i in painted]
        total = cross_entropy(texts, large[[]], torch.cat([preview, large], dim=1)[painted])  # 256 + 16 codes
        if edits:
            kind = rng.randrange(3)  # wishes of one kind are equally long
            painted = rng.choices(range(len(pictures)), k=edits)
            wishes, sources = [], []
            for attributes, radius in [pictures[i] for i in painted]:
                read = misread(attributes, rng)
                wishes.append(FORMS[kind].format(read[kind]))
                sources.append(row[edited(read, kind, rng.choice(WORDS[kind])), radius])
            total = total + cross_entropy(wishes, large[sources], large[painted])
        return total

    optimise("policy", policy, steps, lr, loss)


# ---- 5. everything, in order -------------------------------------------------------------------------------------


def write_lines(file, lines):
    (HERE / file).write_text("".join(line + "\n" for line in lines))


def write_pictures(folder, pictures):
    (HERE / folder).mkdir(exist_ok=True)
    for line, attributes in enumerate(pictures, 1):
        draw(*attributes).save(HERE / folder / f"{line:03d}.png", optimize=True)


def write_prompts():
    """32 captions and 32 edits to train on with their target pictures, and 16 of each kept out, never rewarded."""
    order = random.Random(0).sample(ALL, len(ALL))
    for file, folder, pictures in [("prompts", "targets", order[:32]), ("heldout", "heldout-targets", order[32:48])]:
        write_lines(f"{file}.txt", [caption(*attributes) for attributes in pictures])
        write_pictures(folder, pictures)
    edits = [(source, kind, word) for source in ALL for kind, word in WISHES.values() if word not in source]  # 800
    random.Random(0).shuffle(edits)
    kinds = [[edit for edit in edits if edit[1] == kind] for kind in range(3)]
    edits = list(itertools.chain(*zip(*kinds)))  # a shape, a colour and a background by turns
    for prefix, chosen in [("", edits[:32]), ("heldout-", edits[32:48])]:
        write_lines(f"{prefix}edits.txt", [FORMS[kind].format(word) for _, kind, word in chosen])
        write_pictures(f"{prefix}sources", [source for source, _, _ in chosen])
        write_pictures(f"{prefix}edit-targets", [edited(*edit) for edit in chosen])


def main():
    started = time.time()
    write_prompts()
    pictures, pixels, codebook = dataset()
    preview, large = encode(pixels, codebook, 16), encode(pixels, codebook, 4)  # (240, 256), (240, 16)
    print(f"{len(pictures)} pictures, {len(torch.cat([preview, large], dim=1).unique(dim=0))} differ as codes")

    processor, tokenizer = build_processor(), transformers.ByT5Tokenizer()
    glyphs = transformers.T5Config(vocab_size=384, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4)
    text_encoder = transformers.T5EncoderModel(glyphs).eval()
    policy, vae, decoder = build_policy(processor), build_vae(), build_decoder()
    set_tower(policy.model, codebook)
    for name, part in [("policy", policy), ("decoder", decoder), ("VAE", vae), ("glyphs", text_encoder)]:
        print(f"{name}: {sum(p.numel() for p in part.parameters()) / 1e6:.2f} M parameters", flush=True)

    train_vae(vae, pixels, steps=1200)
    with torch.no_grad():
        latents = torch.cat([vae.encode(batch).latent_dist.mode() for batch in pixels.split(40)])
    mean, std = latents.mean((0, 2, 3), keepdim=True), latents.std((0, 2, 3), keepdim=True)
    vae.register_to_config(latents_mean=mean.flatten().tolist(), latents_std=std.flatten().tolist())
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, base_image_seq_len=256, time_shift_type="linear"
    )
    pipe = diffusers.GlmImagePipeline(tokenizer, processor, text_encoder, policy, vae, decoder, scheduler)
    with torch.no_grad():
        no_text = pipe.encode_prompt("no text in quotes", do_classifier_free_guidance=False)[0]
    # First to paint from captions, then to edit too: what is the same in both is learned by then.
    latents = (latents - mean) / std
    train_decoder(decoder, latents, large, no_text, steps=7000, lr=2e-3)
    train_decoder(decoder, latents, large, no_text, steps=800, lr=5e-4, sources=True)
    train_policy(policy, processor, pictures, preview, large, steps=1300, lr=3e-3, captions=24, edits=0)
    train_policy(policy, processor, pictures, preview, large, steps=1400, lr=1.5e-3, captions=16, edits=48)

    end = policy.config.image_end_token_id  # suppressed: a picture that ends early has too few codes for the decoder
    policy.generation_config.update(do_sample=True, temperature=1.0, top_p=0.95, top_k=0, suppress_tokens=[end])
    pipe.save_pretrained(HERE)
    print(f"saved to {HERE} after {time.time() - started:.0f} s on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
