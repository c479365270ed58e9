"""What knows GLM-Image: prompts in, pictures out.

Another model whose policy writes image tokens has to provide, under the same names, what train.py takes from here:

    painting.encode_prompt   a prompt as token ids and positions, and T, the number of tokens that the policy writes
    painting.paint, develop  tokens -> latents -> PIL images; painting.read_sources if it can edit pictures
    model.load, model.build  its weights from files; the policy's GRPO trainer and the models that paint
    memory.needed            bytes that a run takes of GPU and host, computed before anything is downloaded
    decoder.DecoderGRPO      only if what paints is to learn as well
"""
