"""A check for text from requests, which ends up in names, files, events and metrics encoded as UTF-8."""


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
