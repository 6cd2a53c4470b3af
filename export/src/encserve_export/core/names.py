"""Defines the names of a bundle's ONNX files, and the names of their inputs and outputs."""

# The version of ONNX's operators. 20 is the first version with the operator Gelu, and the newest version that PyTorch's
# tracing exporter writes.
OPSET = 20
FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
INSPECT_FILE = "inspect.onnx"
TOKEN_TYPE_IDS = "token_type_ids"  # noqa: S105 - the name of an input
INPUT_IDS, EMBEDDINGS, ATTENTION_MASK, OUTPUT = "input_ids", "inputs_embeds", "attention_mask", "last_hidden_state"
POSITIONS = "positions"
