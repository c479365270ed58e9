"""Curves as SVG: a panel for each number of a run, over its steps, with errors."""

import math
from html import escape
from pathlib import Path
from statistics import stdev

from runtime.words import shown_names, with_error
from viewer.run import mean_of

WIDTH, HEIGHT = 320, 190  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 26, 24  # what surrounds its curves
CURVES = {"step": "steps", "training": "training prompts", "held out": "held-out prompts"}
NUMBERS = {  # of metrics.jsonl
    "kl": "KL to the reference, nats per code",
    "entropy": "entropy, nats per code",
    "groups_without_spread": "share of groups without spread",
    "unscored": "share of pictures without a reward",
    "grad_norm": "norm of the gradient",
    "clip_fraction": "share of codes that are clipped",
}
STYLE = Path(__file__).with_name("style.css").read_text()


def reward_panels(run):
    """A panel for each reward: of the steps, and of both sets of an evaluation."""
    panels = []
    for name in shown_names(run.last["held out"]):
        curves = {"step": step_points(run, name)}
        curves |= {each: evaluation_points(run, each, name) for each in ("training", "held out")}
        panels.append(panel(name.removeprefix("reward/"), curves))
    return panels


def type_panels(run, name):
    """A panel for each type of prompts, of the reward of this name."""
    panels = []
    for label in run.types:
        sets = {each: f"{each}, {label}" for each in ("training", "held out")}
        curves = {each: evaluation_points(run, key, name) for each, key in sets.items()}
        panels.append(panel(label, curves))
    return panels


def number_panels(run):
    """A panel for each of NUMBERS that a run has, if it is not 0 throughout."""
    panels = []
    for name, title in NUMBERS.items():
        for key in dict.fromkeys(key for each in run.metrics for key in each):
            points = [(each["step"], each.get(key), None) for each in run.metrics]
            if key.split("/")[-1] == name and any(value for _, value, _ in points):
                whose = key.removesuffix(name).replace("/", ": ")
                panels.append(panel(whose + title, {"step": points}))
    return panels


def step_points(run, name):
    """[(step, mean reward, its standard error over the groups or None)]."""
    points = []
    groups = run.groups_of_steps()
    for numbers in run.metrics:
        step, means = numbers["step"], []
        for group in groups.get(numbers["step"], []):
            known = mean_of(group.get(name, []))
            means += [] if known is None else [known]
        error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
        points.append((step, numbers.get(name), error))
    return points


def evaluation_points(run, prompts, name):
    """[(step, mean reward, its standard error over the prompts or None)]."""
    evaluations = [each for each in run.evaluations if prompts in each]
    return [(each["step"], *each[prompts].get(name, (None, None))) for each in evaluations]


# ---- drawing -------------------------------------------------------------------------------------


def panel(title, curves):
    """An <svg>. curves: {a key of CURVES: [(step, value or None, error or None)]}."""
    curves = {
        name: [point for point in points if point[1] is not None] for name, points in curves.items()
    }
    known = [point for points in curves.values() for point in points]
    low, high = scale(
        [value for _, value, _ in known],
        [value + side * (error or 0) for _, value, error in known for side in (-1, 1)],
    )
    last = max((step for step, *_ in known), default=0) or 1
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / last
    share = lambda value: (min(max(value, low), high) - low) / (high - low)
    y = lambda value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(value)

    parts = [f'<text x="{LEFT}" y="15" font-weight="600">{escape(title)}</text>']
    for value in ticks(low, high):
        parts.append(
            f'<path class="grid" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for step in ticks(0, last):
        if step == int(step):
            parts.append(
                f'<text x="{x(step):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{step:g}</text>'
            )
    parts += [curve(name, points, x, y) for name, points in curves.items()]
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
    return f'{head} aria-label="{escape(title)}">{"".join(parts)}</svg>'


def curve(name, points, x, y):
    """Steps have a band of errors, evaluations dots with bars."""
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value, _ in points)
    parts = [f'<polyline class="line" points="{line}"/>']
    if name == "step":
        known = [(step, value, error) for step, value, error in points if error is not None]
        sides = [(step, value + error) for step, value, error in known]
        sides += [(step, value - error) for step, value, error in reversed(known)]
        band = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in sides)
        parts.insert(0, f'<polygon class="band" points="{band}"/>')
    for step, value, error in points:
        words = f"<title>{CURVES[name]}, step {step}: {with_error(value, error)}</title>"
        radius = 1.5 if name == "step" else 3
        if error is not None and name != "step":
            ends = f"M{x(step):.1f} {y(value - error):.1f}V{y(value + error):.1f}"
            parts.append(f'<path class="error" d="{ends}"/>')
        dot = f'<circle class="dot" cx="{x(step):.1f}" cy="{y(value):.1f}" r="{radius}">'
        parts.append(f"{dot}{words}</circle>")
    return f'<g class="{name.split()[0]}">{"".join(parts)}</g>'


def scale(values, ends):
    """The lowest and highest value of an axis. A share is drawn on 0 to 1. ends: of error bars."""
    if values and 0 <= min(values) and 0.5 < max(values) <= 1:
        return 0, 1
    low, high = min(ends, default=0), max(ends, default=1)
    if 0 <= low < high / 2 or 0 < low == high:
        return 0, high
    return (low, high) if low < high else (low - 0.5, low + 0.5)


def ticks(low, high):
    """Two to seven round numbers of an axis."""
    unit = 10 ** math.floor(math.log10(high - low))
    step = next(size * unit for size in (0.2, 0.5, 1, 2) if (high - low) / (size * unit) < 6)
    return [
        step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def legend():
    """What the colours are, as an <svg>."""
    parts = []
    for place, (name, words) in zip((0, 70, 200), CURVES.items()):
        parts.append(
            f'<g class="{name.split()[0]}"><circle class="dot" cx="{8 + place}" cy="10" r="4"/>'
            f'<text x="{18 + place}" y="14">{words}</text></g>'
        )
    return f'<svg viewBox="0 0 340 20" width="340" height="20">{"".join(parts)}</svg>'


class Svg(str):
    """The text of an SVG file. A notebook draws it."""

    _repr_svg_ = str.__str__


def draw_curves(run, columns=3):
    """An SVG file of a run's rewards, which needs no other file."""
    panels = reward_panels(run)
    parts = [legend()]
    for i, each in enumerate(panels):
        place = f'x="{i % columns * WIDTH}" y="{20 + i // columns * HEIGHT}"'
        parts.append(each.replace("<svg", f"<svg {place}", 1))
    width, height = WIDTH * min(columns, len(panels)), 20 + HEIGHT * -(-len(panels) // columns)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" class="curves" {size}><style>{STYLE}</style>'
    return Svg(f'{start}<rect class="paper" width="100%" height="100%"/>{"".join(parts)}</svg>')
