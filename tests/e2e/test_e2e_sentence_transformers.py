"""A directory means what its authors meant: with no option given, it serves what sentence-transformers gives."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import minilm_directory
from exporting import export_once
from real_server import real_server
from sentence_models import D_MODEL, LONGEST, text_of, write_model

from encserve_client import AsyncEncoderClient, EncoderClient, InvalidRequestError, Output
from encserve_export import Target, export_hf
from encserve_export.ground.errors import TokenizerError

TOLERANCE = 1e-4
TEXTS = ["", "the cat", "the [MASK]cat[SEP]", *(text_of(n, seed=n) for n in (1, 3, 17, 60, 93, 94, 95, 130, 600))]
TANH, GELU = "torch.nn.modules.activation.Tanh", "torch.nn.modules.activation.GELU"
MARKS = ["<|user|>", "<|system|>", "<|end|>"]
CHAT = "{% for it in messages %}<|{{ it.role }}|> {{ it.content }} <|end|>{% endfor %} we like"
METHOD = {"method": "forward", "method_output_name": "last_hidden_state"}
MESSAGES = {
    "modality_config": {"text": METHOD, "message": {**METHOD, "format": "flat"}},
    "module_output_name": "token_embeddings",
}
IDENTITY = "torch.nn.modules.linear.Identity"
PROMPTS = {"query": "Query: ", "passage": "passage: ", "instruction": "Represent this passage: ", "nothing": ""}


def pooling(*modes: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "Pooling", {"pooling_mode": modes[0] if len(modes) == 1 else list(modes), **more}


def dense(width: int, out: int, activation: str = TANH, **more: Any) -> tuple[str, dict[str, Any]]:
    return "Dense", {"in_features": width, "out_features": out, "activation_function": activation, **more}


NORMALIZE: tuple[str, dict[str, Any]] = ("Normalize", {})
EVERY = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
FLAGS = {f"pooling_mode_{name}": True for name in ("mean_tokens", "cls_token", "lasttoken")}
DIRECTORIES: dict[str, dict[str, Any]] = {
    **{mode: {"modules": [pooling(mode)]} for mode in EVERY},
    "every-pooling": {"modules": [pooling(*reversed(EVERY)), NORMALIZE]},
    "flags": {"modules": [("Pooling", FLAGS)], "version": 5},
    "old-folders": {"modules": [pooling("mean"), NORMALIZE], "version": 5, "transformer_folder": "0_Transformer"},
    "dense": {"modules": [pooling("mean"), dense(D_MODEL, 10)]},
    "several-dense": {
        "modules": [
            pooling("mean", "max"),
            dense(2 * D_MODEL, 16, GELU),
            NORMALIZE,
            dense(16, 16, IDENTITY, bias=False, use_residual=True),
            ("LayerNorm", {"dimension": 16}),
            ("Dropout", {"dropout": 0.5}),
            dense(16, 7, use_residual=True),
            NORMALIZE,
        ]
    },
    "prompts": {"settings": {"prompts": PROMPTS}},
    "default-prompt": {"settings": {"prompts": PROMPTS, "default_prompt_name": "query", "similarity_fn_name": "dot"}},
    "prompt-left-out": {
        "modules": [pooling(*EVERY, include_prompt=False), dense(6 * D_MODEL, 12), NORMALIZE],
        "settings": {"prompts": PROMPTS, "default_prompt_name": "instruction"},
    },
    "short": {"transformer": {"max_seq_length": 20}},
    "short-by-tokenizer": {"encoder": {"model_max_length": 30}},
    "lengths-of-tasks": {
        "transformer": {"max_seq_length": 50, "query_length": 8, "document_length": 30},
        "settings": {"prompts": PROMPTS, "default_prompt_name": "instruction"},
    },
    "tokenizer-args": {"transformer": {"max_seq_length": 50, "tokenizer_args": {"model_max_length": 25}}},
    "lower-case": {"transformer": {"max_seq_length": LONGEST, "do_lower_case": True}},
    "lower-case-twice": {"transformer": {"do_lower_case": True}, "encoder": {"lowercase": True}},
    "cut": {"modules": [pooling("mean"), NORMALIZE], "settings": {"truncate_dim": 8}},
    "cut-wider": {"modules": [pooling("cls")], "settings": {"truncate_dim": 999}},
    "special-tokens-split": {"encoder": {"split_special_tokens": True}},
    "messages": {
        "modules": [pooling("lasttoken", "mean", include_prompt=False)],
        "settings": {"prompts": PROMPTS, "default_prompt_name": "query"},
        "transformer": MESSAGES | {"max_seq_length": 40, "query_length": 12},
        "encoder": {"more_words": [*MARKS, "0", "4"], "extra_special_tokens": MARKS, "chat_template": CHAT},
    },
    "all-of-it": {
        "modules": [pooling("weightedmean", "cls", include_prompt=False), dense(2 * D_MODEL, 32), NORMALIZE],
        "settings": {"prompts": PROMPTS, "default_prompt_name": "query", "truncate_dim": 16},
        "transformer": {"max_seq_length": 40, "do_lower_case": True},
        "transformer_folder": "0_Transformer",
    },
}
MINILM = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("directories")
    made = {name: write_model(folder / name, **its) for name, its in DIRECTORIES.items()}
    return {**made, MINILM: minilm_directory()}


@pytest.fixture(scope="module")
def client(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderClient]:
    models = tmp_path_factory.mktemp("models")
    for name, directory in directories.items():
        parity = export_once(export_hf, directory, target=Target(model_repository=models, name=name)).manifest.parity
        assert parity.pipeline_texts >= 5, name
        assert parity.max_pipeline_error <= TOLERANCE
    flags = [flag for name in directories for flag in ("--model", name)]
    with real_server(models, *flags) as server, EncoderClient(server.target) as client:
        yield client


def theirs(directory: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu", local_files_only=True)


def worst(got: Any, want: Any) -> float:
    assert got.shape == want.shape
    norms = np.linalg.norm(want, axis=1)
    return float((np.linalg.norm(got - want, axis=1) / np.where(norms > 0, norms, 1)).max())


@pytest.mark.parametrize("name", [*DIRECTORIES, MINILM])
def test_vectors_are_those_of_sentence_transformers(
    name: str, directories: dict[str, Path], client: EncoderClient
) -> None:
    """Alone and together, with the default prompt and with each by its name."""
    model = theirs(directories[name])
    texts = TEXTS if name != MINILM else [*TEXTS, "Grüße aus Köln, 東京 и Москва 🌍", "a " * 300]
    want = model.encode(texts)
    assert worst(client.embed(texts, model=name, truncate=True), want) <= TOLERANCE
    alone = np.concatenate([client.embed([text], model=name, truncate=True) for text in texts[:5]])
    assert worst(alone, want[:5]) <= TOLERANCE
    info = client.model(name)
    assert info.prompts == model.prompts
    for prompt_name in info.prompts:
        got = client.embed(texts, model=name, truncate=True, prompt_name=prompt_name)
        assert worst(got, model.encode(texts, prompt_name=prompt_name)) <= TOLERANCE
    without = client.embed(texts, model=name, truncate=True, prompt_name="")
    assert worst(without, model.encode(texts, prompt="")) <= TOLERANCE
    assert client.embed([], model=name).shape == (0, want.shape[1])
    assert (info.similarity or "cosine") == model.similarity_fn_name
    assert info.default_prompt_name == (model.default_prompt_name or "")
    assert (info.default_dimensions or info.vector_width) == model.get_embedding_dimension()


@pytest.mark.parametrize("name", ["cut", "every-pooling", "prompt-left-out"])
@pytest.mark.parametrize("l2_normalize", [False, True])
def test_vectors_are_cut_as_there(
    name: str, l2_normalize: bool, directories: dict[str, Path], client: EncoderClient
) -> None:
    """After the model's own normalising, and before the caller's."""
    want = theirs(directories[name]).encode(TEXTS, truncate_dim=5, normalize_embeddings=l2_normalize)
    output = Output("model", l2_normalize=l2_normalize, dimensions=5)
    result = client.run(TEXTS, outputs=[output, Output("cls", dimensions=3)], model=name, truncate=True)
    assert worst(result.outputs[0].matrix(), want) <= TOLERANCE
    assert result.outputs[0].l2_normalized == l2_normalize
    assert result.outputs[1].matrix().shape == (len(TEXTS), 3)


async def test_every_way_to_call_takes_a_prompt(client: EncoderClient) -> None:
    model, texts = "default-prompt", ["the cat", "sat on"]
    want = client.embed(texts, model=model, prompt_name="passage", dimensions=9)
    streamed = client.embed_stream(texts, pooling="model", model=model, prompt_name="passage", dimensions=9)
    assert worst(np.stack(list(streamed)), want) <= TOLERANCE
    target = client._target
    async with AsyncEncoderClient(target) as other:
        assert worst(await other.embed(texts, model=model, prompt_name="passage", dimensions=9), want) <= TOLERANCE
        (rows,) = await other.encode(texts[:1], model=model, prompt_name="passage")
    assert len(rows) == 6  # [CLS] passage : the cat [SEP]


def test_a_prompts_tokens_stand_nowhere_in_the_text(client: EncoderClient) -> None:
    (info,) = client.run(["the cat"], model="prompts", prompt_name="instruction").sequences
    assert info.offsets is not None
    assert info.offsets.tolist() == [[0, 0]] * 5 + [[0, 3], [4, 7], [0, 0]]
    assert client.inspect("the cat", model="default-prompt").sequence.token_count == 6


def test_what_a_chat_template_puts_around_a_text_is_special(client: EncoderClient) -> None:
    (info,) = client.run(["the cat"], model="messages", prompt_name="query").sequences
    assert info.offsets is not None
    assert info.special is not None
    assert info.offsets.tolist() == [[0, 0]] * 5 + [[0, 3], [4, 7]] + [[0, 0]] * 3
    assert info.special.tolist() == [True] * 5 + [False] * 2 + [True] * 3
    (rows,) = client.encode(["the cat"], model="messages", exclude_special_tokens=True)
    assert len(rows) == 2


def test_ids_have_no_prompt(client: EncoderClient) -> None:
    ids = [2, 5, 6, 3]
    with_ids = client.embed([ids], model="default-prompt")
    assert worst(with_ids, client.embed(["the cat"], model="default-prompt", prompt_name="")) <= TOLERANCE
    with pytest.raises(
        InvalidRequestError, match=r"options.prompt_name: goes before texts only; inputs\[1\] is not a text"
    ):
        client.embed(["the cat", ids], model="default-prompt", prompt_name="query")
    with pytest.raises(InvalidRequestError, match="must be texts, or else sequences of ids"):
        client.embed(["the cat", ids], model="prompt-left-out")
    assert client.embed([ids], model="prompt-left-out").shape == (1, 12)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"prompt_name": "summary"},
            "has no prompt 'summary'; it has 'document', 'instruction', 'nothing', 'passage', ",
        ),
        ({"dimensions": 25}, r"options.outputs\[0\].dimensions: must be at most 24, the numbers of a row; was 25"),
    ],
)
def test_what_the_model_does_not_have(client: EncoderClient, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        client.embed(["the cat"], model="prompts", **options)


def test_a_directory_that_contradicts_itself_is_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    """Two words with one id, of which the tokenizers library writes either one: the error names either's text."""
    directory = shutil.copytree(directories["mean"], tmp_path / "directory")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["The"], tokenizer["model"]["vocab"]["[MASK]"] = 4, 5
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TokenizerError, match=r"a file of the tokenizers library gives the ids .* made of \(BertTok"):
        export_hf(directory, Target(model_repository=tmp_path / "models", name="mean"))
    assert not (tmp_path / "models").exists()
