"""The dashboard page, which shows which tiers prompt tokens came from, and why other tokens were computed."""
