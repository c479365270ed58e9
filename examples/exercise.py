"""Empties a function of grpo.py (docs/exercises.md): python examples/exercise.py _nucleus"""

import ast
import re
import sys
from pathlib import Path

HOLES = {  # and the tests of test_grpo.py that grade them
    "compute_advantages": "advantages or exactly_zero",
    "set_advantages": "rewards_meet",
    "compute_grpo_loss": "loss or right_side or k3 or importance",
    "mask_through_end": "through",
    "_nucleus": "nucleus",
    "_log_distribution": "distribution",
    "get_per_token_logprobs": "logprobs or before_the_first",
    "update": "formula or nothing",
    "add_reference": "reference_is",
}


def emptied(source, name):
    """The source, with nothing left of a function but its head and docstring."""
    hole = "raise NotImplementedError"
    if name == "update":  # of it, one line
        return re.sub(r"\(loss .*\.backward\(\)", hole, source)
    if name == "compute_advantages":
        source = emptied(source, "centre_groups")  # its other half
    lines = source.splitlines()
    (node,) = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == name]
    lines[node.body[0].end_lineno : node.end_lineno] = [" " * node.body[0].col_offset + hole]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    name, answer = sys.argv[-1], Path("answer.py")
    if name in ("-h", "--help"):
        print(__doc__)
        sys.exit()
    if name not in HOLES or answer.exists():
        sys.exit(f"give one of {', '.join(HOLES)}; an open one ends by: mv answer.py grpo.py")
    answer.write_text(source := Path("grpo.py").read_text("utf-8"), encoding="utf-8")
    Path("grpo.py").write_text(emptied(source, name), "utf-8")
    print(f'grade: pytest test_grpo.py -k "{HOLES[name]}"; compare: answer.py, the file as it was')
