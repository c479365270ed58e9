"""What users name: files and folders, models on the hub, functions in files of their own."""

import sys
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download

ROOT = Path(__file__).resolve().parent.parent  # the project's folder


class UserError(Exception):
    """An error that the user can fix: shown as one line, exit code 2."""


def find_path(name):
    """A file or folder as it is named, or else as it is named in the project's folder."""
    own = ROOT / name
    return str(own) if own.exists() and not Path(name).exists() else name


def download(name, *patterns):
    """The folder of a model: `name`, or where its files on the hub are after a download.

    Whatever loads reads that folder: files that are there need no network. patterns: the files that
    are needed, such as "*.json".
    """
    folder = find_path(name)
    return folder if Path(folder).is_dir() else snapshot_download(folder, allow_patterns=patterns)


# ---- my_file.py:function -------------------------------------------------------------------------

MODULES, FOLDERS = set(), set()  # that this run has loaded, and has added to sys.path


def find_file(name):
    """The file of my_file.py:function."""
    path = Path(find_path(name.rpartition(":")[0]))
    if not path.is_file():
        raise UserError(f"the file {path} does not exist")
    return path.resolve()


def load_from_file(name):
    """The function in my_file.py:function: of an ordinary module, which runs once in a run.

    It can import what is beside it. The processes of a pool import it by its name, so Python has to
    find this file by that name.
    """
    file, function = find_file(name), name.rpartition(":")[2]
    module, folder = file.stem, str(file.parent)
    if folder not in sys.path:
        FOLDERS.add(folder)
        sys.path.append(folder)
    invalidate_caches()  # the file may be new
    spec = None if "." in module else find_spec(module)
    if spec is None or Path(spec.origin or "").resolve() != file:
        raise UserError(f"{file} is not what Python finds as module {module!r}: rename the file")
    if module not in MODULES:
        MODULES.add(module)
        sys.modules.pop(module, None)
    if not hasattr(import_module(module), function):
        raise UserError(f"{file} has no {function!r}")
    return getattr(sys.modules[module], function)


def forget_modules():
    """A notebook's next run loads its files again, and may have others of the same names."""
    for module in MODULES:
        sys.modules.pop(module, None)
    sys.path[:] = [folder for folder in sys.path if folder not in FOLDERS]
    MODULES.clear()
    FOLDERS.clear()
