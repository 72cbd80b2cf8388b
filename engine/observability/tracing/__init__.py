"""Tracing: spans of requests for OpenTelemetry, made once a request has ended, or a copy down."""
