"""Reads a multi-vector (late interaction) directory: sentence-transformers loads it, whatever wrote it.

It knows the layouts of its own, of PyLate and of Stanford's ColBERT, and mends what older ones lack. What it has made
of a directory is translated here; what a bundle cannot express is refused.
"""

import contextlib
import dataclasses
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from encserve_export.ground.errors import CheckpointFileError, MissingPackageError, UnsupportedModelError
from encserve_export.kinds.dense import MODULES, SETTINGS, read_modules
from encserve_export.kinds.recipe import TASKS, MultiVectorHead, Recipe
from encserve_export.kinds.template import read_template
from encserve_export.source.tokenizer import FILE, TokenizerFile, tokenizer_source, write_tokenizer
from encserve_export.source.weights import read_object
from encserve_proto.bundle.v1 import manifest_pb2

# What only PyLate writes into config_sentence_transformers.json.
_PYLATE = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")
_NO_BOUND = 1_000_000
_EXTRA = "pip install './export[sentence-transformers]' in a checkout of encserve"


@dataclasses.dataclass(frozen=True)
class Directory:
    """What a directory says.

    Attributes:
        vector: What is made of its rows, and how texts are treated.
        tokenizer: Its tokenizer.
        longest: The longest text of any task, in tokens, special ones included; None where nothing says so.
        encoder: Where the encoder and its config.json lie.
        inline: The parts among the encoder's own weights that make vectors of its rows.
    """

    vector: Recipe
    tokenizer: TokenizerFile
    longest: int | None
    encoder: Path
    inline: tuple[str, ...]


def is_multi_vector(directory: Path) -> bool:
    """Whether a directory is one of a multi-vector model, by what its files say of themselves.

    Raises:
        CheckpointFileError: One of them is unreadable.
    """
    settings = read_object(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    kind = settings.get("model_type")
    if kind is not None:
        return kind in ("MultiVectorEncoder", "ColBERT")
    if any(name in settings for name in _PYLATE):
        return True
    config = read_object(directory / "config.json") if (directory / "config.json").is_file() else {}
    return "HF_ColBERT" in (config.get("architectures") or [])


def load(directory: Path, kind: str = "MultiVectorEncoder") -> Any:
    """The directory as this class of sentence-transformers', in float32, without any code of the directory's.

    Raises:
        MissingPackageError: sentence-transformers is not installed, or is older than 6.
        CheckpointFileError: It cannot read the directory.
    """
    try:
        import sentence_transformers

        encoder = getattr(sentence_transformers, kind)
    except (ImportError, AttributeError):
        raise MissingPackageError(
            f"{directory} is a {kind}'s, which sentence-transformers 6 or later reads: {_EXTRA}"
        ) from None
    with quiet():
        try:
            model = encoder(str(directory), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32})
        except Exception as error:  # whatever it raises, it is theirs
            raise CheckpointFileError(f"sentence-transformers cannot read {directory}: {error}") from error
    return model.eval()


