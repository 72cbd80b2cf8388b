"""HTTP beside the sidecar: how it is, for people and for machines, and what operators may have it do."""
