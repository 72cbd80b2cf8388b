"""Promotion: loading the blocks of a hit (a cached prefix) from the lower tiers to the device."""
