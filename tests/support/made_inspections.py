"""Makes random results of the RPC Inspect. The results look like the results of a trained model."""

import numpy as np
import numpy.typing as npt

from encserve_client.results import InspectResult, ModelInfo, SequenceInfo, Timings

TOKENS = ("[CLS]", "i", "understand", "this", ",", "i", "think", "[SEP]")
FINGERPRINT = "5f0c6d1f6bb84e4a9c3e7d2f8a1b0c9d"

Floats = npt.NDArray[np.float32]


def make_attention(n_layers: int, n_heads: int, seq: int) -> Floats:
    """Make attention weights, in the shape (n_layers, n_heads, seq, seq).

    A head attends to the previous token, to the first token, to near tokens, or to all tokens.
    """
    random = np.random.default_rng(0)
    places = np.arange(seq)
    distance = places[:, None] - places[None, :]  # (seq, seq)
    scores = random.normal(0, 0.8, (n_layers, n_heads, seq, seq))
    for layer in range(n_layers):
        for head in range(n_heads):
            kind = (layer + head) % 4
            if kind == 0:
                scores[layer, head] += 4.0 * (distance == 1)
            elif kind == 1:
                scores[layer, head][:, 0] += 2.0 + 3.0 * layer / max(n_layers - 1, 1)
            elif kind == 2:
                scores[layer, head] -= 0.6 * np.abs(distance)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), np.float32)


def make_states(n_layers: int, seq: int, d_model: int) -> Floats:
    """Make hidden states, in the shape (n_layers + 1, seq, d_model).

    From layer to layer, the vectors become longer and more similar.
    """
    random = np.random.default_rng(1)
    rows = random.normal(0, 0.3, (seq, d_model))
    shared = random.normal(0, 1, d_model)
    states = [rows]
    for layer in range(n_layers):
        step = random.normal(0, 0.22, (seq, d_model)) + 0.07 * (layer + 1) / n_layers * shared
        states.append(states[-1] + step)
    return np.asarray(states, np.float32)


def make_positions(n_places: int, d_model: int) -> Floats:
    """Compute the sinusoidal position table of Vaswani et al. 2017, section 3.5, in the shape (n_places, d_model)."""
    rates = 10000.0 ** (-np.arange(0, d_model, 2) / d_model)
    angles = np.arange(n_places)[:, None] * rates[None, :]
    table = np.empty((n_places, d_model))
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles[:, : d_model // 2])
    return np.asarray(table, np.float32)


def make_inspection(
    n_layers: int = 6,
    n_heads: int = 12,
    d_model: int = 384,
    tokens: tuple[str, ...] | int = TOKENS,
    *,
    position: str = "sinusoidal",
    max_sequence_tokens: int = 512,
) -> tuple[InspectResult, ModelInfo]:
    """Make a result of the RPC Inspect, and the ModelInfo of the inspected model.

    If `tokens` is a number, the result has this number of tokens. The tokens of `TOKENS` are repeated.
    """
    if isinstance(tokens, int):
        tokens = tuple(TOKENS[i % len(TOKENS)] for i in range(tokens))
    seq = len(tokens)
    known = {token: 101 + 97 * i for i, token in enumerate(dict.fromkeys(tokens))}
    sequence = SequenceInfo(
        token_count=seq,
        original_token_count=seq,
        truncated=False,
        token_ids=np.array([known[token] for token in tokens], np.int64),
        offsets=np.zeros((seq, 2), np.int64),
        special=np.array([token in ("[CLS]", "[SEP]") for token in tokens], np.bool_),
        tokens=tokens,
    )
    result = InspectResult(
        model="all-MiniLM-L6-v2",
        version="1",
        fingerprint=FINGERPRINT,
        sequence=sequence,
        attention=make_attention(n_layers, n_heads, seq),
        attention_layers=tuple(range(n_layers)),
        hidden_states=make_states(n_layers, seq, d_model),
        hidden_state_layers=tuple(range(n_layers + 1)),
        positions=None if position in ("", "none") else make_positions(max_sequence_tokens, d_model),
        timings=Timings(0.0004, 0.0001, 0.0117, 0.0163, messages=1, attempts=1),
    )
    per_layer = d_model * d_model
    model = ModelInfo(
        name="all-MiniLM-L6-v2",
        version="1",
        fingerprint=FINGERPRINT,
        is_default=True,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        vocab_size=30522,
        max_sequence_tokens=max_sequence_tokens,
        has_tokenizer=True,
        special_token_ids=(0, 101, 102),
        pooling="mean",
        l2_normalize=True,
        provider="CPUExecutionProvider",
        precision="float32",
        max_request_sequences=256,
        max_request_tokens=65536,
        max_text_bytes=262144,
        max_request_bytes=4 * 2**20,
        max_response_bytes=64 * 2**20,
        ready=True,
        not_ready_reason="",
        can_inspect=True,
        max_inspect_tokens=max_sequence_tokens,
        position=position,
        parameters={
            "embedding": 30522 * d_model,
            "attention": 4 * n_layers * (per_layer + d_model),
            "feed_forward": n_layers * (8 * per_layer + 5 * d_model),
            "norm": 4 * n_layers * d_model,
        },
    )
    return result, model
