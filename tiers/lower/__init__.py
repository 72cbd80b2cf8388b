"""The tiers below the device: the index of host memory and disk, copies between them, and admission to disk."""
