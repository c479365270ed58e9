"""What a GPU needs, on a CPU: who takes turns on it, and the step of one token at fixed addresses,
as graphs repeat it.

No graph is captured here; a stand-in checks that everything a replay would read stays where it was.
"""

import copy
import gc
import json
import os
import runpy
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import train_decoder
import train_edits
from conftest import (
    CPU,
    ROOT,
    build_run,
    error_from,
    holding,
    painted,
    perturb,
    prompts_of,
    records,
    seeded,
    tiny_settings,
)
from peft.tuners.lora import LoraLayer
from test_glm_image import glm_prompts
from torch.nn.functional import scaled_dot_product_attention
from transformers import StaticCache

import devices
import train
from devices import cpu
from devices import memory as gpu
from devices.cpu import SharedForward
from devices.cuda import compile_decoder, token_forward
from devices.forward import (
    CapturedForward,
    CheckedGRPO,
    SummedLinear,
    grouped_attention,
    or_plain,
    sum_products,
)
from devices.memory import plan
from glm_image.model import RELEASE, GlmImage
from glm_image.weights import round_weights, sizes
from grpo import GRPO, Offload, generate_with_logprobs
from inputs import UserError
from runtime import ranks
from runtime.settings import parse_settings
from test_grpo import reread, text_model, with_adapter
from train import adamw

LENGTH = 10  # tokens: enough to run over the end of a prompt that is too long for the cache
CODES = slice(0, 1024)
PROMPTS = [torch.tensor([5, 6, 7]), torch.tensor([9, 8])]
# As sharp as the model is, all samples would be alike.
SHAPING = {"allowed_ids": CODES, "temperature": 6.0, "top_p": 0.9}


# ---- what fits -----------------------------------------------------------------------------------


CUDA = torch.device("cuda", 0)
SIZES = {"bfloat16": (17.8, 0.44, 13.86, 0.81), "int8": (9.7, 0.44, 7.06, 0.81)}  # GB, the release


def patch_cuda(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def card(monkeypatch):
    """A GPU and a host with so many GB free, told apart from this machine's."""
    machine = SimpleNamespace(free=80.0, cap=1.0, host=60.0, capability=(8, 0), current=0)
    machine.other_rank = []  # its free memory, in bytes
    machine.monkeypatch = monkeypatch
    patch_cuda(
        monkeypatch,
        mem_get_info=lambda device: (machine.free * 1e9, 100e9),
        get_per_process_memory_fraction=lambda device: machine.cap,
        set_per_process_memory_fraction=lambda x, device: setattr(machine, "fraction", x),
        is_available=lambda: True,
        current_device=lambda: machine.current,
        get_device_capability=lambda: machine.capability,
        get_device_name=lambda device=None: "Tesla T4",
    )
    monkeypatch.setattr(gpu, "host_memory", lambda: machine.host * 1e9)
    monkeypatch.setattr(ranks, "gather", lambda value: [value, *machine.other_rank])
    return machine


def gigabytes(size):
    """A model of so many of them."""
    model = torch.nn.Linear(10**5, int(1e4 * size / 4), bias=False, device="meta")
    return model.requires_grad_(False)


def resumed(settings, base):
    """The settings of a run of this base that is resumed."""
    with TemporaryDirectory() as folder:
        values = vars(settings) | {"base": base, "out": None}
        Path(folder, "settings.json").write_text(json.dumps(values))
        return parse_settings(["--resume", folder])


def planned(*flags, before=None):
    """What is decided for the released sizes: (base, how the models share the GPU).

    before: the base of the run that is resumed.
    """
    settings = tiny_settings(*flags)
    settings = resumed(settings, before) if before else settings
    released = lambda settings, base, device: map(gigabytes, SIZES[base])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "sizes", released)
        found = plan(settings, CUDA)
    return found.base, found.waiting


