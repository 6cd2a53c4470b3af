"""Tests of the input files of jobs.

A row is one input, such as a line of a text file. A problem is the reason why a row cannot be encoded. A part has a
fixed number of rows of one file, and is read in blocks.
"""

import csv
import gzip
import json
import os
import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_cli.files import rows as reader
from encserve_cli.files.reading import ReadOptions, read_inputs
from encserve_cli.files.rows import MIB, Rows
from encserve_cli.files.storage import open_stream
from encserve_cli.job.inputs import find_inputs, kept_types, read_blocks
from encserve_cli.job.plan import MakeOptions, ModelFacts, Plan
from encserve_cli.job.types import Block, Part, Shard, Work

SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
# str.splitlines splits a text at some of these characters, but none of these characters ends a line of an input file.
# The texts contain no LF and no CR.
TEXT = st.text(st.one_of(st.sampled_from("ab é\"',\t\x85\u2028\x0b\x0c"), st.characters(codec="utf-8"))).map(
    lambda text: text.replace("\n", " ").replace("\r", " ")
)
TEXTS = st.lists(TEXT, max_size=40)
TYPE_OF = {"bool": bool, "double": float}
FACTS = ModelFacts("fake", "1", "f" * 16, "", "mean", 2, 100)


def compressed(data: bytes, path: Path) -> bytes:
    if path.suffix == ".zst":
        return bytes(pa.compress(data, codec="zstd", asbytes=True)) if data else b""
    return gzip.compress(data) if path.suffix == ".gz" else data


def write(path: Path, texts: Sequence[str], row_group_size: int = 7, end: str = "\n") -> Path:
    """Write texts to a file. In all formats except .txt, the column "n" contains the index of each text."""
    suffix = path.suffixes[0]
    if suffix == ".parquet":
        table = pa.table({"n": pa.array(range(len(texts)), pa.int32()), "text": pa.array(texts, pa.string())})
        pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
        return path
    if suffix in (".csv", ".tsv"):
        lines: list[str] = []
        writer = csv.writer(
            type("", (), {"write": lines.append})(), delimiter="\t" if suffix == ".tsv" else ",", lineterminator=end
        )
        writer.writerows([["n", "text"], *enumerate(texts)])
    else:
        lines = [
            (json.dumps({"n": i, "text": it}, ensure_ascii=i % 2 == 0) if suffix == ".jsonl" else it) + end
            for i, it in enumerate(texts)
        ]
    path.write_bytes(compressed("".join(lines).encode(), path))
    return path


def plan_of(arguments: Sequence[str], options: ReadOptions | None = None, part_rows: int = 2048) -> Plan:
    options = options or ReadOptions()
    inputs = find_inputs(arguments)
    return Plan(options, MakeOptions(), FACTS, part_rows, kept_types(inputs, options), tuple(inputs))


def blocks_of(plan: Plan, finished: frozenset[int] = frozenset(), shard: Shard | None = None) -> list[Block]:
    """Return the blocks of all files' parts, except the parts whose numbers are in `finished`."""
    works = [Work(index, 0, None, finished, shard or Shard()) for index in range(len(plan.inputs))]
    return [block for work in works for block in read_blocks(plan, work, lambda: None)]


def values_of(blocks: Sequence[Block]) -> list[Any]:
    return [value for block in blocks for value in block.rows.values]


