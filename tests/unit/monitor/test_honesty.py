"""What looks like a hang and is none: a minute-by-minute story each, told to the monitor's watchdog and detectors.

The clock is the test's; the hang timeout is the default, 60 s. Every story has a twin that is a hang and is called one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.detectors.hangs import detect
from dtobs.detectors.hangs.stall import last_movement_ns
from dtobs.host.process import ProcessState
from dtobs.monitor.watchdog import Watchdog
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.uncounted_time import Excused
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun

STACK = """Thread 0x00007f0000000001 (most recent call first):
  File "{file}", line 10 in run
  File "train.py", line 20 in train_step
"""


class Story:
    """Looks at a run that does nothing for a while."""

    def __init__(self, root: Path, world: int = 2) -> None:
        self.run = FakeRun(root / "run", world=world)
        self.watchdog = Watchdog(root / "captures", self._take)
        self.found: set[str] = set()
        self.at = "train.py"  #: the file that rank 1 is in

    def silence(self, seconds: float, **arguments: object) -> None:
        """Nothing is heard until `seconds` after the last movement; somebody looks now and then."""
        every = max(1.0, seconds / 6)
        for number in range(int(seconds / every) + 1):
            self.look(number * every, **arguments)
        self.look(seconds, **arguments)

    def _take(self, view: RunView, reason: str, *, previous: Capture | None = None) -> Capture:
        seen = RankCapture(1, ProcessState(1, alive=True, state="R"), stacks_text=STACK.format(file=self.at))
        return Capture(view.now_ns, "20260101", reason, {1: seen})

    def look(self, later: float, excused: float = 0.0, processes: dict[int, ProcessState] | None = None) -> None:
        view = self.run.view(later=later, processes=processes)
        # The fake writes with its own clock; what the real clock stamped is of no meaning here.
        view.pages["heartbeat_ns"] = view.pages["attach_ns"] = 0
        view.excused = (Excused(last_movement_ns(view), last_movement_ns(view) + round(excused * 1e9)),)
        view.capture = self.watchdog.capture
        self.watchdog.look(view)
        view.capture = self.watchdog.capture
        self.found |= {finding.code for finding in detect(view)}

    @property
    def quiet(self) -> bool:
        return not self.found and self.watchdog.captures == self.watchdog.early


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def waiting(story: Story, steps: int = 5) -> None:
    """Rank 0 waits in a collective that rank 1 has not come to."""
    story.run.steps(steps)
    story.run.rank(0).collective(wait=True)
    story.run.rank(1).page(step=steps)


def in_phase(name: str) -> Callable[[Story], None]:
    def begin(story: Story) -> None:
        waiting(story)
        story.run.rank(1).phase(name)

    return begin


def first_step(story: Story) -> None:
    for rank in story.run.ranks:
        rank.phase("forward")
    story.run.rank(0).collective(wait=True)


def declared(story: Story) -> None:
    waiting(story)
    story.run.rank(1).phase("evaluate").page(phase_allowance_ns=3600 * 10**9)


def slow_steps(story: Story) -> None:
    story.run.steps(100).steps(10, forward=25)
    story.run.rank(0).collective(wait=True)


@pytest.mark.parametrize(
    ("begin", "minutes"),
    [
        (in_phase("compile"), 25),
        (first_step, 4.5),
        (in_phase("validation"), 4.5),
        (in_phase("checkpoint"), 7.5),
        (in_phase("startup"), 7.5),
        (declared, 55),
        (slow_steps, 1.6),
    ],
    ids=["compile", "first step", "validation", "checkpoint", "start-up", "declared", "slow steps"],
)
def test_what_takes_long_and_is_no_stall(story: Story, begin: Callable[[Story], None], minutes: float):
    begin(story)
    story.silence(60 * minutes)
    assert story.quiet, story.found
    story.silence(60 * minutes * 3 + 600)
    assert not story.quiet, "the same without end is a hang"


def test_an_ordinary_silence_is_a_hang(story: Story):
    waiting(story)
    story.silence(59)
    assert story.quiet
    story.silence(62)
    assert story.found == {"rank-not-joined"}


@pytest.mark.parametrize(("learner", "quiet"), [(2, True), (3, False)], ids=["in the first steps", "later"])
def test_a_rank_that_does_no_steps_is_not_for_ever_in_its_first(story: Story, learner: int, quiet: bool):
    """An actor beside a learner: its hang was told after five times as long, and to nobody who asked before."""
    waiting(story, learner)
    story.run.rank(1).page(step=0, steps_done=0)
    story.silence(62)
    assert story.quiet == quiet
    assert story.found == (set() if quiet else {"rank-not-joined"})


def test_a_pause_that_the_program_declares(story: Story):
    waiting(story)
    story.run.rank(1).phase("debugging").page(phase_allowance_ns=10 * 365 * 24 * 3600 * 10**9)
    story.silence(12 * 3600, processes={1: ProcessState(1, alive=True, state="t")})
    assert story.quiet, story.found


def test_a_pause_by_a_file(story: Story):
    waiting(story)
    story.run.directory.paused.touch()
    traced = {1: ProcessState(1, alive=True, state="t")}
    story.silence(12 * 3600, processes=traced)
    assert story.quiet, story.found
    story.run.directory.paused.unlink()
    story.look(12 * 3600, processes=traced)
    assert story.found == {"rank-stopped"}


def test_the_file_of_a_run_that_is_dead_hides_nothing(tmp_path: Path):
    run = FakeRun(tmp_path / "run").steps(5)
    run.rank(0).collective(wait=True)
    run.directory.paused.touch()
    gone = {rank: ProcessState(rank, alive=False, exit_code=-9) for rank in (0, 1)}
    assert {finding.code for finding in detect(run.view(later=100, processes=gone))} == {"rank-dead"}


def test_all_ranks_suspended_for_less_than_the_limit(story: Story):
    waiting(story)
    stopped = {rank: ProcessState(rank, alive=True, state="T") for rank in (0, 1)}
    story.silence(55, processes=stopped)
    story.silence(110, excused=55)  # continued, and the step it was in takes its time
    assert story.quiet, story.found
    story.silence(120, excused=55)
    assert not story.quiet


def test_a_machine_that_stood_still_or_had_no_processor_to_give(story: Story):
    waiting(story)
    story.silence(3650, excused=3600)
    assert story.quiet, story.found
    story.silence(3700, excused=3600)
    assert story.found == {"rank-not-joined"}


def test_steps_ten_times_slower_for_a_while(story: Story):
    story.run.steps(200, forward=0.9)
    for _ in range(5):
        story.run.steps(1, forward=10)
        story.silence(9)
    assert story.quiet, story.found


def test_a_wall_clock_that_jumps(story: Story):
    waiting(story)
    for hours in (-5, 5):
        story.run.rank(1).page(clock_offset_ns=10**18 + hours * 3600 * 10**9)
        story.silence(55)
    assert story.quiet, story.found


def test_a_compilation_in_the_middle_of_a_run_that_no_phase_names(story: Story):
    waiting(story)
    story.at = "/venv/lib/python3.11/site-packages/torch/_inductor/graph.py"
    story.silence(600)
    assert story.found == set()
    assert story.watchdog.captures == story.watchdog.early + 1, "its stack has to be seen once"
    assert story.watchdog.stalled is None
    story.at = "/venv/lib/python3.11/site-packages/torch/_dynamo/eval_frame.py"  # compiled code that runs
    story.watchdog._taken_s -= 60
    story.look(660)
    story.look(661)
    assert story.found == {"rank-not-joined"}, "what compiled a minute ago may hang by now"
