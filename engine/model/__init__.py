"""The model: its loading and verification, paged attention, LoRA adapters and sampling."""
