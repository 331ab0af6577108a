"""Run a Python module without capabilities: `python -m tests.e2e.without_capabilities module …`.

The kernel then restricts access to other processes as for any user, as in a container that is started as documented.
Only root with capabilities can read them all.
"""

import ctypes
import errno
import os
import sys
from typing import Final

PR_CAPBSET_DROP: Final = 24

CAP_SETFCAP: Final = 31
"""Kept: without it, root cannot create a user namespace and has no sandbox. It gives no access to other processes."""


def drop_all() -> None:
    """Drop the capabilities from this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in set(range(64)) - {CAP_SETFCAP}:
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            why = ctypes.get_errno()
            if why == errno.EPERM and os.geteuid() != 0:
                return
            if why != errno.EINVAL:
                raise OSError(why, os.strerror(why))


if __name__ == "__main__":
    drop_all()
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
