"""Time and memory of a GRPO step of GLM-Image at full size, by phase, against the plain recipe.

    python benchmarks/glm_image.py --json full.json                           # a GPU of 48 GB or more
    python benchmarks/glm_image.py --cap-gb 24 --micro-batch-size 2           # held under the memory of a 24 GB card
    python benchmarks/glm_image.py --capture-only                             # the CUDA graph without torch.compile
    python benchmarks/glm_image.py --base int8                                # the frozen weights as int8
    python benchmarks/glm_image.py --tiny                                     # the tiny model on a CPU, a few minutes

It builds the model with random weights in the released sizes, for time and memory do not depend on their values, and
trains with the code of train.py. The plain recipe, in the same run and on the same settings, is transformers'
generate() for a group and one call of the pipeline that paints it; one by one, as the published trainer does it, is a
generate() and a call for each picture. The floor of sampling is the time to read the weights once a token, at the speed
that a large copy in the GPU's memory reaches here; 1.5 times the floor is an aim, not a result.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from diffusers import AutoencoderKL, GlmImagePipeline, GlmImageTransformer2DModel
from PIL import Image

import train
from grpo import GRPO, generate_with_logprobs
from rewards import mse, ssim
from runtime import UserError
from runtime.gpu import CapturedForward, place, plan
from runtime.log import Phases
from runtime.settings import TINY

PROMPTS = Path(TINY, "prompts.txt").read_text().splitlines()

# ---- the model ------------------------------------------------------------------------------------------------------


def pipeline(tiny, device):
    """The tiny pipeline, or one of the released sizes with random bfloat16 weights and the tiny one's other parts."""
    pipe = GlmImagePipeline.from_pretrained(TINY, dtype=torch.float32)
    if tiny:
        return pipe
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    # The vision tower is cut down to a layer: it is left behind before anything runs.
    config = transformers.GlmImageConfig(text_config={"rope_parameters": rope}, vision_config={"depth": 1})
    byt5 = {"d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6, "vocab_size": 384}
    byt5 = transformers.T5Config(**byt5, feed_forward_proj="gated-gelu")  # the encoder of ByT5-small
    # 16 latent channels and a factor of 8 are GLM-Image's; the channels of the blocks are taken from CogView4's.
    blocks = {"block_out_channels": (128, 512, 1024, 1024), "layers_per_block": 3, "mid_block_add_attention": False}
    blocks |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    latents = {"latent_channels": 16, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    latents |= {"use_quant_conv": False, "use_post_quant_conv": False}

    home = "meta" if device.type == "meta" else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):  # made on the GPU, where that takes seconds, and put away one by one
        policy = transformers.GlmImageForConditionalGeneration(config).to(home)  # 8.9 B parameters
        # 6.9 B; the defaults of the class, 64 heads of 40, would be a model of 2.9 B.
        decoder = GlmImageTransformer2DModel(num_layers=30, num_attention_heads=32, attention_head_dim=128).to(home)
        text_encoder = transformers.T5EncoderModel(byt5).to(home)  # 0.2 B
        vae = AutoencoderKL(**blocks, **latents).to(home)
    torch.set_default_dtype(torch.float32)
    made = {"vision_language_encoder": policy, "transformer": decoder, "text_encoder": text_encoder, "vae": vae}
    return GlmImagePipeline(**pipe.components | {name: module.eval() for name, module in made.items()})


def outline(settings):
    """The policy and those that paint, without content."""
    meta = torch.device("meta")
    pipe, policy, _ = train.build(pipeline(False, meta), settings, meta)
    return [policy.model, *train.painting_models(pipe)]


def judge(images, prompts, targets):
    """SSIM and MSE for the time they take; the reward is the order in the group, so that no group is without spread."""
    blank = [Image.new("RGB", image.size, "gray") for image in images]
    ssim(images, prompts, blank), mse(images, prompts, blank)
    return torch.arange(len(images))


REWARDS = {"order": (judge, 1.0)}

# ---- measuring ------------------------------------------------------------------------------------------------------


def copy_bandwidth(clock):
    """Bytes a second, read and written, of a copy far larger than any cache."""
    size, times = 2**31 if clock.device.type == "cuda" else 2**28, []
    source, target = torch.empty(2, size, dtype=torch.uint8, device=clock.device)
    for _ in range(6):  # the first warms up
        with clock("copy"):
            target.copy_(source)
        times.append(clock.read()["seconds/copy"])
    return 2 * size / min(times)


def bytes_read_a_token(policy):
    """All weights of the language model, its head and the adapter; of the embedding only the rows looked up."""
    return sum(p.nbytes for p in policy.parameters()) - policy.get_input_embeddings().weight.nbytes


def encode(run, settings, prompts, sources=None):
    read = zip(prompts, sources or [None] * len(prompts), strict=True)
    size = settings.height, settings.width
    return [train.encode_prompt(run.pipe.processor, prompt, *size, source) for prompt, source in read]


def of_case(run, settings, compile):
    """The same run at another size, its step of a token captured anew; `compile` None: not captured."""
    forward, model = None, run.policy.model
    if compile is not None:
        torch.compiler.reset()  # it gives up after eight shapes
        forward = CapturedForward(model, encode(run, settings, [""])[0][2], compile=compile)
    policy = GRPO(model, run.policy.optimizer, settings, run.policy.sampling_args["allowed_ids"], forward)
    run.phase.bar.set_postfix_str(f"{settings.height} px, group of {settings.group_size}")
    return dataclasses.replace(run, policy=policy)


def measure_plain(run, settings, count):
    """The plain recipe for `count` pictures of a prompt: transformers' generate(), then the pipeline, once for all."""
    policy, clock, length = run.policy.model, run.phase, encode(run, settings, PROMPTS[:1])[0][2]
    # Copies of the prompt: with num_return_sequences generate() mixes up the grids of preview and picture.
    messages = [[{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}]] * count
    options = {"processor_kwargs": {"target_h": settings.height, "target_w": settings.width}, "return_tensors": "pt"}
    inputs = run.pipe.processor.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    base = policy.get_base_model()
    num_codes = run.policy.sampling_args["allowed_ids"].stop
    unused = list(range(num_codes, base.lm_head.out_features))  # or pictures end early
    sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}

    @torch.no_grad()
    def generate(tokens):
        exactly = {"min_new_tokens": tokens, "max_new_tokens": tokens, "suppress_tokens": unused}
        return policy.generate(**inputs.to(policy.device), **sampling, **exactly)[:, -tokens:].cpu()

    policy.eval()
    text = base.config.get_text_config()
    own, text._attn_implementation = text._attn_implementation, "sdpa"  # transformers' own
    with clock("warm-up", policy):
        generate(8)
    with clock("sample", policy):
        tokens = generate(length)
    text._attn_implementation = own

    with clock("warm-up", *train.painting_models(run.pipe)):
        train.paint(run.pipe, PROMPTS[0], tokens[:1], settings, 0)
    with patch.object(settings, "micro_batch_size", count), clock("paint", *train.painting_models(run.pipe)):
        train.paint(run.pipe, PROMPTS[0], tokens, settings, 0)
    return clock.read()


