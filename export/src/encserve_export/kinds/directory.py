"""Finds the kind and the modules of the model in a directory, and loads the model with sentence-transformers.

The exporter runs no code from a directory. Each module must be a class of sentence-transformers, and its folder must be
inside the directory.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from encserve_export.core.errors import CheckpointFileError, UnsupportedModelError, first_line
from encserve_export.core.quiet import quiet
from encserve_export.kinds.spec import Kind
from encserve_export.source.weights import read_json, read_object

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMERS = ("Transformer", "MLMTransformer")
_ALONE = f"remove {MODULES} and {SETTINGS} to export only the encoder"
_APART = "Queries and documents go through different modules, so export each folder separately"
_SPARSE = ("MLMTransformer", "SpladePooling", "SparseStaticEmbedding", "SparseAutoEncoder")
# The kinds by model_type in config_sentence_transformers.json.
_KINDS: Mapping[str, Kind] = {
    "SentenceTransformer": "dense",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi_vector",
    "ColBERT": "multi_vector",
    "CrossEncoder": "scores",
}
# Only PyLate writes these fields into config_sentence_transformers.json.
_PYLATE = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens", "skiplist_words")
_PYLATE_DENSE = "pylate.models.Dense.Dense"  # sentence-transformers loads its own class Dense instead
_CLASSES: Mapping[Kind, str] = {
    "dense": "SentenceTransformer",
    "static": "SentenceTransformer",
    "sparse": "SparseEncoder",
    "multi_vector": "MultiVectorEncoder",
    "scores": "CrossEncoder",
}
# The possible names of the file with the Transformer module's settings. In older versions of sentence-transformers, the
# file name contains the architecture of the model.
_TRANSFORMER_FILES = [
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
# For the models with these names on the hub, sentence-transformers leaves prompts out of pooling.
_INSTRUCTORS = ("hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl")


def kind_of(directory: Path, *, ignore_head: bool = False) -> Kind:
    """Return the kind of the model in a directory.

    Args:
        directory: The directory.
        ignore_head: Whether to ignore the head of a classifier or a cross-encoder. The kind of such a model is then
            "dense".

    Raises:
        CheckpointFileError: A file is unreadable, or names a folder outside the directory.
        UnsupportedModelError: A bundle cannot express the model or a module of the model.
    """
    settings, config = (_read_if_there(directory / name) for name in (SETTINGS, "config.json"))
    named = settings.get("model_type")
    if named not in (None, *_KINDS):
        raise UnsupportedModelError(
            f"{directory / SETTINGS}: model_type must be one of {', '.join(_KINDS)}; was {named!r}. A newer version of "
            "sentence-transformers may have written this value"
        )
    adapter = transformer_folder(directory) / "adapter_config.json"
    if adapter.is_file():
        raise UnsupportedModelError(
            f"{adapter} is an adapter, which changes the weights of another model. Merge the adapter into that model "
            "with PEFT's merge_and_unload. Save the merged model with save_pretrained, and export the saved directory"
        )
    modules = [name for name, _ in read_modules(directory)]
    if _gives_scores(directory, config, named):
        return "dense" if ignore_head else "scores"
    kind = _KINDS.get(named or "", "dense")
    by_pylate = named is None and not settings.keys().isdisjoint(_PYLATE)
    if by_pylate or "HF_ColBERT" in (config.get("architectures") or []):
        kind = "multi_vector"
    elif named is None and not set(modules).isdisjoint(_SPARSE):
        kind = "sparse"
    elif kind == "dense" and (
        modules[:1] == ["StaticEmbedding"] or (not modules and config.get("model_type") == "model2vec")
    ):
        kind = "static"
    return kind


def read_modules(directory: Path) -> list[tuple[str, Path]]:
    """Return the class name and the folder of each module in modules.json.

    If there is no modules.json, the list is empty. The modules inside a Router follow the Router in the list.

    Raises:
        CheckpointFileError: A file is unreadable, or names a folder outside the directory.
        UnsupportedModelError: A module is not part of sentence-transformers, or has an unknown activation function.
    """
    path = directory / MODULES
    if not path.is_file():
        return []
    try:
        modules = [(str(module["type"]), directory / str(module["path"])) for module in read_json(path)]
    except (TypeError, KeyError):
        modules = []
    if not modules:
        raise CheckpointFileError(f"{path} must be a list of modules, each with a type and a path")
    found = []
    for name, folder in modules:
        found.append(_checked(directory, path, name, folder))
        configs = [file for it in ("router_config.json", "config.json") if (file := folder / it).is_file()]
        if found[-1][0] == "Router" and configs:
            types = read_object(configs[0]).get("types")
            if not isinstance(types, dict):
                raise CheckpointFileError(f"{configs[0]}: types must map the folder of each module to its type")
            found += [_checked(directory, configs[0], str(kind), folder / inner) for inner, kind in types.items()]
    return found


def transformer_folder(directory: Path) -> Path:
    """Return the encoder's folder from modules.json, or the directory itself.

    Raises:
        CheckpointFileError, UnsupportedModelError: As in `read_modules`.
    """
    encoders = [folder for kind, folder in read_modules(directory) if kind in TRANSFORMERS]
    return encoders[0] if encoders else directory


def transformer_settings(encoder: Path) -> dict[str, Any]:
    """Return the settings of the Transformer module from a file in the encoder's folder.

    The result is empty if the folder has no such file.

    Raises:
        CheckpointFileError: The file is unreadable, or a length is not a number of tokens.
        UnsupportedModelError: The file names a tokenizer outside the directory.
    """
    path = next((encoder / name for name in _TRANSFORMER_FILES if (encoder / name).is_file()), None)
    if path is None:
        return {}
    settings = read_object(path)
    for name in ("max_seq_length", "query_length", "document_length"):
        length = settings.get(name)
        if length is not None and (type(length) is not int or length < 1):
            raise CheckpointFileError(f"{path} must give {name} as a number of tokens, at least 1; was {length!r}")
    if settings.get("tokenizer_name_or_path"):
        raise UnsupportedModelError(
            f"{path}: tokenizer_name_or_path names another tokenizer, {settings['tokenizer_name_or_path']!r}. Put the "
            "tokenizer.json of that tokenizer next to config.json, and remove tokenizer_name_or_path"
        )
    return settings


def states_length(settings: Mapping[str, Any]) -> bool:
    """Return whether the Transformer module's settings contain the length of the longest text."""
    return "max_seq_length" in settings or "model_max_length" in _arguments(settings, "tokenizer_args", "processor")


