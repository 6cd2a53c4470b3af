from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_CLS: _ClassVar[Pooling]
    POOLING_MAX: _ClassVar[Pooling]
    POOLING_LAST_TOKEN: _ClassVar[Pooling]
    POOLING_WEIGHTED_MEAN: _ClassVar[Pooling]
    POOLING_MEAN_SQRT_LENGTH: _ClassVar[Pooling]

class SparsePooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPARSE_POOLING_UNSPECIFIED: _ClassVar[SparsePooling]
    SPARSE_POOLING_MAX: _ClassVar[SparsePooling]
    SPARSE_POOLING_SUM: _ClassVar[SparsePooling]
    SPARSE_POOLING_OWN_ID: _ClassVar[SparsePooling]

class Activation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVATION_UNSPECIFIED: _ClassVar[Activation]
    ACTIVATION_NONE: _ClassVar[Activation]
    ACTIVATION_SIGMOID: _ClassVar[Activation]
    ACTIVATION_SOFTMAX: _ClassVar[Activation]

class PairTruncation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAIR_TRUNCATION_UNSPECIFIED: _ClassVar[PairTruncation]
    PAIR_TRUNCATION_LONGEST_FIRST: _ClassVar[PairTruncation]
    PAIR_TRUNCATION_ONLY_SECOND: _ClassVar[PairTruncation]
POOLING_UNSPECIFIED: Pooling
POOLING_MEAN: Pooling
POOLING_CLS: Pooling
POOLING_MAX: Pooling
POOLING_LAST_TOKEN: Pooling
POOLING_WEIGHTED_MEAN: Pooling
POOLING_MEAN_SQRT_LENGTH: Pooling
SPARSE_POOLING_UNSPECIFIED: SparsePooling
SPARSE_POOLING_MAX: SparsePooling
SPARSE_POOLING_SUM: SparsePooling
SPARSE_POOLING_OWN_ID: SparsePooling
ACTIVATION_UNSPECIFIED: Activation
ACTIVATION_NONE: Activation
ACTIVATION_SIGMOID: Activation
ACTIVATION_SOFTMAX: Activation
PAIR_TRUNCATION_UNSPECIFIED: PairTruncation
PAIR_TRUNCATION_LONGEST_FIRST: PairTruncation
PAIR_TRUNCATION_ONLY_SECOND: PairTruncation

