"""Tracing: OpenTelemetry spans of requests and of copies down, created when these have ended."""
