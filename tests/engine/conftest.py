"""Fixtures of the engine's tests."""

from model_fixtures import model, one_thread

__all__ = ["model", "one_thread"]
