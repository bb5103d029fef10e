"""Check of statements: only those that read the store's own tables are allowed.

The engine's own parser analyses the statement, so that the check sees what the engine would run.
First the parser writes it in canonical form: a single statement without comments or trailing
data. Only that form is run. Then the parser shows the form as syntax tree and as unresolved query
tree, which together contain every table, function, format and clause. Both are checked against
lists of what is allowed.

Source: ``formatQuery``, ``EXPLAIN AST`` and ``EXPLAIN QUERY TREE run_passes = 0`` of ClickHouse.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .allowlist import TABLE_FUNCTIONS, may_name, may_read
from .errors import ACCESS_DENIED, BAD_ARGUMENTS, UNKNOWN_FORMAT, QueryError, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .allowlist import Functions
    from .session import ReadOnlySession

CANONICAL = "SELECT formatQuery({statement:String}) AS canonical"

FORMAT_CLAUSE = re.compile(r"\nFORMAT (\w+)\Z")
NAME = r"(?:[A-Za-z_][A-Za-z0-9_]*|`[A-Za-z_][A-Za-z0-9_]*`)"
SHOW = re.compile(rf"SHOW (?:DATABASES|TABLES(?: FROM {NAME})?)(?: (?:NOT )?I?LIKE '[^'\\]*')?")
DESCRIBE = re.compile(rf"DESCRIBE TABLE ((?:{NAME}\.)?{NAME})")
"""The two other allowed forms. Syntax trees do not show conditions of SHOW: it must have none."""

SELECTS = ("SELECT", "WITH", "(")

FORMATS = frozenset(
    {
        "Arrow", "ArrowStream", "CSV", "CSVWithNames", "CSVWithNamesAndTypes", "JSON",
        "JSONColumns", "JSONColumnsWithMetadata", "JSONCompact", "JSONCompactColumns",
        "JSONCompactEachRow", "JSONCompactEachRowWithNames", "JSONCompactEachRowWithNamesAndTypes",
        "JSONCompactStrings", "JSONEachRow", "JSONLines", "JSONObjectEachRow", "JSONStrings",
        "JSONStringsEachRow", "Markdown", "NDJSON", "Native", "Null", "Parquet", "Pretty",
        "PrettyCompact", "PrettyCompactMonoBlock", "PrettyMonoBlock", "PrettyNoEscapes",
        "PrettySpace", "RowBinary", "RowBinaryWithNames", "RowBinaryWithNamesAndTypes", "TSKV",
        "TSV", "TSVRaw", "TSVRawWithNames", "TSVWithNames", "TSVWithNamesAndTypes",
        "TabSeparated", "TabSeparatedRaw", "TabSeparatedRawWithNames", "TabSeparatedWithNames",
        "TabSeparatedWithNamesAndTypes", "Values", "Vertical", "XML",
    }
)  # fmt: skip
"""Allowed formats. Formats that need a schema file or a template are not allowed."""

NODES = frozenset(
    {
        "ArrayJoin", "Asterisk", "ColumnsExceptTransformer", "ColumnsListMatcher",
        "ColumnsRegexpMatcher", "ColumnsTransformerList", "ExpressionList",
        "Function", "Identifier", "InterpolateElement", "Literal", "OrderByElement",
        "QualifiedAsterisk", "QualifiedColumnsListMatcher", "QualifiedColumnsRegexpMatcher",
        "SampleRatio", "SelectIntersectExceptQuery", "SelectQuery", "SelectWithUnionQuery",
        "Subquery", "TableExpression", "TableIdentifier", "TableJoin", "TablesInSelectQuery",
        "TablesInSelectQueryElement", "WindowDefinition", "WindowListElement", "WithElement",
    }
)  # fmt: skip
"""Allowed nodes of the syntax tree: those of a plain SELECT, without ``Set`` (SETTINGS)."""

MAX_NODES = 1_000
"""Nodes of a statement's query tree, with each alias replaced by its expression at each use.

