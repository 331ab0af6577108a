"""`codex exec` as a runtime of the public Python API."""

from contextlib import AbstractAsyncContextManager, nullcontext

from codex_workspace.backends.codex_exec.process import CodexExec, ExecLimits
from codex_workspace.config.mcp_servers import McpServers
from codex_workspace.runtimes.launch import Launch


def create(launch: Launch, servers: McpServers, inactivity_s: float) -> AbstractAsyncContextManager[CodexExec]:
    """Return the runtime `codex-exec`; see `runtimes.registry.Factory`."""
    return nullcontext(CodexExec(launch, ExecLimits(inactivity_s=inactivity_s), servers))
