"""Documents and pins: what is computed ahead of questions, and kept."""
