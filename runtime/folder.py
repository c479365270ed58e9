"""The folder of a run is the run: what it began with, its records, a checkpoint of every step."""

import json
import os
import shutil
import subprocess
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path, PureWindowsPath

import peft
import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file

from rewards import UserError, find_file, find_path, load_module
from runtime import ranks
from runtime.errors import option, readable, say
from runtime.report import RECORDS, read_jsonl

# A resumed run may change these.
MAY_CHANGE = {"steps", "eval_every", "save_every"}
MAY_CHANGE |= {"device", "offload", "micro_batch_size", "tracker"}
LOCK = ".lock"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
ADAPTERS = "adapter", "decoder-adapter"  # folders: of the policy, of the decoder
NO_VOCABULARY = {"save_embedding_layers": False}  # by itself PEFT would ask the hub about it


# ---- how a run begins ----------------------------------------------------------------------------


@contextmanager
def opened(settings, data, here):
    """Yields the folder of a run, with its start/ and settings.json; no other process writes to it.

    This is before anything slow: what was read is what is copied, and a run to start from goes on.
    From here on --adapter is in start/. A new run that fails before its first record leaves no
    folder. here: the working folder when the run began.
    """
    out, lock, made = claim(settings, here) if ranks.rank() == 0 else (None, nullcontext(), [])
    try:
        with lock:  # until the process ends, however it ends
            if ranks.rank() == 0:
                begin(out, settings, data.rewards | data.judges)
            (out, settings.out), *_ = ranks.gather((out, settings.out))
            settings.adapter = settings.adapter and str(out / "start")
            yield out
    except BaseException:
        if ranks.rank() == 0 and not settings.resume and is_free(out):
            for each in out.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
            for each in made:
                with suppress(OSError):  # another run is in it
                    each.rmdir()
        raise


def claim(settings, here):
    """The folder of --resume; that of --out; or the next free runs/N, whose name is then --out.

    Returns the folder, its lock, and the folders that were made for it.
    """
    given = settings.resume or settings.out
    for name in [given] if given else (str(Path("runs", str(n))) for n in count(1)):
        out = here / name
        made = [each for each in (out, *out.parents) if not each.exists()]
        with readable(f"use the folder {name}"):
            out.mkdir(parents=True, exist_ok=True)
            free = settings.resume or is_free(out)
            lock = FileLock(out / LOCK, timeout=0)
            with suppress(Timeout):
                if free:
                    lock.acquire()
        if lock.is_locked:
            settings.out = name
            say(f"output folder: {name}")
            return out, lock, made
        if given and free:
            raise UserError(f"another process is at work in {name}: wait, or stop it")
        if given:
            hint = f"choose another --out, or continue its run: --resume {name}"
            raise UserError(f"{name} is not empty: {hint}")


def is_free(out):
    """Whether a folder has nothing, or only the files of a run that ended before its first record.

    Such a run was killed as the models loaded, and is begun again.
    """
    own = {LOCK, "settings.json", "start", "tracker-id", "tensorboard"}
    own |= {*(f"{name}.jsonl" for name in RECORDS)}
    recorded = any(read_jsonl(out / f"{name}.jsonl") for name in RECORDS)
    left = {each.name for each in out.iterdir()}
    return not left or (LOCK in left <= own and not recorded)


def begin(out, settings, rewards):
    """Writes start/, which has all that a resume needs, and settings.json.

    rewards: {name: Reward}, of which the user's own have run.
    """
    values = {name: getattr(settings, name) for name in MAY_CHANGE}
    if settings.resume:
        values = json.loads((out / "settings.json").read_text("utf-8")) | values
    else:
        start = out / "start"
        shutil.rmtree(start, ignore_errors=True)
        start.mkdir()
        for name, file in files_of(settings, rewards).items():
            shutil.copy(file, start / name)
        copy_adapters(find_adapters(settings.adapter), start)
        settings.began_from = settings.adapter and str(newest(settings.adapter))
        values = settings.portable() | {"script": settings.script}
        values |= {"versions": versions(), "processes": ranks.count()}
    write_whole(out / "settings.json", json.dumps(values, indent=2))


