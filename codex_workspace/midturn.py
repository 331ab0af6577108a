"""What becomes of a message that comes while another turn of its context is at work. Pure decisions and words."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class MidTurn(StrEnum):
    """queue: it waits. steer: it joins the running turn, which answers both. interrupt: it takes that one's place."""

    QUEUE = "queue"
    STEER = "steer"
    INTERRUPT = "interrupt"


@dataclass(frozen=True, slots=True)
class Earlier:
    """A message that was answered in part, or not at all."""

    text: str
    partial_answer: str


def in_place_of(earlier: Sequence[Earlier]) -> str:
    """Return what a newer message begins with, so that nothing of the earlier ones is lost with their turns."""
    return "\n\n".join([*(_story(each) for each in earlier), "The newer message, which goes before:"])


def _story(each: Earlier) -> str:
    told = f"An earlier message was interrupted by a newer one. It said:\n\n{each.text}"
    return (
        f"{told}\n\nOf your answer to it, this much was said:\n\n{each.partial_answer}" if each.partial_answer else told
    )
