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
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import train
from benchmarks import lesson, losses
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
    return [math.log(p / option["p"]) for p, option in zip(after, options, strict=True)]


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


@pytest.mark.parametrize("loss", lesson.VARIANTS)
def test_terms_are_those_of_grpo(call, loss):
    """By autograd: four pictures of 272 codes, of which 16 have moved."""
    change, advantages = torch.zeros(4, 272), torch.tensor([[1.2], [0.3], [-0.4], [-1.1]])
    change[:, :16] = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) / 4
    new, grpo = change.clone().requires_grad_(), losses.module(loss)
    clip_range = grpo.GRPOSettings(**lesson.VARIANTS[loss]).clip_range
    value, metrics = grpo.compute_grpo_loss(new, 0 * change, advantages, clip_range=clip_range)
    value.backward()
    given = change.exp(), change.sum(1, keepdim=True).exp(), advantages
    columns = [each.expand(4, 272).flatten().tolist() for each in given]
    terms = [call("term", loss, *each) for each in zip(*columns)]
    full, clipped, left = torch.tensor([[x["full"], x["clipped"], x["left"]] for x in terms]).T
    torch.testing.assert_close(left, -new.grad.flatten() * 1088, atol=1e-5, rtol=1e-4)
    if loss != "CISPO":
        smaller = torch.minimum(full, clipped * torch.tensor(columns[2]))
        assert -smaller.mean().item() == pytest.approx(metrics["policy_loss"], abs=1e-5)
        assert (left == 0).float().mean().item() == pytest.approx(metrics["clip_fraction"])


# ---- what the page says of the tiny model --------------------------------------------------------


def choices_of(picture, group=DATA["groups"][0]):
    """{place: (options, which of them was taken)} of the choices that led to a picture."""
    found = {}
    for choice in group["choices"]:
        for own, option in enumerate(choice["options"]):
            if picture in option["by"]:
                found[choice["place"]] = choice["options"], own
    return found


def by_the_page(call, advantages, size):
    """{(picture, place): the change of the log-prob of what was written}."""
    return {
        (picture, place): changes(call, options, advantages, size)[own]
        for picture in range(4)
        for place, (options, own) in choices_of(picture).items()
    }


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
    functions = {name: x.load() for name, x in parse_rewards(settings.reward).items()}
    rollout = rolled_out(run, settings, functions, prompts_of(text), seed)
    (rewards,) = rollout.raw_rewards.values()
    set_advantages(rollout.groups, rewards)
    return run, rollout.groups[0], rewards


def updated(policy, group, rewards, optimizer):
    """How a real update changes the log-probs (G, T). The policy stays as it was."""
    before = parameters_to_vector(policy.parameters)
    set_advantages([group], rewards)
    policy.optimizer, policy.settings.max_grad_norm = optimizer, 1e9
    policy.update([group])
    with torch.no_grad():
        change = policy.logprobs(group, torch.arange(4)) - group.old_logprobs
    vector_to_parameters(before, policy.parameters)
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


def test_six_updates_by_hand(call, rollout):
    """SGD along what the page leaves of the gradient: the codes move as recorded."""
    run, group, _ = rollout
    parameters, codes = run.policy.parameters, DATA["updates"]["codes"]
    now = start = parameters_to_vector(parameters)
    for recorded in DATA["updates"]["ratios"]["GRPO"]["SGD"]:
        logprobs = run.policy.logprobs(group, torch.arange(4))
        ratios = (logprobs - group.old_logprobs).detach().exp()
        assert [ratios[x["i"], x["place"]] for x in codes] == pytest.approx(recorded, rel=2e-3)
        pairs = zip(ratios.tolist(), group.advantages.tolist())
        left = [[call("term", "GRPO", ratio, 1, a)["left"] for ratio in row] for row, a in pairs]
        (gradient,) = lesson.gradients(run.policy, [(torch.tensor(left) * logprobs).mean()])
        now = now.detach() + lesson.OPTIMISERS["SGD"]["lr"] * gradient
        vector_to_parameters(now, parameters)
    vector_to_parameters(start, parameters)


def test_the_data_are_made_as_the_page_has_them(rollout):
    run, group, rewards = rollout
    policy = run.policy
    assert rewards.tolist() == DATA["groups"][0]["rewards"]
    loss, updates = "DAPO's two clip ranges", DATA["updates"]
    found = lesson.updated(policy, group, loss, "AdamW")[-1]
    for code, ratio in zip(updates["codes"], updates["ratios"][loss]["AdamW"][-1], strict=True):
        where = code["i"], code["place"]
        assert found[where].item() == pytest.approx(ratio, rel=1e-2)
        assert group.old_logprobs[where].exp().item() == pytest.approx(code["p"], abs=1e-3)
    logprobs = policy.logprobs(group, torch.arange(4))
    of_pictures = lesson.gradients(policy, logprobs.sum(1)) / group.tokens.numel()
    options = lesson.options_of(policy, group, 3, 27, of_pictures)
    for ours, shown in zip(options, choices_of(3)[27][0], strict=True):
        assert ours["by"] == shown["by"] and ours["p"] == pytest.approx(shown["p"], abs=1e-3)
        assert ours["push"] == pytest.approx(shown["push"], abs=1e-2)


