"""Adapters with which other engines attach to a sidecar: each translates, and decides nothing that tiers decide."""
