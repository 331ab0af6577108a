"""The tables of this agent's own, beside those of the SDK: one `MetaData`, so that one call makes them all."""

from typing import Final

from sqlalchemy import MetaData

MAX_CONTEXT_ID_CHARS: Final = 36
"""What the SDK's task table takes everywhere (PostgreSQL and MySQL refuse more)."""

tables: Final = MetaData()
