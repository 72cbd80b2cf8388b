"""Promotion: copies of a hit's blocks from the lower tiers to the device."""
