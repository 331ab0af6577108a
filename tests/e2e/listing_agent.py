"""The agent, which at its end writes the modules that it has imported. Usage: python -m tests.e2e.listing_agent."""

import sys

from codex_workspace.__main__ import main

if __name__ == "__main__":
    try:
        code = main(["serve"])
    finally:
        imported = " ".join(name for name, module in sys.modules.items() if module is not None)
        sys.stdout.write(f"imported: {imported}\n")
    sys.exit(code)
