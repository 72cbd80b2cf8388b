"""The sidecar's HTTP server: its state for people and for machines, and the operators' actions."""
