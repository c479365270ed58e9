"""What judges a run: held-out prompts, rewards that only judge, the curve, the card; and the released model's defaults."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import (
    ROOT,
    records,
    shorten,
    tiny_settings,
    write_reward,
)
from PIL import Image
from test_rewards import tiny_clip
from tqdm import tqdm

import train
from runtime.log import best_step, summary
from runtime.pictures import save_curves
from runtime.settings import RELEASE, TINY


def judge_file(name, value):
    Path(f"{name}.py").write_text(f"def judge(images, prompts, targets):\n    return [{value}] * len(images)\n")
    return f"{name}.py:judge"


def test_what_only_judges_is_logged_and_not_trained_on(quick):
    Path("other.txt").write_text("a green ring\na black square\n")
    arguments = ["--steps", "2", "--eval-prompts", "other.txt", "--eval-targets", "targets"]
    assert quick(*arguments, "--out", "without") == 0
    assert quick(*arguments, "--eval-reward", judge_file("seven", 7.0), "--out", "with") == 0
    before, after = records("with/evaluation.jsonl")
    for record in (before, after):
        assert record["reward/seven.py:judge"] == record["held_out/reward/seven.py:judge"] == 7
        assert record["held_out/reward"] == pytest.approx(
            record["held_out/reward/ssim"] + record["held_out/reward/mse"]
        )
        assert (
            (record["images"], record["prompts"]) == (record["held_out/images"], record["held_out/prompts"]) == (2, 1)
        )
    assert not any("seven" in name for line in records("with/metrics.jsonl") for name in line)
    adapters = [Path(run, "adapter", "adapter_model.safetensors").read_bytes() for run in ("with", "without")]
    assert adapters[0] == adapters[1]


def test_pictures_are_judged_as_they_will_be_deployed(quick, monkeypatch):
    seen, stock_paint = [], train.paint

    def paint(pipe, prompt, tokens, settings, seed, source):
        seen.append((seed >= train.SEEDS["training"], settings.decode_steps, settings.guidance_scale))
        return stock_paint(pipe, prompt, tokens, settings, seed, source)

    monkeypatch.setattr(train, "paint", paint)
    arguments = ["--steps", "1", "--eval-decode-steps", "3", "--eval-guidance-scale", "1.5"]
    assert quick(*arguments, "--out", "run") == 0
    assert set(seen) == {(True, 3, 1.5), (False, 1, 1.0)}
    assert json.loads(Path("run/settings.json").read_text())["decode_steps"] == 1


def test_held_out_prompts_without_targets_are_judged_by_what_applies(quick):
    Path("new.txt").write_text("a green ring\n")
    assert quick("--steps", "0", "--eval-prompts", "new.txt", "--eval-targets", "none", "--out", "none") == 0
    assert records("none/evaluation.jsonl")[0]["held_out/reward"] is None
    arguments = ["--model", TINY, "--prompts", "prompts.txt", "--targets", "targets", "--reward", "ssim"]
    arguments += ["--eval-prompts", "new.txt", "--eval-reward", judge_file("two", 2.0)]
    assert train.parse_settings(arguments).eval_targets is None
    assert train.main([*arguments, "--height", "32", "--width", "32", "--steps", "0", "--out", "run",
                       "--decode-steps", "1", "--eval-count", "1", "--group-size", "2"]) == 0  # fmt: skip
    (record,) = records("run/evaluation.jsonl")
    assert record["held_out/reward"] is None and record["held_out/reward/two.py:judge"] == 2
    assert record["reward"] is not None


def test_every_prompt_is_judged_by_its_own_target(quick):
    """In steps and in evaluations: one of the two prompts is drawn in red."""
    code = "def own(images, prompts, targets):\n"
    code += "    return [float(('red' in p) == (t.getpixel((8, 8))[0] > 200)) for p, t in zip(prompts, targets)]\n"
    Path("mine.py").write_text(code)
    arguments = ["--reward", "mine.py:own", "--eval-reward", "mine.py:own", "--eval-count", "2"]
    assert quick(*arguments, "--prompts-per-step", "2", "--steps", "1", "--out", "run") == 0
    for record in records("run/evaluation.jsonl"):
        assert record["reward"] == record["held_out/reward"] == 1 and record["prompts"] == 2
    assert records("run/metrics.jsonl")[0]["reward"] == 1
    Path("whole.py").write_text(f"{code}\n\nclass C:\n    __call__ = lambda self, *given: own(*given)\n\n\nc = C()\n")
    arguments = ["--reward", "whole.py:c", "--eval-reward", "whole.py:c:2"]
    assert quick(*arguments, "--steps", "0", "--out", "same") == 0, "what is trained for may be named again"


@pytest.mark.parametrize("prompts_per_step", [2, 4])
def test_the_pictures_shown_have_their_own_rewards(quick, prompts_per_step):
    """Three of the four of each of the first three prompts: here a picture's reward is its place."""
    lines = [f"a {colour} circle" for colour in ("red", "blue", "green", "pink")]
    Path("new.txt").write_text("\n".join(lines))
    Path("mine.py").write_text(
        f"lines = {lines}\n\ndef place(images, prompts, targets):\n"
        "    return [10 * lines.index(p) + i % 4 if p in lines else 0 for i, p in enumerate(prompts)]\n"
    )
    arguments = ["--eval-prompts", "new.txt", "--eval-targets", "none", "--group-size", "4", "--eval-count", "4"]
    arguments += ["--reward", "mine.py:place", "--prompts-per-step", f"{prompts_per_step}", "--steps", "0"]
    assert quick(*arguments, "--out", "run") == 0
    shown = records("run/evaluation.jsonl")[0]["shown"]
    assert shown[2:] == [[line, [10 * i, 10 * i + 1, 10 * i + 2], {}] for i, line in enumerate(lines[:3])]
    assert len(list(Path("run/evaluation/000000").iterdir())) == 5 * 3


