"""The parts of the site that are not pages in docs: a hook of MkDocs, and an extension of Griffe (see mkdocs.yml).

- Pages outside docs (README.md, reproduce/README.md, ...) become pages of the site.
- The list of modules is made by ``tools/modules.py``.
- The reference is made of ``tests/public_names.txt``: each public name is documented once, on the page of the package
  that a user imports it from; other packages that have it too link there.
- Links that leave docs lead to the repository. A link to a file that does not exist stays, so the strict build fails.
- Pages of the tutorial get the outputs of their cells, from the notebooks that tools/tutorial.py has executed.
- Equations become MathML.
- Docstrings are in reStructuredText's roles and simple tables; both are translated to Markdown.
"""

from __future__ import annotations

import base64
import html
import json
import posixpath
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-policy.md": "SECURITY.md",
    "code-of-conduct.md": "CODE_OF_CONDUCT.md",
    "reproduce.md": "reproduce/README.md",
    "reproduce-bluefog.md": "reproduce/bluefog.md",
    "reproduce-bluefog-training.md": "reproduce/bluefog-training.md",
    "reproduce-ring-star.md": "reproduce/ring-star.md",
    "reproduce-bagua.md": "reproduce/bagua.md",
    "reproduce-horovod.md": "reproduce/horovod.md",
}
"""Pages of the site and the files outside docs that they show."""
TUTORIAL = ROOT / "out" / "tutorial"
NAMES = (ROOT / "tests" / "public_names.txt").read_text().split()
ALIASES = ("shoal.bluefog", "shoal.topology_util")
"""Packages of second names: whatever they have in common with another package is documented there."""
SECTIONS = {
    "runtime": "Start, rank and size",
    "ops": "Operations",
    "execution": "Operations",
    "optim": "Training",
    "errors": "Errors",
}
"""Headings of the page of ``shoal`` itself, by the folder where a name is defined."""
_ROLE = re.compile(r":(?:func|class|meth|attr|data|mod|exc|obj):`(~?)([^`<]+?)(?:\s*<([^>]+)>)?`")


def package_of(name: str) -> str:
    return name.rpartition(".")[0]


def page_of(package: str) -> str:
    """The page of a package: each integration in ``frameworks`` and ``compat`` has one, with all of its modules."""
    parts = package.split(".")
    return "reference/" + "-".join(parts[1 : 3 if parts[1:2] in (["frameworks"], ["compat"]) else 2] or parts) + ".md"


class Reference:
    """Where each public name is documented."""

    def __init__(self, package: griffe.Module) -> None:
        self.package = package
        self.home: dict[str, str] = {}
        exported = {f"shoal.{name}" for name in (str(one) for one in package.exports or ())}
        for name in sorted(NAMES, key=lambda name: self._order(name, exported)):
            found = self.get(name)
            if found is not None and not found.is_module:
                self.home.setdefault(found.path, name)

    @staticmethod
    def _order(name: str, exported: set[str]) -> int:
        """First ``shoal.__all__``, then packages, last their second names."""
        package = package_of(name)
        if package == "shoal":
            return 0 if name in exported else 3
        return 2 if package in ALIASES else 1

    def get(self, name: str) -> griffe.Object | None:
        """The object behind a name; None if the source does not show one, as for constants that are unpacked."""
        try:
            found = self.package[name.removeprefix("shoal.")]
            return found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None

    def page(self, page: str) -> str:
        """The Markdown of a page."""
        packages = sorted({package_of(name) for name in NAMES if page_of(package_of(name)) == page})
        title = "shoal" if page == "reference/shoal.md" else packages[0]
        # Other pages have the names, too, as second names or in prose: a search finds this one first.
        boost = ["---", "search:", "  boost: 4", "---", ""] if title == "shoal" else []
        lines = [*boost, f"# {title}", ""]
        for package in packages:
            if package != packages[0]:
                lines += [f"## {package}", ""]
            lines += self._of_package(package)
        return "\n".join(lines)

    def _of_package(self, package: str) -> list[str]:
        lines = [f"::: {package}", "    options:", "      members: false", "      show_root_heading: false", ""]
        found = {name: self.get(name) for name in NAMES if package_of(name) == package}
        homes = {name: self.home[one.path] for name, one in found.items() if one is not None and not one.is_module}
        here = [name for name, home in homes.items() if home == name]
        constants = [name.rpartition(".")[2] for name, one in found.items() if one is None]
        if package == "shoal":
            for section in dict.fromkeys([*SECTIONS.values(), "More"]):
                inside = [name for name in here if self._section(name) == section]
                if inside:
                    lines += [f"## {section}", "", *(f"::: {name}\n" for name in inside)]
        else:
            lines += [f"::: {name}\n" for name in here]
        if len(homes) > len(here):
            links = (f"[`{name.rpartition('.')[2]}`][{home}]" for name, home in homes.items() if home != name)
            lines += [f"**Also in `{package}`:** {', '.join(links)}.", ""]
        if constants:
            lines += [
                f"**Second names and constants of `{package}`:** {', '.join(f'`{name}`' for name in constants)}.",
                "",
            ]
        return lines

    def _section(self, name: str) -> str:
        found = self.get(name)
        return SECTIONS.get(found.path.split(".")[1] if found is not None else "", "More")


