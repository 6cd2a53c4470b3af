"""A bundle's tokenizer is the one that transformers builds, whatever tokenizer.json says beside its settings."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from encserve_export import Exported, Target, export_hf
from encserve_export.ground.errors import ConfigError, ParityError, TokenizerError, UnsupportedModelError
from encserve_export.kinds import dense
from encserve_export.models import pretrained
from encserve_export.routes import hf
from encserve_export.source.texts import TEXTS, around_tokens
from encserve_export.source.tokenizer import read_tokenizer
from encserve_server.models.tokenizing import TextTokenizer
from encserve_server.models.turns import TurnPool

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
    """As BERT's, with what one wants of it."""
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


def byte_level(*, prefix: bool) -> Tokenizer:
    """As RoBERTa's."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "<mask>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("h", "e")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=prefix)
    tokenizer.add_special_tokens([*tokens[:4], AddedToken("<mask>", lstrip=True)])
    return tokenizer


def unigram() -> Tokenizer:
    """As DeBERTa-v3's was saved by transformers 4: without its splitting of marks."""
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
OF_ITS_OWN = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "pad_token": "[PAD]"}
# By what they are about: the type of model, its tokenizer.json, and its tokenizer_config.json.
DIRECTORIES: dict[str, tuple[str, Callable[[], Tokenizer], Mapping[str, Any]]] = {
    "do_lower_case false": ("bert", wordpiece, BERT | {"do_lower_case": False}),
    "do_lower_case missing": ("bert", lambda: wordpiece(lowercase=False), BERT),
    "do_lower_case of no class": ("bert", lambda: wordpiece(lowercase=False), {"do_lower_case": True}),
    "strip_accents": ("bert", wordpiece, BERT | {"strip_accents": False}),
    "tokenize_chinese_chars": ("bert", wordpiece, BERT | {"tokenize_chinese_chars": False}),
    "clean_text": ("bert", lambda: wordpiece(clean_text=False), BERT),
    "max_input_chars_per_word": ("bert", lambda: wordpiece(max_input_chars_per_word=200), BERT),
    "extra_special_tokens": ("bert", wordpiece, BERT | {"extra_special_tokens": ["cat", "Qz"]}),
    "split_special_tokens": ("bert", wordpiece, BERT | {"split_special_tokens": True}),
    "another special token": ("bert", wordpiece, BERT | {"mask_token": "the"}),
    "another class": ("bert", wordpiece, OF_ITS_OWN | {"do_lower_case": False}),
    "no settings": ("bert", wordpiece, {}),
    "add_prefix_space": ("roberta", lambda: byte_level(prefix=False), {"add_prefix_space": True}),
    "no add_prefix_space": ("roberta", lambda: byte_level(prefix=True), {"tokenizer_class": "RobertaTokenizer"}),
    "add_bos_token and add_eos_token": (
        "bert",
        wordpiece,
        OF_ITS_OWN | {"bos_token": "[CLS]", "eos_token": "[MASK]", "add_bos_token": False, "add_eos_token": True},
    ),
    "DeBERTa-v3 of transformers 4": ("deberta-v2", unigram, {"tokenizer_class": "DebertaV2Tokenizer"}),
}


def write_directory(
    folder: Path, name: str, *, modules: bool, transformer: Mapping[str, Any] | None = None, **settings: Any
) -> Path:
    """Writes a directory of `DIRECTORIES`, with more of tokenizer_config.json, and of sentence-transformers' files."""
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
        (folder / "modules.json").write_text(
            json.dumps(
                [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(listed)]
            )
        )
        (folder / "1").mkdir()
        (folder / "1" / "config.json").write_text('{"embedding_dimension": 16, "pooling_mode": "mean"}')
        (folder / "sentence_bert_config.json").write_text(json.dumps(transformer or {}))
    return folder


def export(directory: Path, **options: Any) -> Exported:
    return export_hf(directory, Target(model_repository=directory.parent / "models", name="m"), **options)


def served_ids(exported: Exported, texts: list[str]) -> list[list[int]]:
    """The ids that the server gives."""
    text = exported.manifest.text
    tokenizer = TextTokenizer(
        exported.path / text.tokenizer_file,
        TurnPool(1),
        2**20,
        split_special_tokens=text.split_special_tokens,
    )
    made = tokenizer.tokenize_here(texts, 10_000, details=False)
    return [it.input.tolist() for it in made if not isinstance(it, str)]


