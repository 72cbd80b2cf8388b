"""The device's slots: which holds which block, and which goes next."""
