"""Adapters that connect other engines to kvtier's tiers.

An adapter only translates. Decisions about blocks belong in `tiers`.
"""
