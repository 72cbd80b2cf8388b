"""The disk tier below an engine that has host memory of its own. Adapters for particular engines do not belong here."""
