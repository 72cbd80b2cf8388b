"""What an object store is made of: segments, their names, and the calls that put and find them."""