The engine puts a copy of a constant, of up to 1 MiB, into each node that it folds, and no limit of
its own stops these copies: its ``max_expanded_ast_elements`` counts each expression alone. The
largest statement of our own has 358 nodes. A list of literals is one node, however long it is."""

TREE_NODE = re.compile(r"( *)([A-Z_ ]+) id: \d+")
DEFINED = re.compile(r"(?:alias|cte_name): ([^, ]+)")
USED = re.compile(r"(?:identifier|function_name): ([^, ]+)")
"""Names up to a comma or a space, so that a definition and its uses are cut in the same way."""

TABLE_SECTIONS = frozenset(
    {"JOIN TREE", "LEFT TABLE EXPRESSION", "RIGHT TABLE EXPRESSION", "TABLE EXPRESSION"}
)
"""Parts of a query tree with tables. Their aliases name columns' tables, not expressions."""

FUNCTION_NAME = re.compile(r"function_name: ([^,\s]+)")
IDENTIFIER_NAME = re.compile(r"identifier: ([^,\s]+)")
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`", re.DOTALL)
STATE_PARAMETER = re.compile(r"\{\w+:[^}]*(?<!Simple)AggregateFunction")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]{1,256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """Allowed statement in canonical form."""

    sql: str
    """Statement without its FORMAT clause."""

    output_format: str


def check_statement(
    text: str,
    *,
    parameters: Mapping[str, str],
    default_format: str,
    functions: Functions,
    handle: ReadOnlySession,
) -> Statement:
    """Return the statement in canonical form, if it is allowed.

    Args:
        text: Statement as received.
        parameters: Bound parameters, escaped as ClickHouse does.
        default_format: Format if the statement names none.
        functions: Allowed functions.
        handle: Read-only session for parsing.

    Raises:
        QueryError: The statement is invalid, or does more than read the store's own tables.
    """
    if "\0" in text:
        raise QueryError(BAD_ARGUMENTS, "the statement contains a NUL character")
    canonical = _canonical(text, handle)
    clause = FORMAT_CLAUSE.search(canonical)
    sql = canonical if clause is None else canonical[: clause.start()]
    output_format = default_format if clause is None else clause[1]
    if output_format not in FORMATS:
        raise QueryError(UNKNOWN_FORMAT, f"format {output_format} is not supported here")
    _check_names(canonical, parameters)
    described = DESCRIBE.fullmatch(sql)
    if described is not None:
        _check_table(described[1].replace("`", ""))
    elif sql.startswith(SELECTS):
        _check_syntax_tree(handle.lines("EXPLAIN AST ", sql, parameters), functions)
        tree = handle.lines("EXPLAIN QUERY TREE run_passes = 0 ", sql, parameters)
        _check_query_tree(tree, functions)
        _check_size(tree)
    elif SHOW.fullmatch(sql) is None:
        raise refused(f"{sql.split(maxsplit=1)[0] if sql else 'an empty statement'} is refused")
    return Statement(sql=sql, output_format=output_format)


def _canonical(text: str, handle: ReadOnlySession) -> str:
    try:
        answer = handle.run(CANONICAL, "JSONEachRow", {"statement": escaped(text)})
    except QueryError as error:
        reason = str(error).partition(": In scope SELECT formatQuery")[0].rstrip(" :")
        raise QueryError(error.code, reason) from error
    document: dict[str, str] = json.loads(answer)
    return document["canonical"]


def _check_names(canonical: str, parameters: Mapping[str, str]) -> None:
    """Refuse names with characters that need escaping: the trees show names unescaped, in lines."""
    for quoted in QUOTED.findall(canonical):
        if quoted.startswith("`") and "\\" in quoted:
            raise refused("a name with a control character, a quote or a backslash is refused")
        if quoted.startswith(("` ", "`,", "``")):
            raise refused("an empty name, or one that begins with a space or a comma, is refused")
    if STATE_PARAMETER.search(canonical):
        # The engine reads such a value as the bytes of a state, and no setting changes that.
        raise refused("a bound aggregate state is refused")
    if ":Identifier}" in canonical:
        for value in parameters.values():
            if not PLAIN_NAME.fullmatch(value):
                raise refused(
                    "bound values beside a bound name must be plain words; this one is refused"
                )


