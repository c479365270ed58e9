"""GLM-Image: its weights from files, and what of them learns."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from transformers import GlmImageForConditionalGeneration, T5EncoderModel, set_seed

from glm_image.decoder import DecoderGRPO
from glm_image.painting import encode_prompt
from grpo import GRPO, GRPOSettings
from runtime.adapters import adamw, adapter_file, add_adapter
from runtime.data import readable_loading
from runtime.gpu import CapturedForward, round_linears
from runtime.settings import TINY

LORA_TARGETS = {
    "codes": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    ],  # in the language model only
    "decoder": ["to_q", "to_k", "to_v", "to_out.0"],  # the attention of every block
}


def painting_models(pipe):
    """The models that paint: glyph encoder, decoder, VAE."""
    return pipe.text_encoder, pipe.transformer, pipe.vae


def load(settings, device, **modules):
    """The stock pipeline, on the CPU: its weights are mapped from the files, so that several
    processes share them.

    modules: parts of it that exist already, by their names.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if settings.sources and Path(settings.model).resolve() == Path(TINY):
        dtype = torch.float32  # in bfloat16 its vision tower reads a third of the codes wrong
    with readable_loading(settings.model):
        return GlmImagePipeline.from_pretrained(
            settings.model, dtype=dtype, use_safetensors=True, **modules
        )


def meta_models(settings, device):
    """The policy, then the models that paint, as tensors without data, built from a few kB of
    config files."""
    classes = {
        "vision_language_encoder": GlmImageForConditionalGeneration,
        "text_encoder": T5EncoderModel,
    }
    classes |= {"transformer": GlmImageTransformer2DModel, "vae": AutoencoderKL}
    modules = {}
    with readable_loading(settings.model), torch.device("meta"):
        for name, kind in classes.items():
            if hasattr(kind, "config_class"):  # from transformers, not from diffusers
                module = kind(kind.config_class.from_pretrained(settings.model, subfolder=name))
            else:
                module = kind.from_config(kind.load_config(settings.model, subfolder=name))
            modules[name] = module.to(torch.bfloat16)
    pipe, policy, _ = build(load(settings, device, **modules), settings, torch.device("meta"))
    return [policy.model, *painting_models(pipe)]


def build(pipe, settings, device, home=None):
    """Splits the stock pipeline: returns the pipeline that paints, the policy's trainer, the
    decoder's trainer or None.

    All models are still on the CPU: runtime.gpu.place moves them. Only int8 weights go straight to
    `home`, if that is given, so that the host never holds them.
    """
    language_model = pipe.vision_language_encoder
    language_model.model.visual = language_model.model.vqmodel = (
        None  # they read sources, see read_sources
    )
    pipe = GlmImagePipeline(**{**pipe.components, "vision_language_encoder": None})
    pipe.set_progress_bar_config(disable=True)
    keep_one_source(pipe.transformer)
    # The decoder makes the tables of its positions on the CPU, in every pass: up once, not in each
    # block.
    on_device = lambda rope, inputs, tables: [table.to(inputs[0].device) for table in tables]
    pipe.transformer.rope.register_forward_hook(on_device)
    if settings.base == "int8":  # embeddings, head, norms, VAE and text encoder stay as they are
        round_linears(language_model.model.language_model.layers, home)
        round_linears(pipe.transformer.transformer_blocks, home)
    for module in painting_models(pipe):
        module.requires_grad_(False)
    if device.type != "cpu":
        language_model.activation_checkpointing_enable()  # recompute activations instead of keeping them
        pipe.vae.enable_slicing()  # one picture at a time: the VAE takes more memory than all the rest, and little time

    set_seed(settings.seed)  # the adapters' start
    policy = policy_trainer(language_model, pipe, settings, device)
    if settings.train == "codes" and not (
        settings.adapter and adapter_file(settings.adapter, "decoder")
    ):
        return pipe, policy, None

    # From here on pipe.transformer contains the adapter.
    model, reference = add_adapter(pipe.transformer, "decoder", LORA_TARGETS["decoder"], settings)
    if settings.train == "codes":
        model.requires_grad_(False)
        return pipe, policy, None
    if device.type != "cpu":
        pipe.transformer.enable_gradient_checkpointing()
    optimizer = adamw(model, settings.decoder_lr, settings.warmup_steps)
    drawn = {"noise_level": settings.noise_level, "guidance_scale": settings.guidance_scale}
    return (
        pipe,
        policy,
        DecoderGRPO(model, optimizer, algorithm(settings), pipe, **drawn, reference=reference),
    )


def policy_trainer(language_model, pipe, settings, device):
    """GRPO of the language model: with an adapter, and on a GPU with a captured step for sampling,
    compiled or not."""
    model, reference = add_adapter(language_model, "codes", LORA_TARGETS["codes"], settings)
    num_codes = encode_prompt(pipe.processor, "", settings.height, settings.width)[2]
    if settings.sources:
        num_codes = settings.height * settings.width // 32**2  # an edit has no preview
    compiled = settings.compile == "yes" or (settings.compile == "auto" and device.type == "cuda")
    captured = compiled or device.type == "cuda"
    forward = CapturedForward(model, num_codes, compile=compiled) if captured else None
    codes = slice(0, pipe.transformer.config.prior_vq_quantizer_codebook_size)
    optimizer = adamw(model, settings.lr, settings.warmup_steps)
    return GRPO(model, optimizer, algorithm(settings), codes, forward, reference)


def algorithm(settings):
    names = vars(settings).keys() & vars(GRPOSettings())
    return GRPOSettings(**{name: getattr(settings, name) for name in names})


def keep_one_source(transformer):
    """Here all pictures of a batch edit one source: before it is written again, the earlier copy is
    dropped.

    The pipeline keeps its keys and values for each picture, 2.0 GB at 1024x1024. The cache spreads
    one copy over all.
    """

    def hook(module, inputs, options):
        cache = options.get("kv_caches")
        if cache is not None and cache[0].mode == "write":
            cache.clear()
            cache.set_mode("write")

    transformer.register_forward_pre_hook(hook, with_kwargs=True)
