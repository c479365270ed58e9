"""GLM-Image: prompts in, pictures out."""

from dataclasses import dataclass

import torch

from runtime import UserError

# Added to a group's seed for the noise that its pictures start from; see train.py.
NOISE_SEED = 2**31


@dataclass
class Painting:
    """How codes become pictures."""

    height: int  # pixels, a multiple of 32
    width: int
    decode_steps: int  # denoising steps of the decoder
    guidance_scale: float  # of the decoder; above 1 it doubles its cost
    micro_batch_size: int  # pictures painted at a time


@torch.no_grad()
def read_sources(pipe, sources, device):
    """Give each Source its codes, by the model's own vision tower and quantiser."""
    model = pipe.vision_language_encoder
    for source in filter(None, sources):
        model.model.visual.to(device)
        model.model.vqmodel.to(device)
        inputs = pipe.processor.image_processor(source.image, return_tensors="pt").to(device)
        grid = inputs["image_grid_thw"]  # (1, 3)
        if grid.tolist() != [[1, source.image.height // 32, source.image.width // 32]]:
            rows, columns = grid.tolist()[0][1:]
            raise UserError(
                f"a picture of {source.image.size} pixels is {rows}x{columns} codes to the model, "
                "not one per 32x32 pixels: choose another --height and --width"
            )
        features = model.get_image_features(inputs["pixel_values"], grid).pooler_output
        source.codes = model.get_image_tokens(features).cpu()


def encode_prompts(pipe, prompts, painting):
    """Prompts as GRPO.sample takes them: [(prompt_ids (L,), position_ids (3, L+T), T)]."""
    size = painting.height, painting.width
    pairs = zip(prompts.texts, prompts.sources)
    return [encode_prompt(pipe.processor, text, *size, source) for text, source in pairs]


def encode_prompt(processor, prompt, height, width, source=None):
    """A prompt as the policy reads it, and the 3-D positions of everything it reads and writes.

    GLM-Image writes a preview of about 256 codes first, then the picture proper, one code per 32x32
    pixels; both row by row. To edit a picture, it reads that picture's codes before the text, and
    writes no preview. Positions are (temporal, height, width). Text counts up on all three; a grid
    keeps the time of its start s and spreads over (s + row, s + column); whatever follows the grid
    starts at s + its longer side.

    height, width: of the picture to be written, multiples of 32. source: the Source to edit, with
    its codes, or None. Returns prompt_ids (L,), position_ids (3, L+T), T.
    """
    content = [{"type": "text", "text": prompt}]
    if source is not None:
        content.insert(0, {"type": "image", "image": source.image})
    inputs = processor.apply_chat_template(
        [[{"role": "user", "content": content}]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )
    prompt_ids = inputs["input_ids"][0]  # (L,)
    grids = inputs["image_grid_thw"].tolist()
    token = [1, 1, 1]  # a token of text is a grid of one
    parts = [token] * len(prompt_ids) + grids[::-1]  # listed large first, written preview first
    if source is not None:
        begin = prompt_ids.tolist().index(processor.image_token_id)
        end = begin + len(source.codes)
        prompt_ids[begin:end] = source.codes
        parts = [token] * begin + grids[:1] + [token] * (len(prompt_ids) - end) + grids[1:]

    positions = []
    start = 0
    for _, rows, columns in parts:
        axes = torch.tensor([0]), torch.arange(rows), torch.arange(columns)
        positions.append(start + torch.cartesian_prod(*axes).T)  # (3, rows*columns)
        start += max(rows, columns)
    positions = torch.cat(positions, dim=1)  # (3, L+T)
    return prompt_ids, positions, positions.shape[1] - len(prompt_ids)


def for_decoder(codes):
    """(B, rows, columns) -> (B, 4*rows*columns): from a code per 32x32 pixels to one per 16x16."""
    return codes.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)


def paint(pipe, prompt, tokens, painting, seed, source=None):
    """(G, T) tokens of one prompt -> latents (G, C, height / 8, width / 8), for to_images.

    source: what they edit, or None. All pictures of a group start from the same noise, so only the
    policy's choices make them differ. One prompt per batch: glyph embeddings of different prompts
    would be padded, and the decoder does not mask the padding.
    """
    rows = painting.height // 32
    columns = painting.width // 32
    scale = pipe.vae_scale_factor
    device = pipe.transformer.device
    # The decoder is not shown the preview: only the policy looks at it.
    prior = for_decoder(tokens[:, -rows * columns :].view(-1, rows, columns))  # (G, 4*rows*columns)
    edited = {}  # the pipeline's arguments for the source, per picture
    if source is not None:
        size = source.image.height // 16, source.image.width // 16
        codes = for_decoder(source.codes.view(1, size[0] // 2, size[1] // 2))[0].to(device)
        edited = {"image": [source.image], "prior_token_image_ids": codes}
        edited["source_image_grid_thw"] = torch.tensor([[1, *size]])
    channels = pipe.transformer.config.in_channels
    shape = 1, channels, painting.height // scale, painting.width // scale
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + NOISE_SEED))

    latents = []
    for batch in prior.split(painting.micro_batch_size):
        latents += pipe(
            prompt=[prompt] * len(batch),
            prior_token_ids=batch.to(device),
            latents=noise.expand(len(batch), -1, -1, -1),
            height=painting.height,
            width=painting.width,
            num_inference_steps=painting.decode_steps,
            guidance_scale=painting.guidance_scale,
            output_type="latent",
            **{name: [value] * len(batch) for name, value in edited.items()},
        ).images
    return torch.stack(latents)


@torch.no_grad()
def to_images(pipe, latents, micro_batch_size):
    """Latents -> PIL images, by the VAE alone: meanwhile the decoder need not be on the GPU."""
    vae = pipe.vae
    scaling = vae.config.latents_mean, vae.config.latents_std
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in scaling)
    images = []
    for batch in latents.split(micro_batch_size):
        batch = batch.to(vae.device, vae.dtype)
        pixels = vae.decode(batch * std.to(batch) + mean.to(batch), return_dict=False)[0]
        images += pipe.image_processor.postprocess(pixels, output_type="pil")
    return images
