"""What users name: files and folders, models on the hub, functions in files of their own.

prompts.py reads their prompts and pictures. Everything but grpo.py may import this package, which
imports nothing of the project.
"""

import os
import sys
import sysconfig
from contextlib import chdir, contextmanager
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from huggingface_hub import snapshot_download

ROOT = Path(__file__).resolve().parent.parent  # the project's folder
# The project's files that make a run's numbers.
CODE = ["grpo.py", "rewards.py", "train.py", "examples/train_*.py", "tiny-glm-image/*.py"]
CODE += ["glm_image/*.py", "devices/*.py", "reward_models/*.py", "runtime/*.py", "inputs/*.py"]


class UserError(Exception):
    """An error that the user can fix: shown as one line, exit code 2."""


@contextmanager
def readable(what, hint=""):
    """What is wrong with a file becomes one line: "cannot WHAT (REASON)HINT"."""
    try:
        yield
    except Exception as error:  # each library that reads files has its own
        reason = shorten(str(error), 500) or type(error).__name__
        raise UserError(f"cannot {what} ({reason}){hint}") from error


class Own(str):
    """A name in the project's folder, also where the working folder has the same."""


def find_path(name):
    """A file or folder as it is named, or else as it is named in the project's folder."""
    own = ROOT / name
    first = isinstance(name, Own) or not Path(name).exists()
    return str(own) if first and own.exists() else name


def as_own(name):
    """A name, as Own where the file that it names now is the project's."""
    file = name.rpartition(":")[0] if ".py:" in name else name
    found = Path(find_path(file))
    of_project = found.exists() and found.resolve() == (ROOT / file).resolve()
    return Own(name) if of_project and not Path(file).is_absolute() else name


def script_name(file):
    """A script as its runs record it: by its place in the project, or by its name."""
    file = Path(file).resolve()
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name


def download(name, *patterns):
    """The folder of a model: `name`, or where its files on the hub are after a download.

    Whatever loads reads that folder: files that are there need no network. patterns: the files that
    are needed, such as "*.json".
    """
    folder = find_path(name)
    return folder if Path(folder).is_dir() else snapshot_download(folder, allow_patterns=patterns)


# ---- my_file.py:function -------------------------------------------------------------------------

FOLDERS = {}  # {folder of a file that this run has named: whether sys.path had it before}
STDLIB = sysconfig.get_path("stdlib")
LIBRARIES = tuple(os.path.join(folder, "") for folder in (STDLIB, os.path.realpath(STDLIB)))


def modules(folders=FOLDERS):
    """{name: file} of the loaded modules that are the user's, whoever has imported them.

    Their files lie in these folders, and are neither Python's nor the project's.
    """
    places = {Path(folder) for folder in folders}
    others = [*CODE, "test_grpo.py", "benchmarks/*.py", "tests/*.py", "viewer/*.py"]
    of_project = {file for each in others for file in ROOT.glob(each)}
    found = {}
    for name, module in sys.modules.copy().items():
        file = str(getattr(module, "__file__", None) or "")
        # Asked before it is resolved, too: to resolve the files of 3,000 modules takes 0.2 s.
        if name == "__main__" or not os.path.isabs(file) or is_installed(file):
            continue
        file = Path(file).resolve()
        if places & {*file.parents} and not is_installed(str(file)) and file not in of_project:
            found[name] = file
    return found


def is_installed(file):
    """Whether the file of this name is Python's or an installed package's."""
    packages = {"site-packages", "dist-packages"} & {*file.split(os.sep)}
    return bool(packages) or file.startswith(LIBRARIES)


def find_file(name):
    """The file of my_file.py:function."""
    path = Path(find_path(type(name)(name.rpartition(":")[0])))
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"the file {path} does not exist{where}")
    return path.resolve()


def load_from_file(name):
    """The function in my_file.py:function: of an ordinary module, which runs once in a run.

    It can import what is beside it, as it is now: in a notebook a cell may have imported these
    files before they were edited. The processes of a pool import it by its name, so Python has to
    find this file by that name.
    """
    file, function = find_file(name), name.rpartition(":")[2]
    module, folder = file.stem, str(file.parent)
    if folder not in FOLDERS:
        for old in modules([folder]):
            del sys.modules[old]
        FOLDERS[folder] = folder in sys.path
        if not FOLDERS[folder]:
            sys.path.append(folder)
    invalidate_caches()  # the file may be new
    spec = None if "." in module else find_spec(module)
    if spec is None or Path(spec.origin or "").resolve() != file:
        way = f": {spec.origin} is in the way" if spec else ""
        raise UserError(f"Python cannot find {file} as module {module!r}{way}; rename the file")
    with chdir("."):  # whatever folder the file changes to
        found = import_module(module)
    if not hasattr(found, function):
        raise UserError(f"{file} has no {function!r}")
    return getattr(found, function)


def forget_modules():
    """A notebook's next run loads its files again, and may have others of the same names."""
    for module in modules():
        del sys.modules[module]
    added = {folder for folder, was_there in FOLDERS.items() if not was_there}
    sys.path[:] = [folder for folder in sys.path if folder not in added]
    FOLDERS.clear()
