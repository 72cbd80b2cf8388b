"""A disk below SGLang's host memory (HiCache)."""
