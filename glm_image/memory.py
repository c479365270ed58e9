"""GLM-Image: how much memory a run needs. Where the numbers come from: benchmarks/memory.py."""

from runtime.gpu import CapturedForward, scoring_memory

# Bytes, an estimate: Adam's moments (0.4e9 to 0.5e9), kernels loaded at their first use, unused
# room between tensors.
GAPS = 2.0e9  # The card's context (0.25e9 to 0.6e9) is not in it: it is there before we ask how much is free.
CAST = 0.5e9  # an int8 layer's weights, cast to the 16 bits in which they are multiplied


def needed(models, settings):
    """Bytes of the GPU if all models stay on it, or if they take turns; of the host for the
    weights, and for paths.

    models: the policy, then the models that paint, the VAE last; with or without data.
    """
    tensors = [[*model.parameters(), *model.buffers()] for model in models]
    trained = sum(tensor.nbytes for each in tensors for tensor in each if tensor.requires_grad)
    policy, *decoder, vae = (
        sum(tensor.nbytes for tensor in each if not tensor.requires_grad) for each in tensors
    )
    weights = policy + sum(decoder) + vae
    all_stay, sampling, painting, developing, scoring = working_memory(settings)
    painting += sum(decoder) + (vae if settings.sources else 0)  # which reads a source
    turn = max(policy + sampling, painting, vae + developing, scoring) + trained
    return weights + trained + all_stay, turn, weights, paths_on_host(settings)


def paths_on_host(settings):
    """Bytes of a step's denoising paths, if the decoder learns: latents, log-probs, the reference's
    log-probs."""
    if settings.train == "codes":
        return 0
    paintings = settings.prompts_per_step * settings.sequences * settings.paintings
    kept = 3 if settings.kl_coef > 0 else 2
    latents = (
        settings.height * settings.width // 8**2 * 16 * 4
    )  # 16 numbers of 4 bytes for every 8x8 pixels
    return paintings * latents * (kept * (settings.decode_steps - 1) + 1)


def vae_workspace(pixels):
    """Bytes that a picture of so many pixels takes in the VAE beside its tensors, which are 3.1e3
    per pixel."""
    # The release reports peaks of 5.1e3 per pixel at 512x512 and 1024x1024, but of 3.1e3 at
    # 2048x2048: cuDNN seems to reorder what it convolves, in a workspace, where that is fewer than
    # 2^31 numbers, 512 per pixel.
    return 2e3 * pixels if 512 * pixels < 2**31 else 0


def working_memory(settings):
    """Bytes to leave beside the weights: if all stay on the GPU; in the turns of policy, decoder,
    VAE and rewards."""
    pixels = settings.height * settings.width
    rows = settings.prompts_per_step * settings.group_size  # sampled side by side
    size = min(settings.micro_batch_size, max(settings.group_size, settings.paintings))
    tokens = 320 + pixels // 32**2  # prompt, preview and picture
    cast = CAST if settings.base == "int8" else 0
    painting = (
        0.13e6 * pixels // 16**2 * size + cast
    )  # a pass of the decoder, one token per 16x16 pixels
    developing = 3.1e3 * pixels + vae_workspace(pixels)  # one picture at a time
    reading = 0
    if settings.sources:
        tokens += pixels // 32**2 - 256  # their codes, and no preview
        reading = (64 + pixels // 32**2) * max(
            0.37e6 * settings.prompts_per_step, 41e3 * rows
        )  # once; then G times
        painting = max(
            developing, painting + 0.5e6 * pixels // 16**2
        )  # a source in the VAE; its keys and values
    room = (tokens // CapturedForward.ROOM + 1) * CapturedForward.ROOM
    cache = 41e3 * room * rows
    nucleus = 17e3 * tokens * rows  # one per token drawn
    update = 0.8e6 * tokens * size + cast
    if settings.train in ("decoder", "both"):  # its training pass, with guidance two of them
        passes = 2 if settings.guidance_scale > 1 else 1
        painting = max(painting, 0.37e6 * pixels // 16**2 * size * passes + cast)
    pictures = settings.prompts_per_step * max(
        settings.sequences * settings.paintings, settings.group_size
    )
    scoring = max(
        scoring_memory(spec, pictures) for spec in (settings.reward, settings.eval_reward)
    )
    sampling = cache + max(nucleus, reading)
    together = max(sampling, cache + max(update, painting, developing, scoring))
    return [
        work + GAPS for work in (together, max(sampling, update), painting, developing, scoring)
    ]
