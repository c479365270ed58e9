"""What the tests share: the shipped model, and runs of train.py that take a second, here and in
other processes."""

import copy
import functools
import gc
import json
import multiprocessing
import os
import shlex
import signal
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS, TINY = ROOT / "tests", ROOT / "tiny-glm-image"
sys.path[:0] = [str(ROOT), str(TINY), str(ROOT / "examples")]

import pytest
import torch

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the same tests wherever they run
os.environ.pop("HF_HUB_OFFLINE", None)
# A shell starts the background jobs of a script with Ctrl-C ignored, and so would be ours.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
if "OMP_NUM_THREADS" not in os.environ:
    # Threads spin at the barriers of matrices this small: a second one gains nothing, and beside a
    # busy program it makes everything ten times as long. The processes that tests start inherit
    # this.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

import train_decoder
import train_edits
from diffusers import GlmImagePipeline
from world import draw

import train
from devices import cpu
from devices.cpu import Plan, SharedForward
from glm_image import editing, model
from inputs import UserError, forget_modules
from inputs.prompts import Prompt
from runtime.clock import Clock
from runtime.folder import find_adapters
from runtime.settings import Settings

gc.freeze()  # millions of objects of the libraries, which no collection needs to look at again

CPU = torch.device("cpu")
OF_CUDA = "devices.cuda", "devices.memory", "devices.forward"
RED_CIRCLE = (("circle", "red"), None, None, None)  # scenes
BLUE_CROSS = (("cross", "blue"), None, None, None)
SCRIPTS = {  # {name: (script, its settings)}
    "train.py": (train, Settings),
    "examples/train_decoder.py": (train_decoder, train_decoder.DecoderSettings),
    "examples/train_edits.py": (train_edits, train_edits.EditSettings),
}
CODES = 4  # of a short picture of 64x64, half as many of 32x32: see shorten

QUICK = "--prompts prompts.txt --targets targets --height 32 --width 32 --reward ssim,mse:0.5"
QUICK += " --prompts-per-step 1 --group-size 2 --decode-steps 1 --eval-prompts prompts.txt"
# Sharp as the shipped model is, short pictures would all be the same.
QUICK += " --eval-targets targets --eval-count 1 --eval-decode-steps 1"
QUICK += " --temperature 9 --top-p 1"
QUICK = ["--model", TINY.name, *QUICK.split(), "--eval-reward", "", "--lr", "2e-3"]


def pytest_configure(config):
    # Of one library about another.
    for warning in (
        "ignore::FutureWarning",
        "ignore:.*torch.jit:DeprecationWarning",
        "ignore:.*converting a masked element to nan:UserWarning",
        "ignore:.*save_embedding_layers:UserWarning",
        # Windows would read a text file without an encoding in its code page. Python says so only
        # under PYTHONWARNDEFAULTENCODING=1, as in .ci/run.
        "ignore::EncodingWarning",
        "error::EncodingWarning:(inputs|runtime|glm_image|devices|reward_models|viewer|benchmarks|__main__)",
    ):
        config.addinivalue_line("filterwarnings", warning)
    if "s" not in config.option.reportchars:
        config.option.reportchars += "s"  # at the end, why tests were skipped


@pytest.fixture(autouse=True)
def limited():
    """A test that waits for ever, as for a rank that never comes, fails after five minutes."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(300)
    yield
    signal.alarm(0)


@pytest.fixture(scope="session", autouse=True)
def warned_here():
    """Processes that tests start do not print EncodingWarnings."""
    os.environ.pop("PYTHONWARNDEFAULTENCODING", None)


@pytest.fixture(scope="session")
def pipe():
    """The shipped model, in the stock pipeline. Its distributions are sharp, so a wrong position is
    expensive."""
    return load_once(str(TINY), CPU)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def perturb(model, size=0.05):
    """Move the adapter away from zero."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size)


def words_of(flags):
    """Flags, of which a string may hold several."""
    return shlex.split(" ".join(map(str, flags)))


