"""A real Prometheus and a real Alertmanager on free ports of the loopback interface, ended with the test."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import Launched, launch

REPOSITORY = Path(__file__).resolve().parents[2]
_ADDRESS = re.compile(r'address="?(127\.0\.0\.1:[1-9]\d*)')


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of `condition`; AssertionError with `what` when it stays false."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)
    return value


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str
    process: Launched

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result vector of an instant query; AssertionError with Prometheus' own words when it refuses it."""
        parameters = urllib.parse.urlencode({"query": expression})
        try:
            answer = get_json(f"{self.url}/api/v1/query?{parameters}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def get(self, path: str) -> Any:
        return get_json(f"{self.url}/api/v1/{path}")["data"]


@contextlib.contextmanager
def prometheus(program: str, folder: Path, targets: list[str], alertmanager: str | None = None) -> Iterator[Prometheus]:
    """Scrapes `targets` every second with our rules, evaluated every second."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(REPOSITORY / "alerts" / "dtobs.rules.yml")],
        "scrape_configs": [{"job_name": "dtobs", "static_configs": [{"targets": targets}]}],
    }
    if alertmanager is not None:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with launch(
        [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
    ) as process:
        url = _url(process)
        wait_for(lambda: _ready(f"{url}/-/ready"), "Prometheus being ready")
        yield Prometheus(url, process)


@contextlib.contextmanager
def alertmanager(program: str, folder: Path, webhook: str) -> Iterator[str]:
    """Sends every alert at once to `webhook`; yields HOST:PORT."""
    folder.mkdir(parents=True, exist_ok=True)
    route = {"receiver": "test", "group_wait": "0s", "group_interval": "1s", "group_by": ["alertname"]}
    receivers = [{"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": False}]}]
    (folder / "alertmanager.yml").write_text(json.dumps({"route": route, "receivers": receivers}))
    with launch(
        [
            program,
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            "--cluster.listen-address=",
        ]
    ) as process:
        url = _url(process)
        wait_for(lambda: _ready(f"{url}/-/ready"), "Alertmanager being ready")
        yield url.removeprefix("http://")


def _url(process: Launched) -> str:
    def found() -> re.Match[str] | None:
        assert process.process.poll() is None, process.stderr
        return _ADDRESS.search(process.stderr)

    return f"http://{wait_for(found, 'listening')[1]}"


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
