"""Writes directories of multi-vector models.

sentence-transformers writes only the current format. So this module itself writes the files of older formats.
"""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import minilm_directory
from safetensors.torch import load_file, save_file
from sentence_models import D_MODEL, write_encoder
from torch import nn

WIDTH = 10
PROMPTS = {"query": "Query: ", "document": "passage: "}
_PUNCTUATION = list(string.punctuation)
_SKIPPED = [*":.", "cat"]  # "." is not in the vocabulary
_IDENTITY = "torch.nn.modules.linear.Identity"


def native(
    *, model_type: str = "bert", encoder: dict[str, Any] | None = None, **settings: Any
) -> Callable[[Path], None]:
    """Return a function that uses sentence-transformers to write a directory.

    `settings` contains the arguments for each part of the model. The keys are:

        transformer: Arguments for Transformer.
        projections: A list with the arguments for each Dense.
        mask: Arguments for MultiVectorMask.
        pooling: Arguments for HierarchicalTokenPooling.
        model: Arguments for MultiVectorEncoder.
    """

    def write(folder: Path) -> None:
        from sentence_transformers import MultiVectorEncoder
        from sentence_transformers.base.modules import Dense, Normalize, Transformer
        from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

        write_encoder(folder.with_name(f"{folder.name}-encoder"), model_type=model_type, config=encoder)
        modules: list[nn.Module] = [
            Transformer(str(folder.with_name(f"{folder.name}-encoder")), **settings.get("transformer", {}))
        ]
        torch.manual_seed(1)
        for its in settings.get("projections", [{"in_features": D_MODEL, "out_features": WIDTH, "bias": False}]):
            activation = its.get("activation_function", nn.Identity())
            modules.append(Dense(**{**its, "activation_function": activation}, module_input_name="token_embeddings"))
        modules += [MultiVectorMask(**settings.get("mask", {})), Normalize(module_input_name="token_embeddings")]
        if "pooling" in settings:
            modules.append(HierarchicalTokenPooling(**settings["pooling"]))
        model = MultiVectorEncoder(modules=modules, device="cpu", **{"prompts": PROMPTS, **settings.get("model", {})})
        model.save_pretrained(str(folder))

    return write


def pylate(**settings: Any) -> Callable[[Path], None]:
    """Return a function that writes a directory in the format of PyLate up to version 1.6.

    This format has only two modules. Most settings are fields of config_sentence_transformers.json. The prefix of
    queries is one token, and the prefix of documents is one token.
    """

    def write(folder: Path) -> None:
        write_encoder(folder, more_words=["[Q] ", "[D] "])
        _add_tokens(folder, ["[Q] ", "[D] "])
        (folder / "1_Dense").mkdir()
        dense = {"in_features": D_MODEL, "out_features": WIDTH, "bias": False, "activation_function": _IDENTITY}
        (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
        weight = torch.randn((WIDTH, D_MODEL), generator=torch.Generator().manual_seed(1))
        save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
        kinds = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
        modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 63, "do_lower_case": False}))
        flat = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "document_length": 64, **settings}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(flat))

    return write


def stanford(folder: Path) -> None:
    """Write a directory in the format of Stanford's ColBERT.

    The file with BERT's weights also contains the weights of the projection. artifact.metadata contains the settings.
    """
    write_encoder(folder, more_words=["[unused0]", "[unused1]"])
    weights = {f"bert.{name}": it for name, it in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn((WIDTH, D_MODEL), generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = {"query_maxlen": 24, "doc_maxlen": 60, "query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    (folder / "artifact.metadata").write_text(json.dumps(metadata | {"mask_punctuation": True, "dim": WIDTH}))


def _add_tokens(folder: Path, tokens: list[str]) -> None:
    """Add words of the vocabulary to the list of added tokens in tokenizer.json.

    The tokenizer first finds added tokens in a text. Then the tokenizer splits the rest of the text into words.
    """
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    ids = settings["model"]["vocab"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    settings["added_tokens"] += [{"id": ids[token], "content": token, **flags} for token in tokens]
    path.write_text(json.dumps(settings))


_NO_BIAS = {"bias": False}
DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "plain": native(),
    "fixed-unattended": native(
        transformer={"query_expansion": {"strategy": "fixed", "length": 32}, "document_length": 80},
        mask={"skiplist_words": _PUNCTUATION},
    ),
    "fixed-attended": native(
        transformer={"query_expansion": {"strategy": "fixed", "length": 20, "attend": True, "token": "the"}},
        projections=[
            {"in_features": D_MODEL, "out_features": D_MODEL, "activation_function": nn.GELU(), "use_residual": True},
            {"in_features": D_MODEL, "out_features": WIDTH, **_NO_BIAS},
        ],
    ),
    "min": native(
        transformer={"query_expansion": {"strategy": "min", "length": 12}, "query_length": 40},
        model={"similarity_fn_name": "meanmaxsim"},
    ),
    "skipped-in-queries": native(mask={"skiplist_words": _SKIPPED, "skiplist_tasks": ["query", "document"]}),
    "kept-in-documents": native(mask={"keep_only_token_ids": [5, 6, 7, 8]}),
    "token-pooling": native(pooling={"pool_factor": 2.5}, mask={"skiplist_words": [":"]}),
    "pylate": pylate(model_type="ColBERT", query_length=16),
    "pylate-without-type": pylate(
        do_query_expansion=True, attend_to_expansion_tokens=True, skiplist_words=["cat", "mat"]
    ),
    "stanford": stanford,
    "roberta": native(
        model_type="roberta",
        encoder={"pad_token_id": 0},
        # RoBERTa has 95 positions here, so the maximum length is set below 95.
        transformer={"query_expansion": {"strategy": "fixed", "length": 32}, "max_seq_length": 90},
    ),
    "modernbert": native(
        model_type="modernbert",
        encoder={"pad_token_id": 0, "local_attention": 64, "global_attn_every_n_layers": 2},
        transformer={"query_expansion": {"strategy": "fixed", "length": 32}},
    ),
}


def trained(folder: Path) -> None:
    """Write a multi-vector model: the real trained MiniLM, and a projection with random weights."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(1)
    ends = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    modules = [
        Transformer(str(minilm_directory()), query_expansion={"strategy": "fixed", "length": 32}),
        Dense(384, 128, bias=False, activation_function=nn.Identity(), **ends),
        MultiVectorMask(skiplist_words=_PUNCTUATION),
        Normalize(**ends),
    ]
    MultiVectorEncoder(modules=modules, device="cpu", prompts=PROMPTS).save_pretrained(str(folder))
