"""Block stores at rest, on disk, in memory and shared between machines. A read returns the stored bytes or a fault."""
