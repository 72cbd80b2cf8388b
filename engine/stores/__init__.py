"""The disk store and the remote store of an engine, built from its configuration.

How a store keeps bytes is decided in `store/`.
"""
