"""The content of a model bundle."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np

from encserve_server.types.arrays import ModelInput, Numbers
from encserve_server.types.inspections import InspectKind
from encserve_server.types.requests import Activation, OutputKind, Task


@dataclass(frozen=True, slots=True)
class Graph:
    """A bundle's ONNX file and its interface.

    Attributes:
        path: The ONNX file.
        input_name: The name of the input: int64 (batch, seq) ids, or float32 (batch, seq, d_model) vectors.
        takes_vectors: Whether the inputs are vectors instead of ids.
        attention_mask_name: The name of the attention mask, int64 (batch, seq): 1 for a token, 0 for padding, 2 for a
            token that no other token attends to.
        output_name: The name of the output: the rows, float32 (batch, seq, d_model).
        pad_token_id: The id of padding tokens. The mask hides them.
        d_model: The width of a row.
        precision: The data type of the computation.
        token_type_ids_name: The name of the input for token types, int64 (batch, seq): 1 for the tokens of the second
            text of a pair, otherwise 0. Empty if the graph has no such input.
        vocab_size: The largest token id plus 1; 0 if the input is vectors.
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
    """The ONNX file of a head and its interface. A head runs after the encoder or after pooling. All types are float32.

    Attributes:
        path: The ONNX file.
        input_names: The names of the inputs: the vectors, (…, input_width), and the mask, (…), if the head has a mask.
        output_name: The name of the output, (batch, width).
        input_width: The width of an input vector.
        width: The width of an output vector.
    """

    path: Path
    input_names: tuple[str, ...]
    output_name: str
    input_width: int
    width: int


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """The pooling that a model was trained for. OutputKind.MODEL uses this pooling.

    Attributes:
        kinds: The poolings. Their vectors are concatenated in this order.
        l2_normalize: Whether the vector is scaled to norm 1, before `dimensions` cuts the vector.
        width: The width of the vector before cutting.
        head: The head that runs after pooling; None without a head.
        skips_prompt: Whether the tokens of a prompt are left out of pooling.
        dimensions: The default number of dimensions to keep, from the first; 0 for all.
    """

    kinds: tuple[OutputKind, ...]
    l2_normalize: bool
    width: int
    head: HeadGraph | None = None
    skips_prompt: bool = False
    dimensions: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the vector is the result of one pooling over all tokens, perhaps normalized."""
        return len(self.kinds) == 1 and self.head is None and not self.skips_prompt


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens that are appended to a short text. These tokens have vectors in MaxSim.

    Attributes:
        min_tokens: The number of tokens of a short text, including the appended tokens.
        token_id: The id of the appended tokens.
        attended: Whether other tokens attend to the appended tokens.
    """

    min_tokens: int
    token_id: int
    attended: bool


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """The joining of similar vectors; see `outputs.token_pooling`.

    Attributes:
        factor: The average number of vectors to join into one, at least 1.
        protected_tokens: The number of vectors at the start that are not joined.
        l2_normalize: Whether all vectors are scaled to norm 1 after joining.
    """

    factor: float
    protected_tokens: int = 1
    l2_normalize: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class StaticSparse:
    """A table with a weight for each token. With the table, sparse weights need no run of the model.

    Attributes:
        tokenizer_file: The tokenizer for the table. Its token ids are the indices of the table.
        weights: (width,) float32, the weight of each token id.
        max_tokens: The maximum number of tokens of a text; 0 for no limit.
    """

    tokenizer_file: Path
    weights: Numbers
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """The settings for texts of one task.

    Attributes:
        prompt_name: The name of the prompt before a text; empty without a prompt.
        max_tokens: The maximum number of tokens of a text.
        expansion: The tokens to append to a short text; None for no such tokens.
        skipped_token_ids: The ids of tokens without a vector in MaxSim.
        kept_token_ids: If not empty, only tokens with these ids have a vector in MaxSim.
        token_pooling: The joining of similar vectors; None if the model does not join vectors.
        static_sparse: The table that gives OutputKind.SPARSE without a run of the model; None without a table.
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
    """The vectors that MaxSim compares.

    Attributes:
        head: The head, which turns each row into a vector.
        similarity: "maxsim" or "meanmaxsim".
        skips_first_token: Whether the first token has no vector.
    """

    head: HeadGraph
    similarity: str
    skips_first_token: bool


class SparsePooling(Enum):
    """The pooling of tokens into one sparse vector. The protobuf enum of the same name has the same values."""

    MAX = 1
    SUM = 2
    OWN_ID = 3  # each token has one weight, for its own id; if an id occurs twice, the larger weight is used


@dataclass(frozen=True, slots=True)
class Sparse:
    """Sparse weights over the vocabulary.

    Attributes:
        head: The head. It turns (batch, seq, d_model) rows and a (batch, seq) mask into (batch, width) weights. With
            SparsePooling.OWN_ID, it turns (tokens, d_model) rows into (tokens, 1) weights.
        width: The size of the vocabulary.
        pooling: The pooling.
        skipped_token_ids: For SparsePooling.OWN_ID: the ids of tokens without a weight.
        max_active_dims: The number of weights to keep, the largest first; 0 for all.
    """

    head: HeadGraph
    width: int
    pooling: SparsePooling
    skipped_token_ids: tuple[int, ...]
    max_active_dims: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The logits of a cross-encoder or a classifier.

    Attributes:
        head: The head. It turns (batch, d_model) pooled rows into (batch, labels) logits.
        labels: The names of the labels.
        pooling: The pooling: OutputKind.MEAN, CLS or LAST_TOKEN.
        not_last_token_id: For OutputKind.LAST_TOKEN: an id that does not count as the last token; None if each id
            counts.
        activation: The function that turns logits into the model's scores.
        cuts_only_second: Whether only the second text of a pair is cut. Otherwise, the longer text is cut first.
    """

    head: HeadGraph
    labels: tuple[str, ...]
    pooling: OutputKind
    not_last_token_id: int | None
    activation: Activation
    cuts_only_second: bool


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """The template around every text.

    Attributes:
        before: The string before a text without a prompt.
        before_prompt: The string before the prompt.
        after_prompt: The string between the prompt and the text.
        after: The string after the text.
        after_tokens: The number of tokens of `after`. Truncation keeps these tokens.
        between: The string between the two texts of a pair; None if the template is for single texts. A template for
            pairs takes no single texts.
    """

    before: str
    before_prompt: str
    after_prompt: str
    after: str
    after_tokens: int
    between: str | None = None

    def before_text(self, prompt: str) -> str:
        """Return the string before a text, including the prompt."""
        return self.before_prompt + prompt + self.after_prompt if prompt else self.before


