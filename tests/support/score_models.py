"""Provides a table of tiny cross-encoders and classifiers with random weights, and the pairs of texts for comparisons.

An entry is a directory in the format of transformers, or in the format of a CrossEncoder of sentence-transformers,
version 5 or 6.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from checkpoints import minilm_directory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

Array = npt.NDArray[np.float32]
Pair = tuple[str, str]
Layout = Literal["plain", "5", "6"]
D_MODEL, LONGEST = 32, 64
LONGEST_BYTES = 256  # the limit of decoders: each byte is a token, and the template alone has 100 bytes

_SENTENCE = "The cat sleeps on the warm windowsill while it rains. "
_QUERIES = ("", "how warm is the sill?", "Grüße aus Köln, 東京 и Москва 🌍", 20 * _SENTENCE)
_DOCUMENTS = (
    "",
    "Cats",
    _SENTENCE,
    "Stock markets fell sharply on Monday.",
    "  Ｆｕｌｌ ｗｉｄｔｈ,\tﬁnd the oﬀer\n\nzero\u200bwidth and\x07control ",
    f"A WORD of many letters: {'x' * 120}",
    "[SEP] </s> <|im_end|> [PAD] <|endoftext|> [CLS] as text",
    "नमस्ते दुनिया, שלום עולם, naïve café",
    40 * _SENTENCE,
)
# 38 pairs: unicode, empty texts, very long texts and special tokens.
PAIRS: tuple[Pair, ...] = (
    *((query, document) for query in _QUERIES for document in _DOCUMENTS),
    ("[SEP] [CLS]", "[SEP]"),
    ("a </s> b", "<|endoftext|>"),
)
TEXTS = (*filter(None, _DOCUMENTS), 20 * _SENTENCE)

# A chat template with the roles "query" and "document". Rerankers that are language models have such templates.
PAIR_TEMPLATE = (
    "<|im_start|>system\n"
    "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Judge.') }}"
    "<|im_end|>\n<|im_start|>user\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|im_end|>\n<|im_start|>assistant\n"
)


def _bytes_tokenizer(kind: str) -> Any:
    """Return a tokenizer with a token for each byte. The kind "roberta" adds special tokens around texts."""
    from transformers import PreTrainedTokenizerFast

    special = (
        ["<s>", "<pad>", "</s>", "<unk>"] if kind == "roberta" else ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    words = [*special, *alphabet, *("".join(it) for it in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "roberta":
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
        names |= {"pad_token": "<pad>", "unk_token": "<unk>"}
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        names = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LONGEST if kind == "roberta" else LONGEST_BYTES,
        model_input_names=["input_ids", "attention_mask"],
        **names,
        **({} if kind == "roberta" else {"additional_special_tokens": ["<|im_start|>"]}),
    )


def _bert_tokenizer() -> Any:
    """Return the tokenizer of all-MiniLM-L6-v2. This tokenizer also returns token types."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm_directory(), model_max_length=LONGEST)


