"""Sends the folder, the data source, the dashboard and the alerts to a Grafana, by grafana-api (extra ``grafana``).

Everything has a fixed uid and replaces its older version: pushing twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dtobs.errors import DependencyMissing, ServiceError, UsageError
from dtobs.exporters.alerts import Alert, alerts
from dtobs.exporters.grafana import run_overview

FOLDER_UID = "dtobs"
DATASOURCE_UID = "dtobs-prometheus"
_GROUP = "dtobs"


@dataclass(frozen=True)
class Login:
    """A service account's token, or a user with a password."""

    token: str = ""
    user: str = ""
    password: str = ""


class Grafana:
    """One Grafana server. Raises DependencyMissing without grafana-api, UsageError for an address or login that
    cannot be right; its methods raise ServiceError.
    """

    def __init__(self, url: str, login: Login, timeout_seconds: float = 15.0) -> None:
        try:
            from grafana_api.grafana_face import GrafanaFace
        except ModuleNotFoundError:
            raise DependencyMissing("grafana-api", "grafana") from None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not the address of a Grafana; give something like http://127.0.0.1:3000")
        if not login.token and not (login.user and login.password):
            raise UsageError(
                "a Grafana wants to know who we are: set DTOBS_GRAFANA_TOKEN to a service account's token, "
                "or DTOBS_GRAFANA_USER and DTOBS_GRAFANA_PASSWORD"
            )
        path = parts.path.strip("/")
        self.url = url.rstrip("/")
        self._face = GrafanaFace(
            auth=login.token or (login.user, login.password),
            host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
            port=parts.port,
            url_path_prefix=f"{path}/" if path else "",
            protocol=parts.scheme,
            timeout=timeout_seconds,
        )

    def folder(self) -> None:
        """Make the folder, unless it is there."""
        if self._call(lambda: self._face.folder.get_folder(FOLDER_UID), missing_ok=True) is None:
            self._call(lambda: self._face.folder.create_folder("dtobs", FOLDER_UID))

    def datasource(self, prometheus_url: str) -> None:
        """Make the data source for a Prometheus, or point the one that is there to it."""
        value = {
            "uid": DATASOURCE_UID,
            "name": "dtobs Prometheus",
            "type": "prometheus",
            "access": "proxy",
            "url": prometheus_url,
            "isDefault": False,
            "jsonData": {"httpMethod": "POST"},
        }
        api = self._face.api  # grafana-api has no data sources by uid
        path = f"/datasources/uid/{DATASOURCE_UID}"
        if self._call(lambda: api.GET(path), missing_ok=True) is None:
            self._call(lambda: self._face.datasource.create_datasource(value))
        else:
            self._call(lambda: api.PUT(path, json=value))

    def dashboard(self) -> str:
        """Send the dashboard; returns its address."""
        body = {
            "dashboard": {**run_overview(), "id": None},
            "folderUid": FOLDER_UID,
            "overwrite": True,
            "message": "dtobs grafana push",
        }
        answer = self._call(lambda: self._face.dashboard.update_dashboard(body))
        path = answer.get("url", "") if isinstance(answer, dict) else ""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{path}"

    def alerts(self) -> int:
        """Send every alert as a rule that Grafana itself evaluates on our data source; returns how many."""
        rules = [_rule(alert) for alert in alerts()]
        body = {"title": _GROUP, "folderUid": FOLDER_UID, "interval": 60, "rules": rules}
        path = f"/v1/provisioning/folder/{FOLDER_UID}/rule-groups/{_GROUP}"
        # Without this header the rules could not be edited in Grafana.
        headers = {"X-Disable-Provenance": "true"}
        self._call(lambda: self._face.api.PUT(path, json=body, headers=headers))
        return len(rules)

    def _call(self, request: Callable[[], Any], *, missing_ok: bool = False) -> Any:
        """Ask, turning what can go wrong into one clear line; None for a 404 that is fine."""
        from grafana_api.grafana_api import GrafanaException
        from requests import RequestException

        try:
            return request()
        except GrafanaException as error:
            if missing_ok and error.status_code == 404:
                return None
            hint = {401: " (the token or password is wrong)", 403: " (the account needs the role Editor or Admin)"}
            raise ServiceError(
                f"Grafana at {self.url} refused: {error.message}{hint.get(error.status_code, '')}"
            ) from error
        except (RequestException, ValueError) as error:  # no connection, or an answer that is not JSON
            raise ServiceError(f"no Grafana answers at {self.url}: {error}") from error


def _rule(alert: Alert) -> dict[str, Any]:
    """An alert in the form of Grafana's provisioning API: the query, then "any series it returns fires"."""
    query = {"refId": "A", "expr": alert.expr, "instant": True, "range": False, "editorMode": "code"}
    threshold = {
        "refId": "B",
        "type": "threshold",
        "expression": "A",
        "conditions": [{"type": "query", "evaluator": {"type": "gt", "params": [-1]}}],
    }
    window = {"from": 600, "to": 0}
    return {
        "uid": f"dtobs-{alert.runbook}"[:40],
        "title": alert.name,
        "folderUID": FOLDER_UID,
        "ruleGroup": _GROUP,
        "orgID": 1,
        "condition": "B",
        "data": [
            {"refId": "A", "datasourceUid": DATASOURCE_UID, "relativeTimeRange": window, "model": query},
            {"refId": "B", "datasourceUid": "__expr__", "relativeTimeRange": window, "model": threshold},
        ],
        "for": alert.wait,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            # Grafana's templates have no query(): the ranks are on the dashboard.
            "description": f"{alert.summary}, in run {{{{ $labels.run }}}}. {alert.advice}",
            "runbook": f"alerts/runbooks/{alert.runbook}.md",
        },
    }
