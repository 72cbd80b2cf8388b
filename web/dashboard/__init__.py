"""The dashboard: a web page that shows which tiers prompt tokens were loaded from, and why others were recomputed."""
