"""Configuration as people meet it: YAML files, `--set` overrides, errors that name the key, annotated printout."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from diloco.config.fields import OneOf
from diloco.config.schema import Config, IslandConfig
from diloco.errors import ConfigError


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Load the configuration in `path` (or the defaults), changed by overrides such as `sync.every=100`."""
    return parse_config(overrides_tree(overrides, load_tree(Path(path)) if path is not None else {}))


def overrides_tree(overrides: Iterable[str], onto: dict[str, Any] | None = None) -> dict[str, Any]:
    """Turn overrides such as `island.batch=8` into sections: by themselves, or on top of what a file says."""
    tree = onto or {}
    for override in overrides:
        _override(tree, override)
    return tree


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn sections into dotted keys: {"inner.lr": 4e-4}."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return leaves


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate a tree of sections. Raise ConfigError with one line for each mistake, which names the key."""
    try:
        return Config.model_validate({name: section for name, section in tree.items() if section is not None})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(details) for details in error.errors())) from None


def own_island(own: dict[str, Any]) -> IslandConfig:
    """Return an island's own settings before it knows the run, which says how large a batch is unless they do."""
    island = own.get("island", {})
    accumulate = island.get("accumulate", 1)
    parts = [island.get("fsdp", 1), 1 if accumulate == "auto" else accumulate]
    fitting = {"batch": parts[0] * parts[1]} if all(isinstance(part, int) for part in parts) else {}
    return parse_config({"island": fitting | island}).island


def render_config(config: Config) -> str:
    """Format the whole effective configuration as YAML, each field with its meaning."""
    return "\n".join(_render(config, indent=0)) + "\n"


def render_chosen(config: Config) -> str:
    """Format the keys that were set as YAML, each with its meaning."""
    return "\n".join(_render(config, indent=0, chosen=True)) + "\n"


class _UniqueKeys(yaml.SafeLoader):
    """Refuse two equal keys in a mapping, where YAML quietly keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(f"{key.value}: written twice, in lines {lines[key.value]} and {line}: keep one")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


@contextmanager
def reading_yaml(path: Path, *, hint: str) -> Iterator[None]:
    """Turn what is wrong with the file into an error of one line that says where."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file ({hint})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None


def load_tree(path: Path) -> dict[str, Any]:
    """Load a YAML file as it stands, not yet validated; an empty one has no sections."""
    with reading_yaml(path, hint=f"diloco init {path} writes one"):
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, not {type(tree).__name__}")
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {override!r}: write --set section.key=value, for instance --set sync.every=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: {text!r} is not a valid value") from None
    *sections, leaf = path.strip().split(".")
    for section in sections:
        below = tree.get(section)
        tree[section] = dict(below) if isinstance(below, dict) else {}
        tree = tree[section]
    tree[leaf] = value


def _explain(details: Any) -> str:
    location = [str(part) for part in details["loc"]]
    path, given = ".".join(location), details["input"]
    match details["type"]:
        case "extra_forbidden":
            return f"{path}={_short(given)}: there is no such key; {_nearest_key(location)}"
        case "literal_error":
            return f"{path}={given!r}: {_choices(details['ctx']['expected'], given)}"
        case "value_error" if not path or isinstance(given, dict | BaseModel):
            return str(details["ctx"]["error"])  # our own validators already name keys and values
        case "value_error":
            return f"{path}={given!r}: {details['ctx']['error']}"
        case "model_type":
            return f"{path}={_short(given)}: this is a section: write `{path}: {{key: value}}`"
        case _:
            return f"{path}={_short(given)}: {details['msg'][:1].lower()}{details['msg'][1:]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest_key(location: list[str]) -> str:
    *sections, wrong = location
    prefix = "".join(f"{section}." for section in sections)
    everywhere = {path: path.rpartition(".")[2] for path in _all_paths(Config)}
    here = [leaf for path, leaf in everywhere.items() if path == prefix + leaf]
    if close := difflib.get_close_matches(wrong, here, n=1, cutoff=0.6):
        return f"did you mean {prefix}{close[0]}?"
    if found := [path for path, leaf in everywhere.items() if leaf == wrong]:
        return f"did you mean {' or '.join(found)}?"
    if close := difflib.get_close_matches(wrong, set(everywhere.values()), n=1, cutoff=0.75):
        return f"did you mean {' or '.join(p for p, leaf in everywhere.items() if leaf == close[0])}?"
    return f"valid here: {', '.join(here)}"


def _choices(expected: str, given: object) -> str:
    names = [name.strip().strip("'") for name in expected.replace(" or ", ", ").split(",")]
    close = difflib.get_close_matches(str(given), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"must be one of {', '.join(names)}{hint}"


def all_keys() -> list[str]:
    """List every setting by its dotted name."""
    paths = list(_all_paths(Config))
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def _all_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_paths(field.annotation, f"{prefix}{name}.")


def _render(section: BaseModel, indent: int, *, chosen: bool = False) -> Iterator[str]:
    pad = " " * indent
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if chosen and name not in section.model_fields_set:
            continue
        if isinstance(value, BaseModel):
            yield f"\n{name}:{'':{max(1, 39 - len(name))}}# {type(value).__doc__}"
            yield from _render(value, indent + 2, chosen=chosen)
        else:
            yield f"{f'{pad}{name}: {_scalar(value)}':<39} # {field.description}{_allowed(field)}"


def _allowed(field: FieldInfo) -> str:
    """Format the choices of a field that has a list of them."""
    kinds = [field.annotation, *get_args(field.annotation)]
    names = [str(name) for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    checks = [getattr(limit, "func", None) for limit in field.metadata]
    names += [name for check in checks if isinstance(check, OneOf) for name in check.names]
    return f" [{', '.join(names)}]" if len(names) > 1 else ""


def _scalar(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


def first_difference(name: str, then: Any, now: Any) -> str | None:
    """Describe in words the first setting that differs between two trees; None if they are equal."""
    if isinstance(then, dict) and isinstance(now, dict):
        differences = (first_difference(f"{name}.{key}", then.get(key), now.get(key)) for key in {**then, **now})
        return next((found for found in differences if found), None)
    return None if then == now else f"{name}={then}, now it is {now}"
