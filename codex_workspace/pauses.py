"""How long to wait before something that has failed is tried again."""

from typing import Final

_MOST_DOUBLINGS: Final = 30
"""What is doubled so often is too long, and what is doubled more than a thousand times is no float."""


def growing(first_s: float, longest_s: float, tries: int) -> float:
    """Return the seconds before the next try: `first_s` doubled `tries` times, `longest_s` at the most."""
    return min(longest_s, first_s * 2.0 ** min(tries, _MOST_DOUBLINGS))
