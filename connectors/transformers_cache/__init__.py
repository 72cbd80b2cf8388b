"""The disk cache for transformers' `generate`. Models for kvtier's own engine do not belong here."""
