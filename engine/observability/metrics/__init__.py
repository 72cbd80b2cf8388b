"""Prometheus metrics, with a catalogue of all their names."""
