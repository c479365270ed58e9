"""docs/lesson.html: its numbers are those of grpo.py, and it works in a browser."""

import html
import json
import math
import re
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT, build_run, prompts_of, rolled_out, tiny_settings

import train
from benchmarks import lesson
from grpo import compute_advantages, set_advantages
from rewards import parse_rewards

PAGE = (ROOT / "docs" / "lesson.html").read_text()
DATA = json.loads(re.search(r"^const DATA = (.*)$", PAGE, re.MULTILINE)[1])
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def call():
    """Calls a function of the page."""
    context = pytest.importorskip("quickjs").Context()
    functions = "// ---- the numbers of grpo.py.*?(?=// ---- the page)"
    context.eval(re.search(functions, PAGE, re.DOTALL)[0])

    def call(name, *arguments):
        given = ", ".join(map(json.dumps, arguments))
        return json.loads(context.eval(f"JSON.stringify({name}({given}))"))

    return call


def changes(call, options, advantages, size):
    """Of the options' log-probs, by the page."""
    after = call("afterStep", options, advantages, size)
    times = [p / option["p"] for p, option in zip(after, options, strict=True)]
    return torch.tensor(times, dtype=torch.float64).log()


def test_advantages_are_those_of_grpo(call):
    generator = torch.Generator().manual_seed(0)
    for size in (2, 4, 5, 16):
        rewards = torch.rand(size, generator=generator)
        ours = torch.tensor(call("advantages", rewards.tolist()))
        assert (ours - compute_advantages(rewards, size)).abs().max() < 1e-6
    for reward in (0, 0.1, 1 / 3, 9.9):
        assert call("advantages", [reward] * 8) == [0] * 8


def test_a_step_by_hand(call):
    """The advantages are log 3 and 0: the first option grows from 1 to 3 times the other."""
    options = [{"p": 0.5, "push": [2, 1]}, {"p": 0.5, "push": [0, 1]}]
    assert call("afterStep", options, [math.log(3), 0], 0.5) == pytest.approx([0.75, 0.25])


# ---- what the page says of the tiny model --------------------------------------------------------


def choices_of(picture, group=DATA["groups"][0]):
    """{place: (options, which of them was taken)} of the choices that led to a picture."""
    found = {}
    for choice in group["choices"]:
        for own, option in enumerate(choice["options"]):
            if picture in option["by"]:
                found[choice["place"]] = choice["options"], own
    return found


def by_the_page(call, advantages, size, pictures=range(4)):
    """{(picture, place): the change of the log-prob of what was written}."""
    return {
        (picture, place): changes(call, options, advantages, size)[own].item()
        for picture in pictures
        for place, (options, own) in choices_of(picture).items()
    }


def likelier(call, picture, *how):
    """How many times as likely a picture becomes."""
    advantages = call("advantages", DATA["groups"][0]["rewards"], *how)
    return math.exp(sum(by_the_page(call, advantages, DATA["size"], [picture]).values()))


def test_without_the_baseline_a_worse_picture_gains_most(call):
    assert DATA["groups"][0]["rewards"] == pytest.approx([2 / 3, 1 / 6, 1 / 3, 1])
    assert likelier(call, 0) < likelier(call, 3)
    assert likelier(call, 0, False) > likelier(call, 3, False) > 1
    assert likelier(call, 0, False, False) > likelier(call, 3, False, False) > 1


def test_the_codes_that_the_page_shows(call):
    advantages = call("advantages", DATA["groups"][0]["rewards"])
    assert re.findall(r'onclick="show\((.*?)\)', PAGE) == ["0, 19", "3, 27", "3, 120"]
    options, own = choices_of(0)[19]
    assert advantages[0] > 0.1 > -0.1 > changes(call, options, advantages, DATA["size"])[own]
    assert options[own]["by"] == [0, 1] and advantages[1] < advantages[0]
    options, _ = choices_of(3)[27]
    (unwritten,) = [k for k, option in enumerate(options) if not option["by"]]
    assert changes(call, options, advantages, DATA["size"])[unwritten] > 0.1
    assert 120 not in choices_of(3)
    for group in DATA["groups"]:
        for picture in range(4):
            places = choices_of(picture, group)
            assert 2 <= len(places) <= 5 and max(places) < 256  # squares of the map


@pytest.fixture(scope="module")
def rollout():
    """The page's first group, sampled again."""
    settings = tiny_settings("--kl-coef 0")
    run = build_run(settings)
    text, seed = lesson.GROUPS[0]
    batch = rolled_out(run, settings, parse_rewards(settings.reward), prompts_of(text), seed)
    (rewards,) = batch.raw_rewards.values()
    return run, batch.groups[0], rewards


