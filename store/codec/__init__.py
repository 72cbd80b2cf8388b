"""The bytes of a block at rest: encoded, sealed, encrypted."""
