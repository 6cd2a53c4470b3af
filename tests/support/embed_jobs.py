"""Runs jobs of `encserve embed` in separate processes, writes inputs for the jobs, and checks the outputs."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from exporting import export_once
from pyarrow import parquet
from tiny_bundle import VOCAB_SIZE
from tiny_heads import words

from encserve_cli.load.lengths import real_text_lengths, sample_lengths
from encserve_export import EncoderConfig, Target, export_init, read_tokenizer

COMMAND = Path(sys.executable).parent / "encserve"
LONGEST = 64  # the maximum number of tokens in a text
MOST_SECONDS = 250.0  # the timeout of a job, because pytest ends a test after 300 s


def export_small_encoder(folder: Path) -> Path:
    """Export a tiny encoder and return the bundle's directory. A job takes about 50 µs for each text."""
    words().save(str(folder / "tokenizer.json"))
    config = EncoderConfig(
        vocab_size=VOCAB_SIZE, d_model=16, n_heads=2, d_ff=32, n_layers=1, max_sequence_tokens=LONGEST
    )
    target = Target(model_repository=folder / "models", name="small")
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    return export_once(export_init, config, 0, target=target, tokenizer=tokenizer, pooling="mean").path


def short_texts(count: int, seed: int = 0) -> list[str]:
    """Return random texts. The tokenizer knows all words of these texts.

    Real texts have about four times as many tokens. About 1 text in 85 is too long for the encoder.
    """
    lengths = np.maximum(sample_lengths(real_text_lengths(), count, seed) // 4, 1)
    ids = np.random.default_rng(seed).integers(3, VOCAB_SIZE, int(lengths.sum()))
    found = np.array([f"w{i}" for i in range(VOCAB_SIZE)])[ids].tolist()
    ends = np.cumsum(lengths).tolist()
    return [" ".join(found[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def is_too_long(text: str) -> bool:
    """Whether a text has too many tokens for the encoder.

    Each word is one token. The tokenizer adds two special tokens to each text.
    """
    return text.count(" ") + 3 > LONGEST


def write_corpus(folder: Path, count: int, files: int = 1) -> list[Path]:
    """Write `short_texts` into Parquet files, and return the paths. `files` is the number of files.

    The column `id` numbers the texts from 0.
    """
    folder.mkdir(parents=True)
    table = pa.table({"id": np.arange(count), "text": short_texts(count)})
    paths = []
    for i, rows in enumerate(np.array_split(np.arange(count), files)):
        paths.append(folder / f"corpus-{i:03}.parquet")
        parquet.write_table(table.slice(rows[0], len(rows)), paths[-1])
    return paths


@contextlib.contextmanager
def running(
    *arguments: object, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator["subprocess.Popen[str]"]:
    """Start the command `encserve`. At the end of the block, kill the process if it still runs."""
    with subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(variables),
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            kill(process)


def kill(process: "subprocess.Popen[Any]") -> None:
    """If a process still runs, kill the process and all child processes with SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(
    *arguments: object, seconds: float = MOST_SECONDS, variables: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    """Run the command `encserve`, wait for its end, and return its exit status and output."""
    with running(*arguments, variables=variables) as process:
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def said(errors: str) -> list[str]:
    """Return the lines of standard error, except the progress lines. A job prints a progress line every 30 s."""
    return [line for line in errors.splitlines() if re.match(r"[\d,]+( of [\d,]+)? (texts|inputs)\b", line) is None]


def part_names(folder: Path) -> list[str]:
    """Return the names of the job's finished output files, sorted."""
    return sorted(it.name for it in folder.glob("part-*.parquet"))


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each output file, by name.

    The file of the job's plan is left out, because the plan contains the modification times of the input files.
    """
    files = (it for it in folder.rglob("*") if it.is_file() and it.name != "_job.json")
    return {str(it.relative_to(folder)): hashlib.sha256(it.read_bytes()).hexdigest() for it in files}


def vectors_of(table: Any) -> tuple[Any, Any]:
    """Return the vectors of an output table, and a mask that is true for each text without a vector.

    The vectors have the shape (texts with a vector, width). The mask has the shape (texts,).
    """
    column = table["vector"].combine_chunks()
    missing = column.is_null().to_numpy(zero_copy_only=False)
    present = column.filter(pa.array(~missing))
    return present.flatten().to_numpy().reshape(len(present), -1), missing


def check_rows(table: Any, texts: Sequence[str]) -> None:
    """Check that an output has each text exactly once, in order.

    Also check that a text has no vector if the text is too long, and has a vector otherwise.
    """
    assert table["id"].to_pylist() == list(range(len(texts)))
    assert table["text"].to_pylist() == list(texts)
    vectors, missing = vectors_of(table)
    np.testing.assert_array_equal(missing, [is_too_long(it) for it in texts])
    assert np.isfinite(vectors).all()
