"""A page of a run, index.html. It needs no server, and shows pictures of the run's folder."""

import math
from html import escape
from urllib.parse import quote

from runtime.words import counted, format_number, shown_names, with_error
from viewer import curves
from viewer.run import is_wrong, mean_of
from viewer.sheets import spread

STEPS = 200  # steps whose groups are on the page, at most
PICTURES = 8  # of a judge that fell, at most
SETS = {"training": "training prompts", "held out": "held-out prompts"}


def draw_page(run):
    """The text of index.html."""
    name = escape(run.out.resolve().name)
    sections = {
        "Before and after": before_and_after(run),
        "Rewards": rewards(run),
        "Is a reward gamed?": gamed(run),
        "By type of prompts": by_type(run),
        "The policy": grid_of(curves.number_panels(run)),
        "The groups of each step": groups(run),
        "Settings": settings(run),
    }
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name}</title><style>{curves.STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
        quiet(f"{run.steps} of {counted(run.settings.get('steps', 0), 'step')}"),
        *(f"<h2>{title}</h2>{content}" for title, content in sections.items() if content),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def settings(run):
    """A line for each setting, and for the versions of what has run."""
    known = {**run.settings, **(run.settings.get("versions") or {})}
    lines = [
        f"<div>{escape(name)} <b>{escape(str(value))}</b></div>"
        for name, value in known.items()
        if not isinstance(value, dict | list)
    ]
    return f'<div class="settings">{"".join(lines)}</div>'


# ---- numbers -------------------------------------------------------------------------------------


def rewards(run):
    """All rewards, before and after, and their curves."""
    names = {name.removeprefix("reward/"): name for name in shown_names(run.last["held out"])}
    rows = {words: [change(run, each, name) for each in SETS] for words, name in names.items()}
    note = "± is the standard error: over prompts, or in the grey band over the groups of a step."
    return table(rows) + quiet(note) + curves.legend() + grid_of(curves.reward_panels(run))


def by_type(run):
    """The judge, or a run's reward, for each type of prompts."""
    name = run.judge or "reward"
    if not run.types:
        return ""
    rows = {
        each: [change(run, f"{prompts}, {each}", name) for prompts in SETS] for each in run.types
    }
    return (
        quiet(escape(name.removeprefix("reward/")))
        + table(rows)
        + grid_of(curves.type_panels(run, name))
    )


def change(run, prompts, name):
    """'0.542 ± 0.060 → 0.948 ± 0.018', of a reward before training and after."""
    sides = [each for each in run.sides if name in each.get(prompts, {})]
    return " → ".join(with_error(*each[prompts][name]) for each in sides).replace("+-", "±")


def table(rows):
    """rows: {label: its cells, for each of SETS}."""
    head = "".join(f"<th>{words}</th>" for words in ("", *SETS.values()))
    lines = [
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for label, cells in rows.items()
    ]
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def grid_of(panels):
    return f'<div class="panels">{"".join(panels)}</div>' if panels else ""


def quiet(words):
    return f'<p class="quiet">{words}</p>'


# ---- is it gamed? --------------------------------------------------------------------------------


def gamed(run):
    """Judges that fell while the reward rose, by more than their errors, with pictures of it."""
    if len(run.sides) < 2 or not run.metrics:
        return ""
    held_out = run.last["held out"]
    judges = [name for name in shown_names(held_out) if name not in run.metrics[-1]]
    if not judges:
        return quiet("Unknown: no other reward judges this run (--eval-reward).")
    moves = {name: move(run, name) for name in ["reward", *judges]}
    fell = [name for name in judges if moves[name] == "fell"] if moves["reward"] == "rose" else []
    words = [f"{escape(name.removeprefix('reward/'))} {moved}" for name, moved in moves.items()]
    about = f"On held-out prompts {', '.join(words)}. "
    if not fell:
        return quiet(f"{about}No judge fell while the reward rose.")
    names = " and ".join(escape(name.removeprefix("reward/")) for name in fell)
    about += f"While the reward rose, {names} fell. Is that harm?"
    return quiet(about) + "".join(fallen(run, name) for name in fell)


def move(run, name):
    """'rose' or 'fell': the held-out mean, by more than the standard error of the difference."""
    (before, error), (after, other) = (
        each["held out"].get(name, (None, None)) for each in run.sides
    )
    if before is None or after is None:
        return "is unknown"
    change = after - before
    if abs(change) <= math.hypot(error or 0, other or 0):
        return "stayed within its error"
    return "rose" if change > 0 else "fell"


def fallen(run, judge):
    """Pictures with a higher reward and a lower judge than their prompt's mean before."""
    first, last = run.sides
    parts = []
    for before, after in zip(first.get("shown", []), last.get("shown", [])):
        means = [mean_of(before[name]) for name in ("reward", judge)]
        for place, reward, verdict in zip(after["pictures"], after["reward"], after[judge]):
            known = None not in (*means, reward, verdict)
            if known and reward > means[0] and verdict < means[1]:
                words = f"{escape(after['prompt'])}<br>reward {format_number(means[0])} → "
                words += f"{format_number(reward)}<br>{escape(judge.removeprefix('reward/'))} "
                words += f"{format_number(means[1])} → {format_number(verdict)}"
                parts.append(figure(place, words))
    about = "None of the pictures shown has a higher reward and a lower"
    if parts:
        about = "Pictures shown with a higher reward than their prompt had before, and a lower"
    return quiet(f"{about} {escape(judge.removeprefix('reward/'))}:") + row_of(parts[:PICTURES], 4)


# ---- pictures ------------------------------------------------------------------------------------


def before_and_after(run):
    """The prompts that evaluations show, and links to the sheets of all evaluations."""
    sides = [each for each in run.sides if each.get("shown")]
    if not sides:
        return ""
    rows = []
    for i, shown in enumerate(sides[-1]["shown"]):
        kind = f' <span class="quiet">{escape(shown["type"])}</span>' if shown["type"] else ""
        cells = "".join(evaluated(each, x) for each in sides for x in each["shown"][i : i + 1])
        rows.append(f'<h3>{escape(shown["prompt"])}{kind}</h3><div class="pair">{cells}</div>')
    about = "The first held-out prompt of each type, or the first few, whatever their pictures are."
    if any('class="wrong"' in row for row in rows):
        about += f" A red frame: {escape(sides[-1]['judge'])} is 0."
    links = [
        f'<a href="evaluation/{each["step"]:06d}/sheet.png">{each["step"]}</a>'
        for each in run.evaluations
        if each.get("shown")
    ]
    return quiet(about) + "".join(rows) + quiet(f"After each evaluated step: {' '.join(links)}")


def evaluated(evaluation, shown):
    """A prompt's pictures in an evaluation."""
    step = evaluation["step"]
    title = f"after {counted(step, 'step')}" if step else "before"
    figures = [figure(place, escape(name)) for name, place in shown["beside"].items()]
    for j, (place, reward) in enumerate(zip(shown["pictures"], shown["reward"])):
        wrong = is_wrong(evaluation, shown, j)
        figures.append(figure(place, f"reward {format_number(reward)}", wrong))
    return f'<div><div class="quiet">{title}</div>{row_of(figures, 4 + len(shown["beside"]))}</div>'


def groups(run):
    """Of each step its groups, or of some steps where there are many."""
    steps = [*run.groups_of_steps().items()]
    if not steps:
        return ""
    every = -(-len(steps) // STEPS)
    shown = steps[::every]
    parts = [quiet("Below a picture: its reward and its advantage.")]
    if every > 1:
        parts.append(quiet(f"Of {len(steps)} steps one in {every} is here."))
    for step, of_step in shown:
        known = [reward for group in of_step for reward in group["reward"]]
        flat = sum(spread(group) == 0 for group in of_step)
        about = f"step {step}: reward {format_number(mean_of(known))}, "
        about += f"{flat} of {counted(len(of_step), 'group')} without spread"
        articles = "".join(group_of(run, group) for group in of_step)
        opened = " open" if step == shown[0][0] else ""
        parts.append(
            f"<details{opened}><summary>{about}</summary>"
            f'<div class="pair">{articles}</div></details>'
        )
    return "".join(parts)


def group_of(run, group):
    """A group with the rewards and advantages of its pictures."""
    rewards = group["reward"]
    advantages = group.get("advantage", [None] * len(rewards))
    places = group.get("pictures", [None] * len(rewards))  # of other ranks none are saved
    figures = [figure(place, escape(name)) for name, place in group.get("beside", {}).items()]
    for place, reward, advantage in zip(places, rewards, advantages):
        words = format_number(reward)
        if advantage is not None:
            sign = "up" if advantage > 0 else "down" if advantage < 0 else ""
            words += f'<br><span class="{sign}">{advantage:+.2f}</span>'
        figures.append(figure(place, words))
    note = "" if spread(group) else ' <span class="quiet">equal rewards: no gradient</span>'
    row = row_of(figures, run.columns + len(figures) - len(rewards))
    return f"<div><h3>{escape(group['prompt'])}{note}</h3>{row}</div>"


def row_of(figures, columns):
    return f'<div class="pictures" style="--columns: {columns}">{"".join(figures)}</div>'


def figure(place, caption, wrong=False):
    """A picture that opens at its full size; caption: HTML."""
    image = (
        f'<a href="{quote(place)}"><img src="{quote(place)}" loading="lazy" alt=""></a>'
        if place
        else ""
    )
    kind = ' class="wrong"' if wrong else ""
    return f"<figure{kind}>{image}<figcaption>{caption}</figcaption></figure>"
