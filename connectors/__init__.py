"""Adapters that connect other engines to a sidecar. They translate; decisions about blocks belong to `tiers`."""
