"""An MCP server over stdio that uses only the standard library, so that it starts in milliseconds. Its tool is `echo`.

`python minimal_mcp_server.py [SECONDS]` starts after a delay.
"""

import json
import sys
import time
from collections.abc import Mapping

ECHO = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}


def result_of(request: Mapping[str, object]) -> dict[str, object]:
    """Return the result of a request."""
    match request:
        case {"method": "initialize", "params": {"protocolVersion": version}}:
            server_info = {"name": "light", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server_info}
        case {"method": "tools/list"}:
            return {"tools": [ECHO]}
        case {"method": "tools/call", "params": {"arguments": {"text": text}}}:
            return {"content": [{"type": "text", "text": f"echo {text}"}]}
        case _:
            return {}


def main() -> None:
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            answer = {"jsonrpc": "2.0", "id": request["id"], "result": result_of(request)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
