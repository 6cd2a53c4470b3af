"""Provides a table of tiny models. Tests compare our vectors of each model with the vectors of the model's own library.

An entry is a directory in the format of sentence-transformers, PyLate, ColBERT, model2vec or BGE-M3. `Zoo` writes the
directory, exports the directory once for all tests, and computes the library's vectors. An Embedder or a server
computes our vectors. The module `architectures` has models in the format of transformers.
"""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from checkpoints import MODEL, minilm_directory
from exporting import export_once
from retrieval_models import DIRECTORIES as LATE_DIRECTORIES
from retrieval_models import trained
from sentence_models import D_MODEL, LONGEST, text_of, write_model
from sparse_models import sparse_text, write_bge_m3, write_splade, write_static_queries, write_trained_splade
from static_models import static_text, write_model2vec, write_static

from encserve_export import Exported, Target, export_hf

Array = npt.NDArray[np.float32]
Kind = Literal["dense", "multi_vector", "sparse"]

TEXTS = ("", "the cat", "the [MASK]cat[SEP]", *(text_of(n, seed=n) for n in (1, 3, 17, 30, 60, 93, 94, 95, 600)))
SPARSE_TEXTS = tuple(sparse_text(n) for n in (0, 1, 2, 17, 38, 39, 40, 61, 62, 63, 130, 600))
STATIC_TEXTS = ("", "東京 🌍", "a", "A cat in Köln", *(static_text(n) for n in (3, 40, 700)))
REAL_TEXTS = ("", "the cat", "Grüße aus Köln, 東京 и Москва 🌍", "a " * 300)

# The largest allowed distance between our vector and the library's vector, relative to the length of the library's
# vector.
TOLERANCE = 1e-4
# A sparse weight may differ by this number, plus TOLERANCE times the weight.
WEIGHT_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Way:
    """The task and the prompt of an encode call.

    Attributes:
        task: "query" or "document". None means a call without a task.
        prompt_name: The name of the prompt. "" means no prompt, and None means the default prompt.
    """

    task: Literal["query", "document"] | None = None
    prompt_name: str | None = None

    def __str__(self) -> str:
        return self.task or f"prompt {self.prompt_name!r}"


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """One entry of the table.

    Attributes:
        write: A function that writes the directory.
        kind: The kind of vectors that the library returns.
        texts: The texts of the comparison.
        prompts: The names of the prompts in the directory.
        tasks: Whether the library has `encode_query` and `encode_document` for the directory.
    """

    write: Callable[[Path], object]
    kind: Kind = "dense"
    texts: tuple[str, ...] = TEXTS
    prompts: tuple[str, ...] = ()
    tasks: bool = True

    @property
    def ways(self) -> list[Way]:
        """Return the combinations of prompt and task to test."""
        tasks = [Way("query"), Way("document")] if self.tasks else []
        if self.kind != "dense":
            return tasks
        return [Way(), Way(prompt_name=""), *(Way(prompt_name=name) for name in self.prompts), *tasks]


