"""Errors by who has to act on them. `str(error)` of every one of them may be shown to a peer: no secret is ever put in."""


class AgentError(Exception):
    """Any failure that this agent foresees; its text is a sentence for people."""


class ConfigError(AgentError, RuntimeError):
    """The operator has to mend the configuration: the text names file, key and remedy. Exit code 2."""


class CodexError(AgentError):
    """Something between us and codex failed."""


class CodexCannotStart(CodexError):
    """The codex binary is missing, too old, or ended before it answered `initialize`. Exit code 3."""


class CodexGone(CodexError, ConnectionError):
    """The codex process ended, or its pipe broke: start codex again and resume the thread.

    The text holds the exit code and the last lines of codex's stderr, where there are any.
    """


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
    """What a caller wants to send to codex cannot be sent (empty, or over codex's limit)."""


class ProtocolError(CodexError):
    """Codex said something this agent's supported versions never say."""
