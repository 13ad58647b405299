"""Resolution of options: a flag, else a CAIRN_* variable, else a key of cairn.toml, else the default; all checked."""

from __future__ import annotations

import contextlib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cairn.config.config import CPU_EXPERTS, CPU_LAYERS, DEVICE, DEVICES, PREFIX, SPECULATE, SPECULATIONS, Config
from cairn.config.option import OTHER_NAMES, Option, closest, local_options, options, right_name
from cairn.config.paths import expanded, home
from cairn.config.values import KEY, LIMITS, AdapterOptions, ModelOptions, Secret, TenantKeys, TenantLimits, is_key
from cairn.types.errors import ConfigError

FILE_VARIABLE = "CAIRN_CONFIG"
"""Variable with the path of the configuration file, like `--config`."""


_LINKED = re.compile(
    r"CAIRN_(([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)|PORT_\d+_|PORT=(tcp|udp|sctp)://)|NAME=/|ENV_).*", re.DOTALL
)
"""Variables that are no options: Kubernetes and Docker set them in every container beside a service called `cairn` or
`cairn-...`, with its addresses, and for a linked container its name and environment."""


class Resolved(msgspec.Struct, frozen=True):
    """The options, with the source of each: a flag, a variable, a file's key, or the default."""

    config: Config
    again: Callable[[], Resolved]
    """Resolves the options again from the same sources; files may have changed."""
    sources: dict[str, str]
    """Source of each value by field name; other fields have their default."""
    file: Path | None = None
    """The configuration file that was read."""

    def source(self, name: str) -> str:
        """Return the source of a field's value in words."""
        return self.sources.get(name, "default")


def resolve(
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    keywords: bool = False,
) -> Resolved:
    """Resolve options: flags (None: not given) win over CAIRN_* variables, a file, and defaults.

    The file is `file`, else the one that CAIRN_CONFIG names, else ./cairn.toml, else ~/.config/cairn/cairn.toml; the
    last two may be missing. An empty variable counts as not set; a list in a variable is separated by commas. Raises
    ConfigError for an unknown name, a value of the wrong type or out of bounds; it names the source and the limit.
    With `keywords` the flags are spelled in messages as the Python keywords they were.
    """
    return _resolve(flags or {}, os.environ if env is None else env, file, keywords, None)


def _resolve(
    flags: Mapping[str, object], env: Mapping[str, str], file: Path | None, keywords: bool, held: Path | None
) -> Resolved:
    """Resolve options as `resolve` does.

    `held`: the file that they were read from before. Raise ConfigError if it is missing or empty now: an editor may be
    writing it, and its keys and limits must not be dropped.
    """
    path, table = _read(env, file)
    if held is not None and (path != held or not table):
        raise ConfigError(
            f"{held} held options and {'holds none now' if path == held else 'is gone'}; write them back, or restart "
            "the server to run it without"
        )
    raw = _from_file(path, table) | _from_env(env) | _from_flags(flags, keywords)
    if "models" in raw and "model" in raw:
        if raw["models"].text == raw["model"].text:
            raise ConfigError(
                f"{raw['model'].source} and {raw['models'].source} both say what to serve; give one of them",
                field="model",
            )
        del raw["model" if raw["models"].text else "models"]  # the command line and the environment go before a file
    known = {option.name: option for option in options()}
    values = {name: _value(known[name], given) for name, given in raw.items()}
    return Resolved(
        Config(**values),
        lambda: _resolve(flags, env, file, keywords, path if table else None),
        {name: given.source for name, given in raw.items()},
        path,
    )


class _Given(msgspec.Struct, frozen=True):
    """An unchecked value of an option, and its source."""

    value: object
    source: str
    text: bool
    """Whether numbers may be given as text: for flags and variables, but not for a file, whose values have types."""


def _from_flags(flags: Mapping[str, object], keywords: bool) -> dict[str, _Given]:
    known = {option.name: option for option in options()}
    found = {}
    for name, value in flags.items():
        if name not in known:
            near = right_name(name, local_options() if keywords else known)
            raise ConfigError(f"unknown option {name!r}{near}", field=name)
        if value is not None and not (known[name].many and not value):
            flag = "MODEL" if name in ("model", "models") else known[name].flag  # arguments, not flags
            found[name] = _Given(value, name if keywords else flag, True)
    return found


