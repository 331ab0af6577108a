# The agent's image. Layers from the slowest to change to the quickest: system, codex, Python packages, our files.
# `make image` builds it with docker, podman or buildah; docs/deployment.md says how it is run and what is in it.

# ---- what needs a compiler's or an installer's tools, and leaves nothing of them behind
FROM python:3.11-slim AS builder
SHELL ["/bin/sh", "-euc"]

# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends binutils && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/pip && python3 -m venv --without-pip --copies /opt/venv \
    && chmod 711 /opt/venv/bin/python && ln -sf python /opt/venv/bin/python3 && ln -sf python /opt/venv/bin/python3.11

# The builder's own pip settings and CA bundle, where they are given as secrets, serve these steps and are not kept.
COPY --chmod=755 image/builder-pip image/slim /usr/local/bin/

# Whatever runs a program that it cannot read is closed to other processes of its user, from its first moment on: so no
# command of the model's reads a credential in the environment of the agent, of codex, of tini or of the health check.
COPY requirements-codex.txt /tmp/
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    builder-pip install --target /opt/codex --no-deps -r /tmp/requirements-codex.txt \
    && chmod 711 /opt/codex/codex_cli_bin/bin/codex

COPY requirements.txt /tmp/
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    builder-pip --python /opt/venv/bin/python install --no-compile -r /tmp/requirements.txt && slim /opt/venv

# The platform's runtime, where a version of it is named; together with ours, so that a conflict ends the build.
ARG RUNTIME_VERSION=
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    if [ -n "${RUNTIME_VERSION}" ]; then \
        builder-pip --python /opt/venv/bin/python install --no-compile -r /tmp/requirements.txt \
            "molecule-ai-workspace-runtime==${RUNTIME_VERSION}" && slim /opt/venv; \
    fi

# Compiled here, as the image's file system may be read-only; readable for all, whatever the checkout's rights are.
COPY adapter.py executor.py app_server.py config.yaml manifest.json start.sh /app/
COPY codex_workspace /app/codex_workspace
COPY deploy/seccomp.json /app/deploy/
RUN chmod -R u=rwX,go=rX /app && chmod 755 /app/start.sh \
    && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /app

# ---- the image
FROM python:3.11-slim
SHELL ["/bin/sh", "-euc"]

# git wants all of perl (48 MB) for subcommands that nobody needs here, such as send-email: image/no-perl.control says
# what takes its place.
COPY image/no-perl.control /tmp/no-perl/DEBIAN/control
COPY image/dpkg-exclude /etc/dpkg/dpkg.cfg.d/codex-workspace
# hadolint ignore=DL3008
RUN dpkg-deb --build /tmp/no-perl /tmp/no-perl.deb && dpkg --install /tmp/no-perl.deb \
    && apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates git tini \
    && rm -rf /tmp/no-perl /tmp/no-perl.deb /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache \
        /var/log/apt /var/log/dpkg.log /var/log/alternatives.log \
    && ln -sf /usr/bin/git /usr/lib/git-core/git && chmod 711 /usr/bin/tini \
    && git config --system --add safe.directory '*'

# Group 0 may write: that is the group of any user whose number `--user` names.
RUN useradd --uid 1000 --user-group --create-home --shell /bin/bash agent \
    && mkdir /configs /workspace \
    && chown agent:0 /configs /workspace /home/agent \
    && chmod 2775 /configs /workspace /home/agent

COPY --from=builder /opt/codex /opt/codex
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder /app /app
RUN ln -s /opt/codex/codex_cli_bin/bin/codex /usr/local/bin/codex

# PYTHONPATH and ADAPTER_MODULE are how the platform's runtime finds the adapter.
ENV A2A_HOST=0.0.0.0 \
    ADAPTER_MODULE=adapter \
    CODEX_BIN=/opt/codex/codex_cli_bin/bin/codex \
    LANG=C.UTF-8 \
    PYTHONPATH=/app

# Not the workspace: Python takes modules from where it is started, and the model writes there.
WORKDIR /app
VOLUME ["/configs", "/workspace"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=6s --start-period=30s --retries=3 \
    CMD ["/opt/venv/bin/python", "-I", "/app/codex_workspace/cli/probe.py"]
ENTRYPOINT ["/app/start.sh"]
