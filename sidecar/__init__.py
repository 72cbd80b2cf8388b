"""The tiers below the device as a process of their own, to which engines attach. No CUDA, no torch."""
