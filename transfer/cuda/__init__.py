"""Copies of blocks between host memory and a CUDA device."""
