"""Ready-made configurations, by use."""