def load(directory: Path, kind: Kind, repository: str = "") -> Any:
    """Load a directory with sentence-transformers, in float32, for inference.

    Args:
        directory: The directory.
        kind: The result of `kind_of`.
        repository: The model's name on the hub, OWNER/NAME; empty for a local directory.

    Raises:
        UnsupportedModelError: sentence-transformers cannot load the directory.
    """
    import sentence_transformers

    make = getattr(sentence_transformers, _CLASSES[kind])
    arguments: dict[str, Any] = {} if kind == "static" else {"model_kwargs": _model_arguments(directory)}
    advice = "export a model with a float32 or float16 table" if kind == "static" else _ALONE
    with quiet():
        try:
            model = make(str(directory), device="cpu", local_files_only=True, trust_remote_code=False, **arguments)
        except Exception as error:  # sentence-transformers raises many exception classes
            raise UnsupportedModelError(
                f"sentence-transformers cannot load {directory}: {type(error).__name__}: {first_line(error)}; {advice}"
            ) from error
    if repository in _INSTRUCTORS:
        model.set_pooling_include_prompt(False)
    return model.float().eval()


def transformer_of(loaded: Any) -> Any:
    """Return the Transformer module of a sentence-transformers model. The module may be inside a Router."""
    from sentence_transformers.base.modules import Transformer

    # Compare classes, not names: DistilBERT also has a module named Transformer.
    (transformer,) = [it for it in loaded.modules() if isinstance(it, Transformer)]
    return transformer


