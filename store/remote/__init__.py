"""Stores shared between machines, behind the protocol `RemoteStore`."""
