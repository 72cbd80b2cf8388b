"""The commands of `kvtier`: their arguments and their implementation."""
