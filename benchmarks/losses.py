"""Other losses, each as an edit of grpo.py or train.py.

docs/copying.md says in words what each changes, tests/test_recipes.py compares them with their
papers, and variants.py trains with them.
"""

import inspect
import platform
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rewards import combine, weights_of


def filled(run, settings, rewards, prompts, groups, seed):
    """In place of paint_and_score: groups of equal rewards are thrown away for other prompts.

    prompts: those of three steps; groups: of the first third. Samples until as many groups have a
    spread, or until all prompts are used: then groups of equal rewards fill the step up. Returns
    prompts and groups, too.
    """
    number, size = len(groups), settings.group_size
    found, first = [], 0  # [(whether its rewards are equal, prompt, group, images, raw rewards)]
    run.clock.timings["drawn"] += 0  # more pictures than a step otherwise has
    while True:
        some = prompts[first : first + len(groups)]
        images, raw_rewards = run.paint_and_score(settings, rewards, some, groups, seed + first)
        reward = combine(raw_rewards, weights_of(rewards), size, settings.combine).view(-1, size)
        for i, own in enumerate(reward):
            of_group = slice(i * size, (i + 1) * size)
            equal = len(own[~own.isnan()].unique()) < 2
            raw = {name: values[of_group] for name, values in raw_rewards.items()}
            found.append((equal, some[i], groups[i], images[of_group], raw))
        first += len(some)
        missing = number - sum(not equal for equal, *_ in found)
        some = prompts[first : first + missing]
        if not some:
            break
        encoded = run.glm_image.encode(some, settings)
        groups = run.trainer.sample(encoded, size, seed + first)
        run.clock.timings["drawn"] += size * len(some)
    found.sort(key=lambda each: each[0])
    _, prompts, groups, images, raw_rewards = zip(*found[:number])
    together = {name: torch.cat([each[name] for each in raw_rewards]) for name in rewards}
    return [*prompts], [*groups], [image for each in images for image in each], together


# ---- edits ---------------------------------------------------------------------------------------

