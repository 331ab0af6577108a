"""The benchmark: what the agent costs over driving the same codex bare. `make bench` runs it."""