@pytest.mark.parametrize(
    "machine, flags, expected",
    [
        ({"free": 11.5}, "", None),
        ({"free": 15.0, "host": 28}, "", ("int8", "pinned")),
        # int8 weights are in no file, and 4 GB of the host are kept.
        ({"free": 16.4, "host": 20}, "", None),
        ({"free": 16.4}, "--base bfloat16", None),
        ({"free": 23.4, "host": 28}, "", ("bfloat16", "mapped")),
        ({"free": 23.4}, "", ("bfloat16", "pinned")),
        ({"free": 23.4}, "--base int8", ("int8", "pinned")),
        ({"free": 24.9}, "--offload no", None),
        ({"free": 47.0, "host": 28}, "", ("bfloat16", None)),
        ({"free": 47.0}, "--offload yes", ("bfloat16", "pinned")),
        ({"free": 47.0, "host": 20}, "--base int8", ("int8", None)),
        ({"cap": 0.234}, "", ("bfloat16", "pinned")),  # like a smaller card
        # The rank with the least memory decides for all.
        ({"other_rank": [(24e9, 60e9)]}, "", ("bfloat16", "pinned")),
        ({"other_rank": [(24e9, 3e9)]}, "", ("bfloat16", "mapped")),
    ],
)
def test_a_card_is_told_by_the_weights_what_it_can_do(card, capsys, machine, flags, expected):
    vars(card).update(machine)
    if expected is None:
        words = f"^too little memory: .*; {card.free} GB of GPU memory and"
        with pytest.raises(UserError, match=words):
            planned(flags)
        return
    assert planned(flags) == expected
    line = capsys.readouterr().out
    assert f"(--base {expected[0]})" in line and ("stay" in line) == (expected[1] is None)
    assert ("more slowly" in line) == (expected[1] == "mapped")
    # Windows lends host memory beyond this, and slows down. An int is a TypeError there.
    free = min([card.free, *(of_gpu / 1e9 for of_gpu, _ in card.other_rank)])
    assert card.fraction == pytest.approx(min(free / 100, card.cap))
    assert type(card.fraction) is float


def test_a_resumed_run_keeps_its_base_whatever_fits(card):
    assert planned() == planned("--base int8", before="bfloat16") == ("bfloat16", None)
    assert planned(before="int8") == ("int8", None)
    settings = resumed(tiny_settings(), "int8")
    assert cpu.plan(settings, CPU).base == "int8"


def test_the_work_of_a_small_model_takes_little(card):
    card.free = 1e-3
    card.monkeypatch.setattr(gpu, "sizes", lambda *given: [frozen()])
    assert plan(tiny_settings(), CUDA).waiting is None


def test_processes_of_a_machine_share_its_memory(card, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert gpu.free_memory(CUDA) == (80e9, 60e9 / 4 - 4e9)
    card.host = 15.0
    assert gpu.free_memory(CUDA) == (80e9, 0)


def test_host_memory_of_a_container_is_what_its_limit_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.psutil, "virtual_memory", lambda: SimpleNamespace(available=20e9))
    assert gpu.host_memory(tmp_path) == 20e9  # no container
    for limit, expected in (("max", 20e9), ("9000000000", 1.5e9), ("90000000000", 20e9)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("8000000000\n")
        # Files that were read give way.
        (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500000000\nactive_file 3\n")
        assert gpu.host_memory(tmp_path) == expected


@pytest.mark.parametrize(
    "kind, flags",
    [
        (GlmImage, ""),
        (train_decoder.LearningDecoder, "--base int8 --train both"),
        (train_edits.EditingGlmImage, ""),
    ],
)
def test_what_is_planned_is_what_loads(kind, flags):
    """From the config files alone: the same tensors, but for adapters that learn, and for the few
    bytes of a table that stays float32."""
    settings = tiny_settings(flags)
    model = kind(train.load(settings.model, CUDA))
    if settings.base == "int8":
        round_weights(model)
    model.prepare_training(settings, CPU)
    outlined = sizes(settings, settings.base, CUDA)
    frozen = lambda part: [p for p in part.parameters() if not p.requires_grad]
    assert all(p.device.type == "meta" for part in outlined for p in frozen(part))
    for expected, found in zip(model.parts, outlined):
        shapes = lambda part: [(p.shape, p.nbytes) for p in frozen(part)]
        assert shapes(found) == shapes(expected)


def test_nothing_loads_where_it_does_not_fit(quick, card, capsys, monkeypatch):
    """The command itself, as on a card: one line, and no weight and no reward has been looked
    for."""
    card.free, loaded = 1e-3, []
    monkeypatch.setattr(train, "load_rewards", lambda *given: loaded.append(given))
    assert quick("--device cuda --out small") == 2 and not loaded
    line = capsys.readouterr().err
    assert "error: too little memory: " in line and "--model tiny-glm-image" in line


# ---- which device --------------------------------------------------------------------------------


def test_the_tiny_model_trains_on_the_cpu_beside_any_gpu(quick, card, one_step, capsys):
    """With the same digits."""
    assert quick("--steps 1 --out beside") == 0
    output = capsys.readouterr().out
    assert "device: CPU in float32" in output and "base=" not in output
    # On a CPU "auto" are the weights as they are.
    settings = json.loads(Path("beside/settings.json").read_text())
    assert settings["base"] == "bfloat16"
    assert records("beside/metrics.jsonl") == records(one_step / "metrics.jsonl")


def test_without_a_model_a_gpu_trains_glm_image(card):
    assert parse_settings([]).model == RELEASE


def test_a_gpu_without_bfloat16_is_refused(card):
    card.capability = (7, 5)
    words = "Tesla T4 has no bfloat16: use an Ampere GPU"
    assert error_from(devices.backend("cuda").device).startswith(words)


def test_processes_of_the_tiny_model_leave_the_gpus_alone(card, monkeypatch):
    """Of four on a machine with one GPU none asks for a GPU of its own, nor for NCCL to connect."""
    begun, chosen = [], []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **more: begun.append(more))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with ranks.joined():
        pass
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "count", lambda: 4)
    assert devices.backend(tiny_settings().device).device() == CPU
    assert begun[0].get("device_id") is None and not chosen
    card.current, device = 3, torch.device("cuda", 3)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: device)
    monkeypatch.setattr(ranks, "average", chosen.extend)
    assert devices.backend("auto").device() == device and chosen == [3]
    gpu.connect(device)  # before work begins
    assert chosen == [3, device]


