"""Text to tokens and back: chat templates, limits of prompts, threads that tokenize, streams of text."""
