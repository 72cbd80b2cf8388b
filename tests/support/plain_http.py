"""HTTP without TLS, for what asks servers of these tests."""

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Knows no authority, so it is made at once. One of httpx's own for each question, which reads the certificates of all
authorities, took half of the time of the tests that ask a server."""
