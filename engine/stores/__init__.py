"""The disk store and the remote store of an engine, opened as its configuration says.

How a store keeps bytes is in `store/`.
"""
