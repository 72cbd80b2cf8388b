"""Metrics, records, explanations and traces of requests.

Code that decides what the engine does next does not belong here.
"""
