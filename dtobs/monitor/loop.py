"""The monitor's loop: read the pages, notice deaths and stalls, run the detectors on a budget, end with the ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from dtobs.detectors import is_over, run_detectors
from dtobs.detectors.hangs.apart import standing_apart
from dtobs.detectors.hangs.situation import interpret
from dtobs.detectors.hangs.stall import finished, last_movement_ns, stall, stood_until_ns
from dtobs.errors import DtobsError, RecordingDisabled
from dtobs.events import RankState
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.monitor_stats import MonitorStats
from dtobs.exporters.totals import StepTotals
from dtobs.findings import Finding, Trait
from dtobs.host.process import ProcessState, boot_id, cores_used
from dtobs.monitor.address import looked
from dtobs.monitor.cluster_capture import ClusterCapture, NodeCapture
from dtobs.monitor.console import Console
from dtobs.monitor.devices import Devices
from dtobs.monitor.exits import ProcessWatch
from dtobs.monitor.journal import Journal
from dtobs.monitor.leftovers import remove_socket_folder
from dtobs.monitor.lines import AskForLines
from dtobs.monitor.on_hang import OnHang, hang_of
from dtobs.monitor.ranks import NodeRanks
from dtobs.monitor.shared_files import SharedFiles
from dtobs.monitor.uncounted_time import Excuses
from dtobs.monitor.watchdog import Watchdog
from dtobs.nodes.cluster import Cluster
from dtobs.recording.journal import Entry, hung_since
from dtobs.recording.meta import read_meta
from dtobs.recording.policy import Policy
from dtobs.recording.rank import END_SIGNALS
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.uncounted_time import read_excused, write_excused
from dtobs.recording.view import RunView, load_run
from dtobs.recording.watched import LastPass
from dtobs.timeline.whatif import RecentWhatIf

T = TypeVar("T")

log = logging.getLogger("dtobs.monitor")


@dataclass(frozen=True)
class Timing:
    """How often and how long; seconds."""

    tick: float = 1.0
    tick_developing: float = 0.25  #: while a stall develops or ranks die
    quiet: float = 1.0  #: nothing moved for this long: ask the watchdog
    pass_min: float = 2.0  #: between two passes of the detectors
    pass_max: float = 10.0
    budget: float = 0.007  #: share of one core that the detectors may take between the two
    join: float = 60.0  #: for the first rank to appear
    told: float = 0.5  #: after a rank that somebody told to end, for the others to end if they were told as well
    clean_end: float = 2.0  #: after the last rank closed its recording, for its process to end
    last_scrape: float = 60.0  #: after a fault, for the metrics to be read once more, where somebody reads them
    restart: float = 30.0  #: after the last rank died under an agent with restarts left, for a new attempt


class Monitor:
    """One node's monitor. `run` returns when the ranks are gone or after `stop`."""

    def __init__(
        self,
        run: RunDirectory,
        node: int,
        *,
        timing: Timing | None = None,
        detect: Callable[[RunView], list[Finding]] = run_detectors,
        on_hang: Policy | None = None,
    ) -> None:
        self.run_dir, self.node = run, node
        self.timing = timing or Timing()
        self.cluster: Cluster | None = None  #: of a job on several nodes
        self._led = self.leads
        self.stats = MonitorStats()
        self.watch = ProcessWatch(run.exits(node))
        self.ranks = NodeRanks(run.pages(node), self.watch)
        self.watchdog = Watchdog(run.captures)
        self.journal = Journal(run.findings, writes=self.leads)
        self.console = Console(run.root)
        self.excuses = Excuses()
        self.on_hang = OnHang(on_hang or Policy(), run, node, lambda text: self.fail("on-hang", text))
        self.shared_files = SharedFiles(run.shared_files(node), run.root)
        self.devices = Devices(run, node)
        self.lines = AskForLines(run)
        self.damaged: list[str] = []  #: what the last pass could not read
        self.totals = StepTotals()
        self._simulate = RecentWhatIf()
        self._lock = threading.Lock()  # the run is read by the loop and by requests
        self._detect = detect
        self._stop = threading.Event()
        self._next_pass = 0.0
        self._idle_since: float | None = None
        self._closed = 0  # ranks that had closed their recording at the last look
        self._scraped: float | None = None
        self._scrapes = 0
        self._said: set[str] = set()
        self._last_view: RunView | None = None
        self._states: dict[int, ProcessState] = {}
        self._watched_s = 0.0
        self._cores: dict[int, float] = {}
        self._starter = os.getppid()
        self._folder = run.identity()
        self._began = time.monotonic()

    @property
    def leads(self) -> bool:
        """Whether this monitor judges the whole run: the lowest node does that it can reach or that records here."""
        if self.cluster is not None:
            return self.cluster.leads
        nodes = self.run_dir.nodes()
        return not nodes or self.node <= nodes[0]

    def join(self, cluster: Cluster, captures: NodeCapture) -> None:
        """Watch together with the monitors of the other nodes."""
        self.cluster = cluster
        self.watchdog.take = ClusterCapture(cluster, captures).take

    def stop(self) -> None:
        """End after the present tick; may be called from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Tick until the ranks are gone or `stop` is called."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.watch.also(wake)
        try:
            pause = 0.0
            while not self._stop.is_set():
                self.excuses.asleep(pause)
                ended = self.watch.wait(pause)
                self.excuses.awake()
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 64)  # what a signal wrote has done its work
                for watched, state in ended:
                    log.info("rank %d (process %d): %s", watched.rank, watched.pid, state.ending)
                    told = -(state.exit_code or 0) in END_SIGNALS
                    self._next_pass = time.monotonic() + (self.timing.told if told else 0.0)
                if self._stop.is_set():
                    break
                pause = self.tick()
                if pause < 0:
                    break
            self.finish()
        finally:
            signal.set_wakeup_fd(before)
            os.close(wake)
            os.close(waker)

    def tick(self) -> float:
        """One look; returns the seconds until the next, negative when there is nothing left to watch."""
        self.stats.ticks += 1
        if self._removed():
            log.warning("the run directory %s was removed: nothing is watched any more", self.run_dir.root)
            return -1.0
        attempt = self.ranks.attempt
        self.ranks.read()
        if self.ranks.error:
            self._say(self.ranks.error)
        if self.ranks.attempt != attempt:
            log.info("attempt %d, %d ranks here", self.ranks.attempt, len(self.ranks.watched))
        if self.ranks.attempt != self.journal.attempt:
            self.journal.restart(self.ranks.attempt, time.monotonic_ns())
        self._take_over()
        now = time.monotonic()
        developing = 0.0
        quiet = self.ranks.quiet_seconds >= self.timing.quiet
        if self.ranks.any_at_work() and (quiet or self.watchdog.stalled is not None):  # also to see a stall end
            developing = self._ask_watchdog()
        self._look_around()
        if self.ranks.closed() > self._closed:
            self._next_pass = 0.0  # rank 0 waits for this pass before it says what was found
        self._closed = self.ranks.closed()
        if self.ranks.watched and now >= self._next_pass and self._settled():
            self.detect()
        self._flush()
        if self._over(now):
            return -1.0
        busy = developing > 0.5 or self._idle_since is not None or self.ranks.any_gone() or self._closed > 0
        return self.timing.tick_developing if busy else self.timing.tick

    def _look_around(self) -> None:
        """See which files ranks write over together, and how their devices are."""
        self._safely("files", "the ranks' files cannot be looked at", partial(self.shared_files.look, self.ranks))
        self._safely("devices", "the ranks' devices cannot be looked at", partial(self.devices.look, self.ranks))

    def _safely(self, part: str, text: str, act: Callable[[], None]) -> None:
        """Do what the monitor can do without: a failure is counted and said, and the monitor goes on."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(part, f"{text}: {type(error).__name__}: {error}")

    def _settled(self) -> bool:
        """Whether the other nodes, if there are any, have told their part in what happens."""
        stalled = self.watchdog.stalled is not None
        return self.cluster is None or self.cluster.settled(self.ranks.failure_signature(), stalled=stalled)

    def _take_over(self) -> None:
        """Go on with the findings where the monitor that led is gone, and leave them to it when it is back."""
        if self.cluster is None or self.leads == self._led:
            return
        self._led = not self._led
        found = self.cluster.told_findings() if self._led else []
        self.journal.lead(found, time.monotonic_ns(), writes=self._led)
        log.info("this node's monitor %s", "leads now" if self._led else "follows another one now")

    def detect(self) -> None:
        """One pass of the detectors over the whole run."""
        begin = time.process_time()
        try:
            view = self.look()
            if self.watchdog.stalled is None and self.ranks.any_at_work() and stall(view) is not None:
                # It began before this monitor did, or since the watchdog was asked.
                self._watch(view, self.watchdog.look)
                view = self.look()
        except DtobsError as error:
            self.fail("recording", str(error))
            return
        self._count_steps(view)
        found: list[Finding] = []
        if self.leads and len(view.pages):
            view.asked = self.watchdog.standing is not None
            try:
                found = self._detect(view)
            except Exception as error:  # noqa: BLE001 - counted and said; a detector must not end the monitor
                self.fail("detectors", f"the detectors failed: {type(error).__name__}: {error}")
            for line in view.damaged[len(self.damaged) :]:
                if " failed: " in line:
                    self.fail("detectors", line)
            self.damaged = list(view.damaged)
            moving = self.watchdog.stalled is None and not self.ranks.any_gone()
            alarmed = {f.key for f in self.journal.findings}  # what needed no standstill is no less for one
            found = [replace(f, early=False) if f.key in alarmed else f for f in found]
            early, found = [f for f in found if f.early], [f for f in found if not f.early]
            if not (early and self._ending(view)):  # a rank that is being ended shows no standstill any more
                self.journal.standing(early, time.monotonic_ns())
            changes = self.journal.update(
                found,
                time.monotonic_ns(),
                may_clear=moving,
                over=lambda finding, found_ns: is_over(view, finding, found_ns, found),
                done=lambda old, found_ns: bool(old.traits & Trait.HANG) and finished(view, old, found_ns),
                until=lambda old: stood_until_ns(view, old) if old.traits & Trait.HANG else 0,
            )
            for entry in changes:
                log.info("%s %s: %s", entry.event, entry.finding.code, entry.finding.summary)
                self._tell(entry)
            self._look_apart(view, found)
            if moving:
                self._safely("lines", "nobody can be asked", partial(self.lines.consider, view, self.journal.findings))
            if self._acts_on(found):
                self.journal.flush()  # what follows is worth knowing the reason of
        self._enter_pass(view)
        cost = time.process_time() - begin
        self.stats.passes += 1
        self.stats.pass_seconds = cost
        pause = min(self.timing.pass_max, max(self.timing.pass_min, cost / self.timing.budget))
        if self.ranks.any_gone():
            pause = min(pause, 1.0)  # what follows a death follows quickly
        elif self.watchdog.stalled is None and hung_since(self.journal.findings):
            pause = min(pause, max(self.timing.pass_min, 10 * cost))  # a hang that is over is soon told to be over
        self._next_pass = time.monotonic() + pause

    def _enter_pass(self, view: RunView) -> None:
        """Say for the run's last line up to when the detectors have looked, once a rank has closed its recording."""
        if not (self.leads and self._closed):
            return
        states = view.pages["state"]
        whole = len(states) >= view.world_size and bool((states == RankState.CLOSED).all())
        try:
            looked(self.run_dir, self.node, LastPass(self.ranks.attempt, view.now_ns, whole))
        except (RecordingDisabled, OSError) as error:
            self._say(str(error))

    def _ending(self, view: RunView) -> bool:
        """Whether a rank is gone or was told to end."""
        return self.ranks.any_gone() or any(view.signals(rank) & END_SIGNALS for rank in view.ranks)

    def _tell(self, entry: Entry) -> None:
        """Say on the training's console what a person there has to know."""
        say = partial(self.console.found, entry.finding, self.ranks.watched)
        if entry.event != "found":
            ended = not self.ranks.any_at_work()
            say = partial(self.console.cleared, entry.finding, entry.lost_seconds, self.ranks.watched, run_ended=ended)
        self._safely("console", "the console cannot be written", say)

    def _acts_on(self, found: list[Finding]) -> bool:
        """Let the run's policy act on a hang; whether it does."""
        states = self.ranks.processes()
        ranks = [(watched, states[watched.rank]) for watched in self.ranks.watched]
        dog = self.watchdog
        hang = hang_of(dog.stalled or dog.apart, dog.capture, self.run_dir.captures, self.ranks.attempt, ranks)
        return self.on_hang.consider(found, hang)

    def look(self) -> RunView:
        """The run now, with what is known of the processes and, during a stall, its capture. Raises TargetError."""
        with self._lock:
            view = load_run(
                self.run_dir.root,
                processes=self._processes(),
                previous=self._last_view,
                with_capture=False,
            )
            view.capture = self.watchdog.capture
            view.cores = self._cores_used(view.processes)
            if self.cluster is not None:
                view.contacts = self.cluster.contacts()
            self._excuse(view)
            self._last_view = view
            return view

    def _cores_used(self, states: dict[int, ProcessState]) -> dict[int, float]:
        """How many cores each rank has used since a while ago."""
        now = time.monotonic()
        seconds = now - self._watched_s
        if seconds >= self.timing.quiet:
            self._cores = cores_used(self._states, states, seconds)
            self._states, self._watched_s = states, now
        return self._cores

    def _processes(self) -> dict[int, ProcessState]:
        others = self.cluster.processes() if self.cluster is not None else {}
        return others | self.ranks.processes()

    def _excuse(self, view: RunView) -> None:
        """Tell what does not count towards a stall, also to others who look at the files."""
        found = self.excuses.observe(self.ranks.processes(), last_movement_ns(view))
        path = self.run_dir.excused(self.node)
        if found != read_excused(path, boot_id()):
            try:
                write_excused(path, boot_id(), found)
            except RecordingDisabled as error:
                self._say(str(error))
        others = (n for n in self.run_dir.nodes() if n != self.node)
        view.excused = (
            *found,
            *(e for n in others for e in read_excused(self.run_dir.excused(n), boot_id())),
        )

    def export(self) -> MonitorSnapshot:
        """One look for the exporters; may be called from any thread. Raises TargetError."""
        view = self.look()
        self._count_steps(view)
        stalled = self.watchdog.stalled
        return MonitorSnapshot(
            view,
            self.node,
            self.leads,
            self.journal.findings,
            self.totals,
            self.stats,
            stalled.seconds if stalled is not None else 0.0,
            self._simulate,
        )

    def scrape(self) -> MonitorSnapshot:
        """`export` for a reader that comes again and again: the monitor lets it see how the run ends."""
        look = self.export()
        self._scraped = time.monotonic()
        self._scrapes += 1
        return look

    def fail(self, part: str, text: str) -> None:
        """Count a failure of a part of the monitor and say it once."""
        self.stats.count(part)
        self._say(text)

    def _count_steps(self, view: RunView) -> None:
        with self._lock:
            here = [int(r) for r in view.pages["rank"][view.pages["node"] == self.node]]
            self.totals.update(view, here, hung_since(self.journal.findings))

    def finish(self) -> None:
        """The last words: a final pass, and everything that was not written yet."""
        self.on_hang.finish()
        if not self._removed():  # what is written would make it anew
            if self.ranks.watched:
                self.ranks.read()
                self.detect()
            self._flush()
            self._remove_leftovers()
        self.ranks.close()
        self.watch.close()

    def _removed(self) -> bool:
        """Whether somebody has removed the run directory, or put another one in its place."""
        return self._folder is not None and self.run_dir.identity() != self._folder

    def _remove_leftovers(self) -> None:
        """A rank that was killed could not remove its socket."""
        for watched in self.watch.gone():
            server = read_meta(self.run_dir.meta(watched.rank, watched.attempt)).process.get("worker_server")
            try:
                if isinstance(server, str) and remove_socket_folder(server):
                    log.info("removed the socket that rank %d left in %s", watched.rank, server)
            except OSError as error:
                self.fail("leftovers", f"{server} cannot be removed: {error.strerror}")

    def _ask_watchdog(self) -> float:
        try:
            view = self.look()
        except DtobsError as error:
            self.fail("recording", str(error))
            return 0.0
        return self._watch(view, self.watchdog.look)

    def _look_apart(self, view: RunView, found: list[Finding]) -> None:
        """Let the watchdog look at ranks that were found to stand still while others go on."""
        dog = self.watchdog
        hung = dog.stalled is None and any(finding.traits & Trait.HANG for finding in found)
        if hung or dog.apart is not None:
            apart = standing_apart(interpret(view)) if hung else None
            self._watch(apart, dog.look_apart)

    def _watch(self, view: T, look: Callable[[T], float | None]) -> float:
        """Let the watchdog judge; returns how much of the threshold has passed."""
        before = self.watchdog.captures
        try:
            share = look(view) or 0.0
        except Exception as error:  # noqa: BLE001 - counted and said; the monitor goes on
            self.fail("watchdog", f"the watchdog failed: {type(error).__name__}: {error}")
            return 0.0
        for problem in self.watchdog.problems:
            self.fail("capture", problem)
        self.watchdog.problems.clear()
        if self.watchdog.captures > before:
            self.stats.captures = self.watchdog.captures
            self._next_pass = 0.0  # the detectors want to see it
            assert self.watchdog.capture is not None
            log.info("captured: %s", self.watchdog.capture.reason)
        return share

    def _over(self, now: float) -> bool:
        """Whether nothing is left to watch, patience included."""
        if not self.ranks.watched:
            started = now - self._began
            orphan = os.getppid() != self._starter and started > self.timing.clean_end
            if started < self.timing.join and not orphan:
                return False
            log.info("no rank has recorded in %s: ending", self.run_dir.node(self.node))
            return True
        if self.ranks.any_at_work():
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
            self._next_pass = 0.0
        idle = now - self._idle_since
        if self.ranks.ended_well():
            ended = not self.ranks.any_alive() or idle > self.timing.clean_end
        elif self.ranks.may_restart():
            ended = idle > self.timing.restart
        else:
            ended = idle > 1.0
        if ended and self.cluster is not None and not self.cluster.may_end(idle):
            return False
        return ended and not self._awaits_scrape(idle)

    def _awaits_scrape(self, idle: float) -> bool:
        """Whether somebody who reads the metrics has yet to see how the run ended."""
        often = self._scrapes >= 2  # somebody looks again and again, and would take a silence for a death
        if self._scraped is None or not (self.journal.findings or often) or idle > self.timing.last_scrape:
            return False
        assert self._idle_since is not None
        return self._scraped < self._idle_since + 1.0  # the passes of the first second see the whole ending

    def _flush(self) -> None:
        for part, written in (("exits", self.watch.flush()), ("journal", self.journal.flush())):
            if not written:
                self.fail(part, f"{self.run_dir.root} cannot be written: {part} kept in memory")

    def _say(self, text: str) -> None:
        """Log a problem once, however often it comes."""
        if text not in self._said and len(self._said) < 1000:
            self._said.add(text)
            log.warning("%s", text)
