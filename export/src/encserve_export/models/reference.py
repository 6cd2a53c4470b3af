"""Defines the reference, a PyTorch model from any source. Exported graphs must reproduce the outputs of this model."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from encserve_export.core import names
from encserve_export.core.arrays import Input, Mask, Rows, half_and_half
from encserve_export.core.errors import UnsupportedModelError, first_line
from encserve_proto.bundle.v1 import manifest_pb2

AttentionContext = Callable[[], contextlib.AbstractContextManager[object]]
# For sequences with more tokens than this limit, attention is computed without a tensor of attention weights, (heads,
# seq, seq). With 16 heads in float32, this tensor takes 64 MiB for 1,024 tokens and 4 GiB for 8,192 tokens.
LONGEST_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """The module that computes a model's hidden states and attention weights.

    Attributes:
        module: Takes the inputs of `Reference.module`. Returns n_layers + 1 hidden states, (batch, seq, d_model) each,
            and then n_layers tensors of attention weights, (batch, heads, seq, seq). The last hidden states equal the
            output of `Reference.module`.
        n_layers: The number of blocks.
        position_table: The name of the position table, (rows, d_model), among the module's parameters and buffers.
            Empty for a model without a table.
        first_position: The index of the position table's row for the first token.
    """

    module: nn.Module
    n_layers: int
    position_table: str = ""
    first_position: int = 0

    @property
    def positions(self) -> Tensor:
        """The whole position table, (rows, d_model). The model must have such a table."""
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return tensors[self.position_table].detach()

    @property
    def hidden_state_names(self) -> tuple[str, ...]:
        """The output names of the hidden states in a graph."""
        return (*(f"hidden_state.{i}" for i in range(self.n_layers)), names.OUTPUT)

    @property
    def attention_weights_names(self) -> tuple[str, ...]:
        """The output names of the attention weights in a graph."""
        return tuple(f"attention_weights.{i}" for i in range(self.n_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A PyTorch model in eval mode and in float32.

    Attributes:
        module: Maps inputs and a mask to the last hidden states, float32 (batch, seq, d_model). The mask is int64
            (batch, seq): 1 for a token, 0 for padding. A token with a mask of 2 gets a hidden state, but no other token
            attends to this token.
        has_token_types: Whether the module has a third argument: token types, int64 (batch, seq), 0 or 1. In
            comparisons, half of the tokens have type 1; see `half_and_half`.
        description: The name of the model in reports and errors.
        vocab_size: The number of token ids; 0 for a model that takes vectors.
        width: The size of an input vector; 0 for a model that takes token ids.
        positions: The longest sequence that the model has positions for, in tokens; None without a limit.
        pad_token_id: The token id that pads a batch.
        unused_parts: The parts of the checkpoint that do not affect the hidden states, such as a pooler.
        shape: The known fields of the architecture, such as n_layers, for the manifest.
        parameters: The number of parameters by part, for the manifest. If this mapping is empty, the manifest has only
            the total number.
        inspection: The module that returns hidden states and attention weights; None if the model cannot return them.
        long_attention: A function that returns a context manager. Inside this context, the module computes attention
            without a (seq, seq) tensor. None if the module has no such mode.
    """

    module: nn.Module
    description: str
    vocab_size: int
    width: int = 0
    positions: int | None = None
    pad_token_id: int = 0
    unused_parts: tuple[str, ...] = ()
    shape: manifest_pb2.EncoderShape = dataclasses.field(default_factory=manifest_pb2.EncoderShape)
    parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    inspection: Inspection | None = None
    long_attention: AttentionContext | None = None
    has_token_types: bool = False

    @property
    def input_names(self) -> list[str]:
        """The names of the graph's inputs, in the order of the module's arguments."""
        types = [names.TOKEN_TYPE_IDS] if self.has_token_types else []
        return [self.input_name, names.ATTENTION_MASK, *types]

    @property
    def input_name(self) -> str:
        """The name of the graph's first input."""
        return names.EMBEDDINGS if self.width else names.INPUT_IDS

    def __call__(self, inputs: Input, mask: Mask) -> Rows:
        """Run one batch in PyTorch.

        Args:
            inputs: Token ids, int64 (batch, seq), or vectors, (batch, seq, width).
            mask: int64 (batch, seq).

        Returns:
            The last hidden states, (batch, seq, d_model), in the dtype of the module's parameters.

        Raises:
            UnsupportedModelError: The module fails for this batch.
        """
        is_long = inputs.shape[1] > LONGEST_AT_ONCE
        context = self.long_attention() if is_long and self.long_attention else contextlib.nullcontext()
        with context:
            rows: Rows = self._run(self.module, inputs, mask).numpy()
        return rows

    def inspect(self, inputs: Input, mask: Mask) -> list[Rows]:
        """Run one batch and return the outputs of `Inspection.module`, rounded to float32."""
        assert self.inspection is not None  # noqa: S101
        return [output.float().numpy() for output in self._run(self.inspection.module, inputs, mask)]

    def example(self) -> tuple[Tensor, ...]:
        """Return a batch for tracing. One of the two sequences has padding.

        Both batch and seq are larger than 1, because PyTorch would treat a size of 1 as a constant.

        Returns:
            Two sequences of 7 tokens, (2, 7) or (2, 7, width), and their mask, int64 (2, 7). If the model has token
            types, the tuple also contains token types, int64 (2, 7).
        """
        if self.width:
            inputs = torch.randn((2, 7, self.width), generator=torch.Generator().manual_seed(0))
        else:  # the first token has the largest id
            inputs = ((self.vocab_size - 1 - torch.arange(14)) % self.vocab_size).reshape(2, 7)
        mask = torch.ones((2, 7), dtype=torch.int64)
        mask[1, 4:] = 0
        return inputs, mask, *self._types(mask.numpy())

    def _types(self, mask: Mask) -> tuple[Tensor, ...]:
        return (torch.from_numpy(half_and_half(mask)),) if self.has_token_types else ()

    def _run(self, module: nn.Module, inputs: Input, mask: Mask) -> Tensor:
        batch = torch.from_numpy(inputs)
        if batch.is_floating_point():  # in_float64 may have converted the module
            batch = batch.to(next((tensor.dtype for tensor in module.parameters()), batch.dtype))
        try:
            with torch.inference_mode():
                output: Tensor = module(batch, torch.from_numpy(mask), *self._types(mask))
        except Exception as error:  # the module's code may raise any exception
            raise UnsupportedModelError(
                f"{self.description} does not run in PyTorch with inputs of shape {tuple(inputs.shape)} and their "
                f"mask: {first_line(error)}"
            ) from error
        return output
