"""Text <-> token ids, by the model's own tokenizer.json or the vocabulary in its GGUF file; there is no fallback.

Two tokenizers share one model. The *full* one is the file unchanged: it recognises control tokens (`<|im_end|>`,
`<think>`) in a text, so only text that Cairn itself wrote may go through it. The *plain* one knows each control token
by an alias that nobody can type, so control tokens in a text are ordinary text; for those that a chat template wrote,
`encode_rendered` inserts the alias. Both split, normalise and merge alike, so all other ids are equal.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from cairn.models.families.end_tokens import UNMISTAKABLE, Middle, known_ends, known_middle
from cairn.models.files import (
    MAX_JSON_VALUES,
    MAX_TOKENIZER_BYTES,
    is_gguf,
    most_values,
    read_optional_json,
    read_small,
)
from cairn.models.spec.tokenizer_files import companions
from cairn.text.tokens.control_tokens import Controls, is_control
from cairn.text.tokens.detokenizer import Decoding, Detokenizer
from cairn.text.tokens.post_processor import affixes
from cairn.text.tokens.tokenizer_checks import check_added, fault, no_panic
from cairn.types.errors import InvalidRequest, ModelFileError

if TYPE_CHECKING:
    from cairn.models.gguf.reader import Gguf

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special token names of transformers; chat templates may use them as variables."""
INLINE = 4_096
"""Most characters or tokens to process on the event loop; more would delay other requests."""
MENDED_AT_ONCE = 1 << 16
"""Characters of a piece in which surrogates are replaced."""
MAX_LISTED = 1 << 20
"""Most tokens, and most merges, in a tokenizer.json; the largest models have some 300,000 and 600,000."""
_COMMAS = 1 << 16
"""Allowance for commas and brackets inside the texts of tokens and merges; far more than any vocabulary has."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIR = re.compile("([\ud800-\udbff])([\udc00-\udfff])")


class _Model(msgspec.Struct, frozen=True):
    """The parts of tokenizer.json's `model` that are checked."""

    vocab: msgspec.Raw = msgspec.Raw(b"null")
    merges: msgspec.Raw = msgspec.Raw(b"null")


