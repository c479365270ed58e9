"""GLM-Image: prompts in, pictures out; its weights from files, and what of them learns."""

import json
import os
import sys
import warnings
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import GlmImagePipeline
from packaging.version import Version
from transformers import GlmImageProcessor, set_seed

from glm_image.adapters import add_adapter
from inputs import Own, UserError, download, find_path, readable

# PEFT's about transformers: nothing a user can act on.
warnings.filterwarnings("ignore", category=FutureWarning)
# The adapter's products stay float32 on purpose.
warnings.filterwarnings("ignore", message="TensorFloat32")
# It warns of modules to keep in float32 where there are none.
diffusers.utils.logging.set_verbosity_error()
# 5.24 says that past_key_values is to be renamed, in 5.40.
transformers.utils.logging.set_verbosity_error()
# In a file or a notebook each redrawing of a bar would be a line; of several ranks the first draws.
if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()

TINY = Own("tiny-glm-image")
RELEASE = "zai-org/GLM-Image"
# Added to a group's seed for the noise that its pictures start from.
NOISE_SEED = 2**31


class GlmImage:
    """The policy, a language model that writes codes, and what paints them.

    pipe: the stock pipeline; it is not changed, but for prepare_training. begin: as for GRPO; for
    "sample", in which prompts are encoded, "paint" and "vae".
    """

    compiles_decoder = True  # on a GPU

    def __init__(self, pipe, begin=lambda part, *models: None):
        self.begin = begin
        self.language_model = pipe.vision_language_encoder
        self.pipe = GlmImagePipeline(**pipe.components | {"vision_language_encoder": None})
        self.pipe.set_progress_bar_config(disable=True)
        self.vae = pipe.vae
        # What has to be on the GPU to paint latents: glyph encoder and decoder.
        self.painters = pipe.text_encoder, pipe.transformer

    def prepare_training(self, settings, device, adapters=None):
        """Adds the adapter, and freezes all else.

        The models are moved later: devices/memory.py. adapters: those to start from, {"adapter",
        "decoder-adapter": its folder}.
        """
        inner, transformer = self.language_model.model, self.pipe.transformer
        inner.visual = inner.vqmodel = None  # they read pictures
        # The decoder makes the tables of its positions on the CPU: up once per pass, not per block.
        on_device = lambda rope, inputs, tables: [table.to(inputs[0].device) for table in tables]
        transformer.rope.register_forward_hook(on_device)
        for module in (*self.painters, self.vae):
            module.requires_grad_(False)
        if device.type != "cpu":
            self.language_model.activation_checkpointing_enable()  # recompute activations
            self.vae.enable_slicing()  # one picture at a time: it takes most memory, little time

        set_seed(settings.seed)  # the adapter's start
        adapters = adapters or {}
        self.language_model, self.reference = add_adapter(
            self.language_model, "codes", settings.lora_rank, adapters.get("adapter")
        )
        if folder := adapters.get("decoder-adapter"):  # of examples/train_decoder.py
            add_adapter(transformer, "decoder", None, folder)
            transformer.requires_grad_(False)

    @property
    def parts(self):
        return self.language_model, self.pipe.text_encoder, self.pipe.transformer, self.vae

    def codes(self):
        """The ids of the codes among those of the language model."""
        return slice(0, self.pipe.transformer.config.prior_vq_quantizer_codebook_size)

    def encode(self, prompts, settings):
        """Prompts as GRPO.sample takes them: [(prompt_ids (L,), position_ids (3, L+T), T)]."""
        self.begin("sample", self.language_model)  # its seconds count to the part that it is for
        size = settings.height, settings.width
        return [encode_prompt(self.pipe.processor, prompt.text, *size) for prompt in prompts]

    def paint(self, prompt, tokens, settings, seed, **more):
        """(G, T) tokens of one prompt -> latents (G, C, height / 8, width / 8), for to_images.

        more: further arguments of the pipeline. All pictures of a group start from the same noise,
        so only the policy's choices make them differ. One prompt per batch: glyph embeddings of
        different prompts would be padded, and the decoder does not mask the padding.
        """
        self.begin("paint", *self.painters)
        rows, columns = settings.height // 32, settings.width // 32
        channels = self.pipe.transformer.config.in_channels
        # The decoder is not shown the preview: only the policy looks at it.
        prior = for_decoder(tokens[:, -rows * columns :].view(-1, rows, columns))
        shape = 1, channels, 4 * rows, 4 * columns
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + NOISE_SEED))

        def end_guidance(pipe, step, *_):
            if step + 1 == settings.guidance_steps:
                pipe._guidance_scale = 1.0  # as diffusers' own SDCFGCutoffCallback ends guidance
            return {}

        latents = []
        for batch in prior.split(settings.micro_batch_size):  # (B, 4*rows*columns)
            latents += self.pipe(
                prompt=[prompt.text] * len(batch),
                prior_token_ids=batch.to(self.pipe.transformer.device),
                latents=noise.expand(len(batch), -1, -1, -1),
                height=settings.height,
                width=settings.width,
                num_inference_steps=settings.decode_steps,
                guidance_scale=settings.guidance_scale,
                output_type="latent",
                callback_on_step_end=end_guidance,
                **{name: [value] * len(batch) for name, value in more.items()},
            ).images
        return torch.stack(latents)

    @torch.no_grad()
    def to_images(self, latents, micro_batch_size):
        """Latents -> PIL images, by the VAE alone: meanwhile the decoder need not be on the GPU."""
        self.begin("vae", self.vae)
        mean, std = latent_scaling(self.vae)
        images = []
        for batch in latents.split(micro_batch_size):
            batch = batch.to(self.vae.device, self.vae.dtype)
            pixels = self.vae.decode(batch * std.to(batch) + mean.to(batch), return_dict=False)[0]
            images += self.pipe.image_processor.postprocess(pixels, output_type="pil")
        return images


