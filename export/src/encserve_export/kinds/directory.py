"""A directory of sentence-transformers: what its files name, checked before anything of it is loaded, and loading it.

No code of a directory's is ever run: every module that a file names must be one that is known here, in a folder within
the directory, with settings that sentence-transformers takes as they are.
"""

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from encserve_export.ground.errors import CheckpointFileError, UnsupportedModelError, first_line
from encserve_export.kinds.recipe import Kind
from encserve_export.source.weights import read_json, read_object

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMERS = ("Transformer", "MLMTransformer")
_ALONE = "without modules.json the encoder alone is exported"
# The classes of sentence-transformers that may be loaded; what a kind of model cannot express it refuses itself.
_KNOWN = {
    *TRANSFORMERS, "Dense", "Dropout", "HierarchicalTokenPooling", "LayerNorm", "MultiVectorMask", "Normalize",
    "Pooling", "Router", "SparseStaticEmbedding", "SpladePooling", "StaticEmbedding",
}  # fmt: skip
_APART = "queries and documents go through different modules; export each of its folders by itself"
_UNKNOWN = {
    "Asym": _APART,
    "BoW": "there is no encoder to serve",
    "WordEmbeddings": "there is no encoder to serve",
    "CLIPModel": "it takes images too; save its text model alone (CLIPTextModel.save_pretrained) and export that",
    "SparseAutoEncoder": "its weights come of one pooled vector and not of every token; serve the dense model within, "
    "or use sentence-transformers' SparseEncoder",
}
_SPARSE = ("MLMTransformer", "SpladePooling", "SparseStaticEmbedding", "SparseAutoEncoder")
# Who wrote config_sentence_transformers.json, by its model_type; and what only PyLate writes into one without.
_KINDS: Mapping[str, Kind] = {
    "SentenceTransformer": "dense",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi_vector",
    "ColBERT": "multi_vector",
}
_PYLATE = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")
_PYLATE_DENSE = "pylate.models.Dense.Dense"  # which sentence-transformers reads as its own
_CLASSES: Mapping[Kind, str] = {
    "dense": "SentenceTransformer",
    "static": "SentenceTransformer",
    "sparse": "SparseEncoder",
    "multi_vector": "MultiVectorEncoder",
}
_PAIRS = "it scores pairs of texts and gives no vector of one; serve it with a server for rerankers"
_CLASSIFIER = "ForSequenceClassification"
# Older versions named it after the model within.
_TRANSFORMER_FILES = [
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# Settings of the Transformer module that change no vector.
_HARMLESS = {
    "model": {"add_pooling_layer", "attn_implementation", "dtype", "torch_dtype", "use_safetensors", "device_map"},
    "processor": {"model_max_length", "padding_side", "use_fast", "clean_up_tokenization_spaces"},
    "config": {"attn_implementation", "use_cache"},
}
# How the tokenizer is called, of which these change no vector of a text.
_HARMLESS_CALLS = {"padding", "pad_to_multiple_of", "return_tensors"}
# For these sentence-transformers leaves prompts out of pooling whatever the directory says.
_INSTRUCTORS = ("hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl")


def kind_of(directory: Path) -> Kind:
    """What kind of model a directory is of, by what its files say of themselves.

    Raises:
        CheckpointFileError: A file is unreadable, or names a folder elsewhere.
        UnsupportedModelError: It is of a kind that is not served, or has a module that is not known here.
    """
    settings, config = (_read_if_there(directory / name) for name in (SETTINGS, "config.json"))
    said = settings.get("model_type")
    if said is not None and not isinstance(said, str):
        raise CheckpointFileError(f"{directory / SETTINGS}: model_type must be a text; was {said!r}")
    if said == "CrossEncoder" or (said is None and _scores_pairs(config)):
        raise UnsupportedModelError(f"{directory} is a CrossEncoder: {_PAIRS}")
    if said is not None and said not in _KINDS:
        raise UnsupportedModelError(
            f"{directory / SETTINGS}: model_type must be one of {', '.join(_KINDS)}; was {said!r}. A newer version of "
            "sentence-transformers may have written it"
        )
    _refuse_adapter(directory)
    kinds = [kind for kind, _ in routed_modules(directory)]
    if "HF_ColBERT" in (config.get("architectures") or []) or (said is None and any(it in settings for it in _PYLATE)):
        return "multi_vector"
    if said is not None and _KINDS[said] != "dense":
        return _KINDS[said]
    if said is None and not set(kinds).isdisjoint(_SPARSE):
        return "sparse"
    if kinds[:1] == ["StaticEmbedding"] or (not kinds and config.get("model_type") == "model2vec"):
        return "static"
    if not kinds:
        _refuse_classifier(directory, config)
    return "dense"


def read_modules(directory: Path) -> list[tuple[str, Path]]:
    """The class, without its package, and the folder of each module that modules.json lists, in order; maybe none.

    Raises:
        CheckpointFileError: It is unreadable, or names a folder elsewhere.
        UnsupportedModelError: A module is not one that is known here.
    """
    path = directory / MODULES
    if not path.is_file():
        return []
    try:
        found = [(str(module["type"]), directory / str(module["path"])) for module in read_json(path)]
    except (TypeError, KeyError):
        raise CheckpointFileError(f"{path} must be a list of modules, each with a type and a path") from None
    return [_checked(directory, path, name, folder) for name, folder in found]


def routed_modules(directory: Path) -> list[tuple[str, Path]]:
    """The same, with the modules of a Router in its place.

    Raises:
        CheckpointFileError, UnsupportedModelError: As for `read_modules`.
    """
    found = []
    for kind, folder in read_modules(directory):
        paths = [path for name in ("router_config.json", "config.json") if (path := folder / name).is_file()]
        if kind != "Router" or not paths:
            found.append((kind, folder))
            continue
        types = read_object(paths[0]).get("types")
        if not isinstance(types, dict):
            raise CheckpointFileError(f"{paths[0]} must give the type of each module by its folder")
        found += [_checked(directory, paths[0], str(name), folder / str(inner)) for inner, name in types.items()]
    return found


def transformer_folder(directory: Path) -> Path:
    """Where the encoder lies: the directory itself, or the folder that modules.json names.

    Raises:
        CheckpointFileError, UnsupportedModelError: As for `read_modules`.
    """
    encoders = [folder for kind, folder in routed_modules(directory) if kind in TRANSFORMERS]
    return encoders[0] if encoders else directory


def check_transformer(directory: Path, task: str = "feature-extraction") -> None:
    """Refuses settings of the Transformer module that would change a vector.

    Args:
        directory: Where the encoder lies.
        task: The transformer_task that it must have.

    Raises:
        CheckpointFileError: A file is unreadable, or a length is no number of tokens.
        UnsupportedModelError: There is such a setting.
    """
    path, settings = transformer_settings(directory)
    found = settings.get("transformer_task", task)
    if found != task:
        raise UnsupportedModelError(f"{path}: transformer_task must be {task} for this kind of model; was {found!r}")
    for name in ("max_seq_length", "query_length", "document_length"):
        length = settings.get(name)
        if length is not None and (type(length) is not int or length < 1):
            raise CheckpointFileError(f"{path} must give {name} as a number of tokens from 1; was {length!r}")
    calls = settings.get("processing_kwargs") or {}
    if not isinstance(calls, dict):
        raise CheckpointFileError(f"{path} must give processing_kwargs as an object; was {calls!r}")
    called = {name for kind in ("text", "common") for name in calls.get(kind) or {}}
    if unknown := sorted(called - _HARMLESS_CALLS):
        raise UnsupportedModelError(
            f"{path}: processing_kwargs calls the tokenizer with {', '.join(unknown)}, which a bundle cannot express; "
            "write it into tokenizer.json, and take it out"
        )
    if settings.get("tokenizer_name_or_path"):
        raise UnsupportedModelError(
            f"{path}: its tokenizer is that of {settings['tokenizer_name_or_path']!r}; put that tokenizer.json beside "
            "config.json, and take tokenizer_name_or_path out"
        )
    for name, harmless in _HARMLESS.items():
        if unknown := sorted(_arguments(settings, name).keys() - harmless):
            raise UnsupportedModelError(
                f"{path}: what it changes of the {name} is not known here: {', '.join(unknown)}; write it into the "
                "directory's own files, and take it out"
            )


def transformer_settings(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The file of the Transformer module's settings, and what is in it; `directory` is where the encoder lies."""
    path = next((directory / name for name in _TRANSFORMER_FILES if (directory / name).is_file()), None)
    return (directory / _TRANSFORMER_FILES[0], {}) if path is None else (path, read_object(path))


def says_length(settings: Mapping[str, Any]) -> bool:
    """Whether the Transformer module's settings give the longest text."""
    return "max_seq_length" in settings or "model_max_length" in _arguments(settings, "processor")


def load(directory: Path, kind: Kind, repository: str = "") -> Any:
    """The directory as sentence-transformers loads it, in float32, for inference.

    Args:
        directory: For which `kind_of` gives `kind`, and `check_transformer` holds.
        kind: Its kind.
        repository: Where on the hub it came from, OWNER/NAME; empty where it did not.

    Raises:
        UnsupportedModelError: sentence-transformers cannot load it.
    """
    import sentence_transformers

    make = getattr(sentence_transformers, _CLASSES[kind])
    arguments: dict[str, Any] = {} if kind == "static" else {"model_kwargs": {"dtype": torch.float32}}
    with quiet():
        try:
            model = make(str(directory), device="cpu", local_files_only=True, trust_remote_code=False, **arguments)
        except Exception as error:  # whatever it raises, it is theirs
            raise UnsupportedModelError(
                f"sentence-transformers cannot load {directory}: {type(error).__name__}: {first_line(error)}; {_ALONE}"
            ) from error
    if repository in _INSTRUCTORS:
        model.set_pooling_include_prompt(False)
    return model.float().eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this block sentence-transformers logs and prints nothing about what it repairs."""
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _checked(directory: Path, path: Path, name: str, folder: Path) -> tuple[str, Path]:
    """A module that a file at `path` names, by its class without the package, and its folder."""
    if not folder.resolve().is_relative_to(directory.resolve()):
        raise CheckpointFileError(f"{path} names a folder outside {directory}: {os.path.relpath(folder, directory)!r}")
    if not name.startswith("sentence_transformers.") and name != _PYLATE_DENSE:
        raise UnsupportedModelError(
            f"{path} has a module {name}, which is code of its own and never run here; {_ALONE}"
        )
    kind = name.rpartition(".")[2]
    if kind not in _KNOWN:
        raise UnsupportedModelError(refusal(kind))
    if kind == "Dense":
        # sentence-transformers has a default, and PyLate another one.
        _check_activation(folder / "config.json", None if name == _PYLATE_DENSE else "torch.nn.")
    return kind, folder


def refusal(kind: str) -> str:
    """Why a module of this class is refused, and what to do."""
    why = _APART if kind == "Router" else _UNKNOWN.get(kind, _ALONE)
    return f"modules.json has a {kind} module, which a bundle cannot express here: {why}"


def _check_activation(path: Path, default: str | None) -> None:
    """Refuses an activation that sentence-transformers would not load, or would take for Tanh."""
    activation = _read_if_there(path).get("activation_function", default)
    if not str(activation).startswith("torch.nn."):
        raise UnsupportedModelError(
            f"{path}: activation_function must be a class of torch.nn, which sentence-transformers loads as it is; "
            f"was {activation!r}, for which it would take Tanh. Write the one that the model was trained with: "
            '"torch.nn.modules.linear.Identity" for none'
        )


def _arguments(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the module's file gives to the "model", the "processor" or the "config", under its new name or its old."""
    old = "tokenizer_args" if name == "processor" else f"{name}_args"
    found = settings.get(old, settings.get(f"{name}_kwargs"))
    return found if isinstance(found, dict) else {}


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _scores_pairs(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a cross-encoder, which has had several ways to say so."""
    own = config.get("sentence_transformers")
    return "sbert_ce_default_activation_function" in config or (isinstance(own, dict) and "activation_fn" in own)


def _refuse_classifier(directory: Path, config: Mapping[str, Any]) -> None:
    classes = [str(name) for name in config.get("architectures") or []]
    if classes and all(name.endswith(_CLASSIFIER) for name in classes):
        raise UnsupportedModelError(
            f"{directory / 'config.json'} names {' and '.join(classes)}, and no modules.json says that texts are "
            "embedded with it: it is a cross-encoder or a classifier, which gives scores and no vector; serve it with "
            'a server for such. For the rows of the encoder within it, take "architectures" out of config.json'
        )


def _refuse_adapter(directory: Path) -> None:
    for folder in {directory, transformer_folder(directory)}:
        if (folder / "adapter_config.json").is_file():
            raise UnsupportedModelError(
                f"{folder} holds an adapter (adapter_config.json), which changes the weights of another model; merge "
                "them with PEFT's merge_and_unload, save that with save_pretrained, and export it"
            )
