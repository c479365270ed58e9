"""The page of a run, index.html: it needs no server, and shows pictures of the run's folder."""

import json
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

from runtime.numbers import counted, evaluation_table, format_number, shown_names, with_error

TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
STEPS = 200  # steps whose groups are on the page, at most
SETS = "training", "held out"
COLOURS = {"steps": "#888", "training": "#3b7ddd", "held out": "#d02030"}
# Of metrics.jsonl, each where it is not 0 throughout.
NUMBERS = "kl", "entropy", "groups_without_spread", "unscored", "grad_norm", "clip_fraction"
WIDTH, HEIGHT = 320, 180  # of a panel, in pixels


def draw_page(run):
    """The text of index.html."""
    return TEMPLATE.substitute(
        name=escape(run.out.resolve().name),
        steps=f"{len(run.metrics)} of {counted(run.settings['steps'], 'step')}",
        before_after="".join(row(*each) for each in run.before_after()),
        table=escape(evaluation_table(run.evaluations)),
        curves=curves(run),
        groups=groups(run),
        settings=escape(json.dumps(run.settings, indent=1)),
    )


# ---- pictures ------------------------------------------------------------------------------------


def row(label, figures):
    """figures: [(file or None, caption in HTML, whether it is wrong)]."""
    parts = []
    for file, caption, wrong in figures:
        place = quote(file or "")
        link = f'<a href="{place}"><img src="{place}" loading="lazy"></a>' if file else ""
        kind = "wrong" if wrong else ""
        parts.append(f'<figure class="{kind}">{link}<figcaption>{caption}</figcaption></figure>')
    return f'<h3>{escape(label)}</h3><div class="pictures">{"".join(parts)}</div>'


def groups(run):
    """Of each step its groups, or of some steps where there are many."""
    steps = {}
    for group in run.groups:
        steps.setdefault(group["step"], []).append(group)
    parts = []
    for step in [*steps][:: -(-len(steps) // STEPS) or 1]:
        rows = "".join(row(group["prompt"], figures_of(group)) for group in steps[step])
        parts.append(f"<details><summary>step {step}</summary>{rows}</details>")
    return "".join(parts)


def figures_of(group):
    """What stands beside a group, such as the target, then its pictures."""
    figures = [(file, escape(name), False) for name, file in group.get("beside", {}).items()]
    files = group.get("pictures", [None] * len(group["reward"]))  # of other ranks none are saved
    for file, reward, advantage in zip(files, group["reward"], group["advantage"]):
        sign = "up" if advantage > 0 else "down" if advantage < 0 else ""
        words = f'{format_number(reward)} <b class="{sign}">{advantage:+.2f}</b>'
        figures.append((file, words, False))
    return figures


# ---- numbers -------------------------------------------------------------------------------------


class Svg(str):
    """The text of an SVG file. A notebook draws it."""

    _repr_svg_ = str.__str__


def curves(run, columns=3):
    """All rewards and numbers of a run over its steps: panels in an SVG."""
    panels = {}  # {title: {a key of COLOURS: [(step, value, its standard error or None)]}}
    for name in shown_names(run.evaluations[-1]["held out"]):
        of_steps = [(each["step"], each.get(name), None) for each in run.metrics]
        panels[name.removeprefix("reward/")] = {"steps": of_steps} | {
            key: [(each["step"], *each[key][name]) for each in run.evaluations if key in each]
            for key in SETS
        }
    for name in run.metrics[-1] if run.metrics else ():
        of_steps = [(each["step"], each[name], None) for each in run.metrics]
        if name.split("/")[-1] in NUMBERS and any(value for _, value, _ in of_steps):
            panels[name] = {"steps": of_steps}
    parts = []
    for i, (title, of_panel) in enumerate(panels.items()):
        place = f'x="{i % columns * WIDTH}" y="{i // columns * HEIGHT}"'
        parts.append(f"<svg {place}>{panel(title, of_panel)}</svg>")
    width, height = WIDTH * columns, HEIGHT * -(-len(panels) // columns)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12" fill="currentColor"'
    return Svg(f"{start} {style}>{''.join(parts)}</svg>")


def panel(title, of_panel):
    """Dots joined by lines, with bars of errors, between the lowest and the highest value."""
    of_panel = {
        name: [point for point in points if point[1] is not None]
        for name, points in of_panel.items()
    }
    known = [point for points in of_panel.values() for point in points] or [(0, 0, None)]
    ends = [value + side * (error or 0) for _, value, error in known for side in (-1, 1)]
    low, high = min(ends), max(ends)
    low = 0 if 0 <= low < high / 2 else low
    last = max(step for step, *_ in known) or 1
    x = lambda step: 50 + (WIDTH - 66) * step / last
    y = lambda value: HEIGHT - 24 - (HEIGHT - 54) * (value - low) / (high - low or 1)
    parts = [
        f'<text x="50" y="16" font-weight="600">{escape(title)}</text>',
        f'<text x="{x(last)}" y="{HEIGHT - 6}" text-anchor="middle">{last}</text>',
    ]
    for value in {low, high}:
        parts.append(
            f'<text x="44" y="{y(value) + 4:.1f}" text-anchor="end">{format_number(value)}</text>'
            f'<path d="M50 {y(value):.1f}H{WIDTH - 16}" stroke="currentColor" opacity="0.2"/>'
        )
    for name, points in of_panel.items():
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value, _ in points)
        marks = [f'<polyline points="{line}" fill="none"/>']
        for step, value, error in points:
            bar = f"M{x(step):.1f} {y(value - (error or 0)):.1f}V{y(value + (error or 0)):.1f}"
            words = f"<title>{name}, step {step}: {with_error(value, error)}</title>"
            size = 1.5 if name == "steps" else 3
            dot = f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="{size}">{words}</circle>'
            marks.append(f'<path d="{bar}"/>{dot}')
        colour = COLOURS[name]
        parts.append(f'<g stroke="{colour}" fill="{colour}">{"".join(marks)}</g>')
    return "".join(parts)