def read(arguments: Sequence[str], options: ReadOptions | None = None, part_rows: int = 2048) -> list[Any]:
    return values_of(blocks_of(plan_of(arguments, options, part_rows)))


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".txt.gz", ".jsonl.zst", ".csv.gz"])
@given(
    texts=TEXTS,
    part_rows=st.integers(1, 9),
    read_bytes=st.integers(1, 60),
    row_group_size=st.integers(1, 20),
    finished=st.frozensets(st.integers(0, 40)),
)
def test_parts_have_the_same_rows_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory,
    suffix: str,
    texts: list[str],
    part_rows: int,
    read_bytes: int,
    row_group_size: int,
    finished: frozenset[int],
) -> None:
    """Part k starts at row k * part_rows. A continued job reads a missing part in the same blocks as the first job."""
    path = write(tmp_path_factory.getbasetemp() / f"law{suffix}", texts, row_group_size)
    plan = plan_of([str(path)], part_rows=part_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_READ_BYTES", read_bytes)
        blocks = blocks_of(plan)
        assert blocks_of(plan, finished) == [it for it in blocks if it.part.number not in finished]
    assert values_of(blocks) == texts
    assert not any(it.rows.problems for it in blocks)
    numbers = range(-(-len(texts) // part_rows))
    assert sorted({it.part for it in blocks}) == [Part(0, number) for number in numbers]
    for number in numbers:
        part = [it for it in blocks if it.part.number == number]
        assert values_of(part) == texts[number * part_rows : (number + 1) * part_rows]
        assert [it.ends_part for it in part] == [False] * (len(part) - 1) + [True]
    assert [it.ends_file for it in blocks] == [False] * (len(blocks) - 1) + [True] * bool(blocks)
    if "sv" not in suffix:
        assert [number for it in blocks for number in it.rows.numbers] == list(range(1, len(texts) + 1))
    assert plan.rows_of(Shard()) == (len(texts) if suffix in (".txt", ".jsonl", ".parquet") else None)
    assert [it.value for it in read_inputs([], [str(path)], None, ids=False)] == texts


def test_a_block_ends_when_its_texts_are_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_READ_BYTES", 100)
    for suffix in SUFFIXES:
        path = write(tmp_path / f"a{suffix}", ["x" * 90] * 10)
        assert {len(it.rows.values) for it in blocks_of(plan_of([str(path)], part_rows=10))} <= {1, 2}


def test_lines_of_large_files_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", ["one", "two"])
    monkeypatch.setattr("encserve_cli.files.storage._MOST_COUNTED_BYTES", path.stat().st_size)
    assert plan_of([str(path)]).rows_of(Shard()) == 2
    path = write(path, ["one", "two", "three"])
    assert plan_of([str(path)]).rows_of(Shard()) is None


def test_shards_have_every_part_once(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / name, list(map(str, range(100))))) for name in ("a.txt", "b.csv", "c.parquet")]
    plan = plan_of(paths, part_rows=3)
    shares = [blocks_of(plan, shard=Shard(index, 4)) for index in range(4)]
    parts = [it.part for blocks in shares for it in blocks]
    assert sorted(parts) == [it.part for it in blocks_of(plan)]
    assert all(len(blocks) >= 20 for blocks in shares)


@pytest.mark.parametrize("codec", ["", ".gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_texts_exclude_line_ends_and_the_byte_order_mark(tmp_path: Path, codec: str, end: str, last: bool) -> None:
    """Only LF and CRLF end a line. The last line may have no line end.

    A byte order mark at the start of the file is skipped.
    """
    texts = ["one", "two\u2028lines\x85or\rnot", "", "four"]
    data = b"\xef\xbb\xbf" + end.join(texts).encode() + (end.encode() if last else b"")
    path = tmp_path / f"a.txt{codec}"
    path.write_bytes(compressed(data, path))
    for part_rows in (1, 3, 100):
        plan = plan_of([str(path)], part_rows=part_rows)
        assert plan.rows_of(Shard()) == (None if codec else 4)
        assert values_of(blocks_of(plan)) == texts
    assert [it.value for it in read_inputs([], [str(path)], None, ids=False)] == texts
    path = tmp_path / f"a.csv{codec}"
    path.write_bytes(compressed(b"\xef\xbb\xbf" + end.join(["text,n", "a,1", '"b\n\nc",2']).encode(), path))
    rows = rows_of(str(path))
    assert (rows.values, rows.numbers) == (["a", "b\n\nc"], [2, 5])


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".txt.gz", ".csv.zst"])
def test_a_file_without_rows_has_no_parts(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", [])
    full = write(tmp_path / "full.txt", ["one"])
    plan = plan_of([str(path), str(full)])
    assert [it.part for it in blocks_of(plan)] == [Part(1, 0)]
    if suffix != ".parquet":
        for data in (b"", b"\xef\xbb\xbf"):
            path.write_bytes(compressed(data, path))
            assert blocks_of(plan_of([str(path)])) == []


def test_large_dictionary_texts_are_decoded_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large texts take 50 MB in memory and 100 KB in the file. Batches have at most 16 MiB."""
    sizes: list[int] = []
    real = pyarrow.parquet.ParquetFile.iter_batches

    def measured(self: Any, *args: Any, **options: Any) -> Any:
        for batch in real(self, *args, **options):
            sizes.append(batch.nbytes)
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", measured)
    texts = ["short"] * 3500 + ["x" * 100_000] * 500
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"text": texts}), path)
    assert path.stat().st_size < MIB
    assert [len(it) for it in read([str(path)])] == list(map(len, texts))
    assert max(sizes) < 16 * MIB


def test_row_groups_of_finished_parts_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is opened once for all of its parts. Parquet row groups before the first missing part are skipped."""
    begun: list[Any] = []
    parquet, csv_file = write(tmp_path / "a.parquet", ["text"] * 30, 8), write(tmp_path / "a.csv", ["text"] * 30)
    plan = plan_of([str(parquet), str(csv_file)], part_rows=5)
    real = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, row_groups: Any, **options: Any) -> Any:
        begun.append(list(row_groups))
        return real(self, *args, row_groups=row_groups, **options)

    def opened(file: Any) -> Any:
        begun.append("csv")
        return open_stream(file)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    monkeypatch.setattr(reader, "open_stream", opened)
    blocks_of(plan)
    assert begun == [[0, 1, 2, 3], "csv"]
    begun.clear()
    blocks_of(plan, finished=frozenset(range(5)))
    assert begun == [[3], "csv"]


def one_file(path: Path, *lines: str) -> str:
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    return str(path)


def rows_of(argument: str, **options: Any) -> Rows:
    """Return the rows of a file. The file must be small enough for one part."""
    [block] = blocks_of(plan_of([argument], ReadOptions(**options)))
    return block.rows


def test_a_row_without_a_usable_text_is_a_problem_of_that_row(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '"b"', "{", '{"text": null}', '{"text": 5}', '{"n": 1, "m": 2}', '""', "", r'"\ud800"']
    rows = rows_of(one_file(tmp_path / "a.jsonl", *lines, '"\udcff"', "[" * 100_000))
    assert rows.values == ["a", "b", *[None] * 4, "", *[None] * 4]
    assert rows.problems[2].startswith("must be JSON: ")
    assert [rows.problems[i] for i in range(3, 6)] == [
        "is null",
        "must be text; was 5; for token ids, give --ids",
        "has no column 'text'; the columns are 'n', 'm': choose one with --column",
    ]
    assert rows.problems[7].startswith("must be JSON: ")
    assert rows.problems[8] == rows.problems[9] == "must be UTF-8; character 1 is not"
    assert rows.problems[10].startswith("must be JSON: ")
    rows = rows_of(one_file(tmp_path / "a.csv", "n,text", "1,a", "2", "3,b,c", "4,b\udcff", "5,"))
    assert rows.values == ["a", None, None, None, ""]
    assert rows.problems == {
        1: "must have 2 fields, like the first line; had 1",
        2: "must have 2 fields, like the first line; had 3",
        3: "must be UTF-8; character 2 is not",
    }
    assert rows.numbers == [2, 3, 4, 5, 6]
    assert rows_of(one_file(tmp_path / "a.txt", "a", "\udcfe")).problems == {1: "must be UTF-8; character 1 is not"}
    texts = pa.array([b"a", b"b\xff", None, b""], pa.binary())
    damaged = pa.Array.from_buffers(pa.string(), 4, texts.buffers(), texts.null_count)
    pyarrow.parquet.write_table(pa.table({"text": damaged}), tmp_path / "a.parquet")
    rows = rows_of(str(tmp_path / "a.parquet"))
    assert rows.values == ["a", None, None, ""]
    assert rows.problems == {1: "must be UTF-8; character 2 is not", 2: "is null"}


def test_token_ids(tmp_path: Path) -> None:
    """Token ids are read from strings and from lists of any integer type. A row with another value has a problem."""
    ids = [[1, 2], [], None, [3, None], [2**31]]
    for number, its in enumerate((pa.list_(pa.int64()), pa.large_list(pa.uint32()))):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pa.table({"ids": pa.array(ids, its)}), path)
        rows = rows_of(str(path), input_kind="ids")
        assert rows.values == [[1, 2], None, None, None, [2**31]]
        assert rows.problems == {1: "is empty", 2: "is null", 3: "--ids needs a list of whole numbers; was [3, null]"}
    lines = ["[1, 2]", '{"text": [3]}', '"4, 5"', "[true]", "[1.5]", "[]", f"[{2**63}]", '"x"']
    rows = rows_of(one_file(tmp_path / "a.jsonl", *lines), input_kind="ids")
    assert rows.values == [[1, 2], [3], [4, 5], *[None] * 5]
    assert rows.problems[5] == "is empty"
    assert rows.problems[6] == f"--ids needs numbers of at most 64 bits; was {2**63}"
    assert rows_of(one_file(tmp_path / "a.csv", "text", "1 2", '"3,4"'), input_kind="ids").values == [[1, 2], [3, 4]]


