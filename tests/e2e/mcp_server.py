"""A real MCP server of the official package, over stdio or HTTP: `python mcp_server.py [--http PORT] …`.

It does what its arguments tell: starts late, not at all, or writes down the headers that it is sent.
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import mcp.server.mcpserver as mcp
from mcp.types import ToolAnnotations
from starlette.requests import Request

server = mcp.MCPServer("probe")
arguments = argparse.Namespace(headers=None)


@server.tool()
def echo(text: str) -> str:
    """Say `text` again, and who says it; not marked as reading only."""
    return f"echo {text} from process {os.getpid()}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def digest_of(variable: str) -> str:
    """Return what stands for a variable of this server's environment, `none` where it has no such."""
    value = os.environ.get(variable)
    return "none" if value is None else hashlib.sha256(value.encode()).hexdigest()


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def remember_headers(context: mcp.Context) -> str:
    """Write down the headers of this call's request, where `--headers` says."""
    request = context.request_context.request
    assert isinstance(request, Request)
    Path(arguments.headers).write_text("\n".join(f"{name}: {value}" for name, value in request.headers.items()))
    return "written"


@server.tool()
def crash() -> str:
    """End the server's process."""
    os._exit(7)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int)
    parser.add_argument("--headers")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    parser.parse_args(namespace=arguments)
    time.sleep(arguments.delay_s)
    if arguments.fail:
        sys.exit("this server does not start")
    if arguments.http is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=arguments.http)


if __name__ == "__main__":
    main()
