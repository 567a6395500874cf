"""The directive `api`: the reference of public objects, written from their docstrings.

Its lines are full names. Each object gets an entry with its signature, and tables of its parameters and results with
their shapes. `:members:` names the methods to show, or `none`; by default all public ones of the class are shown.
`:table: none` leaves out the table of several entries.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from numpydoc.docscrape import NumpyDocString
from sphinx.util.docutils import SphinxDirective

SHAPE = re.compile(r"(?:(?:, or |, | or )?\([^()]*\))+")
FIELD = re.compile(r"^    (\w+): (.+?)(?:\s+= (.+?))?(?:  # (.+))?$", re.MULTILINE)
WORDS = ("and", "or", "the", "other", "others", "options")  # of lists of names and shapes
HIDDEN = ("self", "positional", "unknown")  # the last two collect arguments for an error message
TABLES = {"Parameters": "name", "Attributes": "name", "Returns": "result", "Yields": "result"}

CONSTANTS = {
    "sightline.b": "The number of the sequence: the leading axes of query, key and value, counted together in C order.",
    "sightline.h": "The number of the query head.",
    "sightline.i": "The position of the query.",
    "sightline.j": "The position of the key.",
    "sightline.s": "The scaled score, Q Kᵀ · scale.",
    "sightline.p": "The weight of the pair, in formulas of statistics.",
    "sightline.n": "The number of queries.",
    "sightline.m": "The number of keys.",
    "sightline.OVERVIEW": "The statistics that the explorer page shows, and that `watch` records by default: "
    "`(pooled(64, 64), top_k(8), entropy(), received())`. Their results take O(n) memory.",
    "sightline.data.NAMES": "The names that `load` accepts.",
    "sightline.transformers.NAME": 'The name in transformers\' interfaces: `attn_implementation="sightline"`.',
}


class Docstring(NumpyDocString):
    """A docstring, which may have the section `Call` of a layer."""

    sections = NumpyDocString.sections | {"Call": []}


def resolve(name: str) -> Any:
    """Return the object of a full name."""
    module, _, own_name = name.rpartition(".")
    if module == "sightline.lightning":  # its base class is of a package that need not be installed
        sys.modules.setdefault("pytorch_lightning", SimpleNamespace(Callback=object))  # type: ignore[arg-type]
    return getattr(import_module(module), own_name)


def signature(value: Any) -> str:
    """Return the signature without types, which the tables have."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=empty) for p in found.parameters.values() if p.name not in HIDDEN]
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"<function \S+ at 0x[0-9a-f]+>", "...", text)


def fence(kind: str, argument: str, lines: list[str], ticks: int) -> list[str]:
    """Return a directive of Markdown."""
    return ["", "`" * ticks + "{" + kind + "} " + argument, *lines, "`" * ticks, ""]


def check_parameters(name: str, value: Any) -> None:
    """Raise an error if a docstring neither describes each parameter nor says whose parameters they are."""
    if re.search(r"(as in|are those of) `\w+`[.;]", inspect.getdoc(value) or ""):
        return
    described = " ".join(entry.name for entry in Docstring(inspect.getdoc(value) or "")["Parameters"])
    named = set(re.findall(r"\w+", described)) | set(HIDDEN)
    if missing := [parameter for parameter in inspect.signature(value).parameters if parameter not in named]:
        raise ValueError(f"the docstring of {name} lacks {', '.join(missing)}")


def prose(lines: list[str]) -> list[str]:
    """Return text of a docstring as Markdown: examples become blocks of code."""
    out: list[str] = []
    inside = False
    for line in [*lines, ""]:
        if not inside and line.lstrip().startswith(">>>"):
            inside = True
            out += ["", "```python"]
        if inside and not line.strip():
            inside = False
            out += ["```"]
        out.append(line if inside or line.startswith("    ") else escape(line))
    return out


def escape(text: str) -> str:
    """Return text in which Markdown's signs outside of code mean themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*$<\[])", r"\\\1", part) for part in parts)


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split())) or " "


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table without its empty columns."""
    kept = [k for k in range(len(columns)) if any(row[k].strip() for row in rows)]
    lines = [[columns[k] for k in kept], ["---"] * len(kept), *([cell(row[k]) for k in kept] for row in rows)]
    return ["", *("| " + " | ".join(line) + " |" for line in lines), ""]


def code(text: str) -> str:
    """Return text as code, if there is any."""
    return f"`{text}`" if text else ""


def codes(text: str) -> str:
    """Return names or shapes as code, each of them alone, so that lines break between them."""
    return re.sub(
        r"\([^()]*\)|[^\s,()]+", lambda part: part.group() if part.group() in WORDS else code(part.group()), text
    )


def split_shape(text: str) -> tuple[str, str]:
    """Split a type such as `(..., H, n, d_k) float32, optional` into its shape and the rest."""
    match = SHAPE.match(text)
    return (match.group(), text[match.end() :].lstrip(" ,;:")) if match else ("", text)


def entries(section: str, items: list[Any], title: str = "") -> list[str]:
    """Return the table of a section with names, shapes, types and meanings."""
    first = TABLES[section]
    rows = []
    for name, kind, text in items:
        shape, rest = split_shape(kind)
        rest = code(rest) if re.fullmatch(r"[A-Z]\w+", rest) else escape(rest)  # the name of a class, or words
        rows.append([codes(name.replace("\\", "")), codes(shape), rest, escape(" ".join(text))])
    return ["", f"**{title or section}**", *table([first, "shape", "type", "meaning"], rows)]


