"""Settings put into somebody's config.toml for a while, and taken out again whatever happens.

For a codex that reads a file which others use too. `lent` merges the settings in (`codex_home.merge`) and gives the
original bytes back at its end; what others have written meanwhile stays, and only ours is taken out of it. Several
borrowers, of one process or of many, see the settings of all; the last one to leave restores the file.

Beside the file stands a desk, a folder of ours, for as long as there is a borrower: a lock that is held while anything
changes, a journal that knows the original, and a lease for each borrower, locked for as long as its process lives.
Every change is first said in the journal and then made, each by one rename: wherever a process is killed, the next
borrower or `recover` ends what it began. Folders that are missing are built aside and moved into place together with
their desk, and go the other way round.
"""

import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from codex_workspace.common.errors import ConfigError
from codex_workspace.common.files import try_lock, wait_for_lock
from codex_workspace.config.codex_toml import Managed, Record, merge, read_record, unmerge
from codex_workspace.config.toml_text import KeyPath, TomlValue

PATIENCE_S: Final = 10.0
"""How long the lock is waited for; it is held for some milliseconds."""

_TRY_AGAIN_S: Final = 0.005
_LOCK, _JOURNAL, _NEW, _LEASE = "lock", "journal.json", "new", ".lease"


@contextmanager
def lent(file: Path, settings: Managed) -> Iterator[None]:
    """Let `settings` stand in the config.toml `file` while the block is open. Waits for other processes: use a thread.

    Raises:
        ConfigError: the file is no TOML, cannot be written, or another borrower has one of the keys at another value.
    """
    lease = borrow(file, settings)
    try:
        yield
    finally:
        give_back(lease)


def recover(file: Path) -> None:
    """End what killed processes have begun: without a living borrower, `file` is as it was before the first.

    Raises:
        ConfigError: the file cannot be written.
    """
    with _told_of(file):
        real = _real(file)
        _clear_aside(real)
        if _desk_of(real).is_dir():
            with _held(real) as desk:
                journal = desk.journal()
                if journal is not None:
                    desk.settle(journal)


@dataclass(frozen=True, slots=True)
class Lease:
    """What a borrower holds; its process' end gives it back too."""

    file: Path
    id: str
    descriptor: int


def borrow(file: Path, settings: Managed) -> Lease:
    """Put `settings` into `file` until `give_back`; raises as `lent` does."""
    with _told_of(file):
        real = _real(file)
        with _held(real) as desk:
            journal = desk.journal() or Journal(_read(real))
            living = desk.living(journal)
            _refuse_contradiction(real, living, settings)
            lease = desk.lease()
            try:
                desk.change(replace(journal, borrowers=(*living, Borrower(lease.id, dict(settings)))))
            except BaseException:
                os.close(lease.descriptor)
                raise
            return lease


def give_back(lease: Lease) -> None:
    """Take the lease's settings out of its file.

    Raises:
        ConfigError: the file is no TOML any more, or cannot be written.
    """
    try:
        with _told_of(lease.file), _held(lease.file) as desk:
            journal = desk.journal()
            if journal is not None:
                others = tuple(each for each in journal.borrowers if each.id != lease.id)
                desk.settle(replace(journal, borrowers=others))
    finally:
        os.close(lease.descriptor)


# ── The journal ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Borrower:
    """Who has settings in the file."""

    id: str
    settings: Mapping[KeyPath, TomlValue]


@dataclass(frozen=True, slots=True)
class State:
    """What the file may hold by now: the digest of its bytes, and how to take ours out of it."""

    digest: str
    record: Record


@dataclass(frozen=True, slots=True)
class Journal:
    """All that is known of a file. `base`: its bytes without ours, None where there is none. `made`: folders of ours,
    the outermost first. `states`: the one before the last change, and the one after it.
    """

    base: bytes | None
    made: tuple[str, ...] = ()
    states: tuple[State, ...] = ()
    borrowers: tuple[Borrower, ...] = ()


def _dump(journal: Journal) -> bytes:
    base = None if journal.base is None else base64.b64encode(journal.base).decode()
    borrowers = [{"id": each.id, "settings": list(each.settings.items())} for each in journal.borrowers]
    states = [asdict(state) for state in journal.states]
    return json.dumps({"base": base, "made": journal.made, "states": states, "borrowers": borrowers}).encode()


