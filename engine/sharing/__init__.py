"""What tenants get of what they share."""
