"""Faster code for models on a CPU: attention of single tokens without copying KV blocks, and packed linear layers.

Code that also runs on other devices does not belong here.
"""