def _load(raw: bytes) -> Journal:
    match json.loads(raw):
        case {"base": str() | None as base, "made": [*made], "states": [*states], "borrowers": [*borrowers]}:
            return Journal(
                None if base is None else base64.b64decode(base),
                tuple(map(str, made)),
                tuple(State(each["digest"], read_record(each["record"])) for each in states),
                tuple(
                    Borrower(each["id"], {tuple(path): value for path, value in each["settings"]}) for each in borrowers
                ),
            )
        case _:
            raise ValueError("not a journal")


def _digest(data: bytes | None) -> str:
    return "none" if data is None else hashlib.sha256(data).hexdigest()


def _without_ours(file: Path, journal: Journal) -> bytes | None:
    """Return what the file would hold without us, by what it holds now."""
    now = _read(file)
    if _digest(now) in {_digest(journal.base), *(state.digest for state in journal.states)}:
        return journal.base
    if now is None:
        return None
    text = _decoded(now, file)
    for state in reversed(journal.states):
        text = unmerge(text, state.record, str(file))
    return text.encode() if text or journal.base is not None else None


def _refuse_contradiction(file: Path, borrowers: Sequence[Borrower], settings: Managed) -> None:
    for theirs, value in ((path, value) for each in borrowers for path, value in each.settings.items()):
        for ours in settings:
            shorter, longer = sorted((theirs, ours), key=len)
            if longer[: len(shorter)] == shorter and (theirs != ours or value != settings[ours]):
                raise ConfigError(
                    f"{file}: {'.'.join(ours)}: has another value for a run that is not over; wait for it"
                )


