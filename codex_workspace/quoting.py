"""Words of others as the model is to read them: between two lines that say whose they are."""

import secrets


def between_marks(text: str, opening: str, closing: str) -> str:
    """Return somebody's words after a line that says `opening`, and before one that says `closing`.

    Nobody can end the mark from within: the lines hold a number that is made up here.
    """
    number = secrets.token_hex(4)
    return f"--- {number}: {opening}\n{text}\n--- {number}: {closing}"
