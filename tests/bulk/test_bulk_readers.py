"""pandas, polars, DuckDB and PyArrow read the same values from the output files of `encserve embed`."""

import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet
from tiny_bundle import D_MODEL
from tiny_heads import WIDTH, text

from encserve_cli.job import embed_files

TEXTS = [text(5, 6, 7), text(8), None, text(9, 9), text(*[5] * 100), *(text(3 + i) for i in range(20))]
REJECTED = (2, 4)
PART_ROWS = 10  # an output file has few rows, so that a job writes several files

Rows = list[dict[str, Any]]


def with_pyarrow(folder: Path) -> Rows:
    return list(parquet.read_table(folder).to_pylist())


def with_pandas(folder: Path) -> Rows:
    return list(pd.read_parquet(folder).to_dict("records"))


def with_polars(folder: Path) -> Rows:
    return pl.read_parquet(folder / "*.parquet").to_dicts()


def with_duckdb(folder: Path) -> Rows:
    found = duckdb.read_parquet(f"{folder}/*.parquet").order("id")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


READERS = {"pyarrow": with_pyarrow, "pandas": with_pandas, "polars": with_polars, "duckdb": with_duckdb}
# For each test: the arguments of `embed_files`, and the expected columns of the output files with their types.
MADE: dict[str, tuple[dict[str, Any], dict[str, pa.DataType]]] = {
    **{
        dtype: ({"kind": "model", "dtype": dtype}, {"vector": pa.list_(number, size)})
        for dtype, number, size in (
            ("float32", pa.float32(), D_MODEL),
            ("float16", pa.float16(), D_MODEL),
            ("int8", pa.int8(), D_MODEL),
            ("binary", pa.uint8(), D_MODEL // 8),
        )
    },
    **{
        f"{dtype} rows of tokens": (
            {"kind": "tokens", "dtype": dtype},
            {"rows": pa.list_(pa.list_(number, D_MODEL)), "token_ids": pa.list_(pa.int64())},
        )
        for dtype, number in (("float32", pa.float32()), ("float16", pa.float16()))
    },
    **{
        f"{dtype} multi-vectors": (
            {"kind": "multi_vector", "dtype": dtype},
            {"rows": pa.list_(pa.list_(number, size)), "token_indices": pa.list_(pa.uint32())},
        )
        for dtype, number, size in (("float32", pa.float32(), WIDTH), ("float16", pa.float16(), WIDTH))
    },
    **{
        f"{dtype} weights": (
            {"kind": "sparse", "dtype": dtype},
            {"indices": pa.list_(pa.uint32()), "values": pa.list_(number)},
        )
        for dtype, number in (("float32", pa.float32()), ("float16", pa.float16()))
    },
}


def plain(value: Any) -> Any:
    """Convert a value from a reader to Python lists and numbers. NaN becomes None."""
    if isinstance(value, np.ndarray | list):
        return [plain(it) for it in value]
    if isinstance(value, float) and np.isnan(value):  # pandas reads null as NaN
        return None
    return value.item() if isinstance(value, np.generic) else value


@pytest.mark.parametrize("name", MADE)
def test_four_readers_return_the_same_values(tiny: Path, tmp_path: Path, name: str) -> None:
    """A job embeds texts, and rejects two of them. All readers return the same values for all texts.

    The values of the rejected texts are null.
    """
    (asked, columns), corpus = MADE[name], tmp_path / "texts.parquet"
    parquet.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), corpus)
    folder = tmp_path / "vectors"
    embed_files([corpus], folder, bundle=tiny, keep=["id"], part_rows=PART_ROWS, **asked)
    assert len(list(folder.glob("*.parquet"))) == 3
    schema = parquet.read_schema(folder / "part-00000-000000.parquet")
    assert {it.name: it.type for it in schema} == {"text": pa.string(), **columns, "id": pa.int64()}
    found = {reader: read(folder) for reader, read in READERS.items()}
    want = found["pyarrow"]
    assert [it["text"] for it in want] == TEXTS
    for column in columns:
        assert [i for i, it in enumerate(want) if it[column] is None] == list(REJECTED)
        assert any(it[column] for it in want)
    for reader, rows in found.items():
        for column in ("id", "text", *columns):
            assert [plain(it[column]) for it in rows] == [it[column] for it in want], (reader, column)


def test_the_query_in_the_docs_works_with_rejected_rows(tiny: Path, tmp_path: Path) -> None:
    """The query in docs/tutorials/corpus-to-duckdb.md works for a table that has a row without a vector."""
    corpus = tmp_path / "texts.parquet"
    parquet.write_table(pa.table({"id": range(3), "text": [text(5, 6), None, text(7)]}), corpus)
    embed_files([corpus], tmp_path / "vectors", bundle=tiny, keep=["id"], kind="model")
    parquet.write_table(pa.table({"text": [text(7)]}), corpus)
    embed_files([corpus], tmp_path / "query", bundle=tiny, kind="model")
    page = (Path(__file__).parents[2] / "docs/tutorials/corpus-to-duckdb.md").read_text()
    found = re.search(r'duckdb\.sql\("""(.*?)"""\)', page, re.DOTALL)
    assert found is not None
    query = found[1].replace("vectors/", f"{tmp_path}/vectors/").replace("query.parquet", f"{tmp_path}/query/*.parquet")
    relation = duckdb.sql(query.replace("[384]", f"[{D_MODEL}]"))
    assert relation is not None
    rows = relation.fetchall()
    assert [row[0] for row in rows] == [2, 0]
    assert rows[0][2] == pytest.approx(1.0)