@dataclass(frozen=True, slots=True)
class InspectGraph:
    """The ONNX file that also returns the model's inner values.

    Attributes:
        graph: The file and its inputs. The output is the last hidden state.
        names: For each kind, the names of the outputs, one for each layer. The outputs are attention weights (1, heads,
            seq, seq), hidden states (1, seq, d_model), and positions (max_sequence_tokens, d_model). Kinds that the
            model does not have are left out.
        files: The SHA-256 of each file of the bundle, by path. The server checks the files before it loads the graph.
    """

    graph: Graph
    names: Mapping[InspectKind, tuple[str, ...]]
    files: Mapping[Path, str]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle: each file has the size and the SHA-256 in the manifest.

    Attributes:
        name: The model's name.
        version: The model's version.
        fingerprint: Identifies the bundle.
        d_model: The width of a row.
        n_layers: The number of blocks of the encoder.
        n_heads: The number of attention heads of a block.
        vocab_size: The largest token id plus 1; 0 if the input is vectors.
        max_sequence_tokens: The maximum number of tokens of a sequence.
        special_token_ids: The ids that the tokenizer adds to a text, and the padding id.
        pooling: The pooling that the model was trained for; None if unknown.
        tokenizer_file: The tokenizer; None if the model has no tokenizer.
        graph: The ONNX file and its interface.
        inspect_graph: The ONNX file for inspections; None if the bundle has none.
        position: The kind of position encoding; empty if unknown.
        parameters: The number of parameters of each part of the model.
        prompts: The prompts for texts, by name.
        default_prompt_name: The name of the default prompt; empty without a default.
        similarity: The function that compares vectors; empty if unknown.
        space_id: Identifies the vector space; empty if unknown.
        tasks: The settings of the tasks that the model supports.
        multi_vector: The description of OutputKind.MULTI_VECTOR; None if not supported.
        sparse: The description of OutputKind.SPARSE; None if not supported.
        scores: The description of OutputKind.SCORES; None if not supported.
        takes_empty_texts: Whether a text without tokens is pooled as a row of zeros. Otherwise the text is refused.
        split_special_tokens: Whether the name of a special token in a text is tokenized like other text.
        max_text_tokens: The maximum number of tokens of a text without a task; 0 for max_sequence_tokens.
        template: The template around every text; None without a template.
        repository: The model's id on its hub; empty if unknown.
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
    scores: Scores | None = None
    takes_empty_texts: bool = False
    split_special_tokens: bool = False
    max_text_tokens: int = 0
    template: TextTemplate | None = None
    repository: str = ""

    def treatment(self, task: Task) -> TaskSettings:
        """Return the settings of a task that the model supports.

        Task.NEITHER has the settings of a document, except the default prompt and the maximum number of tokens.
        """
        if task is not Task.NEITHER:
            return self.tasks[task]
        document = self.tasks.get(Task.DOCUMENT, TaskSettings("", 0))
        longest = self.max_text_tokens or self.max_sequence_tokens
        return replace(document, prompt_name=self.default_prompt_name, max_tokens=longest)

    def sample(self, length: int, *, last: bool = False) -> ModelInput:
        """Return a valid test sequence: all ids or vectors are 0; with `last`, the last id or vectors of 1."""
        if self.graph.takes_vectors:
            return np.full((length, self.d_model), float(last), np.float32)
        return np.full(length, self.vocab_size - 1 if last else 0, np.int64)