def test_vectors(tmp_path: Path) -> None:
    """A row of vectors of any float type becomes a float32 array of shape (seq_len, d_model).

    Rows with ragged, empty, null or non-finite arrays have a problem.
    """
    good = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows: list[Any] = [good.tolist(), [[1.0, 2.0], [3.0]], [], None, [[7.0, 8.0]], [[]], [[float("nan")]]]
    problems = {
        1: "must have vectors of one length; the vectors have between 1 and 2 numbers",
        2: "is empty",
        3: "is null",
        5: "is empty",
        6: "must have finite numbers; has NaN, infinity, or a number too large for float32",
    }

    def check(found: Rows) -> None:
        assert found.problems == problems
        for place, want in ((0, good), (4, np.array([[7, 8]]))):
            value = found.values[place]
            assert isinstance(value, np.ndarray)
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, want)

    for number, its in enumerate((pa.float32(), pa.float64(), pa.float16())):
        numbers = [None if it is None else [np.array(row, np.float16) for row in it] for it in rows]
        table = pa.table({"v": pa.array(numbers if its == pa.float16() else rows, pa.list_(pa.list_(its)))})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
        check(rows_of(str(tmp_path / f"{number}.parquet"), input_kind="vectors"))
    check(rows_of(one_file(tmp_path / "a.jsonl", *map(json.dumps, rows)), input_kind="vectors"))
    fixed = pa.array([[[1.0, 2.0]], None, [[3.0, 4.0], None]], pa.large_list(pa.list_(pa.float32(), 2)))
    pyarrow.parquet.write_table(pa.table({"v": fixed}), tmp_path / "fixed.parquet")
    found = rows_of(str(tmp_path / "fixed.parquet"), input_kind="vectors")
    assert set(found.problems) == {1, 2}
    np.testing.assert_array_equal(found.values[0], [[1, 2]])
    wrong = rows_of(
        one_file(tmp_path / "b.jsonl", "[1, 2]", '[["1"]]', "[[1e39]]", f"[[{10**400}]]"), input_kind="vectors"
    )
    assert set(wrong.problems) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "texts",
    [
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array(["a", "b", "a"], pa.large_string()),
        pa.array(["a", "b", "a"], pa.string_view()),
    ],
    ids=["dictionary", "large_string", "string_view"],
)
def test_columns_of_every_text_type(tmp_path: Path, texts: Any) -> None:
    """A Parquet column of dictionary, large or view strings can be the input.

    --keep copies such a column to the output as plain strings.
    """
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pa.table({"text": texts, "title": texts}), path, row_group_size=2)
    rows = rows_of(path, keep=("title",))
    assert rows.values == rows.kept["title"].to_pylist() == ["a", "b", "a"]
    assert rows.kept.schema == pa.schema({"title": pa.string()})


