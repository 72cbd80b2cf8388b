"""What options give commands to read: a text in a file or on standard input, a token in a file."""

import sys
from pathlib import Path


def text_of(option: str, file: str) -> str:
    """The text of the file, or of standard input for "-". OSError or ValueError, which name the *option*, if it cannot
    be read or is no text."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
        return content.decode()
    except OSError as error:
        raise OSError(f"{option} {file}: {error.strerror}; give a file that can be read") from None
    except UnicodeDecodeError:
        raise ValueError(f"{option} {file}: is no text in UTF-8; convert it first") from None


def token_of(file: str) -> str:
    """The token in the file that --token-file names. As `text_of`, and ValueError if there is none in it."""
    token = text_of("--token-file", file).strip()
    if not token:
        raise ValueError(f"--token-file {file}: is empty; give the file that has the token")
    return token
