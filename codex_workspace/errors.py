"""Errors by who has to act on them.

`public` of each may be shown to a peer; `str` is for the log and the operator and may add codex's own last lines.
Neither ever holds a secret: whoever makes the error scrubs what it quotes.
"""


class AgentError(Exception):
    """Any failure that this agent foresees; its text is a sentence for people."""

    @property
    def public(self) -> str:
        """The sentence that a peer may read."""
        return str(self)


class ConfigError(AgentError, RuntimeError):
    """The operator has to mend the configuration: the text names file, key and remedy. Exit code 2."""


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


class CodexGone(CodexEnded, ConnectionError):
    """The codex process ended, or its pipe broke: start codex again and resume the thread."""


class CodexRefused(CodexError):
    """Codex answered a request with an error: this request is wrong, or wrong now."""

    def __init__(self, method: str, code: int, message: str) -> None:
        super().__init__(f"codex refused {method}: {message} ({code})")
        self.method = method
        self.code = code
        self.message = message


class CodexTimeout(CodexError, TimeoutError):
    """Codex did not answer a request in its time."""


class InputRefused(CodexError, ValueError):
    """What a caller wants to send to codex cannot be sent: it is empty, or over codex's limit."""


class ProtocolError(CodexError):
    """Codex said something that no supported version says."""