def kept_of(plan: Plan) -> Any:
    return pa.concat_tables([it.rows.kept for it in blocks_of(plan)])


def test_kept_columns_are_copied(tmp_path: Path) -> None:
    """--keep copies columns to the output. The columns of Parquet files keep their types.

    If a row has a problem, its values in these columns are still copied.
    """
    columns = {
        "text": ["a", None, "c"],
        "id": pa.array([1, 2, None], pa.int16()),
        "time": pa.array([1, 2, 3], pa.timestamp("us", "UTC")),
        "tags": [["x"], [], None],
    }
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=2)
    options = ReadOptions(keep=("tags", "id", "time"))
    plan = plan_of([path], options, part_rows=2)
    assert list(plan.kept_types) == ["tags", "id", "time"]
    assert plan.kept_types["id"] == "int16"
    kept = kept_of(plan)
    assert kept.to_pydict() == {name: pa.array(columns[name]).to_pylist() for name in options.keep}
    rows = rows_of(one_file(tmp_path / "a.csv", "id,text,x", "1,a,X", "2,b", "3,,Z"), keep=("x", "id"))
    assert rows.kept.to_pydict() == {"x": ["X", None, "Z"], "id": ["1", None, "3"]}


@pytest.mark.parametrize(
    ("values", "its", "want"),
    [
        ([1, None, 2], "int64", [1, None, 2]),
        ([1, 2.5], "double", [1.0, 2.5]),
        ([True, False], "bool", [True, False]),
        ([None, None], "string", [None, None]),
        ([1, "a", None], "string", ["1", "a", None]),
        ([True, 1], "string", ["true", "1"]),
        ([{"é": 1}, [2]], "string", ['{"é": 1}', "[2]"]),
        ([2**63, 1], "string", [str(2**63), "1"]),
    ],
)
def test_fields_of_json_lines_get_one_type(tmp_path: Path, values: list[Any], its: str, want: list[Any]) -> None:
    """If --keep names a field of .jsonl files, the field gets one type for all input files.

    The value is null for a line that is not an object or does not have the field.
    """
    lines = [json.dumps({"text": "t", "x": value}) for value in values]
    first = one_file(tmp_path / "a.jsonl", lines[0], '"no object"', "{")
    second = one_file(tmp_path / "b.jsonl", *lines[1:], '{"text": "t"}')
    options = ReadOptions(keep=("x",))
    plan = plan_of([first, second], options, part_rows=1)
    assert plan.kept_types == {"x": its}
    kept = kept_of(plan)
    assert str(kept.schema.field("x").type) == its
    assert kept["x"].to_pylist() == [want[0], None, None, *want[1:], None]


