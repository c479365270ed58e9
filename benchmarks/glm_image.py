"""Time and memory of a GRPO step of GLM-Image at full size, by phase, against the plain recipe.

    python benchmarks/glm_image.py --json full.json                           # a GPU of 48 GB or more
    python benchmarks/glm_image.py --cap-gb 24 --micro-batch-size 2           # held under the memory of a 24 GB card
    python benchmarks/glm_image.py --tiny                                     # the tiny model on a CPU, a minute

It builds the model with random weights in the released sizes, for time and memory do not depend on their values, and
trains with the code of train.py. The plain recipe, in the same run and on the same settings, makes one generate() and
one decode a picture. The floor of sampling is the time to read the weights once a token, at the speed that a large copy
in the GPU's memory reaches here.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from PIL import Image
from transformers import (
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)

import train
from grpo import GRPO, FastSampler, generate_with_logprobs
from rewards import parse_rewards, score

PROMPTS = Path(train.TINY, "prompts.txt").read_text().splitlines()
CHECKED = 128  # tokens compared between the plain loop and the FastSampler


# ---- the model ------------------------------------------------------------------------------------------------------


def released_policy():
    """8.9 B parameters. The vision tower is cut down to a layer: it is left behind before anything runs."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    return GlmImageForConditionalGeneration(
        GlmImageConfig(text_config={"rope_parameters": rope}, vision_config={"depth": 1})
    )


def released_decoder():
    """6.9 B parameters; the defaults of the class, 64 heads of 40, would be a model of 2.9 B."""
    return GlmImageTransformer2DModel(num_layers=30, num_attention_heads=32, attention_head_dim=128)


