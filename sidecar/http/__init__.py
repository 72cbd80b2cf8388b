"""The sidecar's HTTP server: metrics, a dashboard, the sidecar's state as JSON, and actions for operators."""
