"""Writes directories of sparse encoders, in the formats of sentence-transformers and of BGE-M3.

Most models are small and have random weights.
"""

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import minilm_directory
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(995)]
D_MODEL, LONGEST, ACTIVE = 24, 64, 200
PROMPTS = {"query": "w1 w2 ", "document": "w3 "}


def sparse_text(n_words: int) -> str:
    """Return a random text of `n_words` words. Some words are not in the vocabulary."""
    picked = torch.randint(0, len(WORDS) + 20, (n_words,), generator=torch.Generator().manual_seed(n_words))
    return " ".join(f"w{i}" for i in picked.tolist())


def _tokenizer(longest: int = LONGEST) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, eos_token="[SEP]", **names)


def write_language_model(folder: Path, kind: str = "bert") -> Path:
    """Write a masked language model with transformers.

    `kind` is "bert", "roberta", "distilbert", or the beginning of a class name in transformers. The bias of the output
    layer is set so that about `ACTIVE` words get a weight above 0 for each text.
    """
    import transformers

    torch.manual_seed(0)
    vocab_size = len(SPECIAL) + len(WORDS)
    if kind == "distilbert":
        config: Any = transformers.DistilBertConfig(
            vocab_size=vocab_size, dim=D_MODEL, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=LONGEST
        )
    else:
        make = {"bert": "Bert", "roberta": "Roberta"}.get(kind, kind)
        config = getattr(transformers, f"{make}Config")(
            vocab_size=vocab_size,
            hidden_size=D_MODEL,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LONGEST + 2,
            pad_token_id=0,
        )
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=float("norm" in name.lower() and name.endswith("weight")), std=0.2)
    tokenizer = _tokenizer()
    inputs = tokenizer(sparse_text(20), return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        largest = model(**inputs).logits[0].amax(dim=0)  # (vocab_size,)
        model.get_output_embeddings().bias -= largest.sort(descending=True).values[ACTIVE]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_splade(
    folder: Path, kind: str = "bert", pooling: str = "max", activation: str = "relu", **options: Any
) -> Path:
    """Write a SparseEncoder with one model for queries and documents. Queries and documents have different prompts."""
    from sentence_transformers import SparseEncoder

    modules = _splade(folder, kind, pooling, activation)
    SparseEncoder(modules=modules, prompts=PROMPTS, **options).save(str(folder))
    return folder


def write_static_queries(folder: Path, *, documents: bool = False) -> Path:
    """Write a SparseEncoder that reads the weights of a query's words from a table.

    If `documents` is true, the table is for documents, not for queries.
    """
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    modules = _splade(folder, "bert", "max", "log1p_relu")
    weights = torch.rand(len(SPECIAL) + len(WORDS), generator=torch.Generator().manual_seed(1))
    static = [SparseStaticEmbedding(_tokenizer(40), weights)]
    both = (modules, static) if documents else (static, modules)
    SparseEncoder(modules=[Router.for_query_document(*both)], prompts=PROMPTS).save(str(folder))
    return folder


def _splade(folder: Path, kind: str, pooling: str, activation: str) -> list[Any]:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    model = write_language_model(folder.with_name(f"{folder.name}-language-model"), kind)
    return [Transformer(str(model), transformer_task="fill-mask"), SpladePooling(pooling, activation)]


def write_bge_m3(folder: Path, longest: int = 640) -> Path:
    """Write an XLM-R in the format of BGE-M3.

    modules.json describes the dense vectors. One more file has the head for MaxSim vectors, and another file has the
    head for sparse weights.
    """
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=D_MODEL,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=longest + 1,
        pad_token_id=0,
        type_vocab_size=1,
    )
    model = transformers.XLMRobertaModel(config)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    bare = folder.with_name(f"{folder.name}-encoder")
    model.save_pretrained(bare)
    _tokenizer(longest).save_pretrained(bare)
    modules = [Transformer(str(bare)), Pooling(D_MODEL, pooling_mode="cls"), Normalize()]
    SentenceTransformer(modules=modules).save(str(folder))
    torch.save(nn.Linear(D_MODEL, D_MODEL).state_dict(), folder / "colbert_linear.pt")
    torch.save(nn.Linear(D_MODEL, 1).state_dict(), folder / "sparse_linear.pt")
    return folder


def change(path: Path, **changed: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def write_trained_splade(folder: Path, active: int = 2000) -> Path:
    """Write a SPLADE model: the real trained MiniLM, and a head with random weights.

    The bias of the head is set so that about `active` words get a weight above 0 for each text.
    """
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    torch.manual_seed(1)
    model = transformers.AutoModelForMaskedLM.from_pretrained(minilm_directory(), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_directory())
    with torch.no_grad():
        largest = model(**tokenizer("The cat sleeps.", return_tensors="pt")).logits[0].amax(dim=0)  # (vocab_size,)
        model.get_output_embeddings().bias -= largest.sort(descending=True).values[active]
    bare = folder.with_name(f"{folder.name}-language-model")
    model.save_pretrained(bare)
    tokenizer.save_pretrained(bare)
    SparseEncoder(modules=[Transformer(str(bare), transformer_task="fill-mask"), SpladePooling()]).save(str(folder))
    return folder
