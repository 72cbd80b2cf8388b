"""The disk tier below LMCache, at its plug-in point for L2 adapters. LMCache's server protocol does not belong here."""