def test_a_kept_column_has_one_type_in_all_inputs(tmp_path: Path) -> None:
    number, text = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "x": pa.array([1], pa.int32())}), number)
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "x": ["b"]}), text)
    fields = one_file(tmp_path / "a.jsonl", '{"text": "a", "x": 1}')
    nothing = one_file(tmp_path / "b.jsonl", '{"text": "a", "x": null}')
    options = ReadOptions(keep=("x",))
    for others in ([str(number), str(text)], [str(number), fields]):
        with pytest.raises(
            ValueError, match=r"--keep x: is int32 in .*a\.parquet and \w+ in .*the type must be the same"
        ):
            plan_of(others, options)
    plan = plan_of([nothing, str(number)], options)
    assert plan.kept_types == {"x": "int32"}
    assert kept_of(plan)["x"].to_pylist() == [None, 1]
    csv_file = one_file(tmp_path / "a.csv", "text,x", "a,c")
    assert plan_of([str(text), csv_file], options).kept_types == {"x": "string"}
    assert kept_of(plan_of([str(number), str(text)], ReadOptions(keep=("x:string",))))["x"].to_pylist() == ["1", "b"]


def test_a_column_with_a_type(tmp_path: Path) -> None:
    """--keep NAME:TYPE gives a column of any file a type. Null and the empty field of a CSV file are null."""
    csv_file = one_file(tmp_path / "a.csv", "text,x", "a,1", "b,")
    fields = one_file(tmp_path / "a.jsonl", '{"text": "c", "x": 3}', '"d"')
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["e"], "x": pa.array([5], pa.int8())}), table)
    for its, want in (("int64", [1, None, 3, None, 5]), ("double", [1.0, None, 3.0, None, 5.0])):
        plan = plan_of([csv_file, fields, str(table)], ReadOptions(keep=(f"x:{its}",)))
        assert plan.kept_types == {"x": its}
        assert kept_of(plan)["x"].to_pylist() == want
    flags = one_file(tmp_path / "b.csv", "text,x", "a,True", "b,false")
    assert kept_of(plan_of([flags], ReadOptions(keep=("x:bool",))))["x"].to_pylist() == [True, False]


