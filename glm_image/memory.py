"""GLM-Image: how much memory a run needs. Where the numbers come from: benchmarks/memory.py."""

from runtime.gpu import CapturedForward, largest_micro_batch
from runtime.reward_memory import scoring_memory

GAPS = 2.5e9  # bytes: the card's context and its kernels, Adam's moments, what lies unused between tensors
CAST = 0.5e9  # an int8 layer's weights, cast to the 16 bits in which they are multiplied


def needed(models, settings):
    """Bytes of the GPU if all models stay on it, of the GPU if they take turns, and then of the host, to keep them.

    models: the policy, then the models that paint; with or without data.
    """
    tensors = [[*model.parameters(), *model.buffers()] for model in models]
    trained = sum(tensor.nbytes for each in tensors for tensor in each if tensor.requires_grad)
    policy, *painting = (sum(tensor.nbytes for tensor in each if not tensor.requires_grad) for each in tensors)
    all_stay, sampling, painted, scoring = working_memory(settings)
    turn = max(policy + sampling, sum(painting) + painted, scoring) + trained
    return policy + sum(painting) + trained + all_stay, turn, policy + sum(painting)


def vae_workspace(pixels):
    """Bytes that a picture of so many pixels takes in the VAE beside the tensors, which are 3.1e3 per pixel.

    The release reports peaks of 5.1e3 per pixel at 512x512 and 1024x1024, but of 3.1e3 at 2048x2048: cuDNN seems to
    reorder what it convolves, in a workspace, where that is fewer than 2^31 numbers, 512 per pixel.
    """
    return 2e3 * pixels if 512 * pixels < 2**31 else 0


def working_memory(settings):
    """Bytes to leave beside the weights: if all models stay on the GPU, in the policy's, the painting, the scoring turn."""
    pixels = settings.height * settings.width
    rows = settings.prompts_per_step * settings.group_size  # sampled side by side
    size = min(settings.micro_batch_size, largest_micro_batch(settings))
    tokens = 320 + pixels // 32**2  # prompt, preview and picture
    if settings.sources:
        tokens += pixels // 32**2 - 256  # their codes, and no preview
    room = (tokens // CapturedForward.ROOM + 1) * CapturedForward.ROOM
    cache = 41e3 * room * rows
    nucleus = 17e3 * tokens * rows  # one per token drawn
    reading = 0.37e6 * (64 + pixels // 32**2) * rows if settings.sources else 0  # prompts with their sources' codes
    cast = CAST if settings.base == "int8" else 0
    update = 0.8e6 * tokens * size + cast
    painting = 3.1e3 * pixels + vae_workspace(pixels)  # by the VAE, one picture at a time
    if settings.train in ("decoder", "both"):  # its training pass, one token per 16x16 pixels, with guidance twice
        passes = 2 if settings.guidance_scale > 1 else 1
        painting = max(painting, 0.37e6 * pixels // 16**2 * size * passes + cast)
    pictures = settings.prompts_per_step * max(settings.sequences * settings.paintings, settings.group_size)
    scoring = max(scoring_memory(spec, pictures) for spec in (settings.reward, settings.eval_reward))
    sampling = cache + max(nucleus, reading)
    together = max(sampling, cache + max(update, painting, scoring))
    return [work + GAPS for work in (together, max(sampling, update), painting, scoring)]
