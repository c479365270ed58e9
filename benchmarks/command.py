"""The command line of a benchmark: its words by their places, --help, one line for a mistake."""

import argparse
import sys

from runtime.errors import exit_code


def run(main, about, *places):
    """Calls main with the words of the command line, then ends the program.

    about: what --help prints. places: a name for each word, "[NAME]" where it may be left out.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    for place in places:
        parser.add_argument(place.strip("[]"), nargs="?" if place.startswith("[") else None)
    words = [word for word in vars(parser.parse_args()).values() if word is not None]
    sys.exit(exit_code(lambda: main(*words)))
