"""Device errors in a kernel log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.host.kernel_log import Xid, parse_xids, read_xids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.",
            Xid("0000:3b:00", 79, 1234, "GPU has fallen off the bus.", 12.5),
        ),
        (
            "NVRM: Xid (PCI:0000:c1:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error",
            Xid("0000:c1:00", 48, 0, "An uncorrectable double bit error", 12.5),
        ),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", Xid("0000:03:00", 14, 0, "Channel 00000001", 12.5)),
        (
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, Ch 00000008, intr 10000000. MMU Fault",
            Xid("0000:3b:00", 31, 77, "Ch 00000008, intr 10000000. MMU Fault", 12.5),
        ),
    ],
)
def test_lines_of_drivers_of_several_ages(text, expected):
    assert parse_xids([f"4,900,12500000,-;{text}"]) == [expected]


def test_everything_else_is_passed_over(tmp_path: Path):
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,1000,-;usb 1-1: new device\n"
        "4,2,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.\n"
        " SUBSYSTEM=pci\n"
        "6,3,3000,-;oom-kill: constraint=CONSTRAINT_MEMCG\n"
    )
    assert [(x.number, x.pid, x.seconds) for x in read_xids(log)] == [(79, 1234, 2.0)]
    assert str(read_xids(log)[0]) == "Xid 79 of device 0000:3b:00: GPU has fallen off the bus."


def test_a_log_that_may_not_be_read_is_empty(tmp_path: Path):
    assert read_xids(tmp_path / "missing") == []
