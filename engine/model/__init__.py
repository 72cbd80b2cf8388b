"""The model: loading and checking it, paged attention, adapters and sampling."""
