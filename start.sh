#!/bin/sh
# Start the agent: the container's entry point, and good outside of one too. Decisions are Python's, where they are tested.
#
#   start.sh                  serve (options of `serve` may follow)
#   start.sh doctor --json    any other command of `python -m codex_workspace`
set -eu
cd "$(dirname "$0")"
case ${1:-} in
    '' | -*) set -- serve "$@" ;;
esac

if [ -x .venv/bin/python ]; then
    exec .venv/bin/python -m codex_workspace "$@"
elif [ ! -x /opt/venv/bin/python ] || [ "$PWD" != /app ]; then
    exec python3 -m codex_workspace "$@"
fi

# ---- in the image
if [ "$(id -u)" = 0 ]; then
    if ! setpriv --reuid=agent --regid=agent --init-groups true 2>/dev/null; then
        echo "start.sh: root cannot become another user here (--cap-drop=ALL?); run the container with --user 1000:1000" >&2
        exit 2
    fi
    # A fresh volume, or what was put into one by hand, is root's. What belongs to anybody else stays theirs, and a
    # file with a second name may be one that is not in the volume at all.
    find /configs /workspace -xdev -uid 0 \( -type d -o -links 1 \) -exec chown -h agent:agent {} + ||
        echo "start.sh: some of /configs or /workspace stays root's; the agent may not be able to write it" >&2
    export HOME=/home/agent USER=agent LOGNAME=agent
    if setpriv --bounding-set=-all true 2>/dev/null; then
        exec setpriv --reuid=agent --regid=agent --init-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
            /app/start.sh "$@"
    fi
    exec setpriv --reuid=agent --regid=agent --init-groups --inh-caps=-all --no-new-privs /app/start.sh "$@"
fi

# A user whom the image does not know has no home, or the root folder.
if [ ! -d "${HOME:-}" ] || [ "$HOME" = / ] || [ "$HOME" = /root ]; then
    export HOME=/home/agent
fi
if [ "$1" != serve ]; then
    exec /opt/venv/bin/python -m codex_workspace "$@"
fi
# The platform names the workspace; its runtime is there if the image was built with RUNTIME_VERSION. It listens itself,
# and what it remembers of delegations would be lost with the container.
if [ -n "${WORKSPACE_ID:-}" ] && [ -x /opt/venv/bin/molecule-runtime ]; then
    unset A2A_HOST
    export DELEGATION_RESULTS_FILE="${DELEGATION_RESULTS_FILE:-/configs/.delegation_results.jsonl}"
    export DELEGATION_ACTIVITY_CURSOR_FILE="${DELEGATION_ACTIVITY_CURSOR_FILE:-/configs/.delegation_activity_cursor}"
    exec tini -s -- /opt/venv/bin/molecule-runtime
fi
exec tini -s -- /opt/venv/bin/python -m codex_workspace "$@"