def test_the_best_step_is_that_of_prompts_held_out_unless_no_reward_applies_to_them():
    def best(*pairs):
        return best_step([{"step": i, "reward": known, "held_out/reward": new} for i, (known, new) in enumerate(pairs)])

    assert best((0.1, 0.5), (0.9, 0.4), (0.2, 0.6)) == (2, "")
    words = "prompts the reward was higher after 1 step, 0.900, than at the end, 0.200"
    assert best((0.1, None), (0.9, None), (0.2, None)) == (1, f"on training {words}")
    assert best((0.1, 0.2), (0.1, 0.9), (0.9, 0.2)) == (1, f"on held-out {words}")
    assert best((0.1, 0.20004), (0.1, 0.20001)) == (0, ""), "as people read it"
    assert best((None, None)) == best() == (0, "")


def test_a_reward_that_throws_dice_throws_the_same_in_every_evaluation(quick):
    assert quick(*write_reward("return torch.rand(len(images))"), "--steps", "2", "--out", "run") == 0
    before, after = records("run/evaluation.jsonl")
    assert before["reward"] == after["reward"]


def test_what_an_evaluation_takes_is_no_part_of_the_next_step(quick, monkeypatch):
    waited = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("runtime.log.tqdm.unpause", lambda bar: waited.append(bar.n))
    reward = write_reward("import time\nif call in (2, 3, 5, 6):\n    time.sleep(0.5)")
    assert quick(*reward, "--steps", "2", "--eval-every", "1", "--out", "run") == 0
    for line in Path("run/metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["seconds/score"] < 0.4
    assert waited == [0, 1, 2], "nor in the progress bar"


@pytest.mark.parametrize("prompts_per_step", ["1", "2"])
def test_an_evaluation_has_a_bar_of_its_own_over_its_prompts(quick, monkeypatch, prompts_per_step):
    """Two of training and one held out, before and after; a step's pictures do not count."""
    bars = []

    class Bar(tqdm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.seen = []
            if not options["disable"]:
                bars.append((options["unit"], options["total"], self.seen))

        def update(self, n=1):
            self.seen.append(n)

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("runtime.log.tqdm", Bar)
    Path("new.txt").write_text("a green ring\n")
    arguments = ["--eval-prompts", "new.txt", "--eval-targets", "none", "--eval-count", "2"]
    assert quick(*arguments, "--prompts-per-step", prompts_per_step, "--steps", "2", "--out", "run") == 0
    assert bars == [("prompt", 3, [1, 1, 1]), ("step", 2, [1, 1]), ("prompt", 3, [1, 1, 1])]
    assert quick(*arguments, "--steps", "0", "--out", "judged") == 0
    assert bars[3:] == [("prompt", 3, [1, 1, 1])], "no bar of 0 steps"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--eval-prompts", "missing.txt"], "cannot read the prompts file missing.txt"),
        (["--eval-targets", "missing"], "missing does not exist"),
        (["--eval-targets", "one"], "one has 1 pictures for 2 prompts"),
        (["--reward", "mine.py:judge", "--prompts", "new.txt", "--eval-reward", "ssim"], "--eval-targets, a folder"),
        (["--eval-reward", "beauty"], "unknown reward 'beauty'"),
        (["--eval-count", "0"], "--eval-count: must be in [1, inf), got 0"),
    ],
)
def test_bad_ways_to_judge_are_one_line(quick, capsys, arguments, words):
    judge_file("mine", 1.0)
    Path("new.txt").write_text("a green ring\n")
    Path("one").mkdir()
    shutil.copy("targets/1.png", "one/1.png")
    if "--prompts" in arguments:
        code = train.main(["--model", TINY, *arguments, "--eval-prompts", "new.txt", "--steps", "1"])
    else:
        code = quick("--steps", "1", *arguments)
    assert code == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not Path("runs").exists()


