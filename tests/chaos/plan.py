"""The plan of a chaos run, generated from a seed: which client sends which messages, and when which strike happens."""

import json
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from codex_workspace.devkit.script import ConnectionCut, Fault, HttpFault, ResponseFailed


class SendMode(StrEnum):
    """How a message is sent: a JSON-RPC method of A2A 1.0 or 0.3, a path of HTTP+JSON, or a method of gRPC."""

    BLOCKING = "SendMessage"
    STREAMING = "SendStreamingMessage"
    OLD_BLOCKING = "message/send"
    OLD_STREAMING = "message/stream"
    REST_BLOCKING = "/message:send"
    REST_STREAMING = "/message:stream"
    GRPC_BLOCKING = "gRPC SendMessage"
    GRPC_STREAMING = "gRPC SendStreamingMessage"


class MessageKind(StrEnum):
    """The model's behavior for a message.

    short: one word at once. slow: word by word, for about a second. command: runs a command first. hiccup: fails once.
    refused: fails permanently. repeat: returns the whole input of the thread, which the verdict checks.
    """

    SHORT = "short"
    SLOW = "slow"
    COMMAND = "command"
    HICCUP = "hiccup"
    REFUSED = "refused"
    REPEAT = "repeat"


class StrikeKind(StrEnum):
    """The target and kind of a strike.

    codex, agent, both: SIGKILL. pause: codex gets SIGSTOP, and SIGCONT after a while. freeze: SIGSTOP for good. model:
    every model call fails for a while. drop: a client's connection is closed during a request. restart: the PostgreSQL
    server is stopped for a while. disconnect: it ends all connections.
    """

    CODEX = "codex"
    AGENT = "agent"
    BOTH = "both"
    PAUSE = "pause"
    FREEZE = "freeze"
    MODEL = "model"
    DROP = "drop"
    RESTART = "restart"
    DISCONNECT = "disconnect"


WEIGHTS: Final = {
    StrikeKind.CODEX: 5,
    StrikeKind.AGENT: 4,
    StrikeKind.BOTH: 2,
    StrikeKind.PAUSE: 2,
    StrikeKind.FREEZE: 1,
    StrikeKind.MODEL: 3,
    StrikeKind.DROP: 3,
}
"""A freeze takes as long as codex's timeouts; the others are short."""

SERVER_WEIGHTS: Final = {StrikeKind.RESTART: 1, StrikeKind.DISCONNECT: 2}
"""Added if the database is a server."""

OUTAGES: Final[tuple[Fault, ...]] = (
    HttpFault(500, None, "down", None),
    HttpFault(429, "rate_limit_exceeded", "slow down", None),
    ResponseFailed("server_error", "down"),
    ConnectionCut(),
)

LONGEST_DELAY_S: Final = 1.5
"""Longer than an agent's start and most turns, so that every phase of both is hit."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message: its number in the run, its client, its context ("" = the main one), its mode and its script."""

    number: int
    seed: int
    client: int
    context_id: str
    mode: SendMode
    kind: MessageKind
    words: int
    delay_ms: int
    fault: str

    @property
    def message_id(self) -> str:
        """The message ID, the same at every attempt."""
        return f"chaos-{self.seed}-{self.number}"

    @property
    def name(self) -> str:
        """The start of the text, by which the message is found in a thread's history."""
        return f"message {self.number:04d}."

    @property
    def answer(self) -> str | None:
        """The model's expected answer, or None if it is not a fixed text."""
        if self.kind in (MessageKind.REFUSED, MessageKind.REPEAT):
            return None
        return " ".join([f"answer {self.number:04d}.", *(f"word{number}" for number in range(self.words))])

    @property
    def text(self) -> str:
        """The message with its script."""
        say: dict[str, object] = {"say": self.answer}
        steps: list[dict[str, object]]
        match self.kind:
            case MessageKind.SHORT:
                steps = [say]
            case MessageKind.SLOW:
                steps = [say | {"delay_ms": self.delay_ms}]
            case MessageKind.COMMAND:
                steps = [{"run": f"sleep {self.delay_ms / 100:.2f}; echo {self.name}"}, say]
            case MessageKind.HICCUP:
                steps = [say | {"times": 1, **json.loads(self.fault)}]
            case MessageKind.REFUSED:
                steps = [{"fail": 400, "code": "invalid_request", "message": "no"}]
            case MessageKind.REPEAT:
                steps = [{"repeat": True}]
        return f"{self.name} @script {json.dumps(steps)}"


