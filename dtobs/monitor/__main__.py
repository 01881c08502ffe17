"""``python -m dtobs.monitor RUN_DIR --node N``: how a rank starts its node's monitor."""

from __future__ import annotations

import os
import sys

# numpy's linear algebra would start a thread a core, and we never use it.
for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[name] = "1"

from dtobs.monitor.app import main  # noqa: E402 - after the limits, which numpy reads when it is imported

sys.exit(main())
