"""The reference page of the metrics, generated from the table."""

from __future__ import annotations

from dtobs.exporters.metrics import TABLE

_HEAD = """# Metrics

Generated from the table in `metrics.py` by `python -m dtobs.exporters.generate`; do not edit.

Every node's monitor serves them at the address in `monitor.json`, path `/metrics` (needs the extra `prometheus`), and
pushes the same over OTLP when `OTEL_EXPORTER_OTLP_ENDPOINT` is set (extra `otel`). Every metric has the label `run`,
the name of the run directory. Values of a rank come from its node's monitor, values of the run from node 0's.

A scrape configuration for a monitor started with `dtobs monitor RUN --listen 127.0.0.1:9400`:

```yaml
scrape_configs:
  - job_name: dtobs
    scrape_interval: 15s
    static_configs:
      - targets: ["127.0.0.1:9400"]
```

| metric | type | labels | what | from |
| --- | --- | --- | --- | --- |
"""


def reference_page() -> str:
    """``dtobs/exporters/README.md``."""
    rows = [
        f"| `{m.exposed}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} | {m.origin} |"
        for m in TABLE
    ]
    return _HEAD + "\n".join(rows) + "\n"
