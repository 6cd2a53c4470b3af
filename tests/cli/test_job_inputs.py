"""Tests of the input files of a job.

Planning divides the rows of the files into parts. The parts can be read in any order.

A row is one input, such as a line of a text file. A problem is the reason why a row cannot be encoded.
"""

import csv
import gzip
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encserve_cli.files.reading import read_inputs
from encserve_cli.files.storage import open_stream
from encserve_cli.job import measuring
from encserve_cli.job.inputs import PartReader, find_inputs, scan
from encserve_cli.job.types import PartLimits, ReadOptions, Rows, Scan

SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
# str.splitlines splits at some of these characters, but they do not end a line of an input file. The texts contain no
# LF and no CR.
TEXT = st.text(st.one_of(st.sampled_from("ab é\"',\t\x85\u2028\x0b\x0c"), st.characters(codec="utf-8"))).map(
    lambda text: text.replace("\n", " ").replace("\r", " ")
)
TEXTS = st.lists(TEXT, max_size=40)
LIMITS = st.builds(
    PartLimits,
    max_rows=st.integers(1, 9),
    max_text_bytes=st.integers(1, 60),
    max_output_bytes=st.integers(1, 400),
    row_bytes=st.integers(0, 40),
    token_bytes=st.integers(0, 8),
    max_tokens=st.integers(1, 30),
)


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


def read_all(found: Scan, options: ReadOptions, order: Callable[[list[Any]], None] = lambda _: None) -> list[Rows]:
    """Read all parts, and return their rows in the order of the plan.

    `order` may shuffle a list of part indices. The parts are read in the order of this list.
    """
    reader = PartReader(found.inputs, options, found.kept_types)
    places = list(range(len(found.parts)))
    order(places)
    rows = {place: reader.read(found.parts[place]) for place in places}
    reader.close()
    return [rows[place] for place in range(len(found.parts))]


def values_of(parts: Sequence[Rows]) -> list[Any]:
    return [value for part in parts for value in part.values]


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".txt.gz", ".jsonl.zst", ".csv.gz"])
@given(texts=TEXTS, limits=LIMITS, row_group_size=st.integers(1, 20), shuffler=st.randoms(use_true_random=False))
def test_parts_have_every_row_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    suffix: str,
    texts: list[str],
    limits: PartLimits,
    row_group_size: int,
    shuffler: random.Random,
) -> None:
    """The parts contain every row once and in order, for any limits and any order of reading.

    An empty text becomes None and has a problem.
    """
    path = write(tmp_path_factory.getbasetemp() / f"law{suffix}", texts, row_group_size)
    found = scan([str(path)], ReadOptions(), limits)
    [file] = found.inputs
    assert (file.rows, file.uri, file.size_bytes) == (len(texts), str(path), path.stat().st_size)
    assert [it.first_row for it in found.parts] == [
        sum(it.rows for it in found.parts[:i]) for i in range(len(found.parts))
    ]
    assert [it.number for it in found.parts] == list(range(len(found.parts)))
    assert file.in_order == (suffix not in (".txt", ".jsonl", ".parquet"))
    for order in (lambda _: None, shuffler.shuffle):
        parts = read_all(found, ReadOptions(), order)
        assert [len(it.values) for it in parts] == [it.rows for it in found.parts]
        assert values_of(parts) == [text or None for text in texts]
        for rows in parts:
            assert rows.problems == {i: "is empty" for i, value in enumerate(rows.values) if value is None}
            assert rows.kept.num_columns == 0
    if "sv" not in suffix:
        assert [number for rows in parts for number in rows.numbers] == list(range(1, len(texts) + 1))
    if all(texts):
        assert [it.value for it in read_inputs([str(path)], None, ids=False)] == texts


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(texts=TEXTS, limits=LIMITS)
def test_a_part_of_more_than_one_row_keeps_every_limit(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, texts: list[str], limits: PartLimits
) -> None:
    """A part of several rows is within all limits, and one more row would exceed a limit.

    For .jsonl the test does not add a row, because planning knows only upper bounds of the sizes of these texts.
    """
    path = write(tmp_path_factory.getbasetemp() / f"limits{suffix}", texts)
    found = scan([str(path)], ReadOptions(), limits)

    def exceeds(rows: Sequence[str]) -> bool:
        sizes = [len(it.encode()) for it in rows]
        return (
            len(rows) > limits.max_rows
            or sum(sizes) > limits.max_text_bytes
            or sum(limits.output_bytes(it + 16) for it in sizes) > limits.max_output_bytes
        )

    for part in found.parts:
        end = part.first_row + part.rows
        assert part.rows == 1 or not exceeds(texts[part.first_row : end])
        assert part.text_bytes >= sum(len(it.encode()) for it in texts[part.first_row : end])
        if suffix != ".jsonl" and end < len(texts):
            assert exceeds(texts[part.first_row : end + 1])


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@given(texts=TEXTS, limits=LIMITS, block=st.integers(1, 50))
def test_blocks_of_the_planning_pass_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, texts: list[str], limits: PartLimits, block: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / f"blocks{suffix}", texts)
    whole = scan([str(path)], ReadOptions(), limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_BLOCK_BYTES", block)
        assert scan([str(path)], ReadOptions(), limits) == whole


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".tsv"])
def test_compressed_files_have_the_parts_of_uncompressed_ones(tmp_path: Path, suffix: str) -> None:
    texts = [f"text {i} " * (i % 5 + 1) for i in range(50)]
    limits = PartLimits(max_rows=7, max_text_bytes=100)
    plain = scan([str(write(tmp_path / f"a{suffix}", texts))], ReadOptions(), limits)
    want = read_all(plain, ReadOptions())
    for codec in (".gz", ".zst"):
        found = scan([str(write(tmp_path / f"a{suffix}{codec}", texts))], ReadOptions(), limits)
        assert [(it.first_row, it.rows, it.text_bytes) for it in found.parts] == [
            (it.first_row, it.rows, it.text_bytes) for it in plain.parts
        ]
        assert values_of(read_all(found, ReadOptions())) == values_of(want) == texts