def script_of(words):
    """The name of the script that takes these flags, or made the run that they resume."""
    words = [*words]
    if "--resume" in words:
        file = Path(words[words.index("--resume") + 1], "settings.json")
        with suppress(OSError, ValueError):
            return json.loads(file.read_text())["script"]
    if "--train" in words:
        return "examples/train_decoder.py"
    return "examples/train_edits.py" if {"--sources", "--eval-sources"} & {*words} else "train.py"


def main_of(words):
    """The main() of that script."""
    return SCRIPTS[script_of(words)][0].main


def tiny_settings(*flags):
    words = ["--model", TINY.name, *words_of(flags)]
    script = script_of(words)
    return train.parse_settings(words, SCRIPTS[script][1], ROOT / script)


def build_run(settings, pipe=None):
    """What a run works with, of the tiny model unless told otherwise."""
    load_run = train_decoder.load_run if hasattr(settings, "train") else train.Run.load
    pipe = pipe or load_once(settings.model, CPU)
    adapters = find_adapters(settings.adapter) if settings.adapter else {}
    return load_run(settings, adapters=adapters, pipe=pipe)


def holding(device, *models, waiting=None, release=lambda: None):
    """A GPU's Memory with these models."""
    from devices.memory import Memory  # not in the processes that tests start

    memory = Memory(Plan(device, "bfloat16", waiting), Clock(device))
    memory.place(models, release)
    return memory


def prompts_of(*texts, targets=None, **columns):
    """Prompts; their targets, and columns of their rows, as lists."""
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    return [
        Prompt(text, target=targets and targets[i], row=rows[i] if rows else {})
        for i, text in enumerate(texts)
    ]


def painted(pipe, text, tokens, settings, seed):
    """The latents that a stock pipeline paints here, and their pictures."""
    glm = model.GlmImage(pipe)
    latents = glm.paint(Prompt(text), tokens, settings, seed)
    return latents, glm.to_images(latents, 4)


def chat_inputs(processor, text, height, width, picture=None):
    """What the stock pipeline hands to generate()."""
    content = [{"type": "text", "text": text}]
    if picture is not None:
        content.insert(0, {"type": "image", "image": picture})
    return processor.apply_chat_template(
        [[{"role": "user", "content": content}]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"target_h": height, "target_w": width},
    )


def shorten(setattr):
    """Pictures of a few codes, for tests of files, signals and errors: a preview of 256 takes a
    second to write. For so few a merged copy of the policy takes longer than it saves."""
    shared = lambda glm_image, settings, base: SharedForward(glm_image.language_model)
    setattr(cpu, "token_forward", shared)
    for module, name in ((model, "encode_prompt"), (editing, "encode_edit")):
        setattr(module, name, shortened(getattr(module, name)))


def shortened(encode):
    def encode_short(processor, prompt, height, width):
        ids, positions, _ = encode(processor, prompt, height, width)
        length = CODES if height * width > 32**2 else CODES // 2
        return ids, positions[:, : len(ids) + length], length

    return encode_short


loaded = functools.cache(model.load)


def load_once(*given, **options):
    """A copy of the pipeline, which takes a fifth of the time. What has no weights is shared."""
    parts = loaded(*given, **options).components
    shared = {id(part): part for part in parts.values() if not isinstance(part, torch.nn.Module)}
    return GlmImagePipeline(**copy.deepcopy(parts, shared))


def write_prompts(folder):
    """Two prompts with their targets."""
    (folder / "prompts.txt").write_text("a red circle\na blue cross\n")
    (folder / "targets").mkdir()
    draw(RED_CIRCLE).save(folder / "targets" / "1.png")
    draw(BLUE_CROSS).save(folder / "targets" / "2.png")