def escaped(text: str) -> str:
    r"""Return a string as the value of a bound parameter, with tab, newline and ``\`` escaped."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def _check_syntax_tree(lines: list[str], functions: Functions) -> None:
    """Check each line alone. A name with a line break could add lines, but not hide any."""
    if not lines:
        raise refused("a statement without a syntax tree is refused")
    for depth, node, name in _nodes(lines):
        if node not in NODES:
            raise refused(f"{node} is refused")
        if node == "Literal" and depth == 1:
            raise refused("INTO OUTFILE is refused")
        if node == "TableIdentifier":
            _check_table(name)
        elif node == "Identifier":
            _check_identifier(name)
        elif (
            node == "Function"
            and not functions.allows(name)
            and name.lower() not in TABLE_FUNCTIONS
        ):
            raise _unknown_function(name)


def _nodes(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (depth, kind, next word) of each line."""
    for line in lines:
        words = line.lstrip(" ").split(" ", 2)
        yield len(line) - len(line.lstrip(" ")), words[0], words[1] if len(words) > 1 else ""


def _check_query_tree(lines: list[str], functions: Functions) -> None:
    """Check all names on lines that can contain one, even if they are only part of an alias."""
    if not lines:
        raise refused("a statement without a query tree is refused")
    for line in lines:
        kind = line.strip().partition(" ")[0]
        if kind == "TABLE_FUNCTION":
            _check_functions(line, lambda name: name.lower() in TABLE_FUNCTIONS)
        elif kind == "FUNCTION":
            _check_functions(line, functions.allows)
        elif kind == "IDENTIFIER":
            for name in IDENTIFIER_NAME.findall(line):
                _check_identifier(name)


@dataclass(slots=True)
class _TreeNode:
    """Node of a query tree. ``uses`` has the names that it refers to."""

    is_counted: bool
    uses: tuple[str, ...]
    children: list[_TreeNode] = field(default_factory=list)


def _check_size(lines: list[str]) -> None:
    """Refuse a statement that has more than `MAX_NODES` nodes once its aliases are replaced.

    The engine resolves a name in its scope. Here it counts as all expressions of that name, except
    those that are being replaced already, so the count is never too small.
    """
    root, definitions = _read_tree(lines)
    num_nodes = 0
    waiting: list[tuple[_TreeNode, tuple[_TreeNode, ...]]] = [(root, ())]
    while waiting:
        node, replaced = waiting.pop()
        num_nodes += node.is_counted
        if num_nodes > MAX_NODES:
            raise QueryError(
                BAD_ARGUMENTS,
                f"the statement has more than {MAX_NODES} nodes with its aliases replaced: split it"
                " up, or compute repeated expressions in a subquery",
            )
        waiting += [(child, replaced) for child in node.children]
        for part in {part for name in node.uses for part in name.split(".")}:
            for found in definitions.get(part, ()):
                if all(found is not other for other in replaced):
                    waiting.append((found, (*replaced, found)))


def _read_tree(lines: list[str]) -> tuple[_TreeNode, dict[str, list[_TreeNode]]]:
    """Return the root of a query tree, and its expressions and CTEs by the first part of the name.

    A call may be of a lambda that has the function's name as its alias.
    """
    root = _TreeNode(is_counted=False, uses=())
    definitions: dict[str, list[_TreeNode]] = {}
    path: list[tuple[int, _TreeNode]] = [(-1, root)]
    section = ""
    for line in lines:
        found = TREE_NODE.match(line)
        if found is None:
            section = line.strip()
            continue
        while path[-1][0] >= len(found[1]):
            path.pop()
        node = _TreeNode(
            is_counted=found[2] != "LIST",
            uses=tuple(USED.findall(line)) if found[2] in {"FUNCTION", "IDENTIFIER"} else (),
        )
        path[-1][1].children.append(node)
        path.append((len(found[1]), node))
        for name in () if section in TABLE_SECTIONS else DEFINED.findall(line):
            definitions.setdefault(name.split(".")[0], []).append(node)
        section = ""
    return root, definitions


def _check_functions(line: str, is_allowed: Callable[[str], bool]) -> None:
    for name in FUNCTION_NAME.findall(line):
        if not is_allowed(name):
            raise _unknown_function(name)


def _check_table(name: str) -> None:
    if not may_read(name):
        raise QueryError(ACCESS_DENIED, f"table {name} cannot be read here")


def _check_identifier(name: str) -> None:
    if not may_name(name):
        raise QueryError(ACCESS_DENIED, f"{name} cannot be read here")


def _unknown_function(name: str) -> QueryError:
    return QueryError(ACCESS_DENIED, f"function {name} cannot be called here")
