"""The sidecar: the tiers below the device in a process of their own, to which engines attach. No CUDA, no torch."""