def test_the_last_lines_tell_before_and_after_of_both(quick, capfd):
    assert quick("--steps", "1", "--eval-reward", judge_file("seven", 7.0), "--out", "run") == 0
    output = "".join(capfd.readouterr())
    before, after = records("run/evaluation.jsonl")
    for name, prefix in (("training", ""), ("held-out", "held_out/")):
        words = (
            f"{name} prompts, before -> after: reward {before[prefix + 'reward']:.3f} -> {after[prefix + 'reward']:.3f}"
        )
        assert words in output
    assert "seven.py:judge 7.000 -> 7.000 (2 images: 1 prompt x 2)" in output


def test_training_prompts_without_targets_are_judged_by_what_applies(quick):
    Path("new.txt").write_text("a green ring\n")
    arguments = ["--prompts", "new.txt", "--reward", judge_file("two", 2.0), "--eval-reward", "ssim"]
    arguments += ["--eval-prompts", "prompts.txt", "--eval-targets", "targets"]
    arguments += ["--model", TINY, "--height", "32", "--width", "32", "--decode-steps", "1", "--group-size", "2"]
    assert train.main([*arguments, "--eval-count", "1", "--steps", "1", "--prompts-per-step", "1", "--out", "run"]) == 0
    before, _ = records("run/evaluation.jsonl")
    assert before["reward/ssim"] is None and before["held_out/reward/ssim"] is not None


def test_the_summary_of_an_evaluation():
    record = {"reward": 1.0, "reward_std": 0.5, "reward/ssim": 0.25, "images": 8, "prompts": 2}
    held_out = {"reward": 2.0, "reward_std": 0.5, "reward/ssim": None, "images": 6, "prompts": 3}
    record |= {f"held_out/{name}": value for name, value in held_out.items()}
    assert summary("", record) == "reward 1.000, ssim 0.250 (8 images: 2 prompts x 4)"
    after = record | {"held_out/reward": 3.0}
    words = "reward 2.000 -> 3.000, ssim none -> none (6 images: 3 prompts x 2)"
    assert summary("held_out/", record, after) == words


def test_the_cards_of_both_halves_say_how_they_load(quick):
    arguments = ["--train", "both", "--paintings", "3", "--decode-steps", "2", "--lr", "0.002", "--decoder-lr", "0.003"]
    assert quick(*arguments, "--steps", "1", "--out", "run") == 0
    for folder, words in (("adapter", "load_adapter("), ("decoder-adapter", "load_lora_adapter(")):
        card = Path("run", folder, "README.md").read_text()
        assert words in card and '"paintings": 3' in card


def test_the_card_says_what_the_adapter_is(quick):
    assert quick("--steps", "1", "--out", "run") == 0
    card = Path("run/adapter/README.md").read_text()
    before, after = records("run/evaluation.jsonl")
    for words in (
        "base_model: tiny-glm-image", "trained for 1 step.", "load_adapter(", '"reward": "ssim:1,mse:1"',
        f"| ssim, held-out prompts | {before['held_out/reward/ssim']:.3f} | {after['held_out/reward/ssim']:.3f} | 2 |",
    ):  # fmt: skip
        assert words in card
    assert "More Information Needed" not in card and str(ROOT) not in card
    assert Image.open("run/adapter/before-after.png").width > 100


