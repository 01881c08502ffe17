"""Bring dashboards and alerts into Grafana and Prometheus.

`export` writes the dashboard, the alert rules with their promtool tests, and the runbooks to a folder. `push` sends
folder, data source and dashboard to a Grafana; pushing again replaces them. The login is taken from
DTOBS_GRAFANA_TOKEN, or DTOBS_GRAFANA_USER and DTOBS_GRAFANA_PASSWORD, so that it is never on a command line.

example:
  dtobs grafana export monitoring
  DTOBS_GRAFANA_TOKEN=… dtobs grafana push --url http://127.0.0.1:3000 --prometheus http://127.0.0.1:9090
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from dtobs.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="export|push")
    export = actions.add_parser("export", help="write dashboards, rules and runbooks to a folder")
    export.add_argument("folder", type=Path, metavar="FOLDER")
    push = actions.add_parser("push", help="send them to a Grafana")
    push.add_argument(
        "--url", default=os.environ.get("DTOBS_GRAFANA_URL", ""), help="of the Grafana (default: DTOBS_GRAFANA_URL)"
    )
    push.add_argument(
        "--prometheus", metavar="URL", help="make a data source for this Prometheus, as Grafana reaches it"
    )
    push.add_argument(
        "--alerts",
        action="store_true",
        help="send the alerts as well, to be evaluated by Grafana on that data source (needs --prometheus)",
    )
    for action in (export, push):
        action.add_argument("--json", action="store_true", help="say what was done as JSON")


def run(args: argparse.Namespace) -> int:
    """Do it; returns 0."""
    done = _export(args.folder) if args.action == "export" else _push(args)
    if args.json:
        print(json.dumps(done))
    else:
        print(done["summary"])
    return 0


def _export(folder: Path) -> dict[str, Any]:
    from dtobs.exporters.installed_files import export

    written = export(folder)
    return {"summary": f"{len(written)} files in {folder}", "files": [str(path) for path in written]}


def _push(args: argparse.Namespace) -> dict[str, Any]:
    from dtobs.exporters.grafana_push import Grafana, Login

    if not args.url:
        raise UsageError("which Grafana? Give --url or set DTOBS_GRAFANA_URL")
    if args.alerts and not args.prometheus:
        raise UsageError("--alerts needs --prometheus: the rules are evaluated on that data source")
    variables = (os.environ.get(f"DTOBS_GRAFANA_{name}", "") for name in ("TOKEN", "USER", "PASSWORD"))
    server = Grafana(args.url, Login(*variables))
    server.folder()
    if args.prometheus:
        server.datasource(args.prometheus)
    address = server.dashboard()
    count = server.alerts() if args.alerts else 0
    alerts = f", {count} alerts" if count else ""
    return {"summary": f"dashboard at {address}{alerts}", "dashboard": address, "alerts": count}
