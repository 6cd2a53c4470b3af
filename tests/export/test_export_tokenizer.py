"""A bundle's tokenizer returns the same ids as transformers, even if files of the directory contradict each other."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_models import WORDS, write_encoder, write_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from encserve_export import Exported, Target, export_hf
from encserve_export.check import pipeline
from encserve_export.core.errors import ConfigError, ParityError, TokenizerError, UnsupportedModelError
from encserve_export.kinds import dense
from encserve_export.kinds.reading import read
from encserve_export.source.tokenizer import load_tokenizer, open_tokenizer, read_tokenizer, write_tokenizer
from encserve_export.source.tokenizer_probes import difficult_texts
from encserve_server.errors import InvalidField
from encserve_server.offline import Embedder

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(it) for it in range(33, 127)] + list("äöüéèêñçßøåÅÉ東京大阪我喜欢あア가각МоскваЁмосквё。！ﬁﾊ")
PIECES = dict.fromkeys(
    [*LETTERS, *(f"##{it}" for it in LETTERS), "the", "cat", "Cat", "caf", "nai", "ive", "##ive", "NASA"]
)
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 260,
    "type_vocab_size": 2,
}


def wordpiece(**settings: Any) -> Tokenizer:
    """Return a WordPiece tokenizer, such as the tokenizer of BERT."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *PIECES])}
    longest = settings.pop("max_input_chars_per_word", 100)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=longest))
    tokenizer.normalizer = normalizers.BertNormalizer(**settings)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_level(*, prefix: bool, **settings: Any) -> Tokenizer:
    """Return a byte-level BPE tokenizer, such as the tokenizer of RoBERTa."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "<mask>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("h", "e")], unk_token="<unk>", **settings))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=prefix)
    tokenizer.add_special_tokens([*tokens[:4], AddedToken("<mask>", lstrip=True)])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a unigram tokenizer, such as the tokenizer of DeBERTa-v3 in a file from transformers 4.

    This tokenizer does not split off punctuation.
    """
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "▁", "▁the", "▁cat", *LETTERS]
    tokenizer = Tokenizer(models.Unigram([(it, -float(i)) for i, it in enumerate(pieces)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens([*pieces[:4], "[MASK]"])
    return tokenizer


BERT = {"tokenizer_class": "BertTokenizer"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": "[PAD]"}
# For each directory: the model type, the content of tokenizer.json, and the content of tokenizer_config.json. The two
# files may contradict each other.
DIRECTORIES: dict[str, tuple[str, Callable[[], Tokenizer], Mapping[str, Any]]] = {
    "do_lower_case false": ("bert", wordpiece, BERT | {"do_lower_case": False}),
    "do_lower_case missing": ("bert", lambda: wordpiece(lowercase=False), BERT),
    "do_lower_case without a class": ("bert", lambda: wordpiece(lowercase=False), {"do_lower_case": True}),
    "strip_accents": ("bert", wordpiece, BERT | {"strip_accents": False}),
    "tokenize_chinese_chars": ("bert", wordpiece, BERT | {"tokenize_chinese_chars": False}),
    "clean_text": ("bert", lambda: wordpiece(clean_text=False), BERT),
    "max_input_chars_per_word": ("bert", lambda: wordpiece(max_input_chars_per_word=200), BERT),
    "extra_special_tokens": ("bert", wordpiece, BERT | {"extra_special_tokens": ["cat", "Qz"]}),
    "split_special_tokens": ("bert", wordpiece, BERT | {"split_special_tokens": True}),
    "another special token": ("bert", wordpiece, BERT | {"mask_token": "the"}),
    "another class": ("bert", wordpiece, FAST | {"do_lower_case": False}),
    "no settings": ("bert", wordpiece, {}),
    "add_prefix_space": ("roberta", lambda: byte_level(prefix=False), {"add_prefix_space": True}),
    "no add_prefix_space": ("roberta", lambda: byte_level(prefix=True), {"tokenizer_class": "RobertaTokenizer"}),
    "add_bos_token and add_eos_token": (
        "bert",
        wordpiece,
        FAST | {"bos_token": "[CLS]", "eos_token": "[MASK]", "add_bos_token": False, "add_eos_token": True},
    ),
    "DeBERTa-v3 of transformers 4": ("deberta-v2", unigram, {"tokenizer_class": "DebertaV2Tokenizer"}),
}


def write_directory(
    folder: Path, name: str, *, modules: bool = False, transformer: Mapping[str, Any] | None = None, **settings: Any
) -> Path:
    """Write one of the `DIRECTORIES`.

    Add `settings` to tokenizer_config.json. If `modules` is true, also write a modules.json.
    """
    from transformers import AutoConfig, AutoModel

    model_type, tokenizer, config = DIRECTORIES[name]
    folder.mkdir()
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(config) | settings))
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": tokenizer().get_vocab_size() + 8, "pad_token_id": 0}
    AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)).save_pretrained(folder)
    if modules:
        listed = [("", "sentence_transformers.models.Transformer"), ("1", "sentence_transformers.models.Pooling")]
        listing = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(listed)]
        (folder / "modules.json").write_text(json.dumps(listing))
        (folder / "1").mkdir()
        (folder / "1" / "config.json").write_text('{"embedding_dimension": 16, "pooling_mode": "mean"}')
        (folder / "sentence_bert_config.json").write_text(json.dumps(transformer or {}))
    return folder


