"""How long the reporter waits, and for what, on a fake board and a fake clock: it always ends."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dtobs.preflight.judge import judge
from dtobs.preflight.model import Hello, PreflightEvidence
from dtobs.preflight.rank import Options
from dtobs.preflight.reporter import Reporter


class Board:
    """Notes, and seconds."""

    def __init__(self, world: int = 2) -> None:
        self.now = 100.0
        self.notes: dict[tuple[str, int], Any] = {}
        self.dead: dict[int, str] = {}
        self.evidence = PreflightEvidence(world, dict.fromkeys(range(world), ""), 1)
        options = Options(join_seconds=20, seconds=100, silent_seconds=15)
        self.reporter = Reporter(self, self.evidence, options, lambda: self.dead, lambda: self.now)  # type: ignore[arg-type]

    def read_all(self, kind: str, world: int) -> dict[int, Any]:
        return {who: note for (name, who), note in self.notes.items() if name == kind and who < world}

    def arrive(self, *ranks: int) -> None:
        for rank in ranks:
            self.notes["hello", rank] = asdict(Hello(rank, 0, rank, f"host{rank}", 1, "10.0.0.1", 40_000))

    def beat(self, *ranks: int, stage: str = "values: all_reduce") -> None:
        for rank in ranks:
            self.notes["beat", rank] = [self.now, stage]

    def ends_after(self, *beating: int, at_most: int = 1000) -> int:
        """Seconds until the reporter has seen enough, with a sign of life of `beating` in each."""
        for second in range(at_most):
            self.beat(*beating)
            if self.reporter.look():
                self.reporter.gather()
                return second
            self.now += 1
        raise AssertionError("it never ends")

    def checks(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(problem.code, problem.ranks) for problem in judge(self.evidence, "gloo")]


def test_it_ends_when_everybody_has():
    board = Board()
    board.arrive(0, 1)
    board.notes["done", 0] = board.notes["done", 1] = True
    assert board.ends_after(0, 1) == 0
    assert board.checks() == []


def test_a_rank_that_falls_silent():
    board = Board()
    board.arrive(0, 1)
    board.beat(1)
    assert board.ends_after(0) == 16
    assert board.checks() == [("rank-silent", (1,))]


def test_nobody_falls_silent_and_nothing_ends():
    board = Board()
    board.arrive(0, 1)
    assert board.ends_after(0, 1) == 101
    assert board.checks() == [("not-finished", (0, 1))]


def test_a_rank_that_never_arrives_is_waited_for_from_the_first_arrival_on():
    board = Board()
    for _ in range(30):
        assert not board.reporter.look(), "torch may take long to load"
        board.now += 1
    board.arrive(0)
    assert board.ends_after(0) == 24
    assert board.checks() == [("rendezvous-incomplete", (1,))]


def test_nobody_ever_arrives():
    board = Board()
    assert board.ends_after() == 101
    assert board.checks() == [("rendezvous-incomplete", (0, 1))]


def test_an_error_gives_the_others_a_moment_to_say_theirs():
    board = Board()
    board.arrive(0, 1)
    board.notes["error", 1] = "links: rank 0 with rank 1: RuntimeError: Connection reset"
    assert board.ends_after(0, 1) == 4
    assert board.checks() == [("not-finished", (0, 1))]


def test_a_process_that_died_is_the_cause_and_not_those_that_lost_it():
    board = Board()
    board.arrive(0, 1)
    board.dead = {1: "was killed by signal 9"}
    board.notes["error", 0] = "links: rank 0 with rank 1: RuntimeError: Connection reset"
    assert board.ends_after(0) == 4
    assert board.checks() == [("rank-died", (1,))]