def files_of(settings, rewards):
    """{name in start/: file} of prompts, of the user's own rewards, and of what these import."""
    paths = {name: find_path(getattr(settings, name)) for name in ("prompts", "eval_prompts")}
    files = {name + Path(path).suffix: Path(path) for name, path in paths.items()}
    for source in [each.source for each in rewards.values() if ".py:" in each.source]:
        own = find_file(source)
        named = [(PureWindowsPath(source).name.rpartition(":")[0], own)]
        for name, file in named + [(each.name, each) for each in load_module(own).helpers]:
            if files.setdefault(name, file) != file:
                raise UserError(f"{file} and {files[name]} have the same name: rename one")
    return files


def versions():
    """{name: version} of what makes a run's numbers; of the project the commit, in a clone."""
    found = {name: version(name) for name in ("torch", "transformers", "diffusers", "peft")}
    describe = "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"
    with suppress(OSError):
        answer = subprocess.run(describe, capture_output=True, encoding="utf-8", check=False)
        found["commit"] = answer.stdout.strip() or None
    return found


# ---- how it goes on ------------------------------------------------------------------------------


def resumed(given, script):
    """{name: value}: the settings of the run in --resume, and the flags that are given.

    UserError for flags that would change the run, and for a run of another script.
    """
    out = Path(given["resume"])
    if other := sorted(given.keys() - MAY_CHANGE - {"resume"}):
        free = ", ".join(map(option, sorted(MAY_CHANGE)))
        raise UserError(
            f"a resumed run keeps its settings: leave out {', '.join(map(option, other))} (free to "
            f"change are {free}), or start a new run from its adapter: --adapter {out}"
        )
    with readable(f"resume {out}", "; name the folder of a run, such as runs/1"):
        values = json.loads((out / "settings.json").read_text("utf-8"))
    if (own := values.pop("script")) != script:
        raise UserError(f"{out} is a run of {own}: python {own} --resume {out}")
    began = values.pop("versions")
    now = {name: version for name, version in versions().items() if version != began.get(name)}
    if now:
        other = ", ".join(f"{name} {began.get(name)} ({now[name]} now)" for name in now)
        say(f"warning: {out} began with {other}: numbers may differ")
    if (processes := values.pop("processes")) != ranks.count():  # other prompts would be a step's
        raise UserError(f"{out} began with {processes} processes: start as many by torchrun")
    values["adapter"] = values["adapter"] and str(out / "start")
    values["base"] = values["planned_base"]  # whatever is free now
    return values | given


# ---- records -------------------------------------------------------------------------------------


def write_whole(path, text):
    """A kill, or a power cut, leaves what was there before."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, "utf-8")
    sync(unfinished)
    os.replace(unfinished, path)


def sync(*files):
    """What was written to files is on the disk itself."""
    for file in files:
        with open(file, "r+b") as opened:
            os.fsync(opened.fileno())


# ---- checkpoints ---------------------------------------------------------------------------------


def checkpoints(out):
    """The folders of a run's checkpoints, oldest first; not what people put beside them."""
    return sorted((out / "checkpoints").glob("[0-9]" * 6))


