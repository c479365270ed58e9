"""What knows GLM-Image: prompts in, pictures out.

model.GlmImage is what train.py takes from here: it encodes prompts as token ids and positions,
paints the codes that the policy writes, and holds the models, one of which learns. For another
model whose policy writes image tokens, write a class with its methods and properties:
__init__(pipe, begin), prepare_training; pipe, language_model, reference, codes, encode; parts,
painters, vae, paint, to_images, compiles_decoder. Beside it train.py takes load, for the weights.

adapters.py has what learns, weights.py sizes before a download and weights in int8, editing.py a
GlmImage that edits pictures, decoder.py one whose decoder learns. Model and adapters import nothing
else of the project but inputs/, so they can be used without the trainer.

The defaults of the release and of the tiny family are in runtime/settings.py.
"""
