"""Memory of the process and of its device, once a step."""

from __future__ import annotations

import os
import time

import torch

from dtobs.probes.base import Probe

EVERY_SECONDS = 0.05
"""The device's allocator is asked at most so often; steps that are shorter repeat what it said."""


class Memory(Probe):
    """Resident bytes from /proc/self/statm; allocated and peak bytes from the device's own allocator counters.

    Where there is no accelerator, also the resident bytes that are the process's own: without mapped files, which count
    as resident while data is read from them, and without shared memory.
    """

    name = "memory"
    about_model = False

    def install(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.undo.callback(os.close, self._fd)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._available = torch.cuda.is_available()
        self._on_host = not torch.accelerator.is_available()
        self._total_known, self._next, self._of_device = False, 0.0, (0, 0)
        self.step_end()
        self.context.recorder.page.set(rss_bytes=self.context.record["rss_bytes"].item())

    def step_end(self) -> None:
        context = self.context
        record = context.record
        resident, shared = map(int, os.pread(self._fd, 128, 0).split()[1:3])
        record["rss_bytes"] = resident * self._page
        if self._on_host:
            record["private_bytes"] = (resident - shared) * self._page
        # Asking a device that nobody uses yet would create its context: half a gigabyte.
        if self._available and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if not self._total_known:
                self._total_known = True
                device = torch.cuda.get_device_properties(torch.cuda.current_device())
                context.recorder.page.set(device_total_bytes=device.total_memory)
                if torch.version.cuda is not None:  # the monitor asks NVIDIA's management library for it
                    context.recorder.meta.add("process", device_uuid=f"GPU-{getattr(device, 'uuid', '')}")
            now = time.monotonic()
            if now >= self._next:
                self._next = now + EVERY_SECONDS
                # `memory_allocated` and `max_memory_allocated` each put every figure there is into a new table.
                allocated = torch.cuda.memory_stats_as_nested_dict().get("allocated_bytes", {}).get("all", {})
                self._of_device = allocated.get("current", 0), allocated.get("peak", 0)
            record["device_bytes"], record["device_peak_bytes"] = self._of_device
