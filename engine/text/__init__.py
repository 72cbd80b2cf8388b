"""Conversion of text to tokens and back: chat templates, prompt limits, tokenizer threads, detokenization."""
