"""What a run is, as settings.json in its folder says, and whether a resumed run is that run."""

import json
import os
import re
import subprocess
from contextlib import suppress
from dataclasses import fields
from hashlib import sha256
from importlib.metadata import version
from modulefinder import ModuleFinder
from pathlib import Path

from transformers.utils import cached_file

from rewards import UserError, parse_rewards, weights_of
from runtime import checkpoints, ranks
from runtime.errors import option, readable, say

ROOT = Path(__file__).resolve().parent.parent
MADE_OF = "inputs", "weights", "versions", "resumed", "processes"  # see inputs_of
CODE = "grpo.py", "rewards.py", "train.py", "examples/train_*.py"
CODE += "card/*.py", "glm_image/*.py", "reward_models/*.py", "runtime/*.py"
# Settings that name files or folders which a run reads.
PATHS = {"adapter", "prompts", "targets", "sources", "eval_prompts", "eval_targets", "eval_sources"}
REWARD_FLAGS = {"reward", "eval_reward"}
# A resumed run may change these. Its files may lie elsewhere: compare() looks at their contents.
MOVABLE = PATHS | REWARD_FLAGS | {"model"}
MAY_CHANGE = MOVABLE | {"steps", "eval_every", "save_every", "resume"}
MAY_CHANGE |= {"device", "offload", "micro_batch_size", "tracker"}


# ---- settings.json -------------------------------------------------------------------------------


def is_run(folder):
    return (folder / "settings.json").is_file()


def describe(out, settings, made_of):
    """Writes settings.json, which a kill leaves as it was before. made_of: see inputs_of."""
    text = json.dumps(portable(absolute(vars(settings))) | made_of, indent=2)
    (out / ".settings.json").write_text(text)
    os.replace(out / ".settings.json", out / "settings.json")


def description(out):
    """The settings of the run in `out`, and what it was made of."""
    if not checkpoints.find(out):
        hint = "name the folder of a run, such as runs/1"
        raise UserError(f"there is no checkpoint in {out} to resume: {hint}")
    file = out / "settings.json"
    with readable(f"read {file}"):
        settings = json.loads(file.read_text())
        return settings, {name: settings.pop(name) for name in MADE_OF}


def absolute(values):
    """{name: value}; files and folders by their absolute paths, for a resume from elsewhere."""

    def place(path):  # also my_file.py:function
        file, colon, function = path.rpartition(":") if ".py:" in path else (path, "", "")
        return f"{Path(file).absolute()}{colon}{function}" if Path(file).exists() else path

    def item(text):  # of --reward
        if not (rewards := parse_rewards(text)):  # "none"
            return text
        (reward,) = rewards.values()
        name, equals, folder = reward.source.partition("=")
        source = f"{name}={place(folder)}" if equals else place(name)
        known = reward.source in text  # else it begins with ~
        return text.replace(reward.source, source) if known else f"{source}:{reward.weight}"

    changed = {name: place(values[name]) for name in {*PATHS, "model"} if values.get(name)}
    for name in REWARD_FLAGS:
        changed[name] = ",".join(map(item, values[name].split(",")))
    return values | changed


