"""integer_range: a regular expression of the integers between two bounds, of any number of digits."""

from collections.abc import Iterator


def integer_range(low: int | None, high: int | None) -> str:
    """Return an expression of the integers from *low* to *high*, both included, as JSON writes them.

    None is no bound. At least one integer must lie between the bounds.
    """
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts += [f"-{part}" for part in _naturals(least, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _naturals(max(0, low or 0), high)
    return f"({'|'.join(parts)})"


def _naturals(low: int, high: int | None) -> Iterator[str]:
    """Yield expressions of the numbers from *low* on, one or more for each number of digits."""
    num_digits = len(str(low))
    last = num_digits if high is None else len(str(high))
    for digits in range(num_digits, last + 1):
        first = str(low) if digits == num_digits else "1" + "0" * (digits - 1)
        end = str(high) if high is not None and digits == last else "9" * digits
        yield _same_length(first, end)
    if high is None:
        yield f"[1-9][0-9]{{{num_digits},}}"


def _same_length(low: str, high: str) -> str:
    """Return an expression of the digits from *low* to *high*, which are as many."""
    if not low:
        return ""
    if not low.strip("0") and not high.strip("9"):
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    num_left = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = [low[0] + _same_length(low[1:], "9" * num_left), high[0] + _same_length("0" * num_left, high[1:])]
    if last - first > 1:
        parts.insert(1, f"[{first + 1}-{last - 1}]" + (f"[0-9]{{{num_left}}}" if num_left else ""))
    return f"({'|'.join(parts)})"