def _from_env(env: Mapping[str, str]) -> dict[str, _Given]:
    known = {option.variable: option for option in options()}
    found = {}
    for variable in sorted(env):
        text = env[variable]
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or not text:
            continue
        if _LINKED.fullmatch(f"{variable}={text}"):
            continue
        if variable not in known:
            right = OTHER_NAMES.get(variable.removeprefix(PREFIX).lower())
            near = f": it is called {PREFIX}{right.upper()} here" if right else closest(variable, known)
            raise ConfigError(f"unknown environment variable {variable}{near}", field=variable)
        option = known[variable]
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if option.many and not parts:  # a list of keys that names none would open the server
            raise ConfigError(f"{variable} has blanks and commas only; leave it empty where it says nothing")
        found[option.name] = _Given(parts if option.many else text, variable, True)
    return found


def _from_file(path: Path | None, table: Mapping[str, Any]) -> dict[str, _Given]:
    known = {option.name for option in options()}
    for key in table:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in {path}{right_name(key, known)}", field=key)
    return {key: _Given(value, f"{key} in {path}", False) for key, value in table.items()}


def _read(env: Mapping[str, str], file: Path | None) -> tuple[Path | None, dict[str, Any]]:
    """Return the configuration file and its content; (None, {}) if there is none."""
    path = file or (expanded(env[FILE_VARIABLE]) if env.get(FILE_VARIABLE) else None)
    if path is None:
        path = next((place for place in _places(env) if _exists(place)), None)
    if path is None:
        return None, {}
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: also of endless digits and brackets
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _places(env: Mapping[str, str]) -> list[Path]:
    """Return the paths at which a configuration file is looked for if none is named."""
    folder = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    if not folder and env is os.environ:  # as of a service that is started without HOME
        with contextlib.suppress(ConfigError):
            folder = str(home() / ".config")
    return [Path("cairn.toml")] + ([Path(folder) / "cairn" / "cairn.toml"] if folder else [])


def usual_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's own configuration file. Raise ConfigError if the user has no home folder."""
    places = _places(env)
    if len(places) < 2:
        raise ConfigError("this user has no home folder; set HOME, or name the file with --config")
    return places[-1]


