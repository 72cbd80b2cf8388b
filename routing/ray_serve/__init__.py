"""kvtier as an application of Ray Serve: `AsyncLLM` in replicas, the router's policy as their request router, a sidecar
on each node."""
