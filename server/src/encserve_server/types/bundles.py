"""What a model bundle says of its model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np

from encserve_server.types.arrays import ModelInput, Numbers
from encserve_server.types.inspections import InspectKind
from encserve_server.types.requests import OutputKind, Task


@dataclass(frozen=True, slots=True)
class Graph:
    """A bundle's ONNX file and its interface.

    Attributes:
        path: The ONNX file.
        input_name: Its input of ids, int64 (batch, seq), or of vectors, float32 (batch, seq, d_model).
        takes_vectors: Whether that is vectors.
        attention_mask_name: Its input of 1 for a token and 0 for padding, int64 (batch, seq).
        output_name: Its output of rows, float32 (batch, seq, d_model).
        pad_token_id: What fills a short sequence; the mask hides it.
        d_model: The width of a row.
        precision: The type it computes in.
        token_type_ids_name: An input that is filled with zeros, int64 (batch, seq); empty where there is none.
        vocab_size: One more than the largest id; 0 where it takes vectors.
    """

    path: Path
    input_name: str
    takes_vectors: bool
    attention_mask_name: str
    output_name: str
    pad_token_id: int
    d_model: int
    precision: str
    token_type_ids_name: str = ""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class HeadGraph:
    """An ONNX file of what comes after the encoder, or after pooling, and its interface. All of it is float32.

    Attributes:
        path: The ONNX file.
        input_names: Its input of vectors, (…, input_width), and after it that of a mask, (…), where it has one.
        output_name: Its output, (batch, width).
        input_width: The numbers of a vector that goes in.
        width: The numbers of one that comes out.
    """

    path: Path
    input_names: tuple[str, ...]
    output_name: str
    input_width: int
    width: int


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """How a model was trained to make one vector of a sequence: what OutputKind.MODEL stands for.

    Attributes:
        kinds: The poolings, whose vectors are joined in this order.
        l2_normalize: Whether the vector is scaled to Euclidean length 1, before it is cut.
        width: Its numbers, before it is cut.
        head: What comes between; None for nothing.
        skips_prompt: Whether the tokens of a prompt are left out of pooling.
        dimensions: To how many numbers it is cut where nothing else is asked for; 0 for all.
    """

    kinds: tuple[OutputKind, ...]
    l2_normalize: bool
    width: int
    head: HeadGraph | None = None
    skips_prompt: bool = False
    dimensions: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it is one pooling over all tokens, and normalising at most."""
        return len(self.kinds) == 1 and self.head is None and not self.skips_prompt


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens behind the last one of a short text, which have vectors in MaxSim.

    Attributes:
        min_tokens: To how many tokens it is made longer.
        token_id: The token.
        attended: Whether other tokens see it.
    """

    min_tokens: int
    token_id: int
    attended: bool


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """Fewer vectors of many: see `outputs.token_pooling`.

    Attributes:
        factor: How many vectors become one on average, at least 1.
        protected_tokens: How many vectors at the beginning stay as they are.
        l2_normalize: Whether all vectors are scaled to Euclidean length 1 afterwards.
    """

    factor: float
    protected_tokens: int = 1
    l2_normalize: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class StaticSparse:
    """Sparse weights without a run of the model: for every token that occurs in a text its own.

    Attributes:
        tokenizer_file: A tokenizer of its own.
        weights: (width,) float32, the weight of each token.
        max_tokens: The longest text; 0 for any.
    """

    tokenizer_file: Path
    weights: Numbers
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How texts of one task are treated.

    Attributes:
        prompt_name: The prompt that is put before them; empty for none.
        max_tokens: The longest.
        expansion: What is put behind a short one.
        skipped_token_ids: Tokens that have no vector in MaxSim.
        kept_token_ids: The only ones that have; empty for all.
        token_pooling: What makes fewer vectors of many.
        static_sparse: What answers OutputKind.SPARSE in place of the model.
    """

    prompt_name: str
    max_tokens: int
    expansion: Expansion | None = None
    skipped_token_ids: tuple[int, ...] = ()
    kept_token_ids: tuple[int, ...] = ()
    token_pooling: TokenPooling | None = None
    static_sparse: StaticSparse | None = None


@dataclass(frozen=True, slots=True)
class MultiVector:
    """What makes of a token's row the vector that MaxSim compares.

    Attributes:
        head: Rows to vectors, each by itself.
        similarity: "maxsim" or "meanmaxsim".
        skips_first_token: Whether the first token has no vector.
    """

    head: HeadGraph
    similarity: str
    skips_first_token: bool


class SparsePooling(Enum):
    """How tokens become one sparse vector; the values are those of the protobuf enum of the same name."""

    MAX = 1
    SUM = 2
    OWN_ID = 3  # every token has one weight, under its own id; the largest where an id stands twice


