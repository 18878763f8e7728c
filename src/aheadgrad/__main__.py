"""`python -m aheadgrad show FILE`: prints a file of programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aheadgrad.errors import ArtifactError
from aheadgrad.export.showing import shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aheadgrad", description="aheadgrad at the command line")
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="print a file of programs: what it holds, takes, gives and saves")
    show.add_argument("file")
    show.add_argument(
        "--trust", action="append", default=[], help="a namespace of custom ops", metavar="NAME"
    )
    asked = parser.parse_args(arguments)
    try:
        print(shown(asked.file, trust=asked.trust))
    except (ArtifactError, OSError) as error:
        print(f"{asked.file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
