"""left_out_headers: tells the client of a stream, too, which keywords of its schemas are not enforced."""

from collections.abc import Sequence
from urllib.parse import quote

HEADER = "x-kvtier-left-out"
_MOST_CHARACTERS = 1024  # proxies take headers of a few KiB
_AS_THEY_ARE = "./[]$"


def left_out_headers(left_out: Sequence[str]) -> dict[str, str]:
    """Return the header that names the keywords, percent-encoded and with commas between; none if nothing is left out.

    It names the first ones, as far as they fit. The answer's object `kvtier` names all of them.
    """
    named = ", ".join(quote(name, safe=_AS_THEY_ARE) for name in left_out)
    if len(named) > _MOST_CHARACTERS:
        named = named[:_MOST_CHARACTERS].rpartition(",")[0] + ", and more"
    return {HEADER: named} if left_out else {}
