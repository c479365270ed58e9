"""What knows GLM-Image: prompts in, pictures out.

Another model whose policy writes image tokens has to provide, under the same names, what train.py
takes from here:

    painting.encode_prompt   a prompt as token ids and positions, and T, the number of tokens that the policy writes
    painting.paint, develop  tokens -> latents -> PIL images; read_sources: the codes of pictures to edit
    model.load, build        weights from files; trainers, and what paints: painting_models, meta_models without data
    memory.needed            bytes that a run takes of GPU and host, computed before weights are downloaded
    decoder.DecoderGRPO      with repeat_for_steps; called only if what paints is to learn as well
"""
