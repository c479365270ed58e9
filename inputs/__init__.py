"""What users name: files and folders, models on the hub, functions in files of their own.

prompts.py reads their prompts and pictures. Any room but grpo.py may import this one; it imports
none.
"""

import sys
from contextlib import chdir, contextmanager
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from huggingface_hub import snapshot_download

ROOT = Path(__file__).resolve().parent.parent  # the project's folder


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


def script_name(file):
    """A script as its runs record it: one of the project's by its place there."""
    file = Path(file).resolve()
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)


def download(name, *patterns):
    """The folder of a model: `name`, or where its files on the hub are after a download.

    Whatever loads reads that folder: files that are there need no network. patterns: the files that
    are needed, such as "*.json".
    """
    folder = find_path(name)
    return folder if Path(folder).is_dir() else snapshot_download(folder, allow_patterns=patterns)


# ---- my_file.py:function -------------------------------------------------------------------------

MODULES = {}  # {name: file} of the user's that this run has loaded, and of what they import
FOLDERS = set()  # that this run has added to sys.path


def find_file(name):
    """The file of my_file.py:function."""
    path = Path(find_path(type(name)(name.rpartition(":")[0])))
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
        way = f": {spec.origin} is in the way" if spec else ""
        raise UserError(f"Python cannot find {file} as module {module!r}{way}; rename the file")
    if module not in MODULES:
        sys.modules.pop(module, None)
    before = {*sys.modules}
    with chdir("."):  # whatever folder the file changes to
        found = import_module(module)
    for new in {module, *sys.modules} - before:
        place = Path(getattr(sys.modules[new], "__file__", None) or "/").resolve()
        if place.is_relative_to(folder) and "site-packages" not in place.parts:
            MODULES[new] = place
    if not hasattr(found, function):
        raise UserError(f"{file} has no {function!r}")
    return getattr(found, function)


def forget_modules():
    """A notebook's next run loads its files again, and may have others of the same names."""
    for module in MODULES:
        sys.modules.pop(module, None)
    sys.path[:] = [folder for folder in sys.path if folder not in FOLDERS]
    MODULES.clear()
    FOLDERS.clear()
