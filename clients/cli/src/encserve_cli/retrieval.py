"""`encserve embed` and `encserve similarity`: the vectors of texts, and the similarity of texts."""

import functools
import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from encserve_cli import render
from encserve_cli.connection import connection_options
from encserve_cli.files.command import Printing, Sources, deliver, prints_rows, reads_inputs, reads_texts
from encserve_cli.job_options import makes_jobs
from encserve_cli.report.labels import visible
from encserve_cli.report.matches import Side, build_match_page
from encserve_cli.shared import SectionCommand, check_pooling, ids_of, model_options, text_options, with_client
from encserve_client import EncodedOutput, EncoderClient, EncodeResult, ModelInfo, Output, Pooling, Task, Timings, rank
from encserve_client.options import TrainedKind
from encserve_client.scoring import similarity_of

_KIND = click.option(
    "--kind",
    type=click.Choice(get_args(TrainedKind)),
    help="One vector for each text, vectors for MaxSim, or weights over the vocabulary. Default: the kind that the "
    "model was trained for.",
)
_POOLING = click.option(
    "--pooling",
    type=click.Choice(get_args(Pooling)),
    help="Pool token vectors into one vector. Default: the pooling that the model was trained for.",
)

_MOST_TEXTS = 1000


@click.command(cls=SectionCommand)
@connection_options
@reads_inputs
@model_options
@_KIND
@_POOLING
@text_options
@prints_rows
@makes_jobs
@with_client
def embed(
    client: EncoderClient,
    sources: Sources,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    kind: TrainedKind | None,
    pooling: Pooling | None,
    task: Task | None,
    prompt_name: str | None,
    truncate: bool,
    printing: Printing,
) -> None:
    """Print the vector of each TEXT.

    A model for MaxSim gives several vectors, and a sparse model gives weights over the vocabulary.

    \b
    --output FILE, by the suffix of FILE:
      .npy, .csv    one vector for each text
      .npz          one vector: rows (texts, width)
                    MaxSim: rows (all vectors, width), lengths (texts,) and, if
                    vectors have tokens, token_indices
                    weights: the format of scipy.sparse.load_npz
      .jsonl        a line for each text
      .parquet      text, and vector, rows and token_indices, or indices and
                    values

    --output FOLDER/ runs a job. The job fills the folder with .parquet files, and their rows are in the order of the
    inputs. After a stop, the same command computes the missing rows.
    """  # noqa: D301 - click reads a real \b
    check_pooling(kind, pooling)
    output = pooling or kind or client.model(model, model_version).trained_kind
    run = functools.partial(
        client.run,
        outputs=[Output(output, dimensions=printing.dimensions)],
        dtype=printing.dtype,
        model=model,
        version=model_version,
        truncate=truncate,
        include_token_strings=not sources.ids and printing.names_tokens and output in ("multi_vector", "sparse"),
        prompt_name=prompt_name,
        task=task,
    )
    deliver(run, sources, printing, as_json, render.print_made)


@click.command(cls=SectionCommand)
@connection_options
@reads_texts
@model_options
@_KIND
@_POOLING
@text_options
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write an HTML page with the matches of MaxSim to this file.",
)
@with_client
def similarity(
    client: EncoderClient,
    sources: Sources,
    model: str | None,
    model_version: str | None,
    as_json: bool,
    kind: TrainedKind | None,
    pooling: Pooling | None,
    html: Path | None,
    **options: Any,
) -> None:
    """Print the similarity of TEXTs.

    If the model gives one vector for each text, the command prints the similarity of every two texts. The model names
    the similarity; the default is cosine. With vectors for MaxSim, and with weights over the vocabulary, the first text
    is the query and the other texts are documents. The command then prints the similarity of each document to the
    query. --task sets the same task for all texts.
    """
    texts = [it.text for it in sources.read_few(_MOST_TEXTS, "similarity compares no more")]
    if len(texts) < 2:
        raise ValueError(f"similarity needs at least 2 texts; was {len(texts)}")
    check_pooling(kind, pooling)
    info = client.model(model, model_version)
    chosen_kind = "model" if pooling else kind or info.trained_kind
    if html is not None and chosen_kind != "multi_vector":
        names = ", ".join(loaded.name for loaded in client.models() if loaded.multi_vector_width)
        raise ValueError(
            f"--html needs --kind multi_vector; was {chosen_kind!r}, from model {info.name}. Models with that kind on "
            f"this server: {names or 'none'}"
        )
    options |= {"model": model, "version": model_version}
    if chosen_kind != "model":
        _compare_with_query(client, texts, as_json, chosen_kind, info, html, options)
        return
    result = client.run(texts, outputs=[pooling or ("model" if kind or info.pooling else "mean")], **options)
    vectors = result.outputs[0].matrix()  # (texts, d_model)
    compared_by = similarity_of(info, "model")
    scores = np.array([[score for _, score in sorted(rank(vector, vectors, compared_by))] for vector in vectors])
    if as_json:
        body = {"pooling": result.outputs[0].kind, "texts": texts, "compared_by": compared_by}
        click.echo(json.dumps(ids_of(result) | body | {"scores": scores.tolist()}, ensure_ascii=False))
    else:
        render.print_similarity(texts, scores, compared_by, result)


def _compare_with_query(
    client: EncoderClient,
    texts: Sequence[str],
    as_json: bool,
    kind: TrainedKind,
    info: ModelInfo,
    html: Path | None,
    options: dict[str, Any],
) -> None:
    """Print the similarity of each document to the query, the most similar document first."""
    compared_by = similarity_of(info, kind)
    task = options.pop("task")
    parts: tuple[tuple[Task, Sequence[str]], ...] = (("query", texts[:1]), ("document", texts[1:]))
    results = [
        client.run(
            part,
            outputs=[kind],
            task=task or (part_task if part_task in info.tasks else None),
            include_token_strings=html is not None,
            **options,
        )
        for part_task, part in parts
    ]
    query, documents = ([*_vectors(result.outputs[0])] for result in results)
    scores = rank(query[0], documents, compared_by)
    if html is not None:
        [query_side], sides = (_sides(part, result) for (_, part), result in zip(parts, results, strict=True))
        matches = [(sides[index], score) for index, score in scores]
        page = build_match_page(query_side, matches, compared_by, results[0])
        html.write_text(page, encoding="utf-8", newline="\n")
    ranking = [
        (index, None if kind == "multi_vector" and not len(documents[index]) else score) for index, score in scores
    ]
    timings = zip(*(astuple(result.timings) for result in results), strict=True)
    result = replace(results[1], timings=Timings(*map(sum, timings)))
    if as_json:
        ranked = [{"text": texts[index + 1], "index": index, "score": score} for index, score in ranking]
        body = ids_of(result) | {"kind": kind, "compared_by": compared_by, "query": texts[0], "documents": ranked}
        click.echo(json.dumps(body, ensure_ascii=False))
    else:
        render.print_ranking(texts, ranking, compared_by, result)


def _sides(texts: Sequence[str], result: EncodeResult) -> list[Side]:
    output = result.outputs[0]
    sequences = zip(texts, output.arrays(), output.token_indices(), result.sequences, strict=True)
    return [
        Side(text, tuple(visible(name) for name in render.vector_names(info, positions, len(rows))), rows)
        for text, rows, positions, info in sequences
    ]


def _vectors(output: EncodedOutput) -> Sequence[Any]:
    return output.sparse_vectors() if output.kind == "sparse" else output.arrays()
