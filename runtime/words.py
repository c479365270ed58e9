"""Numbers as people read them: in a run's lines and tables, and in what viewer/ draws."""

import math


def shown_names(numbers):
    """The names of rewards, without their weighted sum where that is a lone reward of weight 1."""
    names = [name for name in numbers if f"{name}/".startswith("reward/")]
    return names[1:] if len(names) > 1 and numbers[names[0]] == numbers[names[1]] else names


def with_error(mean, error):
    """'0.692 +- 0.031'."""
    return format_number(mean) + ("" if error is None else f" +- {format_number(error)}")


def format_number(value):
    if value is None or math.isnan(value):  # no image had this reward
        return "none"
    return f"{value:.0e}" if 0 < abs(value) < 5e-4 else f"{value:.3f}"


def counted(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
