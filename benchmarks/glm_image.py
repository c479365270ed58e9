"""A GRPO step of GLM-Image at full size, by phase, beside the plain recipe and the floor of sampling.

    python benchmarks/glm_image.py --json full.json                      # a GPU of 48 GB or more
    python benchmarks/glm_image.py --cap-gb 24 --micro-batch-size 2      # held under the memory of a 24 GB card
    python benchmarks/glm_image.py --capture-only                        # the CUDA graph without torch.compile
    python benchmarks/glm_image.py --tiny                                # the tiny model on a CPU, a few minutes

Weights are random, in the released sizes, for time and memory do not depend on their values; the steps are train.py's.
The plain recipe, in the same run and for as many pictures as a group has, is transformers' generate() and one call of the
stock pipeline. The floor is the time to read all weights once per token, at the speed of a large copy on this device.
"""

import argparse
import json
import resource
import statistics
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import train
from benchmarks.memory import meta_models, pipeline
from glm_image import memory
from glm_image.model import build, painting_models
from glm_image.painting import paint
from rewards import parse_rewards
from runtime import UserError
from runtime.data import Prompts, read_prompts
from runtime.gpu import place, plan
from runtime.log import Phases
from runtime.settings import TINY, parse_settings

PROMPTS = read_prompts(f"{TINY}/prompts.txt", None).texts


def order(images, prompts, targets):
    """A reward: the place in the group, so that no group is without spread."""
    return torch.arange(len(images)).float()


# ---- measuring ------------------------------------------------------------------------------------------------------


def copy_bandwidth(phase):
    """Bytes per second, read and written, of a copy far larger than any cache."""
    size = 2**31 if phase.device.type == "cuda" else 2**28
    source, target = torch.empty(2, size, dtype=torch.uint8, device=phase.device)
    seconds = []
    for _ in range(6):  # the first warms up
        with phase.measured("copy"):
            target.copy_(source)
        seconds.append(phase.read()["seconds/copy"])
    return 2 * size / min(seconds)


def measure_plain(run, settings):
    """The plain recipe for a group: transformers' generate(), then one call of the stock pipeline."""
    policy = run.policy.model
    tokens = train.encode(run, settings, PROMPTS[0])[2]
    # Copies of the prompt: with num_return_sequences generate() mixes up the grids of preview and picture.
    messages = [[{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}]] * settings.group_size
    options = {"processor_kwargs": {"target_h": settings.height, "target_w": settings.width}, "return_tensors": "pt"}
    inputs = run.pipe.processor.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    base = policy.get_base_model()
    unused = list(range(run.policy.sampling_args["allowed_ids"].stop, base.lm_head.out_features))  # no early end
    sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}

    @torch.no_grad()
    def generate(count):
        exactly = {"min_new_tokens": count, "max_new_tokens": count, "suppress_tokens": unused}
        return policy.generate(**inputs.to(policy.device), **sampling, **exactly)[:, -count:].cpu()

    policy.eval()
    text = base.config.get_text_config()
    ours = text._attn_implementation
    text._attn_implementation = "sdpa"  # transformers' own
    with run.phase("warm-up", policy):
        generate(8)
    with run.phase("sample", policy):
        codes = generate(tokens)
    text._attn_implementation = ours
    with run.phase("warm-up", *painting_models(run.pipe)):
        paint(run.pipe, PROMPTS[0], codes[:1], settings, 0)
    together = patch.object(settings, "micro_batch_size", settings.group_size)
    with together, run.phase("paint", *painting_models(run.pipe)):
        paint(run.pipe, PROMPTS[0], codes, settings, 0)
    return run.phase.read()


def measure_steps(run, settings, rewards, steps):
    """Of one step to warm up, which compiles and captures, its seconds; of the others the medians, and largest peaks."""
    prompts = Prompts(PROMPTS[: settings.prompts_per_step])
    records = []
    for i in range(1 + steps):
        _, metrics = train.grpo_step(run, settings, rewards, prompts, 100 * i)
        records.append(metrics | run.phase.read())
    first = sum(value for name, value in records.pop(0).items() if name.startswith("seconds/"))
    median_of = lambda name: statistics.median if name.startswith("seconds/") else max
    return {name: median_of(name)(r[name] for r in records) for name in records[0]} | {"first_step_seconds": first}