def export(directory: Path, **options: Any) -> Exported:
    return export_hf(directory, Target(model_repository=directory.parent / "models", name="m"), **options)


def change(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_bundle_tokenizer_gives_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = load_tokenizer(write_directory(tmp_path / "directory", name))
    path = tmp_path / "tokenizer.json"
    file = write_tokenizer(theirs, path, made_of=None, add_special_tokens=True)
    ours, texts = open_tokenizer(path, split_special_tokens=file.split_special_tokens), difficult_texts(theirs)
    assert [it.ids for it in ours.encode_batch(texts)] == theirs(texts)["input_ids"]


@pytest.mark.system
@pytest.mark.parametrize("modules", [True, False], ids=["modules", "no modules"])
@pytest.mark.parametrize("name", ["do_lower_case false", "split_special_tokens", "no add_prefix_space"])
def test_the_comparison_finds_another_tokenizer(
    name: str, modules: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_directory(tmp_path / "directory", name, modules=modules)
    parity = export(directory).manifest.parity
    assert parity.pipeline_texts >= 8
    assert parity.max_pipeline_error <= 1e-4
    as_in_the_directory = lambda *_, made_of, **__: read_tokenizer(made_of)  # noqa: E731
    monkeypatch.setattr("encserve_export.routes.hf.write_tokenizer", as_in_the_directory)
    with pytest.raises(ParityError, match=r"for the text '.*the bundle gives the ids \[.*transformers gives \[.*Save"):
        export_hf(directory, Target(model_repository=tmp_path / "other", name="m"))
    assert not (tmp_path / "other").exists()


@pytest.mark.system
def test_a_tokenizer_that_runs_only_in_python_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "directory", "no settings", tokenizer_class="CanineTokenizer")
    with pytest.raises(TokenizerError, match=r"is a CanineTokenizer, which runs only in Python and cannot be written"):
        export(directory)


def test_a_tokenizer_with_random_ids_is_refused(tmp_path: Path) -> None:
    byte_level(prefix=True, dropout=0.1).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"its BPE model has dropout 0.1, so the ids of a text are random"):
        read_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.system
