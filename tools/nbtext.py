"""Notebooks as plain text and back, for editing in any editor; the notebook stays the committed source.

    python tools/nbtext.py to-text nbs/04_layers.layernorm.ipynb > layernorm.txt
    python tools/nbtext.py to-nb layernorm.txt nbs/04_layers.layernorm.ipynb

The text is a sequence of cells, each opened by a line that is exactly `%%% md` or `%%% code`. Cells whose source is
unchanged keep their id and their stored outputs; a new cell gets an id derived from its source.
"""
import argparse, hashlib, re, sys
from pathlib import Path

import nbformat

KINDS = {"md": "markdown", "code": "code"}
METADATA = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}


def to_text(path):
    "The notebook at `path` as text"
    short = {v: k for k, v in KINDS.items()}
    nb = nbformat.read(path, 4)
    return "\n\n".join(f"%%% {short[c.cell_type]}\n{c.source}" for c in nb.cells) + "\n"


def parse(text):
    "`(cell_type, source)` pairs of a text"
    parts = re.split(r"^%%% (md|code)[ \t]*\n", text, flags=re.M)
    if parts[0].strip(): raise ValueError("text before the first %%% line")
    return [(KINDS[k], s.strip("\n")) for k, s in zip(parts[1::2], parts[2::2])]


def new_id(source, used):
    "An id that depends on the source alone, so that writing the same text twice gives the same notebook"
    n = 0
    while (cell_id := hashlib.sha1(f"{n}{source}".encode()).hexdigest()[:8]) in used: n += 1
    return cell_id


def to_nb(text, path):
    "Write the notebook at `path` from `text`, keeping the ids and outputs of cells that did not change"
    path, old = Path(path), {}
    if path.exists():
        for c in nbformat.read(path, 4).cells: old.setdefault((c.cell_type, c.source), []).append(c)
    cells, used = [], set()
    for kind, source in parse(text):
        kept = old.get((kind, source))
        if kept: cell = kept.pop(0)
        else:
            cell = nbformat.v4.new_markdown_cell(source) if kind == "markdown" else nbformat.v4.new_code_cell(source)
            cell.id = new_id(source, used)
        used.add(cell.id)
        cell.metadata = {}
        cells.append(cell)
    nb = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
    nb.nbformat_minor = 5
    nbformat.write(nb, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=["to-text", "to-nb"])
    parser.add_argument("source"); parser.add_argument("target", nargs="?")
    args = parser.parse_args()
    if args.direction == "to-text": sys.stdout.write(to_text(args.source))
    else: to_nb(Path(args.source).read_text(), args.target)


if __name__ == "__main__": main()
