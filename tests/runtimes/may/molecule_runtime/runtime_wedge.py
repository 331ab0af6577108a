"""Whether the runtime must report that its agent cannot work."""

_reason: str | None = None


def mark_wedged(reason: str) -> None:
    global _reason
    _reason = reason


def clear_wedge() -> None:
    global _reason
    _reason = None


def is_wedged() -> bool:
    return _reason is not None


def wedge_reason() -> str:
    return _reason or ""
