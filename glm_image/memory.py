"""GLM-Image: how much memory a run needs. Where the numbers come from: benchmarks/memory.py."""

from runtime import ranks
from runtime.captured import CapturedForward
from runtime.gpu import scoring_memory

# Bytes, an estimate: kernels loaded at their first use, unused room between tensors. The card's
# context (0.25e9 to 0.6e9) is not in it: it is there before we ask how much is free.
GAPS = 1.5e9
CAST = 0.5e9  # an int8 layer's weights, cast to the 16 bits in which they are multiplied
PROMPT = 64  # tokens that any prompt may have; a longer one counts a token per 4 bytes


def needed(models, settings, micro_batch_size, prompt_bytes, **more):
    """Bytes of the GPU if all models stay, or if they take turns; of the host for weights, paths.

    These are a step's denoising paths, which wait there if the decoder learns.

    models: the policy, then the models that paint, the VAE last; with or without data.
    prompt_bytes: of the longest prompt. more: see working_memory.
    """
    tensors = [[*model.parameters(), *model.buffers()] for model in models]
    trained = sum(tensor.nbytes for each in tensors for tensor in each if tensor.requires_grad)
    trained *= 4  # and its gradient, and Adam's two moments
    frozen = [sum(x.nbytes for x in each if not x.requires_grad) for each in tensors]
    policy, *decoder, vae = frozen
    work = working_memory(settings, micro_batch_size, prompt_bytes, **more)
    stay, sampling, painting, decoding, scoring = work
    painting += sum(decoder) + (vae if more.get("edits") else 0)  # which reads a source
    turn = max(policy + sampling, painting, vae + decoding, scoring)
    always = trained + GAPS + (0.5e9 if ranks.count() > 1 else 0)  # NCCL's buffers

    return sum(frozen) + stay + always, turn + always, sum(frozen), paths_of(settings, **more)


def paths_of(settings, sequences=0, paintings=1, edits=False):
    """Bytes of a step's denoising paths: latents, log-probs, the reference's log-probs."""
    tensors = (3 if settings.kl_coef > 0 else 2) * (settings.decode_steps - 1) + 1
    latents = settings.height * settings.width // 8**2 * 16 * 4  # 16 float32 per 8x8 pixels
    paths = settings.prompts_per_step * sequences * paintings * tensors * latents
    return paths if paintings > 1 else 0


def vae_workspace(pixels):
    """Bytes that a picture takes in the VAE beside its tensors, which are 3.1e3 per pixel."""
    # The release reports peaks of 5.1e3 per pixel at 512x512 and 1024x1024, but of 3.1e3 at
    # 2048x2048: cuDNN seems to reorder what it convolves, in a workspace, where that is fewer than
    # 2^31 numbers, 512 per pixel.
    return 2e3 * pixels if 512 * pixels < 2**31 else 0


def working_memory(
    settings, micro_batch_size, prompt_bytes, sequences=None, paintings=1, edits=False
):
    """Bytes beside the weights: if all stay; in the turns of policy, decoder, VAE and rewards.

    sequences, paintings: of codes per prompt, of each of these; above 1 the decoder learns. edits:
    whether prompts are pictures to edit.
    """
    sequences = sequences or settings.group_size
    pixels = settings.height * settings.width
    rows = settings.prompts_per_step * settings.group_size  # sampled side by side
    size = min(micro_batch_size, max(sequences, paintings))
    prompt = max(PROMPT, prompt_bytes // 4)
    codes = pixels // 32**2
    patches = pixels // 16**2  # the decoder's tokens
    tokens = prompt + codes + (codes if edits else 256)  # a source's, or the preview
    cast = CAST if settings.base == "int8" else 0
    painting = 0.13e6 * patches * size + cast  # a pass of the decoder
    decoding = 3.1e3 * pixels + vae_workspace(pixels)  # one picture at a time
    reading = 0
    if edits:  # each is read once, then repeated G times
        reading = (prompt + codes) * max(0.37e6 * settings.prompts_per_step, 41e3 * rows)
        # A source in the VAE; its keys and values in the decoder.
        painting = max(decoding, painting + 0.5e6 * patches)
    room = (tokens // CapturedForward.ROOM + 1) * CapturedForward.ROOM
    cache = 41e3 * room * rows
    nucleus = 17e3 * tokens * rows  # one per token drawn
    update = 0.8e6 * tokens * size + cast
    if paintings > 1:  # the decoder's training pass, with guidance two of them
        passes = 2 if settings.guidance_scale > 1 else 1
        painting = max(painting, 0.37e6 * patches * size * passes + cast)
    pictures = rows * (paintings if sequences > 1 else 1)
    scoring = max(
        scoring_memory(spec, pictures) for spec in (settings.reward, settings.eval_reward)
    )
    sampling = cache + max(nucleus, reading)
    stay = max(sampling, cache + max(update, painting, decoding, scoring))
    return stay, max(sampling, update), painting, decoding, scoring
