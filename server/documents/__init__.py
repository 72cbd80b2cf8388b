"""Documents: texts that are computed ahead of the questions about them, and kept warm."""
