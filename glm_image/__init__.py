"""What knows GLM-Image: prompts in, pictures out.

Another model whose policy writes image tokens has to provide, under the same names, what train.py
takes from here:

    painting.encode_prompts   prompts as token ids and positions, and T, how many tokens to write
    painting.paint            tokens -> latents, by the numbers of a Painting
    painting.to_images        latents -> PIL images
    painting.read_sources     the codes of pictures to edit
    model.load, build         weights from files; the halves that may learn, and what paints
    model.captured_step       the step of one token, made fast on a GPU; or None
    memory.needed             bytes that a run takes of GPU and host, before weights are downloaded
    decoder.DecoderGRPO       only if what paints is to learn as well

The defaults of a model are in defaults.json in its folder; those of the release are here. The flags
of runtime/settings.py are GLM-Image's.
"""
