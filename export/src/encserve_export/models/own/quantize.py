"""Makes the graph of our own encoder compute in 8 bits; see `onnx_graph.int8`."""

from typing import Any

import onnx
import torch
from torch import Tensor, nn

from encserve_export.models.own.encoder import Encoder
from encserve_export.onnx_graph.int8 import Layer, Quantizer, plan_layer, replace_nodes

# Neither GELU nor its approximation by tanh is anywhere below -0.17005, nor SiLU below -0.27847.
_LEAST_OF = {"relu": 0.0, "gelu": -0.1701, "gelu_tanh": -0.1701, "silu": -0.2785}
# For these layers; the other two of a block are no better for it.
_SMOOTHED = (".attention.qkv", ".feed_forward.inner")
_CALIBRATION_BATCH = (32, 64)  # sequences, tokens


def quantize(model: onnx.ModelProto, encoder: Encoder) -> None:
    """Changes a graph that was traced from the encoder, with its weights in it, in place."""
    quantizer = Quantizer(model, plan_layers(encoder))
    nodes = [made for node in model.graph.node for made in quantizer.replace(node)]
    replace_nodes(model, nodes)


def plan_layers(encoder: Encoder) -> dict[str, Layer]:
    """How each linear layer is to be rounded, by its module's name.

    Decided by random inputs, always the same: they need no tokenizer, and serve as well as text.
    """
    layers: dict[str, Layer] = {}
    least = None if encoder.config.gated else _LEAST_OF[encoder.config.activation]

    def watch(name: str) -> Any:
        def hook(module: nn.Linear, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            layers[name] = plan_layer(
                module.weight.numpy(),
                inputs[0].numpy(),
                smooth=name.endswith(_SMOOTHED),
                least=least if name.endswith(".feed_forward.outer") else None,
            )

        return hook

    linear = ((name, module) for name, module in encoder.named_modules() if isinstance(module, nn.Linear))
    hooks = [module.register_forward_hook(watch(name)) for name, module in linear]
    config, random = encoder.config, torch.Generator().manual_seed(0)
    shape = (_CALIBRATION_BATCH[0], min(_CALIBRATION_BATCH[1], config.max_sequence_tokens))
    inputs = (
        torch.randn((*shape, config.d_model), generator=random)  # (batch, seq, d_model)
        if config.input == "embeddings"
        else torch.randint(config.vocab_size, shape, generator=random)  # (batch, seq)
    )
    with torch.inference_mode():
        encoder(inputs, torch.ones(shape, dtype=torch.int64))
    for hook in hooks:
        hook.remove()
    return layers
