"""Run a Python module with the system calls that Docker's default seccomp profile allows.

`python -m tests.e2e.docker_seccomp codex_workspace serve` needs no engine, because the kernel's filter is the same. It
denies the calls that codex needs for its own sandbox: namespaces and mounts.
"""

import ctypes
import os
import platform
import struct
import sys
from typing import Final

PR_SET_NO_NEW_PRIVS: Final = 38
PR_SET_SECCOMP: Final = 22
SECCOMP_MODE_FILTER: Final = 2

LOAD_WORD: Final = 0x20
JUMP_IF_EQUAL: Final = 0x15
JUMP_IF_ANY_BIT: Final = 0x45
RETURN: Final = 0x06

ALLOW: Final = 0x7FFF0000
DENY: Final = 0x00050000 | 1
"""EPERM."""
NOT_IMPLEMENTED: Final = 0x00050000 | 38
"""ENOSYS, Docker's result for clone3: its flags are in memory, which a filter cannot read."""

NEW_NAMESPACES: Final = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

# clone, clone3, and the calls that are denied: unshare, setns, mount, umount2, pivot_root, mount calls of Linux 5.2.
CALLS: Final = {
    "x86_64": (56, 435, (272, 308, 165, 166, 155, 428, 429, 430, 431, 432, 442)),
    "aarch64": (220, 435, (97, 268, 40, 39, 41, 428, 429, 430, 431, 432, 442)),
}
"""Numbers of system calls. Source: the kernel's tables of each architecture."""


def deny_namespaces() -> None:
    """Install the filter permanently for this process and its children."""
    clone, clone3, denied = CALLS[platform.machine()]
    program = [_step(LOAD_WORD, 0)]
    for number in denied:
        program += [_step(JUMP_IF_EQUAL, number, 0, 1), _step(RETURN, DENY)]
    program += [_step(JUMP_IF_EQUAL, clone3, 0, 1), _step(RETURN, NOT_IMPLEMENTED)]
    program += [_step(JUMP_IF_EQUAL, clone, 0, 3)]
    # The lower half of the first argument, on little-endian machines.
    program += [_step(LOAD_WORD, 16), _step(JUMP_IF_ANY_BIT, NEW_NAMESPACES, 0, 1), _step(RETURN, DENY)]
    program += [_step(RETURN, ALLOW)]
    steps = ctypes.create_string_buffer(b"".join(program))
    # struct sock_fprog: a 16 bit count, padding, a pointer.
    filter_ = struct.pack("HxxxxxxP", len(program), ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in ((PR_SET_NO_NEW_PRIVS, 1, None), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_)):
        if libc.prctl(option, value, pointer, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction, a struct sock_filter."""
    return struct.pack("HBBI", code, if_true, if_false, operand)


if __name__ == "__main__":
    deny_namespaces()
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
