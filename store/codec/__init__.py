"""What a block's bytes look like at rest: encoded, sealed, encrypted."""