def measure_step(run, settings, steps):
    """One step to warm up (it compiles and captures), then the median of some, by phase."""
    prompts, records = PROMPTS[: settings.prompts_per_step], []
    for i in range(1 + steps):
        _, metrics = train.grpo_step(run, settings, REWARDS, prompts, None, 100 * i)
        records.append(run.phase.read() | {"max_logprob_gap": metrics["max_logprob_gap"]})
        run.phase.bar.update()
    first, case = records.pop(0), {}
    for name in records[0]:
        summary = statistics.median if name.startswith("seconds/") else max
        case[name] = summary(record[name] for record in records)
    return case | {"first_step_seconds": sum(value for name, value in first.items() if name.startswith("seconds/"))}


def check_sampler(run, settings):
    """The captured forward against the model's own, same seeds: until the first other token, do the log-probs agree?"""
    codes, samples = run.policy, []
    prompts, positions, lengths = zip(*encode(run, settings, PROMPTS[: settings.prompts_per_step]), strict=True)
    with run.phase("check", codes.model):
        codes.model.eval()
        for forward in (None, codes.forward):
            generators = [torch.Generator(codes.model.device).manual_seed(i) for i in range(len(prompts))]
            samples += generate_with_logprobs(
                codes.model, prompts, lengths[0], num_samples=settings.group_size, position_ids=positions,
                top_p=settings.top_p, generators=generators, forward=forward, **codes.sampling_args,
            )  # fmt: skip
    plain, expected, _, tokens, logprobs, _ = samples
    same = (plain == tokens).cumprod(dim=1).bool()  # (N*G, T): up to the first difference the inputs are equal too
    return {
        "tokens": same.numel(),
        "tokens_before_the_first_difference": int(same.sum()),
        "max_logprob_difference_there": (expected - logprobs).abs()[same].max().item() if same.any() else None,
    }