def save(out, step, trainers, evaluated):
    """Write a checkpoint to a temporary folder and rename it: whatever ends a run, each is whole.

    trainers: {folder of its adapter: GRPO}. Adapters that do not learn are copied from start/:
    whoever starts from the checkpoint needs both halves. Of older checkpoints those of evaluated
    steps stay, without their optimizers. There are no random states: the prompts and all random
    draws of a step are functions of the seed and the step.
    """
    unfinished = out / "checkpoints" / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, trainer in trainers.items():
        learned = {key: p for key, p in trainer.model.named_parameters() if p.requires_grad}
        options = {"selected_adapters": ["default"], "state_dict": learned}
        trainer.model.save_pretrained(unfinished / name, **options, **NO_VOCABULARY)
        (unfinished / name / "README.md").unlink()  # an empty template
        # safetensors writes a file that its owner alone may read.
        shutil.copymode(unfinished / name / CONFIG, unfinished / name / WEIGHTS)
        torch.save(trainer.optimizer.state_dict(), unfinished / f"{name}-optimizer.pt")
    for folder in (out / "start").glob("*adapter"):
        if folder.name not in trainers:
            shutil.copytree(folder, unfinished / folder.name)
    # The records too, which are older. From here on not even a power cut loses the step.
    sync(*unfinished.glob("**/*.*"), *out.glob("*.jsonl"))
    os.replace(unfinished, out / "checkpoints" / f"{step:06d}")
    for old in checkpoints(out)[:-1]:
        if int(old.name) not in evaluated:
            shutil.rmtree(old, ignore_errors=True)
        for file in old.glob("*-optimizer.pt"):
            file.unlink()


def load(out, trainers):
    """Adapters and optimisers from the newest checkpoint, if any. Returns its step, or 0."""
    if not (saved := checkpoints(out)):
        return 0
    newest = saved[-1]
    for name, trainer in trainers.items():
        load_adapter(trainer.model, newest / name / WEIGHTS)
        state = torch.load(newest / f"{name}-optimizer.pt", "cpu", weights_only=True)
        trainer.optimizer.load_state_dict(state)
    return int(newest.name)


# ---- adapters ------------------------------------------------------------------------------------


def newest(place):
    """The newest checkpoint of a run, or what else is in this place."""
    return [Path(place), *checkpoints(Path(place))][-1]


def find_adapters(place):
    """{"adapter", "decoder-adapter": its folder} of those in --adapter, which may be None.

    place: of a run, whose newest checkpoint counts, of a checkpoint, or of a lone adapter, which is
    the decoder's if it is named like that.
    """
    if not place:
        return {}
    folder = newest(place)
    if (folder / CONFIG).is_file():
        of_decoder = folder.resolve().name == "decoder-adapter"
        found = {"decoder-adapter" if of_decoder else "adapter": folder}
    else:
        found = {name: folder / name for name in ADAPTERS if (folder / name).is_dir()}
    if not found:
        raise UserError(f"--adapter {place}: no run, no checkpoint and no adapter is there")
    for each in found.values():
        refuse_unless_plain(each)
    return found


def refuse_unless_plain(adapter):
    """Of other kinds PEFT would load a part, or change the model's own weights."""
    with readable(f"use the adapter {adapter}"):
        config = json.loads((adapter / CONFIG).read_text("utf-8"))
        plain = config["peft_type"] == "LORA" and config.get("bias", "none") == "none"
        plain &= config.get("init_lora_weights", True) in (True, False, "gaussian")
        if not plain or config.get("use_dora") or config.get("modules_to_save"):
            raise ValueError("it is not plain LoRA: no DoRA, PiSSA, biases or whole modules")


def copy_adapters(adapters, folder):
    """adapters: {name in the folder: folder of an adapter}. Nothing else there is touched."""
    for name, adapter in adapters.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in (CONFIG, WEIGHTS):
            shutil.copyfile(adapter / file, folder / name / file)


def load_adapter(model, file, name="default"):
    """The weights in a file, all of them, into the model's adapter of this name."""
    weights = load_file(file)
    wanted = peft.get_peft_model_state_dict(model, adapter_name=name, **NO_VOCABULARY)
    if other := weights.keys() ^ wanted.keys():  # which PEFT would leave out
        raise ValueError(f"{file} is of another model: {min(other)} is only in one of them")
    peft.set_peft_model_state_dict(model, weights, adapter_name=name)