def measure(run, settings, rewards, options, floor):
    """One size and group: a step by phase, tokens per second, times the floor, and the plain recipe over ours."""
    tokens = train.encode(run, settings, "")[2]
    if run.policy.forward:
        torch.compiler.reset()  # it gives up after eight shapes
        run.policy.forward.release()
        run.policy.forward.size = 0
        run.policy.forward.num_new_tokens = tokens
    case = {"size": settings.height, "group_size": settings.group_size, "tokens": tokens}
    plain = measure_plain(run, settings)
    case |= measure_steps(run, settings, rewards, options.steps)
    ours = case["seconds/sample"] + case["seconds/paint"]
    case["tokens_per_second"] = settings.prompts_per_step * settings.group_size * tokens / case["seconds/sample"]
    case["times_the_floor"] = case["seconds/sample"] / (tokens * floor)
    case["plain_over_ours"] = settings.prompts_per_step * (plain["seconds/sample"] + plain["seconds/paint"]) / ours
    return case | {f"plain/{name}": value for name, value in plain.items()}


# ---- the command ----------------------------------------------------------------------------------------------------


def arguments():
    """The command line; of what are flags of train.py the settings, one for each case; the largest case is the last."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.usage = "%(prog)s [options below] [flags of train.py, such as --base int8 --micro-batch-size 2]"
    parser.add_argument("--tiny", action="store_true", help="the tiny model, on a CPU as well")
    parser.add_argument("--sizes", type=int, nargs="+", help="pixels, square (default: 512 1024; tiny: 64 128)")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8], help="group sizes (default: 4 8)")
    parser.add_argument("--capture-only", action="store_true", help="capture the step of a token without compiling it")
    parser.add_argument("--cap-gb", type=float, help="hold the run under this much GPU memory, in 10^9 bytes")
    parser.add_argument("--steps", type=int, default=2, help="measured steps per case, after a first one (default: 2)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options, flags = parser.parse_known_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("the full size needs a CUDA GPU; --tiny runs on a CPU")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} to write to")
    defaults = ["--model", TINY if options.tiny else "released sizes", "--prompts-per-step", "1"]
    defaults += ["--reward", f"{__file__}:order", *(["--compile", "no"] if options.capture_only else [])]
    sizes = sorted(options.sizes or ([64, 128] if options.tiny else [512, 1024]))
    square = lambda size, group: ["--height", f"{size}", "--width", f"{size}", "--group-size", f"{group}"]
    try:
        cases = product(sizes, sorted(options.groups))
        return options, [parse_settings([*defaults, *flags, *square(*case)]) for case in cases]
    except UserError as error:
        parser.error(str(error))


def main():
    options, cases = arguments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.tiny else torch.device("cpu")
    if options.cap_gb and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.cap_gb * 1e9 / total, 1.0), device)
    turns = plan(memory.needed, meta_models, cases[-1], device)  # the largest case decides
    rewards = parse_rewards(cases[-1].reward)
    pipe, policy, decoder = build(pipeline(options.tiny, device), cases[-1], device, None if turns else device)
    offload = place([policy.model, *painting_models(pipe)], device, policy.forward, turns)
    run = train.Run(pipe, policy, decoder, Phases(device, offload))
    bandwidth = copy_bandwidth(run.phase)
    # Of the embedding only the rows looked up are read.
    read = sum(p.nbytes for p in policy.model.parameters()) - policy.model.get_input_embeddings().weight.nbytes
    report = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", "turns": turns}
    report |= {package: version(package) for package in ("torch", "transformers", "diffusers", "peft")}
    report |= {"arguments": sys.argv[1:], "copy_gb_per_second": bandwidth / 1e9, "gb_per_token": read / 1e9}
    report |= {"floor_ms_per_token": 1e3 * read / bandwidth}
    print(*(f"{name}: {value}" for name, value in report.items()), sep="\n")
    report |= {"settings": vars(cases[-1]), "cases": []}
    for settings in cases:
        settings.micro_batch_size = cases[-1].micro_batch_size
        case = measure(run, settings, rewards, options, read / bandwidth)
        print("\n".join(f"{name:>24} {value:.3g}" for name, value in case.items()), end="\n\n", flush=True)
        report["cases"].append(case)
        if device.type == "cuda":
            report["pinned_gb"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / 1e9
        report["host_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        if options.json:  # whatever fails later, what was measured stays
            options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
