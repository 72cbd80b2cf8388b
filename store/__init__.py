"""Stores of blocks on disk, in memory, or shared between machines. A read returns the stored bytes or a fault."""
