"Notebook processors and renderer for the documentation site, named in settings.ini's `procs` and `renderer`"
import re

from nbdev.showdoc import BasicMarkdownRenderer

LINKED_NAME = re.compile(r"\[(`[^`\]]+`)\]\([^)\s]+\)")


def quarto_mermaid(cell):
    "JupyterLab draws a ```mermaid block, Quarto a ```{mermaid} one"
    if cell.cell_type == "markdown":
        cell.source = re.sub(r"^```mermaid\s*$", "```{mermaid}", cell.source, flags=re.M)


def plain_signatures(cell):
    "Names in a signature's comments stand as they are: nbdev makes links of them, which in a code block is noise"
    for output in cell.get("outputs", []):
        lines = output.get("data", {}).get("text/markdown")
        if isinstance(lines, list):
            output["data"]["text/markdown"] = unlink_code(lines)


def unlink_code(lines):
    "Lines of Markdown, those in fenced blocks without links from names in backticks"
    in_fence, plain = False, []
    for line in lines:
        if line.startswith("```"):
            in_fence = not in_fence
        plain.append(LINKED_NAME.sub(r"\1", line) if in_fence else line)
    return plain


class KernelRenderer(BasicMarkdownRenderer):
    "A Triton kernel is an object that can be called with anything; what it was made of has the signature and the docstring"

    def __init__(self, sym, *args, **kwargs):
        if type(sym).__module__.startswith("triton."):
            sym = sym.fn
        super().__init__(sym, *args, **kwargs)
