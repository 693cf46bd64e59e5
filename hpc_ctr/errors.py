"""Errors that a user meets, and the exit codes that go with them."""

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
