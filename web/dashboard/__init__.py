"""The dashboard: a web page that shows how many prompt tokens came from each tier, and why others were recomputed."""
