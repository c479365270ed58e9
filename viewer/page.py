"""The page of a run, index.html: it needs no server, and shows pictures of the run's folder."""

import json
import math
from datetime import datetime
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from urllib.parse import quote

from runtime.numbers import (
    counted,
    evaluation_rows,
    evaluation_title,
    format_step,
    judge_of,
    shown_names,
    sides,
    with_error,
)
from runtime.terminal import option

TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
STEPS = 200  # steps whose groups are on the page, at most
COLOURS = {"steps": "#888", "held out": "#d02030"}
# Of metrics.jsonl, each where it is not 0 throughout.
NUMBERS = "kl", "entropy", "groups_without_spread", "unscored", "grad_norm", "clip_fraction"
WIDTH, HEIGHT = 320, 190  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 26, 24  # what surrounds its curves


def draw_page(run):
    """The text of index.html."""
    return TEMPLATE.substitute(
        title=escape(title(run)),
        summary=escape(summary(run)).replace("+-", "±"),
        state=escape(state(run)),
        facts="".join(f"<tr><th>{key}</th><td>{escape(x)}</td></tr>" for key, x in facts(run)),
        before_after="".join(before_after(run)),
        judged=evaluation_title(run.evaluations),
        table=table(evaluation_rows(run.evaluations)),
        curves="".join(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{each}</svg>' for each in panels(run)),
        groups="".join(steps_of(run)),
        settings=escape(json.dumps(run.settings, indent=0)[2:-2]),
    )


def title(run):
    model, reward = Path(run.settings["model"]).name, run.settings["reward"]
    return f"{model}, trained by GRPO: {reward}" if run.settings["steps"] else f"{model}, judged"


def summary(run):
    """Two sentences for people who know nothing of the run."""
    done = "was judged without training"
    if run.settings["steps"]:
        reward = f"reward ({run.settings['reward']}), which a program gives to each picture"
        done = f"was trained by reinforcement learning (GRPO) to get a higher {reward}"
    last, judge = run.evaluations[-1], judge_of(run.evaluations[-1])
    values = [f"{with_error(*x[judge])} ({side})" for side, x in sides(run.evaluations).items()]
    unseen = f"{counted(last['prompts'], 'prompt')} that training never saw"
    return (
        f"{Path(run.settings['model']).name}, a model that paints pictures for prompts, {done}. "
        f"On {unseen}, its mean score “{judge.removeprefix('reward/')}” was "
        f"{', then '.join(values)}: higher is better."
    )


def state(run):
    """Whether the run is complete, goes on, or was ended."""
    made, steps = len(run.metrics), run.settings["steps"]
    words = f"{made} of {counted(steps, 'step')}"
    if made == steps == run.evaluations[-1]["step"]:
        return f"The run is complete: {words}."
    if run.is_running:
        now = f"{datetime.now():%Y-%m-%d %H:%M}"
        return f"The run goes on: {words} when this page was drawn, {now}."
    words += f", of which {run.saved} are saved" if run.saved < made else ""
    return f"The run was ended after {words}: --resume with its folder continues it."


def facts(run):
    """What was trained on what: pairs of words."""
    settings = run.settings
    yield "Model", settings["model"]
    if settings["adapter"]:
        yield "Begun from", settings["adapter"]
    yield "Prompts", f"{settings['prompts']}; held out: {settings['eval_prompts']}"
    yield "Reward", settings["reward"]
    yield "Judged by", settings["eval_reward"]
    flags = [f"{option(name)} {settings[name]}" for name in settings["not_default"]]
    yield "Not the default", " ".join(flags) or "nothing"
    yield "A run like it", f"python {settings['script']} --config settings.json"
    yield "Versions", ", ".join(f"{name} {of}" for name, of in settings["versions"].items())


def table(rows):
    """rows: lists of cells, a head first."""
    cells = lambda row, tag: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
    head, *others = rows
    lines = [cells(head, "th"), *(cells(row[:1], "th") + cells(row[1:], "td") for row in others)]
    text = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{text}</table>".replace("+-", "±")


# ---- pictures ------------------------------------------------------------------------------------


def before_after(run):
    """A row for each prompt that evaluations show."""
    for prompt, of_type, blocks in run.before_after():
        both = "".join(
            f"<div><p>{heading}</p>{pictures(block)}</div>"
            for heading, block in zip(sides(run.evaluations), blocks)
        )
        title = f"{escape(prompt)} <span>{escape(of_type or '')}</span>"
        yield f'<h3>{title}</h3><div class="blocks">{both}</div>'


def steps_of(run):
    """Of each step its groups, or of some steps where there are many."""
    for numbers in run.metrics[:: -(-len(run.metrics) // STEPS) or 1]:
        line = escape(format_step(run.settings["steps"], numbers))
        opened = " open" if numbers["step"] == 1 else ""
        groups = "".join(
            f"<div><h3>{escape(group['prompt'])}</h3>{pictures(of_group(group))}</div>"
            for group in run.groups[numbers["step"]]
        )
        groups = f'<div class="blocks">{groups}</div>'
        yield f"<details{opened}><summary>{line}</summary>{groups}</details>"


def of_group(group):
    """What stands beside a group, such as the target, then its pictures."""
    found = [(file, name, False) for name, file in group.get("beside", {}).items()]
    files = group.get("pictures", [None] * len(group["reward"]))  # of other ranks none are saved
    for file, reward, advantage in zip(files, group["reward"], group["advantage"]):
        sign = "up" if advantage > 0 else "down" if advantage < 0 else ""
        reward = with_error(reward, None)
        found.append((file, f'{reward} <b class="{sign}">{advantage:+.2f}</b>', False))
    return found


def pictures(block):
    """block: [(file or None, caption in HTML, whether it is wrong)]."""
    figures = []
    for file, caption, wrong in block:
        place = quote(file or "")
        link = f'<a href="{place}"><img src="{place}" loading="lazy"></a>' if file else ""
        mark = ' class="wrong"' if wrong else ""
        figures.append(f"<figure{mark}>{link}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="pictures">{"".join(figures)}</div>'


# ---- curves --------------------------------------------------------------------------------------


class Svg(str):
    """The text of an SVG file. A notebook draws it."""

    _repr_svg_ = str.__str__


def draw_curves(run, columns=3):
    """All rewards and numbers of a run over its steps, as one SVG."""
    parts = []
    for i, each in enumerate(found := [*panels(run)]):
        place = f'x="{i % columns * WIDTH}" y="{i // columns * HEIGHT}"'
        parts.append(f"<svg {place}>{each}</svg>")
    width, height = WIDTH * columns, HEIGHT * -(-len(found) // columns)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
    return Svg(f'{start}<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>')


def panels(run):
    """The content of an <svg> for each reward and number of a run."""
    for name in shown_names(run.evaluations[-1]):
        steps = [
            (x["step"], x.get(name), error_of(run.groups[x["step"]], name)) for x in run.metrics
        ]
        held_out = [(x["step"], *x[name]) for x in run.evaluations]
        yield panel(name.removeprefix("reward/"), {"steps": steps, "held out": held_out})
    for name in run.metrics[-1] if run.metrics else ():
        points = [(each["step"], each[name], None) for each in run.metrics]
        if name.split("/")[-1] in NUMBERS and any(value for _, value, _ in points):
            yield panel(name, {"steps": points})


def error_of(groups, name):
    """The standard error of a step's mean reward over its groups, or None."""
    known = [[x for x in group.get(name, []) if x is not None] for group in groups]
    means = [fmean(values) for values in known if values]
    return stdev(means) / len(means) ** 0.5 if len(means) > 1 else None


def panel(title, curves):
    """The content of an <svg>. curves: {a key of COLOURS: [(step, value, error)]}, some None."""
    curves = {key: [x for x in points if x[1] is not None] for key, points in curves.items()}
    known = [point for points in curves.values() for point in points] or [(0, 0, None)]
    ends = [value + side * (error or 0) for _, value, error in known for side in (-1, 1)]
    if all(0 <= value <= 1 for _, value, _ in known):  # so are their errors, of a share
        ends = [min(max(end, 0), 1) for end in ends]
    values, steps = axis(min(ends), max(ends)), axis(0, max(step for step, *_ in known))
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / steps[-1]
    share = lambda value: (value - values[0]) / (values[-1] - values[0])
    y = lambda value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(share(value), 0), 1)

    words = '<text fill="currentColor" font-family="sans-serif" font-size="12"'
    parts = [f'{words} x="{LEFT}" y="15" font-weight="600">{escape(title)}</text>']
    for value in values:
        parts.append(
            f'{words} x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
            f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#8884"/>'
        )
    for step in steps:
        place = f'x="{x(step):.1f}" y="{HEIGHT - 6}" text-anchor="middle"'
        parts.append(f"{words} {place}>{step:g}</text>" if step == int(step) else "")
    for key, points in curves.items():
        place = lambda step, value: f"{x(step):.1f},{y(value):.1f}"
        sides = [place(step, value + (error or 0)) for step, value, error in points]
        sides += [place(step, value - (error or 0)) for step, value, error in reversed(points)]
        line = " ".join(place(*point[:2]) for point in points)
        marks = [f'<polygon points="{" ".join(sides)}" stroke="none" opacity="0.2"/>']
        marks.append(f'<polyline points="{line}" fill="none"/>')
        for step, value, error in points:
            note = f"<title>{key}, step {step}: {with_error(value, error)}</title>"
            size = 1.5 if key == "steps" else 3
            dot = f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="{size}">'
            marks.append(f"{dot}{note}</circle>")
        parts.append(f'<g stroke="{COLOURS[key]}" fill="{COLOURS[key]}">{"".join(marks)}</g>')
    return "".join(parts)


def axis(low, high):
    """The round numbers of an axis, from below `low`, or from 0, to above `high`."""
    if 0 <= low and (low < high / 2 or 0.5 < high <= 1):  # the second: a share
        low = 0
    if low == high:
        high = low + 1
    unit = 10 ** math.floor(math.log10(high - low))
    step = next(size * unit for size in (0.2, 0.5, 1, 2) if (high - low) / (size * unit) < 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]