def latent_scaling(vae):
    """Mean and std of its latents, (1, C, 1, 1) both: the decoder paints them standardised."""
    numbers = vae.config.latents_mean, vae.config.latents_std
    return [torch.tensor(of_channels).view(1, -1, 1, 1) for of_channels in numbers]


# ---- prompts as the policy reads them ------------------------------------------------------------

TOKEN = [1, 1, 1]  # a token of text is a grid of one


def encode_prompt(processor, prompt, height, width):
    """A prompt as the policy reads it, and the 3-D positions of everything it reads and writes.

    GLM-Image writes a preview of about 256 codes first, then the picture proper, one code per 32x32
    pixels; both row by row. height, width: of the picture to be written, multiples of 32. Returns
    prompt_ids (L,), position_ids (3, L+T), T.
    """
    inputs = chat(processor, [{"type": "text", "text": prompt}], height, width)
    prompt_ids = inputs["input_ids"][0]  # (L,)
    grids = inputs["image_grid_thw"].tolist()  # listed large first, written preview first
    positions = positions_of([TOKEN] * len(prompt_ids) + grids[::-1])  # (3, L+T)
    return prompt_ids, positions, positions.shape[1] - len(prompt_ids)


def chat(processor, content, height, width):
    return processor.apply_chat_template(
        [[{"role": "user", "content": content}]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )


def positions_of(grids):
    """Positions (3, number of tokens), temporal, height and width, of grids (1, rows, columns).

    Text counts up on all three; a grid keeps the time of its start s and spreads over (s + row, s +
    column); whatever follows the grid starts at s + its longer side.
    """
    positions = []
    start = 0
    for _, rows, columns in grids:
        axes = torch.tensor([0]), torch.arange(rows), torch.arange(columns)
        positions.append(start + torch.cartesian_prod(*axes).T)  # (3, rows*columns)
        start += max(rows, columns)
    return torch.cat(positions, dim=1)


def for_decoder(codes):
    """(B, rows, columns) -> (B, 4*rows*columns): from a code per 32x32 pixels to one per 16x16."""
    return codes.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)


# ---- weights -------------------------------------------------------------------------------------


def load(model, device, **options):
    """The stock pipeline, on the CPU: mapped from the files, so that processes share its weights.

    model: folder or hub id. options: parts of it that exist already, by their names; or dtype.
    """
    if Version(transformers.__version__) < Version("5.5"):
        version = f"transformers {transformers.__version__} paints wrong pictures"
        raise UserError(f"{version}; pip install -r requirements.txt")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with readable_loading(model):
        folder = find_path(model)
        if not Path(folder).is_dir():
            folder = GlmImagePipeline.download(folder, use_safetensors=True, **options)
        # By itself the pipeline would ask whether the processor may run code from its folder.
        processor = GlmImageProcessor.from_pretrained(
            folder, subfolder="processor", trust_remote_code=False
        )
        usual = {"processor": processor, "dtype": dtype, "use_safetensors": True}
        return GlmImagePipeline.from_pretrained(folder, **(usual | options))


def is_tiny(model):
    """Whether a model is of the tiny family: it has 1,024 codes, where the release has 16,384.

    Settings.tiny has the defaults of such a model: a model's folder holds no settings. Raises
    UserError if it is not a GLM-Image pipeline.
    """
    if model == RELEASE:  # known before there is a network
        return False
    with readable_loading(model):
        config = read_config(model, "transformer")
        return config["prior_vq_quantizer_codebook_size"] == 1024


def read_config(model, part):
    """config.json of a part of a pipeline: {name: value}."""
    folder = download(model, "*/config.json")
    return json.loads(Path(folder, part, "config.json").read_text("utf-8"))


def readable_loading(model):
    hint = f"; give --model a folder with a GLM-Image pipeline, or {TINY}"
    return readable(f"load {model}", hint)
