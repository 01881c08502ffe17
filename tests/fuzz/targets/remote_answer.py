"""What a monitor, or somebody in its place, answers to ``/api/view``: decoded, judged and written down."""

from __future__ import annotations

import json as stdlib_json
import tempfile
from pathlib import Path

from dtobs.diagnose.analyse import diagnose
from dtobs.diagnose.monitors import evidence_of
from dtobs.errors import DtobsError
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.nodes.remote import read_answer
from dtobs.nodes.wire import encode_view
from dtobs.reports import html, json, text
from dtobs.testing.fake_run import FakeRun
from tests.fuzz.expect import one_line
from tests.fuzz.mutate import json_mutator


def _seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        run = FakeRun(Path(folder) / "run", 2, live=False, ranks_per_node=1)
        run.start_ns = 10**15
        run.steps(3)
        run.rank(0).phase("backward").collective("all_reduce", wait=True)
        run.rank(1).phase("data")
        gone = ProcessState(5, alive=False, exit_code=-9)
        view = run.view(later=90, processes={1: gone})
        view.pages["heartbeat_ns"], view.pages["clock_offset_ns"], view.root = view.now_ns, 0, Path("/run")
        finding = Finding("stuck-in-dataloader", "rank 1 waits", (1,), step=4, since_ns=1)
        answer = {
            **encode_view(view, [finding], last_steps=3),
            "node": 0,
            "leads": True,
            "stalled_seconds": 9.0,
        }
        return [stdlib_json.dumps(answer, default=str).encode()]


SEEDS = _seeds()


def check(data: bytes) -> bool:
    """A diagnosis in three forms, or one DtobsError. Returns whether it was read."""
    try:
        answers = [read_answer("http://127.0.0.1:1/api/view", body) for body in (data, SEEDS[0])]
        if answers[0][0].root.name != answers[1][0].root.name:
            answers = answers[:1]
        diagnosis = diagnose(evidence_of("http://127.0.0.1:1", answers))
    except DtobsError as error:
        one_line(error)
        return False
    json.render(diagnosis)
    text.render(diagnosis, 80)
    html.render(diagnosis)
    return True


mutate = json_mutator