@pytest.mark.parametrize("modules", [True, False], ids=["modules", "no modules"])
def test_texts_with_an_added_token_without_an_embedding_are_refused(modules: bool, tmp_path: Path) -> None:
    """Export a tokenizer with an added token, and a model whose embedding table has no row for this token.

    The bundle must refuse texts with this token, and must encode all other texts. EmbeddingGemma has such a token.
    """
    added: dict[str, Any] = {"extra_special_tokens": ["<image>"]}
    if modules:
        write_model(tmp_path / "directory", encoder=added)
    else:
        (tmp_path / "directory").mkdir()
        write_encoder(tmp_path / "directory", **added)
    exported = export(tmp_path / "directory", pooling=None if modules else "mean")
    vocab_size = exported.manifest.encoder.vocab_size
    assert vocab_size == len(SPECIAL) + len(WORDS)
    assert "no embedding for the added tokens '<image>'" in exported.notes["remark"]
    with Embedder(exported.path, tune_batches=False) as embedder:
        assert embedder.embed(["the cat", "< image >"]).shape == (2, 24)
        with pytest.raises(InvalidField, match=f"holds '<image>', token {vocab_size}; the vocabulary of m ends at"):
            embedder.embed(["the cat", "the <image> cat"])


@pytest.mark.system
def test_without_special_tokens_an_empty_text_is_refused(tmp_path: Path) -> None:
    """Export a tokenizer without special tokens, and expect that the bundle refuses an empty text.

    sentence-transformers fails for an empty text too.
    """
    directory = write_model(tmp_path / "directory")
    change(directory / "tokenizer.json", post_processor=None)
    exported = export(directory)
    assert exported.manifest.parity.pipeline_texts == 7  # 7 of 8 texts, because the empty text has no vector
    with Embedder(exported.path, tune_batches=False) as embedder, pytest.raises(InvalidField, match="has no tokens"):
        embedder.embed(["the cat", ""])


def test_the_error_names_the_text_that_sentence_transformers_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path / "directory")
    monkeypatch.setattr(pipeline, "_TEXTS", ("Cats",))
    monkeypatch.setattr("sentence_transformers.SentenceTransformer.encode", lambda *_, **__: 1 / 0)
    with pytest.raises(ParityError, match=r"itself fails for the text 'Cats' with no prompt: ZeroDivisionError"):
        export(directory)


@pytest.mark.system
@pytest.mark.parametrize(
    ("model_type", "file"),
    [("t5", "spiece.model"), ("xlm-roberta", "sentencepiece.bpe.model"), ("deberta-v2", "spm.model")],
)
def test_a_directory_with_only_a_sentencepiece_file_is_exported(model_type: str, file: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus").write_text(
        "\n".join(difficult_texts(load_tokenizer(write_directory(tmp_path / "x", "no settings"))))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=tmp_path / "corpus", model_prefix=str(tmp_path / "made"), vocab_size=700, hard_vocab_limit=False,
        minloglevel=2, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
    )  # fmt: skip
    directory = tmp_path / "directory"
    sizes = SIZES | {"vocab_size": 1200, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)).save_pretrained(directory)
    (tmp_path / "made.model").rename(directory / file)
    exported = export(directory)
    theirs = load_tokenizer(directory)
    with Embedder(exported.path, tune_batches=False) as embedder:
        (ids,) = embedder.tokenize(["The cat naïve café"])
    assert list(ids) == theirs("The cat naïve café")["input_ids"]
    assert len(ids) > 4


@pytest.mark.system
def test_a_misread_maximum_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = {"max_seq_length": 50}
    directory = write_directory(tmp_path / "directory", "no settings", modules=True, transformer=transformer)
    monkeypatch.setattr(dense, "read_lengths", lambda *_: {"max_seq_length": 48})
    with pytest.raises(ParityError, match=r"for the text .*\(\d+ characters\) with no prompt the bundle gives the ids"):
        export(directory)
    monkeypatch.undo()
    assert export(directory, max_sequence_tokens=48).manifest.encoder.max_sequence_tokens == 48


