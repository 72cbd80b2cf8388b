"""Ready-made configurations, by use case: engines, sidecars, routers, clusters, dashboards and alerts."""
