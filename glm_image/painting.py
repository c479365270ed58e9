"""GLM-Image: prompts in, pictures out."""

import torch

from runtime import UserError

NOISE_SEED = (
    2**31
)  # added to a group's seed for the noise that its pictures start from; see SEEDS in train.py


@torch.no_grad()
def read_sources(pipe, sources, device):
    """Give each Source its codes, by the model's own vision tower and quantiser."""
    model = pipe.vision_language_encoder
    for source in sources:
        model.model.visual.to(device)
        model.model.vqmodel.to(device)
        inputs = pipe.processor.image_processor(source.image, return_tensors="pt").to(device)
        grid = inputs["image_grid_thw"]  # (1, 3)
        if grid.tolist() != [[1, source.image.height // 32, source.image.width // 32]]:
            raise UserError(
                f"the model reads a picture of {source.image.size} pixels as {grid.tolist()[0][1:]} codes, "
                "not one per 32x32 pixels: choose another --height and --width"
            )
        features = model.get_image_features(inputs["pixel_values"], grid).pooler_output
        source.codes = model.get_image_tokens(features).cpu()


def encode_prompt(processor, prompt, height, width, source=None):
    """A prompt as the policy reads it, and the 3-D positions of everything it reads and writes.

    GLM-Image writes a preview of about 256 codes first, then the picture proper, one code per 32x32
    pixels; both row by row. To edit a picture, it reads that picture's codes before the text, and
    writes no preview. Positions are (temporal, height, width). Text counts up on all three; a grid
    keeps the time of its start s and spreads over
    (s + row, s + column); whatever follows the grid starts at s + its longer side.

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
        grid = torch.cartesian_prod(
            torch.tensor([0]), torch.arange(rows), torch.arange(columns)
        ).T  # (3, rows*columns)
        positions.append(start + grid)
        start += max(rows, columns)
    positions = torch.cat(positions, dim=1)  # (3, L+T)
    return prompt_ids, positions, positions.shape[1] - len(prompt_ids)


def for_decoder(codes):
    """(B, rows, columns) -> (B, 4*rows*columns): from one code per 32x32 pixels to one per 16x16,
    for the decoder."""
    return codes.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)


def paint(pipe, prompt, tokens, settings, seed, source=None):
    """(G, T) tokens of one prompt -> latents (G, C, height / 8, width / 8), to develop. source:
    what they edit.

    All pictures of a group start from the same noise, so only the policy's choices make them
    differ. One prompt per
    batch: glyph embeddings of different prompts would be padded, and the decoder does not mask the
    padding.
    """
    rows = settings.height // 32
    columns = settings.width // 32
    scale = pipe.vae_scale_factor
    device = pipe.transformer.device
    # The decoder is not shown the preview: only the policy looks at it, as it writes the picture
    # proper.
    prior = for_decoder(tokens[:, -rows * columns :].view(-1, rows, columns))  # (G, 4*rows*columns)
    edited = {}  # the pipeline's arguments for the source, per picture
    if source is not None:
        size = source.image.height // 16, source.image.width // 16
        codes = for_decoder(source.codes.view(1, size[0] // 2, size[1] // 2))[0].to(device)
        edited = {"image": [source.image], "prior_token_image_ids": codes}
        edited["source_image_grid_thw"] = torch.tensor([[1, *size]])
    shape = (
        1,
        pipe.transformer.config.in_channels,
        settings.height // scale,
        settings.width // scale,
    )
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + NOISE_SEED))

    latents = []
    for batch in prior.split(settings.micro_batch_size):
        latents += pipe(
            prompt=[prompt] * len(batch),
            prior_token_ids=batch.to(device),
            **{name: [value] * len(batch) for name, value in edited.items()},
            latents=noise.expand(len(batch), -1, -1, -1),
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.decode_steps,
            guidance_scale=settings.guidance_scale,
            output_type="latent",
        ).images
    return torch.stack(latents)


@torch.no_grad()
def develop(pipe, latents):
    """Latents -> PIL images by the VAE alone, as the pipeline does it: meanwhile the decoder need
    not be there."""
    vae = pipe.vae
    latents = latents.to(vae.device, vae.dtype)
    scaling = vae.config.latents_mean, vae.config.latents_std
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1).to(latents) for numbers in scaling)
    pixels = vae.decode(latents * std + mean, return_dict=False)[0]
    return pipe.image_processor.postprocess(pixels, output_type="pil")
