"""Checks text that a request brings: it gets into names, files, events and metrics, which are UTF-8."""


def check_text(what: str, text: object) -> None:
    """Raise ValueError unless *text* is a string that UTF-8 can say. The message has none of it: salts are secrets."""
    if not isinstance(text, str):
        raise ValueError(f"{what} is of type {type(text).__name__}; give a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is no valid Unicode, with half a surrogate pair at character {error.start}; remove it"
        ) from None
