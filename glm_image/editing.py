"""GLM-Image as an editor: a picture and a wish go in, the picture as wished comes out.

examples/train_edits.py trains it. The policy reads the codes of a picture, the source, before the
text, and writes no preview. The decoder sees the source, too: the pipeline keeps its keys and
values. All else is as for captions.
"""

import torch

from glm_image.model import TOKEN, GlmImage, chat, for_decoder, positions_of
from inputs import UserError
from inputs.prompts import read_pictures, read_prompts

# ---- wishes, each with its source ----------------------------------------------------------------


def read_edits(settings, prefix=""):
    """The edits to train on, or with "eval_" the held-out edits."""
    prompts = read_prompts(settings, prefix)
    for prompt, picture in zip(prompts, read_pictures(prompts, "source", settings, prefix)):
        if picture is None:
            raise UserError(
                f"line {prompt.line} of {getattr(settings, prefix + 'prompts')} has no source "
                "picture: edits need --sources, --prompts, --eval-sources and --eval-prompts; or "
                "none of them and --model tiny-glm-image"
            )
        prompt.source = prompt.row["sources"] = picture  # the second for rewards
    return prompts


@torch.no_grad()
def read_sources(pipe, edits, device):
    """Reads the codes of each edit's source by the model's own vision tower and quantiser.

    pipe: the stock pipeline, before prepare_training, which drops both.
    """
    model = pipe.vision_language_encoder
    model.model.visual.to(device)
    model.model.vqmodel.to(device)
    for edit in edits:
        inputs = pipe.processor.image_processor(edit.source, return_tensors="pt").to(device)
        grid = inputs["image_grid_thw"]  # (1, 3)
        features = model.get_image_features(inputs["pixel_values"], grid).pooler_output
        edit.codes = model.get_image_tokens(features).cpu()


# ---- the model -----------------------------------------------------------------------------------


class EditingGlmImage(GlmImage):
    """Takes Prompts that have a source."""

    compiles_decoder = False  # not tried where it keeps a source's keys

    def prepare_training(self, settings, device, adapters=None):
        super().prepare_training(settings, device, adapters)
        self.painters = *self.painters, self.vae  # which reads the source
        keep_one_source(self.pipe.transformer)

    def encode(self, edits, settings):
        self.begin("sample", self.language_model)
        size = settings.height, settings.width
        return [encode_edit(self.pipe.processor, edit, *size) for edit in edits]

    def paint(self, edit, tokens, settings, seed):
        self.begin("paint", *self.painters)  # the codes go where the decoder then is
        rows, columns = edit.source.height // 32, edit.source.width // 32
        codes = for_decoder(edit.codes.view(1, rows, columns))[0]
        return super().paint(
            edit,
            tokens,
            settings,
            seed,
            image=[edit.source],
            prior_token_image_ids=codes.to(self.pipe.transformer.device),
            source_image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]]),
        )


def encode_edit(processor, edit, height, width):
    """An edit as the policy reads it, after the codes of its source; see encode_prompt."""
    content = [{"type": "image", "image": edit.source}, {"type": "text", "text": edit.text}]
    inputs = chat(processor, content, height, width)
    prompt_ids = inputs["input_ids"][0]  # (L,)
    begin = prompt_ids.tolist().index(processor.image_token_id)
    end = begin + len(edit.codes)
    prompt_ids[begin:end] = edit.codes
    read, *written = inputs["image_grid_thw"].tolist()
    grids = [TOKEN] * begin + [read] + [TOKEN] * (len(prompt_ids) - end) + written
    positions = positions_of(grids)  # (3, L+T)
    return prompt_ids, positions, positions.shape[1] - len(prompt_ids)


def keep_one_source(transformer):
    """Here a batch edits one source: before that is written again, the earlier copy is dropped.

    The pipeline keeps its keys and values for each picture, 2.0 GB at 1024x1024. The cache spreads
    one copy over all.
    """

    def hook(module, inputs, options):
        cache = options.get("kv_caches")
        if cache is not None and cache[0].mode == "write":
            cache.clear()
            cache.set_mode("write")

    transformer.register_forward_pre_hook(hook, with_kwargs=True)
