"""Tiers below the device in a sidecar process: how an engine attaches to them and uses them."""