def body(text: str) -> list[str]:
    """Return a docstring as Markdown."""
    found = Docstring(text)
    lines = prose([*found["Summary"], "", *found["Extended Summary"]])
    for section in TABLES:
        if found[section]:
            lines += entries(section, found[section])
    if found["Call"]:
        lines += calls(list(found["Call"]))
    if found["Raises"]:
        rows = [[codes(kind or name), escape(" ".join(text))] for name, kind, text in found["Raises"]]
        lines += ["", "**Raises**", *table(["error", "reason"], rows)]
    for section in ("Notes", "References", "Examples"):
        if found[section]:
            lines += ["", f"**{section}**", "", *prose(list(found[section]))]
    return lines


def fields(cls: type) -> list[str]:
    """Return the table of a dataclass's fields. Its comments say what they mean."""
    found = FIELD.findall(inspect.getsource(cls).split("\n    def ")[0])
    rows = []
    for name, kind, default, comment in found:
        if not name.startswith("_"):
            shape, rest = split_shape(comment)
            rows.append([code(name), codes(shape), code(kind.replace('"', "")), code(default), escape(rest)])
    return ["", "**Fields**", *table(["name", "shape", "type", "default", "meaning"], rows)] if rows else []


def members(cls: type, names: list[str], full: str) -> list[str]:
    """Return the entries of a class's methods and properties."""
    lines: list[str] = []
    if names == ["none"]:
        return lines
    for name in names or [name for name in vars(cls) if not name.startswith("_")]:
        value = inspect.getattr_static(cls, name)
        plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        text = inspect.getdoc(plain)
        if not text or not (callable(plain) or isinstance(plain, property)):
            if names:
                raise ValueError(f"{full}.{name} has no docstring")
            continue
        kind = "property" if isinstance(plain, property) else "method"
        argument = f"{name}{'' if kind == 'property' else signature(getattr(cls, name))}"
        flags = [":classmethod:", ""] if isinstance(value, classmethod) else []
        lines += fence(f"py:{kind}", re.sub(r"\(cls, |\(cls\)", "(", argument), flags + body(text), 5)
    return lines


def calls(lines: list[str]) -> list[str]:
    """Return the table of a layer's section `Call`, and the text after it."""
    end = lines.index("") if "" in lines else len(lines)
    found = NumpyDocString("\n".join(["Layer.", "", "Parameters", "----------", *lines[:end]]))
    return [*entries("Parameters", found["Parameters"], "Call"), *prose(lines[end:])]


class Api(SphinxDirective):
    """Write the entries of the names in its lines."""

    has_content = True
    option_spec: ClassVar = {"members": directives.unchanged, "table": directives.unchanged}

    def run(self) -> list[Any]:
        """Return the nodes of all entries, after a table of their first sentences if there are several."""
        names = [line.strip() for line in self.content if line.strip()]
        lines: list[str] = []
        if len(names) > 1 and not CONSTANTS.keys() >= set(names) and "table" not in self.options:
            rows = [[f"{{py:obj}}`~{name}`", summary(name)] for name in names]
            lines += table(["name", "purpose"], rows)
        for name in names:
            lines += self.entry(name)
        holder = nodes.Element()
        holder.document = self.state.document
        source = StringList(lines, str(self.env.doc2path(self.env.docname)))
        self.state.nested_parse(source, self.content_offset, holder)
        return holder.children

    def entry(self, name: str) -> list[str]:
        """Return one object as Markdown."""
        value = resolve(name)
        text = documentation(name, value)
        plain = inspect.unwrap(value) if callable(value) else value
        if inspect.isclass(value):
            kind = "exception" if issubclass(value, Exception) else "class"
        else:
            kind = "data" if name in CONSTANTS else "function"
        if kind == "function":
            check_parameters(name, value)
        module, _, own_name = name.rpartition(".")
        argument = own_name + (signature(value) if kind in ("function", "class") else "")
        lines = [f":module: {module}", "", *body(text)]
        if kind == "class":
            if hasattr(value, "__dataclass_fields__"):
                lines += fields(value)
            lines += members(value, self.options.get("members", "").split(), name)
        if inspect.isclass(plain) or inspect.isfunction(plain):
            lines += self.source(plain)
        return fence(f"py:{kind}", argument, lines, 7)

    def source(self, value: Any) -> list[str]:
        """Return a link to the file that defines an object."""
        path = Path(inspect.getsourcefile(value) or "").resolve()
        root = Path(self.config.root_of_sources)
        if not path.is_relative_to(root):
            return []
        depth = "../" * (self.env.docname.count("/") + 1)
        self.env.note_dependency(path)
        name = path.relative_to(root / "src").as_posix()
        return ["", f"Source: [`{name}`]({depth}src/{name})", ""]


def documentation(name: str, value: Any) -> str:
    """Return the docstring of an object, or for a constant the comment of its module."""
    text = CONSTANTS.get(name) or inspect.getdoc(value)
    if not text:
        raise ValueError(f"{name} has no docstring")
    return text


def summary(name: str) -> str:
    """Return the first sentence of an object's docstring."""
    return " ".join(Docstring(documentation(name, resolve(name)))["Summary"])


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_config_value("root_of_sources", "", "env")
    app.add_directive("api", Api)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
