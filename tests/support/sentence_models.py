"""Writes directories in the format of sentence-transformers, with a small model and random weights."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

WORDS = ["the", "cat", "sat", "on", "warm", "mat", "Query", "query", ":", "passage", "Represent", "this", "we", "like"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
D_MODEL, LONGEST = 24, 96
MODULES = {
    5: "sentence_transformers.models.{}",
    6: "sentence_transformers.sentence_transformer.modules.{}",
}


def text_of(n_words: int, seed: int = 0) -> str:
    """Return a random text of `n_words` words. Each word is one token."""
    picked = torch.randint(0, len(WORDS), (n_words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picked.tolist())


def write_encoder(
    folder: Path,
    *,
    model_type: str = "bert",
    config: Mapping[str, Any] | None = None,
    lowercase: bool = False,
    more_words: Iterable[str] = (),
    **tokenizer_settings: Any,
) -> None:
    """Use transformers to write a small model and the model's tokenizer."""
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS, *more_words])}
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": D_MODEL,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": LONGEST,
    }
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **(sizes | dict(config or {}))))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        **tokenizer_settings,
    ).save_pretrained(folder)


def write_model(
    folder: Path,
    modules: Iterable[tuple[str, Mapping[str, Any]]] = (("Pooling", {"pooling_mode": "mean"}),),
    *,
    settings: Mapping[str, Any] | None = None,
    transformer: Mapping[str, Any] | None = None,
    version: int = 6,
    transformer_folder: str = "",
    encoder: Mapping[str, Any] | None = None,
) -> Path:
    """Write a directory in the format of sentence-transformers, and return the directory.

    Args:
        folder: The new folder.
        modules: The class and the config.json of each module after the Transformer. The weights are random.
        settings: The content of config_sentence_transformers.json.
        transformer: The content of sentence_bert_config.json.
        version: The major version of sentence-transformers, 5 or 6. It determines the names of the module classes.
        transformer_folder: The encoder's folder inside the directory.
        encoder: Arguments for `write_encoder`.
    """
    within = folder / transformer_folder
    within.mkdir(parents=True, exist_ok=True)
    write_encoder(within, **(encoder or {}))
    first = "sentence_transformers.models.Transformer"
    if version == 6:
        first = "sentence_transformers.base.modules.transformer.Transformer"
    listed = [{"idx": 0, "name": "0", "path": transformer_folder, "type": first}]
    for i, (kind, config) in enumerate(modules, 1):
        own = f"{i}_{kind}"
        shutil.rmtree(folder / own, ignore_errors=True)
        (folder / own).mkdir()
        if kind == "Pooling":
            config = {"embedding_dimension" if version == 6 else "word_embedding_dimension": D_MODEL, **config}
        (folder / own / "config.json").write_text(json.dumps(config))
        write_weights(folder / own, kind, config, seed=i)
        listed.append({"idx": i, "name": str(i), "path": own, "type": MODULES[version].format(kind)})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {}, **(settings or {})}))
    (within / "sentence_bert_config.json").write_text(json.dumps(transformer or {}))
    return folder


def write_weights(folder: Path, kind: str, config: Mapping[str, Any], seed: int) -> None:
    """Write the weights of a Dense or a LayerNorm module."""
    torch.manual_seed(seed)
    if kind == "Dense":
        linear = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
        weights = {f"linear.{name}": weight for name, weight in linear.state_dict().items()}
        if config.get("use_residual") and config["in_features"] != config["out_features"]:
            weights["residual.weight"] = torch.randn(config["out_features"], config["in_features"])
        torch.save(weights, folder / "pytorch_model.bin")
    elif kind == "LayerNorm":
        weights = {"norm.weight": torch.randn(config["dimension"]), "norm.bias": torch.randn(config["dimension"])}
        torch.save(weights, folder / "pytorch_model.bin")