@pytest.mark.system
def test_ids_are_compared_up_to_the_given_length_without_modules(tmp_path: Path) -> None:
    """Export with a given maximum length, and expect success.

    In the comparison, transformers must cut texts to the same length. Otherwise, the exporter refuses a correct bundle.
    """
    directory = write_directory(tmp_path / "directory", "no settings", modules=False)
    assert export(directory, max_sequence_tokens=48).manifest.encoder.max_sequence_tokens == 48


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
IN_PARTS = CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
METHOD = {"method": "forward", "method_output_name": "last_hidden_state"}


def write_chat(folder: Path, template: str = CHATML, message_format: str = "flat", **transformer: Any) -> Path:
    messages = {
        "modality_config": {"text": METHOD, "message": METHOD | {"format": message_format}},
        "module_output_name": "token_embeddings",
        "max_seq_length": 60,
    }
    directory = write_directory(
        folder,
        "no settings",
        modules=True,
        transformer=messages | transformer,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )
    prompts = {"query": "Find passages: ", "document": ""}
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return directory


@pytest.mark.system
@pytest.mark.parametrize(
    ("template", "settings"),
    [
        (CHATML, {}),
        (CHATML, {"processing_kwargs": {"chat_template": {"restore_suffix": False}}}),
        (IN_PARTS, {"message_format": "structured"}),
    ],
)
def test_a_chat_template_becomes_fixed_texts(template: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Export a chat template. Expect fixed texts before and after the input text, and before and after a prompt.

    Truncation must keep the tokens after the input text, unless restore_suffix is false.
    """
    manifest = export(write_chat(tmp_path / "directory", template, **settings)).manifest
    found = manifest.text.template
    assert (found.before, found.after) == ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant")
    assert (found.before_prompt, found.after_prompt) == ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n")
    assert bool(found.after_tokens) != ("processing_kwargs" in settings)
    assert manifest.parity.pipeline_texts >= 24


@pytest.mark.system
def test_rows_of_a_model_with_a_chat_template_are_compared(tmp_path: Path) -> None:
    directory = write_chat(tmp_path / "directory")
    path = directory / "modules.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:1]))
    exported = export(directory)
    assert exported.manifest.text.template.before == "<|im_start|>user\n"
    assert exported.manifest.parity.pipeline_texts >= 8
    assert exported.notes["compared with"] == "sentence-transformers"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", "changes a text, or writes it several times"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", "writes it several times"),
        ("nothing", "or not at all"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}{{ messages[-1].content }}",
            "fails for a prompt, which becomes a system message",
        ),
        ("{{ strftime_now('%d') }} {{ messages[0].content }}", "writes the date"),
        (
            CHATML + "{% if messages[0].role == 'system' %}!{% endif %}",
            "a prompt changes the end that the chat template adds",
        ),
        (CHATML + "{% if task == 'query' %}?{% endif %}", "treats queries and documents differently"),
    ],
)
def test_other_chat_templates_are_refused(template: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        read(write_chat(tmp_path / "directory", template))


@pytest.mark.system
def test_a_chat_template_that_changes_some_texts_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if m.content | length < 30 else 'x' }}{% endfor %}"
    with pytest.raises(ParityError, match="the bundle gives the ids"):
        export(write_chat(tmp_path / "directory", template))


@pytest.mark.usefixtures("_misread_eps")
def test_a_misread_configuration_is_refused(tmp_path: Path) -> None:
    """The exporter reads a wrong eps. Only the comparison with transformers finds this fault."""
    directory = write_directory(tmp_path / "directory", "no settings", modules=False)
    with pytest.raises(ParityError, match="transformers"):
        export(directory)
    assert not (tmp_path / "models").exists()


def test_ids_only_is_refused_for_a_directory_with_a_tokenizer(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "directory", "no settings")
    with pytest.raises(ConfigError, match="--ids-only is for a directory without a tokenizer, but .* has a tokenizer"):
        export(directory, ids_only=True)
