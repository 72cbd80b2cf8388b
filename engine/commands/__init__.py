"""Everything behind `kvtier …`."""
