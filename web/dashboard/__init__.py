"""The dashboard page, which shows live and over time from which tier tokens came and why others were computed."""
