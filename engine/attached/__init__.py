"""Tiers below the device that are in a sidecar: what an engine needs to attach to one."""