def read(directory: Path, tokenizer_path: Path) -> Directory:
    """Reads a directory.

    Args:
        directory: For which `is_multi_vector` holds.
        tokenizer_path: Where its tokenizer.json is written, with the tokens that older layouts name beside it.

    Raises:
        MissingPackageError: As for `load`.
        CheckpointFileError: As for `load`.
        UnsupportedModelError: It does what a bundle cannot express.
    """
    modules = read_modules(directory)
    _check_modules(modules)
    model = load(directory)
    first, *rest = model.children()
    if type(first).__name__ != "Transformer" or not hasattr(first.tokenizer, "backend_tokenizer"):
        raise UnsupportedModelError(f"{directory}: its first module must be a Transformer of text; was {first}")
    if set(first.modalities) - {"text", "message"}:
        raise UnsupportedModelError(
            f"{directory} takes {', '.join(first.modalities)}: only models of text alone are served"
        )
    folder = modules[0][1] if modules else directory
    made_of = tokenizer_source(folder) or folder / FILE
    template = None
    if "message" in first.modalities:
        template = read_template(first, has_prompts=any(model.prompts.values()))
    tokenizer = write_tokenizer(first.tokenizer, tokenizer_path, made_of=made_of, add_special_tokens=template is None)
    projections, mask, pooling = _sorted(rest)
    tasks = {task: _task(task, first, mask, pooling) for task in TASKS}
    # Where nobody set one, transformers writes a number of 31 digits.
    usual = model.max_seq_length if model.max_seq_length and model.max_seq_length < _NO_BOUND else 0
    longest = max(usual, *(settings.max_tokens for settings in tasks.values()))
    shorter = usual if usual < longest else 0
    for name, settings in tasks.items():
        settings.prompt_name = name if model.prompts.get(name) else ""
        settings.max_tokens = settings.max_tokens or shorter
    vector = Recipe(
        prompts=dict(model.prompts),
        default_prompt_name=model.default_prompt_name or "",
        tasks=tasks,
        multi_vector=MultiVectorHead(_Projections(projections).eval().requires_grad_(False), model.similarity_fn_name),
        max_tokens=shorter,
        template=template,
    )
    return Directory(vector, tokenizer, longest or None, folder, () if modules else ("linear",))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this block sentence-transformers says nothing of what it mends, on the log or the error stream."""
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


class _Projections(nn.Module):
    """Sentence-transformers' modules from rows to vectors: (tokens, d_model) -> (tokens, width)."""

    def __init__(self, modules: list[Any]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        self.settings = [module.get_config_dict() for module in modules]

    def forward(self, rows: Tensor) -> Tensor:
        """Sends rows through them."""
        features = {"token_embeddings": rows}
        for step in self.steps:
            features = step(features)
        return features["token_embeddings"]


def _sorted(modules: list[Any]) -> tuple[list[nn.Module], Any, Any]:
    """What makes vectors of rows; which tokens count; what joins vectors, last of all, or None."""
    projections: list[nn.Module] = []
    mask = pooling = None
    for module in modules:
        kind = type(module).__name__
        ends = [getattr(module, end, None) for end in ("module_input_name", "module_output_name")]
        if pooling is not None:
            raise UnsupportedModelError(f"a {kind} module stands behind the token pooling, which has to be the last")
        if kind in ("Dense", "Normalize", "LayerNorm") and ends == ["token_embeddings"] * 2:
            projections.append(module)
        elif kind == "MultiVectorMask" and mask is None:
            mask = module
        elif kind == "HierarchicalTokenPooling":
            pooling = module
        elif kind != "Dropout":
            of = "" if ends[0] in (None, "token_embeddings") else f" of {ends[0]}"
            raise UnsupportedModelError(
                f"modules.json has a {kind} module{of}, which a bundle of multi-vectors cannot express; serve it with "
                "sentence-transformers"
            )
    return projections, mask, pooling


def _task(task: str, first: Any, mask: Any, pooling: Any) -> manifest_pb2.TaskSettings:
    """How texts of a task are treated, but for their prompt."""
    settings = manifest_pb2.TaskSettings(max_tokens=getattr(first, f"{task}_length") or 0)
    if task == "query" and first.query_expansion is not None:
        _expand(settings, first)
    if mask is not None:
        if task in mask.skiplist_tasks and mask._skiplist_ids is not None:
            settings.skipped_token_ids.extend(sorted(set(mask._skiplist_ids.tolist())))
        if task == "document":
            settings.kept_token_ids.extend(sorted(mask.keep_only_token_ids or []))
    if pooling is not None and pooling.applies_to(task) and (pooling.pool_factor > 1 or pooling.normalize_embeddings):
        settings.token_pooling.CopyFrom(
            manifest_pb2.TokenPooling(
                factor=pooling.pool_factor,
                protected_tokens=pooling.num_protected_tokens,
                l2_normalize=pooling.normalize_embeddings,
            )
        )
    return settings


def _expand(settings: manifest_pb2.TaskSettings, first: Any) -> None:
    """Adds the expansion of queries."""
    expansion, tokenizer = first.query_expansion, first.tokenizer
    if tokenizer.padding_side != "right":
        raise UnsupportedModelError("queries are expanded on their left (padding_side), which a bundle cannot express")
    token_id = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if expansion["token"] is not None:
        token_id = tokenizer.convert_tokens_to_ids(expansion["token"])
    length = expansion["length"]
    if expansion["strategy"] == "fixed":
        settings.max_tokens = length
    elif settings.max_tokens:
        settings.max_tokens = max(settings.max_tokens, length)
    settings.expansion.CopyFrom(
        manifest_pb2.Expansion(min_tokens=length, token_id=token_id, attended=expansion["attend"])
    )


def _check_modules(modules: list[tuple[str, Path]]) -> None:
    """Refuses code of others', and a Dense whose activation sentence-transformers would take for Tanh."""
    for name, folder in modules:
        if not name.startswith(("sentence_transformers.", "pylate.")):
            raise UnsupportedModelError(
                f"{MODULES} has a module {name}, which is code of its own and never run here; serve it with "
                "sentence-transformers"
            )
        path = folder / "config.json"
        if not name.endswith("Dense") or not path.is_file():
            continue
        activation = read_object(path).get("activation_function")
        if not str(activation).startswith("torch."):
            raise UnsupportedModelError(
                f"{path}: activation_function must be a class of torch.nn, which sentence-transformers loads as it is; "
                f"was {activation!r}, for which it would take Tanh. Write the one that the model was trained with: "
                '"torch.nn.modules.linear.Identity" for none'
            )
