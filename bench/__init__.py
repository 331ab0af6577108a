"""The benchmark of the agent's overhead over a minimal driver of the same codex. `make bench` runs it."""