@pytest.mark.parametrize(
    ("its", "value", "shown"),
    [
        ("int64", "0.5", "0.5"),
        ("int64", "true", "true"),
        ("double", str(2**53 + 1), str(2**53 + 1)),
        ("double", "true", "true"),
        ("bool", '"a"', '"a"'),
    ],
)
def test_a_later_value_that_does_not_fit_is_an_error(tmp_path: Path, its: str, value: str, shown: str) -> None:
    """If the type of a column does not hold a value, the job fails. A value is never changed silently."""
    path = one_file(tmp_path / "a.jsonl", '{"text": "a", "x": null}', f'{{"text": "a", "x": {value}}}')
    with pytest.raises(
        ValueError, match=rf"a\.jsonl, line 2: --keep x: must fit into the type {its}.*was {shown}; begin"
    ):
        kept_of(plan_of([path], ReadOptions(keep=(f"x:{its}",))))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_kept_text_that_is_not_utf8_is_an_error(tmp_path: Path, name: str) -> None:
    lines = {"a.csv": ["text,x", "a,b", "a,M\udcfcller"], "a.jsonl": ['{"text": "", "x": "b"}', r'{"x": ["\ud800x"]}']}
    path = one_file(tmp_path / name, *lines[name])
    with pytest.raises(ValueError, match=rf"{name}, line \d: --keep x: must be UTF-8; was .*\\ud[8c]"):
        kept_of(plan_of([path], ReadOptions(keep=("x:string",))))


@pytest.mark.parametrize(
    "text", ["9007199254740993", "1e-400", "1e400", "0.12345678901234567891", "1e-9999999999999999999"]
)
def test_a_text_that_a_double_changes_is_an_error(tmp_path: Path, text: str) -> None:
    path = one_file(tmp_path / "a.csv", "text,x", "a,1", f"a,{text}")
    with pytest.raises(ValueError, match=rf"a\.csv, line 3: --keep x: must fit into the type double.*was \"{text}\""):
        kept_of(plan_of([path], ReadOptions(keep=("x:double",))))


@given(number=st.floats(), digits=st.integers(16, 30))
def test_a_double_can_be_read_from_its_text(
    tmp_path_factory: pytest.TempPathFactory, number: float, digits: int
) -> None:
    """The type double reads a number from the shortest text that Python prints for the number.

    The type also reads longer texts of at least 17 digits, and rounds them to the number.
    """
    texts = [repr(number), f"{number:.{digits}e}", f"{number:.1100f}", "0.1000", "1e3", "-0"]
    path = one_file(tmp_path_factory.getbasetemp() / "a.csv", "text,x", *(f"a,{it}" for it in texts))
    kept = kept_of(plan_of([path], ReadOptions(keep=("x:double",))))["x"].to_pylist()
    np.testing.assert_array_equal(kept, [number, number, number, 0.1, 1000, 0])


@pytest.mark.parametrize(
    ("column", "its", "fits", "shown"),
    [
        (pa.array([0, 1, None, 5]), "bool", 3, "5"),
        (pa.array([0.0, 1.0, 0.5]), "bool", 2, "0.5"),
        (pa.array([float("nan"), 0.5], pa.float32()), "double", 2, ""),
        (pa.array([1, None, 2**53 + 1]), "double", 2, "9007199254740993"),
        (pa.array(["0.1", "9007199254740993"]).dictionary_encode(), "double", 1, "9007199254740993"),
        (
            pa.array([Decimal("0.1"), None, Decimal("12345678901234567.8")], pa.decimal128(38, 18)),
            "double",
            2,
            "12345678901234567.8",
        ),
        (pa.nulls(2), "double", 2, ""),
    ],
)
def test_a_column_of_parquet_that_a_type_changes_is_an_error(
    tmp_path: Path, column: Any, its: str, fits: int, shown: str
) -> None:
    path = str(tmp_path / "a.parquet")
    options = ReadOptions(keep=(f"x:{its}",))
    pyarrow.parquet.write_table(pa.table({"text": ["a"] * fits, "x": column[:fits]}), path)
    want = [None if it is None else TYPE_OF[its](it) for it in column[:fits].to_pylist()]
    np.testing.assert_array_equal(kept_of(plan_of([path], options))["x"].to_pylist(), want)
    if shown:
        pyarrow.parquet.write_table(pa.table({"text": ["a"] * len(column), "x": column}), path)
        with pytest.raises(
            ValueError, match=rf"a\.parquet, row {fits + 1}: --keep x: must fit into the type {its}.*was {shown}"
        ):
            kept_of(plan_of([path], options))