@pytest.mark.parametrize(
    "modules", [pytest.param(True, marks=pytest.mark.system), False], ids=["modules", "no modules"]
)
@pytest.mark.parametrize("name", DIRECTORIES)
def test_ids_and_vectors_are_those_of_transformers(name: str, modules: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write_directory(tmp_path / "directory", name, modules=modules)
    exported = export(directory)
    theirs = AutoTokenizer.from_pretrained(directory)
    texts = [*TEXTS, *around_tokens(theirs.get_added_vocab())]
    assert served_ids(exported, texts) == theirs(texts)["input_ids"]
    parity = exported.manifest.parity
    assert parity.pipeline_texts >= 8
    assert parity.max_pipeline_error <= 1e-4


def ship_as_it_is(of: Any, path: Path, *, made_of: Path | None = None, **_: Any) -> Any:
    return read_tokenizer(made_of or of / "tokenizer.json")


@pytest.mark.parametrize("modules", [True, False], ids=["modules", "no modules"])
@pytest.mark.parametrize("name", ["do_lower_case false", "split_special_tokens", "no add_prefix_space"])
def test_another_tokenizer_is_refused(
    name: str, modules: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name_of_writer in ("convert_tokenizer", "write_tokenizer"):
        monkeypatch.setattr(hf, name_of_writer, ship_as_it_is)
    directory = write_directory(tmp_path / "directory", name, modules=modules)
    with pytest.raises(ParityError, match=r"for the text '.*the bundle gives the ids \[.*transformers \[.*Save the"):
        export(directory)
    assert not (tmp_path / "models").exists()


def test_a_directory_that_sentence_transformers_cannot_load_is_refused(tmp_path: Path) -> None:
    method = {"method": "forward", "method_output_name": "last_hidden_state"}
    transformer = {"modality_config": {"text": method}}  # which asks for a module_output_name
    directory = write_directory(tmp_path / "directory", "no settings", modules=True, transformer=transformer)
    with pytest.raises(UnsupportedModelError, match="sentence-transformers cannot load .*directory: ValueError"):
        export(directory)
    assert not (tmp_path / "models").exists()


def test_a_tokenizer_in_python_alone_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "directory", "no settings", modules=False, tokenizer_class="CanineTokenizer")
    with pytest.raises(TokenizerError, match=r"is a CanineTokenizer, which runs in Python alone and has no file"):
        export(directory)


@pytest.mark.parametrize("modules", [True, False], ids=["modules", "no modules"])
def test_another_length_is_refused(modules: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was misread, and not asked for."""
    monkeypatch.setattr(dense, "longest_text", lambda _: 48)
    transformer = {"max_seq_length": 50}
    directory = write_directory(tmp_path / "directory", "no settings", modules=modules, transformer=transformer)
    if modules:
        with pytest.raises(ParityError, match="cuts texts of no task to 48 tokens, sentence-transformers to 50"):
            export(directory)
    monkeypatch.undo()
    assert export(directory, max_sequence_tokens=48).manifest.encoder.max_sequence_tokens == 48


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MESSAGES = {
    "modality_config": {
        "text": {"method": "forward", "method_output_name": "last_hidden_state"},
        "message": {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"},
    },
    "module_output_name": "token_embeddings",
    "max_seq_length": 60,
}


def write_chat(folder: Path, template: str = CHATML, **transformer: Any) -> Path:
    directory = write_directory(
        folder,
        "no settings",
        modules=True,
        transformer=MESSAGES | transformer,
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )
    prompts = {"query": "Find passages: ", "document": ""}
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return directory


@pytest.mark.parametrize("transformer", [{}, {"processing_kwargs": {"chat_template": {"restore_suffix": False}}}])
def test_a_chat_template_of_fixed_texts(transformer: dict[str, Any], tmp_path: Path) -> None:
    """With and without a prompt, and where a text is cut."""
    manifest = export(write_chat(tmp_path / "directory", **transformer)).manifest
    template = manifest.text.template
    assert (template.before, template.after) == (
        "<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant",
    )
    assert (template.before_prompt, template.after_prompt) == (
        "<|im_start|>system\n",
        "<|im_end|>\n<|im_start|>user\n",
    )
    assert bool(template.after_tokens) != bool(transformer)
    assert manifest.parity.pipeline_texts >= 24


def test_a_chat_template_without_a_pooling(tmp_path: Path) -> None:
    """Rows are compared, with the prompts that messages have."""
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
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", "changes a text or writes it several times"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", "writes it several times"),
        ("nothing", "or not at all"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}{{ messages[-1].content }}",
            "fails for a prompt, which becomes a system message",
        ),
        ("{{ strftime_now('%d') }} {{ messages[0].content }}", "writes the date of the day"),
        (CHATML + "{% if messages[0].role == 'system' %}!{% endif %}", "ends otherwise where there is a prompt"),
        (CHATML + "{% if task == 'query' %}?{% endif %}", "treats queries and documents differently"),
        ("{{ messages[-1].content if messages[-1].content | length < 30 else 'x' }}", "changes|ids"),
    ],
)
def test_another_chat_template_is_refused(template: str, problem: str, tmp_path: Path) -> None:
    directory = write_chat(tmp_path / "directory", template)
    with pytest.raises((UnsupportedModelError, ParityError), match=problem):
        export(directory)
    assert not (tmp_path / "models").exists()


def test_a_misread_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is compared with a misread model alone would pass."""
    load = pretrained.load_model

    def misread(*arguments: Any) -> Any:
        reference = load(*arguments)
        for part in reference.module.modules():
            if isinstance(part, torch.nn.LayerNorm):
                part.eps = 1e-3
        return reference

    monkeypatch.setattr(pretrained, "load_model", misread)
    directory = write_directory(tmp_path / "directory", "no settings", modules=False)
    with pytest.raises(ParityError, match=r"gives another vector than transformers for the text '.*' with no prompt"):
        export(directory)
    assert not (tmp_path / "models").exists()


def test_ids_only_beside_a_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "directory", "no settings", modules=False)
    with pytest.raises(ConfigError, match="--ids-only is for a directory without a tokenizer, and .* has one"):
        export(directory, ids_only=True)
    assert not (tmp_path / "models").exists()


def test_without_a_tokenizer_rows_are_compared_too(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "directory", "no settings", modules=False)
    (directory / "tokenizer.json").unlink()
    parity = export(directory, ids_only=True).manifest.parity
    assert parity.pipeline_texts == 1
    assert parity.max_pipeline_error <= 1e-4
