"""MovieLens-100K: 100,000 real ratings with users and films, out of the wheel of RecBole on PyPI.

F. M. Harper, J. A. Konstan: "The MovieLens datasets: history and context", ACM TiiS 5(4), 2015. The wheel is
downloaded, checked and unpacked, never installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

from hpc_ctr.errors import DataError

REQUIREMENT = "recbole==1.2.1"
WHEEL = "recbole-1.2.1-py3-none-any.whl"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
FOLDER = "recbole/dataset_example/ml-100k"
SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}


def cache_dir() -> str:
    """Where downloads are kept: $XDG_CACHE_HOME/hpc_ctr, or ~/.cache/hpc_ctr."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "hpc_ctr")


def prepare(out: str | os.PathLike[str], wheel: str = "", say: Callable[[str], None] = print) -> list[str]:
    """Paths of the interaction, user and item file in the folder ``out``, which are fetched unless they are there.

    wheel: a copy of the wheel to take instead of downloading it. Raises DataError with the remedy.
    """
    paths = {name: os.path.join(out, name) for name in SHA256}
    if all(_digest(path) == SHA256[name] for name, path in paths.items()):
        say(f"MovieLens-100K is in {out}, checksums verified")
        return list(paths.values())
    try:
        os.makedirs(out, exist_ok=True)
        archive = _check_wheel(wheel, "--wheel names another file") if wheel else _wheel(say)
        for name, path in paths.items():
            _unpack(archive, name, path)
    except OSError as error:
        raise DataError(f"--out: MovieLens-100K cannot be written to {out}: {error.strerror or error}; choose a "
                        "folder on a disk with room") from error
    say(f"MovieLens-100K is ready in {out}, checksums verified")
    return list(paths.values())


def _wheel(say: Callable[[str], None]) -> str:
    """Path of the checked wheel in the cache, downloaded when it is not there or damaged."""
    cache = cache_dir()
    path = os.path.join(cache, WHEEL)
    if _digest(path) == WHEEL_SHA256:
        return path
    os.makedirs(cache, exist_ok=True)
    say(f"downloading {REQUIREMENT} (2 MB), which holds MovieLens-100K")
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
                   "--dest", scratch, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = os.path.join(scratch, WHEEL)
        if done.returncode or not os.path.exists(found):
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
            raise DataError(f"{REQUIREMENT}, which holds MovieLens-100K, cannot be downloaded "
                            f"({lines[-1].strip()}); check the network and pip, or fetch {WHEEL} elsewhere "
                            "and give its path with --wheel")
        os.replace(_check_wheel(found, "the index or a proxy served another file; try again later"), path)
    return path


def _check_wheel(path: str, remedy: str) -> str:
    digest = _digest(path)
    if digest != WHEEL_SHA256:
        raise DataError(f"{path} {_mismatch(digest, WHEEL_SHA256)}; {remedy}")
    return path


def _unpack(archive: str, name: str, path: str) -> None:
    part = f"{path}.part{os.getpid()}"
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(f"{FOLDER}/{name}") as source, open(part, "wb") as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
        digest = _digest(part)
        if digest != SHA256[name]:
            raise DataError(f"{name} in {archive} {_mismatch(digest, SHA256[name])}; delete the archive and try again")
        os.replace(part, path)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{name} cannot be unpacked from {archive}: {error}; delete it and try again") from error
    finally:
        if os.path.exists(part):
            os.remove(part)


def _mismatch(found: str, wanted: str) -> str:
    return "does not exist" if not found else f"has the SHA-256 {found} instead of {wanted}"


def _digest(path: str) -> str:
    """SHA-256 in hex; "" when there is no such file."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
