"""What lies below the device: which block is in host memory and on disk, and what may be there."""
