"""Explaining: block by block why a prompt was found or not, without keeping any of its text."""
