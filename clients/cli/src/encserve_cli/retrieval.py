"""`encserve embed` and `encserve similarity`: what a model makes of texts, and how well they go together."""

import functools
import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from encserve_cli import render
from encserve_cli.files.command import Printing, Sources, deliver, prints_rows, reads_inputs
from encserve_cli.job_options import SectionCommand, makes_jobs
from encserve_cli.report.labels import visible
from encserve_cli.report.matches import Side, build_match_page
from encserve_cli.shared import calls_server, check_pooling, ids_of, names_model, treats_texts
from encserve_client import EncodedOutput, EncoderClient, EncodeResult, ModelInfo, Output, Pooling, Task, Timings, rank
from encserve_client.options import TrainedKind
from encserve_client.scoring import similarity_of

_KIND = click.option(
    "--kind",
    type=click.Choice(get_args(TrainedKind)),
    help="One vector for each text, the vectors of MaxSim, or weights over the vocabulary. Default: what the model was "
    "trained for.",
)
_POOLING = click.option(
    "--pooling",
    type=click.Choice(get_args(Pooling)),
    help="How token vectors become one. Default: what the model was trained for.",
)


@click.command(cls=SectionCommand)
@reads_inputs
@names_model
@_KIND
@_POOLING
@treats_texts
@prints_rows
@makes_jobs
@calls_server
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
    """Print what the model was trained to make of each TEXT: a vector, several, or weights over the vocabulary.

    A TEXT that ends in .txt, .jsonl, .csv, .tsv or .parquet is a file of texts: a path, or a URI such as
    s3://bucket/texts.csv. All but .parquet may be compressed (.csv.gz, .csv.zst). - is standard input, a text a line.
    With --text every TEXT is a text, whatever it looks like.

    \b
    --output FILE holds, by its suffix:
      .npy, .csv    one vector for each text
      .npz          rows (texts, width); of several vectors rows (all vectors,
                    width), lengths (texts,) and, where they are not pooled,
                    token_indices; of weights what scipy.sparse.load_npz reads
      .jsonl        a line for each text
      .parquet      text, and vector, rows with token_indices, or indices and
                    values

    --output FOLDER/ makes a job: the folder is filled with .parquet files, row by row as the FILEs have them. Run again
    after anything, it does what is missing.
    """  # noqa: D301 - click reads a real \b
    check_pooling(kind, pooling)
    wanted = pooling or kind or client.model(model, model_version).trained_kind
    run = functools.partial(
        client.run,
        outputs=[Output(wanted, dimensions=printing.dimensions)],
        dtype=printing.dtype,
        model=model,
        version=model_version,
        truncate=truncate,
        include_token_strings=not sources.ids and printing.names_tokens and wanted in ("multi_vector", "sparse"),
        prompt_name=prompt_name,
        task=task,
    )
    deliver(run, sources, printing, as_json, render.print_made)


@click.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT TEXT...")
@names_model
@_KIND
@_POOLING
@treats_texts
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page to this file that shows which vectors of MaxSim met.",
)
@calls_server
def similarity(
    client: EncoderClient,
    texts: tuple[str, ...],
    model: str | None,
    model_version: str | None,
    as_json: bool,
    kind: TrainedKind | None,
    pooling: Pooling | None,
    html: Path | None,
    **options: Any,
) -> None:
    """Print how similar TEXTs are, by what the model makes of them.

    If the model makes one vector of a text, the command prints the similarity of every two texts, by the model's own
    measure: cosine, if it names none. For vectors of MaxSim, and for weights over the vocabulary, the first text is a
    query and the others are documents, unless --task says what all of them are. The command prints how well each
    document answers the query.
    """
    if len(texts) < 2:
        raise ValueError(f"similarity needs at least 2 texts; was {len(texts)}")
    check_pooling(kind, pooling)
    info = client.model(model, model_version)
    chosen = "model" if pooling else kind or info.trained_kind
    if html is not None and chosen != "multi_vector":
        raise ValueError(
            f"--html shows which vectors of MaxSim met; of model {info.name} these texts get {chosen!r}. Models with "
            f"multi_vector here: {', '.join(it.name for it in client.models() if it.multi_vector_width) or 'none'}"
        )
    options |= {"model": model, "version": model_version}
    if chosen != "model":
        _rank(client, texts, as_json, chosen, info, html, options)
        return
    result = client.run(texts, outputs=[pooling or ("model" if kind or info.pooling else "mean")], **options)
    vectors = result.outputs[0].matrix()  # (texts, d_model)
    compared_by = similarity_of(info, "model")
    scores = np.array([[score for _, score in sorted(rank(it, vectors, compared_by))] for it in vectors])
    if as_json:
        body = {"pooling": result.outputs[0].kind, "texts": texts, "compared_by": compared_by}
        click.echo(json.dumps(ids_of(result) | body | {"scores": scores.tolist()}, ensure_ascii=False))
    else:
        render.print_similarity(texts, scores, compared_by, result)


def _rank(
    client: EncoderClient,
    texts: Sequence[str],
    as_json: bool,
    kind: TrainedKind,
    info: ModelInfo,
    html: Path | None,
    options: dict[str, Any],
) -> None:
    """How well the texts after the first answer it, the best first."""
    compared_by = similarity_of(info, kind)
    task = options.pop("task")
    parts: tuple[tuple[Task, Sequence[str]], ...] = (("query", texts[:1]), ("document", texts[1:]))
    asked = [
        client.run(
            part,
            outputs=[kind],
            task=task or (own if own in info.tasks else None),
            include_token_strings=html is not None,
            **options,
        )
        for own, part in parts
    ]
    query, documents = ([*_encoded(result.outputs[0])] for result in asked)
    scores = rank(query[0], documents, compared_by)
    if html is not None:
        [asker], sides = (_sides(part, result) for (_, part), result in zip(parts, asked, strict=True))
        page = build_match_page(asker, [(sides[index], score) for index, score in scores], compared_by, asked[0])
        html.write_text(page, encoding="utf-8", newline="\n")
    ranking = [
        (index, None if kind == "multi_vector" and not len(documents[index]) else score) for index, score in scores
    ]
    timings = zip(*(astuple(result.timings) for result in asked), strict=True)
    result = replace(asked[1], timings=Timings(*map(sum, timings)))
    if as_json:
        found = [{"text": texts[index + 1], "index": index, "score": score} for index, score in ranking]
        body = ids_of(result) | {"kind": kind, "compared_by": compared_by, "query": texts[0], "documents": found}
        click.echo(json.dumps(body, ensure_ascii=False))
    else:
        render.print_ranking(texts, ranking, compared_by, result)


def _sides(texts: Sequence[str], result: EncodeResult) -> list[Side]:
    """Texts with their vectors, and the tokens that these come from."""
    output = result.outputs[0]
    found = zip(texts, output.arrays(), output.token_indices(), result.sequences, strict=True)
    return [
        Side(text, tuple(visible(name) for name in render.vector_names(info, places, len(rows))), rows)
        for text, rows, places, info in found
    ]


def _encoded(output: EncodedOutput) -> Sequence[Any]:
    return output.sparse_vectors() if output.kind == "sparse" else output.arrays()
