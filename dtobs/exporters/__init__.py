"""A RunView as metrics: one table (`metrics.TABLE`) for /metrics, OTLP, dashboards, alerts and the reference page."""
