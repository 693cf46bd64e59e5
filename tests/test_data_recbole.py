"""RecBole atomic files: joined tables, multi-valued fields, awkward cells, and headers that do not fit."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from data_common import read_all

from hpc_ctr.data.keys import missing_key, text_key
from hpc_ctr.data.options import DataOptions
from hpc_ctr.data.source import field_names, open_source
from hpc_ctr.errors import DataError, UsageError

INTER = ("user_id:token\titem_id:token\trating:float\ttimestamp:float\ttags:token_seq\n"
         "7\tA\t5\t881250949\tred blue red\n"
         "8\tB\t3.5\t881250950\t\r\n"
         "9\tA\t4\t1.5\t  lone \n"                                    # unknown user
         "7\t\t1\t-3\tred")                                           # no item, no line end
USER = "user_id:token\tage:token\tgender:token\n8\t\t\n7\t30\tF\n"
ITEM = ("item_id:token\tclass:token_seq\tyear:float\tprice:float\n"
        "B\tDrama\t1994\t2\nA\tAction|Children's||Action\t\t0\nC\t\t2000\t1\n")
SCHEMA = {"label": "rating >= 4", "dense": [{"column": "age", "transform": "log1p"}, "price"],
          "categorical": ["user_id", "gender", {"column": "class", "separator": "|"}, "tags",
                          {"column": "year", "missing": "skip"}],
          "time": "timestamp"}


def files(tmp_path: Path, inter: str = INTER, user: str = USER, item: str = ITEM, gz: bool = False) -> dict:
    for name, text in (("x.inter", inter), ("x.user", user), ("x.item", item)):
        (tmp_path / name).write_text(text)
    if gz:
        (tmp_path / "x.inter.gz").write_bytes(gzip.compress(inter.encode()))
    return {"format": "recbole", "files": [str(tmp_path / ("x.inter.gz" if gz else "x.inter"))], "shuffle": False,
            "user_file": str(tmp_path / "x.user"), "item_file": str(tmp_path / "x.item")}


def source(tmp_path: Path, schema: dict | None = None, gz: bool = False, inter: str = INTER, user: str = USER,
           item: str = ITEM, **more):
    entry = files(tmp_path, inter, user, item, gz) | {"schema": SCHEMA if schema is None else schema} | more
    return open_source(DataOptions.from_dict(entry), seed=1)


def bags(batch, fields: int) -> list[list[list[int]]]:
    """Keys by sample and field."""
    size = batch.size
    return [[batch.keys[batch.offsets[f * size + b]:batch.offsets[f * size + b + 1]].tolist() for f in range(fields)]
            for b in range(size)]


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 30, 1000])
def test_joined_rows(tmp_path: Path, gz: bool, block_bytes: int) -> None:
    src = source(tmp_path, gz=gz, block_bytes=block_bytes)
    assert [(f.name, f.multi) for f in src.fields] == [("user_id", False), ("gender", False), ("class", True),
                                                       ("tags", True), ("year", True)]
    assert field_names(src.options) == [f.name for f in src.fields]
    (batch,) = read_all(src)
    assert batch.label.tolist() == [1, 0, 1, 0]
    age = math.log(31)
    assert np.allclose(batch.dense, [[age, 0], [0, 2], [0, 0], [age, 0]])

    def keys(field: str, *texts: str) -> list[int]:
        return [text_key(field, text) for text in texts]

    def missing(field: str) -> list[int]:
        return [missing_key(field)]

    action = keys("class", "Action", "Children's", "Action")
    assert bags(batch, 5) == [
        [keys("user_id", "7"), keys("gender", "F"), action, keys("tags", "red", "blue", "red"), []],
        [keys("user_id", "8"), missing("gender"), keys("class", "Drama"), missing("tags"), keys("year", "1994")],
        [keys("user_id", "9"), missing("gender"), action, keys("tags", "lone"), []],
        [keys("user_id", "7"), keys("gender", "F"), missing("class"), keys("tags", "red"), []]]
    assert (src.bad_rows.count, src.bad_rows.total) == (0, 4)
    assert src.bad_rows.unmatched == {"user": 1, "item": 1}
    assert any("user" in line for line in src.bad_rows.lines())


def test_rows_shuffled_in_batches_keep_their_bags(tmp_path: Path) -> None:
    plain = read_all(source(tmp_path, batch_size=10))[0]
    mixed = read_all(source(tmp_path, batch_size=3, shuffle=True))
    assert sorted(row for b in mixed for row in bags(b, 5)) == sorted(bags(plain, 5))


def test_separators_and_single_values(tmp_path: Path) -> None:
    inter = "id:token\tlabel:float\tt:token_seq\tu:token\n1\t1\ta b\tx, y, ,z\n2\t0.0\tc\t,\n"
    schema = {"categorical": [{"column": "t", "separator": ""}, {"column": "u", "separator": ", ", "missing": "skip"}]}
    src = open_source(DataOptions.from_dict(files(tmp_path, inter) | {"schema": schema, "user_file": "",
                                                                      "item_file": ""}), 1)
    (batch,) = read_all(src)
    assert batch.label.tolist() == [1, 0] and batch.dense.shape == (2, 0)
    assert bags(batch, 2) == [[[text_key("t", "a b")], [text_key("u", "x"), text_key("u", "y"), text_key("u", ",z")]],
                              [[text_key("t", "c")], [text_key("u", ",")]]]


def test_bad_rows_are_named(tmp_path: Path) -> None:
    good = "7\tA\t5\t1\ttag\n"
    inter = INTER.splitlines()[0] + "\n" + good + "7\tA\tfive\t1\ttag\n" + good + "7\tA\t\t1\t\n" + "7\tA\t5\n" \
        + "\n" + good + "7\tA\t5\tnoon\ttag\n" + "7\tA\t5\t\ttag\n"
    src = source(tmp_path, inter=inter, split={"by": "time", "test": 0.5}, max_bad_share=0.9, block_bytes=20)
    read_all(src)
    assert [(n, reason) for _, n, reason in src.bad_rows.examples] == [
        (3, "column 3 (rating): 'five' is not a label (0 or 1, or a number where it is compared)"),
        (5, "column 3 (rating): the label is empty"), (6, "3 columns instead of 5"), (7, "the line is empty"),
        (9, "column 4 (timestamp): 'noon' is not a time"), (10, "column 4 (timestamp): '' is not a time")]
    plain = source(tmp_path, inter=inter, max_bad_share=0.9)
    assert sum(b.size for b in read_all(plain)) == 5                 # the time is not needed
    label = source(tmp_path, inter=inter, schema={"label": "rating", "categorical": ["user_id"]}, max_bad_share=1)
    read_all(label)
    assert label.bad_rows.count == 9 and "'5' is not a label" in label.bad_rows.examples[0][2]


def test_bad_rows_of_a_side_table(tmp_path: Path) -> None:
    user = "user_id:token\tage:token\tgender:token\n7\told\tF\n8\t20\tM\n9\t1\n"
    with pytest.raises(DataError, match=r"2 of 6 rows .*x.user, line 2: column 2 \(age\): 'old' is not a number"):
        source(tmp_path, user=user)
    src = source(tmp_path, user=user, max_bad_share=0.9)
    (batch,) = read_all(src)
    assert np.allclose(batch.dense[:, 0], [0, math.log(21), 0, 0])
    assert src.bad_rows.count == 2 and src.bad_rows.examples[1][1:] == (4, "2 columns instead of 3")
    assert src.bad_rows.unmatched == {"user": 3, "item": 1}


def test_a_side_table_without_rows(tmp_path: Path) -> None:
    src = source(tmp_path, user=USER.splitlines()[0] + "\n")
    (batch,) = read_all(src)
    assert not batch.dense[:, 0].any() and src.bad_rows.unmatched == {"user": 4, "item": 1}


def test_several_files_with_one_header(tmp_path: Path) -> None:
    entry = files(tmp_path)
    (tmp_path / "y.inter").write_text(INTER)
    entry["files"].append(str(tmp_path / "y.inter"))
    src = open_source(DataOptions.from_dict(entry | {"schema": SCHEMA}), 1)
    assert sum(b.size for b in read_all(src)) == 8
    (tmp_path / "y.inter").write_text(INTER.replace("rating", "stars"))
    with pytest.raises(UsageError, match=r"y.inter has another header than x.inter"):
        open_source(DataOptions.from_dict(entry | {"schema": SCHEMA}), 1)


@pytest.mark.parametrize("schema, wanted", [
    ({**SCHEMA, "label": "ratng >= 4"}, r"data.schema.label: column 'ratng' is not in x.inter \(columns: user_id, "
                                        r"item_id, rating, timestamp, tags\); did you mean 'rating'\?"),
    ({**SCHEMA, "label": "Rating"}, r"data.schema.label: column 'Rating' is not in x.inter .*mean 'rating'"),
    ({**SCHEMA, "label": "tags", "categorical": []}, "column 'tags' of x.inter is a token_seq; one number"),
    ({**SCHEMA, "dense": ["agee"]}, r"data.schema.dense\[0\]: column 'agee' is in none of the files .*mean 'age'\?"),
    ({**SCHEMA, "dense": ["tags"]}, r"data.schema.dense\[0\]: column 'tags' is a token_seq"),
    ({**SCHEMA, "categorical": ["user_id", "clas"]}, r"data.schema.categorical\[1\]: column 'clas' .*mean 'class'\?"),
    ({**SCHEMA, "time": "time"}, r"data.schema.time: column 'time' is not in x.inter"),
])
def test_schemas_that_do_not_fit(tmp_path: Path, schema: dict, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        source(tmp_path, schema, split={"by": "time"})


@pytest.mark.parametrize("part, text, wanted", [
    ("inter", "", "data.files: x.inter is empty; a RecBole file begins with a header"),
    ("inter", "user_id\titem_id\n", "data.files: x.inter, line 1: 'user_id' is not name:type"),
    ("inter", "user_id:tokn\n", r"'user_id:tokn' is not name:type .*did you mean 'token'\?"),
    ("inter", "a:token\ta:float\n", "data.files: x.inter, line 1: column 'a' stands there twice"),
    ("inter", INTER.splitlines()[0] + "\n", "data.files: the files hold no rows"),
    ("user", "usr_id:token\tage:token\tgender:token\n",
     r"data.user_file: its first column 'usr_id' is not in x.inter .*mean 'user_id'\?"),
    ("user", USER + "7\t1\tM\n", r"data.user_file: .*x.user, line 4: this user_id stands there twice"),
    ("item", ITEM.replace("price", "gender"), "column 'gender' is in several of the joined files"),
])
def test_headers_and_tables_that_do_not_fit(tmp_path: Path, part: str, text: str, wanted: str) -> None:
    schema = {**SCHEMA, "dense": ["age"]}
    with pytest.raises(UsageError, match=wanted):
        source(tmp_path, schema, **{part: text})


def test_mark_of_byte_order_and_carriage_returns(tmp_path: Path) -> None:
    (batch,) = read_all(source(tmp_path))
    src = source(tmp_path, inter="\ufeff" + INTER.replace("\r\n", "\n").replace("\n", "\r\n"),
                 user=USER.replace("\n", "\r\n"), item=ITEM.replace("\n", "\r\n"))
    (other,) = read_all(src)
    assert np.array_equal(batch.keys, other.keys) and np.array_equal(batch.dense, other.dense)