class Manifest(_message.Message):
    __slots__ = ("format_version", "name", "version", "fingerprint", "encoder", "text", "pooling", "l2_normalize", "graph", "source", "files", "parameters", "parity", "inspect_graph", "more_poolings", "head", "pooling_skips_prompt", "prompts", "default_prompt_name", "dimensions", "similarity", "space_id", "query", "document", "multi_vector", "sparse", "scores")
    class PromptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    L2_NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PARITY_FIELD_NUMBER: _ClassVar[int]
    INSPECT_GRAPH_FIELD_NUMBER: _ClassVar[int]
    MORE_POOLINGS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    POOLING_SKIPS_PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    MULTI_VECTOR_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    name: str
    version: str
    fingerprint: str
    encoder: EncoderShape
    text: TextInput
    pooling: Pooling
    l2_normalize: bool
    graph: Graph
    source: Source
    files: _containers.RepeatedCompositeFieldContainer[BundleFile]
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterCount]
    parity: Parity
    inspect_graph: InspectGraph
    more_poolings: _containers.RepeatedScalarFieldContainer[Pooling]
    head: Head
    pooling_skips_prompt: bool
    prompts: _containers.ScalarMap[str, str]
    default_prompt_name: str
    dimensions: int
    similarity: str
    space_id: str
    query: TaskSettings
    document: TaskSettings
    multi_vector: MultiVector
    sparse: Sparse
    scores: Scores
    def __init__(self, format_version: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., encoder: _Optional[_Union[EncoderShape, _Mapping]] = ..., text: _Optional[_Union[TextInput, _Mapping]] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., l2_normalize: bool = ..., graph: _Optional[_Union[Graph, _Mapping]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., files: _Optional[_Iterable[_Union[BundleFile, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[ParameterCount, _Mapping]]] = ..., parity: _Optional[_Union[Parity, _Mapping]] = ..., inspect_graph: _Optional[_Union[InspectGraph, _Mapping]] = ..., more_poolings: _Optional[_Iterable[_Union[Pooling, str]]] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., pooling_skips_prompt: bool = ..., prompts: _Optional[_Mapping[str, str]] = ..., default_prompt_name: _Optional[str] = ..., dimensions: _Optional[int] = ..., similarity: _Optional[str] = ..., space_id: _Optional[str] = ..., query: _Optional[_Union[TaskSettings, _Mapping]] = ..., document: _Optional[_Union[TaskSettings, _Mapping]] = ..., multi_vector: _Optional[_Union[MultiVector, _Mapping]] = ..., sparse: _Optional[_Union[Sparse, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ...) -> None: ...

class TaskSettings(_message.Message):
    __slots__ = ("prompt_name", "max_tokens", "expansion", "skipped_token_ids", "kept_token_ids", "token_pooling", "static_sparse")
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPANSION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_POOLING_FIELD_NUMBER: _ClassVar[int]
    STATIC_SPARSE_FIELD_NUMBER: _ClassVar[int]
    prompt_name: str
    max_tokens: int
    expansion: Expansion
    skipped_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kept_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_pooling: TokenPooling
    static_sparse: StaticSparse
    def __init__(self, prompt_name: _Optional[str] = ..., max_tokens: _Optional[int] = ..., expansion: _Optional[_Union[Expansion, _Mapping]] = ..., skipped_token_ids: _Optional[_Iterable[int]] = ..., kept_token_ids: _Optional[_Iterable[int]] = ..., token_pooling: _Optional[_Union[TokenPooling, _Mapping]] = ..., static_sparse: _Optional[_Union[StaticSparse, _Mapping]] = ...) -> None: ...

class Expansion(_message.Message):
    __slots__ = ("min_tokens", "token_id", "attended")
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_FIELD_NUMBER: _ClassVar[int]
    min_tokens: int
    token_id: int
    attended: bool
    def __init__(self, min_tokens: _Optional[int] = ..., token_id: _Optional[int] = ..., attended: bool = ...) -> None: ...

class TokenPooling(_message.Message):
    __slots__ = ("factor", "protected_tokens", "l2_normalize")
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    L2_NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    factor: float
    protected_tokens: int
    l2_normalize: bool
    def __init__(self, factor: _Optional[float] = ..., protected_tokens: _Optional[int] = ..., l2_normalize: bool = ...) -> None: ...

class MultiVector(_message.Message):
    __slots__ = ("file", "input_name", "output_name", "width", "similarity", "skips_first_token")
    FILE_FIELD_NUMBER: _ClassVar[int]
    INPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    file: str
    input_name: str
    output_name: str
    width: int
    similarity: str
    skips_first_token: bool
    def __init__(self, file: _Optional[str] = ..., input_name: _Optional[str] = ..., output_name: _Optional[str] = ..., width: _Optional[int] = ..., similarity: _Optional[str] = ..., skips_first_token: bool = ...) -> None: ...

class Sparse(_message.Message):
    __slots__ = ("file", "rows_name", "mask_name", "output_name", "width", "pooling", "skipped_token_ids", "max_active_dims")
    FILE_FIELD_NUMBER: _ClassVar[int]
    ROWS_NAME_FIELD_NUMBER: _ClassVar[int]
    MASK_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_ACTIVE_DIMS_FIELD_NUMBER: _ClassVar[int]
    file: str
    rows_name: str
    mask_name: str
    output_name: str
    width: int
    pooling: SparsePooling
    skipped_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_active_dims: int
    def __init__(self, file: _Optional[str] = ..., rows_name: _Optional[str] = ..., mask_name: _Optional[str] = ..., output_name: _Optional[str] = ..., width: _Optional[int] = ..., pooling: _Optional[_Union[SparsePooling, str]] = ..., skipped_token_ids: _Optional[_Iterable[int]] = ..., max_active_dims: _Optional[int] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("file", "input_name", "output_name", "labels", "pooling", "not_last_token_id", "activation", "pair_truncation")
    FILE_FIELD_NUMBER: _ClassVar[int]
    INPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NOT_LAST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    PAIR_TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    file: str
    input_name: str
    output_name: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    pooling: Pooling
    not_last_token_id: int
    activation: Activation
    pair_truncation: PairTruncation
    def __init__(self, file: _Optional[str] = ..., input_name: _Optional[str] = ..., output_name: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., not_last_token_id: _Optional[int] = ..., activation: _Optional[_Union[Activation, str]] = ..., pair_truncation: _Optional[_Union[PairTruncation, str]] = ...) -> None: ...

class StaticSparse(_message.Message):
    __slots__ = ("tokenizer_file", "weights_file", "max_tokens")
    TOKENIZER_FILE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FILE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_file: str
    weights_file: str
    max_tokens: int
    def __init__(self, tokenizer_file: _Optional[str] = ..., weights_file: _Optional[str] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class EncoderShape(_message.Message):
    __slots__ = ("d_model", "n_heads", "d_ff", "n_layers", "vocab_size", "max_sequence_tokens", "pad_token_id", "activation", "norm", "position")
    D_MODEL_FIELD_NUMBER: _ClassVar[int]
    N_HEADS_FIELD_NUMBER: _ClassVar[int]
    D_FF_FIELD_NUMBER: _ClassVar[int]
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    d_model: int
    n_heads: int
    d_ff: int
    n_layers: int
    vocab_size: int
    max_sequence_tokens: int
    pad_token_id: int
    activation: str
    norm: str
    position: str
    def __init__(self, d_model: _Optional[int] = ..., n_heads: _Optional[int] = ..., d_ff: _Optional[int] = ..., n_layers: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., pad_token_id: _Optional[int] = ..., activation: _Optional[str] = ..., norm: _Optional[str] = ..., position: _Optional[str] = ...) -> None: ...

class TextInput(_message.Message):
    __slots__ = ("tokenizer_file", "special_token_ids", "split_special_tokens", "max_tokens", "template", "takes_empty")
    TOKENIZER_FILE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TAKES_EMPTY_FIELD_NUMBER: _ClassVar[int]
    tokenizer_file: str
    special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    split_special_tokens: bool
    max_tokens: int
    template: TextTemplate
    takes_empty: bool
    def __init__(self, tokenizer_file: _Optional[str] = ..., special_token_ids: _Optional[_Iterable[int]] = ..., split_special_tokens: bool = ..., max_tokens: _Optional[int] = ..., template: _Optional[_Union[TextTemplate, _Mapping]] = ..., takes_empty: bool = ...) -> None: ...

class TextTemplate(_message.Message):
    __slots__ = ("before", "before_prompt", "after_prompt", "after", "after_tokens", "between")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    AFTER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_FIELD_NUMBER: _ClassVar[int]
    before: str
    before_prompt: str
    after_prompt: str
    after: str
    after_tokens: int
    between: str
    def __init__(self, before: _Optional[str] = ..., before_prompt: _Optional[str] = ..., after_prompt: _Optional[str] = ..., after: _Optional[str] = ..., after_tokens: _Optional[int] = ..., between: _Optional[str] = ...) -> None: ...

class Graph(_message.Message):
    __slots__ = ("file", "opset", "input_ids_name", "attention_mask_name", "output_name", "precision", "token_type_ids_name", "embeddings_name")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OPSET_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_NAME_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASK_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TYPE_IDS_NAME_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_NAME_FIELD_NUMBER: _ClassVar[int]
    file: str
    opset: int
    input_ids_name: str
    attention_mask_name: str
    output_name: str
    precision: str
    token_type_ids_name: str
    embeddings_name: str
    def __init__(self, file: _Optional[str] = ..., opset: _Optional[int] = ..., input_ids_name: _Optional[str] = ..., attention_mask_name: _Optional[str] = ..., output_name: _Optional[str] = ..., precision: _Optional[str] = ..., token_type_ids_name: _Optional[str] = ..., embeddings_name: _Optional[str] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("file", "input_name", "output_name", "width")
    FILE_FIELD_NUMBER: _ClassVar[int]
    INPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NAME_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    file: str
    input_name: str
    output_name: str
    width: int
    def __init__(self, file: _Optional[str] = ..., input_name: _Optional[str] = ..., output_name: _Optional[str] = ..., width: _Optional[int] = ...) -> None: ...

class InspectGraph(_message.Message):
    __slots__ = ("file", "attention_weights_names", "hidden_state_names", "positions_name", "residual_nodes")
    FILE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WEIGHTS_NAMES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_NAMES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_NAME_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_NODES_FIELD_NUMBER: _ClassVar[int]
    file: str
    attention_weights_names: _containers.RepeatedScalarFieldContainer[str]
    hidden_state_names: _containers.RepeatedScalarFieldContainer[str]
    positions_name: str
    residual_nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, file: _Optional[str] = ..., attention_weights_names: _Optional[_Iterable[str]] = ..., hidden_state_names: _Optional[_Iterable[str]] = ..., positions_name: _Optional[str] = ..., residual_nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("kind", "description", "weights_sha256", "versions", "route", "repository", "revision")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    REPOSITORY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    description: str
    weights_sha256: str
    versions: _containers.ScalarMap[str, str]
    route: str
    repository: str
    revision: str
    def __init__(self, kind: _Optional[str] = ..., description: _Optional[str] = ..., weights_sha256: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., route: _Optional[str] = ..., repository: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class BundleFile(_message.Message):
    __slots__ = ("path", "size_bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class ParameterCount(_message.Message):
    __slots__ = ("part", "count")
    PART_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    part: str
    count: int
    def __init__(self, part: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Parity(_message.Message):
    __slots__ = ("tolerance", "max_relative_error", "max_padding_error", "cases", "min_cosine", "min_padding_cosine", "required_min_cosine", "required_min_padding_cosine", "pipeline_texts", "max_pipeline_error", "max_maxsim_error", "maxsim_tolerance", "min_pipeline_cosine", "float32_error", "padding_tolerance", "expected_rows", "max_expected_error", "min_expected_cosine", "score_pairs", "max_score_error", "score_tolerance", "min_score_rank_correlation", "max_score_change")
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    MAX_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    MAX_PADDING_ERROR_FIELD_NUMBER: _ClassVar[int]
    CASES_FIELD_NUMBER: _ClassVar[int]
    MIN_COSINE_FIELD_NUMBER: _ClassVar[int]
    MIN_PADDING_COSINE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_MIN_COSINE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_MIN_PADDING_COSINE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_TEXTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIPELINE_ERROR_FIELD_NUMBER: _ClassVar[int]
    MAX_MAXSIM_ERROR_FIELD_NUMBER: _ClassVar[int]
    MAXSIM_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    MIN_PIPELINE_COSINE_FIELD_NUMBER: _ClassVar[int]
    FLOAT32_ERROR_FIELD_NUMBER: _ClassVar[int]
    PADDING_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_EXPECTED_ERROR_FIELD_NUMBER: _ClassVar[int]
    MIN_EXPECTED_COSINE_FIELD_NUMBER: _ClassVar[int]
    SCORE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    MAX_SCORE_ERROR_FIELD_NUMBER: _ClassVar[int]
    SCORE_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    MIN_SCORE_RANK_CORRELATION_FIELD_NUMBER: _ClassVar[int]
    MAX_SCORE_CHANGE_FIELD_NUMBER: _ClassVar[int]
    tolerance: float
    max_relative_error: float
    max_padding_error: float
    cases: _containers.RepeatedCompositeFieldContainer[ParityCase]
    min_cosine: float
    min_padding_cosine: float
    required_min_cosine: float
    required_min_padding_cosine: float
    pipeline_texts: int
    max_pipeline_error: float
    max_maxsim_error: float
    maxsim_tolerance: float
    min_pipeline_cosine: float
    float32_error: float
    padding_tolerance: float
    expected_rows: int
    max_expected_error: float
    min_expected_cosine: float
    score_pairs: int
    max_score_error: float
    score_tolerance: float
    min_score_rank_correlation: float
    max_score_change: float
    def __init__(self, tolerance: _Optional[float] = ..., max_relative_error: _Optional[float] = ..., max_padding_error: _Optional[float] = ..., cases: _Optional[_Iterable[_Union[ParityCase, _Mapping]]] = ..., min_cosine: _Optional[float] = ..., min_padding_cosine: _Optional[float] = ..., required_min_cosine: _Optional[float] = ..., required_min_padding_cosine: _Optional[float] = ..., pipeline_texts: _Optional[int] = ..., max_pipeline_error: _Optional[float] = ..., max_maxsim_error: _Optional[float] = ..., maxsim_tolerance: _Optional[float] = ..., min_pipeline_cosine: _Optional[float] = ..., float32_error: _Optional[float] = ..., padding_tolerance: _Optional[float] = ..., expected_rows: _Optional[int] = ..., max_expected_error: _Optional[float] = ..., min_expected_cosine: _Optional[float] = ..., score_pairs: _Optional[int] = ..., max_score_error: _Optional[float] = ..., score_tolerance: _Optional[float] = ..., min_score_rank_correlation: _Optional[float] = ..., max_score_change: _Optional[float] = ...) -> None: ...

class ParityCase(_message.Message):
    __slots__ = ("lengths", "max_relative_error")
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MAX_RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    max_relative_error: float
    def __init__(self, lengths: _Optional[_Iterable[int]] = ..., max_relative_error: _Optional[float] = ...) -> None: ...
