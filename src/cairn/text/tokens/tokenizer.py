"""Text <-> token ids, by the model's own tokenizer.json, or by what its GGUF file holds; there is no fallback.

Two tokenizers share one model. The *full* one is the file as it is: it recognises control tokens (`<|im_end|>`,
`<think>`) in a text, so only text that Cairn itself wrote may go through it. The *plain* one knows each control token
by an alias that nobody can type, so control tokens in a text are ordinary text; where a chat template wrote one,
`encode_rendered` puts its alias. Both split, normalise and merge alike, so apart from that the ids are the same.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from cairn.models.files import (
    MAX_JSON_VALUES,
    MAX_TOKENIZER_BYTES,
    is_gguf,
    most_values,
    read_optional_json,
    read_small,
)
from cairn.models.spec.config import companions
from cairn.models.spec.end_tokens import UNMISTAKABLE, Middle, known_ends, known_middle
from cairn.text.tokens.control_tokens import Controls, is_control
from cairn.text.tokens.detokenizer import Decoding, Detokenizer
from cairn.text.tokens.post_processor import affixes
from cairn.text.tokens.tokenizer_checks import check_added, fault, no_panic
from cairn.types.errors import InvalidRequest, ModelFileError

if TYPE_CHECKING:
    from cairn.models.gguf.reader import Gguf

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that transformers names; chat templates may use them by these names."""


INLINE = 4_096
"""Most characters or tokens that are worth no thread: more of them would hold other requests up meanwhile."""


MAX_LISTED = 1 << 20
"""Most tokens, and most merges, of a tokenizer.json; the largest models have some 300,000 and 600,000."""
_COMMAS = 1 << 16
"""Commas and brackets that stand in the texts of tokens and merges: many more than any vocabulary has."""


class _Model(msgspec.Struct, frozen=True):
    """The part of it that is looked at."""

    vocab: msgspec.Raw = msgspec.Raw(b"null")
    merges: msgspec.Raw = msgspec.Raw(b"null")


