"""What a monitor, or somebody in its place, answers to ``/api/view``: copied, judged and written down."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from dtobs.diagnose.analyse import diagnose
from dtobs.diagnose.monitors import evidence_of
from dtobs.errors import DtobsError
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.nodes import remote
from dtobs.nodes.sharing import Question, answer_viewer
from dtobs.recording.capture import Capture, RankCapture
from dtobs.reports import html, json, text
from dtobs.testing.fake_run import FakeRun
from tests.fuzz.expect import one_line
from tests.fuzz.scratch import scratch
from tests.fuzz.targets.node_answer import mutate as mutate
from tests.fuzz.targets.node_answer import signed
from tests.unit.served import found

_FOLDER = scratch("remote")


def _seed(*, detail: bool) -> bytes:
    run = FakeRun(_FOLDER / f"there-{detail}" / "run", 2, live=False, ranks_per_node=1, start_ns=10**15)
    run.steps(3)
    run.rank(0).phase("backward").collective("all_reduce", wait=True)
    run.rank(1).phase("data")
    gone = ProcessState(5, alive=False, exit_code=-9)
    view = found(
        run.view(later=90, processes={1: gone}),
        Finding("stuck-in-dataloader", "rank 1 waits", (1,), step=4, since_ns=1),
    )
    view.capture = Capture(1, "2026", "stall", {1: RankCapture(1, gone, "free", "Thread 0x1")})
    return answer_viewer(view, Question(detail=detail))


SEEDS = [_seed(detail=True), _seed(detail=False)]


def check(data: bytes) -> bool:
    """A diagnosis in three forms, or one DtobsError. Returns whether it was read."""
    answers = iter([signed(data), SEEDS[0]])
    asked: Callable[..., bytes] = lambda url, question: next(answers, SEEDS[1])  # noqa: E731
    copy = remote.RunCopy(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    try:
        with patch.object(remote, "_ask", asked):
            diagnosis = diagnose(evidence_of("http://127.0.0.1:1", copy))
    except DtobsError as error:
        one_line(error)
        return False
    json.render(diagnosis)
    text.render(diagnosis, 80)
    html.render(diagnosis)
    return True
