"""Reuse distances by a sample: what the tiers would find if they were larger or smaller."""