@cache
def reference() -> Reference:
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    package = loader.load("shoal")
    loader.expand_wildcards(package, external=False)
    return Reference(package)  # type: ignore[arg-type]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that have no file in docs."""
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "modules.md", content=runpy.run_path(str(ROOT / "tools/modules.py"))["page"]()))
    for page in sorted({page_of(package_of(name)) for name in NAMES}):
        files.append(File.generated(config, page, content=reference().page(page)))
    for notebook in sorted(TUTORIAL.glob("*.ipynb")):
        files.append(File.generated(config, f"tutorial/{notebook.name}", content=notebook.read_text()))
        for name, picture in _pictures(notebook).items():
            files.append(File.generated(config, f"tutorial/{name}", content=picture))
    return files


def _pictures(notebook: Path) -> dict[str, bytes]:
    """The pictures of a notebook, by the names of their files."""
    shown = [one["data"]["image/png"] for cell in _code_cells(notebook) for one in cell["outputs"] if "data" in one]
    return {f"{notebook.stem}-{number}.png": base64.b64decode(one) for number, one in enumerate(shown, 1)}


def _code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def with_outputs(markdown: str, notebook: Path) -> str:
    """A page of the tutorial with the outputs below its cells, and a link to the notebook below its title.

    Raises:
        PluginError: The notebook was not executed since the page has changed.
    """
    cells, picture = iter(_code_cells(notebook) if notebook.exists() else []), 0

    def output(match: re.Match[str]) -> str:
        nonlocal picture
        cell = next(cells, None)
        if cell is None or cell["source"] != match[1].rstrip("\n"):
            raise PluginError(f"{notebook} does not have this page's cells: execute it by python tools/tutorial.py")
        shown = [match[0]]
        for one in cell["outputs"]:
            if "text" in one:
                shown.append(f"```text\n{one['text'].rstrip()}\n```\n")
            else:
                picture += 1
                shown.append(f"![{one['data']['text/plain']}]({notebook.stem}-{picture}.png)\n")
        return "\n".join(shown)

    link = f"[Download this page as a Jupyter notebook]({notebook.name}){{ download }}"
    markdown = re.sub(r"^```python\n(.*?)^```\n", output, markdown, flags=re.DOTALL | re.MULTILINE)
    title, _, text = markdown.partition("\n")
    return f"{title}\n\n{link}\n{text}"


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Let browsers show equations without a script: MathML in place of LaTeX."""

    def equation(match: re.Match[str]) -> str:
        latex = html.unescape(match[2]).strip()
        return convert(latex[2:-2], display="block" if match[1] == "div" else "inline")

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', equation, content, flags=re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to pages of the site, or to the repository."""
    here = page.file.src_uri
    source = ROOT_PAGES.get(here, f"docs/{here}")
    pages = {file: site for site, file in ROOT_PAGES.items()}

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match[1].partition("#")
        if not target or re.match(r"\w+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if site and files.get_file_from_path(site):
            return f"]({posixpath.relpath(site, posixpath.dirname(here) or '.')}{mark}{anchor})"
        if (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"]({config.repo_url.rstrip('/')}/{kind}/main/{path}{mark}{anchor})"
        return match[0]

    if re.match(r"tutorial/\d", here):
        markdown = with_outputs(markdown, TUTORIAL / f"{posixpath.basename(here)[:-3]}.ipynb")
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else re.sub(r"\]\(([^)\s]+)\)", link, part) for part in parts)


class Docstrings(griffe.Extension):
    """Translates docstrings to Markdown, with links to public names."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.path != "shoal":
            return
        loader.expand_wildcards(pkg, external=False)
        _translate(pkg, Reference(pkg))


def _translate(one: griffe.Object, names: Reference) -> None:
    if one.docstring is not None:
        one.docstring.value = markdown_of(one.docstring.value, lambda target: _public(one, target, names))
    for member in one.members.values():
        if not isinstance(member, griffe.Alias):
            _translate(member, names)


def markdown_of(text: str, link: Any) -> str:
    """Roles, simple tables and literal blocks of a docstring in Markdown. ``link`` finds a public name, or None."""

    def role(match: re.Match[str]) -> str:
        label, target = (match[2], match[3] or match[2]) if match[3] else (match[2].rpartition(".")[2], match[2])
        name = link(target)
        shown = label if match[1] or match[3] else match[2]
        return f"[`{shown}`][{name}]" if name else f"`{shown}`"

    text = re.sub(r"(?<=[\w)])::$", ":", text, flags=re.MULTILINE)
    text = re.sub(r" ::$", "", text, flags=re.MULTILINE)
    text = _ROLE.sub(role, text)
    text = re.sub(r":mod:`([^<`]+) <([^>]+)>`", r"\1", text)
    return _tables(text)


def _tables(text: str) -> str:
    """Simple tables: rows between lines of ``=``."""
    lines, made, at = text.split("\n"), [], 0
    while at < len(lines):
        rule = lines[at]
        if not re.fullmatch(r"\s*=+( +=+)+", rule):
            made.append(rule)
            at += 1
            continue
        ends = [other for other in range(at + 1, len(lines)) if lines[other] == rule][:2]
        starts = [match.start() for match in re.finditer(r"=+", rule)]
        rows = [
            [line[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]
            for line in lines[at + 1 : ends[-1]]
            if line != rule
        ]
        rows.insert(1, ["---"] * len(starts))
        made += ["| " + " | ".join(row) + " |" for row in rows]
        at = ends[-1] + 1
    return "\n".join(made)


def _public(one: griffe.Object, target: str, names: Reference) -> str | None:
    """The public name behind a name in the docstring of an object: its own, or that of its class with a member."""
    target = target.strip("()")
    for path in (target, _resolved(one, target)):
        if not path or not path.startswith("shoal"):
            continue
        owner, _, member = path.rpartition(".")
        found = _found(names, path)
        if found is not None and found.is_module:
            return path if path in {package_of(name) for name in NAMES} else None
        if found is not None and found.path in names.home:
            return names.home[found.path]
        parent = _found(names, owner)
        if found is not None and parent is not None and parent.path in names.home and found.docstring is not None:
            return f"{names.home[parent.path]}.{member}" if member[0] != "_" else None
    return None


def _resolved(one: griffe.Object, target: str) -> str | None:
    first, _, rest = target.partition(".")
    for scope in (one, one.parent):
        if scope is None:
            continue
        if first in scope.members:
            return f"{scope.path}.{target}"
    try:
        return one.resolve(first) + (f".{rest}" if rest else "")
    except griffe.NameResolutionError:
        return None


def _found(names: Reference, path: str) -> griffe.Object | None:
    return names.package if path == "shoal" else names.get(path)
