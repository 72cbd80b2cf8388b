"""Names of blocks, and which blocks must be present for a request to go on after a token."""
