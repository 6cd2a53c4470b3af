"""Runs `encserve similarity`: compares texts, and prints a table or JSON, or writes a page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from encserve_cli import render
from encserve_cli.report.labels import visible
from encserve_cli.report.matches import Side, build_match_page
from encserve_cli.shared import ids_of
from encserve_client import EncodedOutput, EncoderClient, EncodeResult, ModelInfo, Pooling, Task, Timings, rank
from encserve_client.options import TrainedKind
from encserve_client.scoring import similarity_of


def run(
    client: EncoderClient,
    texts: Sequence[str],
    options: Mapping[str, Any],
    *,
    kind: TrainedKind | None,
    pooling: Pooling | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Compare texts, and print their similarity.

    Args:
        client: The client.
        texts: At least two texts. If the output is not one vector for each text, the first text is the query.
        options: More arguments of `EncoderClient.run`, with the name and the version of the model, and the task.
        kind: The kind of output; None for the kind that the model was trained for.
        pooling: The pooling of token vectors; None for the model's pooling.
        html: The file of the page; None for no page.
        as_json: Whether to print JSON.

    Raises:
        EncserveError: The server is not reachable, or refuses the texts.
        ValueError: A page needs vectors for MaxSim, or the query has no vectors.
        OSError: The page cannot be written.
    """
    info = client.model(options["model"], options["version"])
    chosen_kind = "model" if pooling else kind or info.trained_kind
    if html is not None and chosen_kind != "multi_vector":
        names = ", ".join(loaded.name for loaded in client.models() if loaded.multi_vector_width)
        raise ValueError(
            f"--html needs --kind multi_vector; was {chosen_kind!r}, from model {info.name}. Models with that kind on "
            f"this server: {names or 'none'}"
        )
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
    options: Mapping[str, Any],
) -> None:
    """Print the similarity of each document to the query, the most similar document first."""
    compared_by = similarity_of(info, kind)
    others = {name: value for name, value in options.items() if name != "task"}
    task = options["task"]
    parts: tuple[tuple[Task, Sequence[str]], ...] = (("query", texts[:1]), ("document", texts[1:]))
    results = [
        client.run(
            part,
            outputs=[kind],
            task=task or (part_task if part_task in info.tasks else None),
            include_token_strings=html is not None,
            **others,
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
