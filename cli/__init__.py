"""The commands of `kvtier`: their arguments, and what each does."""
