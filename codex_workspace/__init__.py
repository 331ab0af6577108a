"""The workspace agent's rooms; `docs/architecture.md` is the map."""

import os

# The SDK reads this when it is imported. Its spans cost every call, exporter or not, and those of streams end with an
# error in the log. `tracing` makes ours.
os.environ.setdefault("OTEL_INSTRUMENTATION_A2A_SDK_ENABLED", "false")