@pytest.mark.parametrize("codec", ["", ".gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_and_a_byte_order_mark_are_no_part_of_a_text(
    tmp_path: Path, codec: str, end: str, last: bool
) -> None:
    """Only LF and CRLF end a line. The last line may have no line end.

    A byte order mark at the start of the file is skipped.
    """
    texts = ["one", "two\u2028lines\x85or\rnot", "", "four"]
    data = b"\xef\xbb\xbf" + end.join(texts).encode() + (end.encode() if last else b"")
    path = tmp_path / f"a.txt{codec}"
    path.write_bytes(compressed(data, path))
    for max_rows in (1, 3, 100):
        found = scan([str(path)], ReadOptions(), PartLimits(max_rows=max_rows))
        assert found.inputs[0].rows == 4
        assert values_of(read_all(found, ReadOptions())) == ["one", texts[1], None, "four"]
    assert [it.value for it in read_inputs([str(path)], None, ids=False)] == texts
    path = tmp_path / f"a.csv{codec}"
    path.write_bytes(compressed(b"\xef\xbb\xbf" + end.join(["text,n", "a,1", '"b\n\nc",2']).encode(), path))
    found = scan([str(path)], ReadOptions(), PartLimits())
    [rows] = read_all(found, ReadOptions())
    assert (rows.values, list(rows.numbers)) == (["a", "b\n\nc"], [2, 5])


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".txt.gz", ".csv.zst"])
def test_a_file_without_rows_has_no_parts(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", [])
    full = write(tmp_path / "full.txt", ["one"])
    found = scan([str(path), str(full)], ReadOptions(), PartLimits())
    assert [it.rows for it in found.inputs] == [0, 1]
    assert [(it.input, it.number) for it in found.parts] == [(1, 0)]
    if suffix != ".parquet":
        for data in (b"", b"\xef\xbb\xbf"):
            path.write_bytes(compressed(data, path))
            assert scan([str(path)], ReadOptions(), PartLimits()).parts == ()


def test_row_groups_are_read_once_where_parts_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If parts are read in order, each file is opened once.

    A file is opened again only to read a part before the current position.
    """
    begun: list[str] = []
    parquet, csv_file = write(tmp_path / "a.parquet", ["text"] * 30, 8), write(tmp_path / "a.csv", ["text"] * 30)
    found = scan([str(parquet), str(csv_file)], ReadOptions(), PartLimits(max_rows=5))
    reader = PartReader(found.inputs, ReadOptions(), {})
    real = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        begun.append("parquet")
        return real(self, *args, **options)

    def opened(file: Any) -> Any:
        begun.append("csv")
        return open_stream(file)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    monkeypatch.setattr("encserve_cli.job.sources.open_stream", opened)
    for part in found.parts:
        reader.read(part)
    assert begun == ["parquet", "csv"]
    reader.read(found.parts[-3])
    reader.read(found.parts[-1])
    assert begun == ["parquet", "csv", "csv"]


def one_file(path: Path, *lines: str) -> str:
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    return str(path)


def rows_of(argument: str, **options: Any) -> Rows:
    """Return the rows of a file. The file must be small enough for one part."""
    read = ReadOptions(**options)
    found = scan([argument], read, PartLimits())
    [rows] = read_all(found, read)
    return rows


def test_a_row_without_a_usable_text_is_a_problem_of_that_row(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '"b"', "{", '{"text": null}', '{"text": 5}', '{"n": 1, "m": 2}', '""', "", r'"\ud800"']
    rows = rows_of(one_file(tmp_path / "a.jsonl", *lines, '"\udcff"', "[" * 100_000))
    assert rows.values == ["a", "b", *[None] * 9]
    assert rows.problems[2].startswith("must be JSON: ")
    assert [rows.problems[i] for i in range(3, 7)] == [
        "is null",
        "must be text; was 5; token ids are read with --ids",
        "has no column 'text'; it has 'n', 'm': --column chooses one",
        "is empty",
    ]
    assert rows.problems[7].startswith("must be JSON: ")
    assert rows.problems[8] == rows.problems[9] == "must be UTF-8; was not at character 1"
    assert rows.problems[10].startswith("must be JSON: ")
    rows = rows_of(one_file(tmp_path / "a.csv", "n,text", "1,a", "2", "3,b,c", "4,b\udcff", "5,"))
    assert rows.values == ["a", None, None, None, None]
    assert rows.problems == {
        1: "must have 2 fields as line 1 has; had 1",
        2: "must have 2 fields as line 1 has; had 3",
        3: "must be UTF-8; was not at character 2",
        4: "is empty",
    }
    assert list(rows.numbers) == [2, 3, 4, 5, 6]
    assert rows_of(one_file(tmp_path / "a.txt", "a", "\udcfe")).problems == {1: "must be UTF-8; was not at character 1"}
    texts = pa.array([b"a", b"b\xff", None, b""], pa.binary())
    damaged = pa.Array.from_buffers(pa.string(), 4, texts.buffers(), texts.null_count)
    pyarrow.parquet.write_table(pa.table({"text": damaged}), tmp_path / "a.parquet")
    rows = rows_of(str(tmp_path / "a.parquet"))
    assert rows.values == ["a", None, None, None]
    assert rows.problems == {1: "must be UTF-8; was not at character 2", 2: "is null", 3: "is empty"}


def test_token_ids(tmp_path: Path) -> None:
    """Token ids are read from strings and from lists of any integer type. A row with another value has a problem."""
    ids = [[1, 2], [], None, [3, None], [2**31]]
    for number, its in enumerate((pa.list_(pa.int64()), pa.large_list(pa.uint32()))):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pa.table({"ids": pa.array(ids, its)}), path)
        rows = rows_of(str(path), input_kind="ids")
        assert rows.values == [[1, 2], None, None, None, [2**31]]
        assert rows.problems == {1: "is empty", 2: "is null", 3: "--ids wants a list of whole numbers; was [3, null]"}
    lines = ["[1, 2]", '{"text": [3]}', '"4, 5"', "[true]", "[1.5]", "[]", f"[{2**63}]", '"x"']
    rows = rows_of(one_file(tmp_path / "a.jsonl", *lines), input_kind="ids")
    assert rows.values == [[1, 2], [3], [4, 5], *[None] * 5]
    assert rows.problems[5] == "is empty"
    assert rows.problems[6] == f"--ids wants numbers of at most 64 bits; was {2**63}"
    assert rows_of(one_file(tmp_path / "a.csv", "text", "1 2", '"3,4"'), input_kind="ids").values == [[1, 2], [3, 4]]


@given(
    rows=st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=20),
    limits=LIMITS,
    suffix=st.sampled_from([".parquet", ".jsonl", ".txt", ".csv.gz"]),
)
def test_parts_of_token_ids_keep_every_limit(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], limits: PartLimits, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"ids{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table({"ids": pa.array(rows, pa.list_(pa.int64()))}), path)
    elif suffix == ".jsonl":
        path.write_text("".join(f"{its}\n" for its in rows))
    else:
        head = "text\n" if "csv" in suffix else ""
        lines = head + "".join(f'"{",".join(map(str, its))}"\n' for its in rows)
        path.write_bytes(compressed((lines if head else lines.replace('"', "")).encode(), path))
    options = ReadOptions(input_kind="ids")
    found = scan([str(path)], options, limits)
    assert values_of(read_all(found, options)) == [its or None for its in rows]
    for part in found.parts:
        its = rows[part.first_row : part.first_row + part.rows]
        sizes = list(map(len, its))
        assert part.rows == 1 or len(its) <= limits.max_rows
        assert part.rows == 1 or 8 * sum(sizes) <= limits.max_text_bytes
        assert part.rows == 1 or sum(map(limits.output_bytes, sizes)) <= limits.max_output_bytes


def test_vectors(tmp_path: Path) -> None:
    """A row of vectors of any float type becomes a float32 array of shape (seq_len, d_model).

    Rows with ragged, empty, null or non-finite arrays have a problem.
    """
    good = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows: list[Any] = [good.tolist(), [[1.0, 2.0], [3.0]], [], None, [[7.0, 8.0]], [[]], [[float("nan")]]]
    problems = {
        1: "must have vectors of one length; has some of 1 and some of 2 numbers",
        2: "is empty",
        3: "is null",
        5: "is empty",
        6: "must have finite numbers; has NaN, infinity or one that float32 cannot hold",
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
    limits = PartLimits(max_text_bytes=24)
    parts = scan([str(tmp_path / "0.parquet")], ReadOptions(input_kind="vectors"), limits).parts
    assert [it.text_bytes for it in parts] == [24, 24]
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
def test_columns_of_every_type_of_text(tmp_path: Path, texts: Any) -> None:
    """A Parquet column of dictionary, large or view strings can be the input.

    --keep copies such a column to the output as plain strings.
    """
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pa.table({"text": texts, "title": texts}), path, row_group_size=2)
    rows = rows_of(path, keep=("title",))
    assert rows.values == rows.kept["title"].to_pylist() == ["a", "b", "a"]
    assert rows.kept.schema == pa.schema({"title": pa.string()})


def test_columns_come_along(tmp_path: Path) -> None:
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
    found = scan([path], options, PartLimits(max_rows=2))
    assert list(found.kept_types) == ["tags", "id", "time"]
    assert found.kept_types["id"] == "int16"
    kept = pa.concat_tables([it.kept for it in read_all(found, options)])
    assert kept.to_pydict() == {name: pa.array(columns[name]).to_pylist() for name in options.keep}
    rows = rows_of(one_file(tmp_path / "a.csv", "id,text,x", "1,a,X", "2,b", "3,,Z"), keep=("x", "id"))
    assert rows.kept.to_pydict() == {"x": ["X", None, "Z"], "id": ["1", None, "3"]}


@pytest.mark.parametrize(
    ("values", "its", "want"),
    [
        ([1, None, 2], "int64", [1, None, 2]),
        ([1, 2.5], "double", [1.0, 2.5]),
        ([2**53 + 1, 0.5], "double", [float(2**53), 0.5]),
        ([True, False], "bool", [True, False]),
        (["a", "\ud800"], "string", ["a", "?"]),
        ([None, None], "null", [None, None]),
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
    found = scan([first, second], options, PartLimits(max_rows=1))
    assert found.kept_types == {"x": its}
    kept = pa.concat_tables([it.kept for it in read_all(found, options)])
    assert str(kept.schema.field("x").type) == its
    assert kept["x"].to_pylist() == [want[0], None, None, *want[1:], None]


def test_a_column_that_comes_along_has_one_type_in_all_inputs(tmp_path: Path) -> None:
    number, text = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "x": pa.array([1], pa.int32())}), number)
    pyarrow.parquet.write_table(pa.table({"text": ["a"], "x": ["b"]}), text)
    fields = one_file(tmp_path / "a.jsonl", '{"text": "a", "x": 1}')
    nothing = one_file(tmp_path / "b.jsonl", '{"text": "a", "x": null}')
    options = ReadOptions(keep=("x",))
    for others in ([str(number), str(text)], [str(number), fields]):
        with pytest.raises(ValueError, match=r"--keep x: is int32 in .*a\.parquet and \w+ in .*must be of one type"):
            scan(others, options, PartLimits())
    found = scan([nothing, str(number)], options, PartLimits())
    assert found.kept_types == {"x": "int32"}
    assert pa.concat_tables([it.kept for it in read_all(found, options)])["x"].to_pylist() == [None, 1]
    csv_file = one_file(tmp_path / "a.csv", "text,x", "a,c")
    assert scan([str(text), csv_file], options, PartLimits()).kept_types == {"x": "string"}


@pytest.mark.parametrize(
    ("name", "lines", "options", "problem"),
    [
        ("a.csv", ["n,m", "1,2"], {}, r"a\.csv, line 1: has no column 'text'; it has 'n', 'm': --column chooses one"),
        ("a.csv", ["text,n", '"a'], {}, r"a\.csv, line 2: unexpected end of data"),
        ("a.csv", ["text", "a"], {"keep": ("x",)}, r"a\.csv: has no column 'x' for --keep; it has 'text'"),
        ("a.csv", ["x,y", "a,b"], {"column": "x", "keep": ("x",)}, "--keep x: is the column of the inputs"),
        ("a.csv", ["x", "a"], {"keep": ("x",)}, "--keep x: is the column of the inputs"),
        ("a.csv", ["text", "a"], {"keep": ("x", "x")}, "--keep x: is given twice"),
        ("a.csv", ["x,vector", "a,b"], {"column": "x", "keep": ("vector",)}, "has a column 'vector' of its own"),
        ("a.csv", ["text", "a"], {"input_kind": "vectors"}, r"vectors are read from \.jsonl and \.parquet files"),
        ("a.txt", ["a"], {"column": "x"}, r"--column is for \.jsonl, \.csv, \.tsv and \.parquet"),
        ("a.txt", ["a"], {"keep": ("x",)}, r"--keep is for \.jsonl, \.csv, \.tsv and \.parquet"),
        ("a.jsonl", ['{"text": "a"}'], {"keep": ("x",)}, r"a\.jsonl: no line has a field 'x' for --keep"),
        ("a.parquet", ["no parquet"], {}, r"a\.parquet: cannot be read as Parquet: "),
        ("a.txt.gz", ["no gzip"], {}, r"a\.txt\.gz: cannot be read as gzip: "),
        ("a.csv.zst", ["no zstd"], {}, r"a\.csv\.zst: cannot be read as zstd: "),
    ],
)
def test_files_that_cannot_be_planned(
    tmp_path: Path, name: str, lines: list[str], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        scan([one_file(tmp_path / name, *lines)], ReadOptions(**options), PartLimits())


def test_a_column_of_another_type_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    table = pa.table({"text": [1], "ids": [[1]], "vectors": [[[1.5]]], "other": ["a"]})
    pyarrow.parquet.write_table(table, path)
    for column, kind, problem in (
        (None, "text", r"column 'text' must be of text; its type is int64$"),
        ("ids", "text", r"must be of text; its type is list<.*int64>; token ids are read with --ids"),
        ("text", "ids", "must be of lists of whole numbers; its type is int64"),
        ("vectors", "ids", "must be of lists of whole numbers; its type is list"),
        ("ids", "vectors", "must be of lists of lists of floating-point numbers; its type is list"),
        ("x", "text", r"a\.parquet: has no column 'x'; it has 'text', 'ids', 'vectors', 'other'"),
    ):
        with pytest.raises(ValueError, match=problem):
            scan([path], ReadOptions(kind, column), PartLimits())  # type: ignore[arg-type]


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    """If a file is truncated or damaged, planning fails with a one-line error that names the file."""
    texts = [f"{random.Random(i).random()}" for i in range(5000)]
    for name in ("a.parquet", "a.txt.gz", "a.jsonl.zst"):
        path = write(tmp_path / name, texts, 1000)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=rf"/{name}: cannot be read as \w+: [^\n]+$"):
            scan([str(path)], ReadOptions(), PartLimits())
    path = write(tmp_path / "b.parquet", texts, 1000)
    data = path.read_bytes()
    path.write_bytes(data[:2000] + random.Random(0).randbytes(20_000) + data[22_000:])
    with pytest.raises(ValueError, match=r"/b\.parquet: cannot be read as Parquet: [^\n]+$"):
        scan([str(path)], ReadOptions(), PartLimits())


def test_arguments_of_a_job_are_files_that_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", ["a"])
    (tmp_path / "b.xlsx").write_text("")
    (tmp_path / "folder.parquet").mkdir()
    monkeypatch.chdir(tmp_path)
    for arguments, problem in (
        (["-"], "reads its inputs again, and standard input is gone then"),
        (["a text"], "'a text': is no file; the inputs of a job are files that end in .txt"),
        (["a.txt", str(path)], "a.txt: is given twice"),
        (["b.xlsx"], "b.xlsx: is a file of a kind that is not known; known are .txt"),
        (["folder.parquet"], r"folder.parquet: is a folder; name its files, as folder.parquet/\*.parquet does"),
        (["https://example.org/a.csv"], "https://example.org/a.csv: cannot be read: Unrecognized filesystem type"),
        (["s3://bucket/folder"], "s3://bucket/folder: must end in .txt"),
        (["s3://bucket/a b.csv"], "s3://bucket/a b.csv: cannot be read: Cannot parse URI"),
    ):
        with pytest.raises(ValueError, match=problem):
            scan(arguments, ReadOptions(), PartLimits())
    with pytest.raises(FileNotFoundError, match=r"^c\.txt: there is no such file$"):
        scan(["c.txt"], ReadOptions(), PartLimits())
    with pytest.raises(ValueError, match=r"a\.txt: is given twice"):
        scan(["a.txt", path.as_uri()], ReadOptions(), PartLimits())
    [file] = find_inputs([path.as_uri()])
    assert file == find_inputs(["a.txt"])[0]
    assert (file.uri, file.size_bytes, file.modified_ns) == (str(path), 2, path.stat().st_mtime_ns)


def test_a_file_that_was_changed_since_the_plan_was_made(tmp_path: Path) -> None:
    """Reading fails if a file is gone, or if its size, lines or modification time have changed since planning."""
    for suffix in (".txt", ".parquet", ".csv.gz"):
        path = write(tmp_path / f"a{suffix}", ["one", "two"])
        found = scan([str(path)], ReadOptions(), PartLimits())
        write(path, ["one", "two", "three"])
        with pytest.raises(ValueError, match=f"a{suffix}: was changed since the plan was made"):
            read_all(found, ReadOptions())
    for name, before, after in (("b.txt", "a\nb\n", "a b\n"), ("b.csv", "text\na\nb\n", "text\naa b\n")):
        path = tmp_path / name
        path.write_text(before)
        found = scan([str(path)], ReadOptions(), PartLimits())
        path.write_text(after)
        with pytest.raises(ValueError, match="was changed since the plan was made"):
            read_all(found, ReadOptions())
        path.unlink()
        with pytest.raises(FileNotFoundError):
            read_all(found, ReadOptions())
    path = write(tmp_path / "c.txt", ["one"])
    found = scan([str(path)], ReadOptions(), PartLimits())
    path.write_text("two\n")
    os.utime(path, ns=(0, found.inputs[0].modified_ns + 1))
    with pytest.raises(ValueError, match="was changed since the plan was made: it was written to"):
        read_all(found, ReadOptions())


def test_progress_of_the_planning_pass_counts_rows(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / f"a{suffix}", ["a"] * 20)) for suffix in SUFFIXES]
    told: list[int] = []
    scan(paths, ReadOptions(), PartLimits(), told.append)
    assert sum(told) == 20 * len(SUFFIXES)