def test_the_curve_shows_every_reward(tmp_path):
    """Grey for the steps, blue for training prompts, red for held-out ones; a panel more for what only judges."""
    metrics = [{"step": s, "reward": s / 10, "reward/a": None} for s in range(1, 11)]
    evaluations = [{"step": s, "reward": 0.2 + s, "held_out/reward": 0.1, "reward/judge": 1.0} for s in (0, 10)]
    save_curves(tmp_path / "one.png", metrics, [])
    save_curves(tmp_path / "three.png", metrics, evaluations)
    one, three = (np.asarray(Image.open(tmp_path / f"{name}.png")).astype(int) for name in ("one", "three"))
    assert three.shape[1] > one.shape[1]

    def has(picture, colour):
        return (np.abs(picture[40:] - np.array(colour)).sum(-1) < 30).any()

    watched = [line | {"kl": 0.01 * line["step"], "entropy": 5.0, "decoder/kl": None} for line in metrics]
    save_curves(tmp_path / "five.png", watched, evaluations)
    five = np.asarray(Image.open(tmp_path / "five.png"))
    assert five.shape[0] == three.shape[0] + 200, "a second row of panels, for entropy and KL"
    assert (five[-200:, :640] < 200).any() and (five[-180:-60, 740:] == 255).all(), "two"
    assert has(three, (0x20, 0x60, 0xC0)) and has(three, (0xD0, 0x20, 0x30)) and not has(one, (0x20, 0x60, 0xC0))


def test_the_released_models_defaults_run_at_tiny_size(tmp_path, monkeypatch, capsys):
    """Everything but the size, the rewards' weights and the number of steps is what zai-org/GLM-Image gets."""
    monkeypatch.chdir(tmp_path)
    shorten(monkeypatch.setattr)
    model = tmp_path / "released"
    shutil.copytree(TINY, model)
    clip = tiny_clip(tmp_path / "clip")
    arguments = ["--model", str(model), "--height", "32", "--width", "32", "--eval-count", "1", "--group-size", "2"]
    arguments += ["--reward", f"pickscore={clip}:1,clip={clip}:1", "--eval-reward", f"hps={clip}"]
    assert train.main([*arguments, "--steps", "0", "--out", "base"]) == 0
    assert train.main([*arguments, "--steps", "2", "--prompts-per-step", "1", "--out", "run"]) == 0
    settings = json.loads(Path("run/settings.json").read_text())
    assert (settings["decode_steps"], settings["guidance_scale"], settings["top_p"]) == (12, 1.5, 0.75)
    assert Path(settings["prompts"]) == ROOT / "prompts" / "train.txt" and settings["targets"] is None
    assert len(records("run/metrics.jsonl")) == 2
    before, _ = records("run/evaluation.jsonl")
    assert before == records("base/evaluation.jsonl")[0]
    assert {f"held_out/reward/{name}={clip}" for name in ("pickscore", "clip", "hps")} <= before.keys()
    output = capsys.readouterr().out
    assert "24 decoder passes each" in output and ", clip -" in output, "for people without the folder"


def test_sizes_the_released_model_was_never_trained_on_are_warned_of(capsys):
    for size, warned in (("512", True), ("1024", False), ("2048", False), ("2080", True)):
        train.parse_settings(["--model", RELEASE, "--height", size, "--width", size])
        assert ("warning" in capsys.readouterr().out) == warned
    tiny_settings("--height", "128")
    assert "warning" not in capsys.readouterr().out


def test_where_a_reward_misses_a_picture_it_counts_as_the_mean_of_its_group(quick):
    """In the numbers of steps and evaluations as in training: every second picture has none of the 1 that others have."""
    Path("mine.py").write_text(
        "def half(images, prompts, targets):\n    return [float('nan') if i % 2 else 1.0 for i in range(len(images))]\n"
    )
    assert quick("--reward", "mine.py:half,ssim", "--steps", "1", "--out", "run") == 0
    for record in (*records("run/metrics.jsonl"), *records("run/evaluation.jsonl")):
        assert record["reward"] == pytest.approx(1 + record["reward/ssim"])
