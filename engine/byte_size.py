"""Numbers of bytes, written as people read them."""


def size_text(num_bytes: float) -> str:
    """*num_bytes* with a unit that suits it, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
