"""Checks on the repository itself: notebooks, package, wheel and site belong together.

Each check lists all that it found, so that one run shows everything there is to mend."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import nbformat
import pytest

import readme
import sidebar
from minivllm import __version__, _nbdocs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minivllm"
HAND_WRITTEN = {"__init__.py", "__main__.py", "_nbdocs.py"}
INSTRUMENTS = {"minivllm.bench", "minivllm.viz"}  # for notebooks, not for the engine
NO_TORCH = ["minivllm.engine.sequence", "minivllm.engine.block_manager", "minivllm.engine.scheduler"]
MAX_OUTPUT_BYTES = 1_500_000
NAMED_BY_SUBJECT = {"02_first_kernel.ipynb": "kernels.common"}  # all others are named by the module that they export


class Notebook:
    "One notebook, parsed as far as the checks need it"

    def __init__(self, path):
        self.name, self.number = path.name, sidebar.number(path.name)
        self.cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        self.code_cells = [cell for cell in self.cells if cell["cell_type"] == "code"]
        exports = (re.search(r"^#\|\s*default_exp\s+(\S+)", source(cell), re.M) for cell in self.code_cells)
        self.default_exp = next((match[1] for match in exports if match), None)

    def where(self, cell):
        "Where a finding stands: the notebook and the last line of the cell"
        return f"{self.name}: {source(cell).strip().splitlines()[-1]}"


@pytest.fixture(scope="session")
def notebooks():
    "Every notebook, in reading order"
    return [Notebook(ROOT / "nbs" / name) for name in sidebar.notebooks(ROOT / "nbs")]


def source(cell):
    "A cell's text"
    return "".join(cell["source"])


def directives(cell):
    "Names of the `#|` directives of a code cell: `export`, `gpu`, `eval`, ..."
    return set(re.findall(r"^#\|\s*([\w-]+)", source(cell), re.M))


def parse(cell):
    "A code cell as a syntax tree, without IPython's magics"
    code = re.sub(r"^\s*[%!?].*$", "pass", source(cell), flags=re.M)
    try:
        return compile(code, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        if source(cell).startswith("%%"):  # a cell in another language
            return ast.parse("")
        raise


def report(found, remedy=""):
    "The message of a failed check: one finding a line"
    return "\n  " + "\n  ".join(map(str, found)) + (f"\n{remedy}" if remedy else "")


def python(*args, cwd, timeout=300):
    "Run this Python as from a fresh shell in the folder `cwd`"
    outside = ("IN_TEST", "PYTHONPATH", "PYTHONSAFEPATH")
    result = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k not in outside},
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def tracked():
    "Files that are in git or would be added, relative to the root"
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = {Path(name) for name in listing.split("\0") if name}
    return sorted(f for f in files if (ROOT / f).is_symlink() or (ROOT / f).is_file())


def copy_to(folder):
    "Copy the repository, without what git ignores"
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture
def copy(tmp_path):
    "A copy of the repository that a check may write to"
    return copy_to(tmp_path / "repo")


def contents(folder, pattern):
    "Text of the files under `folder` that match, by relative name"
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in folder.rglob(pattern)}


def modules():
    "The package's modules by dotted name"
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


MODULES = modules()


# Notebooks and package in step


def test_export_leaves_no_difference(copy):
    before = contents(copy / "minivllm", "*.py")
    for path in (copy / "minivllm").rglob("*.py"):  # what no notebook writes again is stale
        if path.name not in HAND_WRITTEN:
            path.unlink()
    python("-c", "from nbdev.doclinks import nbdev_export; nbdev_export.__wrapped__()", cwd=copy)
    after = contents(copy / "minivllm", "*.py")
    found = [f"{name}: no notebook exports it" for name in sorted(before.keys() - after.keys())]
    found += [f"{name}: missing" for name in sorted(after.keys() - before.keys())]
    both = sorted(before.keys() & after.keys())
    found += [f"{name}: differs from its notebook" for name in both if before[name] != after[name]]
    assert not found, report(found, "run: make export, and remove what no notebook exports")


def test_clean_leaves_no_difference(copy):
    before = contents(copy / "nbs", "*.ipynb")
    python("-c", "from nbdev.clean import nbdev_clean; nbdev_clean.__wrapped__()", cwd=copy)
    after = contents(copy / "nbs", "*.ipynb")
    found = [name for name in sorted(before) if before[name] != after[name]]
    assert not found, report(found, "run: make clean-nbs")


# Stored outputs


VALUES = (ast.Attribute, ast.Subscript, ast.Compare, ast.BinOp, ast.Name, ast.Tuple, ast.List, ast.JoinedStr)
SILENT = {"hide", "export", "exporti", "exports", "default_exp", "notest", "gpu", "multi_gpu", "slow", "eval", "output"}


DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.IfExp, ast.For, ast.While)


def calls(node):
    "Names of the functions that a cell calls for certain: not those in definitions, branches and loops"
    if isinstance(node, DEFERRED):
        return
    if isinstance(node, ast.Call):
        yield ast.unparse(node.func)
    for child in ast.iter_child_nodes(node):
        yield from calls(child)


def shows_something(cell):
    "Whether running a cell leaves an output: it prints, plots or ends in a value"
    tree = parse(cell)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, VALUES) and not source(cell).rstrip().endswith(";"):
        return True
    return any(name in ("print", "display", "plt.show") or name.endswith(".plot") for name in calls(tree))


def test_outputs_are_stored(notebooks):
    found = []
    for nb in notebooks:
        for cell in nb.code_cells:
            if not cell["outputs"] and not directives(cell) & SILENT and shows_something(cell):
                found.append(nb.where(cell))
            images = [key for output in cell["outputs"] for key in output.get("data", {}) if key.startswith("image/")]
            if "fig-cap" in directives(cell) and not images:
                found.append(f"{nb.where(cell)} (no figure)")
    assert not found, report(found, "run: python tools/exec_nbs.py nbs/NOTEBOOK")


def test_no_output_is_an_error_or_a_dead_widget(notebooks):
    found = []
    for nb in notebooks:
        for cell in nb.code_cells:
            for output in cell["outputs"]:
                if output["output_type"] == "error":
                    found.append(f"{nb.where(cell)}: {output['ename']}")
                if any("widget" in key for key in output.get("data", {})):
                    found.append(f"{nb.where(cell)}: a widget (tqdm.auto? use plain tqdm)")
    assert not found, report(found)


def test_outputs_are_small(notebooks):
    sizes = {nb.name: sum(len(json.dumps(cell["outputs"])) for cell in nb.code_cells) for nb in notebooks}
    found = [f"{name}: {size / 1e6:.1f} MB of outputs" for name, size in sizes.items() if size > MAX_OUTPUT_BYTES]
    assert not found, report(found)


# The wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    "A wheel built from a source archive of the repository, unpacked far away from it"
    tmp = tmp_path_factory.mktemp("wheel")
    repo = copy_to(tmp / "repo")
    python("-m", "build", "--no-isolation", "--outdir", tmp / "dist", repo, cwd=tmp)  # the archive, and of it the wheel
    (built,) = (tmp / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp / "unpacked")
    return tmp / "unpacked"


def test_wheel_holds_the_whole_package(wheel):
    assert contents(wheel / "minivllm", "*.py").keys() == contents(PACKAGE, "*.py").keys()
    assert {p.name for p in wheel.iterdir() if p.suffix != ".dist-info"} == {"minivllm"}
    (info,) = wheel.glob("*.dist-info")
    assert "minivllm = minivllm.__main__:main" in (info / "entry_points.txt").read_text()


def test_wheel_imports_outside_the_repository(wheel, tmp_path):
    script = f"""
