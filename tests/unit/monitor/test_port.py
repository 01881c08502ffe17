"""``DTOBS_MONITOR_PORT``: where a Prometheus that has to know the port finds it."""

from __future__ import annotations

import logging

import pytest

from dtobs.monitor.app import PORT, _asked_port


@pytest.mark.parametrize(("said", "port"), [("", 0), ("9400", 9400), ("no", 0), ("70000", 0), ("-1", 0)])
def test_a_port_that_cannot_be_is_said_and_none(said, port, monkeypatch, caplog):
    monkeypatch.setenv(PORT, said)
    with caplog.at_level(logging.WARNING):
        assert _asked_port() == port
    assert bool(caplog.records) == (said not in ("", "9400"))