class _File(msgspec.Struct):
    """The part of tokenizer.json that the library does not show."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    model: _Model = _Model()
    added_tokens: list[msgspec.Raw] | None = None


class Tokenizer:
    """One model's tokenizer. Its methods may be called from several threads at once."""

    def __init__(
        self,
        library: Library,
        decoder: dict[str, Any] | None,
        config: Mapping[str, Any],
        *,
        begins_chats: bool = False,
        middle: Middle | None = None,
    ) -> None:
        """`library` is taken over; `decoder` is tokenizer.json's, `config` tokenizer_config.json's.

        `begins_chats`: the token that starts a text stands before a chat too, whether or not its template writes it.
        `middle`: the tokens for filling in the middle that the model's file names.
        """
        library.no_truncation()
        library.no_padding()
        if isinstance(library.model, BPE):
            library.model.dropout = None  # by which, in training, the same text becomes other tokens each time
        self._full = library
        self._config = config
        self.special_tokens = {name: text for name in SPECIAL_NAMES if (text := _content(config.get(name)))}
        """Name ("bos_token", ...) -> text of the special tokens that the model names."""
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that are no text: decoding leaves them out."""
        self.controls = Controls({token.content: i for i, token in added.items() if is_control(token)})
        """The tokens that a user must not be able to write."""
        self.control_ids = frozenset(self.controls.ids.values())
        self._decoding = Decoding(library, decoder)
        self.unspelt_bytes = (
            self._decoding.unspelt_bytes() if getattr(library.model, "unk_token", None) is None else frozenset()
        )
        """Bytes that the vocabulary lacks, and that are left out of a text."""
        self._plain, self._real = self._with_aliases(library)
        unk = library.token_to_id(self.special_tokens.get("unk_token", ""))
        model = library.model
        self._spellable = frozenset(i for i in self.control_ids - {unk} if model.id_to_token(i) is not None)
        self._unspellable: tuple[Library, dict[int, int]] | None = None
        self._prefix = self._bos_prefix()
        wants_end = config.get("add_eos_token") is True
        self.affixes = affixes(library, self._prefix, self.eos_id if wants_end else None)
        """What stands around whole texts."""
        self._begins_chats = begins_chats and bool(self._prefix)
        ends = known_ends(library.token_to_id, self.special_ids.__contains__)
        self.end_ids = frozenset(ends if self.eos_id is None else (*ends, self.eos_id))
        """Tokens that end an answer: the tokenizer's own, and those that are spelt so. `Chat` adds the template's."""
        self.middle = middle or known_middle(self.controls.ids)
        """The tokens for filling in the middle, of a model that has them."""

    @classmethod
    def load(cls, folder: Path, parsed: Gguf | None = None) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json and special_tokens_map.json; or a GGUF file.

        `parsed`: the GGUF file, where it was read. Raises ModelFileError naming the file that is missing or broken.
        """
        if is_gguf(folder):
            from cairn.models.gguf.reader import read_gguf  # it needs numpy, and nothing else here does
            from cairn.text.tokens import gguf

            read = parsed or read_gguf(folder)
            return cls(*gguf.load_tokenizer(read), begins_chats=True, middle=gguf.named_middle(read))
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelFileError(
                f"{path}: the file is missing; a model folder must hold a tokenizer.json{_other(folder)}"
            )
        return cls._read(path, folder)

    @classmethod
    def given(cls, path: Path, folder: Path, parsed: Gguf | None = None) -> Tokenizer:
        """Read a tokenizer.json in place of the one of the model in `folder`. Raises ModelFileError as `load`.

        Which tokens begin and end a text is said by the files beside it, else by the model's own.
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
        """Read a tokenizer.json, with what its settings in `folder` say, or else what `named` says."""
        try:
            text = read_small(path, MAX_TOKENIZER_BYTES, "tokenizer.json")
            file = _looked_at(text, path)
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
        """Tokens, added ones included."""
        return int(self._full.get_vocab_size(with_added_tokens=True))

    @property
    def largest_id(self) -> int:
        """The largest id of a token."""
        return max(self._full.get_vocab(with_added_tokens=True).values(), default=0)

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, where the model names one."""
        return self.token_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """tokenizer_config.json's end of text. What ends a generation is `ModelSpec.eos_ids`."""
        return self.token_id(self.special_tokens.get("eos_token", ""))

    def token_id(self, text: str) -> int | None:
        """The id of the token spelt `text` in the vocabulary."""
        return self._full.token_to_id(text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`, nothing put before or after it. Control tokens in it are ordinary text unless `special`."""
        if special:
            return _ids(self._full, valid_text(text))
        return self._encode(valid_text(text))

    def encode_prompt(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a raw completion prompt, for which its writer is the template: control tokens in it are control
        tokens, unless `special` is False. BOS once if the tokenizer wants one, also where the text has it."""
        return self._begun(self.encode(text, special=special))

    def encode_raw(self, prompt: str | Sequence[int], suffix: str, *, special: bool = True) -> list[int]:
        """Ids of a raw prompt, text or ids; with a `suffix`, which needs `middle`, for what stands between the two.

        Raises InvalidRequest for a text of which nothing is left, because the vocabulary lacks all of its bytes.
        """
        if not suffix:
            if not isinstance(prompt, str):
                return list(prompt)
            ids = self.encode_prompt(prompt, special=special)
            if prompt and not ids and (lacking := self.unspelt_bytes.intersection(valid_text(prompt).encode())):
                named = ", ".join(f"0x{byte:02X}" for byte in sorted(lacking))
                raise InvalidRequest(f"the prompt holds only bytes that the vocabulary lacks: {named}", field="prompt")
            return ids
        assert self.middle is not None
        before = self.encode(prompt, special=special) if isinstance(prompt, str) else prompt
        before = before[len(self._prefix) :] if self._is_begun(before) else before
        after = self.encode(suffix, special=special)
        return self._begun([self.middle.prefix, *before, self.middle.suffix, *after, self.middle.middle])

    def _begun(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._is_begun(ids) else [*self._prefix, *ids]

    def _is_begun(self, ids: Sequence[int]) -> bool:
        return list(ids[: len(self._prefix)]) == self._prefix

    def begun_chat(self, text: str) -> str:
        """A rendered chat template with the token that starts a text, where the model wants it and it is not there."""
        if not self._begins_chats:
            return text
        (bos,) = self._prefix
        spelt = str(self._full.id_to_token(bos))
        return text if spelt not in self.controls.ids or text.lstrip().startswith(spelt) else spelt + text

    def encode_rendered(self, text: str, mark: str = "") -> list[int]:
        """Ids of a rendered chat template: its control tokens are recognised, except those broken up by `mark`.

        `mark` (see `Controls.break_up`) is taken out, so the ids are those of the text without it.
        """
        text = self.controls.with_aliases(valid_text(text))
        return self._encode(text.replace(mark, "") if mark else text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; special tokens are left out unless told otherwise, unknown ids always."""
        return str(self._full.decode(list(ids), skip_special_tokens=skip_special))

    def spell(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included, as `encode_prompt` reads it back to the same ids where any does.

        A tokenizer that puts a space before every text puts it behind control tokens too, where decoding shows it.
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
        """Decode a stream: the pieces join to exactly `decode` of all ids. `skip` replaces the special ids.

        `after`: ids whose text this one goes on. The pieces join to what `decode` adds to that, but that a
        character that they began and did not end counts as broken.
        """
        return self._decoding.stream(self.special_ids if skip is None else skip, after)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token in the middle of a text stands for; b"" for an unknown id."""
        return self._decoding.token_bytes(token)

    def _encode(self, text: str) -> list[int]:
        """Ids by the plain tokenizer; aliases in `text` become the control tokens' ids."""
        ids = _ids(self._plain, text)
        real = self._real
        if not self._spellable.isdisjoint(ids):
            # The model's own vocabulary has a control token as a piece, and the text met it.
            if self._unspellable is None:
                self._unspellable = self._with_aliases(_without_pieces(self._full, self.controls.ids))
            plain, real = self._unspellable
            ids = _ids(plain, text)
        return [real.get(i, i) for i in ids] if real else list(ids)

    def _with_aliases(
        self, library: Library, *, normalized: bool = True, spare: int = 0
    ) -> tuple[Library, dict[int, int]]:
        """A tokenizer on `library`'s model that knows control tokens by alias only, and its ids -> the real ones.

        `normalized` False looks for aliases before normalising, whatever the file says. `spare` ids that would be next
        are passed over.
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
            # A vocabulary with holes: new ids begin at its size, and some of those are taken.
            size = library.get_vocab_size(with_added_tokens=False)
            last = max(library.get_vocab(with_added_tokens=False).values())
            return self._with_aliases(library, normalized=normalized, spare=last + 1 - size)
        seen = plain.encode("a".join(["", *aliases.values(), ""]), add_special_tokens=False).ids
        if normalized and not {given[i] for i in self.control_ids}.issubset(seen):
            # A normaliser that puts something before every text also puts it before what is looked for, and so hides it
            # inside a text. A template's control token must always be seen.
            return self._with_aliases(library, normalized=False, spare=spare)
        return plain, {cast(int, new): i for i, new in given.items() if new != i}

    def _bos_prefix(self) -> list[int]:
        """What the tokenizer puts before a text: by tokenizer_config.json's word, else by its post-processor."""
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
    """Ids of `text`. The library's plain `encode` holds Python's lock, so that a long text in a thread would stop all
    others; its batches do not."""
    with no_panic(_cannot_encode):
        (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _cannot_encode(why: str) -> InvalidRequest:
    return InvalidRequest(f"the model's tokenizer fails on this text ({why})", field="messages")


def valid_text(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot hold, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _looked_at(text: bytes, path: Path) -> _File:
    """What is looked at of a tokenizer.json. Raises ModelFileError for one that holds more than any model's.

    What the tokenizers library builds takes ten times the file's size, so it is counted before there is any of it.
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
    """The tokenizer that a tokenizer.json describes; `path` is for the message."""
    try:
        with no_panic(ModelFileError):
            return Library.from_str(data)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path}: the tokenizers library refuses it ({error})") from error


def _content(token: object) -> str:
    """The text of a special token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


_OTHER_FILES = {
    "tekken.json": "a vocabulary of Mistral's own",
    "tokenizer.model": "a SentencePiece vocabulary",
    "spiece.model": "a SentencePiece vocabulary",
    "vocab.json": "a vocabulary of an older form",
    "vocab.txt": "a vocabulary of an older form",
}


def _other(folder: Path) -> str:
    """Return what a message says of a folder's vocabularies that are not read, "" where it has none."""
    found = next((name for name in _OTHER_FILES if (folder / name).is_file()), None)
    if found is None:
        return ""
    return (
        f", and {found} ({_OTHER_FILES[found]}) is not read; give another folder's with --tokenizer, or write one: "
        "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _as_decoder(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of added_tokens.json (text -> id) as tokenizer_config.json lists them (id -> token).

    Special are those that the configuration names, as in transformers. Raises ModelFileError for an id that is none.
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
    """Add the tokens that only tokenizer_config.json lists (`added_tokens_decoder`: id -> token), or added_tokens.json.

    One that is in the model's vocabulary keeps its id there; it is added if it is special, because as a piece of the
    vocabulary it is ordinary text.
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
    """Add the special tokens that tokenizer_config.json names (`bos_token`, ...) and the model's vocabulary has, and
    those that end a turn by their text."""
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    texts = dict.fromkeys([*(_content(config.get(name)) for name in SPECIAL_NAMES), *sorted(UNMISTAKABLE)])
    tokens = [
        AddedToken(text, special=True, normalized=False)
        for text in texts
        if text not in added and library.token_to_id(text) is not None
    ]
    # One character, as a padding that some models name, is also text.
    library.add_tokens([token for token in tokens if is_control(token)])


def _without_pieces(library: Library, texts: Collection[str]) -> Library:
    """`library`'s model with the vocabulary pieces `texts` respelt so that no text can match them; ids stay."""
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