class _File(msgspec.Struct):
    """The parts of tokenizer.json that the library does not expose."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    model: _Model = _Model()
    added_tokens: list[msgspec.Raw] | None = None


class Tokenizer:
    """One model's tokenizer. Thread-safe."""

    def __init__(
        self,
        library: Library,
        decoder: dict[str, Any] | None,
        config: Mapping[str, Any],
        *,
        begins_chats: bool = False,
        middle: Middle | None = None,
    ) -> None:
        """Take over `library`; `decoder` comes from tokenizer.json, `config` from tokenizer_config.json.

        `begins_chats`: BOS is put before chats too if their template does not write it. `middle`: the
        fill-in-the-middle tokens that the model's file names.
        """
        library.no_truncation()
        library.no_padding()
        if isinstance(library.model, BPE):
            library.model.dropout = None  # a training option that makes tokenization random
        self._full = library
        self._config = config
        self.special_tokens = {name: text for name in SPECIAL_NAMES if (text := _content(config.get(name)))}
        """Name ("bos_token", ...) -> text of the special tokens that the model names."""
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that decoding leaves out."""
        self.controls = Controls({token.content: i for i, token in added.items() if is_control(token)})
        """The control tokens; users' texts must never encode to them."""
        self.control_ids = frozenset(self.controls.ids.values())
        self._decoding = Decoding(library, decoder)
        self.missing_bytes = (
            self._decoding.missing_bytes() if getattr(library.model, "unk_token", None) is None else frozenset()
        )
        """Bytes that the vocabulary lacks; encoding drops them."""
        self._plain, self._real = self._with_aliases(library)
        unk = library.token_to_id(self.special_tokens.get("unk_token", ""))
        model = library.model
        self._spellable = frozenset(i for i in self.control_ids - {unk} if model.id_to_token(i) is not None)
        self._unspellable: tuple[Library, dict[int, int]] | None = None
        self._prefix = self._bos_prefix()
        wants_end = config.get("add_eos_token") is True
        self.affixes = affixes(library, self._prefix, self.eos_id if wants_end else None)
        """Special tokens around whole texts and pairs."""
        self._begins_chats = begins_chats and bool(self._prefix)
        ends = known_ends(library.token_to_id, self.special_ids.__contains__)
        self.end_ids = frozenset(ends if self.eos_id is None else (*ends, self.eos_id))
        """Tokens that end an answer: EOS and tokens with a known spelling. `Chat` adds those of its template."""
        self.middle = middle or known_middle(self.controls.ids)
        """Fill-in-the-middle tokens; None for a model without them."""

    @classmethod
    def load(cls, folder: Path, parsed: Gguf | None = None) -> Tokenizer:
        """Read tokenizer.json and, if present, tokenizer_config.json and special_tokens_map.json; or a GGUF file.

        `parsed` is the GGUF file if it was already read. Raises ModelFileError naming the missing or broken file.
        """
        if is_gguf(folder):
            from cairn.models.gguf.reader import read_gguf  # imported here because it needs numpy
            from cairn.text.tokens import gguf

            read = parsed or read_gguf(folder)
            return cls(*gguf.load_tokenizer(read), begins_chats=True, middle=gguf.named_middle(read))
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelFileError(
                f"{path}: the file is missing; a model folder must hold a tokenizer.json{_vocabulary_hint(folder)}"
            )
        return cls._read(path, folder)

    @classmethod
    def given(cls, path: Path, folder: Path, parsed: Gguf | None = None) -> Tokenizer:
        """Read the tokenizer.json at `path` instead of the model's own. Raises ModelFileError as `load`.

        BOS and EOS come from the files beside it, else from the model in `folder`.
        """
        if companions(path) or not is_gguf(folder):
            return cls._read(path, path.parent if companions(path) else folder)
        from cairn.models.gguf.reader import read_gguf
        from cairn.text.tokens import gguf

        read = parsed or read_gguf(folder)
        return cls._read(path, None, lambda library: gguf.named_tokens(read, library.id_to_token), begins_chats=True)

    @classmethod
    def _read(
        cls,
        path: Path,
        folder: Path | None,
        named: Callable[[Library], dict[str, Any]] | None = None,
        *,
        begins_chats: bool = False,
    ) -> Tokenizer:
        """Read a tokenizer.json with the settings in `folder`, or those that `named` returns if `folder` is None."""
        try:
            text = read_small(path, MAX_TOKENIZER_BYTES, "tokenizer.json")
            file = _checked_file(text, path)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ModelFileError(f"{path}: not a tokenizer.json of the tokenizers library ({error})") from error
        with ThreadPoolExecutor(1) as beside:
            checked = beside.submit(fault, file.normalizer, file.pre_tokenizer)
            library = _library(text.decode(), path)
            vocab = msgspec.json.decode(file.model.vocab)
            if isinstance(vocab, dict) and len(set(vocab.values())) < len(vocab):
                raise ModelFileError(f"{path}: two tokens of its vocabulary have one id")
            if wrong := checked.result():
                raise ModelFileError(f"{path}: {wrong}")
        with no_panic(lambda why: ModelFileError(f"{path}: the tokenizers library fails on it ({why})")):
            if folder is None:
                config = named(library) if named is not None else {}
            else:
                config = {
                    **read_optional_json(folder / "special_tokens_map.json"),
                    **read_optional_json(folder / "tokenizer_config.json"),
                }
                if "added_tokens_decoder" in config:
                    _add_missing(library, config["added_tokens_decoder"], folder / "tokenizer_config.json")
                else:
                    path = folder / "added_tokens.json"
                    _add_missing(library, _as_decoder(path, config), path)
            _add_named(library, config)
            return cls(library, file.decoder, config, begins_chats=begins_chats)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._full.get_vocab_size(with_added_tokens=True))

    @property
    def largest_id(self) -> int:
        """The largest id of a token."""
        return max(self._full.get_vocab(with_added_tokens=True).values(), default=0)

    @property
    def bos_id(self) -> int | None:
        """BOS, the token that starts a text; None if the model names none."""
        return self.token_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """EOS of tokenizer_config.json; None without one. Generation ends at `ModelSpec.eos_ids`."""
        return self.token_id(self.special_tokens.get("eos_token", ""))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelt `text`; None if there is none."""
        return self._full.token_to_id(text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode `text` without BOS or EOS. Control tokens in it are ordinary text unless `special`."""
        if special:
            return _ids(self._full, valid_text(text))
        return self._encode(valid_text(text))

    def encode_prompt(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a raw completion prompt. Control tokens in it are control tokens unless `special` is False.

        If the tokenizer wants BOS, the ids begin with exactly one, also if the text already has it.
        """
        return self._with_bos(self.encode(text, special=special))

    def encode_raw(self, prompt: str | Sequence[int], suffix: str, *, special: bool = True) -> list[int]:
        """Encode a raw prompt (text or ids); with a `suffix`, ask the model for the text between both (needs `middle`).

        Raises InvalidRequest if the vocabulary lacks all bytes of the prompt.
        """
        if not suffix:
            if not isinstance(prompt, str):
                return list(prompt)
            ids = self.encode_prompt(prompt, special=special)
            if prompt and not ids and (lacking := self.missing_bytes.intersection(valid_text(prompt).encode())):
                named = ", ".join(f"0x{byte:02X}" for byte in sorted(lacking))
                raise InvalidRequest(f"the prompt holds only bytes that the vocabulary lacks: {named}", field="prompt")
            return ids
        assert self.middle is not None
        before = self.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        before = before[len(self._prefix) :] if self._has_bos(before) else before
        after = self.encode(suffix, special=special)
        return self._with_bos([self.middle.prefix, *before, self.middle.suffix, *after, self.middle.middle])

    def _with_bos(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._has_bos(ids) else [*self._prefix, *ids]

    def _has_bos(self, ids: Sequence[int]) -> bool:
        return list(ids[: len(self._prefix)]) == self._prefix

    def with_bos(self, text: str) -> str:
        """Put BOS before a rendered chat if the model wants it there and the template did not write it."""
        if not self._begins_chats:
            return text
        (bos,) = self._prefix
        spelt = str(self._full.id_to_token(bos))
        return text if spelt not in self.controls.ids or text.lstrip().startswith(spelt) else spelt + text

    def encode_rendered(self, text: str, mark: str = "") -> list[int]:
        """Encode a rendered chat: control tokens are recognised, except those broken up by `mark`.

        `mark` (see `Controls.break_up`) is removed, so the ids are those of the text without it.
        """
        text = self.controls.with_aliases(valid_text(text))
        return self._encode(text.replace(mark, "") if mark else text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode `ids`; special tokens are left out if `skip_special`, unknown ids always."""
        return str(self._full.decode(list(ids), skip_special_tokens=skip_special))

    def spell(self, ids: Sequence[int]) -> str:
        """Return a text of `ids`, control tokens included, that `encode_prompt` reads back to the same ids if possible.

        A tokenizer that puts a space before every text also puts one after control tokens, where decoding shows it.
        """
        plain = self.decode(ids, skip_special=False)
        if self.encode(plain, special=True) == list(ids):
            return plain
        pieces: list[str] = []
        run: list[int] = []
        for i in ids:
            if i in self.control_ids:
                pieces += [self.decode(run, skip_special=False), str(self._full.id_to_token(i))]
                run = []
            else:
                run.append(i)
        spelt = "".join([*pieces, self.decode(run, skip_special=False)])
        return spelt if self.encode(spelt, special=True) == list(ids) else plain

    def detokenizer(self, *, skip: Collection[int] | None = None, after: Sequence[int] = ()) -> Detokenizer:
        """Return a streaming decoder whose pieces join to exactly `decode` of all ids; `skip` replaces the special ids.

        `after`: earlier ids whose text the stream continues. The pieces join to what `decode` adds to that text; a
        character that `after` left incomplete counts as broken.
        """
        return self._decoding.stream(self.special_ids if skip is None else skip, after)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text; b"" for an unknown id."""
        return self._decoding.token_bytes(token)

    def _encode(self, text: str) -> list[int]:
        """Encode by the plain tokenizer; aliases in `text` become the control tokens' ids."""
        ids = _ids(self._plain, text)
        real = self._real
        if not self._spellable.isdisjoint(ids):
            # The model's vocabulary has a control token as an ordinary piece, and the text matched it.
            if self._unspellable is None:
                self._unspellable = self._with_aliases(_without_pieces(self._full, self.controls.ids))
            plain, real = self._unspellable
            ids = _ids(plain, text)
        return [real.get(i, i) for i in ids] if real else list(ids)

    def _with_aliases(
        self, library: Library, *, normalized: bool = True, spare: int = 0
    ) -> tuple[Library, dict[int, int]]:
        """Return a tokenizer on `library`'s model that knows control tokens by alias only, and its ids -> real ids.

        With `normalized` False aliases are matched before normalising, whatever the file says. The next `spare` ids are
        skipped.
        """
        plain = Library(library.model)
        if self._full.normalizer is not None:
            plain.normalizer = self._full.normalizer
        if self._full.pre_tokenizer is not None:
            plain.pre_tokenizer = self._full.pre_tokenizer
        plain.add_tokens([AddedToken(f"\ufdd2{secrets.token_hex(8)}\ufdd3", normalized=False) for _ in range(spare)])
        added = sorted(self._full.get_added_tokens_decoder().items())
        aliases = self.controls.aliases
        plain.add_tokens(
            [
                AddedToken(
                    aliases.get(token.content, token.content),
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and (normalized or token.content not in aliases),
                    special=False,
                )
                for _, token in added
            ]
        )
        given = {i: plain.token_to_id(aliases.get(token.content, token.content)) for i, token in added}
        if not spare and any(library.model.id_to_token(given[i]) is not None for i in self.control_ids):
            # A vocabulary with holes: new ids begin at its size, and some of those are already used.
            size = library.get_vocab_size(with_added_tokens=False)
            last = max(library.get_vocab(with_added_tokens=False).values())
            return self._with_aliases(library, normalized=normalized, spare=last + 1 - size)
        seen = plain.encode("a".join(["", *aliases.values(), ""]), add_special_tokens=False).ids
        if normalized and not {given[i] for i in self.control_ids}.issubset(seen):
            # A normaliser that prepends something to every text also prepends it to the alias, which then never matches
            # inside a text. A template's control token must always be recognised.
            return self._with_aliases(library, normalized=False, spare=spare)
        return plain, {cast(int, new): i for i, new in given.items() if new != i}

    def _bos_prefix(self) -> list[int]:
        """Return the ids that the tokenizer puts before a text, by tokenizer_config.json or by its post-processor."""
        wanted = self._config.get("add_bos_token")
        if wanted is False:
            return []
        if wanted is True and self.bos_id is not None:
            return [self.bos_id]
        bare = self._full.encode("a", add_special_tokens=False).ids
        whole = self._full.encode("a", add_special_tokens=True).ids
        starts = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return list(whole[: next(starts, 0)])


def _ids(library: Library, text: str) -> list[int]:
    """Encode `text` with the library."""
    # A batch of one: `encode` holds the GIL, so a long text in a thread would stop all other threads.
    with no_panic(_cannot_encode):
        (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _cannot_encode(why: str) -> InvalidRequest:
    return InvalidRequest(f"the model's tokenizer fails on this text ({why})", field="messages")


def valid_text(text: str) -> str:
    """Join pairs of surrogates, and replace lone ones, which UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # Not by way of UTF-16: its codecs raise and catch an error for each surrogate. Other threads, such as the event
        # loop's, run between pieces.
        pieces, at = [], 0
        while at < len(text):
            end = at + MENDED_AT_ONCE
            end -= _PAIR.match(text, end - 1) is not None  # a piece ends before a pair
            pieces.append(_SURROGATE.sub("\ufffd", _PAIR.sub(_joined, text[at:end])))
            at = end
        return "".join(pieces)
    return text


def _joined(pair: re.Match[str]) -> str:
    return chr(0x10000 + ((ord(pair[1]) - 0xD800) << 10) + ord(pair[2]) - 0xDC00)


def _checked_file(text: bytes, path: Path) -> _File:
    """Parse and check a tokenizer.json. Raises ModelFileError if it holds more than any model's.

    The tokenizers library needs ten times the file's size in memory, so the limits are checked before it is called.
    """
    file = msgspec.json.decode(text, type=_File)
    known = 0
    for what, part in (("tokens", file.model.vocab), ("merges", file.model.merges)):
        listed = bytes(part)
        known += (most := most_values(listed))
        # A token is `"x":1,` or `["x",-1.5],`, a merge `"x y",` or `["x","y"],`.
        each = 3 if listed[1:].lstrip().startswith(b"[") else 1
        if most > each * MAX_LISTED + _COMMAS:
            raise ModelFileError(f"{path}: holds some {most // each} {what}; the limit is {MAX_LISTED}")
    if most_values(text) - known > MAX_JSON_VALUES:
        raise ModelFileError(f"{path}: holds more than {MAX_JSON_VALUES} values beside its tokens and merges")
    check_added(len(file.added_tokens or ()), path)
    return file


def _library(data: str, path: Path) -> Library:
    """Build the tokenizer of a tokenizer.json; `path` is for the error message."""
    try:
        with no_panic(ModelFileError):
            return Library.from_str(data)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path}: the tokenizers library refuses it ({error})") from error


def _content(token: object) -> str:
    """Return the text of a special token in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


_UNSUPPORTED_FILES = {
    "tekken.json": "a vocabulary of Mistral's own",
    "tokenizer.model": "a SentencePiece vocabulary",
    "spiece.model": "a SentencePiece vocabulary",
    "vocab.json": "a vocabulary of an older form",
    "vocab.txt": "a vocabulary of an older form",
}


def _vocabulary_hint(folder: Path) -> str:
    """Return an error hint about a vocabulary file in an unsupported format; "" if the folder has none."""
    found = next((name for name in _UNSUPPORTED_FILES if (folder / name).is_file()), None)
    if found is None:
        return ""
    return (
        f", and {found} ({_UNSUPPORTED_FILES[found]}) is not read; "
        "give another folder's with --tokenizer, or write one: "
        "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _as_decoder(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of added_tokens.json (text -> id) in tokenizer_config.json's form (id -> token).

    As in transformers, the tokens that the configuration names are special. Raises ModelFileError for an invalid id.
    """
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    named = [*(config.get(name) for name in SPECIAL_NAMES), *(extra if isinstance(extra, list) else ())]
    special = {_content(one) for one in named}
    found = {}
    for text, number in read_optional_json(path).items():
        if type(number) is not int or number < 0:
            raise ModelFileError(f"{path}: must give each token a whole number from 0, found {number!r:.80}")
        found[str(number)] = {"content": text, "special": text in special, "normalized": text not in special}
    return found


def _add_missing(library: Library, decoder: object, path: Path) -> None:
    """Add the tokens that only tokenizer_config.json (`added_tokens_decoder`: id -> token) or added_tokens.json lists.

    A token in the model's vocabulary keeps its id; it is added only if it is special, because as a piece of the
    vocabulary it would be ordinary text.
    """
    if not isinstance(decoder, dict):
        return
    if not all(key.isdecimal() and len(key) <= 10 for key in decoder):
        raise ModelFileError(f"{path}: the keys of added_tokens_decoder must be token ids")
    if not all(isinstance(token, dict) for token in decoder.values()):
        raise ModelFileError(f"{path}: the values of added_tokens_decoder must be objects")
    missing = []
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    for key, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        text = _content(token)
        if text and text not in added and (token.get("special") or library.token_to_id(text) is None):
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            missing.append((int(key), AddedToken(text, **{name: bool(token.get(name)) for name in flags})))
    library.add_tokens([token for _, token in missing])
    for i, token in missing:
        if library.token_to_id(token.content) != i:
            raise ModelFileError(f"{path}: gives {token.content!r} the id {i}, which does not follow tokenizer.json")


def _add_named(library: Library, config: Mapping[str, Any]) -> None:
    """Add vocabulary tokens that tokenizer_config.json names as special (`bos_token`, ...) or that end a turn."""
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    texts = dict.fromkeys([*(_content(config.get(name)) for name in SPECIAL_NAMES), *sorted(UNMISTAKABLE)])
    tokens = [
        AddedToken(text, special=True, normalized=False)
        for text in texts
        if text not in added and library.token_to_id(text) is not None
    ]
    # A single character, which some models name as padding, is also ordinary text.
    library.add_tokens([token for token in tokens if is_control(token)])


def _without_pieces(library: Library, texts: Collection[str]) -> Library:
    """Return a copy of `library` in which no text can match the vocabulary pieces `texts`; ids do not change."""
    data = json.loads(library.to_str())
    model = data["model"]
    names = {text: f"\ufdd4{secrets.token_hex(8)}\ufdd5" for text in texts}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
    return Library.from_str(json.dumps({**data, "added_tokens": [], "post_processor": None}))
