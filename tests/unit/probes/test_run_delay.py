"""How long a thread waited for a core, as the kernel counts it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dtobs.probes.run_delay import RunDelay


def test_the_second_number_is_the_delay(tmp_path: Path):
    (tmp_path / "schedstat").write_text("24483144 188829824 10\n")
    delay = RunDelay(tmp_path / "schedstat")
    assert delay.read_ns() == 188829824
    delay.close()
    delay.close()
    assert delay.read_ns() == 0


@pytest.mark.parametrize("text", [None, "", "12", "a b c"])
def test_a_kernel_that_does_not_say(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "schedstat").write_text(text)
    delay = RunDelay(tmp_path / "schedstat")
    assert (delay.read_ns(), delay.read_ns()) == (0, 0)


def test_it_never_falls():
    delay = RunDelay()
    before = delay.read_ns()
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        pass
    assert delay.read_ns() >= before >= 0
    delay.close()
