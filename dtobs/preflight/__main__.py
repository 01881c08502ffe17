"""``torchrun … -m dtobs.preflight``: each rank of a job measures, rank 0 reports."""

from __future__ import annotations

import argparse
import sys

from dtobs.errors import DtobsError
from dtobs.preflight import arguments, command


def main() -> int:
    """Run it; returns the exit code of a launcher, does not return in a rank."""
    parser = argparse.ArgumentParser(prog="python -m dtobs.preflight", description=__doc__, allow_abbrev=False)
    arguments.configure(parser)
    try:
        return command.run(parser.parse_args())
    except DtobsError as error:
        sys.stderr.write(f"dtobs: {error}\n")
        return error.exit_code


sys.exit(main())
