"""The way up: how the blocks of a hit come to the device, from host memory and from disk."""
