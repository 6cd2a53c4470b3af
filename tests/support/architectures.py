"""Small models of common encoder architectures with random weights, created with transformers."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

VOCAB_SIZE = 200
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 66,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {**_SIZES, **_TOKENS, "num_key_value_heads": 2, "head_dim": 16}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The configuration of one small model.

    Attributes:
        name: The usual name of the architecture.
        model_type: The name of the architecture in transformers.
        settings: Fields of the configuration in transformers.
    """

    name: str
    model_type: str
    settings: dict[str, Any]

    @property
    def folder(self) -> str:
        """The name of the model's directory and of the served model: `name` with hyphens instead of spaces."""
        return self.name.replace(" ", "-")


ARCHITECTURES = [
    Architecture("BERT", "bert", _SIZES),
    Architecture("RoBERTa", "roberta", _SIZES),
    Architecture("XLM-R", "xlm-roberta", _SIZES),
    Architecture("CamemBERT", "camembert", _SIZES),
    Architecture("DistilBERT", "distilbert", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128,
                                              "vocab_size": VOCAB_SIZE, "max_position_embeddings": 66}),
    Architecture("MPNet", "mpnet", _SIZES),
    Architecture("ModernBERT", "modernbert", {**_SIZES, **_TOKENS, "cls_token_id": 1, "sep_token_id": 2,
                                              "num_hidden_layers": 4, "local_attention": 8}),
    Architecture("ALBERT", "albert", {**_SIZES, "embedding_size": 32}),
    Architecture("ELECTRA", "electra", {**_SIZES, "embedding_size": 32}),
    Architecture("DeBERTa-v2", "deberta-v2", {**_SIZES, "relative_attention": True, "position_buckets": 32,
                                              "norm_rel_ebd": "layer_norm", "share_att_key": True,
                                              "pos_att_type": ["p2c", "c2p"]}),
    Architecture("MobileBERT", "mobilebert", {**_SIZES, "embedding_size": 32, "intra_bottleneck_size": 32}),
    Architecture("RemBERT", "rembert", {**_SIZES, "input_embedding_size": 32, "output_embedding_size": 64}),
    Architecture("RoFormer", "roformer", {**_SIZES, "embedding_size": 64}),
    Architecture("NomicBERT", "nomic_bert", _SIZES),
    Architecture("GTE", "gte", _SIZES),
    Architecture("Jina v3", "jina_embeddings_v3", _SIZES),
    Architecture("EuroBERT", "eurobert", {**_SIZES, **_TOKENS, "num_key_value_heads": 2}),
    Architecture("Ernie", "ernie", _SIZES),
    Architecture("Gemma 3", "gemma3_text", {**_DECODER, "sliding_window": 8}),
    Architecture("EmbeddingGemma", "gemma3_text", {**_DECODER, "sliding_window": 8,
                                                   "use_bidirectional_attention": True}),
    Architecture("Qwen3", "qwen3", _DECODER),
    Architecture("T5", "t5", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
                              "vocab_size": VOCAB_SIZE}),
    Architecture("CLIP", "clip_text_model", {**_SIZES, **_TOKENS}),
]  # fmt: skip


def build(architecture: Architecture) -> Any:
    """Build a model with random weights, in float32 and evaluation mode. A T5 model includes the decoder."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(architecture.model_type, **architecture.settings)
    return transformers.AutoModel.from_config(config, attn_implementation="eager").eval()


def save(architecture: Architecture, folder: Path) -> Path:
    """Build a model, save it in a new directory below `folder`, and return the directory."""
    directory = folder / architecture.folder
    build(architecture).save_pretrained(directory)
    return directory


def change_config(directory: Path, **settings: Any) -> None:
    """Set fields in the config.json of a model's directory."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def add_onnx_file(directory: Path, bundle: Path) -> None:
    """Copy the graph and the weights of a bundle into the folder onnx/ of a model's directory."""
    (directory / "onnx").mkdir()
    for file in bundle.glob("model.onnx*"):
        shutil.copy(file, directory / "onnx")


def rows_of(model: Any, ids: list[int]) -> npt.NDArray[np.float32]:
    """Compute the hidden states of one sequence with transformers. Return an array of shape (seq, d_model)."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    tokens = torch.tensor([ids])  # (1, seq)
    with torch.inference_mode():
        states = encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    rows: npt.NDArray[np.float32] = states[0].numpy()
    return rows
