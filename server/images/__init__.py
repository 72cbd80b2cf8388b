"""Images of requests: data URLs, files at URLs, and their decoding within limits.

What becomes of a decoded image is in `engine/images/`.
"""
