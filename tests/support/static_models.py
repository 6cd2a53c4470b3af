"""Writes directories of static embeddings, in the formats of sentence-transformers and model2vec.

The tables are small and random.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WIDTH = 12


def _tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are single letters and digits.

    The tokenizer adds special tokens around a text. Static embeddings must leave out these special tokens.
    """
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[CLS]", "[SEP]", "[MASK]", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def write_static(folder: Path, *, dense: bool = False) -> Path:
    """Write a StaticEmbedding. If `dense` is true, a Dense follows the StaticEmbedding."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    modules: list[nn.Module] = [StaticEmbedding(_tokenizer(), embedding_dim=WIDTH)]
    modules += [Dense(WIDTH, 7)] if dense else []
    model = SentenceTransformer(modules=[*modules, Normalize()], prompts={"query": "find "}, device="cpu")
    model.save_pretrained(str(folder))
    return folder


def write_model2vec(folder: Path) -> Path:
    """Write a directory in the format of model2vec.

    The directory has a small float16 table. Each token id has the index of a table row, and a weight.
    """
    torch.manual_seed(1)
    folder.mkdir()
    size = 4 + len(LETTERS)
    tensors = {
        "embeddings": torch.randn(40, WIDTH).half(),
        "mapping": torch.randint(0, 40, (size,)),
        "weights": torch.rand(size, dtype=torch.float64),
    }
    save_file(tensors, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    kinds = [(".", "StaticEmbedding"), ("1_Normalize", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(kinds)
            ]
        )
    )
    return folder


def static_text(n_tokens: int) -> str:
    """Return a text of `n_tokens` tokens."""
    picked = torch.randint(0, len(LETTERS), (n_tokens,), generator=torch.Generator().manual_seed(n_tokens))
    return "".join(LETTERS[i] for i in picked.tolist())
