"""A workspace agent that puts OpenAI Codex behind A2A; `docs/architecture.md` describes the packages."""

import os

__version__ = "0.1.0"

# The A2A SDK reads this when it is imported. Its spans slow down every call, even without an exporter, and spans of
# streams log errors. `codex_workspace.common.telemetry` creates the agent's own spans.
os.environ.setdefault("OTEL_INSTRUMENTATION_A2A_SDK_ENABLED", "false")
