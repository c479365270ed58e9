"""What keeps a long run alive: ranks, checkpoints, records, and what a GPU needs. The algorithm is in grpo.py."""

import math


class UserError(Exception):
    """Something the user can mend: shown as one line, exit code 2."""


def format_number(value, style=".3f"):
    return "none" if value is None or math.isnan(value) else f"{value:{style}}"  # none: no image had this reward
