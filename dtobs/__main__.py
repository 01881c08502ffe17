"""``python -m dtobs`` is the command ``dtobs``."""

from __future__ import annotations

import sys

from dtobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
