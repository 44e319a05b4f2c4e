"""Numbers of bytes for a reader."""


def size_in_words(size: int) -> str:
    """Write a number of bytes for a reader, e.g. ``1.0 MiB``."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
