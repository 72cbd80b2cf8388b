"""kvtier as a Ray Serve application: `AsyncLLM` in replicas, the router's policy, and a sidecar on each node."""