def test_what_the_page_says_of_the_clip_and_of_the_best_of_k():
    best, frames, updates = DATA["best"], DATA["film"]["frames"], DATA["updates"]
    own = [c for c, code in enumerate(updates["codes"]) if code["i"] == 3]

    def times(loss, optimiser):  # of picture 4, after each update
        return [math.prod(row[c] for c in own) for row in updates["ratios"][loss][optimiser]]

    (shown,) = re.findall(r"showCode\((\d+), (\d+)\)\"", PAGE)
    i, place = map(int, shown)
    (c,) = [c for c, x in enumerate(updates["codes"]) if (x["i"], x["place"]) == (i, place)]
    assert DATA["groups"][0]["rewards"][i] > 0.6 and updates["ratios"]["GRPO"]["AdamW"][-1][c] < 0.8
    calm, sgd = times("GRPO", "AdamW without momentum"), times("GRPO", "SGD")
    shown = times("GRPO", "AdamW"), times("no clip", "AdamW"), calm, sgd
    said = re.search("After six updates(.*?)</p>", PAGE, re.DOTALL)[1]
    assert re.findall(r"\d\.\d\d", said) == [f"{each[-1]:.2f}" for each in shown]
    assert sgd[1] == pytest.approx(shown[0][1], abs=0.005)
    assert [calm[-1], sgd[-1]] == pytest.approx([calm[-3], sgd[-3]], rel=0.01)  # they stop
    assert best["before"][0] == pytest.approx(frames[0]["share"], abs=0.03)
    assert best["after"] == pytest.approx(frames[-1]["share"], abs=0.03)


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_is_one_small_file():
    lines = PAGE.splitlines()
    assert len(lines) <= 360 and len(PAGE.encode()) <= 160_000
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
  const [slider] = document.querySelectorAll("#cards input"), input = new Event("input", { bubbles: true })
  const shown = () => document.querySelector("#cards").textContent
  if (!/1, reward: 0.67/.test(shown())) told.push("no reward beside its slider")
  document.getElementById("baseline").click()
  const gains = shown() + document.getElementById("remark").textContent
  document.getElementById("baseline").click()
  for (let i = 100; i >= 0; i--) {
    slider.value = i / 100
    slider.dispatchEvent(input)
    if (/[▲▼] 1.00/.test(shown())) told.push("an arrow at 1.00")
  }
  const after = advantages()
  document.querySelector("[onclick^=showCode]").click()
  const chosen = document.getElementById("code").selectedOptions[0].textContent
  const pushedBack = [chosen, document.getElementById("count").textContent]
  const dashed = document.querySelectorAll('#ratios [stroke-dasharray="9 9"]').length
  if (!/A pushes r back/.test(document.getElementById("term").textContent)) told.push("not back")
  for (let i = 0; i < 60; i++) { // whatever can be pressed, and the ends of the other sliders
    const controls = document.querySelectorAll("button, [type=checkbox]")
    controls[i % controls.length].click()
    see()
  }
  for (const each of document.querySelectorAll("#step, #k, #made, option")) {
    each.type ? each.value = 20 : each.selected = true
    each.dispatchEvent(input)
    see()
  }
  const crosses = document.querySelector("#ratios").innerHTML.split("l12,12").length - 1
  window.report = { told, gains, crosses, pushedBack, dashed, before, after, heights, named, edges, width: innerWidth }
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
    widths = 320, 400, 1000
    frames = [frame.format(page, width) for width in widths]
    file = tmp_path / "frames.html"
    file.write_text(f"<meta charset=utf-8>{FRAMES}{''.join(frames)}")
    flags = f"--headless --no-sandbox --disable-gpu --dump-dom --user-data-dir={tmp_path}"
    command = [BROWSER, *flags.split(), file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    reports = json.loads(html.unescape(re.search("<body>(.*)</body>", done.stdout)[1]))
    rewards = [0, *DATA["groups"][0]["rewards"][1:]]
    expected = compute_advantages(torch.tensor(rewards), 4).tolist()
    for report, width in zip(reports, widths, strict=True):
        assert report["told"] == [] and report["width"] == width
        assert max(report["edges"]) <= width
        # docs/worth.md has these numbers too.
        assert re.findall(r"(\S+) times", report["gains"])[::3] == ["2.98", "1.62"]
        assert "picture 1 gains most, not the one with the best reward" in report["gains"]
        assert report["pushedBack"] == ["picture 1, place 20", "6"] and report["dashed"] == 2
        assert report["crosses"] == 48  # GSPO cuts all 8 codes from the second update on
        assert report["before"] == ["0.34", "−1.01", "−0.56", "1.24"]
        after = [float(x.replace("−", "-")) for x in report["after"]]
        assert after == pytest.approx(expected, abs=0.006)
        assert min(report["heights"]) >= 24 and all(report["named"])
