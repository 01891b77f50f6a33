"""Write README.md from nbs/index.ipynb: its prose, its example code, and the outputs as they are stored.

    python tools/readme.py            # write it, and the pictures that it shows
    python tools/readme.py --check    # change nothing; exit 1 if they are out of date

Nothing is executed. Code that is hidden or folded on the site is left out, its outputs are kept.
"""
import argparse
import base64
import posixpath
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from nbformat.v4 import new_markdown_cell

ROOT = Path(__file__).parents[1]
FOLDER, SOURCE, README, IMAGES = "nbs", "nbs/index.ipynb", "README.md", "nbs/images"
NOTICE = f"<!-- Written from {SOURCE} by tools/readme.py. Change the notebook, then: make readme -->"
MAX_TABLE = 40_000  # characters; what is longer stays in the notebook

FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.M | re.S)
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
DOCUMENT = re.compile(r"`(CONTRIBUTING\.md|CHANGELOG\.md|LICENSE)`")  # the site has no pages of these, the repository has
DIRECTIVE = re.compile(r"^#\|\s*([\w-]+)(?::\s*(\w+))?.*\n?", re.M)


def at_root(target):
    "A link's target as seen from the repository's root instead of from the notebooks' folder"
    if re.match(r"[a-z]+:", target):
        return target
    path, _, anchor = target.partition("#")
    return posixpath.normpath(posixpath.join(FOLDER, path)) if path else f"#{anchor}"  # no anchors: shown notebooks have none


def to_readme(text):
    "Markdown of the notebook as it should be in README.md: links as seen from there, and documents named there as links"
    parts = FENCE.split(text)
    for i in range(0, len(parts), 2):  # those between are fenced code
        linked = LINK.sub(lambda match: f"{match[1]}({at_root(match[2])})", parts[i])
        parts[i] = DOCUMENT.sub(r"[\1](\1)", linked)
    return "".join(parts)


def of_output(output, name, images):
    "One stored output as Markdown, its picture put into `images`; what goes to stderr is progress, and left out"
    if output.output_type == "error":
        sys.exit(f"readme: a stored output of {SOURCE} is an error: {output.ename}")
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```" if output.name == "stdout" and output.text.strip() else ""
    if "text/markdown" in output.data:
        table = output.data["text/markdown"]
        whole = f"*It has {table.count(chr(10)) - 1} rows, and stands at the end of [{SOURCE}](index.ipynb).*"
        return table if len(table) <= MAX_TABLE else whole
    if "image/png" in output.data:
        images[f"{IMAGES}/{name}.png"] = base64.b64decode(output.data["image/png"])
        return f"![{name.replace('_', ' ')}](images/{name}.png)"
    return f"```text\n{output.data['text/plain'].rstrip()}\n```"


def selected(nb):
    "The cells to show: prose, code that is an example, outputs; and the bytes of each picture by its path"
    cells, images = [], {}
    for cell in nb.cells:
        if cell.cell_type != "code":
            cells.append(new_markdown_cell(cell.source))
            continue
        options = dict(DIRECTIVE.findall(cell.source))
        if "hide" in options:
            continue
        code = DIRECTIVE.sub("", cell.source).strip()
        if not {"code-fold", "echo"} & options.keys():
            cells.append(new_markdown_cell(f"```python\n{code}\n```"))
        name = re.sub(r"\W+", "_", code.splitlines()[-1]).strip("_")
        outputs = (of_output(output, name, images) for output in cell.outputs)
        cells += [new_markdown_cell(text) for text in outputs if text]
    return cells, images


def generate(root=ROOT):
    "Path -> content of all that is made from the notebook"
    nb = nbformat.read(root / SOURCE, 4)
    nb.cells, images = selected(nb)
    for cell in nb.cells:
        cell.source = to_readme(cell.source)
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return {README: f"{NOTICE}\n\n{text}\n".encode()} | images


def outdated(root=ROOT):
    "What is not as the notebook says, and pictures that it no longer has"
    files = generate(root)
    there = {path.relative_to(root).as_posix() for path in (root / IMAGES).glob("*")}
    wrong = [name for name, content in files.items() if not (root / name).is_file() or (root / name).read_bytes() != content]
    return wrong + sorted(there - files.keys())


def write(root=ROOT):
    "Bring all of it up to date"
    files = generate(root)
    for name in outdated(root):
        if name not in files:
            (root / name).unlink()
            continue
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(files[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is out of date")
    if not parser.parse_args().check:
        write()
    elif names := outdated():
        sys.exit(f"out of date: {', '.join(names)}\nrun: make readme")


if __name__ == "__main__":
    main()