def _exists(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError as error:
        raise ConfigError(f"cannot check for the file {place}: {error.strerror or error}") from None


_PATTERNS = {
    "device": (DEVICE, DEVICES),
    "speculate": (SPECULATE, SPECULATIONS),
    "cpu_experts": (CPU_EXPERTS, CPU_LAYERS),
}
"""Pattern and description of the values of options that are texts of a certain form."""


def _value(option: Option, given: _Given) -> Any:
    """Return the checked value of one option. Raise ConfigError naming the source and what was expected."""
    if not option.many:
        return _one(option, given, given.value)
    written = given.value
    if option.kind == "tenant":
        return _tenants(option, given, written)
    if option.kind == "model":
        return _models(given, written)
    if option.kind == "adapter":
        return _adapters(given, written)
    if not isinstance(written, list | tuple):
        written = [written]
    if option.kind != "secret":
        return tuple(_one(option, given, item) for item in written)
    keys = [key for item in written for key in (_lines(given, item) if _is_file(item) else [item])]
    return tuple(_secret(option, given, key) for key in keys)


def _one(option: Option, given: _Given, value: object) -> Any:
    match option.kind:
        case "secret":
            if _is_file(value):
                (value, *more) = _lines(given, value)
                if more:
                    raise ConfigError(f"{given.source}: the file must hold one key", field=option.name)
            return _secret(option, given, value)
        case "str":
            return _text(option, given, value)
        case "choice":
            if value not in option.choices:
                raise _wrong(option, given, value, "one of " + ", ".join(option.choices))
            return value
        case "bool":
            return _bool(option, given, value)
        case "int" | "float":
            return _number(option, given, value)
        case "tenant" | "model" | "adapter":
            raise AssertionError("tenants, models and adapters are read by _tenants, _models and _adapters")


def _text(option: Option, given: _Given, value: object) -> str:
    if option.name in ("speculate", "cpu_experts") and type(value) is int:  # a file may have the number without quotes
        value = str(value)
    if not isinstance(value, str) or not value:
        raise _wrong(option, given, value, "a text that is not empty")
    pattern, wanted = _PATTERNS.get(option.name, (None, ""))
    if pattern is not None and not pattern.fullmatch(value):
        raise _wrong(option, given, value, wanted)
    return value


def _secret(option: Option, given: _Given, key: object) -> Secret:
    """Return a key read from a file, where a leading @ is part of the key."""
    if not isinstance(key, str) or not is_key(key.strip()):
        raise ConfigError(f"{given.source} must be a key: {KEY}", field=option.name)
    return Secret(key.strip())


TENANT_NAME = re.compile(r"(?!key-)[a-z0-9][a-z0-9_.-]{0,62}")
"""Valid names of tenants. `key-` is reserved for the tenants of keys without a name."""


def _tenants(option: Option, given: _Given, written: object) -> tuple[TenantKeys, ...]:
    """Parse tenants: NAME=KEY texts, or a file's tables. Error messages never quote a key."""
    found: dict[str, list[Secret]] = {}
    for name, value in _named(given, written):
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(
                f"{given.source}: a tenant's name has 1 to 63 small letters, digits, '.', '_' or '-', begins with a "
                "letter or a digit, and not with 'key-'",
                field=option.name,
            )
        items = value if isinstance(value, list) else [value]
        keys = [key for item in items for key in (_lines(given, item) if _is_file(item) else [item])]
        if not keys or not all(isinstance(key, str) and is_key(key) for key in keys):
            raise ConfigError(f"{given.source}: the tenant {name} needs a key: {KEY}", field=option.name)
        found.setdefault(name, []).extend(map(Secret, keys))
    limits = _limits(given, written)
    return tuple(
        TenantKeys(name, tuple(dict.fromkeys(keys)), limits.get(name, TenantLimits())) for name, keys in found.items()
    )


def _limits(given: _Given, written: object) -> dict[str, TenantLimits]:
    """Return the limits in a file's tables of tenants, by tenant name."""
    known = {option.name: option for option in options()}
    found = {}
    for name, table in written.items() if isinstance(written, dict) else ():
        where = f"{given.source}: [tenants.{name}]"
        more = {
            one: _one(known[one], _Given(table[one], f"{where} {one}", False), table[one])
            for one in LIMITS
            if one in table
        }
        if (weight := table.get("weight")) is not None:
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.01 <= weight <= 100:
                raise ConfigError(
                    f"{where} weight is {weight!r} but must be a number from 0.01 to 100", field="tenants"
                )
            more["weight"] = float(weight)
        if (priority := table.get("priority")) is not None:
            if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > 100:
                raise ConfigError(
                    f"{where} priority is {priority!r} but must be a whole number from -100 to 100", field="tenants"
                )
            more["priority"] = priority
        found[name] = TenantLimits(**more)
    return found


OF_A_MODEL = (
    "tokenizer", "kind", "engine", "device", "kernels", "weights", "keep_packed", "experts", "cpu_experts",
    "threads", "context", "kv_gb", "kv_dtype", "max_running", "step_tokens", "kv_disk", "kv_codec", "kv_load",
    "reasoning_history", "tool_instructions", "chat_template",
)  # fmt: skip
"""The options that a table of [[models]] may set for its model alone."""
_OWN = ("model", "name", "aliases", "kv_share", "pin", "ttl", "load")
MOST_MODELS = 64


def _models(given: _Given, written: object) -> tuple[ModelOptions, ...]:
    """Parse models: paths or hub ids, or a file's tables. Raise ConfigError if two models have one name."""
    items = written if isinstance(written, list | tuple) else [written]
    if len(items) > MOST_MODELS:
        raise ConfigError(f"{given.source} has {len(items)} models; the limit is {MOST_MODELS}", field="models")
    found = []
    for number, item in enumerate(items, 1):
        if isinstance(item, str) and item:
            found.append(ModelOptions(model=item))
        elif isinstance(item, dict) and not given.text:
            found.append(_model(given.source, number, item))
        else:
            wanted = "the places of models" if given.text else "tables: [[models]] with model"
            raise ConfigError(f"{given.source} must be {wanted}", field="models")
    names = [name for one in found for name in {*one.aliases, *((one.name,) if one.name else ())}]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{given.source}: two models are called {twice}", field="models")
    return tuple(found)


def _model(source: str, number: int, table: dict[str, Any]) -> ModelOptions:
    known = {option.name: option for option in options()}
    where = f"{source}, model {number}"
    own: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for key, value in table.items():
        at = _Given(value, f"{where}: {key}", False)
        if key in OF_A_MODEL:
            more[key] = _value(known[key], at)
        elif key in ("model", "name"):
            own[key] = _one(known["model"], at, value)
        elif key == "aliases":
            own[key] = _value(known["alias"], at)
        elif key in ("pin", "load"):
            own[key] = _bool(known["lenient"], at, value)
        elif key == "ttl":
            own[key] = float(_number(known["model_ttl"], at, value))
        elif key == "kv_share":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError(f"{at.source} is {value!r} but must be more than 0 and at most 1", field="models")
            own[key] = float(value)
        else:
            raise ConfigError(f"{where}: unknown key {key!r}{closest(key, (*_OWN, *OF_A_MODEL))}", field="models")
    if "model" not in own:
        raise ConfigError(f"{where} needs model: a folder, a .gguf file, a hub id or a known name", field="models")
    return ModelOptions(**own, options=more)


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
ADAPTER_RULE = "1 to 128 letters, digits, '.', '_' or '-', a letter or a digit first"
MOST_ADAPTERS = 64
"""Most adapters of one model."""


def _adapters(given: _Given, written: object) -> tuple[AdapterOptions, ...]:
    """Parse adapters: NAME=PATH texts, or a file's tables. Raise ConfigError if two of one model have one name."""
    items = written if isinstance(written, list | tuple) else [written]
    found = [_adapter(given, number, item) for number, item in enumerate(items, 1)]
    names = [(one.model, one.name) for one in found]
    if twice := next((name for model, name in names if names.count((model, name)) > 1), None):
        raise ConfigError(f"{given.source}: two adapters are called {twice}", field="adapters")
    if len(found) > MOST_ADAPTERS:
        raise ConfigError(f"{given.source} has {len(found)} adapters; the limit is {MOST_ADAPTERS}", field="adapters")
    return tuple(found)


def _adapter(given: _Given, number: int, item: object) -> AdapterOptions:
    where, table = f"{given.source}, adapter {number}", item
    if given.text and isinstance(item, str) and "=" in item:
        before, _, after = item.partition("=")
        table = {"name": before.strip(), "path": after.strip()}
    elif given.text or not isinstance(item, dict):
        wanted = "NAME=PATH" if given.text else "tables: [[adapters]] with name and path"
        raise ConfigError(f"{given.source} must be {wanted}", field="adapters")
    assert isinstance(table, dict)
    for key in table:
        if key not in (known := ("name", "path", "model")):
            raise ConfigError(f"{where}: unknown key {key!r}{closest(key, known)}", field="adapters")
    name, path, model = (table.get(key) for key in ("name", "path", "model"))
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name):
        raise ConfigError(f"{where}: name has {ADAPTER_RULE}", field="adapters")
    if not isinstance(path, str) or not path or not (model is None or (isinstance(model, str) and model)):
        raise ConfigError(
            f"{where}: path must be a text that is not empty, and model one if it is given", field="adapters"
        )
    return AdapterOptions(name=name, path=path, model=model)


