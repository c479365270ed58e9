"""Other losses, each as an edit of grpo.py or train.py.

docs/copying.md shows them and says what each is for, tests/test_recipes.py compares them with their
papers, and variants.py trains with them.
"""

import inspect
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo import set_advantages
from rewards import combine, weights_of
from train import paint_and_score


class Edit(NamedTuple):
    loss: str  # which may take several edits
    old: str  # stands once in grpo.py or train.py
    new: str


# ---- functions -----------------------------------------------------------------------------------


def redrawn(run, settings, rewards, prompts, groups, seed):
    """In place of paint_and_score: groups of equal rewards are drawn again, twice at most."""
    images, raw_rewards = paint_and_score(run, settings, rewards, prompts, groups, seed)
    size = settings.group_size
    for again in (1, 2):
        total = combine(raw_rewards, weights_of(rewards), size, settings.combine).view(-1, size)
        equal = [i for i, own in enumerate(total) if len(own[~own.isnan()].unique()) < 2]
        if not equal:
            break
        some, other_seed = [prompts[i] for i in equal], seed + 300 * again
        with run.machine.phase("sample", run.trainer.model):
            new = run.trainer.sample(run.glm_image.encode(some, settings), size, other_seed)
        run.machine.timings["redrawn"] += size * len(some)  # pictures, for the step's metrics
        painted, scored = paint_and_score(run, settings, rewards, some, new, other_seed)
        for j, i in enumerate(equal):
            groups[i] = new[j]
            old, own = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            images[old] = painted[own]
            for name, values in raw_rewards.items():
                values[old] = scored[name][own]
    return images, raw_rewards


def answered(run, prompts, groups):
    """In place of samples the codes of a correct picture; returns a reward of 1 for each.

    They are known of the tiny model's captions.
    """
    import make  # of tiny-glm-image
    import world

    for group, prompt in zip(groups, prompts):
        codes = make.codes_of([world.MEANING[prompt.text].scene()])  # (1, T)
        group.tokens = codes.expand(len(group.tokens), -1)
        group.nucleus = None
        with torch.no_grad():
            rows = torch.arange(len(group.tokens))
            group.old_logprobs = run.trainer.logprobs(group, rows)
    return torch.ones(sum(len(group.tokens) for group in groups))


def weighted(groups, rewards):
    """In place of set_advantages: codes equal in samples of opposite sign get less.

    STAGE compares the codes' vectors.
    """
    set_advantages(groups, rewards)
    for group in groups:
        advantages = group.advantages  # (G,)
        opposite = (advantages[:, None] * advantages < 0).float()  # (G, G)
        differs = (group.tokens[:, None] != group.tokens).float()  # (G, G, T)
        number = opposite.sum(1, keepdim=True).clamp(min=1)
        weights = (opposite[..., None] * differs).sum(1) / number  # (G, T)
        group.advantages = advantages[:, None] * weights


# ---- edits ---------------------------------------------------------------------------------------

ADVANTAGES = "return (centred / (std + eps)).nan_to_num(0).flatten().float()"

EDITS = [
    Edit("Dr. GRPO", " / (std + eps)", ""),
    Edit("Dr. GRPO", "loss_share = share", "loss_share = mask / mask.shape[1] / len(mask)"),
    Edit(
        "DAPO's token mean",
        "loss_share = share",
        "loss_share = mask / mask.sum().clamp(min=1)",
    ),
    Edit(
        "DAPO's token mean",
        "return len(rows)",
        "return len(rows) if group.mask is None else group.mask[rows].sum().item()",
    ),
    Edit(
        "DAPO's two clip ranges",
        "ratio.clamp(1 - clip_range, 1 + clip_range)",
        "ratio.clamp(1 - clip_range, 1 + 1.4 * clip_range)",
    ),
    Edit(
        "GSPO",
        "ratio = log_ratio.exp()",
        "ratio = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()",
    ),
    Edit("GSPO", "clip_range: float = 0.2", "clip_range: float = 3e-4"),
    Edit(
        "CISPO",
        "torch.min(unclipped, clipped)",
        "ratio.clamp(max=1 + clip_range).detach() * advantages * masked(new_logprobs)",
    ),
    Edit("GPG", " / (std + eps)", ""),
    Edit("GPG", "torch.min(unclipped, clipped)", "advantages * masked(new_logprobs)"),
    Edit("GPG", "return len(rows)", "return len(rows) * bool(group.advantages.any())"),
    Edit("KL in all groups", "if group.advantages.any():", "if True:"),
    Edit(
        "KL in all groups", "for group in groups if group.advantages.any()]", "for group in groups]"
    ),
    Edit(
        "k2", "k3 = torch.expm1(log_ref_ratio) - log_ref_ratio", "k3 = log_ref_ratio.square() / 2"
    ),
    Edit(
        "old = new.detach()",
        "ratio = log_ratio.exp()",
        "ratio = (log_ratio - log_ratio.detach()).exp()",
    ),
    Edit("REINFORCE", ADVANTAGES, "return torch.as_tensor(rewards).nan_to_num(0).float()"),
    Edit(
        "REINFORCE with a constant",
        ADVANTAGES,
        "return (torch.as_tensor(rewards) - 1).nan_to_num(0).float()",
    ),
    Edit(
        "No baseline, divided",
        "centred / (std + eps)",
        "torch.as_tensor(rewards).view_as(centred) * (std > 0) / (std + eps)",
    ),
    Edit("RLOO", "centred / (std + eps)", "centred * group_size / (group_size - 1)"),
    Edit("The batch's mean and std", ".view(-1, group_size)  # (N, G)", ".view(1, -1)"),
    Edit(
        "RAFT",
        ADVANTAGES,
        "return (group_size * ~centred.isnan() * torch.nn.functional.one_hot("
        "centred.nan_to_num(-torch.inf).argmax(1), group_size)).flatten().float()",
    ),
    Edit(
        "Rewards shuffled",
        ".nan_to_num(0).flatten().float()",
        ".nan_to_num(0).gather(1, torch.rand(centred.shape).argsort(1)).flatten().float()",
    ),
    Edit(
        "DAPO's dynamic sampling",
        "raw_rewards = paint_and_score(run, settings, rewards, prompts, groups, seed)",
        "raw_rewards = redrawn(run, settings, rewards, prompts, groups, seed)",
    ),
    Edit(
        "Given answers",
        "reward = combine(raw_rewards, weights_of(rewards), group_size, settings.combine)",
        "reward = answered(run, prompts, groups)",
    ),
    Edit("Given answers", ADVANTAGES, "return torch.as_tensor(rewards).float()"),
    Edit("STAGE's weights", "set_advantages(groups, reward)", "weighted(groups, reward)"),
    Edit(
        "STAGE's weights",
        "[group.advantages for group in groups]",
        "[group.advantages.mean(-1) for group in groups]",
    ),
]
FUNCTIONS = {  # go along
    "DAPO's dynamic sampling": redrawn,
    "Given answers": answered,
    "STAGE's weights": weighted,
}


def edited(loss=None):
    """{file: its text with this loss}; with none, as it is."""
    files = {file: (ROOT / file).read_text("utf-8") for file in ("grpo.py", "train.py")}
    for edit in EDITS:
        if edit.loss == loss:
            (file,) = [file for file in files if edit.old in files[file]]
            before, after = files[file].split(edit.old)  # it stands there once
            files[file] = before + edit.new + after
    if loss in FUNCTIONS:
        before, after = files["train.py"].split("def paint_and_score(")
        function = inspect.getsource(FUNCTIONS[loss])
        files["train.py"] = f"{before}{function}\n\ndef paint_and_score({after}"
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
