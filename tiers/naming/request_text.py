"""A check that text from a request can be encoded as UTF-8, as names, files, events and metrics require."""


def check_text(what: str, text: object) -> None:
    """Raise ValueError unless *text* is a string that UTF-8 can encode.

    The message names the field *what*. It does not quote *text*, because salts are secret.
    """
    if not isinstance(text, str):
        raise ValueError(f"{what} is of type {type(text).__name__}; give a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is not valid Unicode: it has half of a surrogate pair at character {error.start}; remove it"
        ) from None
