"""best_passages: finds the paragraphs of a text that share most words with a question. No model, no download."""

import re


def passages(text: str) -> list[str]:
    """The paragraphs of a text."""
    return [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def best_passages(text: str, question: str, count: int = 3) -> list[str]:
    """The *count* passages with the most of the question's rarer words, in the text's order.

    The text's order gives two questions that need the same passages prompts that begin alike.
    """
    pieces = passages(text)
    words = [set(_words(piece)) for piece in pieces]
    weights = {word: 1 / (1 + sum(word in those for those in words)) for word in _words(question)}
    scores = [sum(weights[word] for word in those & weights.keys()) for those in words]
    best = sorted(range(len(pieces)), key=lambda i: scores[i], reverse=True)[:count]
    return [pieces[i] for i in sorted(best)]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
