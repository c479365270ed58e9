"""What a GPU needs, on a CPU: who takes turns on it, and the step of one token at fixed addresses,
as graphs repeat it.

No graph is captured here; a stand-in checks that everything a replay would read stays where it was.
"""

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import make
import pytest
import torch
import train_decoder
import train_edits
from conftest import CPU, TINY, build_run, records, tiny_settings, words_of
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import train
from glm_image.memory import GAPS, needed, working_memory
from glm_image.model import GlmImage, captured_step, encode_prompt
from grpo import Offload, generate_with_logprobs, get_per_token_logprobs
from runtime import UserError, gpu, ranks
from runtime.captured import CapturedForward, grouped_attention
from runtime.gpu import Clock, place, plan
from train import adamw

LENGTH = 10  # tokens: enough to run over the end of a prompt that is too long for the cache
CODES = slice(0, make.NUM_CODES)
PROMPTS = [torch.tensor([5, 6, 7]), torch.tensor([9, 8])]
SHAPING = {
    "allowed_ids": CODES,
    "temperature": 6.0,
    "top_p": 0.9,
}  # as sharp as it is, all samples were alike


# ---- memory --------------------------------------------------------------------------------------


BOTH = "--base int8 --train both"
CUDA = torch.device("cuda", 0)
PIXELS = ["--height", "1024", "--width", "1024"]