@contextmanager
def short_runs(folder):
    """In a folder with two prompts: train.main on short pictures. Yields it; it returns its exit
    code."""
    write_prompts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shorten(patch.setattr)
        patch.setattr(train, "load", load_once)

        def run(*flags, main=None, usual=QUICK):
            words = words_of(flags)
            usual = usual[:-2] if "decoder" in words else usual
            return (main or main_of(words))([*usual, *words])

        yield run
    forget_modules()  # or their folder would be on the path of processes, too


@pytest.fixture
def judged(tmp_path):
    """Runs train.py with small pictures in a folder of the test's."""
    with short_runs(tmp_path) as run:
        yield run


@pytest.fixture
def quick(judged, monkeypatch):
    """Runs without evaluations, which are half of a short run."""
    monkeypatch.setattr(train, "evaluate", lambda *given, **named: None)
    return judged


@pytest.fixture
def lockable(monkeypatch):
    """A copy in place of page-locked memory, which needs CUDA."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.fixture(scope="session")
def one_step(tmp_path_factory):
    """The folder of a run of one step, to read, and to copy where a test changes it or goes on from
    there. What it has printed is beside it, in output.txt."""
    folder = tmp_path_factory.mktemp("one-step")
    with (
        short_runs(folder) as run,
        open("output.txt", "w") as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        assert run("--steps 1 --out run") == 0
    return folder / "run"


def resume(*flags, main=None):
    words = words_of(["--resume", *flags])
    return (main or main_of(words))(words)


def write_reward(body):
    """A reward of the user's own, mine.py:reward. `body` sees `call`, which counts its calls from
    1, and the pictures.

    The first call is the trial on blank pictures, the next is the evaluation before training, then
    steps come.
    """
    code = "import os, shutil, signal\nimport torch\n\ncalls = []\n\n"
    code += "def reward(images, prompts, targets):\n    calls.append(1)\n    call = len(calls)\n"
    code += "".join(f"    {line}\n" for line in body.splitlines())
    Path("mine.py").write_text(code + "    return torch.arange(len(images)).float()\n")
    return ["--reward", "mine.py:reward"]


def judge_file(name, value, *columns):
    """NAME.py:judge, a reward of the user's own: `value` is Python for what it returns."""
    given = ", ".join(["images", "prompts", "targets", *columns])
    code = f"import torch\n\ndef judge({given}):\n    return {value}\n"
    Path(f"{name}.py").write_text(code)
    return f"{name}.py:judge"


def error_from(function, *given):
    """The one line with which it refuses."""
    with pytest.raises(UserError) as caught:
        function(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def records(path):
    """The lines of a .jsonl without seconds and speeds, which are never the same."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def steps_of(path):
    return [record["step"] for record in records(path)]


def adapter_of(folder):
    return (Path(folder) / "adapter" / "adapter_model.safetensors").read_bytes()


def steps_saved(folder):
    return sorted(os.listdir(Path(folder) / "checkpoints"))


# ---- other processes -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def processes():
    """Copies of a process that has imported train.py and loaded the model: they start in a moment
    instead of five seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conftest"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{TESTS}:{ROOT}:{TINY}:{ROOT}/examples")
        patch.setenv("LOADED_AT_ONCE", "1")
        forkserver.ensure_running()
    return context


@pytest.fixture
def start(processes, judged):
    """Starts train.main on short pictures in a process of its own; what it prints goes to a
    file."""
    started = []

    def start(*arguments, output="output.txt", prepare=None, **environment):
        job = (os.getcwd(), arguments, output, prepare, environment)
        started.append(processes.Process(target=_in_child, args=job))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def _in_child(folder, arguments, output, prepare, environment):
    os.chdir(folder)
    os.environ.update(environment)
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    shorten(setattr)
    train.load = load_once
    assert not {*OF_CUDA} & {*sys.modules}
    sys.modules |= dict.fromkeys(OF_CUDA)  # a run on a CPU that imports one of these fails
    if prepare is not None:
        prepare()
    sys.exit(main_of(arguments)(arguments))


if os.environ.pop("LOADED_AT_ONCE", None):  # in the process whose copies tests start
    loaded(TINY.name, CPU)
