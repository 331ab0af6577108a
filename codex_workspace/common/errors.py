"""The agent's errors, and the redaction of codex's messages about its configuration.

`public` of an error may be shown to a peer; `str` is for the log and the operator and may contain codex's last lines.
Neither contains secrets: the code that raises the error redacts what it quotes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

CONFIG_REJECTED: Final = "codex rejects its config.toml; the operator has to correct it"
"""The sentence for peers if codex's configuration is invalid."""

MAX_REASON_CHARS: Final = 500
"""How much of codex's message an error quotes."""


class AgentError(Exception):
    """The base class of expected failures; the text is a sentence for people."""

    @property
    def public(self) -> str:
        """The sentence that may be shown to a peer."""
        return str(self)


class ConfigError(AgentError, RuntimeError):
    """The operator has to correct the configuration: the text names file, key and remedy. Exit code 2."""


class DatabaseTaken(ConfigError):
    """Another agent uses the database: `holder` describes it, or says when it did."""

    def __init__(self, database: str, holder: str) -> None:
        super().__init__(
            f"DATABASE_URL: another agent uses the database {database} ({holder}); stop it, or set another one"
        )


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
    """Nothing could be stored: the disk is full, or the database cannot be reached, is lost or damaged."""


class CodexError(AgentError):
    """The communication with codex failed."""


class CodexEnded(CodexError):
    """The codex process does not run. `tail` is the redacted end of its stderr."""

    def __init__(self, sentence: str, tail: str = "") -> None:
        super().__init__(f"{sentence}\ncodex's last lines:\n{tail}" if tail else sentence)
        self.sentence = sentence
        self.tail = tail

    @property
    def public(self) -> str:
        """The sentence without codex's last lines."""
        return self.sentence


class CodexCannotStart(CodexEnded):
    """The codex binary is missing, too old, or ended before it answered `initialize`. Exit code 3."""

    @classmethod
    def for_config(cls, file: Path, message: str) -> Self:
        """Return the error for a configuration `file` that codex rejects with `message`; the file's values are
        redacted."""
        why = " ".join(redact_config_values(message).split())[:MAX_REASON_CHARS]
        error = cls(CONFIG_REJECTED, f"{file}: {why}")
        error.args = (f"codex rejects {file}: {why}; correct the file",)
        return error


class CodexGone(CodexEnded, ConnectionError):
    """The codex process ended, or its pipe broke: start codex again and resume the thread."""


class CodexRefused(CodexError):
    """Codex responded with an error: the request is invalid, at least now.

    `message` is codex's message; values of a rejected configuration are redacted.
    """

    def __init__(self, method: str, code: int, message: str) -> None:
        message = redact_config_error(message)
        super().__init__(f"codex rejected {method}: {message} ({code})")
        self.method = method
        self.code = code
        self.message = message

    @property
    def is_config_error(self) -> bool:
        """Whether codex rejects its configuration, so that no thread or turn can work."""
        return is_config_error(self.message)

    @property
    def public(self) -> str:
        """Codex's message; `CONFIG_REJECTED` if codex rejects its configuration."""
        return CONFIG_REJECTED if self.is_config_error else str(self)


class CodexTimeout(CodexError, TimeoutError):
    """Codex did not respond in time."""


class InputRefused(CodexError, ValueError):
    """The input cannot be sent to codex: it is empty, invalid, or over codex's limit."""


class ProtocolError(CodexError):
    """Codex sent something that no supported version sends."""


class ToolRefused(AgentError):
    """A tool cannot do what the model asked for; the sentence is for the model, and contains no text of a peer."""


# Codex quotes an invalid value, or the whole line of the file. The line number and the key are enough to correct it.
# The patterns match the messages of codex 0.158 and 0.163.

HIDDEN: Final = "…"
"""Replaces a value."""

_CONFIG_ERROR: Final = re.compile(
    r"Error loading config|failed to (?:load|read) (?:\w+ )?configuration|failed to resolve feature override"
    r"|invalid configuration|^Error: (?:Model provider|legacy) [`…]",
    re.MULTILINE,
)
_LINES: Final = re.compile(r"^[ \t]*\d*[ \t]*\|.*\n?", re.MULTILINE)
"""The quoted lines of the file, each after its line number and a bar."""

_QUOTED: Final = re.compile(r"[\"`].*[\"`]", re.DOTALL)
"""From the first quotation mark to the last, because a value may contain quotation marks."""

_IN: Final = re.compile(r"\n\s*in `")


def is_config_error(message: str) -> bool:
    """Whether a message of codex rejects its configuration."""
    return _CONFIG_ERROR.search(message) is not None


def redact_config_values(message: str) -> str:
    """Return codex's message about its configuration without the configuration's values."""
    text = _LINES.sub("", message)
    end = _end_of_values(text)
    return f"{_QUOTED.sub(HIDDEN, text[:end])}{text[end:]}"


def redact_config_error(message: str) -> str:
    """Return a message of codex; if it rejects the configuration, without the configuration's values."""
    found = _CONFIG_ERROR.search(message)
    if found is None:
        return message
    return f"{message[: found.start()]}{redact_config_values(message[found.start() :])}"


def _end_of_values(text: str) -> int:
    """Return the index at which codex names the expected type or the key; no values follow."""
    expected = text.rfind(", expected ")
    if expected >= 0:
        return expected
    return max((found.start() for found in _IN.finditer(text)), default=len(text))
