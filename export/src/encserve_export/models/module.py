"""Any PyTorch module as an encoder: run, checked for control flow that no graph has, and written as ONNX by PyTorch."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

import onnx
import torch
from torch import Tensor, nn

from encserve_export.ground import names
from encserve_export.ground.errors import UnsupportedModelError, first_line, uncoloured
from encserve_export.onnx_graph import traced

# In the order in which they are tried: the first is several times as fast, the second takes masks that the first does
# not.
Exporter = Literal["tracing", "dynamo"]
EXPORTERS: tuple[Exporter, ...] = get_args(Exporter)
_AXES = {0: "batch", 1: "seq"}
# Where in the module's code torch.export stopped.
_PLACE = re.compile(r"The following call raised this error:\s+File (?P<place>.*?), in .*\n\s*(?P<code>.*)")


def example(draw: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """A batch to write a graph with: sizes that are not 1, which would be taken for a constant, and a mask that hides.

    Args:
        draw: Makes the inputs of so many tokens: (tokens) or (tokens, width).

    Returns:
        The inputs, (batch, seq) or (batch, seq, width), and the mask, int64 (batch, seq).
    """
    inputs = torch.stack(draw(14).chunk(2))  # (batch, seq) or (batch, seq, width)
    mask = torch.ones(inputs.shape[:2], dtype=torch.int64)  # (batch, seq)
    mask[1, 4:] = 0
    return inputs, mask


def write_module(
    module: nn.Module, batch: tuple[Tensor, Tensor], input_name: str, exporter: Exporter, path: Path, description: str
) -> None:
    """Writes a module as ONNX, with the mask and the rows by the names of a bundle.

    Args:
        module: Inputs and mask, int64 (batch, seq) -> rows, float32 (batch, seq, d_model).
        batch: What `example` gave.
        input_name: The name of the inputs.
        exporter: Which of PyTorch's exporters.
        path: The file.
        description: What the module is called, for errors.

    Raises:
        UnsupportedModelError: This exporter does not take it.
    """
    inputs = [input_name, names.ATTENTION_MASK]
    try:
        # What is told here is of the model's code and of the exporter's future, and its whole graph where it fails; the
        # gate judges the result.
        with warnings.catch_warnings(), _silence(), torch.no_grad():
            warnings.simplefilter("ignore")
            if exporter == "tracing":
                axes = dict.fromkeys((*inputs, names.OUTPUT), _AXES)
                graph = traced.trace(module, batch, path, inputs=inputs, outputs=[names.OUTPUT], dynamic_axes=axes)
                with (path.parent / names.DATA_FILE).open("wb") as data:
                    traced.take_weights(graph, traced.fold_weights(graph, module), data)
                onnx.save_model(graph, path)
            else:
                dynamic = dict.fromkeys(_AXES, torch.export.Dim.DYNAMIC)
                torch.onnx.export(
                    module,
                    batch,
                    str(path),
                    input_names=inputs,
                    output_names=[names.OUTPUT],
                    opset_version=names.OPSET,
                    dynamo=True,
                    dynamic_shapes=(dynamic, dynamic),
                    verbose=False,
                )
    except Exception as error:  # whatever a model of somebody else's raises
        raise UnsupportedModelError(
            f"PyTorch cannot write {description} as ONNX ({exporter}): {first_line(error)}"
        ) from error


def refuse_control_flow(module: nn.Module, batch: tuple[Tensor, Tensor], description: str) -> None:
    """Refuses a module whose code decides by the numbers in its inputs: a trace would keep one of its ways.

    Args:
        module: As of `write_module`.
        batch: What `example` gave.
        description: What the module is called, for errors.

    Raises:
        UnsupportedModelError: torch.export does not take it; the text has its reason.
    """
    axes = dict.fromkeys(_AXES, torch.export.Dim.AUTO)
    try:
        with warnings.catch_warnings(), _silence(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.export.export(module, batch, dynamic_shapes=(axes, axes), strict=False)
    except Exception as error:  # whatever a model of somebody else's raises
        found = _PLACE.search(uncoloured(error))
        place = f", at {found['place']}: {found['code']}" if found else ""
        raise UnsupportedModelError(
            f"PyTorch cannot export {description} as one graph: {first_line(error)}{place}. Write what depends on the "
            "numbers in tensors with tensor operations, such as torch.where"
        ) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Nothing is printed or logged to stderr meanwhile."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
