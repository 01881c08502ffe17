"""`attach()` starts observing this process and returns its `Session`; ``close()`` undoes all of it.

::

    with dtobs.attach(model, optimizer) as session:
        train()

`start` attaches, `identity` says which rank this is, `session` is what the user holds, `probe_set` knows which probes
run, `reports` where the user's numbers go, `run_info` what ``run.json`` says, `monitor_process` starts the monitor.
"""

from __future__ import annotations

from dtobs.session.session import Session
from dtobs.session.start import attach, current

__all__ = ["Session", "attach", "current"]
