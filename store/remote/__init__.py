"""Stores that machines share, behind the protocol `RemoteStore`."""
