"""The dashboard: a page that shows live and over time where tokens came from, and why."""