@pytest.mark.parametrize(
    ("name", "lines", "options", "problem"),
    [
        (
            "a.csv",
            ["n,m", "1,2"],
            {},
            r"a\.csv, line 1: has no column 'text'; the columns are 'n', 'm': choose one with --column",
        ),
        ("a.csv", ["text,n", '"a'], {}, r"a\.csv, line 2: unexpected end of data"),
        ("a.csv", ["text", "a"], {"keep": ("x",)}, r"a\.csv: has no column 'x' for --keep; the columns are 'text'"),
        ("a.csv", ["x,y", "a,b"], {"column": "x", "keep": ("x",)}, "--keep x: is the column of the inputs"),
        ("a.csv", ["x", "a"], {"keep": ("x",)}, "--keep x: is the column of the inputs"),
        ("a.csv", ["text", "a"], {"keep": ("x", "x")}, "--keep x: is given twice"),
        ("a.csv", ["x,vector", "a,b"], {"column": "x", "keep": ("vector",)}, "the job writes a column 'vector'"),
        ("a.csv", ["text", "a"], {"input_kind": "vectors"}, r"vectors are read from \.jsonl and \.parquet files"),
        ("a.txt", ["a"], {"column": "x"}, r"--column is for \.jsonl, \.csv, \.tsv and \.parquet"),
        ("a.txt", ["a"], {"keep": ("x",)}, r"--keep is for \.jsonl, \.csv, \.tsv and \.parquet"),
        ("a.jsonl", ['{"text": "a"}'], {"keep": ("x",)}, r"a\.jsonl: none of the first 1 lines has a field 'x'"),
        ("a.parquet", ["no parquet"], {}, r"a\.parquet: cannot be read as Parquet: "),
        ("a.txt.gz", ["no gzip"], {}, r"a\.txt\.gz: cannot be read as gzip: "),
        ("a.csv.zst", ["no zstd"], {}, r"a\.csv\.zst: cannot be read as zstd: "),
    ],
)
def test_files_that_cannot_be_planned(
    tmp_path: Path, name: str, lines: list[str], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        plan_of([one_file(tmp_path / name, *lines)], ReadOptions(**options))


def test_a_column_of_another_type_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    table = pa.table({"text": [1], "ids": [[1]], "vectors": [[[1.5]]], "other": ["a"]})
    pyarrow.parquet.write_table(table, path)
    for column, kind, problem in (
        (None, "text", r"column 'text' must be of text; its type is int64$"),
        ("ids", "text", r"must be of text; its type is list<.*int64>; for token ids, give --ids"),
        ("text", "ids", "must be of lists of whole numbers; its type is int64"),
        ("vectors", "ids", "must be of lists of whole numbers; its type is list"),
        ("ids", "vectors", "must be of lists of lists of floating-point numbers; its type is list"),
        ("x", "text", r"a\.parquet: has no column 'x'; the columns are 'text', 'ids', 'vectors', 'other'"),
    ):
        with pytest.raises(ValueError, match=problem):
            plan_of([path], ReadOptions(kind, column))  # type: ignore[arg-type]


def test_damaged_files(tmp_path: Path) -> None:
    """If a file is truncated or damaged, reading fails with a one-line error that names the file."""
    texts = [f"{random.Random(i).random()}" for i in range(5000)]
    for name in ("a.parquet", "a.txt.gz", "a.jsonl.zst"):
        path = write(tmp_path / name, texts, 1000)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=rf"/{name}: cannot be read as \w+: [^\n]+$"):
            read([str(path)])
    path = write(tmp_path / "b.parquet", texts, 1000)
    data = path.read_bytes()
    path.write_bytes(data[:2000] + random.Random(0).randbytes(20_000) + data[22_000:])
    with pytest.raises(ValueError, match=r"/b\.parquet: cannot be read as Parquet: [^\n]+$"):
        read([str(path)])


