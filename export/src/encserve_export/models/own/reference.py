"""Wraps our own encoder as a `Reference`, the PyTorch model that an exported graph must reproduce."""

import dataclasses

from torch import Tensor, nn

from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder
from encserve_export.models.reference import Inspection, Reference
from encserve_proto.bundle.v1 import manifest_pb2


class _Inspected(nn.Module):
    """Returns all hidden states of an encoder, then all attention weights.

    This module and the encoder have the same parameter names.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.embeddings = encoder.embeddings
        self.blocks = encoder.blocks
        self.final_norm = encoder.final_norm
        self._inspect = encoder.inspect

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs that `models.reference.Inspection` describes."""
        inspection = self._inspect(inputs, attention_mask)
        return (*inspection.hidden_states, *inspection.attention_weights)


def encoder_reference(encoder: Encoder) -> Reference:
    """Return a `Reference` that runs this encoder."""
    config = encoder.config
    is_table = config.position in ("sinusoidal", "learned")
    return Reference(
        module=encoder,
        description="the encoder",
        vocab_size=config.vocab_size,
        width=config.d_model if config.input == "embeddings" else 0,
        positions=config.max_sequence_tokens,
        pad_token_id=config.pad_token_id,
        shape=_shape(config),
        parameters=count_parameters(encoder),
        inspection=Inspection(
            module=_Inspected(encoder).eval(),
            n_layers=config.n_layers,
            position_table="embeddings.positions" if is_table else "",
            first_position=config.position_offset,
        ),
    )


def count_parameters(encoder: Encoder) -> dict[str, int]:
    """Count the parameters of each part: embedding, attention, feed_forward and norm."""
    counts = dict.fromkeys(("embedding", "attention", "feed_forward", "norm"), 0)
    for name, parameter in encoder.named_parameters():
        counts[_part(name)] += parameter.numel()
    return counts


def _part(name: str) -> str:
    """Return the part that a parameter belongs to: "blocks.0.attention_norm.weight" -> "norm"."""
    modules = name.split(".")
    if any(module.endswith("norm") for module in modules):
        return "norm"
    return "embedding" if modules[0] == "embeddings" else modules[2]


def _shape(config: EncoderConfig) -> manifest_pb2.EncoderShape:
    values = dataclasses.asdict(config)
    return manifest_pb2.EncoderShape(
        **{field.name: values[field.name] for field in manifest_pb2.EncoderShape.DESCRIPTOR.fields}
    )
