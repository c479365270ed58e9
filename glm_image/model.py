"""GLM-Image: its weights from files, and what of them learns."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from transformers import GlmImageForConditionalGeneration, T5EncoderModel, set_seed

from glm_image.painting import encode_prompt
from runtime.adapters import adapter_file, add_adapter
from runtime.captured import CapturedForward
from runtime.data import readable_loading
from runtime.int8 import round_linears
from runtime.settings import TINY
from runtime.shared import SharedForward

LORA_TARGETS = {
    # In the language model only.
    "codes": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    # The attention of every block.
    "decoder": ["to_q", "to_k", "to_v", "to_out.0"],
}


def painting_models(pipe):
    """The models that paint: glyph encoder, decoder, VAE."""
    return pipe.text_encoder, pipe.transformer, pipe.vae


def load(model, device, edits=False, **modules):
    """The stock pipeline, on the CPU: mapped from the files, so that processes share its weights.

    model: folder or hub id. modules: parts of it that exist already, by their names.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if edits and Path(model).resolve() == Path(TINY):
        dtype = torch.float32  # in bfloat16 its vision tower reads a third of the codes wrong
    options = {"dtype": dtype, "use_safetensors": True}
    with readable_loading(model):
        return GlmImagePipeline.from_pretrained(model, **options, **modules)


def meta_models(settings, device):
    """The policy, then the models that paint, without data: from a few kB of config files."""
    kinds = {
        "vision_language_encoder": GlmImageForConditionalGeneration,
        "text_encoder": T5EncoderModel,
        "transformer": GlmImageTransformer2DModel,
        "vae": AutoencoderKL,
    }
    modules = {}
    with readable_loading(settings.model), torch.device("meta"):
        for name, kind in kinds.items():
            if hasattr(kind, "config_class"):  # from transformers, not from diffusers
                config = kind.config_class.from_pretrained(settings.model, subfolder=name)
                module = kind(config)
            else:
                module = kind.from_config(kind.load_config(settings.model, subfolder=name))
            modules[name] = module.to(torch.bfloat16)
    pipe = load(settings.model, device, **modules)
    pipe, adapted = build(pipe, settings, torch.device("meta"))
    return [adapted["codes"][0], *painting_models(pipe)]


def build(pipe, settings, device, home=None):
    """Splits the stock pipeline: the one that paints, without its language model; and the halves.

    These are {"codes": (the language model with an adapter, its reference), "decoder": the same, if
    it has an adapter}. All models are still on the CPU: runtime.gpu.place moves them. Only int8
    weights go straight to `home`, if that is given, so that the host never holds them.
    """
    language_model = pipe.vision_language_encoder
    # They read sources, see read_sources.
    language_model.model.visual = language_model.model.vqmodel = None
    pipe = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    pipe.set_progress_bar_config(disable=True)
    keep_one_source(pipe.transformer)
    # The decoder makes the tables of its positions on the CPU: up once per pass, not in each block.
    on_device = lambda rope, inputs, tables: [table.to(inputs[0].device) for table in tables]
    pipe.transformer.rope.register_forward_hook(on_device)
    if settings.base == "int8":  # embeddings, head, norms, VAE and text encoder stay as they are
        round_linears(language_model.model.language_model.layers, home)
        round_linears(pipe.transformer.transformer_blocks, home)
    for module in painting_models(pipe):
        module.requires_grad_(False)
    if device.type != "cpu":
        language_model.activation_checkpointing_enable()  # recompute activations, do not keep them
        pipe.vae.enable_slicing()  # one picture at a time: it takes most memory, and little time

    set_seed(settings.seed)  # the adapters' start
    lora = settings.lora_rank, settings.lora_alpha, settings.adapter
    adapted = {"codes": add_adapter(language_model, "codes", LORA_TARGETS["codes"], *lora)}
    learns = settings.train != "codes"
    if learns or (settings.adapter and adapter_file(settings.adapter, "decoder")):
        targets = LORA_TARGETS["decoder"]
        adapted["decoder"] = add_adapter(pipe.transformer, "decoder", targets, *lora)
    if not learns:
        pipe.transformer.requires_grad_(False)
    elif device.type != "cpu":
        pipe.transformer.enable_gradient_checkpointing()
    return pipe, adapted


def captured_step(model, pipe, settings, device):
    """The step of one token: on a CUDA GPU a graph; on a CPU one in which samples share rows."""
    num_codes = encode_prompt(pipe.processor, "", settings.height, settings.width)[2]
    if settings.sources:
        num_codes = settings.height * settings.width // 32**2  # an edit has no preview
    compiled = settings.compile == "yes" or (settings.compile == "auto" and device.type == "cuda")
    if not compiled and device.type != "cuda":
        return SharedForward(model, num_codes) if device.type == "cpu" else None
    # Not where the decoder learns, or keeps a source's keys: there it was not tried.
    if compiled and device.type == "cuda" and settings.train == "codes" and not settings.sources:
        pipe.transformer.compile_repeated_blocks()
    rows = settings.prompts_per_step * settings.group_size
    return CapturedForward(model, num_codes, rows, compile=compiled)


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
