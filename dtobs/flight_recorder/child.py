"""The child process that opens dumps: paths in as JSON lines, columns out, memory and CPU time bounded.

Started by `reader`; whatever a hostile file does to an unpickler happens here, and costs one error line.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from pathlib import Path

from dtobs.errors import DumpError
from dtobs.flight_recorder.columns import columns_of
from dtobs.flight_recorder.decode import TOO_MUCH_MEMORY, read_dump
from dtobs.flight_recorder.wire import Sender

MAX_MEMORY_BYTES = 3 << 30


def main() -> int:
    """Serve until standard input closes."""
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    gc.disable()  # plain data has no cycles, and the collector would walk it again and again
    sender = Sender(sys.stdout.buffer)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + request["cpu_seconds"])
        try:
            columns = columns_of(read_dump(Path(request["path"]), request["max_bytes"]))
        except DumpError as error:
            sender.error(str(error))
        except (MemoryError, RecursionError):
            sender.error(TOO_MUCH_MEMORY)
        else:
            sender.columns(columns)
    return 0


def _limit(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
