"""`dtobs memory`: what fills a snapshot, in the layouts of old and new torch, and files that are none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from dtobs.cli import main

MIB = 1 << 20


def frame(filename: str, line: int = 7, name: str = "forward") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def block(size: int, *frames: dict[str, Any], state: str = "active_allocated", old: bool = False) -> dict[str, Any]:
    stack = {"history": [{"frames": list(frames)}]} if old else {"frames": list(frames)}
    return {"size": size * MIB, "requested_size": size * MIB - 1, "state": state, **stack}


def snapshot(old: bool = False) -> dict[str, Any]:
    linear, mine = frame("/x/site-packages/torch/nn/modules/linear.py"), frame("/home/me/model.py", 31)
    adam = frame("/x/site-packages/torch/optim/adam.py", 90, "_init_group")
    first = [
        block(40, linear, mine, old=old),
        block(10, adam, frame("/home/me/train.py", 8, "main"), old=old),
        block(30, state="inactive"),
        block(20, state="active_pending_free"),
    ]
    empty = [block(100, state="inactive")]
    return {
        "segments": [
            {"device": 0, "total_size": 100 * MIB, "blocks": first},
            {"device": 0, "total_size": 100 * MIB, "blocks": empty},
        ],
        "device_traces": [[]],
    }


def write(value: object, path: Path) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


@pytest.mark.parametrize("old", [False, True])
def test_what_fills_it(old: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["memory", str(write(snapshot(old), tmp_path / "s.pickle")), "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert (device["reserved_bytes"], device["allocated_bytes"]) == (200 * MIB, 50 * MIB)
    assert (device["pending_bytes"], device["inactive_bytes"]) == (20 * MIB, 130 * MIB)
    assert (device["fragmentation"], device["largest_free_bytes"]) == (0.15, 100 * MIB)
    assert device["categories"] == {"activations": 40 * MIB, "optimizer": 10 * MIB}
    assert device["frames"][0] == {"frame": "/home/me/model.py:31 forward", "bytes": 40 * MIB}


def test_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["memory", str(write(snapshot(), tmp_path / "s.pickle"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("device 0: 50 MiB allocated of 200 MiB reserved; 15.0% lost to fragmentation")
    assert "40 MiB  /home/me/model.py:31 forward" in out


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


HOSTILE = [Evil(), {"segments": [Evil()]}, {"segments": 3}, {"segments": [7]}, [], 5, {"a": 1}]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_snapshot_runs_nothing(value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = main(["memory", str(write(value, tmp_path / "s.pickle"))])
    out, err = capsys.readouterr()
    assert code == (0 if value == [] else 1)
    assert "ran" not in out and err.count("\n") == code


def test_odd_values_cost_only_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    value = snapshot()
    value["segments"][0]["blocks"] += [None, {"size": -4, "state": 3}, {"size": "x", "frames": [1, {}]}]
    assert main(["memory", str(write(value, tmp_path / "s")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"]["0"]["allocated_bytes"] == 50 * MIB


def test_what_was_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The last allocation that failed, of each device; the history of a device that is full of nothing counts, too."""
    refused = {"action": "oom", "size": 64 * MIB, "device_free": 3 * MIB, "frames": [frame("/home/me/loss.py", 4)]}
    earlier = {**refused, "size": 5, "frames": []}
    path = write(
        {**snapshot(), "device_traces": [[], [earlier, refused, {"action": "alloc"}], 7]}, tmp_path / "s.pickle"
    )
    assert main(["memory", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]
    told = {"bytes": 64 * MIB, "free_bytes": 3 * MIB, "frame": "/home/me/loss.py:4 forward"}
    assert {number: device["out_of_memory"] for number, device in found.items()} == {"0": None, "1": told}
    assert main(["memory", str(path)]) == 0
    assert "64 MiB were asked for, 3 MiB were free, at /home/me/loss.py:4 forward" in capsys.readouterr().out


def test_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(snapshot(), tmp_path / "s")
    path.write_bytes(path.read_bytes()[:-40])
    assert main(["memory", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
