"""Fair sharing of threads, memory and queue places among tenants."""
