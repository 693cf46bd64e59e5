"""Settings of the data: every wrong one gives one sentence that names it."""

import json
from pathlib import Path

import pytest
import yaml
from data_common import ONE, read_all, write_rows

from hpc_ctr.data.blocks import find_file
from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.schema import CategoricalColumn, DenseColumn, Label, Schema
from hpc_ctr.data.source import field_names, open_source
from hpc_ctr.errors import UsageError

REC = {"format": "recbole", "schema": {"label": "r > 3", "categorical": ["u"]}}


@pytest.mark.parametrize("entry, wanted", [
    ({"files": []}, "data.files: no file is named"),
    ({"files": 3}, "data.files: 3 must be a list of file names"),
    ({"batchsize": 4}, r"data.batchsize: there is no such setting .*did you mean 'batch_size'\?"),
    ({"format": "critoe"}, r"data.format: 'critoe' is not one of criteo, recbole; did you mean 'criteo'\?"),
    ({"batch_size": 0}, "data.batch_size: 0 must be a whole number of at least 1"),
    ({"batch_size": 1.5}, "data.batch_size: 1.5 must be a whole number"),
    ({"batch_size": True}, "data.batch_size: True must be"),
    ({"epochs": 0}, "data.epochs: 0 must be"),
    ({"shuffle": "yes"}, "data.shuffle: 'yes' must be true or false"),
    ({"shuffle_blocks": 0}, "data.shuffle_blocks: 0"),
    ({"block_bytes": "many"}, "data.block_bytes: 'many' is not a size"),
    ({"block_bytes": "2GiB"}, "data.block_bytes: '2GiB' is more than 1GiB"),
    ({"deal": "card"}, "data.deal: 'card' is not one of block, batch"),
    ({"max_bad_share": 2}, "data.max_bad_share: 2 must be a number from 0 to 1"),
    ({"max_bad_reported": 0}, "data.max_bad_reported: 0"),
    ({"max_bad_share": "1e"}, "data.max_bad_share: '1e' must be a number"),
    ({"batch_size": 10**30}, "data.batch_size: 10+ must be a whole number .* below 2\\^63"),
    ({"split": "time"}, "data.split: 'time' must be a mapping"),
    ({"split": {"bye": "time"}}, r"data.split.bye: there is no such setting \(known: by, test\); did you mean 'by'"),
    ({"split": {"by": "tme"}}, r"data.split.by: 'tme' is not one of .*did you mean 'time'\?"),
    ({"split": {"by": "hash", "test": 0}}, "data.split.test: 0 must lie between 0 and 1"),
    ({"split": {"by": "hash", "test": "x"}}, "data.split.test: 'x' must be a number"),
    ({"split": {"by": "files"}}, "data.test_files: split.by is files, so name the files"),
    ({"test_files": ["b"]}, "data.test_files: they are used only with split.by: files"),
    ({"split": {"by": "time"}}, "data.schema.time: split.by is time, so name the column"),
    ({"user_file": "u"}, "data.user_file: only format recbole joins files"),
    ({"format": "recbole"}, "data.schema: format recbole needs one"),
    ({"schema": {"label": "labl"}}, "data.schema.label: column 'labl' is not in format criteo"),
    ({"schema": {"time": "t"}}, "data.schema.time: format criteo has no time column"),
    ({"schema": {"categorical": [{"column": "C1", "separator": ","}]}}, "holds one id a cell"),
    ({"schema": {"categorical": "C1"}}, "data.schema.categorical: 'C1' must be a list of columns"),
    ({"schema": {"categorical": [{"column": "C1", "seperator": ","}]}},
     r"data.schema.categorical\[0\].seperator: there is no such setting .*did you mean 'separator'\?"),
    ({"schema": {"categorical": [{"name": "C1"}]}}, r"data.schema.categorical\[0\].name: there is no such setting"),
    ({"schema": {"categorical": [3]}}, r"data.schema.categorical\[0\]: 3 must be a column name"),
    ({"schema": {"categorical": [{"separator": ","}]}}, r"data.schema.categorical\[0\].column: None must be the name"),
    ({"schema": {"categorical": [{"column": "a", "missing": "drop"}]}}, "missing: 'drop' is not one of key, skip"),
    ({"schema": {"dense": [{"column": "a", "transform": "log"}]}},
     r"data.schema.dense\[0\].transform: 'log' is not one of none, log1p; did you mean 'log1p'\?"),
    ({"schema": {"dense": ["a", "a"]}}, "data.schema.dense: column 'a' is listed twice"),
    ({"schema": {"dense": [], "categorical": []}}, "nothing to learn from"),
    ({"schema": {"labels": "x"}}, r"data.schema.labels: there is no such setting .*did you mean 'label'\?"),
    ({"schema": 7}, "data.schema: 7 must be a mapping"),
    ({**REC, "schema": {"label": "r >= ", "categorical": ["u"]}}, "data.schema.label: 'r >= ' is not \"column"),
    ({**REC, "schema": {"label": "r => 4", "categorical": ["u"]}}, "data.schema.label: column 'r =' is not in"),
    ({**REC, "schema": {"label": "", "categorical": ["u"]}}, "data.schema.label: '' must be a column name"),
    ({**REC, "schema": {"label": "r > 3", "categorical": ["r"]}}, "column 'r' is the label; a model must not see it"),
])
def test_wrong_settings(entry: dict, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("r:float\tu:token\n1\t2\n")
    with pytest.raises(UsageError, match=wanted) as caught:
        open_source(DataOptions.from_dict({"files": [str(tmp_path / "a")], **entry}), 1)
    assert "\n" not in str(caught.value)


def test_left_out_for_criteo_is_its_schema() -> None:
    options = DataOptions.from_dict({"files": ["a"]})
    assert options.schema == Schema.criteo()
    assert field_names(options) == [f"C{i}" for i in range(1, 27)]
    assert options.schema.dense[12] == DenseColumn("I13", "log1p")
    some = DataOptions.from_dict({"files": ["a"], "schema": {"label": "label >= 1", "categorical": ["C1"]}})
    assert len(some.schema.dense) == 13 and field_names(some) == ["C1"]


def test_entries_of_columns() -> None:
    assert CategoricalColumn.from_entry("genre") == CategoricalColumn("genre", None, "key")
    assert CategoricalColumn.from_entry({"column": "genre", "separator": " "}) == CategoricalColumn("genre", " ")
    assert DenseColumn.from_entry("age") == DenseColumn("age", "none")
    assert Label.parse("rating>=4") == Label("rating", ">=", 4) and Label.parse(" y ") == Label("y")
    assert Label.parse("a b != -1.5e1") == Label("a b", "!=", -15)
    for operator, wanted in ((">=", [0, 1, 1]), (">", [0, 0, 1]), ("<=", [1, 1, 0]), ("<", [1, 0, 0]),
                             ("==", [0, 1, 0]), ("!=", [1, 0, 1])):
        import numpy as np
        assert Label("x", operator, 2).apply(np.array([1.0, 2.0, 3.0])).tolist() == wanted


def test_numbers_that_yaml_takes_for_text() -> None:
    options = DataOptions.from_dict({"files": ["a"], "max_bad_share": "1e-3", "split": {"by": "hash", "test": "1e-1"}})
    assert (options.max_bad_share, options.split.test) == (1e-3, 0.1)


def test_to_dict_and_back() -> None:
    options = DataOptions.from_dict({
        "format": "recbole", "files": ["a"], "user_file": "u", "split": {"by": "time", "test": 0.1}, "shuffle": False,
        "schema": {"label": "r >= 4", "dense": [{"column": "age", "transform": "log1p"}], "time": "t",
                   "categorical": ["u", {"column": "g", "separator": " ", "missing": "skip"}]}})
    plain = options.to_dict()
    assert DataOptions.from_dict(yaml.safe_load(yaml.safe_dump(plain))) == options
    assert DataOptions.from_dict(json.loads(json.dumps(plain))) == options


def test_names_and_patterns_of_files(tmp_path: Path, monkeypatch) -> None:
    for i in range(3):
        write_rows(tmp_path / f"part-{i}.tsv", i * 10, 10)

    def rows(files, **more) -> int:
        entry = {"files": files, "schema": ONE, **more}
        return sum(b.size for b in read_all(open_source(DataOptions.from_dict(entry), 1)))

    assert rows([str(tmp_path / "part-*.tsv")]) == 30
    assert rows(["part-*.tsv"], base_dir=str(tmp_path)) == 30
    assert rows("part-1.tsv", base_dir=str(tmp_path)) == 10
    with pytest.raises(UsageError, match=r"data.files: there is no file 'gone.tsv' or '.*gone.tsv'"):
        rows(["gone.tsv"], base_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"data.files: no file matches 'gone-\*'"):
        rows(["gone-*"])
    with pytest.raises(UsageError, match="is not a file; name the files"):
        rows([str(tmp_path)])
    with pytest.raises(UsageError, match="is named twice"):
        rows([str(tmp_path / "part-*.tsv"), str(tmp_path / "part-1.tsv")])
    (tmp_path / "link").symlink_to(tmp_path / "part-1.tsv")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="link' is named twice"):
        rows([str(tmp_path / "part-1.tsv"), str(tmp_path / "link")])
    with pytest.raises(UsageError, match="broken' is not a regular file"):
        rows([str(tmp_path / "broken")])
    with pytest.raises(UsageError, match=r"data.user_file: .* matches 3 files, .*part-0.tsv and .*part-1.tsv among them"):
        find_file(str(tmp_path / "part-*.tsv"), "data.user_file")
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(UsageError, match=r"data.files: the files hold no rows"):
        rows([str(tmp_path / "empty.tsv")])
    assert rows([str(tmp_path / "empty.tsv"), str(tmp_path / "part-0.tsv")]) == 10
    monkeypatch.chdir(tmp_path)
    assert rows(["part-2.tsv"]) == 10
