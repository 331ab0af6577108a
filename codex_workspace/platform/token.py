"""The workspace's token: where it is stored, and where the agent looks for another one when it is rejected."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from codex_workspace.config.environment import Secret

MAX_TOKEN_BYTES: Final = 4096


class WorkspaceToken:
    """The token that authenticates the workspace's calls.

    Args:
        file: where tokens that the platform issues are stored.
        other_files: files that a provisioner writes.
        from_environment: the last resort.
        on_secret: called with each token in use and with the platform's inbound secret, so that both are redacted.
    """

    def __init__(
        self,
        file: Path,
        other_files: Sequence[Path] = (),
        from_environment: Secret | None = None,
        on_secret: Callable[[Secret], None] | None = None,
    ) -> None:
        self._files = (file, *other_files)
        self._from_environment = from_environment
        self._on_secret = on_secret
        self.current: Secret | None = next(self.candidates(), None)

    def candidates(self) -> Iterator[Secret]:
        """Read all tokens that exist at this moment, in the order in which they are tried."""
        for file in self._files:
            found = read_secret(file)
            if found is not None:
                yield found
        if self._from_environment is not None:
            yield self._from_environment

    def store(self, token: Secret) -> None:
        """Store a new token durably and use it."""
        write_secret(self._files[0], token)
        self.use(token)

    def use(self, token: Secret) -> None:
        """Use this token from now on."""
        self.current = token
        self.report(token)

    def report(self, secret: Secret) -> None:
        """Have a secret redacted."""
        if self._on_secret is not None:
            self._on_secret(secret)


def write_secret(file: Path, secret: Secret) -> None:
    """Store a secret durably in a file with mode 0600."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secret.reveal())
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)


def read_secret(file: Path) -> Secret | None:
    """Return the secret in a file; None if there is no file or its content cannot be an HTTP header's value."""
    try:
        with file.open("rb") as source:
            text = source.read(MAX_TOKEN_BYTES + 1).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return as_secret(text)


def as_secret(text: str) -> Secret | None:
    """Return a text as a secret; None if it cannot be an HTTP header's value."""
    return Secret(text) if text and text.isascii() and text.isprintable() and len(text) <= MAX_TOKEN_BYTES else None