# ---- who is on the GPU ---------------------------------------------------------------------------


def frozen():
    return torch.nn.Linear(300, 300).requires_grad_(False)


def test_models_that_take_turns_wait_where_they_belong(lockable):
    released, model = [], frozen()
    memory = holding(CUDA, model, waiting="pinned", release=lambda: released.append(1))
    offload = memory.offload
    assert isinstance(offload, Offload) and list(offload.homes) == [model]
    assert offload.device == CUDA
    offload.on_evict()
    assert released == [1]
    assert "pinned_max_round_threshold_mb:1" in torch._C._accelerator_getAllocatorSettings()
    own = model.weight.data_ptr()
    unpinned = holding(CUDA, model, waiting="mapped").offload
    assert model.weight.data_ptr() == own and unpinned.homes[model][0][1].data_ptr() == own
    unpinned.on_evict()  # nothing is captured, nothing to release


@pytest.mark.parametrize(
    "name, version, ours",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", torch.__version__, "pinned_max_round_threshold_mb:1,"),
        ("PYTORCH_ALLOC_CONF", torch.__version__, "pinned_max_round_threshold_mb:1,"),
        ("PYTORCH_ALLOC_CONF", "2.11.0+cu130", ""),  # which would refuse it
    ],
)
def test_the_allocators_setting_joins_those_of_the_user(monkeypatch, name, version, ours):
    monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setattr(torch, "__version__", version)
    runpy.run_path(f"{ROOT}/devices/memory.py")
    assert os.environ[name] == f"{ours}expandable_segments:True"


def test_turns_begin_amid_a_run(lockable, monkeypatch):
    """Weights and buffers go back to where they were loaded, and what learns stays."""
    model = frozen()
    model.adapter = torch.nn.Parameter(torch.zeros(3))
    model.scale = torch.nn.Buffer(torch.ones(3))
    where = lambda: [x.data_ptr() for x in (model.weight, model.scale, model.adapter)]
    loaded = where()
    kept = model.adapter.data  # or its address could be given to another
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())  # as to a GPU
        memory = holding(CUDA, model, frozen())
    up = where()
    assert not {*up} & {*loaded}
    assert where() == up and memory.offload is None
    memory.device = CPU
    monkeypatch.setattr(gpu, "host_memory", lambda: 4e9)  # nothing can be locked
    memory.take_turns()
    assert where() == [*loaded[:2], up[2]] and not memory.homes  # or int8 would stay up
    memory.offload.all_but(model)
    assert not {*where()} & {*loaded}
    assert kept.data_ptr() == loaded[2]


