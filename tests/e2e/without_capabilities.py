"""Run a Python module without capabilities, whoever runs it: `python -m tests.e2e.without_capabilities module …`.

What a process may see of another one is then what the kernel shows to the same user, as in a container that is started
as it should be. Root alone sees everything.
"""

import ctypes
import errno
import os
import sys
from typing import Final

PR_CAPBSET_DROP: Final = 24

CAP_SETFCAP: Final = 31
"""Kept: without it, root can be nobody in a user namespace, and so has no sandbox. It shows nothing of others."""


def drop_all() -> None:
    """Take the capabilities out of what a program that is started from here can have."""
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
