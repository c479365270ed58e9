"""Draws the pages of a run, while it goes on or later: python -m viewer runs/1"""

import argparse
import sys
from pathlib import Path

from viewer import show
from viewer.run import CannotShow


def main(arguments=None):
    parser = argparse.ArgumentParser("python -m viewer", description=__doc__)
    parser.add_argument("run", help="the folder of a run, such as runs/1", type=Path)
    out = parser.parse_args(arguments).run
    try:
        show(out)
    except (CannotShow, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"look at {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