def released_text_encoder():
    """The encoder of ByT5-small, 0.2 B parameters."""
    sizes = {"d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6, "vocab_size": 384}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))


def released_vae():
    """16 latent channels and a factor of 8 are GLM-Image's; the channels of the blocks are taken from CogView4's."""
    return AutoencoderKL(
        block_out_channels=(128, 512, 1024, 1024), layers_per_block=3, latent_channels=16, mid_block_add_attention=False,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False, use_post_quant_conv=False, latents_mean=[0.0] * 16, latents_std=[1.0] * 16,
    )  # fmt: skip


def build(make, device):
    """A module with random bfloat16 weights, made on the GPU, where that takes seconds, and put away on the CPU."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        module = make()
    torch.set_default_dtype(torch.float32)
    if device.type == "meta":
        return module.eval()
    module = module.eval().to("cpu")
    torch.cuda.empty_cache()  # what it leaves there would count as taken
    return module


def pipeline(tiny, device):
    """The tiny pipeline, or one of the released sizes with the tiny one's tokenizers and scheduler."""
    pipe = GlmImagePipeline.from_pretrained(train.TINY, dtype=torch.float32)
    if tiny:
        return pipe
    return GlmImagePipeline(
        tokenizer=pipe.tokenizer,
        processor=pipe.processor,
        scheduler=pipe.scheduler,
        vision_language_encoder=build(released_policy, device),
        transformer=build(released_decoder, device),
        text_encoder=build(released_text_encoder, device),
        vae=build(released_vae, device),
    )


# ---- measuring ------------------------------------------------------------------------------------------------------


def seconds(work, device):
    """Run something and return what it took and what it returned."""
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def copy_bandwidth(device):
    """Bytes a second, read and written, of a copy far larger than any cache."""
    source = torch.empty(2**31 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(seconds(lambda: target.copy_(source), device)[0] for _ in range(5))
    return 2 * source.numel() / best


def bytes_read_a_token(policy):
    """All weights of the language model, its head and the adapter; of the embedding only the rows that are looked up."""
    embedding = policy.get_input_embeddings().weight
    return sum(p.nbytes for p in policy.parameters()) - embedding.nbytes


def prepare(trainer, modules):
    """Bring the weights up that something outside of a step is about to use."""
    if trainer.homes:
        trainer._fetch(modules)


def measure_step(trainer, settings, steps):
    """One step to warm up (it compiles and captures), then the median of some, by phase."""
    prompts = PROMPTS[: settings.prompts_per_step]
    trainer.settings, trainer.micro_batches = (
        settings,
        torch.arange(settings.group_size).split(settings.micro_batch_size),
    )
    first, _ = seconds(lambda: trainer.step(prompts), trainer.device)
    records = [trainer.step(prompts, seed=100 * (i + 1))[1] for i in range(steps)]
    case = {name: statistics.median(r[name] for r in records) for name in records[0] if name.startswith("seconds/")}
    case |= {name: max(r[name] for r in records) for name in records[0] if name.startswith("gpu_gb/")}
    return case | {"first_step_seconds": first, "max_logprob_gap": max(r["max_logprob_gap"] for r in records)}


def measure_plain(trainer, painter, settings):
    """The plain recipe for one picture: transformers' generate(), then one picture decoded."""
    policy, device, codes = trainer.model, trainer.device, trainer.shaping["num_codes"]
    prepare(trainer, [policy])
    policy.eval()
    inputs = painter.processor.apply_chat_template(
        [[{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}]], tokenize=True, return_dict=True,
        return_tensors="pt", processor_kwargs={"target_h": settings.height, "target_w": settings.width},
    ).to(device)  # fmt: skip
    _, _, length = trainer.encode(PROMPTS[0])
    unused = list(range(codes, policy.get_base_model().lm_head.out_features))  # else a random model ends pictures early

    def generate(count):
        with torch.no_grad():
            return policy.generate(
                **inputs, do_sample=True, temperature=settings.temperature, top_p=settings.top_p, top_k=0,
                min_new_tokens=count, max_new_tokens=count, suppress_tokens=unused,
            )  # fmt: skip

    attention = policy.get_base_model().config.get_text_config()
    ours, attention._attn_implementation = attention._attn_implementation, "sdpa"  # transformers' own
    generate(8)  # warms up
    sample, sequence = seconds(lambda: generate(length), device)
    attention._attn_implementation = ours
    prepare(trainer, trainer.frozen)
    decode, _ = seconds(lambda: trainer.decode(PROMPTS[0], sequence[:, -length:].cpu(), 0), device)
    return {"plain_sample_seconds": sample, "plain_decode_seconds": decode}


def measure_compiled_decoder(trainer, painter, settings):
    """Whether compiling the decoder's blocks pays within a run: a group decoded without, with the compilation, and after."""
    _, _, length = trainer.encode(PROMPTS[0])
    codes = torch.randint(trainer.shaping["num_codes"], (settings.group_size, length))
    prepare(trainer, trainer.frozen)
    without = [seconds(lambda: trainer.decode(PROMPTS[0], codes, 0), trainer.device)[0] for _ in range(2)][-1]
    painter.transformer.compile_repeated_blocks(fullgraph=True)
    first, after = [seconds(lambda: trainer.decode(PROMPTS[0], codes, 0), trainer.device)[0] for _ in range(2)]
    for block in painter.transformer.transformer_blocks:
        block._compiled_call_impl = None
    pays = (first - after) / (without - after) if after < without else None
    return {"seconds": without, "seconds_compiled": after, "first_seconds": first, "pays_after_groups": pays}


def check_sampler(trainer):
    """The FastSampler against the plain loop, same seed: until the first other token, do the log-probs agree?"""
    prepare(trainer, [trainer.model])
    trainer.model.eval()
    ids, positions, length = trainer.encode(PROMPTS[0])
    count, shaping = min(length, CHECKED), {"top_p": trainer.settings.top_p, **trainer.shaping}
    generators = [torch.Generator(trainer.device).manual_seed(0) for _ in range(2)]
    plain, expected, _ = generate_with_logprobs(
        trainer.model, ids, count, num_samples=4, position_ids=positions, generator=generators[0], **shaping
    )
    tokens, logprobs, _ = trainer.sampler([ids], [positions], count, 4, generators[1:], **shaping)
    same = (plain == tokens).cumprod(dim=1).bool()  # (4, count): up to the first difference the inputs are equal too
    return {
        "tokens": same.numel(),
        "tokens_before_the_first_difference": int(same.sum()),
        "max_logprob_difference_there": (expected - logprobs).abs()[same].max().item() if same.any() else None,
    }


# ---- the report -----------------------------------------------------------------------------------------------------


def with_ratios(case, floor):
    """Tokens a second, share of the floor, and the plain recipe over ours for sampling and decoding the pictures of a step."""
    sample, decode = case["seconds/sample"], case["seconds/decode"]
    pictures = case["group_size"] * case["prompts_per_step"]
    plain = pictures * (case["plain_sample_seconds"] + case["plain_decode_seconds"])
    return case | {
        "tokens_per_second": pictures * case["tokens"] / sample,
        "times_the_floor": sample / (case["tokens"] * floor),
        "plain_seconds": plain,
        "plain_over_ours": plain / (sample + decode),
    }


def table(cases):
    phases = [p for p in train.PHASES if any(f"seconds/{p}" in case for case in cases)]
    names = ["size", "group", *phases, "tokens/s", "x floor", "plain s", "plain/ours"]
    rows = [
        [
            f"{c['size']}", f"{c['group_size']}",
            *(f"{c[f'seconds/{p}']:.2f}" if f"seconds/{p}" in c else "-" for p in phases),
            f"{c['tokens_per_second']:.0f}", f"{c['times_the_floor']:.2f}", f"{c['plain_seconds']:.1f}",
            f"{c['plain_over_ours']:.2f}",
        ]
        for c in cases
    ]  # fmt: skip
    if any(f"gpu_gb/{p}" in c for c in cases for p in phases):
        names += ["peak GB: " + " ".join(p for p in phases if f"gpu_gb/{p}" in cases[0])]
        for row, case in zip(rows, cases, strict=True):
            row.append(" ".join(f"{case[f'gpu_gb/{p}']:.1f}" for p in phases if f"gpu_gb/{p}" in case))
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [names, *rows])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--tiny", action="store_true", help="the tiny model, on a CPU as well")
    parser.add_argument("--sizes", type=int, nargs="+", help="pixels, square (default: 512 1024; tiny: 64 128)")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8], help="group sizes (default: 4 8)")
    parser.add_argument("--prompts-per-step", type=int, default=1, help="groups, sampled side by side (default: 1)")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="as for train.py (default: 4)")
    parser.add_argument("--sampler", default="auto", choices=["auto", "plain", "fast", "compile"])
    parser.add_argument("--offload", default="auto", choices=["auto", "always", "never"])
    parser.add_argument("--cap-gb", type=float, help="hold the run under this much GPU memory, in 10^9 bytes")
    parser.add_argument("--steps", type=int, default=2, help="measured steps a case, after one to warm up (default: 2)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("the full size needs a CUDA GPU; --tiny runs on a CPU")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} to write to")
    return options


