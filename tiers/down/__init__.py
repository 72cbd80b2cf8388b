"""The way down: device blocks are copied to host memory before they are evicted."""
