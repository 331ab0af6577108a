"""Deliveries in memory, for tests in virtual time: a database uses real time."""

from dataclasses import replace

from a2a.types import SendMessageRequest

from codex_workspace.storage.deliveries import (
    MOVES,
    Deliveries,
    Delivery,
    DeliveryKey,
    DeliveryState,
    InvalidTransition,
)


class MemoryDeliveries(Deliveries):
    """The deliveries of one test by task ID."""

    def __init__(self) -> None:
        self.kept: dict[str, Delivery] = {}

    async def find_by_task(self, task_id: str) -> Delivery | None:
        return self.kept.get(task_id)

    async def accept(
        self, key: DeliveryKey, request: SendMessageRequest, digest: bytes, task_id: str, context_id: str
    ) -> Delivery | None:
        del digest
        # By task, because all messages of a test have the same ID.
        own = DeliveryKey(key.owner, task_id)
        accepted = Delivery(
            own, task_id, context_id, DeliveryState.ACCEPTED, request.SerializeToString(), None, None, 0, b""
        )
        self.kept[task_id] = accepted
        return accepted

    async def mark_started(self, key: DeliveryKey, thread_id: str, turn_id: str) -> None:
        self._to(key, DeliveryState.STARTED)
        self.kept[key.message_id] = replace(self.kept[key.message_id], thread_id=thread_id, turn_id=turn_id)

    async def mark_answered(self, key: DeliveryKey, ending: bytes) -> None:
        self._to(key, DeliveryState.ANSWERED)
        self.kept[key.message_id] = replace(self.kept[key.message_id], ending=ending)

    async def count_restart(self, task_id: str) -> int:
        del task_id
        return 1

    async def count_codex_death(self, key: DeliveryKey) -> int:
        known = self.kept[key.message_id]
        self.kept[key.message_id] = replace(known, deaths=known.deaths + 1)
        return known.deaths + 1

    def _to(self, key: DeliveryKey, state: DeliveryState) -> None:
        known = self.kept[key.message_id]
        if state not in MOVES[known.state]:
            raise InvalidTransition(f"{known.state} -> {state}")
        self.kept[key.message_id] = replace(known, state=state)