@dataclass(frozen=True, slots=True)
class Strike:
    """A strike, `delay_s` seconds after the `after`-th answer.

    lasts_s: duration of a pause or model outage. outage: the model's fault. victim: the client that is dropped.
    """

    kind: StrikeKind
    after: int
    delay_s: float
    lasts_s: float
    outage: Fault
    victim: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All messages and strikes of a run, and whether it uses PostgreSQL."""

    seed: int
    postgresql: bool
    clients: int
    messages: tuple[Message, ...]
    strikes: tuple[Strike, ...]

    @property
    def contexts(self) -> list[str]:
        """The contexts of the messages."""
        return sorted({message.context_id for message in self.messages})

    @property
    def reviews(self) -> list[Message]:
        """One more message per context, whose answer is the whole input of its thread."""
        first = len(self.messages)
        return [
            Message(number, self.seed, 0, context_id, SendMode.BLOCKING, MessageKind.REPEAT, 0, 0, "")
            for number, context_id in enumerate(self.contexts, first)
        ]

    def of_client(self, client: int) -> list[Message]:
        """Return a client's messages in the order in which it sends them."""
        return [message for message in self.messages if message.client == client]


def make_plan(seed: int, messages: int, strikes: int, *, postgresql: bool = False) -> Plan:
    """Return the plan of a seed, always the same. With nine strikes (seven with SQLite), it contains every kind."""
    rng = random.Random(seed)
    clients = 5 if messages < 100 else 8
    contexts = ["", *(f"context-{number}" for number in range(3 if messages < 100 else 11))]
    weights = WEIGHTS | SERVER_WEIGHTS if postgresql else WEIGHTS
    kinds = [*weights, *rng.choices(list(weights), list(weights.values()), k=max(0, strikes - len(weights)))][:strikes]
    rng.shuffle(kinds)
    # No strike during the last tenth of the messages, so that the last strikes still find running turns.
    moments = sorted(rng.randrange(max(1, messages * 9 // 10)) for _ in kinds)
    return Plan(
        seed=seed,
        postgresql=postgresql,
        clients=clients,
        messages=tuple(_message(rng, seed, number, number % clients, contexts) for number in range(messages)),
        strikes=tuple(_strike(rng, kind, after, clients) for kind, after in zip(kinds, moments, strict=True)),
    )


def _message(rng: random.Random, seed: int, number: int, client: int, contexts: list[str]) -> Message:
    kinds = {
        MessageKind.SHORT: 6,
        MessageKind.SLOW: 5,
        MessageKind.COMMAND: 3,
        MessageKind.HICCUP: 2,
        MessageKind.REFUSED: 1,
    }
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    return Message(
        number=number,
        seed=seed,
        client=client,
        context_id=rng.choice(contexts),
        mode=rng.choice(list(SendMode)),
        kind=kind,
        words=rng.randint(8, 24) if kind is MessageKind.SLOW else rng.randint(0, 5),
        delay_ms=rng.randint(20, 90),
        fault=rng.choice(['{"fail": 500}', '{"fail": "server_error"}', '{"cut": true}']),
    )


def _strike(rng: random.Random, kind: StrikeKind, after: int, clients: int) -> Strike:
    return Strike(
        kind=kind,
        after=after,
        delay_s=round(rng.uniform(0, LONGEST_DELAY_S), 3),
        # During a model outage messages fail immediately, so it is kept short.
        lasts_s=round(rng.uniform(0.1, 0.4) if kind is StrikeKind.MODEL else rng.uniform(0.2, 1.5), 3),
        outage=rng.choice(OUTAGES),
        victim=rng.randrange(clients),
    )