def settings_of(options, size, group):
    """train.py's own settings and defaults for one case."""
    flags = {
        "model": train.TINY if options.tiny else "released sizes",
        "height": size,
        "width": size,
        "group-size": group,
    }
    flags |= {"prompts-per-step": options.prompts_per_step, "micro-batch-size": options.micro_batch_size}
    flags |= {"offload": options.offload, "kl-coef": 0.01}
    return train.parse_settings([word for name, value in flags.items() for word in (f"--{name}", str(value))])[0]


def main():
    options = arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.tiny else torch.device("cpu")
    if options.cap_gb and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.cap_gb * 1e9 / total, 1.0), device)
    sizes = options.sizes or ([64, 128] if options.tiny else [512, 1024])
    current = settings_of(options, sizes[0], options.groups[0])
    largest = settings_of(options, max(sizes), max(options.groups))
    policy, painter = train.split(pipeline(options.tiny, device), current, device)
    frozen = [painter.text_encoder, painter.transformer, painter.vae]
    sampler = options.sampler if options.sampler != "auto" else "compile" if device.type == "cuda" else "fast"
    rewards = parse_rewards("ssim:1,mse:1")

    def judge(images, prompts, targets):
        """SSIM and MSE for the time they take; maximised is the order in the group, so that no group is ever dead."""
        blank = Image.new("RGB", images[0].size, "gray")
        return torch.arange(len(images)).float(), score(rewards, images, prompts, [blank] * len(images))[1]

    trainer = GRPO(
        policy,
        torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-6),
        encode=lambda prompt: train.encode_prompt(painter.processor, prompt, current.height, current.width),
        decode=lambda prompt, tokens, seed: train.decode_images(painter, prompt, tokens, current, seed),
        score=judge,
        settings=current,
        num_codes=painter.transformer.config.prior_vq_quantizer_codebook_size,
        frozen=frozen,
        device=device,
        offload=train.take_turns(largest, device, [policy, *frozen]),
        sampler=None if sampler == "plain" else FastSampler(policy, options.prompts_per_step, sampler == "compile"),
        on_phase=lambda text: print(
            f"\r{current.height} px, group of {current.group_size}: {text}".ljust(60), end="", file=sys.stderr
        ),
    )
    bandwidth, read = copy_bandwidth(device), bytes_read_a_token(policy)
    report = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "transformers", "diffusers", "peft")},
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "sampler": sampler,
        "offload": bool(trainer.homes),
        "copy_gb_per_second": bandwidth / 1e9,
        "gb_read_a_token": read / 1e9,
        "floor_ms_a_token": 1e3 * read / bandwidth,
        "cases": [],
    }
    if trainer.sampler is not None:
        report["check"] = check_sampler(trainer)
    for size in sizes:
        current = settings_of(options, size, options.groups[0])
        plain = measure_plain(trainer, painter, current)
        for group in options.groups:
            current = settings_of(options, size, group)
            case = {
                "size": size,
                "group_size": group,
                "prompts_per_step": options.prompts_per_step,
                "tokens": trainer.encode(PROMPTS[0])[2],
                **plain,
            }
            case |= measure_step(trainer, current, options.steps)
            report["cases"].append(with_ratios(case, read / bandwidth))
            write(report, options.json)  # whatever fails later, what was measured stays
    if device.type == "cuda":
        report["pinned_host_gb"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / 1e9
    report["peak_host_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print("\r".ljust(60), file=sys.stderr)
    print(table(report["cases"]))
    if device.type == "cuda":
        try:
            report["decoder"] = measure_compiled_decoder(trainer, painter, current)
        except RuntimeError as error:
            report["decoder"] = f"failed: {error}"
    print(*(f"{name}: {value}" for name, value in report.items() if name not in ("cases", "options")), sep="\n")
    write(report, options.json)


def write(report, path):
    if path:
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