@pytest.fixture
def card(monkeypatch):
    """A GPU and a host with so many GB free, told apart from this machine's."""
    machine = SimpleNamespace(free=80.0, cap=1.0, host=60.0, capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (machine.free * 1e9, 40e9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: machine.cap)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(gpu, "host_memory", lambda: machine.host * 1e9)
    return machine


def planned(models, settings):
    return plan(needed, models, settings, 0, CUDA)


def gigabytes(size):
    """A model of so many of them."""
    return torch.nn.Linear(10**5, int(1e4 * size / 4), bias=False, device="meta").requires_grad_(
        False
    )


def weights(policy, painters):
    """Models of so many GB, half that as int8."""
    return lambda settings, device: [
        gigabytes(gb / (1 + (settings.base == "int8"))) for gb in (policy, painters)
    ]


def for_gpu(*flags):
    """Settings as on a machine with a GPU."""
    settings = tiny_settings(*PIXELS, "--prompts-per-step 4 --eval-reward none", *flags)
    settings.micro_batch_size = (
        settings.micro_batch_size if "--micro-batch-size" in " ".join(flags) else "auto"
    )
    return settings


@pytest.mark.parametrize(
    "choice, free, cap, expected",
    [
        ("auto", 11.9, 1.0, False),  # 4 GB of weights, and 7.9 to work in with micro-batches of 2
        ("auto", 11.7, 1.0, True),
        ("auto", 40.0, 0.29, True),  # a cap counts like a smaller card
        ("yes", 40.0, 1.0, True),
        ("no", 1.0, 1.0, False),
    ],
)
def test_what_fits_stays_on_the_gpu(card, capsys, choice, free, cap, expected):
    card.free, card.cap = free, cap
    settings = for_gpu("--offload", choice, "--micro-batch-size 2")
    assert planned(weights(2, 2), settings) == ("pinned" if expected else None)
    output = capsys.readouterr().out
    assert f"they {'take turns' if expected else 'both stay'} (--offload {choice})" in output


def test_the_largest_micro_batch_that_fits(card, capsys):
    """Both staying comes first; 1,344 tokens are 1.08 GB a sequence, and the VAE's 5.35 GB are
    there in any case."""
    sizes = {}
    for free in (11.5, 11.9, 15.0, 15.2, 40.0):
        card.free, settings = free, for_gpu("--group-size 16 --prompts-per-step 1")
        sizes[free] = planned(weights(2, 2), settings), settings.micro_batch_size
    expected = {11.5: ("pinned", 4), 11.9: (None, 4), 15.0: (None, 4), 15.2: (None, 8)}
    assert sizes == expected | {40.0: (None, 8)}
    assert "with micro-batches of 8 (--micro-batch-size auto)" in capsys.readouterr().out
    card.free, settings = 40.0, for_gpu("--group-size 3")
    planned(weights(2, 2), settings)
    assert settings.micro_batch_size == 3  # a group has no more
    card.free, settings = 9.1, for_gpu()
    assert planned(weights(5, 2), settings) and settings.micro_batch_size == 2  # and in turns


@pytest.mark.parametrize(
    "free, host, flags",
    [
        (16.1, 60.0, []),
        (16.1, 20.0, ["--base", "int8"]),  # the GPU would do
        (24.5, 60.0, str.split("--micro-batch-size 16 --group-size 16 --prompts-per-step 1")),
    ],
)
def test_what_does_not_fit_is_refused(card, free, host, flags):
    """Before anything loads. Released sizes: 17.8 and 15.1 GB, 9.7 and 8.3 as int8; 4 GB of the
    host are kept."""
    card.free, card.host = free, host
    sizes = {"bfloat16": (17.8, 15.1), "int8": (9.7, 8.3)}
    released = lambda settings, device: [gigabytes(size) for size in sizes[settings.base]]
    with pytest.raises(UserError) as error:
        planned(released, for_gpu(*flags))
    assert str(error.value).startswith("too little memory: with micro-batches of ")
    assert f"free are {free:.1f} GB of the GPU and {host - 4:.1f} of the host" in str(error.value)


def test_weights_that_cannot_be_page_locked_are_copied_from_where_they_are(card, capsys):
    """Slower beats refused; int8 weights are in no file, so memory has to hold them."""
    card.free = 11.5
    for host, expected in ((8.1, "pinned"), (7.9, "mapped")):
        card.host = host
        assert planned(weights(2, 2), for_gpu()) == expected
        assert ("more slowly: so much cannot be page-locked" in capsys.readouterr().out) == (
            expected == "mapped"
        )
    card.host = 10.1
    assert planned(weights(8, 4), for_gpu("--base int8 --offload yes")) == "pinned"
    card.host = 9.9
    with pytest.raises(UserError, match=r"6.0 of page-locked host memory; .* 5.9 of the host"):
        planned(weights(8, 4), for_gpu("--base int8 --offload yes"))


def test_a_gpu_without_bfloat16_is_refused(card):
    card.capability = (7, 5)
    with pytest.raises(
        UserError, match="Tesla T4 has no bfloat16: take a GPU of the Ampere series or newer"
    ):
        planned(weights(2, 2), for_gpu())


def test_rewards_are_counted_while_they_score(card):
    """SmolVLM takes 7.3 GB beside all that stays, or alone where models take turns."""
    settings = for_gpu("--reward vqa --micro-batch-size 1")
    both, *turns = working_memory(settings, 1, 0)
    cache = 41e3 * 1536 * 16
    assert both == pytest.approx(cache + 7.3e9) and turns[3] == pytest.approx(7.3e9)
    judged = for_gpu("--eval-reward vqa --micro-batch-size 1")
    assert working_memory(judged, 1, 0) == working_memory(settings, 1, 0)
    for free, expected in ((13.9, None), (13.7, "pinned")):
        card.free = free
        assert planned(weights(2, 2), for_gpu("--reward vqa --micro-batch-size 1")) == expected
        assert planned(weights(2, 2), for_gpu("--reward ssim --micro-batch-size 1")) is None


def test_what_is_needed_follows_from_the_weights(monkeypatch):
    model = torch.nn.Linear(300, 300).requires_grad_(False)  # 361,200 bytes
    learns = torch.nn.Linear(5, 2, bias=False)  # stays on the GPU
    settings = tiny_settings()
    together, sampling, painting, decoding, scoring = working_memory(settings, 4, 0)
    assert scoring < decoding < sampling and painting < sampling
    of = lambda *models, prompt=0: needed(models, settings, 4, prompt)
    trained = 4 * 40 + GAPS  # with its gradient and Adam's moments
    expected = (361_200 + trained + together, 361_200 + trained + sampling, 361_200, 0)
    assert of(model, learns) == expected == of(model, learns, prompt=256)
    settings.height = settings.width = 1024
    settings.prompts_per_step = 1
    *_, decoding, _ = working_memory(settings, 4, 0)
    assert of(learns, model, model)[1] == trained + 361_200 + decoding  # the VAE in its own turn
    alone = of(model, learns)[0]
    longer = of(model, learns, prompt=4256)[0] - of(model, learns, prompt=2256)[0]
    assert longer > 0.8e6 * 500 * 4  # a token per 4 bytes
    monkeypatch.setattr(ranks, "count", lambda: 2)
    assert of(model, learns)[0] == alone + 0.5e9  # NCCL's buffers


def test_the_rank_with_the_least_memory_decides_for_all(card, monkeypatch):
    card.free = 40.0
    assert not planned(weights(2, 2), for_gpu())
    for other, expected in (((10e9, 60e9), "pinned"), ((10e9, 3e9), "mapped")):
        monkeypatch.setattr(ranks, "gather", lambda value, other=other: [value, other])
        assert planned(weights(2, 2), for_gpu()) == expected
    monkeypatch.setattr(ranks, "gather", lambda value: [value, (4e9, 4e9)])
    with pytest.raises(UserError, match="free are 4.0 GB of the GPU and 4.0 of the host"):
        planned(weights(2, 2), for_gpu())
    monkeypatch.undo()


def test_processes_of_a_machine_share_its_memory(card, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert gpu.free_memory(CUDA) == (40e9, 60e9 / 4 - 4e9)
    card.host = 15.0
    assert gpu.free_memory(CUDA) == (40e9, 0)


def test_host_memory_of_a_container_is_what_its_control_group_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.psutil, "virtual_memory", lambda: SimpleNamespace(available=20e9))
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    (groups / "pod" / "own").mkdir(parents=True)
    (groups / "memory").mkdir()
    assert gpu.host_memory(groups, own) == 20e9  # not on Linux
    own.write_text("0::/pod/own\n")
    (groups / "pod" / "own" / "memory.max").write_text("max\n")
    (groups / "pod" / "own" / "memory.current").write_text("7\n")
    assert gpu.host_memory(groups, own) == 20e9
    (groups / "pod" / "memory.max").write_text("9000000000\n")
    (groups / "pod" / "memory.current").write_text("8000000000\n")
    (groups / "pod" / "memory.stat").write_text("anon 1\ninactive_file 500000000\nactive_file 3\n")
    assert gpu.host_memory(groups, own) == 1.5e9  # files that were read give way
    own.write_text(
        "5:cpu:/x\n4:memory:/docker/its/name\n"
    )  # version 1, whose folder is seen as the root within
    (groups / "memory" / "memory.limit_in_bytes").write_text("5000000000\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text("4000000000\n")
    (groups / "memory" / "memory.stat").write_text(
        "inactive_file 1\ntotal_inactive_file 2000000000\n"
    )
    assert gpu.host_memory(groups, own) == 3e9


@pytest.mark.parametrize("parts, flags", [(train.Parts(), ""), (train_decoder.PARTS, BOTH)])
def test_what_is_planned_is_what_loads(parts, flags):
    """From the config files alone: the same tensors, but for the few bytes of a table that stays
    float32."""
    settings = parts.parse(words_of(["--model", TINY, flags]), parts.parser())
    model = parts.model(train.load(settings.model, CUDA))
    model.prepare_training(settings, CPU)
    outlined = parts.model.sizes(settings, CUDA)
    assert all(p.device.type == "meta" for model in outlined for p in model.parameters())
    for expected, found in zip(model.parts, outlined):
        assert sum(p.nbytes for p in found.parameters()) == sum(
            p.nbytes for p in expected.parameters()
        )
        assert [p.shape for p in found.parameters()] == [p.shape for p in expected.parameters()]


def test_nothing_loads_where_it_does_not_fit(quick, card, capsys, monkeypatch):
    """The command itself, as on a card: one line, and no weight and no reward has been looked
    for."""
    card.free, loaded = 1.0, []
    monkeypatch.setattr(ranks, "device", lambda: CUDA)
    monkeypatch.setattr(train, "load_data", lambda *given: loaded.append(given))
    assert quick("--out small") == 2 and not loaded
    assert "error: too little memory: with micro-batches of 4 (" in capsys.readouterr().err


def test_place_puts_models_where_they_belong(monkeypatch):
    models = [torch.nn.Linear(3, 3), torch.nn.Linear(2, 2)]
    assert place(models, torch.device("meta"), None, None) is None
    assert all(p.device.type == "meta" for model in models for p in model.parameters())

    released, model = [], torch.nn.Linear(300, 300).requires_grad_(False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    forward = SimpleNamespace(release=lambda: released.append(1))
    offload = place([model], CUDA, forward, "pinned")
    assert (
        isinstance(offload, Offload) and list(offload.homes) == [model] and offload.device == CUDA
    )
    offload.on_evict()
    assert released == [1]
    assert "pinned_max_round_threshold_mb:1" in torch._C._accelerator_getAllocatorSettings()
    own = model.weight.data_ptr()
    unpinned = place([model], CUDA, None, "mapped")
    assert model.weight.data_ptr() == own and unpinned.homes[model][0][1].data_ptr() == own
    unpinned.on_evict()  # nothing is captured, nothing to release


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
    query, key, value = (
        torch.randn(2, 8, 1, 16),
        torch.randn(2, 2, 10, 16),
        torch.randn(2, 2, 10, 16),
    )
    mask = (torch.arange(10) < torch.tensor([4, 7])[:, None]).view(2, 1, 1, 10)
    scores = (query @ key.repeat_interleave(4, 1).transpose(2, 3) * 0.3).masked_fill(
        ~mask, -torch.inf
    )
    expected = (scores.softmax(-1) @ value.repeat_interleave(4, 1)).transpose(1, 2)  # (2, 1, 8, 16)
    output, _ = grouped_attention(None, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(output, expected)


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
        if self.graph is None:
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
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(RecordedGraph, "made", 0)


def with_adapter(model):
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "gate_up_proj", "up_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()


def perturb(model, size=0.05):
    """Move the adapter away from zero."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, size)


@pytest.fixture
def glm(pipe):
    model = with_adapter(copy.deepcopy(pipe.vision_language_encoder))
    model.get_base_model().activation_checkpointing_enable()  # as on a GPU; it sleeps in eval mode
    perturb(model.eval(), 0.05)
    return model


def text_model():
    """A random Llama whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(8)
    return model


def encode(pipe, *texts):
    """Prompts of the tiny model, for pictures of which only the first LENGTH codes are written."""
    encoded = [encode_prompt(pipe.processor, text, 64, 32) for text in texts]
    return [ids for ids, _, _ in encoded], [
        positions[:, : len(ids) + LENGTH] for ids, positions, _ in encoded
    ]


def same_samples(model, forward, prompts, positions=None, group=2, **shaping):
    """What is sampled through `forward` against the plain model, from equal seeds.

    Another order of summation may tip a draw, and the rest of that sequence is then another: as far
    as they agree the log-probs are the same, and nearly all agree to the end.
    """

    def sample(forward):
        return generate_with_logprobs(
            model,
            prompts,
            LENGTH,
            num_samples=group,
            position_ids=positions,
            forward=forward,
            generators=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
            **shaping,
        )

    (expected, expected_logp, _), (tokens, logp, nucleus) = sample(None), sample(forward)
    equal = (tokens == expected).cumprod(1).bool()
    torch.testing.assert_close(logp[equal], expected_logp[equal], atol=1e-4, rtol=0)
    assert equal[:, -1].float().mean() > 0.6
    assert len(tokens.unique(dim=0)) > len(prompts)  # or the samples of a group could be mixed up
    nothing = [None] * len(prompts)
    nuclei = nothing if nucleus is None else nucleus.split(group)
    groups = zip(
        prompts, positions or nothing, tokens.split(group), logp.split(group), nuclei, strict=True
    )
    for ids, at, rows, found, kept in groups:  # and read again in one pass
        sequences = torch.cat([ids.expand(group, -1), rows], dim=1)
        told = {name: value for name, value in shaping.items() if name != "top_p"}
        with torch.no_grad():
            again = get_per_token_logprobs(
                model, sequences, LENGTH, position_ids=at, nucleus=kept, **told
            )
        torch.testing.assert_close(found, again, atol=1e-4, rtol=0)


def test_captured_forward_equals_the_model(glm, pipe, monkeypatch, recorded_graphs):
    """Prompts of several lengths side by side; fewer of them; longer ones, for which the cache must
    grow; released."""
    monkeypatch.setattr(CapturedForward, "ROOM", 32)
    forward = GraphedForward(glm, LENGTH, compile=False)
    three = encode(pipe, "a ring", "a red circle and a blue cross", "three squares")
    same_samples(glm, forward, *three, **SHAPING)
    cache, size = forward.cache, forward.size
    assert isinstance(cache, StaticCache) and size == 32
    same_samples(glm, forward, *(part[1:] for part in three), **SHAPING)
    assert forward.cache is cache  # fewer rows are filled up
    assert RecordedGraph.made == 1

    longer = encode(pipe, "a ring", "a red ring and a green cross " * 2)
    assert size - LENGTH < len(longer[0][1]) <= size  # there is room for the prompt alone
    same_samples(glm, forward, *longer, **SHAPING)
    assert forward.cache is not cache and forward.size > size and forward.size % 32 == 0
    same_samples(glm, forward, *three, **SHAPING)
    assert RecordedGraph.made == 2 and len(forward.ids) == 6  # as many rows as before

    forward.release()
    assert forward.cache is None and forward.graph is None  # the memory is free
    same_samples(glm, forward, *three, **SHAPING)
    assert RecordedGraph.made == 3


@pytest.mark.parametrize(
    "kind, flags, compiled",
    [
        (GlmImage, "", 1),
        (GlmImage, "--compile no", 0),
        (train_decoder.LearningDecoder, "", 0),
        (train_edits.EditingGlmImage, "", 0),
    ],
)
def test_the_decoders_blocks_are_compiled_where_only_the_codes_learn(
    pipe, monkeypatch, kind, flags, compiled
):
    calls = []
    compile_blocks = lambda model: calls.append(1)
    monkeypatch.setattr(type(pipe.transformer), "compile_repeated_blocks", compile_blocks)
    captured_step(kind(pipe), tiny_settings(flags), torch.device("cuda"))
    assert len(calls) == compiled


def test_the_step_is_captured_once_for_the_rows_that_are_to_come(glm, pipe, recorded_graphs):
    """The first evaluation may have fewer than a step."""
    forward = GraphedForward(glm, LENGTH, rows=6, compile=False)
    for texts in (["a ring"], ["a ring", "three squares"], ["a ring", "a cross", "two rings"]):
        same_samples(glm, forward, *encode(pipe, *texts), **SHAPING)
    assert RecordedGraph.made == 1
    settings = tiny_settings("--compile yes --prompts-per-step 3 --group-size 5")
    assert build_run(settings).policy.forward.rows == 15


def test_memory_that_runs_out_in_a_capture_is_named(glm, pipe, monkeypatch, recorded_graphs):
    """The end of a capture that has failed raises an error of its own, behind which the cause is
    hidden."""

    def fail(graph, **options):
        try:
            raise torch.OutOfMemoryError("out of memory")
        finally:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        same_samples(
            glm, GraphedForward(glm, LENGTH, compile=False), *encode(pipe, "a ring"), **SHAPING
        )


@pytest.mark.parametrize("kind", ["compiled", "graph"])
def test_captured_forward_follows_the_adapter(kind, compiled_at_once, recorded_graphs):
    model = with_adapter(text_model())
    forward = (GraphedForward if kind == "graph" else CapturedForward)(
        model, LENGTH, compile=kind == "compiled"
    )
    sizes = ((0.0, 2), (0.3, 2), (0.6, 5)) if kind == "graph" else ((0.0, 2), (0.3, 2))
    for size, group in sizes:
        perturb(model, size)
        same_samples(model, forward, PROMPTS, group=group, temperature=1.5)
    assert RecordedGraph.made == (2 if kind == "graph" else 0)  # one for each number of rows
    assert (model.config._attn_implementation == "grouped") == (kind == "compiled")


def test_a_released_cache_is_free_at_once(compiled_at_once):
    """torch.compile keeps what it traced with in a reference cycle: on a GPU the first cache would
    stay, 1 GB."""
    model = text_model()
    forward = CapturedForward(model, LENGTH)
    gc.collect()
    gc.disable()
    try:
        generate_with_logprobs(model, PROMPTS, LENGTH, num_samples=2, forward=forward)
        keys = weakref.ref(forward.cache.layers[0].keys)
        forward.release()
        assert keys() is None
    finally:
        gc.enable()


# ---- in a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, choice, captured, compiled",
    [
        (CPU, "auto", False, False),
        (CPU, "yes", True, True),
        (CUDA, "auto", True, True),
        (CUDA, "no", True, False),
    ],
)
def test_a_gpu_captures_the_step_and_compiles_it_unless_told_otherwise(
    device, choice, captured, compiled
):
    settings = tiny_settings("--compile", choice)
    model = GlmImage(train.load(settings.model, CPU))
    model.prepare_training(settings, device)
    policy = model.language_model
    forward = train.captured_step(model, settings, device)
    assert isinstance(forward, CapturedForward) == captured
    assert hasattr(getattr(forward, "forward", None), "_torchdynamo_orig_callable") == compiled
    config = policy.get_base_model().config.get_text_config()
    assert (config._attn_implementation == "grouped") == compiled
    assert not captured or forward.num_new_tokens == 256 + 4 * 4  # of the preview and the picture


@pytest.mark.parametrize("size", [1.0, 5e-9])
def test_a_gradient_however_small_moves_the_adapter(size):
    """Adam's step does not depend on the gradient's size, down to the smallest that was seen in
    such training."""
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = adamw(torch.nn.ParameterList([weight]))
    optimizer.param_groups[0]["lr"] = 1e-3
    weight.grad = torch.full((8,), size)
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.full((8,), -1e-3), rtol=1e-3, atol=0)


def test_all_models_leave_while_rewards_score(monkeypatch):
    """And they are back for the next phase; what moves is timed by itself."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    policy, painter = (torch.nn.Linear(2, 2).requires_grad_(False) for _ in range(2))
    run = train.Run(None, None, Clock(CPU), Offload([policy, painter], CPU))
    moved = lambda: [
        m.weight.data_ptr() != run.offload.homes[m][0][1].data_ptr() for m in (policy, painter)
    ]
    for name, models, expected in (
        ("sample", [policy], [1, 0]),
        ("paint", [painter], [0, 1]),
        ("score", [], [0, 0]),
    ):
        run.offload_all_but(*models)
        with run.clock(name):
            assert moved() == expected
    assert set(run.clock.read()) == {
        f"seconds/{name}" for name in ("move", "sample", "paint", "score")
    }


def test_a_compiled_run_is_the_same_run(quick, compiled_at_once):
    for choice in ("no", "yes"):
        assert quick("--steps 1 --compile", choice, "--out", choice) == 0
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        expected, found = (
            records(f"no/{name}")[0],
            records(f"yes/{name}")[0],
        )  # before weights may have grown apart
        assert expected.pop("rows", None) == found.pop("rows", None)
        assert found == pytest.approx(expected, abs=1e-4, nan_ok=True)
