"""How tenants share places, threads and memory."""
