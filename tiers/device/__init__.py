"""The device's slots: which slot holds which block, and which one goes next."""