def _named(given: _Given, written: object) -> list[tuple[str, Any]]:
    """Return each tenant's name with its unchecked keys: a text, a list, or @FILE."""
    if not given.text and isinstance(written, dict):
        pairs = []
        for name, table in written.items():
            for key in table if isinstance(table, dict) else ():
                if key not in (known := ("api_key", "weight", "priority", *LIMITS)):
                    near = closest(key, known)
                    raise ConfigError(f"{given.source}: unknown key {key!r} in [tenants.{name}]{near}", field="tenants")
            if not isinstance(table, dict) or "api_key" not in table:
                raise ConfigError(f"{given.source}: [tenants.{name}] needs api_key", field="tenants")
            pairs.append((name, table["api_key"]))
        return pairs
    texts = written if isinstance(written, list | tuple) else [written]
    split = [text.partition("=") for text in texts if isinstance(text, str) and "=" in text]
    if not given.text or len(split) < len(texts):
        wanted = "NAME=KEY" if given.text else "tables: [tenants.NAME] with api_key"
        raise ConfigError(f"{given.source} must be {wanted}", field="tenants")
    return [(name.strip(), key.strip()) for name, _, key in split]


def _bool(option: Option, given: _Given, value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.lower() if given.text and isinstance(value, str) else ""
    if word not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise _wrong(option, given, value, "true or false")
    return word in ("true", "1", "yes", "on")


def _number(option: Option, given: _Given, value: object) -> int | float:
    kind = int if option.kind == "int" else float
    wanted = "a whole number" if kind is int else "a number"
    if given.text and isinstance(value, str):
        try:
            value = kind(value)
        except ValueError:
            raise _wrong(option, given, value, wanted) from None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise _wrong(option, given, value, wanted)
    if abs(value) >= 1 << 63 and abs(value) != math.inf:
        raise _wrong(option, given, value, f"{wanted} of at most 64 bits")
    if not math.isfinite(value):
        raise _wrong(option, given, value, wanted)
    below = (option.above is not None and value <= option.above) or (option.least is not None and value < option.least)
    if below or (option.most is not None and value > option.most):
        raise _wrong(option, given, value, option.limits)
    return kind(value)


def _wrong(option: Option, given: _Given, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{given.source} is {value!r} but must be {wanted}", field=option.name)


def _is_file(value: object) -> bool:
    return isinstance(value, str) and value.startswith("@") and len(value) > 1


def _lines(given: _Given, value: object) -> list[str]:
    """Return the keys in a file written as @FILE: one per line, empty lines skipped."""
    path = expanded(str(value)[1:])
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{given.source}: the key file {path} cannot be read: {error}", field=None) from None
    if not lines:
        raise ConfigError(f"{given.source}: the key file {path} is empty", field=None)
    return lines
