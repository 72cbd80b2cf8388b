"""Fixtures of the tests of web."""

from model_fixtures import model, one_thread

__all__ = ["model", "one_thread"]
