"""Sampled reuse distances, and estimates of the hit ratio that larger or smaller tiers would have."""