@dataclass(frozen=True, slots=True)
class Sparse:
    """What makes of rows the weights over the vocabulary.

    Attributes:
        head: Rows and mask to weights, (batch, seq, d_model) to (batch, width); for SparsePooling.OWN_ID (tokens,
            d_model) to (tokens, 1).
        width: The numbers of a vector, zeros included.
        pooling: How it pools.
        skipped_token_ids: Tokens that have no weight, for SparsePooling.OWN_ID.
        max_active_dims: How many of the largest weights are kept; 0 for all.
    """

    head: HeadGraph
    width: int
    pooling: SparsePooling
    skipped_token_ids: tuple[int, ...]
    max_active_dims: int


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """What stands around every text.

    Attributes:
        before: Before a text that has no prompt.
        before_prompt: Before the prompt of a text.
        after_prompt: Between the prompt of a text and the text.
        after: Behind every text.
        after_tokens: How many tokens at the end stay where a text is cut.
    """

    before: str
    before_prompt: str
    after_prompt: str
    after: str
    after_tokens: int

    def before_text(self, prompt: str) -> str:
        """What stands before a text, its prompt included."""
        return self.before_prompt + prompt + self.after_prompt if prompt else self.before


@dataclass(frozen=True, slots=True)
class InspectGraph:
    """The ONNX file that also gives what happens inside a model.

    Attributes:
        graph: The file and its inputs; its output is the last hidden state.
        names: For each kind its outputs, one for each layer: attention weights (1, heads, seq, seq), hidden states
            (1, seq, d_model), positions (max_sequence_tokens, d_model). A kind that the model does not have is left
            out.
        files: The SHA-256 of each file that it is made of, by path, to be checked before it is loaded.
    """

    graph: Graph
    names: Mapping[InspectKind, tuple[str, ...]]
    files: Mapping[Path, str]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose files all have the size and SHA-256 that its manifest names.

    Attributes:
        name: The model's name.
        version: The model's version.
        fingerprint: Identifies the bundle.
        d_model: The width of a row.
        n_layers: The encoder's blocks.
        n_heads: The heads of a block.
        vocab_size: One more than the largest id; 0 where the model takes vectors.
        max_sequence_tokens: The longest sequence.
        special_token_ids: Ids that the tokenizer puts around a text, and the padding id.
        pooling: How the model was trained to make one vector of a sequence, or None where the manifest does not say.
        tokenizer_file: The tokenizer, or None where the model takes ids only.
        graph: The ONNX file and its interface.
        inspect_graph: The ONNX file that gives what happens inside, or None where there is none.
        position: Where a token's place comes from; empty where the manifest does not say.
        parameters: How many numbers the model has, by part.
        prompts: What may be put before a text, by name.
        default_prompt_name: Which of them is where nobody asks for another; empty for none.
        similarity: How vectors are meant to be compared; empty where the manifest does not say.
        space_id: Identifies the vector space; empty where the manifest does not say.
        tasks: How texts of the tasks that the model knows are treated.
        multi_vector: What makes OutputKind.MULTI_VECTOR, or None.
        sparse: What makes OutputKind.SPARSE, or None.
        takes_empty_texts: Whether a text without tokens is pooled as a row of zeros; otherwise it is refused.
        split_special_tokens: Whether a special token that is written out in a text is tokenized like any other text.
        max_text_tokens: The longest text of neither task; 0 for max_sequence_tokens.
        template: What stands around every text, or None.
        repository: The model's id on the hub that it came from; empty where the manifest does not say.
    """

    name: str
    version: str
    fingerprint: str
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    max_sequence_tokens: int
    special_token_ids: tuple[int, ...]
    pooling: ModelPooling | None
    tokenizer_file: Path | None
    graph: Graph
    inspect_graph: InspectGraph | None
    position: str
    parameters: Mapping[str, int]
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str = ""
    similarity: str = ""
    space_id: str = ""
    tasks: Mapping[Task, TaskSettings] = field(default_factory=dict)
    multi_vector: MultiVector | None = None
    sparse: Sparse | None = None
    takes_empty_texts: bool = False
    split_special_tokens: bool = False
    max_text_tokens: int = 0
    template: TextTemplate | None = None
    repository: str = ""

    def treatment(self, task: Task) -> TaskSettings:
        """How texts of a task that the model knows, or of neither, are treated."""
        if task is not Task.NEITHER:
            return self.tasks[task]
        document = self.tasks.get(Task.DOCUMENT, TaskSettings("", 0))
        longest = self.max_text_tokens or self.max_sequence_tokens
        return replace(document, prompt_name=self.default_prompt_name, max_tokens=longest)

    def sample(self, length: int, *, last: bool = False) -> ModelInput:
        """A sequence that the model can compute: of its first id or its last, or of vectors of 0 or 1."""
        if self.graph.takes_vectors:
            return np.full((length, self.d_model), float(last), np.float32)
        return np.full(length, self.vocab_size - 1 if last else 0, np.int64)
