"""What blocks are called, and which of them must be there to go on after a token."""