# ── The desk ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Desk:
    """The folder of ours beside a file, its lock held."""

    file: Path
    folder: Path

    def journal(self) -> Journal | None:
        """Return the journal, None where nothing is lent; one with folders of ours may not know the file yet."""
        raw = _read(self.folder / _JOURNAL)
        if raw is None:
            return None
        try:
            return _load(raw)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.folder / _JOURNAL}: is damaged; mend {self.file} and remove it") from error

    def living(self, journal: Journal) -> tuple[Borrower, ...]:
        """Return the borrowers whose processes are alive."""
        return tuple(each for each in journal.borrowers if self._is_held(each.id))

    def lease(self) -> Lease:
        """Return a new lease; nothing is lent with it yet."""
        id_ = uuid.uuid4().hex
        descriptor = os.open(self.folder / (id_ + _LEASE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return Lease(self.file, id_, descriptor)

    def settle(self, journal: Journal) -> None:
        """Let the file hold what the living borrow; where there are none, be gone with the desk."""
        self.change(replace(journal, borrowers=self.living(journal)))

    def change(self, journal: Journal) -> None:
        """Write the journal, and then the file as it says."""
        base = _without_ours(self.file, journal)
        settings = {path: value for each in journal.borrowers for path, value in each.settings.items()}
        record, wanted = Record(), base
        if settings:
            text, record = merge(_decoded(base or b"", self.file), settings, str(self.file), lends=True)
            wanted = text.encode()
        now = _digest(_read(self.file))
        found = tuple(state for state in journal.states if state.digest == now)
        before = () if now == _digest(base) else found or journal.states
        states = (*before, State(_digest(wanted), record))
        self._write(self.folder / _JOURNAL, _dump(replace(journal, base=base, states=states)), 0o600)
        if _digest(wanted) != now:
            if wanted is None:
                self.file.unlink(missing_ok=True)
            else:
                mode = self.file.stat().st_mode & 0o777 if self.file.exists() else 0o600
                self._write(self.file, wanted, mode)
        self._sweep(journal)

    def put_away(self) -> None:
        """Remove the desk, and the folders of ours that are empty without it."""
        journal = self.journal()
        made = [Path(folder) for folder in journal.made] if journal is not None else []
        if not made:
            _remove_desk(self.folder)
            return
        aside = _aside(made[0])
        os.rename(self.folder, aside)
        _remove_made(made)
        _remove_desk(aside)

    def _sweep(self, journal: Journal) -> None:
        """Remove the leases of nobody."""
        known = {each.id + _LEASE for each in journal.borrowers}
        for lease in self.folder.glob(f"*{_LEASE}"):
            if lease.name not in known:
                lease.unlink(missing_ok=True)

    def _is_held(self, id_: str) -> bool:
        try:
            descriptor = os.open(self.folder / (id_ + _LEASE), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _write(self, target: Path, data: bytes, mode: int) -> None:
        new = self.folder / _NEW
        with open(new, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, target)


@contextmanager
def _held(file: Path) -> Iterator[Desk]:
    """Hold the lock of a file's desk, which is made where it is missing, and put away where nothing is lent."""
    descriptor = _take_lock(file)
    try:
        desk = Desk(file, _desk_of(file))
        try:
            yield desk
        finally:
            journal = desk.journal()
            if journal is None or not journal.borrowers:
                desk.put_away()
    finally:
        os.close(descriptor)


def _take_lock(file: Path) -> int:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        _clear_aside(file)
        descriptor = _try_desk(_desk_of(file)) if file.parent.is_dir() else _build(file)
        if descriptor is not None:
            return descriptor
        _wait_while_held(_desk_of(file), until)
    raise ConfigError(f"{_desk_of(file)}: another process has held its lock for {PATIENCE_S:g} s; end it")


def _try_desk(folder: Path) -> int | None:
    """Return the lock of a desk, which is made where it is missing; None where another process has it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        # Put away by the one before us.
        return None
    if wait_for_lock(descriptor, folder / _LOCK):
        return descriptor
    os.close(descriptor)
    return None


def _wait_while_held(folder: Path, until: float) -> None:
    """Wait until a desk's lock is free, or there is no such desk."""
    while time.monotonic() < until:
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            if try_lock(descriptor):
                return
        finally:
            os.close(descriptor)
        time.sleep(_TRY_AGAIN_S)


def _build(file: Path) -> int | None:
    """Make the folders that `file` lacks, with a desk in them, at one blow; return its lock, None to try again."""
    missing = [folder for folder in (file.parent, *file.parent.parents) if not folder.is_dir()][::-1]
    if not missing:
        # Somebody has made them meanwhile.
        return None
    aside = _aside(missing[0])
    desk = aside / _desk_of(file).relative_to(missing[0])
    descriptor = None
    try:
        for folder in (aside, *(aside / each.relative_to(missing[0]) for each in missing[1:]), desk):
            folder.mkdir(mode=0o700)
        descriptor = os.open(desk / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (desk / _JOURNAL).write_bytes(_dump(Journal(None, tuple(map(str, missing)))))
        os.rename(aside, missing[0])
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)
        # Somebody took it for a dead process' work, or made the folder meanwhile.
        if isinstance(error, FileNotFoundError) or missing[0].is_dir():
            return None
        raise
    return descriptor


def _clear_aside(file: Path) -> None:
    """End what a killed process has left aside, while it built folders or removed them."""
    for top in file.parents:
        # Where nothing can be written, nothing was left that could be removed.
        if top.name and os.access(top.parent, os.W_OK):
            for aside in _asides_of(top):
                _clear(aside)


def _asides_of(folder: Path) -> list[Path]:
    """Return what has a name of `_aside`'s."""
    pattern = re.compile(re.escape(f".{folder.name}.lent-") + "[0-9a-f]{32}")
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder.parent) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]
    return []


def _clear(aside: Path) -> None:
    with ExitStack() as held:
        # Another may clear it at the same time.
        for lock in [Path(folder) / _LOCK for folder, _, files in os.walk(aside) if _LOCK in files]:
            with suppress(FileNotFoundError):
                descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
                held.callback(os.close, descriptor)
                if not try_lock(descriptor):
                    return
        raw = _read(aside / _JOURNAL)
        if raw is not None:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                _remove_made([Path(folder) for folder in _load(raw).made])
        shutil.rmtree(aside, ignore_errors=True)


def _remove_made(made: Sequence[Path]) -> None:
    for folder in reversed(made):
        # What others have put there stays, and so does the folder.
        with suppress(OSError):
            folder.rmdir()


def _remove_desk(folder: Path) -> None:
    """Remove the journal first: without one, a desk is nothing but a folder to be removed."""
    with suppress(FileNotFoundError):
        for name in (_JOURNAL, _NEW, *(lease.name for lease in folder.glob(f"*{_LEASE}")), _LOCK):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


def _desk_of(file: Path) -> Path:
    return file.parent / f".{file.name}.lent"


def _aside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lent-{uuid.uuid4().hex}"


def _real(file: Path) -> Path:
    """Return the file itself: a link to it, as mounted configuration often is, stays one."""
    return file.resolve()


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _decoded(data: bytes, file: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8; the file is left as it is") from error


@contextmanager
def _told_of(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or file}: cannot be used ({error.strerror})") from error
