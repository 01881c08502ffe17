"""Silent desynchronisation, and programs whose lines legitimately differ between ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dtobs.findings import Confidence
from dtobs.recording.meta import Op, Site
from dtobs.testing.fake_run import FakeRank, FakeRun
from tests.unit.detectors_hangs.trouble import found

GRADIENTS, LOSS, EXTRA = Site("t.py", 10, "train"), Site("t.py", 20, "log"), Site("t.py", 30, "evaluate")
AUTOGRAD = Site("<autograd>", 0, "")
Calls = Callable[[int, int], list[Site]]
"""Of rank and step: the lines that the rank calls the same collective from in that step."""


def train(run: FakeRun, steps: int, calls: Calls, op: str | Op = "all_reduce") -> FakeRun:
    first = run.rank(0).next_step
    for step in range(first, first + steps):
        for rank in run.ranks:
            one_step(rank, calls(rank.number, step), op)
    return run


def one_step(rank: FakeRank, sites: list[Site], op: str | Op) -> None:
    for site in sites:
        rank.collective(op, site=site)
    rank.step()


def usual(rank: int, step: int) -> list[Site]:
    return [GRADIENTS, LOSS]


def once(rank: int, step: int, *, odd: int = 1, at: int = 8) -> list[Site]:
    return [GRADIENTS, EXTRA, LOSS] if (rank, step) == (odd, at) else [GRADIENTS, LOSS]


@pytest.mark.parametrize("world", [2, 3])
def test_one_call_too_many(tmp_path, world):
    finding = found(train(FakeRun(tmp_path, world), 16, once).view())["call-site-mismatch"]
    assert (finding.ranks, finding.confidence, finding.step) == ((1,), Confidence.LIKELY, 8)
    peers = "rank 0" if world == 2 else "its peers"
    assert finding.summary == (
        f"rank 1 made one call more than {peers} in group default: its call #18 at t.py:30 in evaluate met the one at"
        " t.py:20 in log, and nothing noticed; results are mixed up from there on"
    )


def test_where_every_other_call_is_from_one_line(tmp_path):
    def calls(rank: int, step: int) -> list[Site]:
        return [EXTRA, GRADIENTS] if (rank, step) == (1, 8) else [GRADIENTS]

    finding = found(train(FakeRun(tmp_path, 2), 16, calls).view())["call-site-mismatch"]
    assert finding.ranks == (1,)


def test_one_call_too_few(tmp_path):
    def calls(rank: int, step: int) -> list[Site]:
        regular = [EXTRA] if step % 4 == 0 and (rank, step) != (2, 8) else []
        return [GRADIENTS, *regular]

    finding = found(train(FakeRun(tmp_path, 3), 24, calls).view())["call-site-mismatch"]
    assert finding.ranks == (2,)
    assert "rank 2 made one call fewer than its peers" in finding.summary


def test_of_two_ranks_that_know_the_line_neither_is_sure(tmp_path):
    def calls(rank: int, step: int) -> list[Site]:
        regular = [EXTRA] if step % 4 == 0 and (rank, step) != (1, 8) else []
        return [GRADIENTS, *regular]

    finding = found(train(FakeRun(tmp_path, 2), 24, calls).view())["call-site-mismatch"]
    assert (finding.ranks, finding.confidence) == ((0, 1), Confidence.POSSIBLE)


def test_the_end_that_it_hangs_is_its_consequence(tmp_path):
    run = train(FakeRun(tmp_path, 2), 16, once)
    run.rank(0).close()
    run.rank(1).page(wait_since_ns=run.rank(1).clock_ns)
    assert list(found(run.view(later=1000))) == ["call-site-mismatch"]


def by_rank(rank: int, step: int) -> list[Site]:
    """``if rank == 0: all_reduce(a) else: all_reduce(b)``, in every step."""
    return [GRADIENTS, EXTRA if rank == 0 else LOSS]


def now_and_then(rank: int, step: int) -> list[Site]:
    return by_rank(rank, step) if step % 5 == 0 else [GRADIENTS]


def in_turns(rank: int, step: int) -> list[Site]:
    """After an agreed start the ranks take the same lines in opposite order."""
    if step < 4:
        return [GRADIENTS]
    return [EXTRA, LOSS] if rank == 0 else [LOSS, EXTRA]


def from_autograd(rank: int, step: int) -> list[Site]:
    """Where one rank's backward runs on the calling thread and the other's on a thread of autograd."""
    return [AUTOGRAD if rank == 0 else GRADIENTS, LOSS]


def once_by_rank(rank: int, step: int) -> list[Site]:
    return [GRADIENTS, EXTRA if (rank, step) == (1, 8) else LOSS]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("calls", [usual, by_rank, now_and_then, in_turns, from_autograd, once_by_rank])
def test_what_is_written_that_way_is_quiet(tmp_path, calls, world):
    assert found(train(FakeRun(tmp_path, world), 40, calls).view()) == {}


def test_too_little_to_tell_is_quiet(tmp_path):
    assert found(train(FakeRun(tmp_path, 2), 10, once).view()) == {}


def test_wrapped_rings_of_a_healthy_run_are_quiet(tmp_path):
    """Rank 1 logs more events, so its ring begins later."""
    run = train(FakeRun(tmp_path, 2), 30, by_rank)
    for cut in (0, 1, 2, 3, 7):
        view = run.view()
        view._events[1] = view.events(1)[cut * 11 :]
        view._events[0] = view.events(0)[cut * 5 :]
        assert found(view) == {}


def test_a_ring_that_begins_after_the_call_is_quiet(tmp_path):
    """Who of them was right at the start can no longer be seen."""
    view = train(FakeRun(tmp_path, 2), 30, once).view()
    for rank in (0, 1):
        events = view.events(rank)
        view._events[rank] = events[events["step"] >= 10]
    assert found(view) == {}


def test_ranks_may_be_in_any_order(tmp_path):
    view = train(FakeRun(tmp_path, 4), 20, lambda rank, step: once(rank, step, odd=3)).view()
    first = found(view)["call-site-mismatch"]
    view.pages = np.ascontiguousarray(view.pages[::-1])
    view.__dict__.pop("ranks", None)
    assert found(view)["call-site-mismatch"] == first
