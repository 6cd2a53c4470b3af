from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InputKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INPUT_KIND_UNSPECIFIED: _ClassVar[InputKind]
    INPUT_KIND_TOKEN_IDS: _ClassVar[InputKind]
    INPUT_KIND_EMBEDDINGS: _ClassVar[InputKind]

class OutputKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_KIND_UNSPECIFIED: _ClassVar[OutputKind]
    OUTPUT_KIND_TOKENS: _ClassVar[OutputKind]
    OUTPUT_KIND_MEAN: _ClassVar[OutputKind]
    OUTPUT_KIND_CLS: _ClassVar[OutputKind]
    OUTPUT_KIND_MAX: _ClassVar[OutputKind]
    OUTPUT_KIND_MODEL_POOLING: _ClassVar[OutputKind]
    OUTPUT_KIND_LAST_TOKEN: _ClassVar[OutputKind]
    OUTPUT_KIND_WEIGHTED_MEAN: _ClassVar[OutputKind]
    OUTPUT_KIND_MEAN_SQRT_LENGTH: _ClassVar[OutputKind]
    OUTPUT_KIND_MULTI_VECTOR: _ClassVar[OutputKind]
    OUTPUT_KIND_SPARSE: _ClassVar[OutputKind]
    OUTPUT_KIND_SPANS: _ClassVar[OutputKind]
    OUTPUT_KIND_SCORES: _ClassVar[OutputKind]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_QUERY: _ClassVar[Task]
    TASK_DOCUMENT: _ClassVar[Task]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BULK: _ClassVar[Priority]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BINARY: _ClassVar[DataType]
    DATA_TYPE_INT8: _ClassVar[DataType]

class OffsetUnit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFFSET_UNIT_UNSPECIFIED: _ClassVar[OffsetUnit]
    OFFSET_UNIT_CODE_POINTS: _ClassVar[OffsetUnit]
    OFFSET_UNIT_UTF8_BYTES: _ClassVar[OffsetUnit]
    OFFSET_UNIT_TOKENS: _ClassVar[OffsetUnit]

class Detail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DETAIL_UNSPECIFIED: _ClassVar[Detail]
    DETAIL_NONE: _ClassVar[Detail]
    DETAIL_COUNTS: _ClassVar[Detail]
    DETAIL_TOKENS: _ClassVar[Detail]

class Truncation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATION_UNSPECIFIED: _ClassVar[Truncation]
    TRUNCATION_REFUSE: _ClassVar[Truncation]
    TRUNCATION_END: _ClassVar[Truncation]

class ScoreMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORE_METHOD_UNSPECIFIED: _ClassVar[ScoreMethod]
    SCORE_METHOD_LABELS: _ClassVar[ScoreMethod]
    SCORE_METHOD_VECTORS: _ClassVar[ScoreMethod]
    SCORE_METHOD_MULTI_VECTORS: _ClassVar[ScoreMethod]
    SCORE_METHOD_SPARSE: _ClassVar[ScoreMethod]

class Activation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVATION_UNSPECIFIED: _ClassVar[Activation]
    ACTIVATION_NONE: _ClassVar[Activation]
    ACTIVATION_SIGMOID: _ClassVar[Activation]
    ACTIVATION_SOFTMAX: _ClassVar[Activation]

class InspectKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSPECT_KIND_UNSPECIFIED: _ClassVar[InspectKind]
    INSPECT_KIND_ATTENTION_WEIGHTS: _ClassVar[InspectKind]
    INSPECT_KIND_HIDDEN_STATES: _ClassVar[InspectKind]
    INSPECT_KIND_POSITIONS: _ClassVar[InspectKind]