def test_weights_that_cannot_be_locked_stay_where_they_are(monkeypatch, capsys):
    def refuse(tensor):
        raise torch.AcceleratorError("CUDA error: out of memory\nCompile with ...")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    model = frozen()
    home = model.weight.data_ptr()
    offload = holding(CUDA, model, waiting="pinned").offload
    assert offload.homes[model][0][1].data_ptr() == home
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "memory: page-locking stopped (CUDA error: out of memory Compile with ...): "
    )


# ---- the step of one token -----------------------------------------------------------------------


@pytest.fixture
def compiled_at_once(monkeypatch):
    """torch.compile without code generation: the step is traced, whole, which is what could go
    wrong here."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    yield
    torch._dynamo.reset()


def test_grouped_attention_equals_repeated_heads():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, *size, 16) for size in ((8, 1), (2, 10), (2, 10)))
    mask = (torch.arange(10) < torch.tensor([4, 7])[:, None]).view(2, 1, 1, 10)
    repeated = (x.repeat_interleave(4, 1) for x in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, mask, scale=0.3).transpose(1, 2)
    output, _ = grouped_attention(None, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected)  # (2, 1, 8, 16)
    # A prompt of a single token has no mask.
    grouped, alone = SimpleNamespace(num_key_value_groups=4, is_causal=True), (key[:, :, :1],) * 2
    output, _ = grouped_attention(grouped, query, *alone, None, scaling=0.3)
    torch.testing.assert_close(output, alone[1].repeat_interleave(4, 1).transpose(1, 2))


class RecordedGraph:
    """Stands in for a CUDA graph: repeats a step, which must find everything at the addresses it
    was recorded with."""

    recording = None  # the graph that _step is being recorded into
    made = 0

    def __init__(self):
        RecordedGraph.made += 1

    def replay(self):
        logits = self.forward.logits
        self.forward.eager_step()
        assert addresses(self.forward) == self.addresses
        self.logits.copy_(self.forward.logits)  # a replay writes where the recorded step wrote
        self.forward.logits = logits


def addresses(forward):
    tensors = [forward.ids, forward.positions, forward.mask]
    for layer in forward.cache.layers:
        tensors += [layer.keys, layer.values, layer.cumulative_length]
    return [tensor.data_ptr() for tensor in tensors]


class GraphedForward(CapturedForward):
    """CapturedForward as on a GPU, with a RecordedGraph in the place of CUDA's."""

    def _start(self, *arguments):
        super()._start(*arguments)
        if self.graph is None and not self.refused:
            self._capture(arguments[-1].get_seq_length())

    def eager_step(self):
        super()._step()

    def _step(self):
        self.eager_step()
        if graph := RecordedGraph.recording:
            graph.forward, graph.logits, graph.addresses = self, self.logits, addresses(self)


@pytest.fixture
def recorded_graphs(monkeypatch):
    class Recording:
        def __init__(self, graph, **options):
            self.graph = graph

        def __enter__(self):
            RecordedGraph.recording = self.graph

        def __exit__(self, *error):
            RecordedGraph.recording = None

    stream = SimpleNamespace(wait_stream=lambda other: None)
    patch_cuda(
        monkeypatch,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: nullcontext(),
        CUDAGraph=RecordedGraph,
        graph=Recording,
    )
    monkeypatch.setattr(RecordedGraph, "made", 0)


@pytest.fixture
def glm(pipe):
    model = with_adapter(copy.deepcopy(pipe.vision_language_encoder))
    model.get_base_model().activation_checkpointing_enable()  # as on a GPU; it sleeps in eval mode
    perturb(model.eval(), 0.05)
    return model


def encode(pipe, *texts):
    """Prompts of the tiny model, for pictures of which only the first LENGTH codes are written."""
    return glm_prompts(pipe, *texts, size=(64, 32), length=LENGTH)[:2]


