"""A disk tier for LMCache, as a plug-in for its L2 adapter interface.

Support for the protocol of LMCache's server does not belong here.
"""