def measure_compiled_decoder(run, settings):
    """Whether compiling the decoder's blocks pays within a run: a group decoded without, while compiling, and after."""
    shape = settings.group_size, encode(run, settings, [""])[0][2]
    codes = torch.randint(run.policy.sampling_args["allowed_ids"].stop, shape)

    def decode():
        with run.phase("paint", *train.painting_models(run.pipe)):
            train.paint(run.pipe, PROMPTS[0], codes, settings, 0)
        return run.phase.read()["seconds/paint"]

    _, without = decode(), decode()
    run.pipe.transformer.compile_repeated_blocks(fullgraph=True)
    first, after = decode(), decode()
    pays = (first - after) / (without - after) if after < without else None
    return {"seconds": without, "seconds_compiled": after, "first_seconds": first, "pays_after_groups": pays}


# ---- the report -----------------------------------------------------------------------------------------------------


def with_ratios(case, floor):
    """Tokens a second, share of the floor, and what the plain recipes take for a step's pictures, also over ours."""
    groups, pictures = case["prompts_per_step"], case["group_size"] * case["prompts_per_step"]
    case["tokens_per_second"] = pictures * case["tokens"] / case["seconds/sample"]
    case["times_the_floor"] = case["seconds/sample"] / (case["tokens"] * floor)
    for recipe, times in (("plain", groups), ("one_by_one", pictures)):
        plain, ours = (of["seconds/sample"] + of["seconds/paint"] for of in (case[recipe], case))
        case |= {f"{recipe}_seconds": times * plain, f"{recipe}_over_ours": times * plain / ours}
    return case


def table(cases):
    columns = {"size": "size", "group": "group_size"}
    columns |= {key.removeprefix("seconds/"): key for key in cases[0] if key.startswith("seconds/")}
    columns |= {"tokens/s": "tokens_per_second", "x floor": "times_the_floor"}
    columns |= {"plain s": "plain_seconds", "plain/ours": "plain_over_ours"}
    columns |= {"one by one s": "one_by_one_seconds", "one by one/ours": "one_by_one_over_ours"}
    columns |= {key.removeprefix("gpu_gb/") + " GB": key for key in cases[0] if key.startswith("gpu_gb/")}
    return align(
        [list(columns)]
        + [[f"{case[key]:.{2 * isinstance(case[key], float)}f}" for key in columns.values()] for case in cases]
    )