def same_samples(model, forward, prompts, positions=None, group=2, length=LENGTH, **shaping):
    """What is sampled through `forward` is what the plain model has, which reads it again in one
    pass."""
    tokens, logp, nucleus = generate_with_logprobs(
        model,
        prompts,
        length,
        num_samples=group,
        position_ids=positions,
        token_forward=forward,
        generators=[*map(seeded, range(len(prompts)))],
        **shaping,
    )
    assert len(tokens.unique(dim=0)) > len(prompts)  # or the samples of a group could be mixed up
    nothing = [None] * len(prompts)
    nuclei = nothing if nucleus is None else nucleus.split(group)
    groups = zip(
        prompts, positions or nothing, tokens.split(group), logp.split(group), nuclei, strict=True
    )
    shaping.pop("top_p", None)
    for ids, at, rows, found, kept in groups:
        again = reread(model, ids, rows, position_ids=at, nucleus=kept, **shaping)
        torch.testing.assert_close(found, again, atol=1e-4, rtol=0)


def test_captured_forward_equals_the_model(glm, pipe, monkeypatch, recorded_graphs):
    """Fewer prompts than are to come, as in the first evaluation; more; several lengths side by
    side; fewer of them; longer ones, for which the cache must grow; released."""
    monkeypatch.setattr(CapturedForward, "ROOM", 32)
    forward = GraphedForward(glm, LENGTH, rows=4, compile=False)
    three = encode(pipe, "a ring", "a red circle and a blue cross", "three squares")
    for count in (1, 2, 3):
        same_samples(glm, forward, *(part[:count] for part in three), **SHAPING)
        assert RecordedGraph.made == (2 if count == 3 else 1)  # one for each number of rows
    cache, size = forward.cache, forward.size
    assert isinstance(cache, StaticCache) and size == 32
    # Its rows had padding before.
    same_samples(glm, forward, *(part[1:2] for part in three), **SHAPING)
    assert forward.cache is cache and RecordedGraph.made == 2  # fewer rows are filled up

    longer = encode(pipe, "a ring", "a red ring and a green cross " * 2)
    assert size - LENGTH < len(longer[0][1]) <= size  # there is room for the prompt alone
    same_samples(glm, forward, *longer, **SHAPING)
    assert forward.cache is not cache and forward.size > size and forward.size % 32 == 0
    same_samples(glm, forward, *three, **SHAPING)
    assert RecordedGraph.made == 3 and len(forward.ids) == 6  # as many rows as before

    forward.release()
    assert forward.cache is forward.graph is forward.logits is None  # the memory is free
    same_samples(glm, forward, *three, **SHAPING)
    assert RecordedGraph.made == 4
    # Samples that agree for a while, as on a CPU; those of one prompt in three tokens.
    same_samples(glm, SharedForward(glm), *three, group=8, allowed_ids=CODES, temperature=4.0)
    one = [part[:1] for part in three]
    same_samples(glm, SharedForward(glm), *one, allowed_ids=CODES, temperature=3.0)


def test_a_copy_with_the_adapter_added_follows_what_is_learned(pipe):
    model = with_adapter(copy.deepcopy(pipe.vision_language_encoder))
    forward, one = SharedForward(model, merge=True), encode(pipe, "a ring")
    for size in (0.02, 0.05):
        perturb(model, size)
        same_samples(model, forward, *one, group=8, allowed_ids=CODES, temperature=4.0)


@pytest.mark.parametrize(
    "kind, compiled",
    [
        (GlmImage, 1),
        (train_decoder.LearningDecoder, 0),
        (train_edits.EditingGlmImage, 0),
    ],
)
def test_the_decoders_blocks_are_compiled_where_only_the_codes_learn(
    pipe, monkeypatch, kind, compiled
):
    calls = []
    compile_blocks = lambda model: calls.append(torch._dynamo.config.recompile_limit)
    monkeypatch.setattr(type(pipe.transformer), "compile_repeated_blocks", compile_blocks)
    monkeypatch.setattr(pipe.transformer, "forward", pipe.transformer.forward)
    settings = tiny_settings("--prompts-per-step 3 --group-size 5")
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own limit
        assert token_forward(kind(pipe), settings, "bfloat16").rows == 15
    assert calls == [32] * compiled


