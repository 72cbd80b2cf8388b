"""Metrics: what Prometheus is told, every name in one place."""
