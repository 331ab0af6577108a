"""The operator's token that the agent generates on a terminal. Its text is shown once; the state folder has a digest.

Commands of the model may read the state folder, so the text is not stored.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import read_regular, replace_file
from codex_workspace.config.environment import Secret

FILE_NAME: Final = "operator-token.sha256"
"""The file in the state folder: the SHA-256 of the token, as 64 hexadecimal digits."""

NewToken = Literal["never", "if missing", "always"]
"""When a start generates a token: `never` without a terminal, `always` with `--rotate-token`."""

ROTATE: Final = "serve --rotate-token"


@dataclass(frozen=True, slots=True)
class OwnToken:
    """A generated token; `text` is known only to the start that generated it."""

    digest: bytes
    text: Secret | None = None

    @classmethod
    def generate(cls) -> "OwnToken":
        """Return a new token."""
        text = secrets.token_urlsafe(32)
        return cls(hashlib.sha256(text.encode()).digest(), Secret(text))

    @classmethod
    def read(cls, state_dir: Path) -> "OwnToken | None":
        """Return the stored token; None if there is none.

        Raises:
            ConfigError: the file cannot be read, or does not contain a digest.
        """
        file = state_dir / FILE_NAME
        try:
            content = read_regular(file, 128)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
        if not re.fullmatch(rb"[0-9a-f]{64}\n?", content):
            raise ConfigError(f"{file}: must contain 64 hexadecimal digits; `{ROTATE}` on a terminal replaces it")
        return cls(bytes.fromhex(content.decode()))

    def store(self, state_dir: Path) -> None:
        """Store the digest, so that later starts accept the token.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            replace_file(state_dir / FILE_NAME, f"{self.digest.hex()}\n".encode())
        except OSError as error:
            raise ConfigError(f"{state_dir / FILE_NAME}: cannot be written: {error.strerror}") from error
