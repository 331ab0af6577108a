#!/bin/sh
# Start the agent: the container's entry point, and good outside of one too. Decisions are Python's, where they are tested.
set -eu
cd "$(dirname "$0")"
if [ -x .venv/bin/python ]; then
    python=.venv/bin/python
else
    python=python3
fi
exec "$python" -m codex_workspace serve "$@"
