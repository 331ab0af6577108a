#!/bin/sh
# Starts the agent, in a checkout and as the container's entry point. Decisions are made in Python, where they are tested.
#
#   start.sh                  runs `serve`; options of `serve` may follow
#   start.sh doctor --json    runs any other command of `codex-workspace`
set -eu
cd "$(dirname "$0")"
case ${1:-} in
    --version | --help | -h) ;;
    '' | -*) set -- serve "$@" ;;
esac

# ---- in a checkout: .venv, or an environment in which the dependencies are installed; otherwise .venv is set up now
if [ ! -x /opt/venv/bin/python ] || [ "$PWD" != /app ]; then
    if [ ! -e .venv/runtime ]; then
        if python3 -c 'import a2a, anyio, yaml' 2>/dev/null; then
            exec python3 -m codex_workspace "$@"
        elif ! command -v make >/dev/null; then
            echo "start.sh: this checkout is not set up; install make and run start.sh again, or run: pipx install ." >&2
            exit 2
        fi
        echo "start.sh: this checkout is not set up; running 'make .venv/runtime' first (170 MB to download, 1 to 2 minutes)" >&2
        make --no-print-directory .venv/runtime >&2
    fi
    exec .venv/bin/python -m codex_workspace "$@"
fi

# ---- in the image
if [ "$(id -u)" = 0 ]; then
    if ! setpriv --reuid=agent --regid=agent --init-groups true 2>/dev/null; then
        echo "start.sh: root cannot switch to another user (--cap-drop=ALL?); run the container with --user 1000:1000" >&2
        exit 2
    fi
    # Root owns fresh volumes and files that were copied into them. Files of other users keep their owner. Files with
    # more than one hard link are left alone, because they may also exist outside of the volume.
    find /configs /workspace -xdev -uid 0 \( -type d -o -links 1 \) -exec chown -h agent:agent {} + ||
        echo "start.sh: root still owns some files in /configs or /workspace; the agent may be unable to write them" >&2
    export HOME=/home/agent USER=agent LOGNAME=agent
    if setpriv --bounding-set=-all true 2>/dev/null; then
        exec setpriv --reuid=agent --regid=agent --init-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
            /app/start.sh "$@"
    fi
    exec setpriv --reuid=agent --regid=agent --init-groups --inh-caps=-all --no-new-privs /app/start.sh "$@"
fi

# A user ID that is unknown in the image has no home directory, or / as its home.
if [ ! -d "${HOME:-}" ] || [ "$HOME" = / ] || [ "$HOME" = /root ]; then
    export HOME=/home/agent
fi
if [ "$1" != serve ]; then
    exec /opt/venv/bin/python -m codex_workspace "$@"
fi
# On the platform, WORKSPACE_ID is set, and the platform's runtime is installed if the image was built with RUNTIME_VERSION.
# The runtime listens by itself. Its records of delegations are kept in the volume.
if [ -n "${WORKSPACE_ID:-}" ] && [ -x /opt/venv/bin/molecule-runtime ]; then
    unset A2A_HOST
    export DELEGATION_RESULTS_FILE="${DELEGATION_RESULTS_FILE:-/configs/.delegation_results.jsonl}"
    export DELEGATION_ACTIVITY_CURSOR_FILE="${DELEGATION_ACTIVITY_CURSOR_FILE:-/configs/.delegation_activity_cursor}"
    exec tini -s -- /opt/venv/bin/molecule-runtime
fi
exec tini -s -- /opt/venv/bin/python -m codex_workspace "$@"