def portable(values):
    """{name: value}; files of this project by their place in it: another clone finds its own."""
    # In the text of --reward a path may also follow a comma or an equals sign.
    root = re.compile(rf"(?<![^,=]){re.escape(f'{ROOT}{os.sep}')}")
    return {
        name: root.sub("", value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def named_in(spec):
    """{name: weight} of --reward."""
    return weights_of(parse_rewards(spec or ""))


def kept_settings(given, kind):
    """The settings of the run in --resume, {name: value}, with the flags that are given.

    UserError for flags that would change what the run computes. kind: the class of its settings.
    """
    out = given["resume"]
    if given.get("steps") == 0:
        raise UserError(f"--steps 0 resumes nothing: to evaluate, --adapter {out} --steps 0")
    before, made_of = description(Path(out))
    given = {name: value for name, value in given.items() if (name, value) != ("base", "auto")}
    if before.keys() != {each.name for each in fields(kind)}:
        hint = f"start a new run from its adapter: --adapter {out}"
        raise UserError(f"{out} was made by another script or version; {hint}")
    differ = [
        f"{option(name)} {value} (was {before[name]})"
        for name, value in sorted(portable(given).items())
        if name not in MAY_CHANGE and value != before[name]
    ]
    for name in sorted(REWARD_FLAGS & given.keys()):  # other places are no other rewards
        if named_in(given[name]) != named_in(before[name]):
            differ.append(f"{option(name)} {given[name]} (was {before[name]})")
    if differ:
        free = ", ".join(option(name) for name in sorted(MAY_CHANGE - MOVABLE - {"resume"}))
        raise UserError(
            f"a resumed run keeps its settings; different here: {', '.join(differ)}; "
            f"free to change are {free}; to change others, start a new run from its adapter: "
            f"--adapter {out}"
        )
    if made_of["processes"] != ranks.count():  # the prompts of a step would be others
        began = f"{out} began with {made_of['processes']} processes"
        raise UserError(f"{began}: start as many by torchrun")
    kept = {name: str(value) for name, value in sorted(before.items()) if name not in given}
    if code := [f"{option(name)} {value}" for name, value in kept.items() if ".py:" in value]:
        say(f"{out} runs code, as when it began: {' '.join(code)}")
    if before["adapter"]:
        before["adapter"] = str(Path(out, "start"))  # its own copy
    return before | given


# ---- what a run is made of -----------------------------------------------------------------------


def inputs_of(prompts, held_out, adapters, rewards):
    """What a run is made of, found once, at its start; the model is added when it has loaded.

    adapters: {name: folder}. rewards: {name: files_of its file}.

    Returns {"inputs": {name: hash}, "weights": a hash, "versions": of the beginning, "resumed":
    [{"step", "versions"}], "processes"}.
    """
    inputs = hashes_of(prompts, "--") | hashes_of(held_out, "--eval-")
    for name, folder in adapters.items():
        files = folder / checkpoints.CONFIG, folder / checkpoints.WEIGHTS
        inputs[f"--adapter, {name}"] = sha256(b"".join(map(Path.read_bytes, files))).hexdigest()
    for name, (file, *imported) in rewards.items():
        labels = {name: file} | {f"{each.name}, imported by {name}": each for each in imported}
        inputs |= {each: sha256(labels[each].read_bytes()).hexdigest() for each in labels}
    others = {"weights": None, "resumed": [], "processes": ranks.count()}
    return {"inputs": inputs, "versions": versions()} | others


def files_of(file):
    """A reward's file, then those in its folder that it imports, or that these import."""
    finder = ModuleFinder([str(file.parent)])  # it reads code, and runs none
    # A SyntaxError is told by the reward's loading; folders without __init__.py are unknown to it.
    with suppress(Exception):
        finder.run_script(str(file))
    files = [Path(module.__file__ or "") for module in finder.modules.values()]
    return [file, *sorted(each for each in files if each.suffix == ".py" and each != file)]


def fingerprint(model):
    """A hash of the weights in a model's folder: configs, names, sizes, and a bit of each tensor.

    model: folder or hub id, whose files are on this machine.
    """
    folder = Path(cached_file(model, "model_index.json")).parent
    digest = sha256()
    for file in sorted(folder.glob("*/*")):
        if file.name in ("config.json", "scheduler_config.json", "tokenizer.json"):
            digest.update(file.name.encode() + file.read_bytes())
        elif file.suffix == ".safetensors":
            digest.update(f"{file.parent.name} {file.name} {file.stat().st_size}".encode())
            with open(file, "rb") as weights:
                # The format: 8 bytes of length, a JSON header with the place of each tensor, data.
                header = weights.read(int.from_bytes(weights.read(8), "little"))
                digest.update(header)
                begin = weights.tell()
                for tensor in json.loads(header).values():
                    if "data_offsets" in tensor:
                        weights.seek(begin + sum(tensor["data_offsets"]) // 2)
                        digest.update(weights.read(64))
    return digest.hexdigest()


def hashes_of(prompts, prefix):
    """{flag: hash}: of prompts with their types and columns, and of the pictures beside them."""
    words = [(prompt.text, prompt.type, prompt.row) for prompt in prompts]
    hashes = {f"{prefix}prompts": sha256(repr(words).encode()).hexdigest()}
    for name in ("targets", "sources"):
        pictures = [prompt.for_rewards().get(name) for prompt in prompts]
        if any(pictures):
            each = [sha256(picture.tobytes() if picture else b"").digest() for picture in pictures]
            hashes[prefix + name] = sha256(b"".join(each)).hexdigest()
    return hashes


def copies_of(settings, rewards):
    """{name in the run's start/: its bytes} of prompts, rewards, and what these import beside them.

    They are read together with what is hashed: a file may change while the models load. Of the
    project's own code, versions() has a hash. rewards: see inputs_of.
    """
    copies = {}
    for name in ("prompts", "eval_prompts"):
        file = Path(getattr(settings, name))
        copies[f"{name}{file.suffix}"] = file.read_bytes()
    known = project_code()
    placed = [(each, files[0]) for files in rewards.values() for each in files]
    for each, file in dict.fromkeys(placed):
        if each == file or each not in known:
            name, content = str(each.relative_to(file.parent)), each.read_bytes()
            if copies.setdefault(name, content) != content:
                copies[f"{len(copies)}-{each.name}"] = content
    return copies


def versions():
    """{name: version} of what makes a run's numbers; of the project the commit and a hash.

    The commit is None unless the project is a clone. The hash is of its code as it is.
    """
    found = {name: version(name) for name in ("torch", "transformers", "diffusers", "peft")}
    command = "git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"
    with suppress(OSError, subprocess.CalledProcessError):
        if (ROOT / ".git").exists():
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            found["commit"] = answer.stdout.strip()
    found["code"] = sha256(b"".join(map(Path.read_bytes, project_code()))).hexdigest()[:12]
    return {"commit": None} | found


def project_code():
    """The project's files that make a run's numbers."""
    return [file for pattern in CODE for file in sorted(ROOT.glob(pattern))]


def compare_model(settings, made_of):
    """Of the model, when it has loaded: UserError if a resumed run began with another one.

    It may lie elsewhere. A warning if the adapter to start from was trained upon another model.
    """
    found = fingerprint(settings.model)
    if made_of["weights"] not in (None, found):
        hint = "give the folder that it began with, or start a new run from its adapter: --adapter"
        raise UserError(
            f"{settings.resume} was started with another model than {settings.model}: {hint} "
            f"{settings.resume}"
        )
    made_of["weights"] = found
    adapter = Path(settings.adapter or "/").absolute()
    for folder in (adapter, *adapter.parents[:2]):  # of the adapter, a run or a checkpoint of it
        with suppress(OSError, ValueError, AttributeError):
            before = json.loads((folder / "settings.json").read_text()).get("weights")
            if before not in (None, found):
                say(f"warning: {adapter} was trained upon another model than {settings.model}")
                return


def compare(settings, made_of):
    """What the resumed run was made of when it began, beside what it is made of now.

    UserError for other prompts, pictures or adapters; a warning for other rewards and versions,
    each time. Returns what it was made of when it began, and that it goes on with other versions.
    """
    out = settings.resume
    began = description(Path(out))[1]
    before, now = began["inputs"], made_of["inputs"]
    changed = [name for name in before | now if now.get(name) != before.get(name)]
    start = Path(out, "start")
    if flags := [name for name in changed if name.startswith("--")]:
        values = [getattr(settings, name[2:].partition(",")[0].replace("-", "_")) for name in flags]
        differ = "; ".join(f"{name} {value}" for name, value in zip(flags, values))
        hint = f"restore the files (prompts are in {start}), or start a new run from its adapter"
        what = f"other prompts, pictures or adapters; different here: {differ}"
        raise UserError(f"{out} was started with {what}; {hint}: --adapter {out}")
    for name in changed:
        say(f"warning: the file of {name} has changed since the run began; a copy is in {start}")
    before, now = began["versions"], made_of["versions"]
    other = [name for name in now if now[name] != before[name]]
    if changed := [f"{name} {before[name]} ({now[name]} now)" for name in other]:
        say(f"warning: {out} began with {', '.join(changed)}: numbers may differ")
    if now != [began["versions"], *(each["versions"] for each in began["resumed"])][-1]:
        step = int(checkpoints.find(Path(out))[-1].name)
        began["resumed"].append({"step": step, "versions": now})
    return began