def test_an_adapters_products_for_one_compiled_token_are_sums(glm, monkeypatch):
    """Equal to torch's products but for rounding; an update, and a CPU, keep torch's products."""
    layers = [module.lora_A["default"] for module in glm.modules() if isinstance(module, LoraLayer)]
    layers += [
        module.lora_B["default"] for module in glm.modules() if isinstance(module, LoraLayer)
    ]
    inputs = [torch.randn(5, 1, layer.in_features) for layer in layers]
    expected = [layer(x) for layer, x in zip(layers, inputs)]
    sum_products(glm)
    assert {type(layer) for layer in layers} == {SummedLinear}
    products, stock = [], torch.nn.Linear.forward
    count = lambda layer, x: (products.append(layer), stock(layer, x))[1]
    monkeypatch.setattr(torch.nn.Linear, "forward", count)
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=compiling: value)
        for layer, x, output in zip(layers, inputs, expected):
            torch.testing.assert_close(layer(x), output)
        assert len(products) == len(layers)  # of the first round alone
    layers[0](inputs[0].transpose(0, 1))
    assert len(products) == len(layers) + 1


def test_a_compiled_step_follows_the_adapter_and_its_cache_is_free_at_once(
    glm, pipe, compiled_at_once
):
    """torch.compile keeps what it traced with in a reference cycle: on a GPU the first cache would
    stay, 1 GB."""
    language_model = glm.get_base_model().model.language_model
    language_model.layers = language_model.layers[:1]  # the others are traced like it
    language_model.config.num_hidden_layers = 1
    forward = CapturedForward(glm, LENGTH)
    two = encode(pipe, "a ring", "three squares")
    gc.collect()
    gc.disable()
    try:
        same_samples(glm, forward, *two, **SHAPING)
        perturb(glm, 0.2)
        same_samples(glm, forward, *two, **SHAPING)
        keys = weakref.ref(forward.cache.layers[0].keys)
        forward.release()
        assert keys() is None
    finally:
        gc.enable()


# ---- what fails is left out ----------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch):
    """torch.compile as on a machine without a C compiler. Yields the calls of its backend."""
    calls = []

    def backend(graph, inputs):
        calls.append(1)
        raise RuntimeError("Failed to find C compiler.\nPlease specify one via CC")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield calls
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def test_a_step_that_cannot_be_compiled_runs_without(no_compiler, capsys):
    model = with_adapter(text_model())
    same_samples(model, CapturedForward(model, LENGTH), PROMPTS, temperature=1.5)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("torch.compile fails here (") and "Failed to find C compiler" in line
    assert len(no_compiler) == 1


