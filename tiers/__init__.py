"""Which block is where, what goes down, what comes up: decisions, no bytes."""
