"""OpenTelemetry tracing: spans of requests, and of spills, which copy blocks to a lower tier."""