def write_scores(
    folder: Path,
    model_type: str = "bert",
    *,
    labels: int = 1,
    layout: Layout = "plain",
    tokenizer: str = "bert",
    language_model: bool = False,
    template: str = "",
    settings: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write the directory of a cross-encoder or a classifier, and return the directory.

    Args:
        folder: The new folder.
        model_type: The name of the architecture in transformers.
        labels: The number of labels.
        layout: "plain" for the format of transformers. "5" or "6" for the format of this version of
            sentence-transformers.
        tokenizer: "bert", "roberta" or "decoder".
        language_model: Whether the model is a language model. Its logits of the tokens "yes" and "no" give the score.
        template: The chat template.
        settings: Fields of config_sentence_transformers.json, for layout "6".
        **config: Fields of config.json.
    """
    import transformers
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    made = _bert_tokenizer() if tokenizer == "bert" else _bytes_tokenizer(tokenizer)
    if template:
        made.chat_template = template
    sizes = {
        "vocab_size": len(made),
        "hidden_size": D_MODEL,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": LONGEST + 2,
        "pad_token_id": made.pad_token_id,
        "num_labels": labels,
    }
    made_config = transformers.AutoConfig.for_model(model_type, **(sizes | config))
    auto: Any = transformers.AutoModelForSequenceClassification
    model = (transformers.AutoModelForCausalLM if language_model else auto).from_config(made_config).eval()
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=float("norm" in name.lower() and name.endswith("weight")), std=0.2)
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder if layout == "plain" else folder.with_name(f"{folder.name}-plain")
    model.save_pretrained(plain)
    made.save_pretrained(plain)
    if layout == "5":
        change(plain / "config.json", sentence_transformers={
            "activation_fn": "torch.nn.modules.linear.Identity", "version": "5.1.0",
        })  # fmt: skip
        shutil.copytree(plain, folder, dirs_exist_ok=True)
    elif layout == "6":
        CrossEncoder(str(plain), device="cpu").save_pretrained(str(folder))
        change(folder / "config_sentence_transformers.json", **(settings or {}))
    return folder


def change(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@dataclasses.dataclass(frozen=True)
class ScoreModel:
    """One entry of the table.

    Attributes:
        write: A function that writes the directory.
        pairs_only: Whether the model refuses single texts.
        prompts: The names of the prompts in the directory.
    """

    write: Callable[[Path], Path]
    pairs_only: bool = False
    prompts: tuple[str, ...] = ()


def _model(*, pairs_only: bool = False, prompts: tuple[str, ...] = (), **options: Any) -> ScoreModel:
    return ScoreModel(functools.partial(write_scores, **options), pairs_only, prompts)


_ROBERTA: dict[str, Any] = {"tokenizer": "roberta"}
_DECODER: dict[str, Any] = {
    "tokenizer": "decoder",
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LONGEST_BYTES,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_PROMPTS: dict[str, Any] = {"prompts": {"web": "Find the answer", "other": "Other "}, "default_prompt_name": "web"}
MODELS = {
    "bert": _model(model_type="bert"),
    "bert-6": _model(model_type="bert", layout="6", settings={"prompts": {"q": "query: "}}, prompts=("q",)),
    "bert-5": _model(model_type="bert", layout="5"),
    "roberta": _model(model_type="roberta", type_vocab_size=1, **_ROBERTA),
    "xlm-roberta": _model(model_type="xlm-roberta", layout="6", type_vocab_size=1, **_ROBERTA),
    "electra": _model(model_type="electra", embedding_size=16),
    "deberta": _model(
        model_type="deberta-v2", relative_attention=True, position_buckets=16, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], layout="6",
    ),
    "modernbert": _model(
        model_type="modernbert", cls_token_id=101, sep_token_id=102, local_attention=8, classifier_pooling="mean",
    ),
    "gte": _model(model_type="gte", layout="6", type_vocab_size=2),
    "three-labels": _model(model_type="bert", labels=3),
    "many-labels": _model(
        model_type="distilbert", labels=7, dim=D_MODEL, n_layers=2, n_heads=2, hidden_dim=48,
        problem_type="multi_label_classification",
    ),
    "regression": _model(model_type="bert", problem_type="regression"),
    "albert-labels": _model(model_type="albert", labels=2, embedding_size=16),
    "qwen3": _model(model_type="qwen3", layout="6", **_DECODER),
    "qwen3-yes-no": _model(
        model_type="qwen3", layout="6", language_model=True, template=PAIR_TEMPLATE, settings=_PROMPTS,
        pairs_only=True, prompts=("web", "other"), **_DECODER,
    ),
    "gemma3": _model(model_type="gemma3_text", sliding_window=8, **_DECODER),
}  # fmt: skip


def library_scores(directory: Path, inputs: list[Any], prompt_name: str | None = None, *, raw: bool = True) -> Array:
    """Return the scores of sentence-transformers, in the shape (inputs, labels). Each pair or text runs alone.

    `prompt_name` is "" for no prompt, and None for the default prompt. If `raw` is true, the scores are logits.
    """
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(directory), device="cpu", model_kwargs={"dtype": torch.float32})
    options: dict[str, Any] = {"activation_fn": nn.Identity()} if raw else {}
    options |= {"prompt_name": prompt_name} if prompt_name else {"prompt": prompt_name}
    # `predict` reads a list of texts as a pair, even if the list has only one text.
    given = [it if isinstance(it, str) else [it] for it in inputs]
    rows = [model.predict(it, show_progress_bar=False, **options) for it in given]
    return np.array([np.ravel(it) for it in rows], np.float32)


def worst_error(got: Array, want: Array) -> float:
    """Return the largest |got - want| / max(1, |want|)."""
    return float((np.abs(got.astype(np.float64) - want) / np.maximum(1, np.abs(want))).max())
