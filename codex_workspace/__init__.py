"""The workspace agent's rooms; `docs/architecture.md` is the map."""
