"""Text of generated pages: lines of at most 120 characters, and links to other pages by their title on the site."""

import os
import re
import textwrap

from markdown_links import site_titles

WIDTH = 120


def paragraph(text: str, indent: str = "") -> str:
    """Return *text* in lines that end in a newline."""
    return _wrapped(text, indent, indent)


def bullet(name: str, text: str) -> str:
    """Return an item of a list."""
    return _wrapped(f"{name}: {text}" if text else name, "- ", "  ")


def link_to(page: str) -> str:
    """The address of a page, seen from the folder of the reference pages."""
    return os.path.relpath(page, "docs/reference")


def title_of(page: str) -> str:
    """The title that the site's navigation has for a page."""
    return dict(site_titles())[page]


def _wrapped(text: str, first: str, later: str) -> str:
    # A line may not break in code, where Markdown shows two blanks, nor in the text of a link.
    kept = re.sub(
        r"`[^`]*`|\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])", lambda part: part[0].replace(" ", "\0"), " ".join(text.split())
    )
    filled = textwrap.fill(
        kept, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return filled.replace("\0", " ") + "\n"
