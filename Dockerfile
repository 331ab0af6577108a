# The agent's image, in layers from the slowest to change to the fastest: system, codex, Python packages, our files.
# `make image` builds it with docker, podman or buildah; docs/deployment.md describes how to run it.

# ---- builder: pip and everything else that the image does not contain
FROM python:3.11-slim AS builder
SHELL ["/bin/sh", "-euc"]

RUN python3 -m venv /opt/pip && python3 -m venv --without-pip --copies /opt/venv \
    && chmod 711 /opt/venv/bin/python && ln -sf python /opt/venv/bin/python3 && ln -sf python /opt/venv/bin/python3.11

# Uses the build secrets with pip settings and a CA bundle, if there are any. They do not end up in the image.
COPY --chmod=755 image/builder-pip /usr/local/bin/

# A process whose program file its user cannot read is closed to the user's other processes. So commands that the model
# runs cannot read credentials in the environment of the agent, codex, tini or the health check.
# Python's bytecode contains no file times, so that two builds of one commit make the same files.
COPY requirements-codex.txt /tmp/
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    builder-pip install --no-compile --target /opt/codex --no-deps --require-hashes -r /tmp/requirements-codex.txt \
    && chmod 711 /opt/codex/codex_cli_bin/bin/codex

COPY requirements.txt /tmp/
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    builder-pip --python /opt/venv/bin/python install --no-compile --require-hashes -r /tmp/requirements.txt \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib

# The platform's runtime, if RUNTIME_VERSION is set. Our versions are its constraints, so a conflict fails the build. Its
# own hashes, and those of what else it needs, are not known.
ARG RUNTIME_VERSION=
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    if [ -n "${RUNTIME_VERSION}" ]; then \
        sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' /tmp/requirements.txt > /tmp/constraints.txt; \
        builder-pip --python /opt/venv/bin/python install --no-compile --constraint /tmp/constraints.txt \
            "molecule-ai-workspace-runtime==${RUNTIME_VERSION}"; \
        /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib; \
    fi

# Compiled here, because the image's file system may be read-only. Readable for every user, whatever the checkout's modes.
COPY adapter.py executor.py app_server.py config.yaml manifest.json start.sh /app/
COPY codex_workspace /app/codex_workspace
COPY deploy/seccomp.json /app/deploy/
RUN chmod -R u=rwX,go=rX /app && chmod 755 /app/start.sh \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /app

# ---- the image
FROM python:3.11-slim
SHELL ["/bin/sh", "-euc"]
# `make image` adds the version, the revision and the time of the commit.
LABEL org.opencontainers.image.title="codex-workspace" \
    org.opencontainers.image.description="A workspace agent for OpenAI Codex behind an A2A server" \
    org.opencontainers.image.licenses="Apache-2.0"

# Logs and the linker's cache contain times.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates git tini \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/*.log /var/cache/ldconfig/aux-cache \
    && chmod 711 /usr/bin/tini \
    && git config --system --add safe.directory '*'

# Group 0 may write: it is the group of a user that is named by a number only (`--user 12345`). With SOURCE_DATE_EPOCH=0
# the account has no date.
RUN SOURCE_DATE_EPOCH=0 useradd --uid 1000 --user-group --create-home --shell /bin/bash agent \
    && mkdir /configs /workspace \
    && chown agent:0 /configs /workspace /home/agent \
    && chmod 2775 /configs /workspace /home/agent

COPY --from=builder /opt/codex /opt/codex
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder /app /app
RUN --mount=type=bind,source=image/sbom.py,target=/tmp/sbom.py \
    ln -s /opt/codex/codex_cli_bin/bin/codex /usr/local/bin/codex \
    && /opt/venv/bin/python -I /tmp/sbom.py > /app/sbom.cdx.json

# The platform's runtime finds the adapter through PYTHONPATH and ADAPTER_MODULE.
# The container isolates commands if its kernel forbids codex's sandbox (`codex.sandbox: auto`).
ENV A2A_HOST=0.0.0.0 \
    ADAPTER_MODULE=adapter \
    CODEX_BIN=/opt/codex/codex_cli_bin/bin/codex \
    LANG=C.UTF-8 \
    PYTHONPATH=/app \
    SANDBOX_FALLBACK=container

# Not the workspace: Python imports modules from the folder where it starts, and the model writes to the workspace.
WORKDIR /app
VOLUME ["/configs", "/workspace"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=6s --start-period=30s --retries=3 \
    CMD ["/opt/venv/bin/python", "-I", "/app/codex_workspace/cli/probe.py"]
ENTRYPOINT ["/app/start.sh"]