import importlib, sys
sys.path.insert(0, {str(wheel)!r})
for name in {sorted(set(MODULES) - {"minivllm.__main__"})!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(wheel)!r}), module.__file__
import minivllm
for name in minivllm.__all__:
    getattr(minivllm, name)
"""
    python("-I", "-c", script, cwd=tmp_path)


# Import direction


def imported(tree, module):
    "Full names of what the module or notebook with this syntax tree imports, at any depth"
    package = module if MODULES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def package_imports(tree, module=""):
    "Modules of this package that are imported, with the names that `minivllm` offers lazily followed to their modules"
    import minivllm

    for name in imported(tree, module):
        while name not in MODULES and "." in name:
            lazy = minivllm._EXPORTS.get(name.removeprefix("minivllm."))
            name = lazy or name.rpartition(".")[0]
            if lazy:
                break
        if name.startswith("minivllm."):
            yield name


@pytest.fixture(scope="session")
def trees():
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


@pytest.fixture(scope="session")
def places(notebooks):
    "Where in reading order the notebook stands that exports each module"
    return {f"minivllm.{nb.default_exp}": place for place, nb in enumerate(notebooks) if nb.default_exp}


def test_modules_import_only_what_was_explained_before(trees, places, notebooks):
    "Strictly earlier notebooks, and so no cycles either"
    found = []
    for module in sorted(places.keys() & trees.keys()):
        for target in package_imports(trees[module], module):
            if places.get(target, -1) >= places[module]:
                found.append(f"{module} ({notebooks[places[module]].name}) imports {target} ({notebooks[places[target]].name})")
    assert not found, report(found)


def test_notebooks_import_only_what_was_explained_before(notebooks, places):
    "A notebook may import its own module, and the instruments at any time"
    found = []
    for place, nb in enumerate(notebooks):
        if nb.number is None:
            continue
        for cell in nb.code_cells:
            for target in package_imports(parse(cell)):
                if target not in INSTRUMENTS and places.get(target, -1) > place:
                    found.append(f"{nb.name} imports {target} ({notebooks[places[target]].name})")
    assert not found, report(found)


def test_instruments_stay_out_of_the_engine(trees):
    found = []
    for module, tree in trees.items():
        for target in INSTRUMENTS.intersection(package_imports(tree, module)):
            if module not in {"minivllm.cli", "minivllm.workloads", *INSTRUMENTS}:
                found.append(f"{module} imports {target}")
    assert not found, report(found)


def test_nothing_imports_star(trees, notebooks):
    code = list(trees.items()) + [(nb.name, parse(cell)) for nb in notebooks for cell in nb.code_cells]
    found = [f"{where}: {name}" for where, tree in code for name in imported(tree, where) if name.endswith(".*")]
    assert not found, report(found)


def test_scheduling_never_names_torch(trees):
    found = []
    for start in NO_TORCH:
        seen, queue = set(), [start]
        while queue:
            module = queue.pop()
            seen.add(module)
            if any(name.split(".")[0] == "torch" for name in imported(trees[module], module)):
                found.append(f"{start} reaches torch in {module}")
            queue += set(package_imports(trees[module], module)) - seen
    assert not found, report(found)


@pytest.mark.parametrize("module", ["minivllm", *NO_TORCH])
def test_imports_without_torch(module, tmp_path):
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}; sys.exit('torch' in sys.modules)"
    python("-I", "-c", script, cwd=tmp_path)


# Conventions of the notebooks


def test_notebooks_open_as_they_should(notebooks):
    found = []
    for nb in notebooks:
        first = source(nb.cells[0])
        if nb.cells[0]["cell_type"] == "code" and not re.fullmatch(r"#\|\s*default_exp \S+", first.strip()):
            found.append(f"{nb.name}: the first cell is neither a default_exp alone nor the title")
        title = source(next(cell for cell in nb.cells if cell["cell_type"] == "markdown"))
        if not re.fullmatch(r"# [^\n]+\n+> [^\n]+", title.strip()):  # the site keeps nothing else of this cell
            found.append(f"{nb.name}: the first text is not just `# Title` and a `> one-line claim`")
    assert not found, report(found)


def test_one_notebook_one_module(notebooks):
    first = {nb.number: nb for nb in reversed(notebooks)}
    found = [  # other notebooks of a number continue the first: their names too
        f"{first[nb.number].name} and {nb.name} have the same number"
        for nb in notebooks
        if nb is not first[nb.number] and not nb.name.startswith(first[nb.number].name.removesuffix(".ipynb") + "_")
    ]
    exports = Counter(nb.default_exp for nb in notebooks if nb.default_exp)
    found += [f"{name} is the default_exp of {times} notebooks" for name, times in exports.items() if times > 1]
    for nb in notebooks:
        expected = NAMED_BY_SUBJECT.get(nb.name) or nb.name[3:].removesuffix(".ipynb")
        if nb.default_exp and nb.default_exp != expected:
            found.append(f"{nb.name} exports {nb.default_exp}")
        for cell in nb.code_cells:
            if re.search(r"^#\|\s*export\w*[ ]+\S", source(cell), re.M):
                found.append(f"{nb.where(cell)}: exported into another module")
    assert not found, report(found)


def test_cell_ids_are_unique(notebooks):
    found = []
    for nb in notebooks:
        ids = Counter(cell.get("id") for cell in nb.cells)
        found += [f"{nb.name}: {cell_id} stands {times} times" for cell_id, times in ids.items() if times > 1 or not cell_id]
    assert not found, report(found)


def test_imports_stand_alone(notebooks):
    "The docs build runs every cell that has an import, and none of the others: what else is in it would fail"
    found = []
    for nb in notebooks:
        for cell in nb.code_cells:
            kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in parse(cell).body}
            if kinds == {True, False} and "eval: false" not in source(cell):
                found.append(nb.where(cell))
    assert not found, report(found)


def defined(tree):
    "Names that the top level of a cell defines"
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}


def names_in_quotes(function):
    "Names in a function's quoted annotations"
    args = function.args
    notes = [arg.annotation for arg in args.posonlyargs + args.args + args.kwonlyargs] + [function.returns]
    quoted = [note.value for note in notes if isinstance(note, ast.Constant) and isinstance(note.value, str)]
    return {node.id for note in quoted for node in ast.walk(ast.parse(note)) if isinstance(node, ast.Name)}


def test_annotations_are_known_where_they_stand(notebooks):
    "The docs build asks for a function's signature right after its cell: what a later cell defines isn't there yet"
    found = []
    for nb in notebooks:
        later = set()
        for cell in reversed(nb.code_cells):
            tree = parse(cell)
            if any(name.startswith("export") for name in directives(cell)):
                for node in tree.body:
                    unknown = names_in_quotes(node) & later if isinstance(node, ast.FunctionDef) else ()
                    found += [f"{nb.name}: {node.name} names {name}" for name in sorted(unknown)]
                later |= defined(tree)
    assert not found, report(found)


# The site


def test_site_lists_every_notebook_in_order():
    text = (ROOT / "_quarto.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (\S+\.ipynb)$", text.split(sidebar.START)[1].split(sidebar.END)[0], re.M)
    names = sidebar.notebooks()
    found = [f"{name}: not in the sidebar" for name in names if name not in listed]
    found += [f"{name}: in the sidebar, but there is no such notebook" for name in listed if name not in names]
    assert not found, report(found, "run: python tools/sidebar.py")
    assert text == sidebar.rewrite(text, names), "the sidebar is not in reading order; run: python tools/sidebar.py"


def test_readme_is_as_the_index_says():
    "Text, outputs and pictures of README.md are those that index.ipynb has stored"
    found = readme.outdated(ROOT)
    assert not found, report(found, "run: make readme")


def test_readme_leads_somewhere():
    text = (ROOT / readme.README).read_text(encoding="utf-8")
    targets = [target for _, target in readme.LINK.findall(text) if not re.match("[a-z]+:", target)]
    found = [target for target in targets if not (ROOT / target).is_file()]
    assert len(targets) > len(sidebar.notebooks()) and not found, report(found)


def test_readme_keeps_examples_and_outputs():
    "What is folded or hidden on the site shows its outputs at most; links are followed from another folder"
    code = nbformat.v4.new_code_cell
    print_ = nbformat.v4.new_output("stream", text="42\n")
    progress = nbformat.v4.new_output("stream", name="stderr", text="50%")
    plot = nbformat.v4.new_output("display_data", {"image/png": "cG5n", "text/plain": "<Figure>"})
    nb = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_markdown_cell("[a](02_b.ipynb#c) `LICENSE`\n\n```\n[a](b) `LICENSE`\n```"),
        code("#| hide\nsecret()", outputs=[print_]),
        code("#| code-fold: true\ntable()", outputs=[print_, progress]),
        code("answer()", outputs=[plot]),
    ])
    cells, images = readme.selected(nb)
    assert [cell.source for cell in cells[1:]] == ["```text\n42\n```", "```python\nanswer()\n```", "![answer](images/answer.png)"]
    assert images == {"nbs/images/answer.png": b"png"}
    shown = readme.to_readme(cells[0].source)
    assert shown == "[a](nbs/02_b.ipynb) [LICENSE](LICENSE)\n\n```\n[a](b) `LICENSE`\n```"
    assert readme.to_readme("![x](images/x.png) [s](https://x.org/a.ipynb)") == "![x](nbs/images/x.png) [s](https://x.org/a.ipynb)"


def test_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[([^\]]+)\]", text, re.M)
    assert next(version for version in versions if version != "Unreleased") == __version__


def test_contributing_maps_every_module(notebooks):
    "The architecture map names each exported module and the number of its notebook"
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"(\d\d) ([\w.]+)", text.split("```mermaid")[1].split("```")[0]))
    exported = {(nb.name[:2], nb.default_exp) for nb in notebooks if nb.default_exp}
    found = [f"{number} {name}: not on the map" for number, name in sorted(exported - drawn)]
    found += [f"{number} {name}: on the map, but there is no such notebook" for number, name in sorted(drawn - exported)]
    assert not found, report(found)


def test_nbdev_and_quarto_read_one_config():
    assert os.readlink(ROOT / "nbs" / "_quarto.yml") == "../_quarto.yml"


def test_signatures_have_no_links():
    link = "[`plan`](https://example.invalid/x.html#plan)"
    lines = ["### f\n", "```python\n", f"def f(a, # {link} of a\n", ")\n", "```\n", f"*{link}, and so on*"]
    cell = {"outputs": [{"data": {"text/markdown": lines}}]}
    _nbdocs.plain_signatures(cell)
    plain = cell["outputs"][0]["data"]["text/markdown"]
    assert plain[2] == "def f(a, # `plan` of a\n" and plain[:2] + plain[3:] == lines[:2] + lines[3:]


def test_kernels_show_their_own_signature():
    from minivllm.kernels.decode import add_hints, divide_work
    shown = {f: _nbdocs.KernelRenderer(f)._repr_markdown_() for f in (add_hints, divide_work)}
    assert "### divide_work" in shown[divide_work] and "num_programs, TILE:constexpr" in shown[divide_work]
    assert "This program's share" in shown[divide_work]
    assert "ptx:str, # of a kernel" in shown[add_hints]


@pytest.mark.slow
def test_site_builds(copy):
    python("tools/build_docs.py", "--out", "site", cwd=copy, timeout=1200)
    assert (copy / "site" / "index.html").exists()
    assert not [page.name for page in (copy / "site").glob("*.html") if "Call self as a function" in page.read_text(encoding="utf-8")]


# What must not leak


def text_of(path):
    "The text of a file: of a notebook, its cells and outputs without the pictures"
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith('"image/'))


def test_no_paths_of_one_machine():
    somebody = r"home/(?!you|someone)\w+"
    places = re.compile(rf"(?<![\w.~$}}])/(?:work|root|{somebody}|tmp/venv|tmp/ipykernel_\d+)/[\w.]+")
    found = []
    for name in tracked():
        if name.suffix in {".py", ".ipynb", ".md", ".ini", ".yml", ".toml", ".txt", ".json", ".css", ""}:
            found += [f"{name}: {place}" for place in sorted(set(places.findall(text_of(ROOT / name))))]
    assert not found, report(found)
