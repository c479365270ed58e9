"""Draws the page of a run, while it goes on or later: python -m viewer runs/1"""

import argparse
from pathlib import Path

from runtime.record import read_jsonl
from viewer import show

parser = argparse.ArgumentParser("python -m viewer", description=__doc__)
parser.add_argument("run", help="the folder of a run, such as runs/1", type=Path)
out = parser.parse_args().run
if not read_jsonl(out / "evaluation.jsonl"):
    parser.error(f"there is no evaluation in {out}")
try:
    show(out)
except PermissionError as error:  # of somebody else's run
    parser.error(f"{error}: copy the run, and draw the copy")
except (OSError, ValueError) as error:  # a copy that was cut short
    parser.error(f"cannot read {out} ({error}): copy the run again")
except KeyError as error:
    parser.error(f"{out} is a run of another version of this project: it has no {error}")
print(f"look at {out / 'index.html'}")
