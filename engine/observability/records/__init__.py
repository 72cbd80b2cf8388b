"""Records of finished requests: their times and token counts, without their text."""
