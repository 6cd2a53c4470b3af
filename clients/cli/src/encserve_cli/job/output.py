"""A part into its file: the inputs, what was made of them, and the columns that come along, each row in its place."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from encserve_cli.files.writing import arrow_columns
from encserve_cli.job.plan import Plan, columns_of, value_column
from encserve_cli.job.store import Store
from encserve_cli.job.types import Encoded, Part, PartReport, Rows

REJECTED = "_rejected"
_OF_JOB = re.compile(r"part-\d{5,}-\d{6,}\.(?:parquet|jsonl)")


def is_of_job(name: str) -> bool:
    """Whether a job writes files of such a name: parts, and their rejected rows."""
    return _OF_JOB.fullmatch(name) is not None


class PartWriter:
    """Writes parts of one job. Several threads may use it at a time."""

    def __init__(self, plan: Plan, store: Store) -> None:
        """Takes the job, and where its output goes."""
        self._plan = plan
        self._store = store

    def write(self, part: Part, rows: Rows, encoded: Encoded) -> PartReport:
        """Writes a part: first its rejected rows, then its file, which makes the part done.

        Raises:
            OSError: One cannot be written; nothing is under the part's name then.
        """
        refused = rows.problems | encoded.refused
        self._write_rejected(part, rows, refused)
        table = self._table(rows, encoded, refused)
        with self._store.writing(f"{part.name}.parquet") as path:
            _write_table(table, path)
            output_bytes = path.stat().st_size
        first = min(refused, default=None)
        where = "" if first is None else f"{self._uri(part)}, row {rows.numbers[first]}: {refused[first]}"
        return PartReport(part, len(refused), encoded.tokens, encoded.padded_tokens, output_bytes, where)

    def _uri(self, part: Part) -> str:
        return self._plan.inputs[part.input].uri

    def _write_rejected(self, part: Part, rows: Rows, refused: Mapping[int, str]) -> None:
        name = f"{REJECTED}/{part.name}.jsonl"
        if not refused:
            self._store.delete(name)  # of a run that was killed; through a server it may have refused other rows
            return
        with self._store.writing(name) as path:
            lines = (
                {"file": self._uri(part), "row": rows.numbers[place], "reason": refused[place]}
                for place in sorted(refused)
            )
            path.write_text("".join(json.dumps(it, ensure_ascii=False) + "\n" for it in lines), encoding="utf-8")

    def _table(self, rows: Rows, encoded: Encoded, refused: Mapping[int, str]) -> pa.Table:
        columns: list[Any] = []
        if (value := value_column(self._plan.read.input_kind)) is not None:
            columns.append(pa.array(rows.values, value[1]))
        columns += self._made(len(rows.values), encoded, refused)
        columns += rows.kept.columns
        return pa.Table.from_arrays(columns, schema=schema_of(self._plan, rows.kept.schema))

    def _made(self, count: int, encoded: Encoded, refused: Mapping[int, str]) -> list[Any]:
        """The columns of what was made, with null in the places of what was refused."""
        types = columns_of(self._plan.make, self._plan.model.width)
        if encoded.result is None:
            return [pa.nulls(count, its) for its in types.values()]
        missing = np.zeros(count, np.bool_)  # (rows,)
        missing[list(refused)] = True
        made = arrow_columns(encoded.result, missing if refused else None)
        return [made[name] if name in made else pa.nulls(count, its) for name, its in types.items()]


def schema_of(plan: Plan, kept: pa.Schema) -> pa.Schema:
    """The schema of every file of a job, with columns that come along; its metadata says what the vectors are."""
    make, model = plan.make, plan.model
    value = value_column(plan.read.input_kind)
    fields = [*([value] if value else []), *columns_of(make, model.width).items()]
    metadata = {
        "model": model.model,
        "version": model.version,
        "fingerprint": model.fingerprint,
        "space_id": model.space_id,
        "kind": make.kind,
        "pooling": model.pooling if make.kind == "model" else "",
        "engine": model.engine,
        "precision": model.precision,
        "options": json.dumps(asdict(make), ensure_ascii=False),
    }
    return pa.schema([*(pa.field(*it) for it in fields), *kept], metadata)


def _write_table(table: pa.Table, path: Path) -> None:
    """Numbers of vectors rarely repeat, so neither a dictionary nor statistics of them are worth their time."""
    plain = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    parquet.write_table(table, path, use_dictionary=plain or False, write_statistics=plain or False)
