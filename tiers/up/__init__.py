"""The way up: what a hit brings to the device, from host memory and from disk."""