def _pooling(*modes: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "Pooling", {"pooling_mode": modes[0] if len(modes) == 1 else list(modes), **more}


def _dense(width: int, out: int, activation: str = "activation.Tanh", **more: Any) -> tuple[str, dict[str, Any]]:
    name = f"torch.nn.modules.{activation}"
    return "Dense", {"in_features": width, "out_features": out, "activation_function": name, **more}


_NORMALIZE: tuple[str, dict[str, Any]] = ("Normalize", {})
_EVERY_POOLING = ("lasttoken", "weightedmean", "mean_sqrt_len_tokens", "mean", "max", "cls")
_OLD_POOLING = ("Pooling", {f"pooling_mode_{name}": True for name in ("mean_tokens", "cls_token", "lasttoken")})
PROMPTS = {"query": "Query: ", "passage": "passage: ", "instruction": "Represent this passage: ", "nothing": ""}
_MARKS = ["<|user|>", "<|system|>", "<|end|>"]
_CHAT = "{% for it in messages %}<|{{ it.role }}|> {{ it.content }} <|end|>{% endfor %} we like"
_METHOD = {"method": "forward", "method_output_name": "last_hidden_state"}
_MESSAGES = {
    "modality_config": {"text": _METHOD, "message": {**_METHOD, "format": "flat"}},
    "module_output_name": "token_embeddings",
}
_QWEN3 = {"num_key_value_heads": 1, "head_dim": 12, "pad_token_id": 0}
_GEMMA = _QWEN3 | {"intermediate_size": 64, "sliding_window": 8, "use_bidirectional_attention": True}
_T5 = {"d_model": D_MODEL, "d_kv": 12, "d_ff": 32, "num_layers": 2, "num_heads": 2, "pad_token_id": 0}


def _sentence(*, prompts: bool = False, default: str = "", **written: Any) -> ZooModel:
    """Return an entry of the table. `write_model` writes the directory in the format of sentence-transformers."""
    settings = dict(written.pop("settings", {}))
    if prompts:
        settings |= {"prompts": PROMPTS}
    if default:
        settings |= {"default_prompt_name": default}
    write = functools.partial(write_model, settings=settings, **written)
    return ZooModel(write, prompts=tuple(PROMPTS) if prompts else ())


DENSE: dict[str, ZooModel] = {
    "every-pooling": _sentence(modules=[_pooling(*_EVERY_POOLING), _NORMALIZE]),
    "old-layout": _sentence(modules=[_OLD_POOLING], version=5, transformer_folder="0_Transformer"),
    "heads": _sentence(
        modules=[
            _pooling("mean", "max"),
            _dense(2 * D_MODEL, 16, "activation.GELU"),
            _NORMALIZE,
            _dense(16, 16, "linear.Identity", bias=False, use_residual=True),
            ("LayerNorm", {"dimension": 16}),
            ("Dropout", {"dropout": 0.5}),
            _dense(16, 7, use_residual=True),
            _NORMALIZE,
        ]
    ),
    "default-prompt": _sentence(prompts=True, default="query", settings={"similarity_fn_name": "dot"}),
    "prompt-left-out": _sentence(
        modules=[_pooling(*_EVERY_POOLING, include_prompt=False), _dense(6 * D_MODEL, 12), _NORMALIZE],
        prompts=True,
        default="instruction",
    ),
    "short-by-tokenizer": _sentence(encoder={"model_max_length": 30}),
    "short-by-arguments": _sentence(transformer={"max_seq_length": 50, "tokenizer_args": {"model_max_length": 25}}),
    "lengths-of-tasks": _sentence(
        transformer={"max_seq_length": 50, "query_length": 8, "document_length": 30},
        prompts=True,
        default="instruction",
    ),
    "lower-case": _sentence(transformer={"max_seq_length": LONGEST, "do_lower_case": True}),
    "cut": _sentence(modules=[_pooling("mean"), _NORMALIZE], settings={"truncate_dim": 8}),
    "cut-wider": _sentence(modules=[_pooling("cls")], settings={"truncate_dim": 999}),
    "special-tokens-split": _sentence(encoder={"split_special_tokens": True}),
    "messages": _sentence(
        modules=[_pooling("lasttoken", "mean", include_prompt=False)],
        prompts=True,
        default="query",
        transformer=_MESSAGES | {"max_seq_length": 40, "query_length": 12},
        encoder={"more_words": [*_MARKS, "0", "4"], "extra_special_tokens": _MARKS, "chat_template": _CHAT},
    ),
    "all-of-it": _sentence(
        modules=[
            _pooling("weightedmean", "cls", "max", include_prompt=False),
            _dense(3 * D_MODEL, 32, bias=False),
            ("LayerNorm", {"dimension": 32}),
            _dense(32, 20, "linear.Identity", bias=False),
            _NORMALIZE,
        ],
        prompts=True,
        default="instruction",
        settings={"truncate_dim": 16},
        transformer={"max_seq_length": 40, "do_lower_case": True},
        encoder={
            "config": {"intermediate_size": 64}
        },  # large enough for int8, because weights with fewer than 1,024 numbers stay in float32
    ),
    "qwen3": _sentence(
        modules=[_pooling("lasttoken"), _NORMALIZE],
        prompts=True,
        encoder={"model_type": "qwen3", "config": _QWEN3, "padding_side": "left"},
    ),
    "gemma": _sentence(
        modules=[
            _pooling("mean"),
            _dense(D_MODEL, 64, "linear.Identity", bias=False),
            _dense(64, 24, "linear.Identity", bias=False),
            _NORMALIZE,
        ],
        prompts=True,
        default="query",
        transformer={"max_seq_length": LONGEST},
        encoder={"model_type": "gemma3_text", "config": _GEMMA},
    ),
    "t5": _sentence(
        modules=[_pooling("mean"), _dense(D_MODEL, 16, "linear.Identity", bias=False), _NORMALIZE],
        transformer={"max_seq_length": 50},
        encoder={"model_type": "t5", "config": _T5},
    ),
    MODEL: ZooModel(functools.partial(shutil.copytree, minilm_directory()), texts=REAL_TEXTS),
    "static": ZooModel(functools.partial(write_static, dense=True), texts=STATIC_TEXTS, prompts=("query",)),
    "model2vec": ZooModel(write_model2vec, texts=STATIC_TEXTS, tasks=False),
}
LATE: dict[str, ZooModel] = {
    name: ZooModel(write, "multi_vector") for name, write in LATE_DIRECTORIES.items() if name != "plain"
}
_SPARSE: dict[str, Callable[[Path], object]] = {
    "sum-log1p": functools.partial(write_splade, pooling="sum", activation="log1p_relu"),
    "roberta-max": functools.partial(write_splade, kind="roberta"),
    "distilbert-few": functools.partial(write_splade, kind="distilbert", max_active_dims=50),
    "static-queries": write_static_queries,
    "static-documents": functools.partial(write_static_queries, documents=True),
}
SPARSE = {name: ZooModel(write, "sparse", SPARSE_TEXTS) for name, write in _SPARSE.items()}
MODELS: dict[str, ZooModel] = {**DENSE, **LATE, **SPARSE}
# The general comparison with a library leaves out these models. A separate test compares BGE-M3 with the original code.
# The trained models are for tests of lower precisions.
OTHERS: dict[str, ZooModel] = {
    "bge-m3": ZooModel(write_bge_m3, texts=SPARSE_TEXTS),
    "trained-late": ZooModel(trained, "multi_vector", REAL_TEXTS),
    "trained-splade": ZooModel(write_trained_splade, "sparse", REAL_TEXTS),
}


class Zoo:
    """The directories and bundles of all models. A model is written when a test first requests this model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, Any] = {}

    def directory(self, name: str) -> Path:
        """Return the directory of a model. The first call writes the directory."""
        path = self._folder / "directories" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            ({**MODELS, **OTHERS}[name]).write(path)
        return path

    def export(self, name: str, models: Path | None = None, served_as: str | None = None, **options: Any) -> Exported:
        """Export a model and return the bundle. By default, the bundle is in the zoo's own model repository."""
        target = Target(model_repository=models or self._folder / "models", name=served_as or name)
        return export_once(export_hf, self.directory(name), target=target, **options)

    def library(self, name: str) -> Any:
        """Load a model's directory with sentence-transformers, on the CPU in float32."""
        if name not in self._libraries:
            import sentence_transformers

            kinds = {"dense": "SentenceTransformer", "multi_vector": "MultiVectorEncoder", "sparse": "SparseEncoder"}
            load = getattr(sentence_transformers, kinds[{**MODELS, **OTHERS}[name].kind])
            self._libraries[name] = load(str(self.directory(name)), device="cpu", local_files_only=True).float()
        return self._libraries[name]

    def vectors(self, name: str, way: Way, texts: Sequence[str] | None = None) -> list[Array]:
        """Return the library's vectors of each text, in the shape (1, width).

        For multi-vector models, the shape is (vectors, width).
        """
        row, library = {**MODELS, **OTHERS}[name], self.library(name)
        encode = getattr(library, f"encode_{way.task}") if way.task else library.encode
        arguments: dict[str, Any] = {}
        if way.prompt_name is not None:
            arguments = {"prompt_name": way.prompt_name} if way.prompt_name else {"prompt": ""}
        if row.kind == "sparse":
            made = encode(list(texts or row.texts), convert_to_sparse_tensor=False, **arguments).numpy()
        else:
            # The library encodes one text at a time. In a batch, padding may change the library's vectors by as much
            # as the tolerance.
            made = encode(list(texts or row.texts), batch_size=1, convert_to_numpy=True, **arguments)
        return [np.atleast_2d(vectors) for vectors in made]


def served(client: Any, name: str, way: Way, texts: Sequence[str], **options: Any) -> list[Array]:
    """Return the vectors that a server computes. The shapes are the same as in `Zoo.vectors`."""
    kind = {"dense": "vector"}.get(kind := {**MODELS, **OTHERS}[name].kind, kind)
    made = client.embed(
        list(texts), kind=kind, task=way.task, prompt_name=way.prompt_name, truncate=True, model=name, **options
    )
    return [np.atleast_2d(it.dense() if hasattr(it, "dense") else it) for it in made]


def embedded(embedder: Any, way: Way, texts: Sequence[str], **options: Any) -> list[Array]:
    """Return the vectors that an Embedder computes. The shapes are the same as in `Zoo.vectors`."""
    made = embedder.embed(list(texts), task=way.task, prompt_name=way.prompt_name, truncate=True, **options)
    if embedder.trained_kind != "sparse":
        return [np.atleast_2d(it) for it in made]
    dense = np.zeros((len(made), 1, embedder.bundle.sparse.width), np.float32)
    for weights, it in zip(dense, made, strict=True):
        weights[0, it.indices] = it.values[:, 0] if it.values.ndim == 2 else it.values
    return list(dense)


def assert_same(kind: Kind, got: Sequence[Array], want: Sequence[Array], where: object = "") -> None:
    """Check that each text has the expected number of vectors, and that each vector is within the tolerance."""
    assert [it.shape for it in got] == [it.shape for it in want], where
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if kind == "sparse":
            assert (np.abs(ours - theirs) <= WEIGHT_TOLERANCE + TOLERANCE * np.abs(theirs)).all(), f"{where}, text {i}"
            continue
        distance, length = (np.linalg.norm(it.astype(np.float64), axis=-1) for it in (ours - theirs, theirs))
        assert (distance <= TOLERANCE * np.where(length > 0, length, 1)).all(), f"{where}, text {i}"