def test_arguments_of_a_job_are_files_that_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", ["a"])
    (tmp_path / "b.xlsx").write_text("")
    (tmp_path / "folder.parquet").mkdir()
    monkeypatch.chdir(tmp_path)
    for arguments, problem in (
        (["-"], "standard input can be read only once"),
        (["a text"], "a text: there is no such file; inputs end in .txt"),
        (["a.txt", str(path)], "a.txt: is given twice"),
        (["b.xlsx"], "b.xlsx: is a file of an unknown kind; known kinds: .txt"),
        (["folder.parquet"], r"folder.parquet: is a folder; name the files, for example folder.parquet/\*.parquet"),
        (["https://example.org/a.csv"], "https://example.org/a.csv: cannot be read: Unrecognized filesystem type"),
        (["s3://bucket/folder"], "s3://bucket/folder: must end in .txt"),
        (["s3://bucket/a b.csv"], "s3://bucket/a b.csv: cannot be read: Cannot parse URI"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=problem):
            plan_of(arguments)
    with pytest.raises(FileNotFoundError, match=r"^c\.txt: there is no such file; check the path$"):
        plan_of(["c.txt"])
    with pytest.raises(ValueError, match=r"a\.txt: is given twice"):
        plan_of(["a.txt", path.as_uri()])
    os.mkfifo("d.txt")
    with pytest.raises(ValueError, match=r"d\.txt: is not a regular file"):
        plan_of(["d.txt"])
    [file] = find_inputs([path.as_uri()])
    assert file == find_inputs(["a.txt"])[0]
    assert (file.uri, file.size_bytes, file.modified_ns) == (str(path), 2, path.stat().st_mtime_ns)


def test_a_file_that_is_changed_while_the_job_runs(tmp_path: Path) -> None:
    """A file is refused if size or checksum has changed. A new time alone is accepted."""
    for suffix in (".txt", ".parquet", ".csv.gz"):
        path = write(tmp_path / f"a{suffix}", ["one", "two"])
        plan = plan_of([str(path)])
        os.utime(path, ns=(0, 0))
        assert values_of(blocks_of(plan)) == ["one", "two"]
        write(path, ["one", "2nd"])
        with pytest.raises(ValueError, match=f"a{suffix}: was changed since the job began; put the old file back"):
            blocks_of(plan)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            blocks_of(plan)


def test_a_checksum_covers_the_beginning_and_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    checksums = set()
    for change in (None, 0, 100_000, 3 * 2**20 - 1):
        data = bytearray(b"a" * (3 * 2**20))
        if change is not None:
            data[change] = ord("b")
        path.write_bytes(data)
        checksums.add(find_inputs([str(path)])[0].checksum)
    assert len(checksums) == 4


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl"])
def test_a_line_that_is_too_long_is_a_problem_of_that_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(reader, "_MOST_LINE_BYTES", 20)
    monkeypatch.setattr(reader, "MIB", 7)
    texts = ["one", "x" * 50, "y" * 10, "z" * 30]
    path = tmp_path / f"a{suffix}"
    lines = [f'"{it}"' for it in texts] if suffix == ".jsonl" else texts
    for end in ("\n", ""):
        path.write_bytes(compressed(("\n".join(lines) + end).encode(), path))
        rows = rows_of(str(path))
        assert rows.values == ["one", None, "y" * 10, None]
        assert set(rows.problems.values()) == {"must be a line of at most 16 MiB"}
        assert list(rows.problems) == [1, 3]


@pytest.mark.parametrize("length", [20, 21, 22, 23, 24, 50])
def test_a_long_first_line_after_a_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The byte order mark does not count towards the length of the line. A line that is too long becomes one row."""
    monkeypatch.setattr(reader, "_MOST_LINE_BYTES", 21)
    path = one_file(tmp_path / "a.txt", "\ufeff" + "x" * (length - 1), "two")
    assert read([path]) == ["x" * (length - 1) if length <= 21 else None, "two"]


def test_a_long_line_of_a_csv_file_ends_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MOST_LINE_BYTES", 20)
    path = one_file(tmp_path / "a.csv", "text", "a", "x" * 50)
    with pytest.raises(ValueError, match=r"a\.csv, line 3: must be a line of at most 16 MiB"):
        read([path])


def test_gzip_with_padding(tmp_path: Path) -> None:
    """Read a gzip file with two members and zeros at the end. Tapes and some tools add such zeros."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n") + bytes(1000))
    assert read([str(path)]) == ["one", "two"]


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".txt.gz", ".jsonl.zst"])
def test_a_file_name_that_is_not_utf8(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", ["one"]).rename(tmp_path / f"caf\udce9{suffix}")
    assert read([str(path)]) == ["one"]
    [sent] = read_inputs([], [str(path)], None, ids=False)
    assert sent.where.startswith(f"{tmp_path}/caf\ufffd{suffix}, ")
    if suffix in (".jsonl", ".parquet", ".txt.gz", ".jsonl.zst"):
        path.write_bytes(b"\x00")
        with pytest.raises(ValueError, match=f"caf\ufffd{suffix}") as error:
            list(read_inputs([], [str(path)], None, ids=False))
        assert str(error.value).encode()
