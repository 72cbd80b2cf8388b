"""kvtier as a Ray Serve application: replicas with `AsyncLLM`, the policy of `kvtier route`, a sidecar on each node."""
