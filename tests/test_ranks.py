"""Several GPUs, here two processes joined by gloo: together they make the step of one with twice
the prompts."""

import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import world
from conftest import (
    QUICK,
    _in_child,
    adapter_of,
    records,
    resume,
    steps_of,
    steps_saved,
    write_reward,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

import grpo
import train
from runtime import ranks
from runtime.settings import build_parser


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def together(start, *arguments, **options):
    """Two ranks of train.main, as of torchrun: when one fails, the other is ended. Returns their
    exit codes and what they printed."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = []
    for i in range(2):
        own = {"output": f"rank-{i}.txt", "RANK": str(i), "LOCAL_RANK": str(i)}
        processes.append(start(*arguments, **own, **meeting, **options))
    wait([each.sentinel for each in processes], 100)
    for process in processes:
        process.join(1 if any(each.exitcode for each in processes) else 100)
        process.kill()
        process.join()
    outputs = [Path(f"rank-{i}.txt").read_text() for i in range(2)]
    return [process.exitcode for process in processes], outputs


SIZE = ["--height", "64", "--width", "64"]  # the smallest source


@pytest.fixture(autouse=True)
def handlers():
    """torch's launcher leaves handlers of signals, by which Ctrl-C in later tests would be its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def flattened(record, name=""):
    """{name: number} of a record in a .jsonl file, which may be nested."""
    if not isinstance(record, (dict, list)):
        return {name: record}
    parts = record.items() if isinstance(record, dict) else enumerate(record)
    return {k: x for key, part in parts for k, x in flattened(part, f"{name}/{key}").items()}


# ---- one step of all -----------------------------------------------------------------------------


def first_moment(folder):
    """What Adam has kept of the first gradient: weights would not do, where a rounding error
    becomes a whole step."""
    state = torch.load(
        Path(folder) / "checkpoints" / "000001" / "adapter-optimizer.pt", weights_only=True
    )["state"]
    return torch.cat([weight["exp_avg"].flatten() for weight in state.values()])


def test_two_ranks_equal_one_process_with_twice_the_prompts(judged, start):
    """Of edits, whose sources are shared out too. Evaluations are of three prompts: the fourth,
    which keeps ranks in step, does not count."""
    settings = "--eval-every 1 --group-size 2 --sources targets --reward ssim:1,mse:0.5"
    settings += " --eval-count 3 --eval-sources targets --temperature 4"
    settings = [*settings.split(), *SIZE]
    with open("prompts.txt", "a") as prompts:
        prompts.write("a green ring\n")
    world.draw((None, ("ring", "green"), None, None)).save("targets/3.png")
    assert judged(*settings, "--prompts-per-step 2 --steps 1 --out one") == 0
    half = str.split("--prompts-per-step 1 --steps 1 --out two")
    codes, outputs = together(start, *QUICK, *settings, *half)
    assert codes == [0, 0], outputs
    for words in (
        "device:",
        "step 1/1",
        "| after 1 step ",
        " s; output folder: two",
    ):
        assert [output.count(words) for output in outputs] == [1, 0]  # one rank speaks

    one, two = first_moment("one"), first_moment("two")
    assert one.abs().max() > 1e-3
    torch.testing.assert_close(two, one, atol=1e-4 * one.abs().max().item(), rtol=0)
    places_of_three = [[f"evaluation/000000/{i}-{j}.png" for j in (1, 2)] for i in (1, 2, 3)]
    saved = ["pictures" in group for group in records("two/groups.jsonl")]
    assert saved == [True, False]  # by the first rank
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        expected, found = records(f"one/{name}"), records(f"two/{name}")
        assert [record["step"] for record in expected] == [record["step"] for record in found]
        assert [record.keys() for record in expected] == [record.keys() for record in found]
        # Of the same policy; the later ones may have grown apart.
        for record in (expected[0], found[0]):
            for name in ("judge", "adapter"):
                record.pop(name, None)
            places = [shown["pictures"] for shown in record.pop("shown", [])]
            assert places in ([], places_of_three)
        flat = [flattened(record[0]) for record in (expected, found)]
        assert flat[1] == pytest.approx(flat[0], abs=1e-5, rel=1e-4)
    assert found[0]["images"] == 6
    for name in (f"evaluation/000000/{x}" for x in ("1-2", "3-1")):
        assert Path(f"one/{name}.png").read_bytes() == Path(f"two/{name}.png").read_bytes()

    assert resume("two", "--steps 3") == 2  # half the ranks would make other steps


def on_machine(number, port, given):
    """What torchrun does on one of two machines, each with a folder of its own."""
    words = f"--nnodes 2 --node-rank {number} --master-addr 127.0.0.1 --master-port {port}"
    words += " --nproc-per-node 1 --start-method forkserver train.py"
    config, *_ = config_from_args(get_args_parser().parse_args(words.split()))
    elastic_launch(config, _in_child)(f"machine-{number}", given, "output.txt", None, {})


def test_two_machines_equal_one_with_two_processes_and_resume(start):
    """The folder of the run is on a disk of both."""
    shutil.copytree(".", "machine-0")
    shutil.copytree("machine-0", "machine-1")
    flags = [*QUICK, "--temperature", "4"]
    codes, outputs = together(start, *flags, *str.split("--steps 2 --out one"))
    assert codes == [0, 0], outputs
    begun, resumed = [*flags, "--steps", "1", "--out"], ["--steps", "2", "--resume"]
    for given in ([*begun, "../two"], [*resumed, "../two"]):
        with ThreadPoolExecutor() as machines:
            list(machines.map(on_machine, range(2), [free_port()] * 2, [given] * 2))
    first, second = (Path(f"machine-{i}/output.txt").read_text() for i in range(2))
    assert "step 2/2" in first and "step" not in second
    assert records("two/metrics.jsonl") == records("one/metrics.jsonl")
    assert adapter_of("two") == adapter_of("one")


def hurry():
    """For `prepare`: a minute of patience is 0.2 seconds, and rank 0 works 2.5 on its update. Each
    rank writes down the adapter that it ends with."""
    init, update = dist.init_process_group, grpo.GRPO.update
    shorter = lambda *given, timeout, **more: init(*given, timeout=timeout / 300, **more)
    dist.init_process_group = lambda *given, **more: (
        print(more["timeout"]) or shorter(*given, **more)
    )

    def work(self, groups):
        rank = int(os.environ["RANK"])
        time.sleep(0 if rank else 2.5)
        metrics = update(self, groups)
        weights = [p.detach().numpy().tobytes() for p in self.parameters]
        Path(f"adapter-{rank}").write_bytes(b"".join(weights))
        return metrics

    grpo.GRPO.update = work


def test_a_rank_that_has_nothing_to_learn_waits_for_the_others_and_steps_with_them(start):
    """Rewards of the second rank are equal: its share of the gradient is 0, and it has no say in
    the means. A picture of it has no reward."""
    reward = write_reward("if os.environ['RANK'] == '1':\n    return [1, torch.nan]")
    settings = str.split("--steps 1 --iterations 2 --temperature 4 --base int8 --out run")
    codes, outputs = together(start, *QUICK, *reward, *settings, prepare=hurry)
    assert codes == [0, 0], outputs
    assert outputs[0].startswith(f"{timedelta(hours=3)}\n")
    (record,) = records("run/metrics.jsonl")
    assert record["groups_without_spread"] == 0.5
    assert record["grad_norm"] > 0 and record["kl"] is not None
    assert record["reward"] == pytest.approx((0 + 1 + 1) / 3) and record["unscored"] == 1 / 4
    adapters = [Path(f"adapter-{rank}").read_bytes() for rank in range(2)]
    assert adapters[0] == adapters[1]


# ---- ends ----------------------------------------------------------------------------------------


def on_rank_1(call, action):
    """A reward that does something on the second rank. Its calls: the trial, an evaluation, then
    one a step."""
    return write_reward(f"if call == {call} and os.environ['RANK'] == '1':\n    {action}")


def test_a_rank_that_fails_says_why_and_torchrun_ends_the_others(processes, quick):
    """As torchrun starts ranks. In the third step, on the rank that does not write."""
    reward = on_rank_1(5, "return [0, torch.inf]")
    config = LaunchConfig(1, 1, 2, run_id="test", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
    config.start_method = "forkserver"
    config.max_restarts = 0
    arguments = [*QUICK, *reward, "--steps", "9", "--out", "run"]
    with pytest.raises(ChildFailedError):
        elastic_launch(config, _in_child)(str(Path.cwd()), arguments, "output.txt", None, {})
    message = "\nerror: reward 'mine.py:reward' has to return 2 finite numbers"
    assert message in Path("output.txt").read_text()
    assert steps_saved("run")[-1] == "000002"
    assert steps_of("run/metrics.jsonl") == [1, 2]


def test_a_folder_that_is_taken_ends_all_ranks(start):
    """Which the first rank alone finds out."""
    Path("run").mkdir()
    Path("run/notes.txt").touch()
    codes, outputs = together(start, *QUICK, "--steps", "9", "--out", "run")
    assert codes[0] == 2 and codes[1]
    assert "error: run is not empty" in outputs[0]


def test_processes_that_would_train_alone_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert train.main(["--steps", "1"]) == 2
    assert "start processes by torchrun" in capsys.readouterr().err


def test_ctrl_c_ends_all_ranks(start):
    """Which a terminal sends to all: here in the second step."""
    at_once = "if call == 4:\n    open(f\"at-{os.environ['RANK']}\", 'w')\n"
    at_once += "    while not (os.path.exists('at-0') and os.path.exists('at-1')):\n        pass\n"
    reward = write_reward(f"{at_once}    os.kill(os.getpid(), signal.SIGINT)")
    flags = str.split("--eval-count 2 --steps 9 --out run")
    codes, outputs = together(start, *QUICK, *reward, *flags)
    assert codes == [130, 130], outputs
    assert "a step: 2 x 2 pictures" in outputs[0] and "a step" not in outputs[1]
    assert "\n1 step, " in outputs[0] and "continue with --resume run" in outputs[0]
    assert adapter_of("run") == adapter_of("run/checkpoints/000001")


# ---- by hand -------------------------------------------------------------------------------------


def as_rank(monkeypatch, rank, count):
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    monkeypatch.setattr(ranks, "count", lambda: count)


def test_shards_of_the_ranks_are_all_there_is(monkeypatch):
    shards = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        shards.append(list(ranks.shard(8)))
    assert shards == [[0, 1], [2, 3, 4], [5, 6, 7]]


def test_prompts_and_seeds_of_the_ranks_are_those_of_one_process(monkeypatch):
    settings = SimpleNamespace(seed=3, order="shuffled")

    def groups(rank, count, prompts_per_step):
        as_rank(monkeypatch, rank, count)
        settings.prompts_per_step = prompts_per_step
        rows = train.prompt_indices(5, settings, 7)
        seed = train.seed_of_step(5, settings.seed, prompts_per_step)
        return [(row, seed + i) for i, row in enumerate(rows)]

    assert groups(0, 3, 2) + groups(1, 3, 2) + groups(2, 3, 2) == groups(0, 1, 6)


def test_means_are_over_the_ranks_that_have_a_number(monkeypatch):
    """Of a peak it is the largest."""
    assert ranks.mean({"a": 1.0}) == {"a": 1.0}  # alone
    nan = torch.nan
    rows = {
        "a": (1.0, 3.0, 2.0),
        "b": (nan, 7.0, 7.0),
        "c": (5.0, nan, 5.0),
        "d": (nan, nan, nan),
        "gpu_gb/update": (9.0, 4.5, 9.0),
        "decoder/max_logprob_gap": (0.25, 0.5, 0.5),
        "reward/softmax_score": (2.0, 1.0, 1.5),  # which is no largest of anything
    }
    own, other, expected = ({name: row[i] for name, row in rows.items()} for i in range(3))
    monkeypatch.setattr(ranks, "gather", lambda own: [own, other])
    assert ranks.mean(own) == pytest.approx(expected, nan_ok=True)


def test_torchrun_takes_no_flag_of_ours_for_its_own():
    """It reads the whole command line, and takes the beginning of a flag for the flag."""
    theirs = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    ours = [flag for action in build_parser()._actions for flag in action.option_strings]
    clashes = [flag for flag in ours if any(other.startswith(flag) for other in theirs)]
    assert len(ours) > 30 and set(clashes) == {"-h", "--help"}