def updated(policy, group, rewards, optimizer):
    """How a real update changes the log-probs (G, T). The policy stays as it was."""
    before = [each.detach().clone() for each in policy.parameters]
    set_advantages([group], rewards)
    policy.optimizer, policy.settings.max_grad_norm = optimizer, 1e9
    policy.update([group])
    with torch.no_grad():
        change = policy.logprobs(group, torch.arange(4)) - group.old_logprobs
        for each, value in zip(policy.parameters, before):
            each.copy_(value)
    return change


def test_real_updates_do_what_the_page_shows(call, rollout):
    """SGD the same, here with other rewards; AdamW moves the same codes in the same direction."""
    run, group, rewards = rollout
    policy = run.policy
    sgd, others = torch.optim.SGD(policy.parameters, lr=0.01), torch.tensor([0.2, 0.9, 0.4, 0.1])
    real = updated(policy, group, others, sgd)
    for (picture, place), change in by_the_page(call, group.advantages.tolist(), 0.01).items():
        assert real[picture, place].item() == pytest.approx(change, abs=0.003)
        real[picture, place] = 0
    assert real.abs().max() < 0.01  # nothing else moves
    real = updated(policy, group, rewards, train.adamw(policy.model))
    for (picture, place), change in by_the_page(
        call, group.advantages.tolist(), DATA["size"]
    ).items():
        assert real[picture, place] * change > 0


def test_the_data_are_made_as_the_page_has_them(rollout):
    run, group, rewards = rollout
    policy = run.policy
    assert rewards.tolist() == DATA["groups"][0]["rewards"]
    logprobs = policy.logprobs(group, torch.arange(4))
    of_pictures = lesson.gradients(policy, logprobs.sum(1)) / group.tokens.numel()
    options = lesson.options_of(policy, group, 3, 27, of_pictures)
    for ours, shown in zip(options, choices_of(3)[27][0], strict=True):
        assert ours["by"] == shown["by"] and ours["p"] == pytest.approx(shown["p"], abs=1e-3)
        assert ours["push"] == pytest.approx(shown["push"], abs=1e-2)


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_is_one_small_file():
    lines = PAGE.splitlines()
    assert len(lines) <= 260 and len(PAGE.encode()) <= 150_000
    wide = [line for line in lines if len(line) > 100]
    assert len(wide) == 1 and wide[0].startswith("const DATA = ")
    assert re.findall(r"https?:|<script src|<link|@import|url\(", PAGE) == []


PROBE = """<script>
const told = []
addEventListener("error", event => told.push(event.message))
for (const name of ["log", "warn", "error"]) console[name] = words => told.push(words)
addEventListener("load", () => {
  const advantages = () => [...document.querySelectorAll("#cards b")].map(b => b.textContent)
  const controls = [...document.querySelectorAll("input, button, select")]
  const heights = controls.map(each => each.getBoundingClientRect().height)
  const named = controls.map(each => each.labels?.length || each.textContent.length)
  const before = advantages(), edges = []
  const see = () => edges.push(document.documentElement.scrollWidth)
  const slider = document.querySelector("#cards input")
  slider.value = 0
  slider.dispatchEvent(new Event("input", { bubbles: true }))
  const after = advantages()
  for (let i = 0; i < 30; i++) { // whatever can be pressed, and the ends of the other sliders
    const controls = document.querySelectorAll("button, [type=checkbox]")
    controls[i % controls.length].click()
    see()
  }
  for (const id of ["step", "k"]) {
    document.getElementById(id).value = 20
    document.getElementById(id).dispatchEvent(new Event("input"))
    see()
  }
  window.report = { told, before, after, heights, named, edges, width: innerWidth }
})
</script>"""

FRAMES = """<script>onload = () => {
  const frames = [...document.querySelectorAll("iframe")]
  document.body.textContent = JSON.stringify(frames.map(each => each.contentWindow.report))
}</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_in_a_browser(tmp_path):
    page = html.escape(PAGE.replace("<style>", PROBE + "<style>"))
    frame = '<iframe srcdoc="{}" style="border: 0; height: 900px; width: {}px"></iframe>'
    frames = [frame.format(page, width) for width in (400, 1000)]
    file = tmp_path / "frames.html"
    file.write_text(f"<meta charset=utf-8>{FRAMES}{''.join(frames)}")
    flags = f"--headless --no-sandbox --disable-gpu --dump-dom --user-data-dir={tmp_path}"
    command = [BROWSER, *flags.split(), file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    reports = json.loads(html.unescape(re.search("<body>(.*)</body>", done.stdout)[1]))
    rewards = [0, *DATA["groups"][0]["rewards"][1:]]
    expected = compute_advantages(torch.tensor(rewards), 4).tolist()
    for report, width in zip(reports, (400, 1000), strict=True):
        assert report["told"] == [] and report["width"] == width
        assert max(report["edges"]) <= width
        assert report["before"] == ["0.34", "−1.01", "−0.56", "1.24"]
        after = [float(x.replace("−", "-")) for x in report["after"]]
        assert after == pytest.approx(expected, abs=0.006)
        assert min(report["heights"]) >= 24 and all(report["named"])