def test_a_decoder_that_cannot_be_compiled_paints_without(pipe, no_compiler, capsys):
    settings = tiny_settings("--decode-steps 2")
    tokens = torch.zeros(1, 16, dtype=torch.long)
    expected, _ = painted(pipe, "a ring", tokens, settings, 0)
    own = copy.deepcopy(pipe)
    compile_decoder(own.transformer)
    found, _ = painted(own, "a ring", tokens, settings, 0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert len(no_compiler) == 1
    assert capsys.readouterr().out.count("torch.compile fails here") == 1


def test_memory_that_runs_out_in_compiled_code_is_no_failed_compilation(monkeypatch, capsys):
    def full():
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    with pytest.raises(RuntimeError, match="Triton"):
        or_plain(full)()
    assert not capsys.readouterr().out


def failing(error, hidden):
    """torch.cuda.graph of a capture that fails with an error. hidden: by the error of its end."""

    class Failing(torch.cuda.graph):
        def __exit__(self, *given):
            super().__exit__(*given)
            try:
                raise error
            finally:
                if hidden:
                    raise RuntimeError("operation failed due to a previous error during capture")

    return Failing


def test_a_capture_that_fails_leaves_the_step_as_it_is(
    glm, pipe, monkeypatch, recorded_graphs, capsys
):
    """The stream is put back, no second graph is begun, and the first one stays alive."""
    back, error = [], RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(torch.cuda, "graph", failing(error, hidden=True))
    monkeypatch.setattr(torch.cuda, "set_stream", back.append, raising=False)
    forward = GraphedForward(glm, LENGTH, compile=False)
    for _ in range(2):
        same_samples(glm, forward, *encode(pipe, "a ring", "three squares"), **SHAPING)
        forward.release()  # as models that take turns do
    assert RecordedGraph.made == 1 and len(forward.failed) == 1
    assert back == [torch.cuda.current_stream()]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("a token's step cannot be a CUDA graph (operation not permitted when")


@pytest.mark.parametrize("hidden", [False, True])
def test_memory_that_runs_out_in_a_capture_is_made_and_the_step_is_captured(
    glm, pipe, monkeypatch, recorded_graphs, lockable, capsys, hidden
):
    """By a second graph. The first one stays alive: torch may still refer to it."""
    back, made, recording = [], [], torch.cuda.graph
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    def create():
        monkeypatch.setattr(torch.cuda, "graph", recording if made else failing(error, hidden))
        made.append(weakref.ref(graph := RecordedGraph()))
        return graph

    patch_cuda(monkeypatch, CUDAGraph=create)
    monkeypatch.setattr(torch.cuda, "set_stream", back.append, raising=False)
    forward = GraphedForward(glm, LENGTH, compile=False)
    memory = holding(CPU, release=forward.release)
    settings = tiny_settings("--offload no --micro-batch-size 2")
    prompts = encode(pipe, "a ring", "three squares")
    work = lambda *_: same_samples(glm, forward, *prompts, **SHAPING)
    memory.attempt(work, SimpleNamespace(trainers={}), settings, {}, [], 0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("from here on --micro-batch-size is 1")
    assert back == [torch.cuda.current_stream()]
    first, second = (graph() for graph in made)
    assert first is not None and forward.graph is second and not forward.refused


@pytest.mark.parametrize("wrong", [0.5, torch.nan, None])
def test_a_captured_step_that_is_wrong_is_given_up(wrong, capsys, recorded_graphs, monkeypatch):
    """Its first samples disagree with what is recomputed, or are not finite. Where memory runs out
    before there are any, it is still to be checked."""

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    class Wrong(GraphedForward):
        def _step(self):
            super()._step()
            if not self.refused and wrong is not None:
                torch.manual_seed(0)
                self.logits = self.logits + wrong * torch.randn_like(self.logits)

    monkeypatch.setattr(cpu, "Trainer", CheckedGRPO)  # as on a GPU
    run = build_run(settings := tiny_settings("--temperature 6 --top-p 1"))
    prompts = run.glm_image.encode(prompts_of("a ring"), settings)
    prompts = [(ids, positions[:, : len(ids) + LENGTH], LENGTH) for ids, positions, _ in prompts]
    trainer, plain = run.trainer, GRPO.sample(run.trainer, prompts, 2, 5)
    trainer.token_forward = Wrong(trainer.model, LENGTH, compile=False)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(GRPO, "sample", full)
        trainer.sample(prompts, 2, 5)
    try:
        groups = trainer.sample(prompts, group_size=2, seed=5)
    finally:
        torch.compiler.set_stance("default")
    assert torch.equal(groups[0].tokens, plain[0].tokens)
    torch.testing.assert_close(groups[0].old_logprobs, plain[0].old_logprobs, atol=1e-4, rtol=0)
    assert ("the captured step is wrong here" in capsys.readouterr().out) == (wrong is not None)
    assert trainer.checked and trainer.token_forward.refused == (wrong is not None)


# ---- in a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device, kind", [(CPU, SharedForward), (CUDA, CapturedForward)])
def test_a_gpu_captures_the_step_and_compiles_it(device, kind):
    settings = tiny_settings()
    model = GlmImage(train.load(settings.model, CPU))
    model.prepare_training(settings, device)
    policy = model.language_model
    forward = devices.backend(device.type).token_forward(model, settings, "bfloat16")
    assert isinstance(forward, kind)
    if device == CUDA:
        assert forward.num_new_tokens == 256 + 4 * 4  # of the preview and the picture
    config = policy.get_base_model().config.get_text_config()
    assert (config._attn_implementation == "grouped") == (device == CUDA)


def test_a_gradient_however_small_moves_the_adapter():
    """Adam's step does not depend on the gradient's size, down to the smallest that was seen in
    such training."""
    weight = torch.nn.Parameter(torch.ones(8))  # which does not decay
    optimizer = adamw(torch.nn.ParameterList([weight]))
    optimizer.param_groups[0]["lr"] = 1e-3
    weight.grad = torch.full((8,), 5e-9)
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.full((8,), 0.999), rtol=1e-6, atol=0)