def align(rows):
    """Rows of words as lines whose columns are as wide as their widest word."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


# ---- the command ----------------------------------------------------------------------------------------------------


def arguments():
    """The command line; of what are flags of train.py the settings, one for each case, and those of the largest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.usage = "%(prog)s [options below] [flags of train.py, such as --micro-batch-size 2 --decode-steps 50]"
    parser.add_argument("--tiny", action="store_true", help="the tiny model, on a CPU as well")
    parser.add_argument("--sizes", type=int, nargs="+", help="pixels, square (default: 512 1024; tiny: 64 128)")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8], help="group sizes (default: 4 8)")
    parser.add_argument("--prompts-per-step", default="1", help="groups, sampled side by side (default: 1)")
    parser.add_argument("--capture-only", action="store_true", help="capture the step of a token without compiling it")
    parser.add_argument("--cap-gb", type=float, help="hold the run under this much GPU memory, in 10^9 bytes")
    parser.add_argument("--steps", type=int, default=2, help="measured steps a case, after one to warm up (default: 2)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options, flags = parser.parse_known_args()
    options.sizes = options.sizes or ([64, 128] if options.tiny else [512, 1024])
    if not options.tiny and not torch.cuda.is_available():
        parser.error("the full size needs a CUDA GPU; --tiny runs on a CPU")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} to write to")
    flags += ["--model", TINY if options.tiny else "released sizes", "--combine", "sum"]
    flags += ["--prompts-per-step", options.prompts_per_step, *(["--compile", "no"] if options.capture_only else [])]

    def settings(size, group):
        return train.parse_settings([*flags, *f"--height {size} --width {size} --group-size {group}".split()])

    try:
        cases = [settings(size, group) for size in options.sizes for group in options.groups]
        return options, cases, settings(max(options.sizes), max(options.groups))
    except UserError as error:
        parser.error(str(error))


def main():
    options, cases, largest = arguments()
    cuda = torch.cuda.is_available() and not options.tiny
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if options.cap_gb and cuda:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.cap_gb * 1e9 / total, 1.0), device)
    turns = plan(outline, largest, device)  # the largest case decides
    for settings in cases:
        settings.micro_batch_size = largest.micro_batch_size
    pipe, policy, _ = train.build(pipeline(options.tiny, device), largest, device)
    captured = SimpleNamespace(release=lambda: run.policy.forward and run.policy.forward.release())
    offload = place([policy.model, *train.painting_models(pipe)], device, captured, turns)
    run = train.Run(pipe, policy, None, Phases(device, len(cases) * (1 + options.steps), offload=offload))
    compile = False if options.capture_only else None if policy.forward is None else True
    bandwidth, read = copy_bandwidth(run.phase), bytes_read_a_token(policy.model)
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    versions = {package: version(package) for package in ("torch", "transformers", "diffusers", "peft")}
    report = {"device": name, "versions": versions, "arguments": sys.argv[1:], "settings": vars(largest).copy()}
    report |= {"forward": {None: "model", True: "compiled", False: "captured"}[compile], "offload": offload is not None}
    report |= {"copy_gb_per_second": bandwidth / 1e9, "gb_read_a_token": read / 1e9}
    report |= {"floor_ms_a_token": 1e3 * read / bandwidth, "cases": []}

    def save():
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")

    for settings in cases:
        run = of_case(run, settings, compile)
        if settings.group_size == options.groups[0]:  # once a size
            one = measure_plain(run, settings, 1)
        case = {"size": settings.height, "group_size": settings.group_size}
        case |= {"tokens": encode(run, settings, [""])[0][2], "prompts_per_step": settings.prompts_per_step}
        case |= {"one_by_one": one, "plain": measure_plain(run, settings, settings.group_size)}
        report["cases"].append(with_ratios(case | measure_step(run, settings, options.steps), read / bandwidth))
        save()  # whatever fails later, what was measured stays
        if compile is not None and "check" not in report:
            report["check"] = check_sampler(run, settings)
    if cuda:
        report["pinned_host_gb"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / 1e9
    report["peak_host_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    run.phase.bar.close()
    print(table(report["cases"]))
    if cuda:
        try:
            report["decoder"] = measure_compiled_decoder(run, cases[-1])
        except RuntimeError as error:
            report["decoder"] = f"failed: {error}"
    print(*(f"{name}: {value}" for name, value in report.items() if name not in ("cases", "settings")), sep="\n")
    save()


if __name__ == "__main__":
    main()