def refusal(kind: str) -> str:
    """Return the error text for a module that a bundle cannot express."""
    advice = _APART if kind in ("Asym", "Router") else f"Serve the model with sentence-transformers, or {_ALONE}"
    return f"modules.json has a {kind} module, which a bundle cannot express at this place. {advice}"


def _checked(directory: Path, path: Path, name: str, folder: Path) -> tuple[str, Path]:
    """Check a module that the file `path` lists. Return its class name, without the package, and its folder."""
    if not folder.resolve().is_relative_to(directory.resolve()):
        raise CheckpointFileError(f"{path} names a folder outside {directory}: {os.path.relpath(folder, directory)!r}")
    if not name.startswith("sentence_transformers.") and name != _PYLATE_DENSE:
        raise UnsupportedModelError(
            f"{path} has a module {name}, which is not a class of sentence-transformers. The exporter never runs the "
            f"code of such a module. You can {_ALONE}"
        )
    kind = name.rpartition(".")[2]
    if kind == "Dense":
        # If the file names no activation, sentence-transformers and PyLate use different defaults.
        _check_activation(folder / "config.json", None if name == _PYLATE_DENSE else "torch.nn.")
    return kind, folder


def _check_activation(path: Path, default: str | None) -> None:
    activation = _read_if_there(path).get("activation_function", default)
    if not str(activation).startswith("torch.nn."):
        raise UnsupportedModelError(
            f"{path}: activation_function must be a class of torch.nn; was {activation!r}, which sentence-transformers "
            "would replace by Tanh. Write the activation that the model was trained with. If it was trained without an "
            'activation, write "torch.nn.modules.linear.Identity"'
        )


def _model_arguments(directory: Path) -> dict[str, Any]:
    """Return the arguments for loading the encoder.

    The configuration may select an implementation of attention that needs a GPU. The arguments select "eager" instead.
    """
    encoder = transformer_folder(directory)
    config = _read_if_there(encoder / "config.json")
    config |= _arguments(transformer_settings(encoder), "model_args", "model")
    configured = config.get("attn_implementation") or config.get("_attn_implementation")
    return {"dtype": torch.float32} | ({"attn_implementation": "eager"} if configured else {})


def _arguments(settings: Mapping[str, Any], old_name: str, name: str) -> dict[str, Any]:
    found = settings.get(old_name, settings.get(f"{name}_kwargs"))
    return found if isinstance(found, dict) else {}


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def is_cross_encoder(directory: Path) -> bool:
    """Return whether sentence-transformers has saved the directory as a CrossEncoder, in any version."""
    settings = _read_if_there(directory / SETTINGS)
    return settings.get("model_type") == "CrossEncoder" or activation_path(directory) is not None


def activation_path(directory: Path) -> str | None:
    """Return the name of a CrossEncoder's activation. Return None if the directory's files name no activation."""
    config = _read_if_there(directory / "config.json")
    own = config.get("sentence_transformers")
    for fields, name in (
        (_read_if_there(directory / SETTINGS), "activation_fn"),
        (own if isinstance(own, dict) else {}, "activation_fn"),
        (config, "sbert_ce_default_activation_function"),
    ):
        if fields.get(name) is not None:
            return str(fields[name])
    return None


def _gives_scores(directory: Path, config: Mapping[str, Any], named: str | None) -> bool:
    """Return whether the directory is a cross-encoder or a classifier."""
    own = config.get("sentence_transformers")
    if named is None and ("sbert_ce_default_activation_function" in config or "activation_fn" in (own or {})):
        return True
    classes = [str(name) for name in config.get("architectures") or ["none"]]
    is_classifier = all(name.endswith("ForSequenceClassification") for name in classes)
    return named == "CrossEncoder" or (is_classifier and not (directory / MODULES).is_file())
