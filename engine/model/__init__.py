"""The model: paged attention, adapters, sampling, what loads and what is refused."""
