"""What knows GLM-Image: prompts in, pictures out.

model.GlmImage is what train.py takes from here: it encodes prompts as token ids and positions,
paints the codes that the policy writes, and holds the models, one of which learns. Another model
whose policy writes image tokens has to provide a class with the same methods, and load() for its
weights.

editing.py and decoder.py are rooms of their own, which train.py does not enter: a GlmImage that
edits pictures, and one whose decoder learns. Their scripts are in examples/.

The defaults of a model are in defaults.json in its folder; those of the release are here. The flags
of runtime/settings.py are GLM-Image's.
"""
