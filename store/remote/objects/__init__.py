"""Parts of the object store client: segments, their names, and the requests that put and find them."""