ADVANTAGES = "(centred / (std + eps)).nan_to_num(0).flatten().float()"
CLAMP = "ratio.clamp(1 - clip_range, 1 + clip_range)"
NO_STD = (" / (std + eps)", "")
TOKENS = "len(rows) if group.mask is None else group.mask[rows].sum().item()"
EACH_TOKEN = ("loss_share = share", "loss_share = mask / mask.sum().clamp(min=1)")
TOKEN_MEAN = [EACH_TOKEN, ("return len(rows)", f"return {TOKENS}")]
# The sum over a sample's tokens, by the longest sample: where all have one length it is the mean.
TOKEN_SUM = ("loss_share = share", "loss_share = mask / mask.shape[1] / len(mask)")
# {loss: [(code that stands once in grpo.py or train.py, code in its place)]}
EDITS = {
    "Dr. GRPO": [NO_STD, TOKEN_SUM],
    "DAPO's token mean": TOKEN_MEAN,
    "DAPO's two clip ranges": [
        (CLAMP, "ratio.clamp(1 - clip_range, 1 + 1.4 * clip_range)"),
        *TOKEN_MEAN,
    ],
    "DAPO's dynamic sampling": [
        (
            "for i in prompt_indices(step, settings, len(data.prompts))]",
            "for k in range(3) for i in prompt_indices(3 * step + k, settings, len(data.prompts))]",
        ),
        (
            "encoded = run.glm_image.encode(prompts, settings)",
            "encoded = run.glm_image.encode(prompts[: len(prompts) // 3], settings)",
        ),
        (
            "images, raw_rewards = run.paint_and_score(settings, rewards, prompts, groups, seed)",
            "prompts, groups, images, raw_rewards = "
            + "filled(run, settings, rewards, prompts, groups, seed)",
        ),
    ],
    "GSPO": [
        (
            "ratio = log_ratio.exp()",
            "ratio = "
            + "(log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()",
        ),
        (CLAMP, "ratio.clamp(1 - 3e-4, 1 + 4e-4)"),
    ],
    "CISPO": [
        (
            "torch.min(unclipped, clipped)",
            "ratio.clamp(max=1 + clip_range).detach() * advantages * masked(new_logprobs)",
        ),
        ("(clipped < unclipped).float()", "(ratio > 1 + clip_range).float()"),
        *TOKEN_MEAN,
    ],
    "GPG": [
        NO_STD,
        ("torch.min(unclipped, clipped)", "advantages * masked(new_logprobs)"),
        EACH_TOKEN,
        ("return len(rows)", f"return bool(group.advantages.any()) * ({TOKENS})"),
    ],
    "RLOO": [("centred / (std + eps)", "centred * group_size / (group_size - 1)"), TOKEN_SUM],
    "REINFORCE++": [(".view(-1, group_size)  # (N, G)", ".view(1, -1)")],
    "REINFORCE++-baseline": [
        ("centred / (std + eps)", "centred / (centred[~centred.isnan()].std() + eps)"),
        *TOKEN_MEAN,
    ],
    "RAFT": [
        (
            ADVANTAGES,
            "(group_size * (torch.as_tensor(rewards).view_as(centred) > 0) * "
            + "torch.nn.functional.one_hot(centred.nan_to_num(-torch.inf).argmax(1), group_size)"
            + ").flatten().float()",
        )
    ],
    "REINFORCE": [
        (ADVANTAGES, "torch.as_tensor(rewards).nan_to_num(0).float()"),
        TOKEN_SUM,
    ],
    "No baseline": [
        (
            "centred / (std + eps)",
            "torch.as_tensor(rewards).view_as(centred) * (std > 0) / (std + eps)",
        )
    ],
    "KL in all groups": [("return group.advantages.any()", "return True")],
    "k2": [("k3 = torch.expm1(log_ref_ratio) - log_ref_ratio", "k3 = log_ref_ratio.square() / 2")],
    "k3 times the ratio": [
        (
            "k3 = torch.expm1(log_ref_ratio) - log_ref_ratio",
            "k3 = ratio * (torch.expm1(log_ref_ratio) - log_ref_ratio)",
        )
    ],
    "old = new.detach()": [
        ("ratio = log_ratio.exp()", "ratio = (log_ratio - log_ratio.detach()).exp()")
    ],
    "Rewards shuffled": [
        (
            ".nan_to_num(0).flatten().float()",
            ".nan_to_num(0).gather(1, torch.rand(centred.shape).argsort(1)).flatten().float()",
        )
    ],
}
FUNCTIONS = {"DAPO's dynamic sampling": filled}  # goes along


def edited(loss=None):
    """{file: its text with this loss}; with none, as it is."""
    files = {file: (ROOT / file).read_text("utf-8") for file in ("grpo.py", "train.py")}
    for old, new in EDITS.get(loss, []):
        (file,) = [file for file in files if old in files[file]]
        before, after = files[file].split(old)  # it stands there once
        files[file] = before + new + after
    if loss in FUNCTIONS:
        before, after = files["train.py"].split("def grpo_step(")
        function = inspect.getsource(FUNCTIONS[loss])
        files["train.py"] = f"{before}{function}\n\ndef grpo_step({after}"
    return files


def module(loss, file="grpo.py"):
    """A file with this loss, as a module of its own."""
    with TemporaryDirectory() as folder:
        path = Path(folder, file)
        path.write_text(edited(loss)[file], encoding="utf-8")
        spec = spec_from_file_location(path.stem, path)
        changed = module_from_spec(spec)
        spec.loader.exec_module(changed)
    return changed


def cpu():
    """The kind of this CPU, on which rounding depends, and on rounding how a run ends."""
    file = Path("/proc/cpuinfo")  # of Linux
    names = re.findall("model name.*: (.*)", file.read_text("utf-8")) if file.exists() else []
    return f"{[*names, platform.machine()][0]} {torch.backends.cpu.get_cpu_capability()}"
