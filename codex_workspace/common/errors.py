"""What codex says of a configuration that it does not take, without the values that stand in it.

Codex quotes what it stumbles over: a header's value where a table should be, or the whole line. The line's number and
the key are enough to mend it. Words: 0.158 and 0.163.

Errors by who has to act on them.

`public` of each may be shown to a peer; `str` is for the log and the operator and may add codex's own last lines.
Neither ever holds a secret: whoever makes the error scrubs what it quotes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

HIDDEN: Final = "…"
"""What stands where a value stood."""

_BEGINS: Final = re.compile(
    r"Error loading config|failed to (?:load|read) (?:\w+ )?configuration|failed to resolve feature override"
    r"|invalid configuration|^Error: (?:Model provider|legacy) [`…]",
    re.MULTILINE,
)
_LINES: Final = re.compile(r"^[ \t]*\d*[ \t]*\|.*\n?", re.MULTILINE)
"""The file's own lines, each behind its number and a bar."""

_QUOTED: Final = re.compile(r"[\"`].*[\"`]", re.DOTALL)
"""From the first mark to the last: a value may hold marks itself."""

_IN: Final = re.compile(r"\n\s*in `")


def is_config_error(said: str) -> bool:
    """Tell whether codex says that it does not take its configuration."""
    return _BEGINS.search(said) is not None


def redact_config_values(said: str) -> str:
    """Return what codex has said of its configuration without that one's values."""
    about = _LINES.sub("", said)
    known = _own_words(about)
    return f"{_QUOTED.sub(HIDDEN, about[:known])}{about[known:]}"


def redact_config_error(said: str) -> str:
    """Return whatever codex has said without the values of a configuration that it does not take."""
    begins = _BEGINS.search(said)
    return said if begins is None else f"{said[: begins.start()]}{redact_config_values(said[begins.start() :])}"


def _own_words(about: str) -> int:
    """Return where the words begin behind which no value stands: what was expected, and else the key."""
    expected = about.rfind(", expected ")
    if expected >= 0:
        return expected
    return max((found.start() for found in _IN.finditer(about)), default=len(about))


CONFIG_REJECTED: Final = "codex does not take its config.toml; the operator has to mend it"
"""What a peer reads where codex's configuration is wrong."""

MAX_REASON_CHARS: Final = 500
"""Of codex's own words in a sentence."""


class AgentError(Exception):
    """Any failure that this agent foresees; its text is a sentence for people."""

    @property
    def public(self) -> str:
        """The sentence that a peer may read."""
        return str(self)


class ConfigError(AgentError, RuntimeError):
    """The operator has to mend the configuration: the text names file, key and remedy. Exit code 2."""


@dataclass(frozen=True, slots=True)
class ConfigLocation:
    """The file (or "environment") and the dotted key of a configured value; `error` puts both before a problem."""

    file: str
    key: str = ""

    def at(self, name: str) -> "ConfigLocation":
        return ConfigLocation(self.file, f"{self.key}.{name}" if self.key else name)

    def item(self, index: int) -> "ConfigLocation":
        return ConfigLocation(self.file, f"{self.key}[{index}]")

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self.key}: {problem}" if self.key else f"{self.file}: {problem}")


class StoreUnavailable(AgentError):
    """What was to be kept could not be written: the disk is full, or the database out of reach. Nothing of it is."""


class CodexError(AgentError):
    """Something between us and codex failed."""


class CodexEnded(CodexError):
    """The codex process is not there. `tail` holds the last lines that it wrote on stderr, scrubbed of secrets."""

    def __init__(self, sentence: str, tail: str = "") -> None:
        super().__init__(f"{sentence}\ncodex's last lines:\n{tail}" if tail else sentence)
        self.sentence = sentence
        self.tail = tail

    @property
    def public(self) -> str:
        """What happened, without codex's own lines."""
        return self.sentence


class CodexCannotStart(CodexEnded):
    """The codex binary is missing, too old, or ended before it answered `initialize`. Exit code 3."""

    @classmethod
    def for_config(cls, file: Path, said: str) -> Self:
        """Return the error that codex does not take `file`, by what it said of it; no value of the file's is in it."""
        why = " ".join(redact_config_values(said).split())[:MAX_REASON_CHARS]
        error = cls(CONFIG_REJECTED, f"{file}: {why}")
        error.args = (f"codex does not take {file}: {why}; mend the file",)
        return error


class CodexGone(CodexEnded, ConnectionError):
    """The codex process ended, or its pipe broke: start codex again and resume the thread."""


class CodexRefused(CodexError):
    """Codex answered a request with an error: this request is wrong, or wrong now.

    `message` are its words, without the values of a configuration that it does not take.
    """

    def __init__(self, method: str, code: int, message: str) -> None:
        message = redact_config_error(message)
        super().__init__(f"codex refused {method}: {message} ({code})")
        self.method = method
        self.code = code
        self.message = message

    @property
    def is_config_error(self) -> bool:
        """Whether it is the configuration that codex does not take, and no thread or turn could help it."""
        return is_config_error(self.message)

    @property
    def public(self) -> str:
        """Codex's words; of its configuration, the fact alone."""
        return CONFIG_REJECTED if self.is_config_error else str(self)


class CodexTimeout(CodexError, TimeoutError):
    """Codex did not answer a request in its time."""


class InputRefused(CodexError, ValueError):
    """What a caller wants to send to codex cannot be sent: it is empty, or over codex's limit."""


class ProtocolError(CodexError):
    """Codex said something that no supported version says."""


class ToolRefused(AgentError):
    """A tool cannot do what the model asked for; the sentence is for the model, and holds no words of a peer's."""
