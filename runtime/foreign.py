"""Code of the user's: loaded from files, called with what it asks for, and kept apart.

Rewards are such code, and functions that draw pictures. Nothing else of the project is imported
here.
"""

import asyncio
import inspect
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import torch

# ---- kept apart ----------------------------------------------------------------------------------


@contextmanager
def apart(own):
    """Around code of the user's: what it changes for the whole process, it alone finds again.

    That is the working directory, and torch's default dtype and device: `own` keeps them for the
    next block that is given it. Gradient mode, inference mode, and the random states of Python,
    NumPy and torch are restored for good.
    """
    before = surroundings()
    states = random.getstate(), np.random.get_state()
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        for put, value in own.items():
            put(value)
        with (
            torch.random.fork_rng(gpus),
            # Its end restores all modes, also after a block that was entered and never left.
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
        ):
            yield
    except SystemExit as error:  # it would end the run without a word, or as if it were complete
        raise RuntimeError(f"code of yours has called sys.exit({error.code!r})") from error
    finally:
        after = surroundings()
        own.clear()
        for put, value in before.items():
            if after.get(put) != value:
                put(value)
                own |= {put: after[put]} if put in after else {}
        random.setstate(states[0])
        np.random.set_state(states[1])


def surroundings():
    """What code may change for the whole process: {what sets it: its value}."""
    found = {
        torch.set_default_dtype: torch.get_default_dtype(),
        set_default_device: torch.get_default_device(),
    }
    with suppress(FileNotFoundError):  # a folder that was deleted meanwhile
        found[os.chdir] = os.getcwd()
    return found


def set_default_device(device):
    # None is the CPU, too, and costs nothing in other calls.
    torch.set_default_device(None if device.type == "cpu" else device)


# ---- loaded from files ---------------------------------------------------------------------------

OWN = {}  # {module: its file}, of what was loaded here, and what that has imported beside it
CHANGES = {}  # {file, or the name of a reward: what its code has changed, see apart}


def forget_files():
    """The next run in this process loads its files again: a notebook may have changed them."""
    for name in OWN:
        sys.modules.pop(name, None)
    OWN.clear()
    CHANGES.clear()


def load_module(file):
    """A file as a module. It runs once, under a name that import knows.

    So it can import the files beside it, and a pool of processes can find its functions.
    """
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = file.stem.replace(".", "_")
    while OWN.get(module) != file and is_taken(module, file):
        module += "_"
    if module not in OWN:
        before = {*sys.modules}
        OWN[module] = file
        sys.modules[module] = module_from_spec(spec_from_file_location(module, file))
        # Not by spec.loader, which may take an older text of the file from __pycache__.
        code = compile(file.read_bytes(), file, "exec")
        exec(code, vars(sys.modules[module]))  # noqa: S102
        for name in sys.modules.keys() - before:
            place = Path(getattr(sys.modules[name], "__file__", None) or "/")
            if place.is_relative_to(file.parent) and "site-packages" not in place.parts:
                OWN[name] = place
    return sys.modules[module]


def is_taken(module, file):
    """Whether a name is another module's; or the file's, imported by somebody else, maybe older."""
    if module in sys.modules:
        return True
    spec = find_spec(module)
    return spec is not None and spec.origin != str(file)


# ---- called --------------------------------------------------------------------------------------


def call(function, /, *given, **more):
    """What a function returns for what it is given, and of `more` for what it has parameters for.

    With **columns it gets all of `more` but group_size.
    """
    parameters = signature_of(function).parameters
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    wanted = {
        name: value
        for name, value in more.items()
        if name in parameters or (takes_all and name != "group_size")
    }
    answer = function(*given, **wanted)
    return wait_for(answer) if inspect.isawaitable(answer) else answer


def shortened(answer):
    """What a function has returned, in words for a line."""
    return f"{' '.join(repr(answer).split()):.60}"


def asks_for(function, *given):
    """{parameter: whether the function works without}, beside what it is given.

    A default of None asks for a column of the prompts; with another default it is an option.
    TypeError if the function takes less than it is given.
    """
    signature = signature_of(function)
    bound = signature.bind_partial(*given).arguments
    return {
        name: each.default is None
        for name, each in signature.parameters.items()
        if name not in bound
        and (each.default is None or each.default is each.empty)
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }


def signature_of(function):
    """The signature of a callable of any type, also behind a wrapper that shows none.

    Such are torch's modules, and decorators without functools.wraps.
    """
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return inspect.signature(lambda images, prompts, targets: None)
    kinds = [each.kind for each in signature.parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        cells = getattr(function, "__closure__", None) or ()
        inner = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
        return signature_of(inner[0]) if len(inner) == 1 else signature
    return signature


# One event loop for all calls: a client that a reward keeps is bound to the loop of its first.
RUNNER = asyncio.Runner()


def wait_for(answer):
    """What an `async def` returns. In a notebook, whose loop has this thread, from another."""

    async def wait():
        return await answer

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return RUNNER.run(wait())
    with ThreadPoolExecutor(1) as pool:
        # A new thread has a gradient mode of its own.
        return pool.submit(torch.no_grad()(RUNNER.run), wait()).result()
