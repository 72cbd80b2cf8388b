"""The tiers below the device: which block is in host memory and which on disk, and what is admitted there."""