INPUT_KIND_UNSPECIFIED: InputKind
INPUT_KIND_TOKEN_IDS: InputKind
INPUT_KIND_EMBEDDINGS: InputKind
OUTPUT_KIND_UNSPECIFIED: OutputKind
OUTPUT_KIND_TOKENS: OutputKind
OUTPUT_KIND_MEAN: OutputKind
OUTPUT_KIND_CLS: OutputKind
OUTPUT_KIND_MAX: OutputKind
OUTPUT_KIND_MODEL_POOLING: OutputKind
OUTPUT_KIND_LAST_TOKEN: OutputKind
OUTPUT_KIND_WEIGHTED_MEAN: OutputKind
OUTPUT_KIND_MEAN_SQRT_LENGTH: OutputKind
OUTPUT_KIND_MULTI_VECTOR: OutputKind
OUTPUT_KIND_SPARSE: OutputKind
OUTPUT_KIND_SPANS: OutputKind
OUTPUT_KIND_SCORES: OutputKind
TASK_UNSPECIFIED: Task
TASK_QUERY: Task
TASK_DOCUMENT: Task
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BULK: Priority
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BINARY: DataType
DATA_TYPE_INT8: DataType
OFFSET_UNIT_UNSPECIFIED: OffsetUnit
OFFSET_UNIT_CODE_POINTS: OffsetUnit
OFFSET_UNIT_UTF8_BYTES: OffsetUnit
OFFSET_UNIT_TOKENS: OffsetUnit
DETAIL_UNSPECIFIED: Detail
DETAIL_NONE: Detail
DETAIL_COUNTS: Detail
DETAIL_TOKENS: Detail
TRUNCATION_UNSPECIFIED: Truncation
TRUNCATION_REFUSE: Truncation
TRUNCATION_END: Truncation
SCORE_METHOD_UNSPECIFIED: ScoreMethod
SCORE_METHOD_LABELS: ScoreMethod
SCORE_METHOD_VECTORS: ScoreMethod
SCORE_METHOD_MULTI_VECTORS: ScoreMethod
SCORE_METHOD_SPARSE: ScoreMethod
ACTIVATION_UNSPECIFIED: Activation
ACTIVATION_NONE: Activation
ACTIVATION_SIGMOID: Activation
ACTIVATION_SOFTMAX: Activation
INSPECT_KIND_UNSPECIFIED: InspectKind
INSPECT_KIND_ATTENTION_WEIGHTS: InspectKind
INSPECT_KIND_HIDDEN_STATES: InspectKind
INSPECT_KIND_POSITIONS: InspectKind

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenEmbeddings(_message.Message):
    __slots__ = ("width", "data_type", "data")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    width: int
    data_type: DataType
    data: bytes
    def __init__(self, width: _Optional[int] = ..., data_type: _Optional[_Union[DataType, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Spans(_message.Message):
    __slots__ = ("unit", "starts", "ends")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    unit: OffsetUnit
    starts: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unit: _Optional[_Union[OffsetUnit, str]] = ..., starts: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ...) -> None: ...

class Input(_message.Message):
    __slots__ = ("token_ids", "text", "embeddings", "spans")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    token_ids: TokenIds
    text: str
    embeddings: TokenEmbeddings
    spans: Spans
    def __init__(self, token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., text: _Optional[str] = ..., embeddings: _Optional[_Union[TokenEmbeddings, _Mapping]] = ..., spans: _Optional[_Union[Spans, _Mapping]] = ...) -> None: ...

class OutputSpec(_message.Message):
    __slots__ = ("kind", "l2_normalize", "dimensions", "max_active_dims", "pool_factor", "span_pooling")
    KIND_FIELD_NUMBER: _ClassVar[int]
    L2_NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_ACTIVE_DIMS_FIELD_NUMBER: _ClassVar[int]
    POOL_FACTOR_FIELD_NUMBER: _ClassVar[int]
    SPAN_POOLING_FIELD_NUMBER: _ClassVar[int]
    kind: OutputKind
    l2_normalize: bool
    dimensions: int
    max_active_dims: int
    pool_factor: float
    span_pooling: OutputKind
    def __init__(self, kind: _Optional[_Union[OutputKind, str]] = ..., l2_normalize: bool = ..., dimensions: _Optional[int] = ..., max_active_dims: _Optional[int] = ..., pool_factor: _Optional[float] = ..., span_pooling: _Optional[_Union[OutputKind, str]] = ...) -> None: ...

class EncodeOptions(_message.Message):
    __slots__ = ("outputs", "data_type", "truncation", "exclude_special_tokens", "include_token_strings", "prompt_name", "task", "detail", "offset_unit")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_UNIT_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[OutputSpec]
    data_type: DataType
    truncation: Truncation
    exclude_special_tokens: bool
    include_token_strings: bool
    prompt_name: str
    task: Task
    detail: Detail
    offset_unit: OffsetUnit
    def __init__(self, outputs: _Optional[_Iterable[_Union[OutputSpec, _Mapping]]] = ..., data_type: _Optional[_Union[DataType, str]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., exclude_special_tokens: bool = ..., include_token_strings: bool = ..., prompt_name: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ..., detail: _Optional[_Union[Detail, str]] = ..., offset_unit: _Optional[_Union[OffsetUnit, str]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("model", "model_version", "inputs", "options", "expected_fingerprint", "expected_space_id", "priority")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    options: EncodeOptions
    expected_fingerprint: str
    expected_space_id: str
    priority: Priority
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., options: _Optional[_Union[EncodeOptions, _Mapping]] = ..., expected_fingerprint: _Optional[str] = ..., expected_space_id: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class RaggedTensor(_message.Message):
    __slots__ = ("kind", "l2_normalized", "data_type", "width", "lengths", "data", "indices")
    KIND_FIELD_NUMBER: _ClassVar[int]
    L2_NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    kind: OutputKind
    l2_normalized: bool
    data_type: DataType
    width: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    indices: bytes
    def __init__(self, kind: _Optional[_Union[OutputKind, str]] = ..., l2_normalized: bool = ..., data_type: _Optional[_Union[DataType, str]] = ..., width: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., indices: _Optional[bytes] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ("token_count", "original_token_count", "truncated", "token_ids", "char_starts", "char_ends", "special", "tokens", "span_token_counts")
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAR_STARTS_FIELD_NUMBER: _ClassVar[int]
    CHAR_ENDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPAN_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    token_count: int
    original_token_count: int
    truncated: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    char_starts: _containers.RepeatedScalarFieldContainer[int]
    char_ends: _containers.RepeatedScalarFieldContainer[int]
    special: _containers.RepeatedScalarFieldContainer[bool]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    span_token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_count: _Optional[int] = ..., original_token_count: _Optional[int] = ..., truncated: bool = ..., token_ids: _Optional[_Iterable[int]] = ..., char_starts: _Optional[_Iterable[int]] = ..., char_ends: _Optional[_Iterable[int]] = ..., special: _Optional[_Iterable[bool]] = ..., tokens: _Optional[_Iterable[str]] = ..., span_token_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("tokenize_seconds", "queue_seconds", "compute_seconds")
    TOKENIZE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokenize_seconds: float
    queue_seconds: float
    compute_seconds: float
    def __init__(self, tokenize_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("model", "model_version", "fingerprint", "outputs", "sequences", "timings", "space_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    fingerprint: str
    outputs: _containers.RepeatedCompositeFieldContainer[RaggedTensor]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    timings: Timings
    space_id: str
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[RaggedTensor, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., space_id: _Optional[str] = ...) -> None: ...

class TextPair(_message.Message):
    __slots__ = ("query", "document")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    query: str
    document: str
    def __init__(self, query: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "model_version", "query", "documents", "document_vectors", "pairs", "texts", "top_k", "activation", "truncation", "prompt_name", "expected_fingerprint", "expected_space_id", "priority", "max_document_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_VECTORS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_DOCUMENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    query: str
    documents: _containers.RepeatedScalarFieldContainer[str]
    document_vectors: RaggedTensor
    pairs: _containers.RepeatedCompositeFieldContainer[TextPair]
    texts: _containers.RepeatedScalarFieldContainer[str]
    top_k: int
    activation: Activation
    truncation: Truncation
    prompt_name: str
    expected_fingerprint: str
    expected_space_id: str
    priority: Priority
    max_document_tokens: int
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., query: _Optional[str] = ..., documents: _Optional[_Iterable[str]] = ..., document_vectors: _Optional[_Union[RaggedTensor, _Mapping]] = ..., pairs: _Optional[_Iterable[_Union[TextPair, _Mapping]]] = ..., texts: _Optional[_Iterable[str]] = ..., top_k: _Optional[int] = ..., activation: _Optional[_Union[Activation, str]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., prompt_name: _Optional[str] = ..., expected_fingerprint: _Optional[str] = ..., expected_space_id: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., max_document_tokens: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("model", "model_version", "fingerprint", "space_id", "scores", "label_count", "labels", "indices", "token_count", "truncated", "query_truncated", "timings")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    LABEL_COUNT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    QUERY_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    fingerprint: str
    space_id: str
    scores: bytes
    label_count: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    indices: _containers.RepeatedScalarFieldContainer[int]
    token_count: int
    truncated: _containers.RepeatedScalarFieldContainer[int]
    query_truncated: bool
    timings: Timings
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., space_id: _Optional[str] = ..., scores: _Optional[bytes] = ..., label_count: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., indices: _Optional[_Iterable[int]] = ..., token_count: _Optional[int] = ..., truncated: _Optional[_Iterable[int]] = ..., query_truncated: bool = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "model_version", "texts", "prompt_name", "task", "truncation", "include_token_strings", "offset_unit")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_UNIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    prompt_name: str
    task: Task
    truncation: Truncation
    include_token_strings: bool
    offset_unit: OffsetUnit
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ..., prompt_name: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., include_token_strings: bool = ..., offset_unit: _Optional[_Union[OffsetUnit, str]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("model", "model_version", "fingerprint", "sequences")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    fingerprint: str
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ...) -> None: ...

class EncodeStreamRequest(_message.Message):
    __slots__ = ("request_id", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request: EncodeRequest
    def __init__(self, request_id: _Optional[str] = ..., request: _Optional[_Union[EncodeRequest, _Mapping]] = ...) -> None: ...

class EncodeStreamResponse(_message.Message):
    __slots__ = ("request_id", "response", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    response: EncodeResponse
    error: StreamError
    def __init__(self, request_id: _Optional[str] = ..., response: _Optional[_Union[EncodeResponse, _Mapping]] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("code", "message", "reason", "retry_delay_seconds", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    retry_delay_seconds: float
    details: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., retry_delay_seconds: _Optional[float] = ..., details: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ...) -> None: ...

class InspectSpec(_message.Message):
    __slots__ = ("kind", "layers")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    kind: InspectKind
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[InspectKind, str]] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("model", "model_version", "input", "truncation", "tensors", "data_type", "expected_fingerprint", "prompt_name", "expected_space_id", "task")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    input: Input
    truncation: Truncation
    tensors: _containers.RepeatedCompositeFieldContainer[InspectSpec]
    data_type: DataType
    expected_fingerprint: str
    prompt_name: str
    expected_space_id: str
    task: Task
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., input: _Optional[_Union[Input, _Mapping]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., tensors: _Optional[_Iterable[_Union[InspectSpec, _Mapping]]] = ..., data_type: _Optional[_Union[DataType, str]] = ..., expected_fingerprint: _Optional[str] = ..., prompt_name: _Optional[str] = ..., expected_space_id: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: InspectHeader
    chunk: TensorChunk
    def __init__(self, header: _Optional[_Union[InspectHeader, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ...) -> None: ...

class InspectHeader(_message.Message):
    __slots__ = ("model", "model_version", "fingerprint", "sequence", "tensors", "timings", "space_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    fingerprint: str
    sequence: SequenceInfo
    tensors: _containers.RepeatedCompositeFieldContainer[InspectTensor]
    timings: Timings
    space_id: str
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., sequence: _Optional[_Union[SequenceInfo, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[InspectTensor, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., space_id: _Optional[str] = ...) -> None: ...

class InspectTensor(_message.Message):
    __slots__ = ("kind", "layers", "shape", "data_type")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    kind: InspectKind
    layers: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    data_type: DataType
    def __init__(self, kind: _Optional[_Union[InspectKind, str]] = ..., layers: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., data_type: _Optional[_Union[DataType, str]] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("tensor", "data")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    data: bytes
    def __init__(self, tensor: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model", "model_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "version", "fingerprint", "is_default", "d_model", "n_layers", "n_heads", "vocab_size", "max_sequence_tokens", "has_tokenizer", "special_token_ids", "pooling", "l2_normalize", "provider", "precision", "max_request_sequences", "max_text_bytes", "max_response_bytes", "ready", "not_ready_reason", "max_request_tokens", "max_request_bytes", "input_kind", "can_inspect", "max_inspect_tokens", "position", "parameters", "vector_width", "default_dimensions", "prompts", "default_prompt_name", "similarity", "space_id", "tasks", "multi_vector_width", "multi_vector_similarity", "sparse_width", "max_outputs", "score_method", "labels", "activation", "takes_pairs_only")
    class PromptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    D_MODEL_FIELD_NUMBER: _ClassVar[int]
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    N_HEADS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    L2_NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    INPUT_KIND_FIELD_NUMBER: _ClassVar[int]
    CAN_INSPECT_FIELD_NUMBER: _ClassVar[int]
    MAX_INSPECT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    MULTI_VECTOR_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MULTI_VECTOR_SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SPARSE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SCORE_METHOD_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    TAKES_PAIRS_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    fingerprint: str
    is_default: bool
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    max_sequence_tokens: int
    has_tokenizer: bool
    special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pooling: OutputKind
    l2_normalize: bool
    provider: str
    precision: str
    max_request_sequences: int
    max_text_bytes: int
    max_response_bytes: int
    ready: bool
    not_ready_reason: str
    max_request_tokens: int
    max_request_bytes: int
    input_kind: InputKind
    can_inspect: bool
    max_inspect_tokens: int
    position: str
    parameters: _containers.RepeatedCompositeFieldContainer[PartParameters]
    vector_width: int
    default_dimensions: int
    prompts: _containers.ScalarMap[str, str]
    default_prompt_name: str
    similarity: str
    space_id: str
    tasks: _containers.RepeatedCompositeFieldContainer[TaskInfo]
    multi_vector_width: int
    multi_vector_similarity: str
    sparse_width: int
    max_outputs: int
    score_method: ScoreMethod
    labels: _containers.RepeatedScalarFieldContainer[str]
    activation: Activation
    takes_pairs_only: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., is_default: bool = ..., d_model: _Optional[int] = ..., n_layers: _Optional[int] = ..., n_heads: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., has_tokenizer: bool = ..., special_token_ids: _Optional[_Iterable[int]] = ..., pooling: _Optional[_Union[OutputKind, str]] = ..., l2_normalize: bool = ..., provider: _Optional[str] = ..., precision: _Optional[str] = ..., max_request_sequences: _Optional[int] = ..., max_text_bytes: _Optional[int] = ..., max_response_bytes: _Optional[int] = ..., ready: bool = ..., not_ready_reason: _Optional[str] = ..., max_request_tokens: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., input_kind: _Optional[_Union[InputKind, str]] = ..., can_inspect: bool = ..., max_inspect_tokens: _Optional[int] = ..., position: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[PartParameters, _Mapping]]] = ..., vector_width: _Optional[int] = ..., default_dimensions: _Optional[int] = ..., prompts: _Optional[_Mapping[str, str]] = ..., default_prompt_name: _Optional[str] = ..., similarity: _Optional[str] = ..., space_id: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[TaskInfo, _Mapping]]] = ..., multi_vector_width: _Optional[int] = ..., multi_vector_similarity: _Optional[str] = ..., sparse_width: _Optional[int] = ..., max_outputs: _Optional[int] = ..., score_method: _Optional[_Union[ScoreMethod, str]] = ..., labels: _Optional[_Iterable[str]] = ..., activation: _Optional[_Union[Activation, str]] = ..., takes_pairs_only: bool = ...) -> None: ...

class TaskInfo(_message.Message):
    __slots__ = ("task", "prompt_name", "max_tokens", "min_tokens")
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    task: Task
    prompt_name: str
    max_tokens: int
    min_tokens: int
    def __init__(self, task: _Optional[_Union[Task, str]] = ..., prompt_name: _Optional[str] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class PartParameters(_message.Message):
    __slots__ = ("part", "count")
    PART_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    part: str
    count: int
    def __init__(self, part: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
