"""Errors that a user meets, and the exit codes that go with them."""

import errno
import os

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_REQUEUE = 0, 1, 2, 75


class HpcCtrError(Exception):
    """Base of all errors that are reported as one sentence, without a traceback."""

    exit_code = EXIT_FAILED


class UsageError(HpcCtrError):
    """A setting or an input file is wrong: the message names it and says what to do."""

    exit_code = EXIT_USAGE


class DataError(HpcCtrError):
    """The data broke a rule while being read (for instance too many bad rows)."""


class StorageError(HpcCtrError):
    """A tier could not keep or give back rows: disk full, damaged file, failed read."""


_ROOM = (errno.ENOSPC, errno.EDQUOT)
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)
_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE, errno.EIO)


def one_sentence(error: BaseException) -> HpcCtrError | None:
    """The error as one for people, where it is one already or the machine's: disk, rights, memory. Else None.

    What is left is a mistake in a program, this one's or the user's, and needs its traceback.
    """
    if isinstance(error, HpcCtrError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        text = " ".join(str(error).split())
        return HpcCtrError(f"there is not enough memory{': ' if text else ''}{text}; lower what the job asks for, or "
                           "start fewer ranks a node")
    if not isinstance(error, OSError):
        return None
    for numbers, remedy in ((_ROOM, "free some, or name a folder on a larger disk"),
                            (_RIGHTS, "make it writable, or name another folder"),
                            (_PATH, "name a path that is there and can be used")):
        if error.errno in numbers:
            where = f"{os.fspath(error.filename)}: " if error.filename else ""
            return HpcCtrError(f"{where}{os.strerror(error.errno)}; {remedy}")
    return None
