"""Writes models with fixed bytes, so that their space_ids never change. A space_id identifies a model's vector space.

transformers and sentence-transformers do not write these files, because new versions could write other bytes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

D_MODEL, D_FF, LONGEST = 16, 32, 48
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "The", "cat", "sat", "on", "a", "warm", "mat", "query", "Query", ":", "w1", "W1", "café"]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
_CONFIG = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": D_FF,
    "hidden_act": "gelu",
    "max_position_embeddings": LONGEST,
    "type_vocab_size": 1,
    "pad_token_id": 0,
}
_PIPELINE = "sentence_transformers."
_TRANSFORMER = f"{_PIPELINE}base.modules.transformer.Transformer"


def fill(name: str, *shape: int) -> Tensor:
    """Return numbers from -0.5 to 0.5. float32 represents these numbers exactly. The numbers depend on `name`."""
    seed = sum(ord(letter) * (i + 1) for i, letter in enumerate(name))
    places = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((places + seed) * 2654435761 % 65536 - 32768).float() / 65536).reshape(shape)


def layers(prefix: str, vocab_size: int, positions: int = LONGEST) -> dict[str, Tensor]:
    """Return the weights of a BERT or a RoBERTa with one layer. transformers uses the same names for the weights."""
    block, d = f"{prefix}encoder.layer.0.", D_MODEL
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.word_embeddings.weight": (vocab_size, d),
        f"{prefix}embeddings.position_embeddings.weight": (positions, d),
        f"{prefix}embeddings.token_type_embeddings.weight": (1, d),
        f"{block}intermediate.dense.weight": (D_FF, d),
        f"{block}intermediate.dense.bias": (D_FF,),
        f"{block}output.dense.weight": (d, D_FF),
        f"{block}output.dense.bias": (d,),
    }
    for part in ("self.query", "self.key", "self.value", "output.dense"):
        shapes |= {f"{block}attention.{part}.weight": (d, d), f"{block}attention.{part}.bias": (d,)}
    for norm in (f"{prefix}embeddings", f"{block}attention.output", f"{block}output"):
        shapes |= {f"{norm}.LayerNorm.weight": (d,), f"{norm}.LayerNorm.bias": (d,)}
    return {name: fill(name, *shape) + ("LayerNorm.weight" in name) for name, shape in shapes.items()}


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file. Create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file. Create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"format": "pt"})


def word_level() -> dict[str, Any]:
    """Return the "model" section of a tokenizer.json. The tokenizer has one token for each word."""
    return {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"}


def write_tokenizer(folder: Path, model: Mapping[str, Any], tokens: Mapping[str, int]) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        folder: The new folder.
        model: The "model" section of tokenizer.json.
        tokens: The ids of the tokens in `SPECIAL`.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    around = {it: {"id": it, "ids": [tokens[it]], "tokens": [it]} for it in ("[CLS]", "[SEP]")}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": it, "type_id": 0}} for it in around]
    written = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tokens[it], "content": it, **flags} for it in SPECIAL],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [single[0], sequence, single[1]],
            "pair": [single[0], sequence, single[1], {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": around,
        },
        "decoder": None,
        "model": model,
    }
    write_json(folder / "tokenizer.json", written)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def write_encoder(folder: Path) -> Path:
    """Write a BERT, and a tokenizer with one token for each word."""
    write_json(folder / "config.json", {"model_type": "bert", "vocab_size": len(VOCABULARY), **_CONFIG})
    write_tensors(folder / "model.safetensors", layers("", len(VOCABULARY)))
    write_tokenizer(folder, word_level(), VOCABULARY)
    return folder


def _write_modules(folder: Path, modules: Mapping[str, str], **settings: Any) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": kind if kind == _TRANSFORMER else f"{_PIPELINE}{kind}"}
        for i, (path, kind) in enumerate(modules.items())
    ]
    write_json(folder / "modules.json", listed)
    write_json(folder / "config_sentence_transformers.json", settings)


def write_dense(folder: Path) -> Path:
    """Write a dense model: a BERT with mean pooling, a Dense with ReLU, a LayerNorm, Normalize, and prompts."""
    write_encoder(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 32})
    write_json(folder / "1_Pooling/config.json", {"embedding_dimension": D_MODEL, "pooling_mode": "mean"})
    activation = "torch.nn.modules.activation.ReLU"
    sizes = {"in_features": D_MODEL, "out_features": 8, "bias": True}
    write_json(folder / "2_Dense/config.json", {**sizes, "activation_function": activation})
    dense = {"linear.weight": fill("dense", 8, D_MODEL), "linear.bias": fill("bias", 8)}
    write_tensors(folder / "2_Dense/model.safetensors", dense)
    write_json(folder / "3_LayerNorm/config.json", {"dimension": 8})
    norm = {"norm.weight": fill("norm", 8) + 1, "norm.bias": fill("norm.bias", 8)}
    write_tensors(folder / "3_LayerNorm/model.safetensors", norm)
    write_json(folder / "4_Normalize/config.json", {})
    kinds = {"1_Pooling": "Pooling", "2_Dense": "Dense", "3_LayerNorm": "LayerNorm", "4_Normalize": "Normalize"}
    modules = {"": _TRANSFORMER} | {path: f"models.{kind}" for path, kind in kinds.items()}
    prompts = {"query": "query : ", "document": ""}
    _write_modules(folder, modules, prompts=prompts, default_prompt_name="query", similarity_fn_name="cosine")
    return folder


def write_multi_vector(folder: Path) -> Path:
    """Write a multi-vector model: a BERT and a projection of each token's hidden state.

    Queries are expanded to 16 tokens. In documents, the token ":" gets no vector.
    """
    write_encoder(folder)
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": text},
        "module_output_name": "token_embeddings",
        "max_seq_length": 40,
        "query_expansion": {"strategy": "fixed", "length": 16, "attend": False, "token": None},
    }
    write_json(folder / "sentence_bert_config.json", settings)
    ends = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    identity = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": D_MODEL, "out_features": 8, "bias": False, "activation_function": identity}
    write_json(folder / "1_Dense/config.json", {**sizes, **ends})
    write_tensors(folder / "1_Dense/model.safetensors", {"linear.weight": fill("late", 8, D_MODEL)})
    mask = {"skiplist_words": [":"], "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_json(folder / "2_MultiVectorMask/config.json", mask)
    write_json(folder / "3_Normalize/config.json", ends)
    modules = {
        "": _TRANSFORMER,
        "1_Dense": "base.modules.dense.Dense",
        "2_MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
        "3_Normalize": "base.modules.normalize.Normalize",
    }
    _write_modules(folder, modules, model_type="MultiVectorEncoder", prompts={"query": "query ", "document": "the "})
    return folder


def _write_language_model(folder: Path) -> None:
    tensors = layers("bert.", len(VOCABULARY))
    head = "cls.predictions."
    shapes = {"transform.dense.weight": (D_MODEL, D_MODEL), "transform.dense.bias": (D_MODEL,)}
    shapes |= {"transform.LayerNorm.weight": (D_MODEL,), "transform.LayerNorm.bias": (D_MODEL,)}
    shapes |= {"bias": (len(VOCABULARY),)}
    tensors |= {f"{head}{name}": fill(name, *shape) + ("LayerNorm.w" in name) for name, shape in shapes.items()}
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": len(VOCABULARY), **_CONFIG}
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", tensors)
    write_tokenizer(folder, word_level(), VOCABULARY)
    text = {"method": "forward", "method_output_name": "logits"}
    settings = {"modality_config": {"text": text}, "module_output_name": "token_embeddings"}
    write_json(folder / "sentence_bert_config.json", {"transformer_task": "fill-mask", **settings})


_SPLADE = f"{_PIPELINE}sparse_encoder.modules.splade_pooling.SpladePooling"
_STATIC = f"{_PIPELINE}sparse_encoder.modules.sparse_static_embedding.SparseStaticEmbedding"


def write_sparse(folder: Path) -> Path:
    """Write a SPLADE model. The weight of a word is the sum over the tokens, not the maximum."""
    _write_language_model(folder)
    pooling = {"pooling_strategy": "sum", "activation_function": "relu", "embedding_dimension": None}
    write_json(folder / "1_SpladePooling/config.json", pooling)
    modules = {"": _TRANSFORMER, "1_SpladePooling": _SPLADE.removeprefix(_PIPELINE)}
    _write_modules(folder, modules, model_type="SparseEncoder", prompts={})
    return folder


def write_static_queries(folder: Path) -> Path:
    """Write a SPLADE model that reads the weights of a query's words from a table."""
    _write_language_model(folder / "document_0_Transformer")
    pooling = {"pooling_strategy": "max", "activation_function": "log1p_relu", "embedding_dimension": None}
    write_json(folder / "document_1_SpladePooling/config.json", pooling)
    static = folder / "query_0_SparseStaticEmbedding"
    write_json(static / "config.json", {"frozen": False})
    write_tensors(static / "model.safetensors", {"weight": fill("static", len(VOCABULARY)) + 1})
    write_tokenizer(static, word_level(), VOCABULARY)
    types = {static.name: _STATIC, "document_0_Transformer": _TRANSFORMER, "document_1_SpladePooling": _SPLADE}
    structure = {"query": [static.name], "document": ["document_0_Transformer", "document_1_SpladePooling"]}
    parameters = {"default_route": "document", "allow_empty_key": True, "route_mappings": {}}
    write_json(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    _write_modules(folder, {"": "base.modules.router.Router"}, model_type="SparseEncoder", prompts={})
    return folder


def write_pairs(folder: Path) -> Path:
    """Write a RoBERTa with a byte-pair tokenizer. Do not write a modules.json."""
    letters = [*SPECIAL, *"abcehmnqrstuwy :T", "at", "th", "the", "The", "cat", "mat"]
    vocabulary = {token: i for i, token in enumerate(letters)}
    merges = [["a", "t"], ["t", "h"], ["th", "e"], ["c", "at"], ["m", "at"]]
    byte_pairs = {"type": "BPE", "vocab": vocabulary, "merges": merges, "unk_token": "[UNK]"}
    write_tokenizer(folder, byte_pairs, vocabulary)
    config = {"model_type": "roberta", "vocab_size": len(vocabulary), **_CONFIG, "layer_norm_eps": 1e-5}
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", layers("", len(vocabulary)))
    return folder


def write_bge_m3(folder: Path) -> Path:
    """Write an XLM-R in the format of BGE-M3, with a unigram tokenizer."""
    pieces = [*((token, 0.0) for token in SPECIAL), *((word, -1.5 - i / 3) for i, word in enumerate(WORDS))]
    scored = {"type": "Unigram", "unk_id": 1, "vocab": [list(it) for it in pieces], "byte_fallback": False}
    write_tokenizer(folder, scored, VOCABULARY)
    write_json(folder / "config.json", {"model_type": "xlm-roberta", "vocab_size": len(VOCABULARY), **_CONFIG})
    write_tensors(folder / "model.safetensors", layers("", len(VOCABULARY)))
    write_json(folder / "1_Pooling/config.json", {"embedding_dimension": D_MODEL, "pooling_mode": "cls"})
    write_json(folder / "2_Normalize/config.json", {})
    _write_modules(folder, {"": _TRANSFORMER, "1_Pooling": "models.Pooling", "2_Normalize": "models.Normalize"})
    for name, width in (("colbert_linear.pt", D_MODEL), ("sparse_linear.pt", 1)):
        torch.save({"weight": fill(name, width, D_MODEL), "bias": fill("bias", width)}, folder / name)
    return folder
