"""The agent with a low limit of open files. Usage: python -m tests.e2e.few_handles LIMIT."""

import resource
import sys

from codex_workspace.__main__ import main

if __name__ == "__main__":
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    sys.exit(main(["serve"]))
