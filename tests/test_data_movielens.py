"""Fetching MovieLens-100K, with a small wheel in its place, and the command line of prepare."""

import argparse
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_ctr.cli import prepare as command
from hpc_ctr.data import movielens
from hpc_ctr.errors import DataError

TEXT = {name: f"{name}: some rows\n".encode() * 50 for name in movielens.SHA256}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch) -> Path:
    """A wheel with other files, whose checksums are the ones expected; the cache is a folder of the test."""
    path = tmp_path / "made" / movielens.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in TEXT.items():
            archive.writestr(f"{movielens.FOLDER}/{name}", data)
    monkeypatch.setattr(movielens, "WHEEL_SHA256", sha(path.read_bytes()))
    monkeypatch.setattr(movielens, "SHA256", {name: sha(data) for name, data in TEXT.items()})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


class Pip:
    """Stands for subprocess.run: puts ``data`` where pip would put the wheel, or fails."""

    def __init__(self, data: bytes | None):
        self.data, self.calls = data, 0

    def __call__(self, args: list[str], **more) -> SimpleNamespace:
        self.calls += 1
        assert args[1:4] == ["-m", "pip", "download"] and "--no-deps" in args and args[-1] == "recbole==1.2.1"
        if self.data is None:
            return SimpleNamespace(returncode=1, stderr="retrying\nERROR: No matching distribution\n")
        (Path(args[args.index("--dest") + 1]) / movielens.WHEEL).write_bytes(self.data)
        return SimpleNamespace(returncode=0, stderr="")


def test_fetched_once_then_only_verified(tmp_path: Path, wheel: Path, monkeypatch) -> None:
    pip = Pip(wheel.read_bytes())
    monkeypatch.setattr(subprocess, "run", pip)
    said: list[str] = []
    paths = movielens.prepare(tmp_path / "out", say=said.append)
    assert [Path(p).read_bytes() for p in paths] == list(TEXT.values())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(TEXT)
    assert [p.name for p in (tmp_path / "cache/hpc_ctr").iterdir()] == [movielens.WHEEL]
    movielens.prepare(tmp_path / "out", say=said.append)
    assert said[-1] == f"MovieLens-100K is in {tmp_path / 'out'}, checksums verified"
    Path(paths[1]).write_text("changed")                         # comes anew out of the cache
    movielens.prepare(tmp_path / "out", say=said.append)
    assert Path(paths[1]).read_bytes() == TEXT["ml-100k.user"] and pip.calls == 1
    (tmp_path / "cache/hpc_ctr" / movielens.WHEEL).write_text("cut off")
    movielens.prepare(tmp_path / "other", say=said.append)
    assert pip.calls == 2


def test_no_network(tmp_path: Path, wheel: Path, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(None))
    with pytest.raises(DataError, match=r"cannot be downloaded \(ERROR: No matching distribution\); check the network "
                                        r".*--wheel"):
        movielens.prepare(tmp_path / "out", say=lambda text: None)
    movielens.prepare(tmp_path / "out", wheel=str(wheel), say=lambda text: None)


def test_checksums_name_the_file(tmp_path: Path, wheel: Path, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(b"another file"))
    with pytest.raises(DataError, match=rf"{movielens.WHEEL} has the SHA-256 {sha(b'another file')} instead of "):
        movielens.prepare(tmp_path / "out", say=lambda text: None)
    with pytest.raises(DataError, match=r"gone.whl does not exist; --wheel names another file"):
        movielens.prepare(tmp_path / "out", wheel=str(tmp_path / "gone.whl"), say=lambda text: None)
    monkeypatch.setitem(movielens.SHA256, "ml-100k.item", "0" * 64)
    with pytest.raises(DataError, match=r"ml-100k.item in .* has the SHA-256 .* instead of 0000"):
        movielens.prepare(tmp_path / "out", wheel=str(wheel), say=lambda text: None)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["ml-100k.inter", "ml-100k.user"]


def test_an_archive_without_the_files(tmp_path: Path, wheel: Path, monkeypatch) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "nothing here")
    monkeypatch.setattr(movielens, "WHEEL_SHA256", sha(wheel.read_bytes()))
    with pytest.raises(DataError, match=r"ml-100k.inter cannot be unpacked from"):
        movielens.prepare(tmp_path / "out", wheel=str(wheel), say=lambda text: None)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["prepare", *words])
    return args.run(args)


def test_command_movielens(tmp_path: Path, wheel: Path, capsys) -> None:
    assert run("movielens", "--out", str(tmp_path / "out"), "--wheel", str(wheel)) == 0
    assert "is ready" in capsys.readouterr().out


def test_command_synthetic(tmp_path: Path, capsys) -> None:
    words = ["synthetic", "--rows", "500", "--test-rows", "200", "--fields", "3", "--ids", "30", "--dense", "2",
             "--zipf", "1.1", "--model", "linear", "--seed", "9", "--noise", "0.1", "--out", str(tmp_path)]
    assert run(*words) == 0
    notes = json.loads((tmp_path / "synthetic.json").read_text())
    assert notes["settings"]["zipf"] == 1.1 and notes["rows"] == 500 and notes["test_rows"] == 200
    out = capsys.readouterr().out
    assert f"best possible AUC {notes['best_auc']:.4f} on these test rows" in out and "job.yaml" in out
    assert run(*words) == 0
    assert "was there already" in capsys.readouterr().out
